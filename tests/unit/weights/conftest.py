"""A hub with a small repository for every test of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.doubles.hub.server import Hub  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Have the library's bytecode on the disk, as an installed one has: the program starts it some sixty times here."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", "import huggingface_hub.file_download"], env=environment, check=True)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """An empty hub; repositories are made below ``hub.root``."""
    static = tmp_path / "static"
    static.mkdir()
    with Hub(tmp_path / "hub", static=static, log=tmp_path / "hub.log") as made:
        yield made
