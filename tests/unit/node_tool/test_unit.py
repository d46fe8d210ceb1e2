"""The steps of a replica's unit and its gate: each check once in a state in which it fails."""

import json
import os
from typing import Any

import pytest
from gpu_node import config, drain
from gpu_node.errors import ConfigError, EngineError, GateError
from gpu_node.live import LiveNode
from gpu_node.unit import UnitSteps, runs_command
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import COMMAND, IMAGE_ID, Became, World, secrets_in

CGROUP = "/system.slice/system-vllm\\x2dreplica.slice/vllm-replica@0.service"


def steps(world: World, index: int = 0) -> UnitSteps:
    return UnitSteps(world.tool(), index)


def removed(world: World) -> bool:
    """Whether the container was ended, after the engine's last lines were read: systemd would wait for it in vain."""
    return [command[:2] for command in world.commands][-2:] == [["journalctl", "-q"], ["podman", "rm"]]


@pytest.fixture
def stopped(world: World) -> World:
    world.stop_unit(0)
    return world


def test_prepare(stopped: World) -> None:
    steps(stopped).prepare()
    assert any("starting release" in line for line in stopped.said)


def test_prepare_removes_a_stale_container(stopped: World) -> None:
    stopped.stale.add(0)
    steps(stopped).prepare()
    assert "replica 0: removing the stale container vllm-replica-0" in stopped.said and not stopped.stale


def test_prepare_names_who_holds_the_port(stopped: World) -> None:
    stopped.process(60, "python3", ["python3", "-m", "http.server", "8000"], inodes=[5])
    stopped.sockets(("127.0.0.1", 8000, "0.0.0.0", 0, 10, 5))
    with pytest.raises(GateError, match=r"port 8000 is held by pid 60 \(python3 -m http.server 8000\): stop it"):
        steps(stopped).prepare()


def test_prepare_names_a_leftover_process(stopped: World) -> None:
    stopped.process(61, "VLLM::EngineCor", ["VLLM::EngineCore"], cgroup=f"{CGROUP}/container")
    # This process itself runs in the unit's control group as well.
    stopped.process(os.getpid(), "gpu-node", ["gpu-node"], cgroup=CGROUP)
    with pytest.raises(GateError, match=r"pid 61 \(VLLM::EngineCore\) is left of an earlier run"):
        steps(stopped).prepare()


GPU = "GPU-11111111-2222-3333-4444-000000000001"
OTHER_GPU = "GPU-11111111-2222-3333-4444-000000000002"


@pytest.fixture
def on_gpu(stopped: World) -> World:
    """Replica 0 stopped, its release made for a GPU that the driver sees."""
    release = stopped.make_release(0, "G", gpus=[{"pci_address": "0000:41:00.0", "uuid": GPU}])
    (stopped.paths.replica(0) / "current").unlink()
    (stopped.paths.replica(0) / "current").symlink_to(f"../../releases/{release}")
    stopped.gpus = [GPU, OTHER_GPU]
    return stopped


def test_prepare_on_a_free_gpu(on_gpu: World) -> None:
    on_gpu.gpu_processes = [f"{OTHER_GPU}, 62, 90000"]
    steps(on_gpu).prepare()
    assert any("starting release" in line for line in on_gpu.said)


def test_prepare_names_a_gpu_that_is_gone(on_gpu: World) -> None:
    on_gpu.gpus = [OTHER_GPU]
    with pytest.raises(GateError, match=rf"the driver does not see GPU {GPU} \(0000:41:00\.0\): look for 'Xid'"):
        steps(on_gpu).prepare()


def test_prepare_names_what_holds_a_gpu(on_gpu: World) -> None:
    """An engine that outlived its server holds the memory that the next one needs."""
    on_gpu.process(62, "VLLM::EngineCor", ["VLLM::EngineCore"])
    on_gpu.gpu_processes = [f"{OTHER_GPU}, 63, 5", f"{GPU}, 62, 88000"]
    with pytest.raises(GateError, match=rf"pid 62 \(VLLM::EngineCore\) holds 88000 MiB of GPU {GPU}: end it"):
        steps(on_gpu).prepare()


def test_prepare_with_a_driver_that_does_not_answer(on_gpu: World) -> None:
    on_gpu.driver_hangs = True
    with pytest.raises(
        GateError, match=r"the driver does not answer \(nvidia-smi --query-gpu=uuid\): nvidia-smi was still"
    ):
        steps(on_gpu).prepare()


def test_prepare_without_release(stopped: World) -> None:
    (stopped.paths.replica(0) / "current").unlink()
    with pytest.raises(ConfigError, match="gpu-node switch 0 RELEASE"):
        steps(stopped).prepare()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("engine.yaml", "changed", "SHA-256 is"),
        ("engine.env", None, "not complete"),
        ("release.json", None, "is missing"),
        ("release.json", "{", "not valid JSON"),
        ("release.json", "[]", "expected an object"),
        ("release.json", '{"id": "x"}', "was changed"),
    ],
)
def test_prepare_with_a_damaged_release(stopped: World, file: str, content: str | None, says: str) -> None:
    path = stopped.paths.release(stopped.releases[0, "A"]) / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        steps(stopped).prepare()


@pytest.mark.parametrize(
    "changes",
    [
        {"engine_args": {"speculative-config": '\'{"method":"mtp"}\''}},
        {"engine_args": {"deep": [{"er": '"quoted"'}]}},
        {"command": ["vllm", "'serve'"]},
        {"podman_args": ["--env", '"A=B"']},
        {"env": {"A": "'B'"}},
    ],
)
def test_values_in_stray_quotes_are_refused(world: World, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="begins with a quote"):
        config.load_release(world.paths, world.make_release(0, "Q", **changes))


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())))
def test_release_id_is_of_the_content(value: dict[str, Any]) -> None:
    identity = config.release_id(value)
    assert config.RELEASE_ID.fullmatch(identity)
    assert config.release_id(value | {"id": identity}) == identity
    assert config.release_id(value | {"more": 1}) != identity


def test_run_is_podman_with_the_releases_arguments(world: World) -> None:
    argument = '{"method":"ngram","x":"a b $HOME"}'
    identity = world.make_release(0, "A", podman_args=["--network", "host", "--label", argument])
    (world.paths.replica(0) / "current").unlink()
    (world.paths.replica(0) / "current").symlink_to(f"../../releases/{identity}")
    with pytest.raises(Became) as caught:
        steps(world).run()
    argv = caught.value.argv
    assert argv[:3] == ["podman", "run", "-d"] and {"--rm", "--cgroups=split", "--sdnotify=conmon"} <= set(argv)
    assert argv[-8 - 1 :] == ["--network", "host", "--label", argument, IMAGE_ID, *COMMAND]
    assert not secrets_in(argv)


def test_ready(world: World) -> None:
    world.tool().membership.take_out(0, "unit", "test")
    world.tool().reasons.add(0, "prober", "test")
    steps(world).ready()
    assert world.inside(0)


def test_ready_shows_progress(world: World) -> None:
    world.engines[0].up = False

    def load() -> None:
        world.engines[0].up = world.now >= 1025

    world.on_sleep = load
    steps(world).ready()
    assert "replica 0: loading, 20 s: boom" in world.said


def test_ready_ends_at_its_deadline(world: World) -> None:
    world.engines[0].up = False
    with pytest.raises(GateError, match=r"not ready after 60 s .*; the engine's last line: boom"):
        steps(world).ready()
    assert "replica 0: engine: loading weights" in world.said
    assert removed(world)


@pytest.mark.parametrize("pid", [100, 200], ids=["payload", "monitor"])
def test_ready_fails_at_once_when_the_container_ends(world: World, pid: int) -> None:
    world.engines[0].up = False
    world.on_sleep = lambda: world.end_process(pid) if world.now >= 1003 else None
    with pytest.raises(GateError, match=r"container ended 3 s after its start.*boom"):
        steps(world).ready()


def test_ready_without_container(world: World) -> None:
    world.units[0].running = None
    with pytest.raises(GateError, match="container ended 0 s"):
        steps(world).ready()


def test_ready_takes_a_zombie_for_dead(world: World) -> None:
    path = world.paths.proc / "100/stat"
    path.write_text(path.read_text().replace(") S", ") Z"))
    with pytest.raises(GateError, match="container ended"):
        steps(world).ready()


def test_ready_needs_a_token(world: World) -> None:
    world.tool().membership.take_out(0, "unit", "test")
    world.engines[0].frozen = True
    with pytest.raises(GateError, match="did not answer within"):
        steps(world).ready()
    assert not world.inside(0)
    assert removed(world)


def test_ready_goes_on_when_nginx_is_broken(world: World) -> None:
    world.tool().membership.take_out(0, "unit", "test")
    world.nginx_refuses = True
    steps(world).ready()
    assert any("unknown directive" in line for line in world.warned)
    world.nginx_refuses = False
    world.tool().membership.reconcile()
    assert world.inside(0)


def test_gate_passes(world: World) -> None:
    steps(world).verify(5)


def test_gate_other_process_answers(world: World) -> None:
    world.process(60, "python3", ["python3", "old.py"], inodes=[5])
    world.sockets(("127.0.0.1", 8000, "0.0.0.0", 0, 10, 5))
    with pytest.raises(GateError, match=r"answered by pid 60 \(python3 old.py\), which is not in vllm-replica@0"):
        steps(world).verify(5)


def test_gate_nobody_listens(world: World) -> None:
    world.sockets()
    with pytest.raises(GateError, match="nothing listens on port 8000"):
        steps(world).verify(5)


def test_gate_other_image(world: World) -> None:
    identity = world.make_release(0, "I", image={"ref": "x", "id": "ef" * 32})
    (world.paths.replica(0) / "current").unlink()
    (world.paths.replica(0) / "current").symlink_to(f"../../releases/{identity}")
    world.units[0].running = identity
    with pytest.raises(GateError, match="runs image abababababab"):
        steps(world).verify(5)


def test_gate_other_release(world: World) -> None:
    """A restart that nobody asked for may come between a link and its start."""
    world.units[0].running = world.releases[0, "B"]
    with pytest.raises(GateError, match=f"started from release {world.releases[0, 'B']}"):
        steps(world).verify(5)


def test_gate_other_release_with_another_port(world: World) -> None:
    """The link was moved by hand: what runs is named, and no port on which nothing listens."""
    LiveNode(world.tool()).point(0, "current", world.make_release(0, "P", port=9000))
    with pytest.raises(GateError, match=f"started from release {world.releases[0, 'A']}"):
        steps(world).verify(5)


def test_gate_other_command(world: World) -> None:
    (world.paths.proc / "100/cmdline").write_text("python3\0vllm\0serve\0--other\0")
    with pytest.raises(GateError, match="was started as 'python3 vllm serve --other'"):
        steps(world).verify(5)


def test_gate_other_model(world: World) -> None:
    world.engines[0].names = ["other"]
    with pytest.raises(GateError, match="serves other, not tiny"):
        steps(world).verify(5)


def test_gate_no_token(world: World) -> None:
    world.engines[0].frozen = True
    with pytest.raises(EngineError):
        steps(world).verify(5)


@pytest.mark.parametrize(("address", "child"), [("0.0.0.0", 100), ("10.0.0.5", 101)])
def test_gate_listener_beyond_loopback(world: World, address: str, child: int) -> None:
    if child != 100:
        world.process(child, "VLLM::EngineCor", ["VLLM::EngineCore"], parent=100)
    world.process(child, world.tool().proc.name(child), ["vllm", *COMMAND], 200 if child == 100 else 100, inodes=[6])
    world.listen((address, 45000, "0.0.0.0", 0, 10, 6))
    with pytest.raises(GateError, match=rf"pid {child} .* listens on {address}:45000, reachable from outside"):
        steps(world).verify(5)


@pytest.mark.parametrize(
    "arguments",
    [COMMAND, ["/usr/bin/python3", "/opt/venv/bin/vllm", *COMMAND[1:]], ["/run/podman-init", "--", *COMMAND]],
)
def test_command(arguments: list[str]) -> None:
    assert runs_command(arguments, tuple(COMMAND))


@given(st.lists(st.text()))
def test_any_other_command(arguments: list[str]) -> None:
    assert not runs_command(arguments, tuple(COMMAND))


def test_stop_takes_out_first(world: World) -> None:
    steps(world).stop()
    assert world.tool().reasons.of(0) == ["unit"] and not world.inside(0)
    assert ["podman", "stop", "--ignore", "-t", "20", "vllm-replica-0"] in world.commands
    assert not any(command[0] == "systemctl" for command in world.commands)


def test_stop_of_what_is_out_already_does_not_prove_it_again(world: World) -> None:
    world.tool().membership.take_out(0, "rollout", "test")
    looks: list[float] = []
    world.on_look = lambda: looks.append(world.now)
    began = world.now
    steps(world).stop()
    assert len(looks) == 1 and world.now - began == pytest.approx(drain.CONFIRM_AFTER_S)
    looks.clear()
    steps(world, 1).stop()
    assert len(looks) > drain.SAME_ANSWERS


def test_ready_asks_podman_once(world: World) -> None:
    """It takes a tenth of a second, in which the replica is out."""
    world.commands.clear()
    steps(world).ready()
    assert [command[1:3] for command in world.commands if command[0] == "podman"] == [["container", "inspect"]]


def test_stop_and_cleanup_go_on_when_nginx_or_keys_are_broken(world: World) -> None:
    world.nginx_refuses = True
    world.paths.clients_json.unlink()
    world.commands.clear()
    steps(world).stop()
    steps(world).cleanup()
    assert [command[1] for command in world.commands if command[0] == "podman"] == ["stop", "rm"]
    assert world.warned and not secrets_in(world.warned)


def test_stop_is_bounded(world: World) -> None:
    counters = world.engines[0].counters
    world.engines[0].counters = counters.__class__(1, 0, 1, 1, 0)
    steps(world).stop()
    assert any("stopping although not drained after 4 s: 1 requests" in line for line in world.said)


def test_no_key_in_any_command_or_line(world: World) -> None:
    world.engines[0].frozen = True
    with pytest.raises(GateError) as caught:
        steps(world).ready()
    steps(world).stop()
    words = [word for command in world.commands for word in command]
    assert not secrets_in([*words, *world.said, *world.warned, str(caught.value), json.dumps(words)])
