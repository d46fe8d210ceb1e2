"""Where serve.yml has GPUs and kernels checked, and for which plans; the roles are stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugins.rollout_stage import PLAN, Stage


def calls(folder: Path, plan: dict[str, Any], recipe: str) -> list[str]:
    """Run the playbook; return the entry points that were called, in order."""
    stage = Stage(folder, {"here": {}})
    stage.build()
    variables = {"serving_plan_result": {**PLAN, **plan}, "serving_image_result": {"recipe": recipe}}
    counts, output = stage.run("serve", "-e", json.dumps(variables), "-e", '{"topology_result": {"topology": {}}}')
    assert counts["here"]["failed"] == 0, output
    return stage.calls("here")


WITH = {"device": "cuda", "kernels": {"wanted": {}}}
GPU = {"device": "cuda", "kernels": {}}
CPU = {"device": "cpu", "kernels": {}}
# Two GPUs have an all-reduce.
TWO = {"replicas": [{"index": 0, "release": "1" * 12, "gpus": [{}, {}]}]}
ONE = {"replicas": [{"index": 0, "release": "1" * 12, "gpus": [{}]}]}


@pytest.mark.parametrize(
    ("plan", "recipe", "expected"),
    [
        (WITH, "own", ["topology/main", "kernels/qualify"]),
        (WITH, "prebuilt", ["topology/main", "kernels/qualify"]),
        (WITH, "pack", ["topology/main"]),
        (GPU, "own", ["topology/main"]),
        (WITH | TWO, "own", ["topology/main", "acceptance/all_reduce", "kernels/qualify"]),
        (WITH | TWO, "pack", ["topology/main", "acceptance/all_reduce"]),
        (GPU | ONE, "own", ["topology/main"]),
        (CPU, "own", []),
    ],
)
def test_gpus_and_kernels_are_checked_before_the_plan_is_completed(
    tmp_path: Path, plan: dict[str, Any], recipe: str, expected: list[str]
) -> None:
    found = calls(tmp_path, plan, recipe)
    assert found[: len(expected) + 2] == [*expected, "serving_plan/resolve", "replica/write_releases"]


def test_gpus_that_do_not_add_up_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"here": {"breaks": "acceptance/all_reduce"}}, plan={**PLAN, **WITH, **TWO})
    stage.build()
    variables = {"serving_plan_result": stage.plan, "serving_image_result": {"recipe": "own"}}
    counts, output = stage.run("serve", "-e", json.dumps(variables), "-e", '{"topology_result": {"topology": {}}}')
    assert counts["here"]["failed"] == 1
    assert "acceptance/all_reduce broke" in output
    # No release, no claim, no job.
    assert stage.calls("here") == ["topology/main", "acceptance/all_reduce"]
