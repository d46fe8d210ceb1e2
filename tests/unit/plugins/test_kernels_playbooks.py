"""Where serve.yml has the kernels checked, and for which plans; the roles are stand-ins."""

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


@pytest.mark.parametrize(
    ("plan", "recipe", "expected"),
    [
        (WITH, "own", ["topology/main", "kernels/qualify"]),
        (WITH, "prebuilt", ["topology/main", "kernels/qualify"]),
        (WITH, "pack", ["topology/main"]),
        (GPU, "own", ["topology/main"]),
        (CPU, "own", []),
    ],
)
def test_kernels_are_checked_before_the_plan_is_completed(
    tmp_path: Path, plan: dict[str, Any], recipe: str, expected: list[str]
) -> None:
    found = calls(tmp_path, plan, recipe)
    assert found[: len(expected) + 2] == [*expected, "serving_plan/resolve", "replica/write_releases"]
