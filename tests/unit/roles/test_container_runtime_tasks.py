"""What the role container_runtime does with the cards that a driver tells: its tasks, with a stand-in for reading."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.plugins.playbooks import run_playbook
from tests.unit.roles.test_nvidia_driver_tasks import CARDS, ROOT, lay_out_modules, machine, plan


def name_gpus(folder: Path, answers: dict[str, dict[str, Any]]) -> tuple[dict[str, int], str]:
    """Name the plan's cards, which nobody had told when it was made; return the recap's counts and what was printed."""
    collection = folder / "collections/ansible_collections/serving/gpu_node"
    lay_out_modules(folder, collection, answers)
    (collection / "roles").mkdir()
    (collection / "roles/container_runtime").symlink_to(ROOT / "roles/container_runtime")
    before = {"topology": {"gpus": [{"pci_address": card, "uuid": ""} for card in CARDS]}}
    role = {"name": "serving.gpu_node.container_runtime", "tasks_from": "name_gpus"}
    facts = {"serving_plan_result": plan(*CARDS), "topology_result": before}
    tasks = [{"ansible.builtin.include_role": role, "vars": facts}]
    (folder / "play.yml").write_text(
        yaml.safe_dump([{"hosts": "here", "gather_facts": False, "tasks": tasks}], sort_keys=False)
    )
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": local}}}))
    counts, output = run_playbook(folder, folder / "hosts.yml", folder / "play.yml", collections=folder / "collections")
    return counts["here"], output


@pytest.mark.parametrize(
    ("loaded", "lost", "fails"),
    [("590.48.01", [], False), ("590.48.01", [CARDS[1]], True), ("", CARDS, False)],
    ids=["every card", "one did not come up", "no driver is loaded"],
)
def test_a_card_that_did_not_come_up_with_a_loaded_driver_is_refused(
    tmp_path: Path, loaded: str, lost: list[str], fails: bool
) -> None:
    # DRV-01: with one card missing no card at all was tried, and the run ended well
    counts, output = name_gpus(tmp_path, machine(loaded, *lost))
    assert counts["failed"] == int(fails), output
    assert ("Driver 590.48.01 is loaded, and 0000:41:00.0 of the plan did not come up with it" in output) == fails
