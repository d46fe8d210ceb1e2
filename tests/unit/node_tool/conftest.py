"""Make the node's command and the helpers of these tests importable."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
for folder in (ROOT, ROOT / "roles/node_tool/files"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from tests.unit.node_tool.fakes import World  # noqa: E402


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A node with two replicas that serve release A, nginx in front of them."""
    with World(tmp_path) as made:
        yield made
