"""Helpers of the tests of kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = Path(__file__).resolve().parents[3] / "roles" / "kernels" / "files"


def build_sh(*arguments: str, torch_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run build.sh with the tests' Python, which then has torch."""
    variables = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(torch_path), **environment}
    return subprocess.run(
        [str(FILES / "build.sh"), *arguments], capture_output=True, text=True, timeout=900, env=variables, check=False
    )
