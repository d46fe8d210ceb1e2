"""Runs the scenario's playbook again on its node, with other variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[3]
RECAP = re.compile(r"^gpu-node\s+:.*?\bchanged=(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Play:
    rc: int
    output: str

    @property
    def changed(self) -> int:
        return int(RECAP.findall(self.output)[-1])

    @property
    def words(self) -> str:
        """The output in one line: Ansible wraps what it prints."""
        return " ".join(self.output.split())


Converge = Callable[..., Play]


@pytest.fixture(scope="session")
def converge(tmp_path_factory: pytest.TempPathFactory) -> Converge:
    """`converge(*arguments, **variables)`: the scenario's playbook on the node that it made."""
    folder = tmp_path_factory.mktemp("converge")

    def run(*arguments: str, **variables: Any) -> Play:
        extra = folder / "extra.json"
        extra.write_text(json.dumps(variables))
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
            "MOLECULE_PROJECT_DIRECTORY": str(PROJECT),
        }
        inventories = [
            "-i",
            "inventories/demo",
            "-i",
            os.environ.get("PREPARE_INVENTORY", "molecule/prepare/inventory"),
        ]
        command = [str(Path(sys.executable).parent / "ansible-playbook"), *inventories, "-e", f"@{extra}", *arguments]
        done = subprocess.run(
            [*command, "molecule/prepare/converge.yml"],
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Play(done.returncode, done.stdout)

    return run
