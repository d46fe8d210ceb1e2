"""The last replica that is in says on /health that the node leaves, before it goes; every other one goes at once."""

import json
import os

import pytest
from gpu_node.errors import BalancerError
from gpu_node.live import LiveNode
from gpu_node.switch import switch
from gpu_node.unit import UnitSteps

from tests.unit.node_tool.fakes import World
from tests.unit.node_tool.test_rollout import leave, want

ANNOUNCE_S = 10


def go_out(world: World, index: int) -> None:
    world.tool().membership.go_out(index, "operator", "test", world.say)


def announced(world: World, text: str) -> None:
    """What a run that was killed left."""
    world.paths.leaving.parent.mkdir(parents=True, exist_ok=True)
    world.paths.leaving.write_text(text)


def watch(world: World) -> list[float]:
    """The times at which /health said so while the last replica still served."""
    seen: list[float] = []

    def look() -> None:
        if world.paths.leaving.exists() and (world.inside(0) or world.inside(1)):
            seen.append(world.now)

    world.on_sleep = look
    return seen


def test_one_of_two_goes_at_once(world: World) -> None:
    seen = watch(world)
    go_out(world, 0)
    assert not world.inside(0) and not seen and not world.paths.leaving.exists()


def test_the_last_one_announces(world: World) -> None:
    go_out(world, 0)
    seen, began = watch(world), world.now
    go_out(world, 1)
    assert not world.inside(1) and ANNOUNCE_S <= world.now - began < ANNOUNCE_S + 1
    assert len(seen) >= ANNOUNCE_S and world.said[-1].startswith("/health says that this node leaves; 10 s")
    # It stays until somebody comes in.
    assert world.paths.leaving.exists()
    world.tool().membership.let_in(0, "operator")
    assert not world.paths.leaving.exists() and world.inside(0)


def test_nginx_may_look(world: World) -> None:
    """Its processes are not root's, and whoever drains by hand may have any umask."""
    before = os.umask(0o077)
    try:
        world.root.joinpath("run/gpu-node").mkdir(exist_ok=True)
        go_out(world, 0)
        go_out(world, 1)
    finally:
        os.umask(before)
    assert world.paths.leaving.stat().st_mode & 0o044 and world.paths.leaving.parent.stat().st_mode & 0o011


def test_who_stays_out_takes_nothing_back(world: World) -> None:
    world.tool().reasons.add(0, "rollout", "test")
    go_out(world, 0)
    go_out(world, 1)
    world.tool().membership.let_in(0, "operator")
    assert world.paths.leaving.exists()


def test_nobody_waits_when_another_comes_in(world: World) -> None:
    go_out(world, 0)
    began = world.now

    def come_in() -> None:
        if world.now > began + 2:
            world.tool().membership.let_in(0, "operator")

    world.on_sleep = come_in
    go_out(world, 1)
    assert world.now - began < 5 and not world.inside(1) and world.inside(0)
    assert not world.paths.leaving.exists()


def test_no_announcement_is_wanted(world: World) -> None:
    world.write_node(json.loads(world.paths.node_json.read_text()) | {"announce_s": 0})
    go_out(world, 0)
    began = world.now
    go_out(world, 1)
    assert world.now == began and not world.paths.leaving.exists()


def test_nobody_to_tell_without_nginx(world: World) -> None:
    world.paths.nginx_pid.unlink()
    go_out(world, 0)
    began = world.now
    go_out(world, 1)
    assert world.now == began


def test_killed_while_it_announces_it_goes_on(world: World) -> None:
    """The time that has passed counts: a balancer in front heard it."""
    go_out(world, 0)
    announced(world, json.dumps({"since": world.now - 7, "by": "test"}))
    began = world.now
    go_out(world, 1)
    assert world.now - began == pytest.approx(3)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"since": "x"}', '{"since": 1e300}'])
def test_damaged_announcement(world: World, text: str) -> None:
    go_out(world, 0)
    announced(world, text)
    began = world.now
    go_out(world, 1)
    assert world.now - began <= ANNOUNCE_S + 1 and not world.inside(1)


def test_forgotten_announcement_is_taken_back(world: World) -> None:
    """Who announced it was killed and never came again: the node serves, and /health must say so."""
    go_out(world, 0)
    announced(world, json.dumps({"since": world.now, "by": "test"}))
    membership = world.tool().membership
    membership.reconcile()
    assert world.paths.leaving.exists()
    world.now += ANNOUNCE_S + 61
    membership.reconcile()
    assert not world.paths.leaving.exists()
    # Nobody is in: then it is true.
    world.tool().membership.take_out(1, "operator", "test")
    announced(world, json.dumps({"since": 0, "by": "test"}))
    membership.reconcile()
    assert world.paths.leaving.exists()


def test_switch_of_the_last_one(world: World) -> None:
    go_out(world, 0)
    seen = watch(world)
    journal = switch(LiveNode(world.tool()), 1, world.releases[1, "B"])
    assert journal is not None and journal.outcome == "new" and seen
    assert "replica 1: /health says that this node leaves; 10 s until it takes no more requests" in world.said
    assert not world.paths.leaving.exists() and world.inside(1)


@pytest.mark.parametrize("what", ["switch", "stop", "leave"])
def test_undrain_does_not_shorten_what_has_to_go(world: World, what: str) -> None:
    """A switch or a stop goes on whoever undrains, so the balancer in front hears of it for the whole time again."""
    if what != "leave":
        go_out(world, 0)
    began = world.now

    def undrain() -> None:
        if world.now >= began + 5:
            world.on_sleep = look
            world.tool().membership.let_in(1, "operator")

    def look() -> None:
        if world.inside(1):
            heard.append(world.now if world.paths.leaving.exists() else 0)

    heard = [0.0]
    world.on_sleep = undrain
    if what == "switch":
        switch(LiveNode(world.tool()), 1, world.releases[1, "B"])
    elif what == "stop":
        UnitSteps(world.tool(), 1).stop()
    else:
        want(world, "A")
        leave(world)
    assert ANNOUNCE_S <= heard[-1] - (began + 5) < ANNOUNCE_S + 1


def test_switch_that_is_refused_takes_it_back(world: World) -> None:
    go_out(world, 0)
    world.engines[1].counters = world.engines[1].counters.__class__(1, 0, 1, 1, 0)
    journal = switch(LiveNode(world.tool()), 1, world.releases[1, "B"])
    assert journal is not None and journal.outcome == "refused"
    assert not world.paths.leaving.exists() and world.inside(1)


def test_broken_nginx_leaves_it_to_who_asked(world: World) -> None:
    go_out(world, 0)
    world.nginx_refuses = True
    with pytest.raises(BalancerError):
        go_out(world, 1)


@pytest.mark.parametrize(("dead", "waits"), [(False, True), (True, False)], ids=["stopped", "died"])
def test_stop_of_the_last_units(world: World, dead: bool, waits: bool) -> None:
    go_out(world, 0)
    if dead:
        world.units[1].running = None
    began = world.now
    UnitSteps(world.tool(), 1).stop()
    assert (world.now - began >= ANNOUNCE_S) == waits and not world.inside(1)


def test_both_stop_at_once_and_one_announces(world: World) -> None:
    """As at a shutdown: the first goes, the second is the last."""
    UnitSteps(world.tool(), 0).stop()
    assert not any("/health says" in line for line in world.said)
    UnitSteps(world.tool(), 1).stop()
    assert any("replica 1: /health says" in line for line in world.said)
