"""What the role asks the program for: made of the plan, the node's state and its releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.filter.benchmark import FilterModule
from ansible_collections.serving.gpu_node.plugins.module_utils.benchmark import node_picture
from ansible_collections.serving.gpu_node.plugins.module_utils.release import release_of
from gpu_node_bench import baselines, request
from gpu_node_bench.figures import invalid

from tests.unit.bench.reports import eight_card_report, two_card_report
from tests.unit.plugins.samples import intent, resolved

FILTERS = FilterModule().filters()
PARTS = ["decode", "first", "levels"]


def made(name: str, parts: list[str] | None = None, **row: Any) -> dict[str, Any]:
    plan = resolved(name=name)
    releases = [release_of(plan, replica) for replica in plan["replicas"]]
    status = [
        {"index": one["replica"], "release": one["id"], "state": "active", "out": [], "differs": False}
        for one in releases
    ]
    status[-1] |= row
    found: dict[str, Any] = FILTERS["benchmark_request"](
        "gpu-node", plan, status, releases, {"runs": 3}, parts or PARTS
    )
    return found


@pytest.mark.parametrize(("name", "replicas"), [("cpu", 2), ("2x", 1), ("8x", 2)])
def test_every_replica_by_itself_and_then_the_node(name: str, replicas: int) -> None:
    found = made(name)["request"]
    wanted = request.parse(json.loads(json.dumps(found)))
    assert [target.kind for target in wanted.targets] == ["replica"] * replicas + ["balancer"]
    assert [target.url for target in wanted.targets[:-1]] == [f"http://127.0.0.1:{8000 + at}" for at in range(replicas)]
    assert wanted.targets[-1].metrics == tuple(target.url for target in wanted.targets[:-1])
    assert wanted.targets[-1].parts == ("levels",)
    assert wanted.targets[0].key_file == "/etc/gpu-node/secrets/engine.env"
    assert wanted.targets[-1].key_file == "/etc/gpu-node/secrets/clients.json"
    assert len(wanted.release.split("-")) == replicas
    assert wanted.generator
    assert wanted.generator.model_folder.startswith("/var/lib/gpu-node/artifacts/")
    assert wanted.generator.tokenizer_mode == {"cpu": "", "2x": "deepseek_v4", "8x": "deepseek_v41"}[name]
    assert sum(len(target.gpus) for target in wanted.targets[:-1]) == {"cpu": 0, "2x": 2, "8x": 8}[name]


def test_without_levels_the_balancer_is_left_out() -> None:
    assert [target["kind"] for target in made("cpu", ["decode"])["request"]["targets"]] == ["replica", "replica"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"state": "failed"}, "replica 1 is failed, not active"),
        ({"out": ["operator"]}, "replica 1 is out of the balancer (operator)"),
        ({"differs": True}, "replica 1 does not serve what it should yet"),
    ],
)
def test_a_node_that_is_not_whole_is_not_measured(row: dict[str, Any], words: str) -> None:
    (problem,) = made("8x", **row)["problems"]
    assert words in problem


def test_a_node_without_replicas_is_not_measured() -> None:
    assert FILTERS["benchmark_request"]("n", resolved(), [], [], {}, PARTS) == {
        "request": {},
        "problems": ["the node has no replicas: run site.yml first"],
    }


def test_the_play_is_told_what_is_invalid_and_what_is_worse() -> None:
    report = eight_card_report()
    report["comparison"] = {
        "old": {},
        "rows": [
            {"id": "a/decode/code", "verdict": "worse", "old": 276.0, "new": 200.0, "unit": "tok/s", "change": -0.2754},
            {"id": "a/decode/math", "verdict": "same", "old": 1.0, "new": 1.0, "unit": "tok/s", "change": 0.0},
        ],
    }
    found = FILTERS["benchmark_summary"](report)
    assert len(found["invalid"]) == 3
    assert "replica 0/decode/math: the runs differ" in found["invalid"][0]
    assert "replica 1/decode/prose: ended early" in found["invalid"][1]
    assert found["worse"] == ["a/decode/code: 276 before, 200 tok/s now (-27.5%)"]
    assert FILTERS["benchmark_summary"](two_card_report()) == {
        "figures": 24, "invalid": [], "worse": [], "compared": False, "not_compared": [],
    }  # fmt: skip


def test_the_play_is_told_what_both_have_and_is_not_compared(tmp_path: Path) -> None:
    """What one of the two was not asked for is no such figure."""
    old, new = two_card_report(), two_card_report()
    invalid(new["figures"][0], "ended early")
    new["figures"][1]["method"]["tokens_long"] = 448
    old["figures"] = [one for one in old["figures"] if one["kind"] != "load"]
    new["figures"] = [one for one in new["figures"] if one["kind"] != "first_token"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    new["comparison"] = baselines.comparison(new, tmp_path / "old.json")
    found = FILTERS["benchmark_summary"](new)
    assert found["compared"]
    assert found["not_compared"] == [
        "replica 0/decode/code: new: invalid: ended early",
        "replica 0/decode/prose: measured in different ways: tokens_long 896 and 448",
    ]
    new["unusable_baselines"] = ["x.json is not JSON"]
    assert FILTERS["benchmark_summary"](new)["not_compared"][-1] == "x.json is not JSON"


@pytest.mark.parametrize("name", ["cpu", "2x", "8x"])
@pytest.mark.parametrize("state", ["intent", "resolved"])
def test_the_report_shows_the_plan_only_where_it_is_of_what_serves(name: str, state: str) -> None:
    serving = resolved({"max_num_seqs": 32}, name=name)
    releases = [release_of(serving, replica) for replica in serving["replicas"]]
    make = intent if state == "intent" else resolved
    same = node_picture(make({"max_num_seqs": 32}, name=name), releases)
    assert (same["notes"], same["changed_settings"]) == ([], {"max_num_seqs": 32})
    assert same["budgets"]
    other = node_picture(make(name=name), releases)
    (note,) = other["notes"]
    assert f"replica 0 serves release {releases[0]['id']}" in note
    assert (other["changed_settings"], other["budgets"]) == ({}, [])
    assert other["engine_args"]["max-num-seqs"] == 32


def test_a_replica_that_the_plan_no_longer_has_is_told() -> None:
    serving = resolved()
    releases = [release_of(serving, replica) for replica in serving["replicas"]]
    (note,) = node_picture(resolved({"replicas": 1}), releases)["notes"]
    assert "replica 1 serves release" in note


def test_levels_are_for_each_replica_and_end_where_it_has_no_more_sequences() -> None:
    two, eight = made("2x")["request"]["targets"], made("8x")["request"]["targets"]
    assert [(one["kind"], one.get("replicas", 1), one["max_num_seqs"]) for one in two] == [
        ("replica", 1, 64), ("balancer", 1, 64),
    ]  # fmt: skip
    assert [(one["kind"], one.get("replicas", 1), one["max_num_seqs"]) for one in eight] == [
        ("replica", 1, 128), ("replica", 1, 128), ("balancer", 2, 128),
    ]  # fmt: skip


def test_a_replica_is_measured_with_an_eye_on_the_nodes_others() -> None:
    targets = made("8x")["request"]["targets"]
    assert [one.get("neighbours") for one in targets] == [["http://127.0.0.1:8001"], ["http://127.0.0.1:8000"], None]
    # and on what the prober asks which of them
    files = [f"/run/gpu-node/{index}/probe.json" for index in (0, 1)]
    assert [one["proofs"] for one in targets] == [files[:1], files[1:], files]
    assert [one.get("neighbours_proofs") for one in targets] == [files[1:], files[:1], None]
