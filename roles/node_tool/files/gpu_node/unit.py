"""The steps of a replica's systemd unit, and the gate that a replica passes before it is in the balancer."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import NoReturn, TypeVar

from gpu_node import caches, drain, files, journal
from gpu_node.config import RELEASE_ID, Release, ReplicaConfig
from gpu_node.engine import Engine
from gpu_node.errors import EngineError, GateError, StoppedError, ToolError
from gpu_node.host import Host
from gpu_node.membership import Applied
from gpu_node.proc import LISTEN, Process
from gpu_node.tool import Tool

T = TypeVar("T")

POLL_EVERY_S = 0.1
REPORT_EVERY_S = 10
LAST_LINES = 20
BEFORE_READY_S = 60
GATE_TOKENS = 4
RELEASE_LABEL = "gpu-node.release"


@dataclass(frozen=True)
class Container:
    """A running container: its first process, its monitor, its image, the release that it was started from."""

    payload: Process
    monitor: Process
    image_id: str
    release: str


def runs_command(arguments: list[str], command: tuple[str, ...]) -> bool:
    """Whether the process's arguments are the command. An interpreter (#! line) or an init may stand before it."""
    own = arguments[-len(command) :]
    return (
        len(own) == len(command)
        and PurePath(own[0]).name == PurePath(command[0]).name
        and tuple(own[1:]) == command[1:]
    )


def stop_without_configuration(host: Host, index: int, *, remove: bool) -> None:
    """Stop or remove the replica's container although the node's configuration cannot be read."""
    name = f"vllm-replica-{index}"
    host.run(["podman", "rm", "-f", "-t", "0", "--ignore", name] if remove else ["podman", "stop", "--ignore", name])


class UnitSteps:
    """The steps for one replica. Each raises a ToolError that says why it failed."""

    def __init__(self, tool: Tool, index: int) -> None:
        self._tool = tool
        self._host = tool.host
        self._proc = tool.proc
        self._replica: ReplicaConfig = tool.node.replica(index)
        self._prefix = journal.own_line(index)

    def _say(self, text: str) -> None:
        self._host.say(f"{self._prefix}{text}")

    # -- before the start ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Refuse a start that cannot come out well: release, leftovers, port."""
        replica, tool = self._replica, self._tool
        release = tool.release(replica.index)
        if self._host.run(["podman", "container", "exists", replica.container]).returncode == 0:
            self._say(f"removing the stale container {replica.container}")
            done = self._host.run(["podman", "rm", "-f", "-t", "0", replica.container], timeout_s=120)
            if done.returncode:
                raise GateError(f"{self._prefix}the stale container {replica.container} stays: {done.message}")
        ours = self._proc.ancestors(os.getpid())
        if leftover := sorted(self._proc.in_unit(replica.unit) - ours):
            raise GateError(
                f"{self._prefix}{self._proc.describe(leftover[0])} is left of an earlier run in {replica.unit}:"
                " it may hold memory or GPUs; end it"
            )
        for socket in self._proc.listeners(release.port):
            holders = [self._proc.describe(pid) for pid in self._proc.owners(socket.inode)] or ["an unknown process"]
            raise GateError(
                f"{self._prefix}port {release.port} is held by {', '.join(holders)}:"
                " stop it, or give the replica another port"
            )
        if release.gpus:
            self._check_gpus(release)
        caches.make(tool.paths, release)
        self._host.say(
            f"{journal.start_line(replica.index)}{release.id} ({release.model}, image {release.image_id[:12]})"
        )

    def _ask_driver(self, query: str) -> list[list[str]]:
        """The rows that nvidia-smi answers. Raises GateError: without an answer no engine would start either."""
        done = self._host.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], timeout_s=30)
        if done.returncode:
            raise GateError(f"{self._prefix}the driver does not answer (nvidia-smi {query}): {done.message}")
        return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]

    def _check_gpus(self, release: Release) -> None:
        """Refuse a start on a GPU that is gone, or that an engine which outlived its server still holds."""
        seen = {row[0] for row in self._ask_driver("--query-gpu=uuid")}
        for address, uuid in release.gpus:
            if uuid not in seen:
                raise GateError(
                    f"{self._prefix}the driver does not see GPU {uuid} ({address}): look for 'Xid' and 'NVRM' in the"
                    " kernel's log; after a card was swapped, run the playbook again"
                )
        ours = {uuid for _, uuid in release.gpus}
        for uuid, pid, *memory in self._ask_driver("--query-compute-apps=gpu_uuid,pid,used_memory"):
            if uuid in ours and pid.isdecimal():
                held = f"{memory[0]} MiB" if memory else "memory"
                raise GateError(f"{self._prefix}{self._proc.describe(int(pid))} holds {held} of GPU {uuid}: end it")

    def run(self) -> NoReturn:
        """Become `podman run`: no shell is between release.json and the engine's arguments."""
        replica = self._replica
        release = self._tool.release(replica.index)
        files.atomic_write(self._tool.paths.running(replica.index), f"{release.id}\n")
        self._host.become([
            "podman", "run", "-d", "--replace", "--rm", "--cgroups=split", "--sdnotify=conmon", "--pull=never",
            "--name", replica.container, "--label", f"{RELEASE_LABEL}={release.id}",
            *release.podman_args, release.image_id, *release.command,
        ])  # fmt: skip

    # -- the ready gate -----------------------------------------------------------------------------------------------

    def container(self) -> Container | None:
        """The replica's running container."""
        done = self._host.run(["podman", "container", "inspect", self._replica.container])
        try:
            found = json.loads(done.stdout)[0]
            payload = self._proc.process(int(found["State"]["Pid"]))
            monitor = self._proc.process(int(found["State"]["ConmonPid"]))
            image_id = str(found["Image"]).removeprefix("sha256:")
            release = str((found["Config"]["Labels"] or {}).get(RELEASE_LABEL))
        except (ValueError, LookupError, TypeError):
            return None
        return Container(payload, monitor, image_id, release) if payload and monitor else None

    def running(self) -> str | None:
        """The release that the running container was started from; None when it cannot be told."""
        container = self.container()
        return container.release if container and RELEASE_ID.fullmatch(container.release) else None

    def ready(self) -> None:
        """Wait until the engine generates, then let the replica in. Fails at once when the container ends meanwhile.

        However it fails, the container is gone: an engine that loads ignores SIGTERM, as first process of its container
        and without a handler yet, and systemd would wait for it to the end of the unit's stop timeout. No request can
        be lost, so it is not asked.
        """
        try:
            with self._host.stoppable():
                self._become_ready()
        except StoppedError:
            self._remove_container()
            raise GateError(f"{self._prefix}stopped before it was ready") from None
        except ToolError:
            self._remove_container()
            raise

    def _become_ready(self) -> None:
        limit = self._tool.node.start_timeout_s
        started, since = self._host.clock(), self._host.wall_clock()
        report = REPORT_EVERY_S
        container = self.container()
        engine = self._tool.engine(self._replica.index)
        while True:
            elapsed = self._host.clock() - started
            if not container or not self._proc.alive(container.payload) or not self._proc.alive(container.monitor):
                raise self._failed(f"the engine's container ended {elapsed:.0f} s after its start", since)
            if engine.healthy(timeout_s=2):
                break
            if elapsed >= limit:
                raise self._failed(f"not ready after {limit} s (start_timeout_s)", since)
            if elapsed >= report:
                last = self._engine_lines(since, 1) or ["the engine said nothing yet"]
                self._say(f"loading, {elapsed:.0f} s: {last[0][:300]}")
                report += REPORT_EVERY_S
            self._host.sleep(POLL_EVERY_S)
        try:
            self.verify(max(limit - (self._host.clock() - started), 10), container)
        except (EngineError, GateError) as error:
            raise self._failed(str(error).removeprefix(self._prefix), since) from None
        self._say(f"ready after {self._host.clock() - started:.0f} s")
        self._go_on(lambda: self._tool.membership.let_in(self._replica.index, "unit", "prober"))

    def _engine_lines(self, since: float, count: int) -> list[str]:
        # The engine was started before this step was, and may have said its last word by then.
        entries = journal.read_unit(self._host, self._replica.unit, since - BEFORE_READY_S)
        return journal.engine_lines(entries, self._replica.index, count)

    def _failed(self, why: str, since: float) -> GateError:
        """The error, after the engine's last lines."""
        # An engine that ends at once is ahead of the journal.
        self._host.run(["journalctl", "--sync"], timeout_s=10)
        lines = self._engine_lines(since, LAST_LINES)
        for line in lines:
            self._say(f"engine: {line}")
        last = f"; the engine's last line: {lines[-1][:300]}" if lines else ""
        return GateError(f"{self._prefix}{why}{last}")

    def verify(self, timeout_s: float, container: Container | None = None) -> None:
        """The short gate: what answers is what it should be, and it generates. Raises GateError or EngineError."""
        self.verify_with(lambda engine, model: engine.complete(model, GATE_TOKENS, timeout_s), container)

    def verify_with(self, generate: Callable[[Engine, str], T], container: Container | None = None) -> T:
        """What answers on the port is this release's container, it listens on loopback only, and it generates.

        generate: the generation that is asked of it, under that model's name; what it gives is returned. container:
        the one that runs, by whoever asked Podman just before. Raises GateError or EngineError.
        """
        replica, proc = self._replica, self._proc
        release = self._tool.release(replica.index)
        container = container or self.container()
        if container is None:
            raise GateError(f"{self._prefix}container {replica.container} does not run")
        family = proc.in_unit(replica.unit) | proc.descendants(container.payload.pid)
        self._verify_listener(family)
        self._verify_container(container, release)
        engine = self._tool.engine(replica.index)
        names = engine.models(timeout_s=10)
        if release.served_model_name not in names:
            raise GateError(f"{self._prefix}the engine serves {', '.join(names)}, not {release.served_model_name}")
        generated = generate(engine, release.served_model_name)
        self._verify_loopback(family | proc.descendants(container.payload.pid))
        return generated

    def _verify_listener(self, family: set[int]) -> None:
        port = self._tool.served(self._replica.index).port
        holders = {pid for socket in self._proc.listeners(port) for pid in self._proc.owners(socket.inode)}
        if not holders:
            raise GateError(f"{self._prefix}nothing listens on port {port}")
        if foreign := sorted(holders - family):
            raise GateError(
                f"{self._prefix}port {port} is answered by {self._proc.describe(foreign[0])}, which is not in"
                f" {self._replica.unit}: stop it"
            )

    def _verify_container(self, container: Container, release: Release) -> None:
        if container.release != release.id:
            raise GateError(
                f"{self._prefix}the container was started from release {container.release}, `current` is {release.id}:"
                f" run `gpu-node switch {self._replica.index} {release.id}`"
            )
        if container.image_id != release.image_id:
            raise GateError(
                f"{self._prefix}the container runs image {container.image_id[:12]},"
                f" release {release.id} wants {release.image_id[:12]}"
            )
        arguments = self._proc.arguments(container.payload.pid)
        if not runs_command(arguments, release.command):
            raise GateError(
                f"{self._prefix}the engine was started as {' '.join(arguments)!r},"
                f" release {release.id} wants {' '.join(release.command)!r}"
            )

    def _verify_loopback(self, family: set[int]) -> None:
        listening = {s.inode: s for s in self._proc.sockets() if s.state == LISTEN and not s.loopback}
        for pid in sorted(family):
            for inode in sorted(self._proc.inodes(pid) & listening.keys()):
                socket = listening[inode]
                raise GateError(
                    f"{self._prefix}{self._proc.describe(pid)} listens on {socket.local}:{socket.local_port},"
                    " reachable from outside: a replica may listen on loopback only"
                )

    # -- the stop -----------------------------------------------------------------------------------------------------

    def _go_on(self, change: Callable[[], T]) -> T | None:
        """Do a change of membership; when it fails, say so and go on: a broken nginx must not stop a unit."""
        try:
            return change()
        except ToolError as error:
            self._host.warn(f"{self._prefix}{error}")
            return None

    def _take_out(self) -> Applied | None:
        return self._go_on(lambda: self._tool.membership.take_out(self._replica.index, "unit", self._tool.by))

    def _leave(self) -> Applied:
        # A replica whose engine ended by itself has nothing to serve meanwhile.
        return self._tool.membership.go_out(
            self._replica.index, "unit", self._tool.by, self._say, lambda: self.container() is not None
        )

    def stop(self) -> None:
        """Out of the balancer, wait for the running requests, stop the container. Works during a shutdown as well."""
        replica, node = self._replica, self._tool.node
        applied = self._go_on(self._leave)
        # What is out already, as a switch's replica is, has been so for a while, and nginx just answered with it.
        if applied and applied.changed:
            self._go_on(lambda: drain.prove_out(self._tool.membership, self._host, applied))
        if left := self._tool.wait_idle(replica.index, node.drain_timeout_s):
            self._say(f"stopping although not drained after {node.drain_timeout_s} s: {left}")
        grace = node.shutdown_timeout_s + 15
        done = self._host.run(["podman", "stop", "--ignore", "-t", str(grace), replica.container], timeout_s=grace + 30)
        if done.returncode:
            # The clean-up that follows ends it in any case.
            self._host.warn(f"{self._prefix}podman stop: {done.message}")

    def cleanup(self) -> None:
        """After every end of the unit, whatever its cause: out of the balancer, nothing left under the name."""
        self._take_out()
        files.remove(self._tool.paths.running(self._replica.index))
        self._remove_container()

    def _remove_container(self) -> None:
        done = self._host.run(["podman", "rm", "-f", "-t", "0", "--ignore", self._replica.container], timeout_s=120)
        if done.returncode:
            self._host.warn(f"{self._prefix}podman rm: {done.message}")
