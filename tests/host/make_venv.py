#!/usr/bin/env python3
"""Make .venv from requirements.txt (`run`) or with the test tools on top (`dev`); quick when nothing changed."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import testhost

VENV = testhost.ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
SETS = {"run": ("requirements.txt",), "dev": ("requirements.txt", "requirements-dev.txt")}
OLDEST = (3, 11)


def version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def stamp_of(files: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(version().encode())
    for name in files:
        digest.update((testhost.ROOT / name).read_bytes())
    return VENV / f".installed-{digest.hexdigest()[:12]}"


def usable() -> bool:
    """An interrupted creation, or a venv of another Python, is made anew."""
    if not (VENV / "lib" / f"python{version()}").is_dir() or not PYTHON.exists():
        return False
    return testhost.run([str(PYTHON), "-m", "pip", "--version"]).returncode == 0


def create() -> None:
    if importlib.util.find_spec("ensurepip") is None:
        testhost.install(["python3-venv"], f"{sys.executable} cannot make virtual environments (no ensurepip)")
    with testhost.step(f"making {VENV.name} with Python {version()}"):
        testhost.checked([sys.executable, "-m", "venv", "--clear", str(VENV)], timeout=300)


def install(files: tuple[str, ...]) -> None:
    log = VENV / "install.log"
    # bytecode is compiled on first use: compiling all of the `ansible` package costs more than the download
    argv = [str(PYTHON), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    for name in files:
        argv += ["-r", str(testhost.ROOT / name)]
    with testhost.step(f"installing {' and '.join(files)} into {VENV.name}"), log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if testhost.wait_with_progress(process, log) != 0:
            raise testhost.HostError(f"pip install failed: {testhost.last_line(log)} (all of it: {log})")


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0] not in SETS:
        print(f"usage: make_venv.py {'|'.join(SETS)}", file=sys.stderr)
        return 2
    if sys.version_info[:2] < OLDEST:
        needed = ".".join(map(str, OLDEST))
        print(f"make_venv: error: Python {version()} is too old, {needed} is needed: make PYTHON=...", file=sys.stderr)
        return 1
    files = SETS[argv[0]]
    try:
        if not usable():
            create()
        if not (stamp := stamp_of(files)).exists():
            # pinned versions: what an older list of requirements asked for may be replaced by this one
            for old in VENV.glob(".installed-*"):
                old.unlink()
            install(files)
            stamp.touch()
            stamp_of(SETS["run"]).touch()  # part of every set
    except testhost.HostError as err:
        print(f"make_venv: error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_venv: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
