"""The oldest and the newest ansible-core that we promise, on the Pythons that they take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from nodes import HOST, Node, parse_recap
from testhost import ROOT


def interpreter(names: tuple[str, ...]) -> str:
    """The first Python of these that runs here (a version manager's shim may stand for one that is not installed)."""
    for name in names:
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip(f"no {' or '.join(names)} on this machine")


@pytest.mark.full
@pytest.mark.parametrize(
    ("core", "pythons"),
    [("ansible-core==2.18.*", ("python3.11",)), ("ansible-core", ("python3.13", "python3.12"))],
    ids=["oldest", "newest"],
)
def test_a_dry_run_on_a_serving_node(served: Node, tmp_path: Path, core: str, pythons: tuple[str, ...]) -> None:
    python = interpreter(pythons)
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "--quiet", core]
    subprocess.run(pip, check=True, capture_output=True, timeout=600)
    # The collections of the test tools' own Ansible: fetching them again would take minutes.
    collections = f"{ROOT / 'collections'}:{sysconfig.get_path('purelib', vars={'base': sys.prefix})}"
    argv = [str(tmp_path / "venv/bin/ansible-playbook"), "-i", "inventories/demo", "-i", str(served.inventory)]
    done = subprocess.run(
        [*argv, "-l", HOST, "--check", "--diff", "site.yml"],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": collections, "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert parse_recap(done.stdout)[HOST]["changed"] == 0, output[-3000:]
    assert "DEPRECATION" not in output
