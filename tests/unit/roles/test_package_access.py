"""What the role package_access does on a node, with stand-ins for the node's commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.plugins.playbooks import run_playbook


def wait(folder: Path, *arguments: str) -> str:
    """Run the tasks that wait for a first boot's end; return what was printed."""
    play = {
        "hosts": "here",
        "gather_facts": False,
        "environment": {"PATH": f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin"},
        "tasks": [
            {
                "ansible.builtin.include_role": {
                    "name": "serving.gpu_node.package_access",
                    "tasks_from": "wait_for_first_boot",
                }
            }
        ],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": local}}}))
    counts, output = run_playbook(folder, folder / "hosts.yml", folder / "play.yml", *arguments)
    assert (counts["here"]["failed"], counts["here"]["changed"]) == (0, 0), output
    return output


@pytest.mark.parametrize(
    ("status", "said"), [(0, False), (1, False), (2, False), (124, True)], ids=["done", "error", "degraded", "hangs"]
)
def test_a_first_boot_is_waited_for_and_not_judged(tmp_path: Path, status: int, said: bool) -> None:
    program = tmp_path / "cloud-init"
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\nexit {status}\n')
    program.chmod(0o755)
    output = wait(tmp_path, "--check")
    assert (tmp_path / "calls").read_text() == "status --wait\n"
    assert ("cloud-init has not ended after 600 s" in output) == said


def test_a_node_without_cloud_init_is_not_held_up(tmp_path: Path) -> None:
    assert "has not ended" not in wait(tmp_path)
