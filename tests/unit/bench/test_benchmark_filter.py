"""What the role asks the program for: made of the plan, the node's state and its releases."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.filter.benchmark import FilterModule
from ansible_collections.serving.gpu_node.plugins.module_utils.release import release_of
from gpu_node_bench import request

from tests.unit.bench.reports import eight_card_report, two_card_report
from tests.unit.plugins.samples import resolved

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


def test_the_play_is_told_what_is_invalid_unsteady_and_worse() -> None:
    report = eight_card_report()
    report["comparison"] = {
        "rows": [
            {"id": "a/decode/code", "verdict": "worse", "old": 276.0, "new": 200.0, "unit": "tok/s", "change": -0.2754},
            {"id": "a/decode/math", "verdict": "same", "old": 1.0, "new": 1.0, "unit": "tok/s", "change": 0.0},
        ]
    }
    found = FILTERS["benchmark_summary"](report)
    assert len(found["invalid"]) == 2
    assert "replica 1/decode/prose: ended early" in found["invalid"][0]
    assert "replica 0/decode/math: 3 runs differ" in found["unsteady"][0]
    assert found["worse"] == ["a/decode/code: 276 before, 200 tok/s now (-27.5%)"]
    assert FILTERS["benchmark_summary"](two_card_report())["worse"] == []
