"""The command line: verbs, exit codes, what is said where."""

import json

import pytest
from gpu_node import cli, smoke, status
from gpu_node.engine import Metrics
from gpu_node.host import Host

from tests.unit.node_tool.fakes import Became, FakeEngine, FakeTool, World, node_value


@pytest.fixture(autouse=True)
def played(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own tool, with the played engines."""

    class PlayedTool(FakeTool):
        pass

    PlayedTool.world = world
    monkeypatch.setattr(cli, "Tool", PlayedTool)
    monkeypatch.setattr(smoke, "balancer", lambda tool: FakeEngine(8080))


def gpu_node(world: World, *arguments: str) -> int:
    return cli.run(arguments, world.paths, world)


def test_status(world: World) -> None:
    gpu_node(world, "drain", "1")
    world.said.clear()
    assert gpu_node(world, "status", "--json") == 0
    first, second = json.loads(world.said[0])
    assert list(first) == [*status.COLUMNS, *status.MORE]
    assert first == {
        "index": 0, "unit": "vllm-replica@0.service", "port": 8000, "cpus": "0", "memory_node": "0",
        "model": "model-A", "release": world.releases[0, "A"], "previous": None, "state": "active", "out": [],
        "model_digest": "cdcdcdcdcdcd", "served_model_name": "tiny",
        "running": world.releases[0, "A"], "drift": [], "rollout": None, "differs": False,
    }  # fmt: skip
    assert second["out"] == ["operator"]
    assert gpu_node(world, "status") == 0
    assert world.said[-1].splitlines()[0].split() == list(status.COLUMNS.values())


def test_status_of_a_damaged_release(world: World) -> None:
    (world.paths.release(world.releases[0, "A"]) / "engine.yaml").write_text("changed")
    assert gpu_node(world, "status", "--json") == 0
    assert json.loads(world.said[-1])[0]["release"] == world.releases[0, "A"] and "SHA-256" in world.warned[0]


def test_drain_and_undrain(world: World) -> None:
    assert gpu_node(world, "drain", "0") == 0 and not world.inside(0)
    assert gpu_node(world, "undrain", "0") == 0 and world.inside(0)


def test_drain_that_times_out_stays_out(world: World) -> None:
    world.engines[0].counters = Metrics(1, 0, 1, 1, 0)
    assert gpu_node(world, "drain", "0", "--timeout", "2") == 1
    assert not world.inside(0) and "still 1 requests" in world.said[-1]


def test_drain_with_broken_nginx_changes_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.nginx_refuses = True
    assert gpu_node(world, "drain", "0") == 2
    assert "gpu-node: error: nginx refuses" in capsys.readouterr().err
    assert not world.tool().reasons.of(0)


def test_undrain_while_the_last_one_announces(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The drain that still waits must not take it out after all."""
    world.tool().reasons.add(1, "operator", "test")
    began = world.now

    def undrain() -> None:
        if world.now >= began + 5:
            world.on_sleep = lambda: None
            assert gpu_node(world, "undrain", "0") == 0
            assert world.said[-1] == "replica 0: in the balancer"

    world.on_sleep = undrain
    assert gpu_node(world, "drain", "0") == 2
    assert "replica 0 stays in" in capsys.readouterr().err
    assert world.inside(0) and not world.tool().reasons.of(0) and not world.paths.leaving.exists()
    assert world.now - began < 7


def test_undrain_of_a_replica_that_is_out_for_more(world: World) -> None:
    world.tool().membership.take_out(0, "prober", "test")
    gpu_node(world, "drain", "0")
    assert gpu_node(world, "undrain", "0") == 0
    assert world.said[-1] == "replica 0: still out: prober"


@pytest.mark.parametrize(
    ("bad", "code"), [([], 0), (["B"], 3), (["A", "B"], 4)], ids=["new", "rolled back", "stays out"]
)
def test_switch_exit_codes(world: World, bad: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    world.bad_releases = {world.releases[0, name] for name in bad}
    assert gpu_node(world, "switch", "0", world.releases[0, "B"]) == code
    assert ("gpu-node: error: " in capsys.readouterr().err) == bool(code)


def test_switch_refused(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_node(world, "switch", "0", "nonsense") == 2
    assert gpu_node(world, "switch", "7", world.releases[0, "B"]) == 2
    assert "no replica 7" in capsys.readouterr().err


def test_switch_that_nginx_stops_on_its_way_in_is_no_refusal(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The new release runs and is out: somebody has to see to it."""

    def break_nginx(_: int) -> None:
        world.nginx_refuses = True

    world.on_start = break_nginx
    assert gpu_node(world, "switch", "0", world.releases[0, "B"]) == 4
    assert "nginx refuses" in (said := capsys.readouterr().err) and "run the same again" in said
    assert world.units[0].running == world.releases[0, "B"] and not world.inside(0)
    world.nginx_refuses = False
    assert gpu_node(world, "switch", "0", world.releases[0, "B"]) == 0 and world.inside(0)


@pytest.mark.parametrize(("step", "code"), [("drain", 2), ("measure", 4), ("start", 4)])
def test_switch_on_a_full_disk(world: World, step: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused says that nothing changed, which is so only until the replica goes out."""
    world.full = lambda path, text: path.name == "switch.json" and f'"step": "{step}"' in text
    assert gpu_node(world, "switch", "0", world.releases[0, "B"]) == code
    assert "No space left" in capsys.readouterr().err
    assert world.inside(0) == (code == 2)
    world.full = lambda *_: False
    assert gpu_node(world, "switch", "0", world.releases[0, "B"]) == 0 and world.inside(0)


def test_rollback(world: World) -> None:
    assert gpu_node(world, "rollback", "0") == 2
    assert gpu_node(world, "switch", "0", world.releases[0, "B"]) == 0
    assert gpu_node(world, "rollback", "0") == 0
    assert world.units[0].running == world.releases[0, "A"]


def test_logs(world: World) -> None:
    with pytest.raises(Became) as caught:
        gpu_node(world, "logs", "1", "--follow", "--lines", "5")
    assert caught.value.argv == ["journalctl", "--no-pager", "-u", "vllm-replica@1.service", "-n", "5", "--follow"]


def test_render_and_apply(world: World) -> None:
    world.tool().reasons.add(0, "operator", "test")
    assert gpu_node(world, "render") == 0
    assert "changed" in world.said[-1] and world.inside(0)
    assert gpu_node(world, "apply") == 0 and not world.inside(0)
    world.nginx_refuses = True
    assert gpu_node(world, "apply") == 2


def test_boot(world: World) -> None:
    world.units[0].active = "inactive"
    assert gpu_node(world, "boot") == 0
    assert world.tool().reasons.of(0) == ["unit"] and not world.tool().reasons.of(1)
    world.paths.clients_json.unlink()
    assert gpu_node(world, "boot") == 0 and "clients.json is missing" in world.warned[-1]


def test_smoke(world: World) -> None:
    assert gpu_node(world, "smoke", "--json") == 0
    rows = json.loads(world.said[-1])
    assert [(row["target"], row["stream"], row["ok"]) for row in rows] == [
        (target, stream, True) for target in ("replica 0", "replica 1", "balancer") for stream in (False, True)
    ]
    assert list(rows[0]) == list(smoke.COLUMNS)
    world.engines[1].frozen = True
    assert gpu_node(world, "smoke") == 1 and "FAIL" in world.said[-1]


def test_smoke_checks_identity(world: World) -> None:
    (world.paths.proc / "100/cmdline").write_text("python3\0vllm\0serve\0--other\0")
    assert gpu_node(world, "smoke", "--json") == 1
    assert "was started as 'python3 vllm serve --other'" in json.loads(world.said[-1])[0]["error"]


def test_smoke_asks_for_what_the_replicas_serve(world: World) -> None:
    """The plan's name is another one after a rollback, and before a replica's turn."""
    world.write_node(node_value(model="new"))
    assert gpu_node(world, "smoke") == 0


def test_probe(world: World) -> None:
    assert gpu_node(world, "probe") == 0
    assert world.said[-2:] == ["replica 0: idle", "replica 1: idle"]


@pytest.mark.parametrize(("verb", "does"), [("unit-stop", "stop"), ("unit-cleanup", "rm")])
def test_unit_ends_without_configuration(world: World, verb: str, does: str) -> None:
    world.paths.node_json.unlink()
    world.commands.clear()
    assert gpu_node(world, verb, "0") == 0
    assert [command[:2] for command in world.commands] == [["podman", does]]


def test_unit_step_that_fails(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.paths.node_json.unlink()
    assert gpu_node(world, "unit-prepare", "0") == 1
    assert "node.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["drain"], ["drain", "x"], ["drain", "0", "--timeout", "-1"]])
def test_usage(world: World, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_node(world, *arguments)
    assert caught.value.code == 2


def test_unreadable_secret_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied", "/etc/gpu-node/secrets/engine.env")

    monkeypatch.setattr("gpu_node.membership.load_engine_key", refuse)
    assert gpu_node(world, "apply") == 2
    assert "run it as root" in capsys.readouterr().err


def test_real_commands() -> None:
    host = Host()
    assert host.run(["sh", "-c", "echo out; exit 3"]).returncode == 3
    assert host.run(["no-such-command"]).returncode == 127
    assert host.run(["sleep", "5"], timeout_s=0.1).returncode == 124
    lines: list[str] = []
    with host.follow(["sh", "-c", "echo one; exec sleep 30"], lines.append):
        pass
    assert lines == ["one"]
    with host.follow(["no-such-command"], lines.append):
        pass
