"""The prober: what it takes out, what it leaves in, and back."""

import json
from dataclasses import replace

import pytest
from gpu_node.config import parse_node
from gpu_node.engine import Metrics
from gpu_node.prober import Memory, Prober, Verdict, judge, look, probe_once
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import World, node_value

LIMITS = parse_node(node_value(), "node.json").prober
QUIET = Metrics(0, 0, 100, 50, 0.0)


def watch(steps: list[Metrics | None], every_s: float = 5) -> list[Verdict]:
    """The verdicts of passes over a replica that is in."""
    memory, verdicts = Memory(), []
    for number, metrics in enumerate(steps):
        memory, verdict, _ = look(memory, metrics, 1000 + number * every_s, LIMITS, out=False, may_generate=True)
        verdicts.append(verdict)
    return verdicts


def test_long_prefill_is_healthy() -> None:
    """1M tokens of prefill: no token is generated or counted for minutes, only the KV use moves."""
    assert set(watch([Metrics(1, 0, 100, 50, step / 1000) for step in range(100)])) == {Verdict.KEEP}


def test_full_slots_are_healthy() -> None:
    """128 running, many waiting, KV use at its limit: tokens move."""
    assert set(watch([Metrics(128, 500, 100 + step, 50, 1.0) for step in range(100)])) == {Verdict.KEEP}


def test_frozen_busy_goes_out() -> None:
    verdicts = watch([Metrics(1, 0, 100, 50, 0.5)] * 8)
    assert verdicts == [Verdict.KEEP] * 6 + [Verdict.OUT] * 2


def test_waiting_alone_is_busy() -> None:
    assert watch([Metrics(0, 3, 100, 50, 0.5)] * 7)[-1] is Verdict.OUT


def test_frozen_idle_has_to_generate() -> None:
    verdicts = watch([QUIET] * 7)
    assert verdicts == [Verdict.KEEP] * 6 + [Verdict.GENERATE]


def test_one_missed_answer_is_forgiven() -> None:
    assert Verdict.OUT not in watch([QUIET, None] * 20)


def test_http_dead_goes_out() -> None:
    assert watch([QUIET, None, None]) == [Verdict.KEEP, Verdict.KEEP, Verdict.OUT]


def test_drained_replica_is_left_in_peace() -> None:
    memory = Memory(0, (100, 50, 0), 0)
    assert look(memory, QUIET, 1000, LIMITS, out=False, may_generate=False)[1] is Verdict.KEEP


def test_proof_that_queued_behind_a_prefill() -> None:
    memory = Memory(0, (100, 50, 0.1), 0)
    assert judge(memory, False, Metrics(2, 0, 100, 50, 0.4), 50, out=False)[1] is True
    assert judge(memory, False, Metrics(2, 0, 100, 50, 0.4), 50, out=True)[1] is False
    assert judge(memory, False, Metrics(2, 0, 100, 50, 0.1), 50, out=False)[1] is False
    assert judge(memory, False, None, 50, out=False)[1] is False


@given(
    st.lists(st.none() | st.builds(Metrics, *[st.integers(0, 2)] * 5), max_size=30), st.floats(0.1, 100), st.booleans()
)
def test_never_out_while_it_moves_or_before_a_limit(
    steps: list[Metrics | None], every_s: float, may_generate: bool
) -> None:
    memory, missed, moved_at = Memory(), 0, 0.0
    before: Metrics | None = None
    for number, metrics in enumerate(steps):
        now = 1000 + number * every_s
        memory, verdict, why = look(memory, metrics, now, LIMITS, out=False, may_generate=may_generate)
        missed = missed + 1 if metrics is None else 0
        if metrics is not None:
            same = before is not None and replace(metrics, running=0, waiting=0) == replace(
                before, running=0, waiting=0
            )
            moved_at = moved_at if same else now
            before = metrics
        if verdict is Verdict.OUT:
            assert why and (missed >= LIMITS.http_failures or now - moved_at >= LIMITS.stall_s)


# -- the loop's pass, on a node ---------------------------------------------------------------------------------------


def passes(world: World, count: int) -> None:
    for _ in range(count):
        probe_once(world.tool())
        world.now += 5


def test_frozen_engine_goes_out_and_comes_back(world: World) -> None:
    passes(world, 2)
    world.engines[0].frozen = True
    passes(world, 7)
    assert world.tool().reasons.of(0) == ["prober"] and not world.inside(0) and world.inside(1)
    assert world.units[0].running
    world.engines[0].frozen = False
    passes(world, 1)
    assert world.inside(0)


def test_asks_for_what_the_replica_serves(world: World) -> None:
    """The plan's name is another one after a rollback, and before the replica's turn."""
    world.write_node(node_value(model="new"))
    passes(world, 12)
    assert world.inside(0) and "replica 0: idle for 30 s, generating for a proof" in world.said


def test_proofs_are_counted_for_who_counts_the_engines_work(world: World) -> None:
    """A benchmark of replica 0 takes replica 1's proofs for nobody's traffic."""

    def noted() -> tuple[int, int]:
        memory = json.loads(world.paths.probe_memory(1).read_text())
        return memory["proofs"], memory["proof_tokens"]

    passes(world, 2)
    assert noted() == (0, 0)
    passes(world, 12)
    first, tokens = noted()
    assert first >= 1 and tokens == 3 * first
    # What moves, is away for a moment or does not come between takes none back.
    engine = world.engines[1]
    engine.counters = replace(engine.counters, generation_tokens=107)
    passes(world, 1)
    engine.up = False
    passes(world, 1)
    engine.up, engine.frozen = True, True
    passes(world, 7)
    assert noted() == (first, tokens)
    engine.frozen = False
    passes(world, 1)
    assert noted() == (first + 1, tokens + 3)


def test_dead_http_goes_out(world: World) -> None:
    world.engines[0].up = False
    passes(world, 2)
    assert world.tool().reasons.of(0) == ["prober"]
    assert any("HTTP did not answer 2 times in a row; taken out" in line for line in world.said)


def test_flapping(world: World) -> None:
    for _ in range(3):
        world.engines[0].up = False
        passes(world, 3)
        assert not world.inside(0)
        world.engines[0].up = True
        passes(world, 1)
        assert world.inside(0)


def test_operators_reason_stands(world: World) -> None:
    world.tool().membership.take_out(0, "operator", "test")
    world.engines[0].up = False
    passes(world, 2)
    world.engines[0].up = True
    world.tool().membership.let_in(0, "operator")
    passes(world, 1)
    assert world.inside(0)


@pytest.mark.parametrize("active", ["activating", "deactivating", "inactive", "failed"])
def test_unit_that_does_not_serve_is_not_probed(world: World, active: str) -> None:
    world.units[0].active = active
    world.tool().reasons.add(0, "unit", "test")
    passes(world, 3)
    assert world.tool().reasons.of(0) == ["unit"]
    assert not world.paths.probe_memory(0).exists()


def test_leftover_unit_reason_of_a_serving_unit(world: World) -> None:
    world.tool().membership.take_out(0, "unit", "boot")
    passes(world, 1)
    assert world.inside(0)


def test_unit_stopped_during_the_proof_stays_out(world: World) -> None:
    world.tool().membership.take_out(0, "unit", "unit-stop")
    prober = Prober(world.tool(), world.tool().node.replica(0))

    def stop(_: object) -> bool:
        world.units[0].active = "deactivating"
        return True

    prober._generates = stop.__get__(prober)  # type: ignore[method-assign]
    assert "being stopped" in prober.run()
    assert not world.inside(0)


def test_nginx_repaired_later_is_brought_in_line(world: World) -> None:
    world.nginx_refuses = True
    world.units[0].active = "failed"
    world.tool().reasons.add(0, "unit", "test")
    world.nginx_refuses = False
    passes(world, 1)
    assert not world.inside(0)
