"""What the roles put on the node runs there by itself, as a job that is told by its request."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.plugins.playbooks import ROOT, run_playbook

PROGRAMS = {"acceptance": "gpu_node_accept", "quality": "gpu_node_quality"}


@pytest.mark.parametrize("role", PROGRAMS)
def test_the_program_needs_nothing_else(role: str, tmp_path: Path) -> None:
    folder = ROOT / "roles" / role
    play: dict[str, Any] = {
        "hosts": "localhost",
        "gather_facts": False,
        "vars": {"role_path": str(folder)},
        "tasks": [
            {"ansible.builtin.include_vars": {"file": str(folder / "vars/main.yml")}},
            {"serving.gpu_node.program_files": {"path": str(tmp_path), "files": f"{{{{ _{role}_program }}}}"}},
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    (tmp_path / "inventory.yml").write_text(
        json.dumps({"all": {"hosts": {"localhost": {"ansible_connection": "local"}}}})
    )
    counts, output = run_playbook(tmp_path, tmp_path / "inventory.yml", tmp_path / "play.yml")
    assert counts["localhost"]["failed"] == 0, output
    done = subprocess.run(
        [sys.executable, "-m", PROGRAMS[role]],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "program")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "usage: python3 -m" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("role", PROGRAMS)
def test_another_request_is_another_job(role: str) -> None:
    """A run that was interrupted goes on there; its report must not answer a run that asks for something else."""
    tasks = yaml.safe_load((ROOT / "roles" / role / "tasks/run.yml").read_text())
    values = yaml.safe_load((ROOT / "roles" / role / "vars/main.yml").read_text())
    (job,) = [task["serving.gpu_node.follow"] for task in tasks if "serving.gpu_node.follow" in task]
    assert job["argv"] == f"{{{{ _{role}_command }}}}"
    assert job["inputs"] == [next(word for word in values[f"_{role}_command"] if "request" in word)]
