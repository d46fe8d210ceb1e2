"""A node below a temporary folder: real files and links; systemd, Podman, nginx, /proc and the engines are played."""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self
from unittest import mock

from gpu_node import config, files
from gpu_node.config import linked_release
from gpu_node.engine import Completion, Engine, Generation, Metrics
from gpu_node.errors import EngineError, ToolError
from gpu_node.host import Host, Result
from gpu_node.live import LiveNode
from gpu_node.paths import Paths
from gpu_node.tool import Tool
from gpu_node.unit import UnitSteps

ENGINE_KEY = "engine-key-0123456789"
CLIENT_KEY = "client-key-0123456789"
NGINX_PID = 50
IMAGE_ID = "ab" * 32
STATUS_PORT = 8079
COMMAND = ["vllm", "serve", "--config", "/etc/vllm/engine.yaml"]
TCP_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


class Killed(BaseException):
    """The tool was killed here: nothing may catch it."""


class Became(BaseException):
    """The tool replaced itself by this command."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)


def node_value(first_port: int = 8000, model: str = "tiny") -> dict[str, Any]:
    """The value of a node.json."""
    return {
        "replicas": [
            {"index": i, "port": first_port + i, "unit": f"vllm-replica@{i}.service", "container": f"vllm-replica-{i}"}
            for i in (0, 1)
        ],
        "served_model_name": model,
        "balancer": {"status_port": STATUS_PORT, "listen": ["127.0.0.1:8080"]},
        "drain_timeout_s": 4,
        "start_timeout_s": 60,
        "shutdown_timeout_s": 5,
        "prober": {"interval_s": 5, "http_timeout_s": 5, "http_failures": 2, "stall_s": 30, "idle_probe_s": 30},
    }


class FakeEngine(Engine):
    """An engine that does what its fields say."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, ENGINE_KEY)
        self.up = True
        self.frozen = False
        self.names = ["tiny"]
        self.counters = Metrics(0, 0, 100, 50, 0)
        self.tokens_per_s = 100.0
        self.speeds: list[float] = []  # of the next generations, then tokens_per_s again
        self.text = "word "
        self.one_event = False
        self.cut_at: int | None = None  # tokens after which it ends although more were asked for

    def healthy(self, timeout_s: float) -> bool:
        return self.up

    def models(self, timeout_s: float) -> list[str]:
        return self.names

    def metrics(self, timeout_s: float) -> Metrics:
        if not self.up:
            raise EngineError("does not answer")
        return self.counters

    def kv_tokens(self, timeout_s: float) -> int | None:
        self.metrics(timeout_s)
        return 19328

    def complete(self, model: str, max_tokens: int, timeout_s: float, stream: bool = False) -> Completion:
        if not self.up or self.frozen:
            raise EngineError(f"{self.name} did not answer within {timeout_s:.0f} s")
        if model not in self.names:
            raise EngineError(f"{self.name} answered HTTP 404: The model {model} does not exist.")
        return Completion(model, "", 3, max_tokens, 0.1, 0.05 if stream else None)

    def generate(self, model: str, tokens: int, timeout_s: float) -> Generation:
        if not self.up or self.frozen:
            raise EngineError(f"{self.name} did not answer within {timeout_s:.0f} s")
        speed = self.speeds.pop(0) if self.speeds else self.tokens_per_s
        came = tokens if self.cut_at is None else min(tokens, self.cut_at)
        arrivals = [0.05 + place / speed for place in range(came)]
        return Generation(self.text * came, came, tuple(arrivals[-1:] if self.one_event else arrivals))


class FakeUnit:
    """A replica's unit. running: the release whose container runs."""

    def __init__(self) -> None:
        self.active = "inactive"
        self.sub = "dead"
        self.running: str | None = None
        self.restarts = 0
        self.enabled = "enabled"


class FakeTool(Tool):
    """The tool with played engines."""

    world: "World"

    def engine(self, index: int) -> Engine:
        return self.world.engines[index]

    def wait_idle(self, index: int, timeout_s: float, say: Callable[[str], None] | None = None) -> Any:
        with mock.patch("gpu_node.tool.Engine", lambda *_: self.world.engines[index]):
            return super().wait_idle(index, timeout_s, say)


class World(Host):
    """The node, and the side effects of the tool on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths(root)
        self.said: list[str] = []
        self.warned: list[str] = []
        self.commands: list[list[str]] = []
        self.now = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None
        self.on_look: Callable[[], None] = lambda: None  # at nginx's generation
        self.nginx_refuses = False
        self.nginx_deaf = False
        self.served: str | None = None  # members.conf as nginx has it
        self.engines = {i: FakeEngine(8000 + i) for i in (0, 1)}
        self.units = {i: FakeUnit() for i in (0, 1)}
        self.bad_releases: set[str] = set()
        self.stuck: set[int] = set()  # units that systemd cannot stop
        self.gpus: list[str] = []  # UUIDs that the driver sees
        self.gpu_processes: list[str] = []  # rows of nvidia-smi's compute apps
        self.driver_hangs = False
        self.failing: set[int] = set()  # starts that are under way and will fail
        self.stale: set[int] = set()  # replicas with a stale container
        self.pruned: set[str] = set()  # ids of images that are not there
        self.kernel: list[tuple[float, str]] = []  # the kernel's log: when, and what
        self.on_start: Callable[[int], None] = lambda _: None
        self.kill_at: int | None = None
        self.full: Callable[[Path, str], bool] = lambda *_: False  # whether the disk is full for this file and text
        self._effects = 0
        self._played = 0
        self._patches = contextlib.ExitStack()
        for folder in ("etc/gpu-node/secrets", "run/lock", "proc/net"):
            (root / folder).mkdir(parents=True)
        self.write_node(node_value())
        self.paths.engine_env.write_text(f"VLLM_API_KEY={ENGINE_KEY}\n")
        self.paths.clients_json.write_text(json.dumps([{"name": "demo", "key": CLIENT_KEY}]))
        self.ports: dict[str, int] = {}  # of the releases
        self.releases = {(i, name): self.make_release(i, name) for i in (0, 1) for name in "ABC"}
        (root / "run/nginx.pid").write_text(f"{NGINX_PID}\n")
        self.process(NGINX_PID, "nginx", ["nginx: master process"])

    def __enter__(self) -> Self:
        for name in ("atomic_write", "replace_link", "remove"):
            self._patches.enter_context(mock.patch.object(files, name, self._counted(getattr(files, name))))
        # What fsync promises cannot be seen in a test, only waited for.
        self._patches.enter_context(mock.patch("os.fsync"))
        for index in (0, 1):
            LiveNode(self.tool()).point(index, "current", self.releases[index, "A"])
            self._start(index)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    # -- setting the scene ------------------------------------------------------------------------------------------

    def write_node(self, value: Any) -> None:
        self.paths.node_json.write_text(json.dumps(value))

    def make_release(self, index: int, name: str, **changes: Any) -> str:
        texts = {"engine.yaml": f"port: {8000 + index}\n", "engine.env": f"NAME={name}\n"}
        value: dict[str, Any] = {
            "replica": index,
            "profile": "cpu",
            "model": {"name": f"model-{name}", "digest": "cd" * 32},
            "image": {"ref": "localhost/gpu-node/vllm-cpu:1", "id": IMAGE_ID},
            "served_model_name": "tiny",
            "port": 8000 + index,
            "cpus": str(index),
            "memory_nodes": "0",
            "gpus": [],
            "podman_args": ["--network", "host"],
            "command": COMMAND,
            "engine_args": {"port": 8000 + index, "speculative-config": {"method": "ngram"}},
            "env": {"NAME": name},
            "files": {file: hashlib.sha256(text.encode()).hexdigest() for file, text in texts.items()},
        } | changes
        identity = config.release_id(value)
        self.ports[identity] = value["port"]
        folder = self.paths.release(identity)
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text)
        (folder / "release.json").write_text(json.dumps({"id": identity, **value}))
        return identity

    def process(
        self, pid: int, name: str, arguments: list[str], parent: int = 1, cgroup: str = "/", inodes: Sequence[int] = ()
    ) -> None:
        """A process in the played /proc."""
        folder = self.paths.proc / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        fields = ["S", str(parent), *["0"] * 17, str(pid * 7), "0"]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
        (folder / "comm").write_text(f"{name}\n")
        (folder / "cmdline").write_text("\0".join(arguments) + "\0")
        (folder / "cgroup").write_text(f"1:name=systemd:{cgroup}\n")
        for inode in inodes:
            (folder / "fd" / str(inode)).symlink_to(f"socket:[{inode}]")

    def end_process(self, pid: int) -> None:
        shutil.rmtree(self.paths.proc / str(pid), ignore_errors=True)

    def sockets(self, *rows: tuple[str, int, str, int, int, int]) -> None:
        """The played TCP table: local address and port, remote ones, state, inode."""

        def end(address: str, port: int) -> str:
            return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"

        self.paths.proc.joinpath("net/tcp").write_text(
            TCP_HEAD
            + "".join(
                f"   0: {end(la, lp)} {end(ra, rp)} {state:02X} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1\n"
                for la, lp, ra, rp, state, inode in rows
            )
        )

    def listen(self, *more: tuple[str, int, str, int, int, int]) -> None:
        """The listeners of the running replicas, and more."""
        own = [("127.0.0.1", self.port(i), "0.0.0.0", 0, 10, 9000 + i) for i in self.units if self.units[i].running]
        self.sockets(*own, *more)

    def tool(self) -> FakeTool:
        tool = FakeTool(self.paths, config.load_node(self.paths), self, "test")
        tool.world = self
        return tool

    def port(self, index: int) -> int:
        """Where the replica's engine listens, or will."""
        release = self.units[index].running or linked_release(self.paths, index, "current")
        return self.ports.get(release or "", 8000 + index)

    def inside(self, index: int) -> bool:
        """Whether nginx, as it is loaded, sends requests to the replica."""
        return bool(re.search(rf"server 127\.0\.0\.1:{self.port(index)} max_fails=0;", self.served or ""))

    def reboot(self) -> None:
        """Everything in /run is gone; boot step, nginx and the enabled units start."""
        shutil.rmtree(self.root / "run/gpu-node", ignore_errors=True)
        self.served = None
        for index, unit in self.units.items():
            unit.active, unit.sub, unit.running = "inactive", "dead", None
            self._end_container(index)
        tool = self.tool()
        for index in self.units:
            tool.reasons.add(index, "unit", "boot")
        tool.membership.render()
        self.served = self.paths.members_conf.read_text()
        for index in self.units:
            if not self.paths.held.exists():
                self._start(index)

    # -- killing the tool -------------------------------------------------------------------------------------------

    def kill_after(self, effects: int | None) -> None:
        """Raise Killed right before the effect of that number, which is right after the one before it."""
        self._effects, self.kill_at = 0, effects

    def _tick(self) -> None:
        if self._played:
            return
        if self.kill_at is not None and self._effects == self.kill_at:
            self.kill_at = None
            raise Killed
        self._effects += 1

    def _counted(self, effect: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._tick()
            if effect.__name__ == "atomic_write" and self.full(*arguments[:2]):
                raise OSError(28, "No space left on device", str(arguments[0]))
            return effect(*arguments)

        return counted

    @contextlib.contextmanager
    def _other_process(self) -> Iterator[None]:
        """What other processes do is not what the tool gets killed in."""
        self._played += 1
        try:
            yield
        finally:
            self._played -= 1

    # -- Host -------------------------------------------------------------------------------------------------------

    def run(self, argv: Sequence[str], timeout_s: float = 60) -> Result:
        self.commands.append(list(argv))
        self._tick()
        with self._other_process():
            return self._dispatch(list(argv))

    def _dispatch(self, argv: list[str]) -> Result:
        if argv[0] == "nginx":
            return Result(1, stderr="nginx: [emerg] unknown directive") if self.nginx_refuses else Result(0)
        if argv[:4] == ["journalctl", "-q", "-t", "kernel"]:
            since = float(argv[argv.index("--since") + 1].removeprefix("@"))
            return Result(0, "\n".join(json.dumps({"MESSAGE": text}) for at, text in self.kernel if at >= since))
        if argv[0] == "journalctl":
            lines = [json.dumps({"MESSAGE": line, "_PID": "77"}) for line in ("loading weights", "boom")]
            return Result(0, "\n".join(lines))
        if argv[0] == "nvidia-smi":
            rows = self.gpus if argv[1].startswith("--query-gpu") else self.gpu_processes
            return (
                Result(124, stderr="nvidia-smi was still running") if self.driver_hangs else Result(0, "\n".join(rows))
            )
        if argv[0] == "podman":
            return self._podman(argv)
        index = int(argv[-1].partition("@")[2].partition(".")[0])
        unit = self.units[index]
        if argv[1] == "show":
            return Result(
                0,
                f"LoadState=loaded\nActiveState={unit.active}\nSubState={unit.sub}\nMainPID=0\n"
                f"NRestarts={unit.restarts}\nUnitFileState={unit.enabled}\n",
            )
        if argv[1] == "stop":
            if index in self.stuck:
                return Result(1, stderr="timed out")
            assert not unit.running or self.nginx_refuses or not self.inside(index), (
                "stopped while nginx sends requests"
            )
            self.stop_unit(index)
            return Result(0)
        if argv[1] == "start" and (unit.active, unit.sub) == ("activating", "start-post"):
            # Joins the start that is under way.
            unit.active, unit.sub = ("activating", "auto-restart") if index in self.failing else ("active", "running")
            return Result(1, stderr="Job failed.") if index in self.failing else Result(0)
        if argv[1] == "start" and self.paths.held.exists():
            # The unit's condition is not met: nothing happens, and that is no error to systemd.
            return Result(0)
        if argv[1] == "start":
            return Result(0) if unit.active == "active" or self._start(index) else Result(1, stderr="Job failed.")
        assert argv[1] == "reset-failed"
        return Result(0)

    def _start(self, index: int) -> bool:
        unit, tool = self.units[index], self.tool()
        release = linked_release(self.paths, index, "current")
        try:
            UnitSteps(tool, index).prepare()
            good = release not in self.bad_releases
        except ToolError:
            good = False
        if not good:
            UnitSteps(tool, index).cleanup()
            unit.active, unit.sub = "activating", "auto-restart"
            return False
        unit.active, unit.sub, unit.running = "active", "running", release
        files.atomic_write(self.paths.running(index), f"{release}\n")
        self.on_start(index)
        cgroup = f"/system.slice/vllm-replica@{index}.service"
        self.process(200 + index, "conmon", ["conmon"], cgroup=cgroup)
        self.process(100 + index, "vllm", ["python3", *COMMAND], 200 + index, cgroup, [9000 + index])
        self.listen()
        with contextlib.suppress(ToolError):
            tool.membership.let_in(index, "unit", "prober")
        return True

    def stop_unit(self, index: int) -> None:
        """What systemd does to stop the replica, or when somebody else asks it to."""
        unit = self.units[index]
        with self._other_process():
            if unit.running:
                UnitSteps(self.tool(), index).stop()
            UnitSteps(self.tool(), index).cleanup()
        unit.active, unit.sub, unit.running = "inactive", "dead", None
        self._end_container(index)

    def _end_container(self, index: int) -> None:
        self.end_process(100 + index)
        self.end_process(200 + index)
        self.listen()

    def _podman(self, argv: list[str]) -> Result:
        if argv[1:3] == ["image", "exists"]:
            return Result(1 if argv[3] in self.pruned else 0)
        index = int(argv[-1].rpartition("-")[2])
        if argv[1:3] == ["container", "exists"]:
            return Result(0 if index in self.stale else 1)
        if argv[1:3] == ["container", "inspect"]:
            if self.units[index].running is None:
                return Result(125, "[]", "no such container")
            state = {"Pid": 100 + index, "ConmonPid": 200 + index}
            labels = {"gpu-node.release": self.units[index].running}
            return Result(0, json.dumps([{"State": state, "Image": IMAGE_ID, "Config": {"Labels": labels}}]))
        assert argv[1] in ("stop", "rm")
        self.stale.discard(index)
        return Result(0)

    def become(self, argv: Sequence[str]) -> NoReturn:
        raise Became(argv)

    @contextlib.contextmanager
    def follow(self, argv: Sequence[str], on_line: Callable[[str], None]) -> Iterator[None]:
        on_line("replica 0: loading, 10 s: weights")
        on_line("a line of the engine")
        yield

    def hang_up(self, pid: int) -> None:
        assert pid == NGINX_PID
        self._tick()
        if not self.nginx_deaf:
            self.served = self.paths.members_conf.read_text()

    def get(self, port: int, path: str, timeout_s: float) -> tuple[int, str]:
        assert (port, path) == (STATUS_PORT, "/members")
        self.on_look()
        match = re.search(r'generation \{\s*default "(\d+)"', self.served or "")
        if match is None:
            raise ConnectionRefusedError
        return 200, f"{match[1]}\n"

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def wall_clock(self) -> float:
        return self.now

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


def secrets_in(texts: Sequence[str]) -> list[str]:
    """Those texts that carry a key."""
    return [text for text in texts if ENGINE_KEY in text or CLIENT_KEY in text]
