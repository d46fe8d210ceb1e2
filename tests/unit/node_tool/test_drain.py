"""The proof that a replica is idle."""

import pytest
from gpu_node import drain
from gpu_node.drain import Sample, drained
from gpu_node.engine import Metrics
from gpu_node.errors import BalancerError
from gpu_node.membership import Applied
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import NGINX_PID, World, node_value

SAMPLES = st.builds(Sample, st.integers(0, 2), st.none() | st.floats(0, 3))
TO_REPLICA = ("127.0.0.1", 40000, "127.0.0.1", 8000, 1, 77)


@given(st.lists(SAMPLES))
def test_drained_is_two_quiet_looks_in_a_row(samples: list[Sample]) -> None:
    last = samples[-2:]
    assert drained(samples) == (len(last) == 2 and all(s.connections == 0 and s.requests == 0 for s in last))


def test_idle(world: World) -> None:
    assert world.tool().wait_idle(0, 4) is None


def test_running_requests_end(world: World) -> None:
    engine = world.engines[0]
    engine.counters = Metrics(1, 1, 0, 0, 0)

    def pass_time() -> None:
        if world.now > 1010:
            engine.counters = Metrics(0, 0, 9, 9, 0)

    world.on_sleep = pass_time
    assert world.tool().wait_idle(0, 30) is None
    assert any("draining, 5 s: 2 requests" in line for line in world.said)


def test_running_requests_do_not_end(world: World) -> None:
    world.engines[0].counters = Metrics(1, 1, 0, 0, 0)
    assert world.tool().wait_idle(0, 4) == Sample(0, 2)


def test_connection_of_nginx_counts(world: World) -> None:
    """A request that is being uploaded is not in the engine's gauges yet."""
    world.process(NGINX_PID + 1, "nginx", ["nginx: worker process"], NGINX_PID, inodes=[77])
    world.listen(TO_REPLICA)
    assert world.tool().wait_idle(0, 4) == Sample(1, 0)
    assert world.tool().wait_idle(1, 4) is None


def test_looks_where_the_engine_listens(world: World) -> None:
    """node.json has the port that the replica gets at its next switch."""
    world.write_node(node_value(first_port=9000))
    world.engines[0].counters = Metrics(1, 0, 0, 0, 0)
    assert world.tool().wait_idle(0, 4) == Sample(0, 1)


def test_connection_of_someone_else_does_not_count(world: World) -> None:
    world.process(60, "curl", ["curl"], inodes=[77])
    world.listen(TO_REPLICA)
    assert world.tool().wait_idle(0, 4) is None


def test_silent_engine_proves_nothing(world: World) -> None:
    world.engines[0].up = False
    left = world.tool().wait_idle(0, 4)
    assert left == Sample(0, None) and "does not say" in str(left)


def test_stopped_engine_has_no_requests(world: World) -> None:
    world.engines[0].up = False
    world.sockets()
    assert world.tool().wait_idle(0, 0) is None


def test_old_generation_is_no_proof(world: World) -> None:
    membership = world.tool().membership
    with pytest.raises(BalancerError, match="still answers with generation"):
        drain.prove_out(membership, world, Applied(True, 99, True))
    drain.prove_out(membership, world, Applied(True, 99, False))
