"""A torch for CPUs and the library built against its headers; both are kept below .demo/cache."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from image_cache import CACHE
from torch_cache import TorchError, torch_folder

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "roles" / "kernels" / "files"

for folder in (FILES, ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from tests.unit.kernels.support import build_sh  # noqa: E402


@pytest.fixture(scope="session")
def torch_path() -> Path:
    try:
        return torch_folder()
    except TorchError as error:
        pytest.skip(str(error))


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
