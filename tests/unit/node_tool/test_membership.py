"""Membership: written whole, tested, taken over, restored."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_node import files
from gpu_node.config import Served
from gpu_node.errors import BalancerError, LockedError
from gpu_node.live import LiveNode
from gpu_node.reasons import Reasons
from gpu_node.tool import Tool

from tests.unit.node_tool.fakes import CLIENT_KEY, NGINX_PID, Killed, World, node_value


def test_out_and_in(world: World) -> None:
    membership = world.tool().membership
    before = membership.served_generation() or 0
    applied = membership.take_out(0, "operator", "test")
    assert applied.generation == before + 1 == membership.served_generation()
    assert not world.inside(0) and world.inside(1)
    membership.let_in(0, "operator")
    assert world.inside(0)


def test_two_reasons(world: World) -> None:
    membership = world.tool().membership
    membership.take_out(0, "operator", "test")
    membership.take_out(0, "prober", "test")
    membership.let_in(0, "operator")
    assert not world.inside(0)


def test_nothing_to_do_reloads_nothing(world: World) -> None:
    world.commands.clear()
    assert not world.tool().membership.apply().changed
    assert not world.commands


def test_port_of_what_runs(world: World) -> None:
    """Not of the plan, nor of a link that was moved by hand; the plan's where no release says."""
    world.write_node(node_value(first_port=9000, model="new"))
    tool = world.tool()
    moved = world.make_release(0, "P", port=9500)
    LiveNode(tool).point(0, "current", moved)
    assert tool.served(0) == Served(8000, "tiny") and Tool.engine(tool, 0).name == "127.0.0.1:8000"
    world.stop_unit(0)
    assert tool.served(0) == Served(9500, "tiny")
    (world.paths.release(moved) / "release.json").write_text("{")
    assert tool.served(0) == Served(9000, "new")
    (world.paths.replica(0) / "current").unlink()
    assert tool.served(0) == Served(9000, "new")
    tool.membership.apply()
    assert "server 127.0.0.1:9000 max_fails=0 down" in (world.served or "") and world.inside(1)


def test_anew_reloads_in_any_case(world: World) -> None:
    generation = world.tool().membership.served_generation()
    applied = world.tool().membership.apply(anew=True)
    assert applied.generation == world.tool().membership.served_generation() == (generation or 0) + 1


def test_refused_configuration_restores_the_files(world: World) -> None:
    texts = world.paths.members_conf.read_text(), world.paths.secrets_conf.read_text()
    world.nginx_refuses = True
    with pytest.raises(BalancerError, match=r"unknown directive.*gpu-node apply"):
        world.tool().membership.take_out(0, "operator", "test")
    assert (world.paths.members_conf.read_text(), world.paths.secrets_conf.read_text()) == texts
    world.nginx_refuses = False
    world.tool().membership.reconcile()
    assert not world.inside(0)


def test_nginx_that_takes_nothing_over(world: World) -> None:
    world.nginx_deaf = True
    with pytest.raises(BalancerError, match="does not serve generation"):
        world.tool().membership.take_out(0, "operator", "test")


def test_killed_anywhere_and_reconciled(world: World) -> None:
    for effect in range(40):
        reason = "operator"
        change = world.tool().membership.take_out if effect % 2 else None
        world.kill_after(effect)
        with contextlib.suppress(Killed):
            if change:
                change(0, reason, "test")
            else:
                world.tool().membership.let_in(0, reason)
        world.kill_after(None)
        world.tool().membership.reconcile()
        assert world.inside(0) == (not world.tool().reasons.of(0))


def test_other_keys_are_another_generation(world: World) -> None:
    membership = world.tool().membership
    before = membership.served_generation() or 0
    world.paths.clients_json.write_text('[{"name": "demo", "key": "another"}]')
    world.kill_after(2)
    with pytest.raises(Killed):
        membership.apply()
    world.kill_after(None)
    membership.apply()
    assert (membership.served_generation() or 0) > before


def test_stopped_nginx_gets_files_only(world: World) -> None:
    world.end_process(NGINX_PID)
    world.commands.clear()
    world.nginx_refuses = True
    applied = world.tool().membership.take_out(0, "operator", "test")
    assert applied.changed and not applied.running and not world.commands
    assert "8000 max_fails=0 down" in world.paths.members_conf.read_text()


def test_pid_of_another_program_is_not_hung_up(world: World) -> None:
    world.process(NGINX_PID, "sshd", ["sshd"])
    assert not world.tool().membership.apply(anew=True).running


def test_modes(world: World) -> None:
    assert world.paths.members_conf.stat().st_mode & 0o777 == 0o600
    assert world.paths.secrets_conf.stat().st_mode & 0o777 == 0o600
    assert world.paths.members_conf.parent.stat().st_mode & 0o777 == 0o700
    assert CLIENT_KEY not in world.paths.members_conf.read_text()


def test_lost_file_goes_on_counting(world: World) -> None:
    served = world.tool().membership.served_generation() or 0
    world.paths.members_conf.unlink()
    assert world.tool().membership.apply().generation == served + 1


def test_unknown_reason_counts_as_out(world: World) -> None:
    reasons = Reasons(world.paths)
    reasons.add(0, "operator", "test")
    (world.paths.replica(0) / "out/.operator.77").write_text("cut off")
    (world.paths.replica(0) / "out/later").write_text("")
    assert reasons.of(0) == ["later", "operator"]
    with pytest.raises(ValueError, match="unknown out-reason"):
        reasons.add(0, "other", "test")


def test_lock_names_its_holder(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from gpu_node import files\n"
        "with files.lock(Path(sys.argv[1]), 'gpu-node switch (pid 7)', 1): print('held', flush=True); time.sleep(30)"
    )
    path = tmp_path / "lock"
    environment = os.environ | {"PYTHONPATH": str(Path(files.__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, env=environment) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(LockedError, match=r"held by gpu-node switch \(pid 7\)"), files.lock(path, "me", 0.1):
            pass
        other.kill()
    # A killed holder does not keep it.
    with files.lock(path, "me", 1):
        pass
