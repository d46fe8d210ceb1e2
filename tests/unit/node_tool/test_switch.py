"""The switch: every gate, every way out, and killed anywhere."""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_node.config import linked_release
from gpu_node.errors import BalancerError, ConfigError, RefusedError
from gpu_node.live import LiveNode
from gpu_node.switch import Journal, StepError, parse_journal, switch, way_back
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.node_tool.fakes import Killed, World, node_value

Break = Callable[[World, str], None]


def do(world: World, index: int, name: str, force_drain: bool = False) -> Journal | None:
    return switch(LiveNode(world.tool()), index, world.releases[index, name], force_drain)


def check(world: World, index: int) -> None:
    """What holds after every switch that came to its end."""
    journal = LiveNode(world.tool()).journal(index)
    unit = world.units[index]
    current = linked_release(world.paths, index, "current")
    reasons = world.tool().reasons.of(index)
    assert journal is None or journal.outcome is not None
    assert journal is None or current in (journal.source, journal.target)
    assert unit.running in (None, current)
    if journal is not None and journal.outcome == "failed":
        assert "rollout" in reasons and unit.running is None
    else:
        assert unit.running == current
        assert set(reasons) <= {"operator"}
    assert world.inside(index) == (not reasons)


def test_new_release(world: World) -> None:
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "new"
    assert linked_release(world.paths, 0, "previous") == world.releases[0, "A"]
    assert (world.paths.replica(0) / "current").readlink() == Path("../../releases") / world.releases[0, "B"]
    assert "replica 0: loading, 10 s: weights" in world.said and "a line of the engine" not in world.said
    check(world, 0)
    check(world, 1)


def test_serving_release_is_left_alone(world: World) -> None:
    world.commands.clear()
    assert do(world, 0, "A") is None
    assert {command[1] for command in world.commands} == {"show", "container"}


def test_what_runs_beside_its_link_is_switched(world: World) -> None:
    """The link was moved by hand: it says the target, and another release serves."""
    LiveNode(world.tool()).point(0, "current", world.releases[0, "B"])
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "new"
    assert world.units[0].running == world.releases[0, "B"]
    assert linked_release(world.paths, 0, "previous") == world.releases[0, "A"]
    check(world, 0)


def test_unit_that_does_not_run_is_started_again(world: World) -> None:
    world.stop_unit(0)
    journal = do(world, 0, "A")
    assert journal is not None and journal.outcome == "new"
    assert linked_release(world.paths, 0, "previous") is None
    check(world, 0)


def test_a_start_that_is_under_way_is_waited_for(world: World) -> None:
    """After a boot, for example: what it has loaded is not thrown away."""
    world.units[0].active, world.units[0].sub = "activating", "start-post"
    world.commands.clear()
    assert do(world, 0, "A") is None
    verbs = [command[1] for command in world.commands if command[0] == "systemctl"]
    assert "start" in verbs and "stop" not in verbs and "reset-failed" not in verbs
    assert any("is being started already, waiting for it" in line for line in world.said)
    assert world.units[0].active == "active"


def test_a_start_that_is_under_way_and_fails_is_done_again(world: World) -> None:
    world.units[0].active, world.units[0].sub = "activating", "start-post"
    world.failing.add(0)
    journal = do(world, 0, "A")
    assert journal is not None and journal.outcome == "new"
    check(world, 0)


def test_another_release_does_not_wait_for_a_start(world: World) -> None:
    world.units[0].active, world.units[0].sub = "activating", "start-post"
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "new"
    assert not any("waiting for it" in line for line in world.said)
    check(world, 0)


def test_a_unit_between_two_tries_is_not_waited_for(world: World) -> None:
    world.stop_unit(0)
    world.units[0].active, world.units[0].sub = "activating", "auto-restart"
    journal = do(world, 0, "A")
    assert journal is not None and journal.outcome == "new"
    assert not any("waiting for it" in line for line in world.said)


def _bad_release(world: World, release: str) -> None:
    world.bad_releases.add(release)


def _changed_release(world: World, release: str) -> None:
    def change() -> None:
        (world.paths.release(release) / "engine.yaml").write_text("changed")

    world.on_sleep = change


def _other_image(world: World, release: str) -> None:
    world.releases[0, "B"] = world.make_release(0, "B", image={"ref": "other", "id": "ef" * 32})


def _other_command(world: World, release: str) -> None:
    world.releases[0, "B"] = world.make_release(0, "B", command=["vllm", "serve", "--other"])


def _other_name(world: World, release: str) -> None:
    world.releases[0, "B"] = world.make_release(0, "B", served_model_name="other")


@pytest.mark.parametrize("spoil", [_bad_release, _changed_release, _other_image, _other_command, _other_name])
def test_failed_release_goes_back(world: World, spoil: Break) -> None:
    spoil(world, world.releases[0, "B"])
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "rolled_back" and journal.error
    assert linked_release(world.paths, 0, "current") == world.releases[0, "A"]
    check(world, 0)


def test_roll_back_fails_too(world: World) -> None:
    world.bad_releases |= {world.releases[0, "A"], world.releases[0, "B"]}
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "failed" and "; then: " in journal.error
    assert world.units[0].active == "inactive"
    check(world, 0)
    check(world, 1)
    world.bad_releases.clear()
    journal = do(world, 0, "C")
    assert journal is not None and (journal.outcome, journal.source) == ("new", world.releases[0, "A"])
    check(world, 0)


def test_first_release_fails(world: World) -> None:
    world.stop_unit(0)
    (world.paths.replica(0) / "current").unlink()
    world.bad_releases.add(world.releases[0, "B"])
    journal = do(world, 0, "B")
    assert journal is not None and (journal.outcome, journal.source) == ("failed", None)
    # What never served is no way back for the next try either.
    world.bad_releases.add(world.releases[0, "C"])
    journal = do(world, 0, "C")
    assert journal is not None and (journal.outcome, journal.source) == ("failed", None)
    world.bad_releases.clear()
    journal = do(world, 0, "C")
    assert journal is not None and journal.outcome == "new"
    assert linked_release(world.paths, 0, "previous") is None
    check(world, 0)


def test_unit_that_does_not_stop(world: World) -> None:
    world.stuck.add(0)
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "failed" and "does not stop" in journal.error
    assert world.units[0].running == linked_release(world.paths, 0, "current")


def test_requests_that_do_not_end(world: World) -> None:
    engine = world.engines[0]
    engine.counters = engine.counters.__class__(3, 0, 1, 1, 0)
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "refused"
    assert "still 3 requests" in journal.error and "nothing changed" in journal.error
    assert world.units[0].running == world.releases[0, "A"]
    check(world, 0)
    journal = do(world, 0, "B", force_drain=True)
    assert journal is not None and journal.outcome == "new"
    check(world, 0)


def test_operators_drain_stands(world: World) -> None:
    world.tool().membership.take_out(0, "operator", "test")
    do(world, 0, "B")
    assert world.tool().reasons.of(0) == ["operator"]
    check(world, 0)


def test_broken_nginx_changes_nothing(world: World) -> None:
    world.nginx_refuses = True
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "refused" and "unknown directive" in journal.error
    assert world.inside(0) and not world.tool().reasons.of(0)
    check(world, 0)


def test_nginx_broken_meanwhile_is_finished_later(world: World) -> None:
    node = LiveNode(world.tool())
    real = node.verify

    def verify(index: int, since: float, before: float | None) -> float:
        speed = real(index, since, before)
        world.nginx_refuses = True
        return speed

    node.verify = verify  # type: ignore[method-assign]
    with pytest.raises(BalancerError, match="unknown directive"):
        switch(node, 0, world.releases[0, "B"])
    world.nginx_refuses = False
    journal = do(world, 0, "B")
    assert journal is not None and journal.outcome == "new"
    check(world, 0)


def kill_at(world: World, index: int, name: str, effect: int) -> bool:
    """Start a switch that gets killed at the effect; False when it ended before."""
    world.kill_after(effect)
    try:
        do(world, index, name)
    except Killed:
        return True
    finally:
        world.kill_after(None)
    return False


def half_switched(world: World, index: int = 0, name: str = "B", step: str = "start") -> None:
    node = LiveNode(world.tool())

    def die(*_: object) -> None:
        raise Killed

    setattr(node, {"start": "start", "gate": "verify"}[step], die)
    with pytest.raises(Killed):
        switch(node, index, world.releases[index, name])


def test_other_replica_has_to_wait(world: World) -> None:
    half_switched(world)
    with pytest.raises(RefusedError, match=f"gpu-node switch 0 {world.releases[0, 'B']}"):
        do(world, 1, "B")
    do(world, 0, "B")
    do(world, 1, "B")
    check(world, 0)
    check(world, 1)


def test_other_target_takes_over_and_keeps_the_way_back(world: World) -> None:
    half_switched(world, step="gate")
    assert way_back(LiveNode(world.tool()), 0) == world.releases[0, "A"]
    world.bad_releases.add(world.releases[0, "C"])
    journal = do(world, 0, "C")
    assert journal is not None and (journal.outcome, journal.source) == ("rolled_back", world.releases[0, "A"])
    check(world, 0)


def test_way_back(world: World) -> None:
    node = LiveNode(world.tool())
    with pytest.raises(ConfigError, match="no previous release"):
        way_back(node, 0)
    do(world, 0, "B")
    assert way_back(node, 0) == world.releases[0, "A"]


@pytest.mark.parametrize("name", ["nonsense", "0" * 12])
def test_unknown_release(world: World, name: str) -> None:
    with pytest.raises(ConfigError):
        switch(LiveNode(world.tool()), 0, name)
    check(world, 0)


def test_release_of_the_other_replica(world: World) -> None:
    with pytest.raises(ConfigError, match="is for replica 1, not for replica 0: choose"):
        switch(LiveNode(world.tool()), 0, world.releases[1, "B"])


@pytest.mark.parametrize("bad", [False, True], ids=["good", "bad"])
def test_another_port(world: World, bad: bool) -> None:
    """node.json has the new ports before the first switch; each engine is met where it listens, at every moment."""
    world.write_node(node_value(first_port=9000))
    world.tool().membership.reconcile()
    assert world.inside(0) and world.inside(1)
    world.releases[0, "P"] = world.make_release(0, "P", port=9000)
    if bad:
        world.bad_releases.add(world.releases[0, "P"])
    journal = do(world, 0, "P")
    assert journal is not None and journal.outcome == ("rolled_back" if bad else "new")
    assert world.port(0) == (8000 if bad else 9000) and world.port(1) == 8001
    check(world, 0)
    check(world, 1)
    # A release from before the change is a way back as any other is.
    do(world, 0, "B")
    assert world.port(0) == 8000
    check(world, 0)


def test_port_of_the_other_replica(world: World) -> None:
    release = world.make_release(0, "P", port=8001)
    with pytest.raises(ConfigError, match="wants port 8001, on which replica 1 listens: give first_port"):
        switch(LiveNode(world.tool()), 0, release)
    check(world, 0)


def test_image_that_was_pruned(world: World) -> None:
    """Refused while the replica still serves, and not found out after its stop."""
    world.releases[0, "B"] = world.make_release(0, "B", image={"ref": "localhost/x:2", "id": "sha256:" + "ef" * 32})
    world.pruned.add("ef" * 32)
    world.commands.clear()
    with pytest.raises(ConfigError, match=r"image localhost/x:2 \(efefefefefef\) of release .* `podman load`"):
        do(world, 0, "B")
    assert not [command for command in world.commands if command[:2] == ["systemctl", "stop"]]
    check(world, 0)
    assert LiveNode(world.tool()).journal(0) is None


def test_warns_when_the_other_is_out(world: World) -> None:
    world.tool().membership.take_out(1, "operator", "test")
    do(world, 0, "B")
    assert any("replica 1 is out too (operator)" in line for line in world.said)


def test_gate_of_a_unit_that_is_not_active(world: World) -> None:
    world.units[0].active = "failed"
    with pytest.raises(StepError, match="is failed"):
        LiveNode(world.tool()).verify(0, world.now, None)


@given(st.text())
def test_any_journal_text(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_journal(text, "switch.json")


def test_killed_at_every_effect(tmp_path: Path) -> None:
    """Good and bad release, each killed once at each side effect, then run again."""
    for bad in (False, True):
        effect = 0
        while True:
            with World(tmp_path / f"{bad}-{effect}") as world:
                if bad:
                    world.bad_releases.add(world.releases[0, "B"])
                if not kill_at(world, 0, "B", effect):
                    break
                journal = do(world, 0, "B")
                # Killed after everything was done, there is nothing left to say.
                assert journal is None or journal.outcome == ("rolled_back" if bad else "new")
                check(world, 0)
                check(world, 1)
            effect += 1
        assert effect > 25


class Operations(RuleBasedStateMachine):
    """Operators, kills, reboots and a broken nginx in any order; then all is repaired and run to its end."""

    @initialize()
    def boot(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(Path(self.folder.name) / "node")
        self.world.__enter__()

    @rule(index=st.integers(0, 1), name=st.sampled_from("ABC"), effect=st.none() | st.integers(0, 70))
    def switch(self, index: int, name: str, effect: int | None) -> None:
        self.world.kill_after(effect)
        with contextlib.suppress(Killed, RefusedError, BalancerError):
            do(self.world, index, name)
        self.world.kill_after(None)

    @rule(index=st.integers(0, 1), name=st.sampled_from("ABC"))
    def spoil(self, index: int, name: str) -> None:
        self.world.bad_releases ^= {self.world.releases[index, name]}

    @rule()
    def nginx_breaks_or_is_repaired(self) -> None:
        self.world.nginx_refuses = not self.world.nginx_refuses

    @rule(index=st.integers(0, 1))
    def operator_drains(self, index: int) -> None:
        with contextlib.suppress(BalancerError):
            self.world.tool().membership.take_out(index, "operator", "test")

    @rule(index=st.integers(0, 1))
    def operator_undrains(self, index: int) -> None:
        with contextlib.suppress(BalancerError):
            self.world.tool().membership.let_in(index, "operator")

    @rule()
    def reboot(self) -> None:
        self.world.reboot()

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def never_two_half_switched(self) -> None:
        node = LiveNode(self.world.tool())
        journals = [node.journal(index) for index in (0, 1)]
        assert sum(journal is not None and journal.outcome is None for journal in journals) <= 1
        for index, unit in self.world.units.items():
            current = linked_release(self.world.paths, index, "current")
            journal = journals[index]
            assert unit.running in (None, current)
            if journal is not None and journal.outcome is not None:
                assert current in (journal.source, journal.target)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        try:
            world.nginx_refuses = False
            world.bad_releases.clear()
            world.reboot()
            for index in (0, 1):
                journal = LiveNode(world.tool()).journal(index)
                if journal is not None and journal.outcome is None:
                    switch(LiveNode(world.tool()), index, journal.target)
            for index in (0, 1):
                journal = LiveNode(world.tool()).journal(index)
                if journal is not None and journal.outcome == "failed":
                    switch(LiveNode(world.tool()), index, journal.target)
            world.tool().membership.reconcile()
            for index in (0, 1):
                check(world, index)
        finally:
            world.__exit__()
            self.folder.cleanup()


Operations.TestCase.settings = settings(
    max_examples=15, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOperations = Operations.TestCase
