"""Where tests on a GPU find the kernels' package and their own helpers."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "roles" / "kernels" / "files"))
sys.path.insert(0, str(Path(__file__).parent))
