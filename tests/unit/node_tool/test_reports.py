"""What the node says of itself: history, releases, status and its drift, metrics."""

import json
import re
from typing import Any

import pytest
from gpu_node import cli, files, history, metrics, prober, releases, status
from gpu_node.config import linked_release
from gpu_node.errors import ConfigError
from gpu_node.live import LiveNode
from gpu_node.switch import Journal, switch
from gpu_node.unit import UnitSteps
from gpu_node.wanted import parse_wanted
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import Became, FakeTool, Killed, World
from tests.unit.node_tool.test_rollout import ID, roll_out, want


def do(world: World, name: str = "B") -> Journal:
    journal = switch(LiveNode(world.tool()), 0, world.releases[0, name])
    assert journal is not None
    return journal


def rows(world: World) -> list[dict[str, Any]]:
    return status.rows(world.tool())


def gpu_node(world: World, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    class PlayedTool(FakeTool):
        pass

    PlayedTool.world = world
    monkeypatch.setattr(cli, "Tool", PlayedTool)
    assert cli.run(arguments, world.paths, world) == 0
    return world.said[-1]


# -- history ----------------------------------------------------------------------------------------------------------


def test_a_line_for_each_switch(world: World) -> None:
    want(world)
    roll_out(world)
    world.bad_releases.add(world.releases[0, "C"])
    do(world, "C")
    lines = history.read(world.paths)
    assert [(line["replica"], line["outcome"], line["rollout"]) for line in lines] == [
        (0, "new", ID), (1, "new", ID), (0, "rolled_back", None),
    ]  # fmt: skip
    first, last = lines[0], lines[-1]
    assert (first["by"], last["by"]) == ("alice@ctl", "test")
    assert (first["from"], first["to"]) == (world.releases[0, "A"], world.releases[0, "B"])
    assert first["tokens_per_s"] == {"before": 100.0, "after": 100.0} and first["error"] == ""
    assert {"drain", "measure", "stop", "point", "start", "gate", "in"} == set(first["seconds"])
    assert first["seconds"]["drain"] > 0
    assert first["changed"] == ["env.NAME: A -> B", "model.name: model-A -> model-B"]
    assert last["error"] and last["at"].endswith("+00:00") and last["current"] == world.releases[0, "B"]


def test_killed_after_its_line_it_writes_no_second_one(world: World) -> None:
    node = LiveNode(world.tool())
    real = node.save

    def save(index: int, journal: Journal) -> None:
        if journal.outcome is not None:
            raise Killed
        real(index, journal)

    node.save = save  # type: ignore[method-assign]
    with pytest.raises(Killed):
        switch(node, 0, world.releases[0, "B"])
    do(world)
    assert len(history.read(world.paths)) == 1


def test_a_line_that_was_cut_off(world: World) -> None:
    files.append_line(world.paths.history, '{"replica": 0}')
    with world.paths.history.open("a") as stream:
        stream.write('{"replica": 1, "from')
    files.append_line(world.paths.history, '{"replica": 2}')
    assert [line["replica"] for line in history.read(world.paths)] == [0, 2]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({"args": {"max-num-seqs": 4}}, {"args": {"max-num-seqs": 8}}, "args.max-num-seqs: 4 -> 8"),
        ({"a": {"b": 1}}, {"a": {}}, "a.b: 1 -> (not there)"),
        ({"a": None}, {"a": False}, "a: null -> false"),
        ({"l": ["--memory", "3g"]}, {"l": ["--memory", "4g"]}, 'l: ["3g"] -> ["4g"]'),
        ({"l": ["a", "a"]}, {"l": ["a"]}, 'l: ["a"] -> (nothing)'),
        ({"l": ["a", "b"]}, {"l": ["b", "a"]}, "l: (another order) -> (another order)"),
        ({"t": "x" * 500}, {"t": "y"}, f"t: {'x' * 157}... -> y"),
    ],
)  # fmt: skip
def test_what_changed(old: Any, new: Any, says: str) -> None:
    assert history.changes(old | {"id": "1", "files": {"x": "1"}}, new | {"id": "2", "files": {}}) == [says]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.dictionaries(st.text(max_size=3), VALUES, max_size=3)
)
def test_any_change(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert history.changes(old, old) == []
    history.changes(old, new)


def test_a_release_that_is_gone_changes_nothing_that_is_known(world: World) -> None:
    line = history.entry(world.paths, 0, Journal("0" * 12, world.releases[0, "B"], "in", outcome="new"), "", None, "me")
    assert line["changed"] == []


def test_history_verb(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_node(world, monkeypatch, "history") == "no switch so far"
    for name in "BCB":
        do(world, name)
    assert len(json.loads(gpu_node(world, monkeypatch, "history", "--json"))) == 3
    (last,) = json.loads(gpu_node(world, monkeypatch, "history", "--json", "-n", "1"))
    assert last["to"] == world.releases[0, "B"]
    text = gpu_node(world, monkeypatch, "history", "-n", "1")
    assert f"replica 0: {world.releases[0, 'C']} -> {world.releases[0, 'B']}: new after" in text
    assert "100.0 tokens/s after (by hand, test)" in text
    assert "    model.name: model-C -> model-B" in text
    assert json.loads(gpu_node(world, monkeypatch, "history", "--json", "-n", "0")) == []


# -- releases ---------------------------------------------------------------------------------------------------------


def test_releases_verb(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    do(world)
    manifest = {"created": "2026-12-01T08:30:12+00:00", "by": "alice@ctl"}
    (world.paths.release(world.releases[0, "B"]) / "manifest.json").write_text(json.dumps(manifest))
    (world.paths.release(world.releases[1, "C"]) / "release.json").write_text("nonsense")
    (world.paths.releases / ".incoming-0123456789ab").mkdir()
    table = {row["id"]: row for row in json.loads(gpu_node(world, monkeypatch, "releases", "--json"))}
    assert set(table) == set(world.releases.values())
    assert table[world.releases[0, "B"]] == {
        "id": world.releases[0, "B"], "replica": 0, "created": "2026-12-01T08:30:12+00:00", "by": "alice@ctl",
        "model": "model-B cdcdcdcdcdcd", "image": "localhost/gpu-node/vllm-cpu:1 abababababab",
        "used_by": ["current of 0"],
    }  # fmt: skip
    assert table[world.releases[0, "A"]]["used_by"] == ["previous of 0"]
    assert (table[world.releases[0, "A"]]["created"], table[world.releases[1, "C"]]["model"]) == (None, None)
    heading = gpu_node(world, monkeypatch, "releases").splitlines()[0]
    assert re.split(r"  +", heading) == list(releases.COLUMNS.values())


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_of_a_rollout(world: World) -> None:
    want(world)
    first, second = rows(world)
    assert first["differs"] and second["differs"] and not first["drift"]
    assert first["rollout"]["target"] == world.releases[0, "B"] and first["rollout"]["state"] == "staged"
    assert not {"targets", "before"} & set(first["rollout"])
    roll_out(world)
    assert [row["differs"] for row in rows(world)] == [False, False] and not rows(world)[0]["drift"]
    assert rows(world)[1]["running"] == world.releases[1, "B"]


def test_replica_that_only_the_operator_keeps_out_does_not_differ(world: World) -> None:
    want(world, "A")
    world.tool().membership.take_out(0, "operator", "test")
    assert not rows(world)[0]["differs"]
    world.tool().membership.take_out(0, "rollout", "test")
    assert rows(world)[0]["differs"]
    world.stop_unit(1)
    assert rows(world)[1]["differs"] and rows(world)[1]["running"] is None


def _by_hand(world: World) -> None:
    want(world)
    roll_out(world)
    do(world, "C")


def _other_container(world: World) -> None:
    world.units[0].running = world.releases[0, "C"]


def _edited(world: World) -> None:
    (world.paths.release(world.releases[0, "A"]) / "engine.yaml").write_text("changed")


def _disabled(world: World) -> None:
    world.units[0].enabled = "disabled"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_by_hand, f"but rollout {ID} by alice@ctl wanted"),
        (_other_container, "runs, but `current` is"),
        (_edited, "it was changed; run the playbook again"),
        (_disabled, "its unit is disabled, so it does not start at boot"),
    ],
)
def test_drift(world: World, spoil: Any, says: str) -> None:
    assert rows(world)[0]["drift"] == []
    spoil(world)
    (sentence,) = rows(world)[0]["drift"]
    assert says in sentence and rows(world)[1]["drift"] == []
    assert f"replica 0: {sentence}" in status.as_text(world.tool(), rows(world)).splitlines()


def test_status_says_what_goes_on(world: World) -> None:
    want(world, state="running", step="replica 0: drain")
    files.atomic_write(world.paths.held, json.dumps({"rollout": ID, "by": "alice@ctl", "since": "now"}))
    lines = status.as_text(world.tool(), rows(world)).splitlines()
    assert f"rollout {ID} by alice@ctl: running, replica 0: drain" in lines
    assert f"replica 0: does not serve {world.releases[0, 'B']}, which is wanted" in lines
    assert lines[-1] == f"this node is stopped as a whole since now: `gpu-node rollout {ID}`"


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"rollout": "x", "by": "y", "state": "lost"}'])
def test_damaged_record_does_not_hide_the_node(world: World, text: str) -> None:
    world.paths.wanted.write_text(text)
    with pytest.raises(ConfigError, match=r"wanted\.json"):
        parse_wanted(text, "wanted.json")
    assert rows(world)[0]["rollout"] is None and "wanted.json" in world.warned[0]
    metrics.write(world.tool())


@pytest.mark.parametrize("targets", [None, {"0": None}, {"x": "a" * 12}, {"0": "../../etc"}, {"0": 5}])
def test_targets_of_a_record_are_checked(world: World, targets: Any) -> None:
    want(world, targets=targets)
    with pytest.raises(ConfigError, match="expected release ids by replica"):
        parse_wanted(world.paths.wanted.read_text(), "wanted.json")


@given(st.text())
def test_any_record(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_wanted(text, "wanted.json")


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics(world: World) -> None:
    want(world)
    roll_out(world)
    world.tool().membership.take_out(1, "operator", "test")
    prober.probe_once(world.tool())
    text = world.paths.metrics.read_text()
    release = world.releases[0, "B"]
    made_of = 'model="model-B",model_digest="cdcdcdcdcdcd",image="abababababab"'
    assert f'gpu_node_release_info{{replica="0",release="{release}",{made_of}}} 1' in text
    assert 'gpu_node_replica_in{replica="0"} 1' in text and 'gpu_node_replica_in{replica="1"} 0' in text
    assert 'gpu_node_out_reason{replica="1",reason="operator"} 1' in text
    assert f'gpu_node_rollout_info{{rollout="{ID}",state="done"}} 1' in text
    since = re.search(r'gpu_node_release_since_seconds\{replica="0"\} (\d+)', text)
    link = world.paths.replica(0) / "current"
    assert since is not None and abs(int(since[1]) - link.lstat().st_mtime) <= 1
    assert world.paths.metrics.stat().st_mode & 0o777 == 0o644
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+\{(\w+="[^"]*",?)*\} \d+', line), line


def test_metrics_say_what_runs(world: World) -> None:
    """The link is another one already while the container is the old one's."""
    steps = UnitSteps(world.tool(), 0)
    with pytest.raises(Became):
        steps.run()
    LiveNode(world.tool()).point(0, "current", world.releases[0, "C"])
    assert f'release="{world.releases[0, "A"]}"' in metrics.render(metrics.samples(world.tool()))
    steps.cleanup()
    assert not world.paths.running(0).exists()


def test_metrics_of_a_node_without_releases(world: World) -> None:
    for index in world.units:
        world.stop_unit(index)
        (world.paths.replica(index) / "current").unlink()
        assert linked_release(world.paths, index, "current") is None
    text = metrics.render(metrics.samples(world.tool()))
    assert "release_info" not in text and 'gpu_node_replica_in{replica="0"} 0' in text


def test_labels_are_escaped() -> None:
    text = metrics.render([("gpu_node_rollout_info", {"rollout": 'a"b\\c\nd', "state": "done"}, 1)])
    assert 'rollout="a\\"b\\\\c\\nd"' in text and text.count("\n") == 3
