"""Runs the scenario's playbook, or another one, on its node, with other variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

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
    return runner("molecule/prepare/converge.yml", tmp_path_factory.mktemp("converge"))


@pytest.fixture(scope="session")
def preflight(tmp_path_factory: pytest.TempPathFactory) -> Converge:
    """`preflight(*arguments, **variables)`: the checks before any change, on the same node."""
    return runner("playbooks/preflight.yml", tmp_path_factory.mktemp("preflight"))


def runner(playbook: str, folder: Path) -> Converge:
    """Return what runs a playbook on the scenario's node."""

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
            [*command, playbook],
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


HOLD_LOCK = (
    "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    "print('held', flush=True); time.sleep({seconds})"
)


@pytest.fixture
def apt_lock(host: Host) -> Iterator[Callable[[int], int]]:
    """`apt_lock(seconds)`: have a process hold apt's lock for a while, as unattended upgrades do; returns its id."""
    unit = "holds-apts-lock"

    def hold(seconds: int) -> int:
        host.check_output("systemctl stop %s.service 2>/dev/null || true", unit)
        script = HOLD_LOCK.format(seconds=seconds)
        host.check_output("systemd-run --quiet --collect --unit %s /usr/bin/python3 -c %s", unit, script)
        # Without a lock that really is held, a test would prove nothing.
        host.check_output("timeout 10 sh -c 'until grep -q POSIX /proc/locks; do sleep 0.1; done'")
        return int(host.check_output("systemctl show --property MainPID --value %s", unit))

    yield hold
    host.check_output("systemctl stop %s.service 2>/dev/null || true", unit)
