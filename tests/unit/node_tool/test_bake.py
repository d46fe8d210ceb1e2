"""The watch after the replicas came in: what ends it, what does not, and what it counts."""

import json
from collections.abc import Callable

import pytest
from gpu_node.bake import AccessLog, Traffic, count
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import World
from tests.unit.node_tool.test_gate import OOM
from tests.unit.node_tool.test_rollout import all_of, record, roll_out, running, want


def answer(world: World, *statuses: int, path: str = "/v1/chat/completions") -> None:
    """Lines in nginx's access log."""
    world.paths.access_log.parent.mkdir(parents=True, exist_ok=True)
    with world.paths.access_log.open("a") as stream:
        stream.writelines(json.dumps({"path": path, "status": status}) + "\n" for status in statuses)


def while_baking(world: World, do: Callable[[], object]) -> None:
    """Do it once, after the first report of the watch."""
    done: list[float] = []

    def look() -> None:
        if not done and any("baking, 10 of" in line for line in world.said):
            done.append(world.now)
            do()

    world.on_sleep = look


def test_says_how_far_it_is(world: World) -> None:
    want(world)
    answer(world, 500, 500)
    while_baking(world, lambda: answer(world, *[200] * 9, 404, 499))
    assert roll_out(world, bake_s=30) == 0
    assert "baking, 10 of 30 s: 0 requests, 0 errors" in world.said
    assert "baking, 20 of 30 s: 11 requests, 0 errors" in world.said
    assert world.said[-1] == "baked 30 s: 11 requests, 0 errors" and record(world)["state"] == "done"


def test_record_is_renewed(world: World) -> None:
    want(world)
    seen: list[float] = []
    world.on_sleep = lambda: seen.append(world.now - record(world)["renewed"])
    roll_out(world, bake_s=60)
    assert max(seen) <= 11


@pytest.mark.parametrize(
    ("good", "bad", "budget", "code"),
    [(99, 1, 0.01, 0), (98, 2, 0.01, 5), (0, 0, 0.0, 0), (1000, 1, 0.0, 5), (0, 1, 0.5, 5), (1, 1, 0.5, 0)],
)
def test_error_budget(world: World, good: int, bad: int, budget: float, code: int) -> None:
    want(world)
    while_baking(world, lambda: answer(world, *[200] * good, *[502] * bad))
    assert roll_out(world, bake_s=30, budget=budget) == code
    assert running(world) == all_of(world, "B") and world.inside(0) and world.inside(1)
    if code:
        assert (record(world)["state"], record(world)["outcome"]) == ("failed", None)
        assert f"{bad} of {good + bad} answers on /v1 have a status from 500 on" in record(world)["error"]


def test_few_answers_are_judged_at_the_end(world: World) -> None:
    want(world)
    while_baking(world, lambda: answer(world, 502, *[200] * 5))
    assert roll_out(world, bake_s=60, budget=0.1) == 5
    assert any("baking, 50 of 60 s" in line for line in world.said)


def test_what_is_not_on_v1_is_not_counted(world: World) -> None:
    want(world)
    while_baking(world, lambda: answer(world, 503, 503, path="/health"))
    assert roll_out(world, bake_s=30) == 0


def _prober(world: World) -> None:
    world.tool().reasons.add(1, "prober", "test")


def _restart(world: World) -> None:
    world.units[0].restarts += 1


def _killed(world: World) -> None:
    world.kernel += [(world.now, line) for line in OOM]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (_prober, "replica 1 went out of the balancer (prober)"),
        (_restart, "vllm-replica@0.service was restarted"),
        (_killed, "the kernel killed VLLM::Worker_TP"),
    ],
)
def test_what_ends_it(world: World, fault: Callable[[World], None], says: str) -> None:
    want(world)
    while_baking(world, lambda: fault(world))
    assert roll_out(world, bake_s=60, budget=1) == 5
    assert says in record(world)["error"] and not any("baked" in line for line in world.said)
    assert running(world) == all_of(world, "B")


def test_an_operators_drain_is_no_fault(world: World) -> None:
    want(world)
    membership = world.tool().membership
    while_baking(world, lambda: membership.take_out(1, "operator", "test"))
    assert roll_out(world, bake_s=30) == 0


def test_a_bake_that_was_cut_short_is_done_again(world: World) -> None:
    want(world)
    while_baking(world, lambda: answer(world, 500))
    assert roll_out(world, bake_s=30) == 5
    world.on_sleep = lambda: None
    assert roll_out(world, bake_s=30) == 0
    assert world.said[-1] == "baked 30 s: 0 requests, 0 errors"
    world.said.clear()
    # Done is done.
    assert roll_out(world, bake_s=30) == 0
    assert not any("bak" in line for line in world.said)


def test_rotated_log(world: World) -> None:
    log = AccessLog(world.paths)
    assert log.new_lines() == []
    answer(world, 200)
    assert len(log.new_lines()) == 1
    with world.paths.access_log.open("a") as stream:
        stream.write('{"path": "/v1/x", ')
    assert log.new_lines() == []
    with world.paths.access_log.open("a") as stream:
        stream.write('"status": 500}\n')
    assert count(log.new_lines(), Traffic()) == Traffic(1, 1)
    world.paths.access_log.rename(world.paths.access_log.with_suffix(".1"))
    answer(world, 200, 502)
    assert count(log.new_lines(), Traffic()) == Traffic(2, 1)


@given(st.lists(st.text()))
def test_any_line(lines: list[str]) -> None:
    assert count(lines, Traffic(3, 1)).requests >= 3
