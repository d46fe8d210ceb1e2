"""A rollout on one node: to its end, stopped by each gate, killed anywhere and run again; and the node that leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_node import cli, files, history
from gpu_node.config import linked_release
from gpu_node.engine import Metrics
from gpu_node.errors import ConfigError, LockedError, RefusedError
from gpu_node.live import LiveNode
from gpu_node.rollout import Rollout
from gpu_node.switch import switch

from tests.unit.node_tool.fakes import FakeTool, Killed, World

ID = "20261201T083012Z-alice-4711"
OTHER = "20261201T090000Z-bob-1"


def want(world: World, name: str = "B", rollout: str = ID, **changes: Any) -> None:
    """What the controller's claim writes before the job starts."""
    targets = {str(index): world.releases[index, name] for index in world.units}
    value = {
        "schema": 1, "rollout": rollout, "by": "alice@ctl", "controller": {"host": "ctl", "pid": 1, "started": "now"},
        "since": "2026-12-01T08:30:12+00:00", "renewed": 1.0, "state": "staged", "step": "", "error": "",
        "outcome": None, "targets": targets, "back_of": None,
        "before": {str(index): linked_release(world.paths, index, "current") for index in world.units},
    } | changes  # fmt: skip
    files.atomic_write(world.paths.wanted, json.dumps(value))


def record(world: World) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(world.paths.wanted.read_text())
    return value


def roll_out(world: World, bake_s: float = 0, budget: float = 0, force_drain: bool = False, rollout: str = ID) -> int:
    return Rollout(world.tool(), rollout, force_drain).run(bake_s, budget)


def leave(world: World, force_drain: bool = False) -> int:
    return Rollout(world.tool(), ID, force_drain).leave()


def running(world: World) -> list[str | None]:
    return [unit.running for unit in world.units.values()]


def all_of(world: World, name: str) -> list[str | None]:
    return [world.releases[index, name] for index in world.units]


def test_both_replicas_one_at_a_time(world: World) -> None:
    want(world)
    world.on_start = lambda index: None if world.inside(1 - index) else pytest.fail("both were out")
    assert roll_out(world) == 0
    assert running(world) == all_of(world, "B") and world.inside(0) and world.inside(1)
    done = record(world)
    assert (done["state"], done["error"], done["outcome"]) == ("done", "", None) and done["renewed"] > 1.0
    assert done["before"] == {"0": world.releases[0, "A"], "1": world.releases[1, "A"]}
    assert [line["to"] for line in history.read(world.paths)] == all_of(world, "B")
    assert not world.paths.leaving.exists()


def test_nothing_to_do(world: World) -> None:
    want(world, "A")
    world.commands.clear()
    assert roll_out(world, bake_s=60) == 0
    assert "every replica serves its target already: nothing to do" in world.said and record(world)["state"] == "done"
    assert not [command for command in world.commands if command[1] in ("stop", "start")]
    assert not any("baking" in line for line in world.said)


def test_first_release_of_a_node(world: World) -> None:
    """As site.yml does it: nothing serves yet, so nothing is announced, drained or compared."""
    for index in world.units:
        world.stop_unit(index)
        (world.paths.replica(index) / "current").unlink()
    want(world)
    world.said.clear()
    began = world.now
    assert roll_out(world) == 0
    assert running(world) == all_of(world, "B") and world.now - began < 5
    assert not any("leaves" in line or "tokens/s (" in line for line in world.said)
    assert [line["from"] for line in history.read(world.paths)] == [None, None]


def test_step_is_what_is_said(world: World) -> None:
    want(world)
    seen = []
    world.on_sleep = lambda: seen.append((record(world)["step"], record(world)["state"]))
    roll_out(world)
    assert {("replica 0: drain", "running"), ("replica 1: drain", "running")} <= set(seen)
    world.on_start = lambda _: seen.append((record(world)["step"], record(world)["state"]))
    world.on_sleep = lambda: None
    want(world, "A")
    roll_out(world)
    # A start's own lines, each 10 s, show that it is alive.
    assert seen[-2] == ("replica 0: loading, 10 s: weights", "running")


@pytest.mark.parametrize(
    ("bad", "code", "outcome"), [(["B"], 3, "rolled_back"), (["A", "B"], 4, "failed")], ids=["back", "out"]
)
def test_a_bad_release_stops_it(
    world: World, bad: list[str], code: int, outcome: str, capsys: pytest.CaptureFixture[str]
) -> None:
    want(world)
    world.bad_releases = {world.releases[0, name] for name in bad}
    assert roll_out(world) == code
    stopped = record(world)
    assert (stopped["state"], stopped["outcome"]) == ("failed", outcome) and stopped["error"]
    assert stopped["error"] in capsys.readouterr().err
    assert world.units[1].running == world.releases[1, "A"] and world.inside(1)
    assert world.units[0].running == (world.releases[0, "A"] if code == 3 else None)
    world.bad_releases.clear()
    assert roll_out(world) == 0
    assert running(world) == all_of(world, "B")


def test_requests_that_do_not_end_refuse_it(world: World) -> None:
    want(world)
    world.engines[0].counters = Metrics(3, 0, 1, 1, 0)
    assert roll_out(world) == 2
    assert record(world)["outcome"] == "refused" and "--force-drain" in record(world)["error"]
    assert running(world) == all_of(world, "A") and world.inside(0) and world.inside(1)
    assert roll_out(world, force_drain=True) == 0


def test_a_release_that_is_not_there_refuses_it(world: World) -> None:
    want(world, targets={"0": "0" * 12, "1": world.releases[1, "B"]})
    assert roll_out(world) == 2
    assert record(world)["outcome"] == "refused" and running(world) == all_of(world, "A")


def test_a_replica_that_the_node_does_not_have(world: World) -> None:
    want(world, targets={"7": world.releases[0, "B"]})
    with pytest.raises(ConfigError, match="there is no replica 7"):
        roll_out(world)
    assert (record(world)["state"], record(world)["outcome"]) == ("failed", "refused")


def test_a_record_that_cannot_be_written_once(world: World) -> None:
    """A full disk for a moment: the rollout goes on, and says later how far it is."""
    want(world)
    world.full = lambda path, text: path == world.paths.wanted and "replica 0: stop" in text
    assert roll_out(world) == 0
    assert record(world)["state"] == "done" and any("No space left" in line for line in world.warned)


@pytest.mark.parametrize(("step", "code", "outcome"), [("drain", 2, "refused"), ("start", 4, "failed")])
def test_a_journal_that_cannot_be_written(world: World, step: str, code: int, outcome: str) -> None:
    want(world)
    world.full = lambda path, text: path.name == "switch.json" and f'"step": "{step}"' in text
    assert roll_out(world) == code
    ended = record(world)
    assert (ended["state"], ended["outcome"]) == ("failed", outcome) and "No space left" in ended["error"]
    assert world.inside(0) == (code == 2) and world.units[1].running == world.releases[1, "A"]
    world.full = lambda *_: False
    assert roll_out(world) == 0 and running(world) == all_of(world, "B")


def test_a_damaged_journal_refuses_it(world: World) -> None:
    want(world)
    world.paths.journal(0).write_text("{")
    assert roll_out(world) == 2
    assert (record(world)["state"], record(world)["outcome"]) == ("failed", "refused")
    assert "switch.json is not a switch's journal" in record(world)["error"] and running(world) == all_of(world, "A")


def test_nginx_that_refuses_the_way_in_leaves_it_half_switched(world: World) -> None:
    want(world)

    def break_nginx(index: int) -> None:
        world.nginx_refuses = True

    world.on_start = break_nginx
    assert roll_out(world) == 4
    assert (record(world)["state"], record(world)["outcome"]) == ("failed", "failed")
    world.nginx_refuses, world.on_start = False, lambda _: None
    assert roll_out(world) == 0 and running(world) == all_of(world, "B")


def test_another_rollout_has_the_node(world: World) -> None:
    want(world, rollout=OTHER)
    with pytest.raises(RefusedError, match=f"is of rollout {OTHER} by alice@ctl, not of {ID}"):
        roll_out(world)
    world.paths.wanted.unlink()
    with pytest.raises(RefusedError, match="is missing"):
        roll_out(world)
    assert running(world) == all_of(world, "A")


def test_taken_over_meanwhile_it_ends_after_the_replica(world: World) -> None:
    want(world)
    world.on_start = lambda _: want(world, "C", OTHER)
    with pytest.raises(RefusedError, match=OTHER):
        roll_out(world)
    assert running(world) == [world.releases[0, "B"], world.releases[1, "A"]]
    assert (record(world)["rollout"], record(world)["state"]) == (OTHER, "staged")


def test_only_one_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class PlayedTool(FakeTool):
        pass

    PlayedTool.world = world
    monkeypatch.setattr(cli, "Tool", PlayedTool)
    want(world)
    refused: list[int] = []

    def try_others(index: int) -> None:
        with world._other_process():
            refused.append(cli.run(["switch", "1", world.releases[1, "C"]], world.paths, world))
            refused.append(cli.run(["rollback", "1"], world.paths, world))
            with pytest.raises(LockedError, match=f"is held by rollout {ID}"):
                roll_out(world)

    world.on_start = try_others
    assert roll_out(world) == 0
    assert refused == [2, 2, 2, 2]
    assert f"gpu-node-rollout.lock is held by rollout {ID}" in capsys.readouterr().err


def test_half_switched_replica_comes_first(world: World) -> None:
    """Killed at its second replica; the first one serves its target, and the second is no obstacle to that."""
    want(world)
    world.on_start = lambda index: world.kill_after(0) if index else None
    with pytest.raises(Killed):
        roll_out(world)
    world.on_start = lambda _: None
    assert running(world) == all_of(world, "B")
    assert roll_out(world) == 0
    assert record(world)["state"] == "done" and len(history.read(world.paths)) == 2


def test_half_switched_to_another_release(world: World) -> None:
    want(world)
    world.on_start = lambda index: world.kill_after(0) if index else None
    with pytest.raises(Killed):
        roll_out(world)
    world.on_start = lambda _: None
    want(world, "C", OTHER)
    assert roll_out(world, rollout=OTHER) == 0
    assert running(world) == all_of(world, "C")
    assert linked_release(world.paths, 1, "previous") == world.releases[1, "A"]


@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
def test_killed_at_every_effect(tmp_path: Path, bad: bool) -> None:
    effect = 0
    while True:
        with World(tmp_path / str(effect)) as world:
            want(world)
            if bad:
                world.bad_releases.add(world.releases[1, "B"])
            world.kill_after(effect)
            try:
                roll_out(world)
                break
            except Killed:
                pass
            world.kill_after(None)
            assert roll_out(world) == (3 if bad else 0)
            assert running(world) == [world.releases[0, "B"], world.releases[1, "A" if bad else "B"]]
            assert world.inside(0) and world.inside(1) and not world.paths.leaving.exists()
            lines = history.read(world.paths)
            assert lines[-1]["outcome"] == ("rolled_back" if bad else "new")
            assert len([line for line in lines if line["outcome"] == "new"]) == (1 if bad else 2)
        # Each third, from another one on in each of the two: every effect is met, in half the time.
        effect += 3
    assert effect > 60


def test_a_reboot_in_the_middle_of_a_gate(world: World) -> None:
    """What the gate found running is gone; it is started again instead of being taken for a failure."""
    want(world)
    world.on_start = lambda _: world.kill_after(0)
    with pytest.raises(Killed):
        roll_out(world)
    world.on_start = lambda _: None
    switch_journal = LiveNode(world.tool()).journal(0)
    assert switch_journal is not None and switch_journal.step == "start"
    LiveNode(world.tool()).save(0, switch_journal.__class__(**{**switch_journal.__dict__, "step": "gate"}))
    world.units[0].active, world.units[0].sub, world.units[0].running = "activating", "start-post", None
    world.stop_unit(0)
    assert roll_out(world) == 0
    assert running(world) == all_of(world, "B")


# -- the whole node ---------------------------------------------------------------------------------------------------


def test_leave_and_come_back(world: World) -> None:
    want(world, "A")
    assert leave(world) == 0
    assert running(world) == [None, None] and not world.inside(0) and not world.inside(1)
    held = json.loads(world.paths.held.read_text())
    assert (held["rollout"], held["by"], held["tokens_per_s"]) == (ID, "alice@ctl", {"0": 100.0, "1": 100.0})
    # A reboot in between starts nothing.
    world.reboot()
    assert running(world) == [None, None]
    assert roll_out(world) == 0
    assert running(world) == all_of(world, "A") and world.inside(0) and world.inside(1)
    assert not world.paths.held.exists() and not world.paths.leaving.exists()
    assert "replica 1: generates 100.0 tokens/s (100.0 before)" in world.said


def test_slower_after_it_left(world: World) -> None:
    """A driver that halves the speed is found, and there is no release to go back to."""
    want(world, "A")
    assert leave(world) == 0
    world.engines[0].tokens_per_s = 20.0
    assert roll_out(world) == 4
    assert "generates 20.0 tokens/s, the one before 100.0" in record(world)["error"]


def test_leave_announces_while_all_serve(world: World) -> None:
    want(world, "A")
    seen = []

    def look() -> None:
        if world.paths.leaving.exists() and world.inside(0) and world.inside(1):
            seen.append(world.now)

    world.on_sleep = look
    assert leave(world) == 0
    assert seen[-1] - seen[0] >= world.tool().node.announce_s - 1


def test_leave_is_refused_while_requests_run(world: World) -> None:
    want(world, "A")
    world.engines[1].counters = Metrics(2, 0, 1, 1, 0)
    assert leave(world) == 2
    assert "replica 1 is not drained: still 2 requests" in record(world)["error"]
    assert running(world) == all_of(world, "A") and world.inside(0) and world.inside(1)
    assert not world.paths.held.exists() and not world.paths.leaving.exists()
    assert leave(world, force_drain=True) == 0
    assert running(world) == [None, None]


def test_leave_with_a_broken_nginx_changes_nothing(world: World) -> None:
    want(world, "A")
    world.nginx_refuses = True
    assert leave(world) == 2
    world.nginx_refuses = False
    world.tool().membership.reconcile()
    assert running(world) == all_of(world, "A") and world.inside(0) and world.inside(1)
    assert not world.paths.held.exists()


@pytest.mark.parametrize("stuck", [0, 1])
def test_leave_with_a_unit_that_does_not_stop(world: World, stuck: int) -> None:
    """It alone stays out; the other one serves, also when it was stopped already."""
    want(world, "A")
    world.stuck.add(stuck)
    assert leave(world) == 4
    assert (record(world)["state"], record(world)["outcome"]) == ("failed", "failed")
    assert not world.inside(stuck) and world.inside(1 - stuck) and running(world) == all_of(world, "A")
    assert not world.paths.held.exists() and not world.paths.leaving.exists()
    world.stuck.clear()
    assert leave(world) == 0 and running(world) == [None, None]
    assert roll_out(world) == 0 and world.inside(0) and world.inside(1)


def test_leave_with_a_unit_that_does_not_stop_and_one_that_does_not_start(world: World) -> None:
    want(world, "A")
    world.stuck.add(1)
    world.bad_releases.add(world.releases[0, "A"])
    assert leave(world) == 4
    assert any("replica 0: vllm-replica@0.service did not start" in line for line in world.warned)
    assert "vllm-replica@1.service does not stop" in record(world)["error"] and not world.inside(0)


def test_leave_on_a_full_disk_changes_nothing(world: World) -> None:
    want(world, "A")
    world.full = lambda path, text: path == world.paths.held and "100.0" in text
    assert leave(world) == 2
    assert record(world)["outcome"] == "refused" and "No space left" in record(world)["error"]
    assert running(world) == all_of(world, "A") and world.inside(0) and world.inside(1)
    assert not world.paths.held.exists() and not world.paths.leaving.exists()


def test_nobody_switches_by_hand_on_a_node_that_left(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PlayedTool(FakeTool):
        pass

    PlayedTool.world = world
    monkeypatch.setattr(cli, "Tool", PlayedTool)
    want(world, "A")
    leave(world)
    assert cli.run(["switch", "0", world.releases[0, "B"]], world.paths, world) == 2
    assert f"run its playbook again, or `gpu-node rollout {ID}`" in capsys.readouterr().err


def test_leave_killed_at_every_effect(tmp_path: Path) -> None:
    effect = 0
    while True:
        with World(tmp_path / str(effect)) as world:
            want(world, "A")
            world.kill_after(effect)
            try:
                leave(world)
                break
            except Killed:
                pass
            world.kill_after(None)
            if effect % 2:
                assert leave(world) == 0 and running(world) == [None, None]
            assert roll_out(world) == 0
            assert running(world) == all_of(world, "A") and world.inside(0) and world.inside(1)
            assert not world.paths.held.exists() and not world.paths.leaving.exists()
        effect += 1
    assert effect > 15


def test_leave_while_a_replica_is_half_switched(world: World) -> None:
    want(world)
    world.on_start = lambda _: world.kill_after(0)
    with pytest.raises(Killed):
        roll_out(world)
    world.on_start = lambda _: None
    assert leave(world) == 0 and running(world) == [None, None]
    assert roll_out(world) == 0 and running(world) == all_of(world, "B")


def test_replica_beyond_the_targets_comes_back_too(world: World) -> None:
    want(world, targets={"0": world.releases[0, "B"]})
    assert leave(world) == 0
    assert roll_out(world) == 0
    assert running(world) == [world.releases[0, "B"], world.releases[1, "A"]] and world.inside(1)


def test_a_failed_replica_does_not_come_in_by_a_leave_that_is_refused(world: World) -> None:
    world.bad_releases |= {world.releases[0, "A"], world.releases[0, "B"]}
    switch(LiveNode(world.tool()), 0, world.releases[0, "B"])
    want(world, "A")
    world.engines[1].counters = Metrics(2, 0, 1, 1, 0)
    assert leave(world) == 2
    assert world.tool().reasons.of(0) and not world.inside(0) and world.inside(1)
