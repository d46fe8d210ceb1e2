"""What bench/rollout.py counts as a rollout's own time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[3] / "bench/rollout.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_rollout", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_only_the_engines_own_start_is_not_ours(bench: ModuleType) -> None:
    """Not the whole steps `stop` and `start`, in which systemd, Podman and the node's command take most of the time."""
    steps = {"drain": 1.0, "measure": 0.5, "stop": 1.5, "point": 0.0, "start": 2.0, "gate": 0.5, "in": 0.2}
    assert bench.beyond({"seconds": steps}, 0.2) == pytest.approx(5.5)


def test_the_latest_start_counts(bench: ModuleType) -> None:
    journal = (
        "stand-in: tiny on port 8000, after 0.310 s of CPU\n"
        "replica 0: starting release 0123456789ab (m, image 0)\n"
        "stand-in: tiny on port 8000, after 0.120 s of CPU\n"
        "replica 0: ready after 0 s\n"
    )
    assert bench.own_start(journal) == 0.12
    with pytest.raises(bench.BenchError, match="is it the stand-in of this tree"):
        bench.own_start("stand-in: tiny on port 8000\n")
