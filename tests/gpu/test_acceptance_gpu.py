"""The load program of the acceptance checks on real cards, and what the real driver tells under its load.

Needs a card and torch with CUDA; the ways between cards need two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the load program needs torch")

FILES = Path(__file__).resolve().parents[2] / "roles" / "acceptance" / "files"
sys.path.insert(0, str(FILES))

from gpu_node_accept import cards, node  # noqa: E402

COUNT = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(COUNT == 0, reason="no card: torch.cuda.device_count() is 0")
two_cards = pytest.mark.skipif(COUNT < 2, reason=f"ways between cards need two, this machine has {COUNT}")


def load(*arguments: str, timeout_s: float = 300) -> list[dict[str, Any]]:
    """The rows of the load program, run as in its container."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu_load", *arguments],
        env={**os.environ, "PYTHONPATH": str(FILES)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, done.stderr
    return rows


def test_the_driver_is_read_under_load() -> None:
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.extend(load("load", "--seconds", "10")))
    watch = node.Watch()
    with watch.running():
        thread.start()
        thread.join()
    assert "cards" in found[0] and len(found[0]["cards"]) == COUNT
    assert found[-1]["tflops"] > 1, found
    for samples in watch.samples.values():
        assert len(samples) > 3
        assert max(one.power_w or 0 for one in samples) > 100
        for look in (cards.link, cards.temperature, cards.power):
            # A machine that hands out single cards may hide some of it; what it tells must be understood.
            assert look(samples).verdict in ("pass", "warn", "not run"), look(samples)
        assert cards.throttling(samples, True).verdict in ("pass", "warn")
        assert cards.ecc(samples[-1]).verdict in ("pass", "warn", "not run")


def test_the_cards_are_those_of_the_driver() -> None:
    names = load("load", "--seconds", "0.1")[0]["cards"]
    assert set(names) <= {card.uuid for card in node.cards()}


def test_one_card_has_no_ways_and_sums_up_alone() -> None:
    if COUNT > 1:
        pytest.skip("this machine has more cards")
    assert len(load("pairs")) == 1
    rows = load("allreduce", "--sizes", "8", "524288", "67108864")
    sizes = [row for row in rows if "bus_gb_s" in row]
    assert [row["correct"] for row in sizes] == [True] * 3, rows
    assert rows[0]["nccl"]


@two_cards
def test_every_way_between_cards() -> None:
    first, *rows = load("pairs", "--mib", "64")
    assert len(rows) == COUNT * (COUNT - 1)
    named = cards.named_ways(rows, first["cards"])
    assert cards.pairs(named, [first["cards"]], 1).verdict in ("pass", "warn"), rows


@two_cards
def test_an_all_reduce_over_all_cards() -> None:
    first, *rows = load("allreduce")
    outcome = cards.all_reduce({"sizes": rows, "nccl": first["nccl"]}, 1)
    assert outcome.verdict in ("pass", "warn"), outcome
    assert json.loads(json.dumps(rows))[-1]["bytes"] == 67108864


@two_cards
def test_a_hang_between_cards_is_named() -> None:
    rows = load("allreduce", "--sizes", "1073741824", "--limit", "0.0001")
    assert "hung in" in rows[-1]["error"]
