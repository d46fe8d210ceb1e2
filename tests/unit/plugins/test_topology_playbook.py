"""`playbooks/topology.yml` and the role's file: what is saved on the controller, and that a file needs no node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.topology_file import load_topology

from tests.unit.plugins.playbooks import ROOT, run_playbook

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
# An address for documentation: nothing answers there, so that a connection would fail.
INVENTORY: dict[str, Any] = {
    "gpu_nodes": {
        "hosts": {
            "here": {"ansible_connection": "local", "ansible_become": False},
            "away": {"ansible_host": "192.0.2.1"},
        },
        "vars": {"ansible_python_interpreter": sys.executable, "ansible_timeout": 2},
    }
}
SHOW = """
- hosts: gpu_nodes
  gather_facts: false
  become: true
  tasks:
    - ansible.builtin.import_role:
        name: serving.gpu_node.topology
    - ansible.builtin.copy:
        content: "{{ topology_result | ansible.builtin.to_json }}"
        dest: "{{ answer }}"
        mode: "0644"
      delegate_to: localhost
      become: false
"""


def play(folder: Path, playbook: Path, *arguments: str) -> tuple[dict[str, int], str]:
    """Run a playbook on one of the hosts; return the counts of its recap and everything it printed."""
    inventory = folder / "hosts.yml"
    inventory.write_text(yaml.safe_dump(INVENTORY))
    counts, output = run_playbook(folder, inventory, playbook, *arguments)
    return next(iter(counts.values())), output


def test_a_topology_is_saved_once_and_is_what_plans_take(tmp_path: Path) -> None:
    saved = tmp_path / "topologies" / "here.yml"
    counts, output = play(tmp_path, ROOT / "playbooks/topology.yml", "-l", "here", "--check", "--diff")
    assert counts["failed"] == 0, output
    assert counts["changed"] == 2
    assert not saved.parent.exists()
    counts, output = play(tmp_path, ROOT / "playbooks/topology.yml", "-l", "here")
    assert (counts["changed"], counts["failed"]) == (2, 0), output
    topology = load_topology(saved.read_text())
    assert topology["cpus"]
    assert "listeners" not in yaml.safe_load(saved.read_text())
    counts, output = play(tmp_path, ROOT / "playbooks/topology.yml", "-l", "here")
    assert (counts["changed"], counts["failed"]) == (0, 0), output


def test_a_file_stands_in_for_a_node_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "show.yml").write_text(SHOW)
    (tmp_path / "topo.txt").write_text((FIXTURES / "topo_5gpu_gpu0_on_numa1.txt").read_text())
    answers = {}
    for host, extra in {"here": "", "away": "topo.txt"}.items():
        answers[host] = tmp_path / f"{host}.json"
        counts, output = play(
            tmp_path, tmp_path / "show.yml", "-l", host, "-e", f"topology_file={extra}", "-e", f"answer={answers[host]}"
        )
        assert (counts["failed"], counts["unreachable"]) == (0, 0), output
    here, away = (json.loads(answers[host].read_text()) for host in ("here", "away"))
    assert [gpu["numa_node"] for gpu in away["topology"]["gpus"]] == [1, 0, 0, 0, 0]
    # whoever reads the result sees no difference in its shape
    assert set(away) == set(here)
    assert set(away["topology"]) == set(here["topology"])


def test_the_text_of_nvidia_smi_becomes_a_file(tmp_path: Path) -> None:
    text = (FIXTURES / "topo_8x_rtxpro6000d_pix_node_sys.txt").read_text()
    (tmp_path / "topo.txt").write_text(text)
    arguments = ("-l", "away", "-e", "topology_file=topo.txt", "-e", "topology_save_dir=made")
    counts, output = play(tmp_path, ROOT / "playbooks/topology.yml", *arguments)
    assert counts["failed"] == 0, output
    assert load_topology((tmp_path / "made/away.yml").read_text()) == load_topology(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nothing.yml", None, "there is no file"),
        ("wrong.yml", "schema: 1\ncpus: 8\ngpus: []\n", "cpus: 8 is not a list; write [] for none"),
    ],
)
def test_a_file_that_is_none_is_refused_before_anything_runs(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    counts, output = play(tmp_path, ROOT / "playbooks/topology.yml", "-l", "away", "-e", f"topology_file={name}")
    assert (counts["failed"], counts["unreachable"], counts["changed"]) == (1, 0, 0)
    assert (
        f"topology_file: there is no file {tmp_path / name}" in output or f"topology_file: {tmp_path / name}" in output
    )
    assert message in output
    assert "Traceback" not in output
