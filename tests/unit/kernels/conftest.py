"""A torch for CPUs and the library built against its headers; both are made once and kept below .demo/cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "roles" / "kernels" / "files"
CACHE = ROOT / ".demo" / "cache"
# Of what torch asks for, what importing it and its fake tensors need.
PACKAGES = ("torch==2.13.0", "typing_extensions", "sympy", "mpmath")

for folder in (FILES, ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from tests.unit.kernels.support import build_sh  # noqa: E402


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Tests run in several processes: one of them makes what all of them use."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".{name}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def torch_folder() -> Path:
    """Return a folder with torch, for sys.path; 750 MB, and about half a minute the first time."""
    inputs = f"{PACKAGES} {sys.version_info[:2]}"
    folder = CACHE / f"torch-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"
    with locked("torch"):
        if not folder.is_dir():
            made = Path(tempfile.mkdtemp(dir=CACHE, prefix=".torch-"))
            argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
            argv += ["--target", str(made), *PACKAGES]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode != 0:
                shutil.rmtree(made)
                reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                pytest.skip(f"pip brings no {PACKAGES[0]} here: {reasons[-1] if reasons else done.returncode}")
            os.rename(made, folder)
    return folder


@pytest.fixture(scope="session")
def torch_path() -> Path:
    return torch_folder()


@pytest.fixture(scope="session")
def torch(torch_path: Path) -> Any:
    """The module. Last on the path: what the tests' own Python has stays what it is."""
    if str(torch_path) not in sys.path:
        sys.path.append(str(torch_path))
    return importlib.import_module("torch")


@pytest.fixture(scope="session")
def nvcc() -> Path:
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not os.access(found, os.X_OK):
        pytest.skip("no nvcc here, on PATH or in /usr/local/cuda")
    return Path(found)


@pytest.fixture(scope="session")
def built(torch_path: Path, nvcc: Path) -> Path:
    """The folder of the library for both architectures; a build of about 40 s CPU when an input has changed."""
    out = CACHE / "kernels"
    # One folder for all inputs: what an older source gave is replaced.
    done = build_sh("8x", "--arch", "both", "--out", str(out), torch_path=torch_path, CUDA_HOME=str(nvcc.parents[1]))
    assert done.returncode == 0, done.stdout + done.stderr
    return out
