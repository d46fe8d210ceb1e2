"""Runs a playbook of the checkout in a folder of the test's, as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_RECAP = re.compile(r"^(\S+) +: (ok=.*)$", re.MULTILINE)


def run_playbook(
    folder: Path, inventory: Path, playbook: Path, *arguments: str, collections: Path = ROOT / "collections"
) -> tuple[dict[str, dict[str, int]], str]:
    """Run it there; return the counts of its recap by host, and everything it printed."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook), *arguments],
        cwd=folder,
        env={
            **os.environ,
            # what a shell that is there has
            "PWD": str(folder),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(collections),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
            # a message in one line, whatever the width
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    recap = done.stdout.rpartition("PLAY RECAP")[2]
    counts = {
        host: {name: int(count) for name, count in (word.split("=") for word in words.split())}
        for host, words in _RECAP.findall(recap)
    }
    return counts, done.stdout + done.stderr
