"""Where serve.yml has the kernels checked, and for which plans; the roles are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.plugins.playbooks import ROOT, run_playbook

ROLES = {
    "kernels": ["qualify"],
    "topology": ["main"],
    "serving_plan": ["resolve"],
    "replica": ["retire", "main", "switch"],
    "node_tool": ["main"],
    "balancer": ["main"],
}


def calls(folder: Path, plan: dict[str, Any], recipe: str) -> list[str]:
    """Run the playbook; return the entry points that were called, in order."""
    collection = folder / "collections/ansible_collections/serving/gpu_node"
    for role, names in ROLES.items():
        (collection / "roles" / role / "tasks").mkdir(parents=True)
        for name in names:
            task = {"ansible.builtin.debug": {"msg": f"called: {role}/{name}"}}
            (collection / "roles" / role / "tasks" / f"{name}.yml").write_text(yaml.safe_dump([task]))
    (folder / "play.yml").write_text((ROOT / "playbooks" / "serve.yml").read_text())
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    variables = {"serving_plan_result": plan, "serving_image_result": {"recipe": recipe}}
    inventory = {"gpu_nodes": {"hosts": {"here": local}, "vars": variables}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    counts, output = run_playbook(
        folder,
        folder / "hosts.yml",
        folder / "play.yml",
        "-e",
        "ansible_become=no",
        collections=folder / "collections",
    )
    assert counts["here"]["failed"] == 0, output
    return [line.partition("called: ")[2].rstrip('"') for line in output.splitlines() if "called: " in line]


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
    assert found[: len(expected) + 2] == [*expected, "serving_plan/resolve", "replica/retire"]
