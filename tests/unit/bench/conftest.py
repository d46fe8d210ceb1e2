"""Makes the program importable, and gives each test a server of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "roles/benchmark/files"
if str(PROGRAM) not in sys.path:
    sys.path.insert(0, str(PROGRAM))

from tests.unit.bench.server import Server  # noqa: E402


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    one.start()
    yield one
    one.stop()
