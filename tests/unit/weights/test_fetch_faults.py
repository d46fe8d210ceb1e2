"""What a hub does wrong while the node's program fetches: it ends complete, or with one clear error and goes on later.

Most of the time these runs wait, so a few of them go on at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.hub.server import Hub, Repository, make_repository
from tests.unit.weights.program import Node, Ran, assert_done, assert_refused

FILES: dict[str, int | bytes] = {
    "config.json": 900,
    "tokenizer/merges.txt": 6000,
    "empty.txt": b"",
    "merges.json": 2000,
    "model-1.safetensors": 1_500_000,
    "model-2.safetensors": 400_001,
    "model-3.safetensors": 300_000,
    "model-4.safetensors": 200_000,
}
# What a stream of the program holds in memory, and is lost with it.
BLOCK = 1 << 18
AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class Scenario:
    """Faults, and what the operator reads when they end the fetch; without such words it must end complete."""

    name: str
    faults: tuple[dict[str, Any], ...]
    words: tuple[str, ...] = ()
    # how many bytes more than needed may be fetched while it ends complete
    extra: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    hub: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def fault(kind: str, file: str, times: int = 1, **options: Any) -> dict[str, Any]:
    return {"kind": kind, "pattern": f"owner/tiny/{file}", "times": times, **options}


ONE, TWO, THREE, FOUR = (f"model-{number}.safetensors" for number in range(1, 5))
ENDS_COMPLETE = (
    Scenario(
        "connections cut at random offsets",
        (
            fault("cut", ONE, 3),
            fault("cut", TWO, 2),
            fault("cut", THREE, hard=True),
            fault("cut", "tokenizer/merges.txt", 2),
        ),
        extra=8 * BLOCK,
    ),
    Scenario(
        "stalls without an end",
        (fault("stall", ONE, after=700_000), fault("stall", "config.json", after=10), fault("silent", TWO)),
        extra=2 * BLOCK,
    ),
    Scenario(
        "busy servers, and small files that are redirected on the hub",
        (
            fault("rate_limit", ONE, seconds=1, server="content"),
            fault("rate_limit", TWO, seconds=1, methods=("HEAD",)),
            fault("status", THREE, 2, amount=503, seconds=0.1),
            fault("status", FOUR, amount=502, methods=("HEAD",)),
            fault("status", "config.json", amount=500),
        ),
        hub={"resolve_cache": True},
    ),
    Scenario(
        "wrong bytes, wrong lengths, gzip, ranges that are ignored; once each",
        (
            fault("wrong_bytes", FOUR),
            fault("wrong_bytes", "config.json"),
            fault("short", "tokenizer/merges.txt"),
            fault("short", THREE, amount=1000),
            fault("long", TWO, amount=1000),
            fault("cut", ONE, after=800_000),
            fault("ignore_range", ONE),
            fault("gzip", "merges.json", hard=True),
        ),
        extra=200_000 + 900 + 401_001 + 800_000,
    ),
    Scenario("a slow trickle", (fault("trickle", ONE, amount=1000),), extra=2 * BLOCK),
    Scenario(
        "addresses that expire before a connection is cut",
        (fault("cut", ONE, after=600_000), fault("cut", TWO, after=300_000)),
        extra=2 * BLOCK,
        hub={"expires_s": 0.5},
    ),
)
# One after another on the same node: what an earlier run has verified is never fetched again.
ENDS_WITH_AN_ERROR = (
    (
        Scenario(
            "gated",
            (fault("unauthorized", ONE, -1, methods=("HEAD", "GET")),),
            (ONE, "401", "GatedRepo", "model_weights_hub_token"),
        ),
        Scenario(
            "no such revision", (fault("no_revision", ONE, -1, methods=("HEAD", "GET")),), (ONE, "404", "revision")
        ),
        Scenario("redirect loop", (fault("redirect_loop", ONE, -1, methods=("HEAD", "GET")),), (ONE, "circle")),
        Scenario("redirect loop behind", (fault("redirect_loop", ONE, -1, server="content"),), (ONE, "circle")),
        Scenario("unavailable", (fault("status", ONE, -1, amount=503, seconds=0.05),), (ONE, "503")),
    ),
    (
        Scenario(
            "wrong bytes of a small file",
            # the large one waits, so that it has not come when the other is given up
            (fault("wrong_bytes", "merges.json", -1), fault("status", ONE, -1, amount=503, seconds=60)),
            ("merges.json", "git"),
        ),
        Scenario("wrong bytes", (fault("wrong_bytes", ONE, -1),), (ONE, "sha256")),
        Scenario("too long", (fault("long", ONE, -1, amount=60_000_000),), (ONE, "more came than the 1500000 bytes")),
        Scenario("too short", (fault("short", ONE, -1, amount=1000),), (ONE,)),
    ),
    (
        Scenario("stalls", (fault("stall", ONE, -1, after=0),), ("stall",), changes={"tries": 2}),
        Scenario("silence", (fault("silent", ONE, -1, methods=("HEAD", "GET")),), changes={"tries": 2}),
        Scenario("a trickle", (fault("trickle", ONE, -1, amount=500),), ("minimum_rate",), changes={"tries": 2}),
        Scenario("cut at once", (fault("cut", ONE, -1, after=0),), changes={"tries": 2}),
    ),
)


@dataclass
class Outcome:
    """A run with faults, and what was on the node's disk and at the hub's counters after it."""

    node: Node
    repository: Repository
    ran: Ran
    stats: dict[str, Any]
    complete: list[Path]
    verified: set[str]
    begun: int


def play(folder: Path, scenarios: tuple[Scenario, ...]) -> dict[str, Outcome]:
    """Fetch with each scenario's faults, and at the end without any."""
    folder.mkdir()
    outcomes = {}
    with Hub(folder / "hub", log=folder / "hub.log", seed=7, **scenarios[0].hub) as hub:
        repository = make_repository(hub.root / "owner/tiny", FILES, seed=5)
        node = Node(folder / "node", hub)
        for scenario in (*scenarios, Scenario("none", ())):
            hub.clear_faults()
            hub.reset_stats()
            for one in scenario.faults:
                hub.fault(**one)
            ran = node.fetch(node.request(repository, **{"stall_s": 2, **scenario.changes}))
            outcomes[scenario.name] = Outcome(
                node, repository, ran, hub.stats(), node.complete(), node.verified(), node.begun()
            )
    return outcomes


Played = dict[tuple[Scenario, ...], Future[dict[str, Outcome]]]


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """What the tests that were asked for need, a few at once."""
    asked = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = dict.fromkeys(call.params["scenarios"] for call in asked if call and "scenarios" in call.params)
    base = tmp_path_factory.mktemp("scenarios")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # the longest first
        ordered = sorted(wanted, key=len, reverse=True)
        yield {one: pool.submit(play, base / f"{number}", one) for number, one in enumerate(ordered)}


@pytest.mark.parametrize("scenarios", [(one,) for one in ENDS_COMPLETE], ids=lambda value: str(value[0]))
def test_it_ends_complete(played: Played, scenarios: tuple[Scenario]) -> None:
    outcomes, (scenario,) = played[scenarios].result(), scenarios
    outcome, second = outcomes[scenario.name], outcomes["none"]
    assert_done(outcome.ran)
    outcome.node.assert_complete(outcome.repository)
    planned = sum(one["times"] for one in scenario.faults)
    assert sum(outcome.stats["injected"].values()) == planned, "not every fault was met"
    assert outcome.stats["file_bytes"] <= outcome.repository.total + scenario.extra
    assert_done(second.ran)
    assert second.stats["requests"] == 0


@pytest.mark.parametrize(
    ("scenarios", "place"),
    [
        pytest.param(chain, place, id=scenario.name)
        for chain in ENDS_WITH_AN_ERROR
        for place, scenario in enumerate(chain)
    ],
)
def test_it_ends_with_one_clear_error(played: Played, scenarios: tuple[Scenario, ...], place: int) -> None:
    outcomes, scenario = played[scenarios].result(), scenarios[place]
    outcome = outcomes[scenario.name]
    assert_refused(outcome.ran, *scenario.words)
    assert not outcome.complete
    # a server that never ends is left
    assert outcome.stats["file_bytes"] < 40_000_000
    broken = scenario.faults[0]["pattern"].removeprefix("owner/tiny/")
    assert broken not in outcome.verified
    before = outcomes[scenarios[place - 1].name].verified if place else set()
    assert before <= outcome.verified
    assert not [path for path in before if f"owner/tiny/{path}" in outcome.stats["files"]]


@pytest.mark.parametrize("scenarios", ENDS_WITH_AN_ERROR, ids=lambda value: f"after {value[-1]}")
def test_it_goes_on_after_errors(played: Played, scenarios: tuple[Scenario, ...]) -> None:
    outcomes = played[scenarios].result()
    last, outcome = outcomes[scenarios[-1].name], outcomes["none"]
    assert_done(outcome.ran)
    outcome.node.assert_complete(outcome.repository)
    # only what lacked came: not what was verified, and what had begun from where it was
    lacked = sum(entry.size for path, entry in outcome.repository.entries.items() if path not in last.verified)
    assert outcome.stats["file_bytes"] == lacked - last.begun
