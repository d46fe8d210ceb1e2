"""A torch for CPUs, made once and kept below .demo/cache: its headers build the kernels, its fakes check them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from image_cache import CACHE

# Of what torch asks for, what importing it and its fake tensors need.
PACKAGES = ("torch==2.13.0", "typing_extensions", "sympy", "mpmath")


class TorchError(Exception):
    """pip does not bring it: one line that says why."""


def torch_folder() -> Path:
    """Return a folder with torch, for sys.path; 750 MB, and about half a minute the first time.

    Tests run in several processes: one of them makes what all of them use.
    """
    inputs = f"{PACKAGES} {sys.version_info[:2]}"
    folder = CACHE / f"torch-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".torch.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            made = Path(tempfile.mkdtemp(dir=CACHE, prefix=".torch-"))
            argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
            argv += ["--target", str(made), *PACKAGES]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode != 0:
                shutil.rmtree(made)
                reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                raise TorchError(f"pip brings no {PACKAGES[0]} here: {reasons[-1] if reasons else done.returncode}")
            os.rename(made, folder)
    return folder
