"""The switch's side effects on the real node."""

import math
from collections.abc import Callable, Sequence

from gpu_node import caches, drain, files, gate, history, kernel_log
from gpu_node import journal as unit_journal
from gpu_node.config import linked_release, release_for, started_release
from gpu_node.engine import Engine
from gpu_node.errors import ConfigError, GateError, ToolError
from gpu_node.switch import Journal, StepError, parse_journal
from gpu_node.tool import Tool
from gpu_node.unit import UnitSteps
from gpu_node.wanted import utc

GATE_TIMEOUT_S = 60
MEASURE_TIMEOUT_S = 30
LAST_LINES = 5


class LiveNode:
    """`switch.Node` over systemd, nginx and the engine.

    rollout, by: what the history says of its switches. heard: gets every progress line, too.
    """

    def __init__(
        self, tool: Tool, rollout: str | None = None, by: str | None = None,
        heard: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._tool = tool
        self._rollout = rollout
        self._by = by or tool.by
        self._heard = heard

    def say(self, text: str) -> None:
        self._tool.host.say(text)
        self._heard(text)

    def now(self) -> float:
        return self._tool.host.wall_clock()

    def clock(self) -> float:
        return self._tool.host.clock()

    def indexes(self) -> Sequence[int]:
        return [replica.index for replica in self._tool.node.replicas]

    def journal(self, index: int) -> Journal | None:
        path = self._tool.paths.journal(index)
        text = files.read_text(path)
        return None if text is None else parse_journal(text, str(path))

    def save(self, index: int, journal: Journal) -> None:
        files.atomic_write(self._tool.paths.journal(index), journal.dump())

    def check_release(self, index: int, release: str) -> None:
        tool = self._tool
        found = release_for(tool.paths, tool.node.replica(index), release)
        for other in self.indexes():
            if other != index and tool.served(other).port == found.port:
                raise ConfigError(
                    f"release {release} wants port {found.port}, on which replica {other} listens: give first_port a"
                    " value with which no replica gets another one's port"
                )
        # 1 is Podman's answer; when it gives none, the start says why.
        if tool.host.run(["podman", "image", "exists", found.image_id], timeout_s=20).returncode == 1:
            raise ConfigError(
                f"image {found.image_ref} ({found.image_id[:12]}) of release {release} is not on this node any more:"
                " bring it back with `podman load` or `podman pull`, or run the playbook again for another release"
            )

    def linked(self, index: int, link: str) -> str | None:
        return linked_release(self._tool.paths, index, link)

    def point(self, index: int, link: str, release: str) -> None:
        files.replace_link(self._tool.paths.replica(index) / link, f"../../releases/{release}")

    def active(self, index: int) -> bool:
        return self._tool.unit_state(index).active == "active"

    def loading(self, index: int) -> bool:
        return self._tool.unit_state(index).word == "activating"

    def running(self, index: int) -> str | None:
        return UnitSteps(self._tool, index).running()

    def reasons(self, index: int) -> Sequence[str]:
        return self._tool.reasons.of(index)

    def take_out(self, index: int) -> None:
        membership = self._tool.membership
        applied = membership.go_out(index, "rollout", self._tool.by, lambda text: self.say(f"replica {index}: {text}"))
        drain.prove_out(membership, self._tool.host, applied)

    def let_in(self, index: int) -> None:
        self._tool.membership.let_in(index, "rollout")

    def wait_idle(self, index: int) -> str | None:
        timeout_s = self._tool.node.drain_timeout_s
        left = self._tool.wait_idle(index, timeout_s, self.say)
        return f"{left} after {timeout_s} s" if left else None

    def stop(self, index: int) -> None:
        node, host = self._tool.node, self._tool.host
        unit = node.replica(index).unit
        done = host.run(["systemctl", "stop", unit], timeout_s=node.drain_timeout_s + node.shutdown_timeout_s + 180)
        state = self._tool.unit_state(index)
        if done.returncode or state.active not in ("inactive", "failed"):
            raise StepError(f"{unit} does not stop, it is {state.word}: {done.message}")
        # A failed unit keeps count of its starts; the next start is not one of that series.
        host.run(["systemctl", "reset-failed", unit])

    def start(self, index: int) -> None:
        node, host = self._tool.node, self._tool.host
        unit = node.replica(index).unit
        mine = unit_journal.own_line(index)

        def relay(line: str) -> None:
            if line.startswith(mine):
                self.say(line)

        since = host.wall_clock()
        if not self.loading(index):
            host.run(["systemctl", "reset-failed", unit])
        with host.follow(["journalctl", "-q", "-f", "-n", "0", "-u", unit, "-o", "cat"], relay):
            done = host.run(["systemctl", "start", unit], timeout_s=node.start_timeout_s + 120)
        if self._tool.paths.held.exists():
            raise StepError(f"{unit} does not start while {self._tool.paths.held} is there")
        if done.returncode or not self.active(index):
            raise StepError(f"{unit} did not start: {self._cause(index, since) or done.message}")

    def _cause(self, index: int, since: float) -> str:
        """The error of the unit's own step, which says more than systemd does."""
        self._tool.host.run(["journalctl", "--sync"], timeout_s=10)
        marker = "gpu-node: error: "
        entries = unit_journal.read_unit(self._tool.host, self._tool.node.replica(index).unit, since)
        errors = [entry.message.removeprefix(marker) for entry in entries if entry.message.startswith(marker)]
        return errors[0] if errors else ""

    def measure(self, index: int) -> float | None:
        tool = self._tool
        limits = tool.node.gate
        if limits.speed_factor == 0:
            return None
        try:
            if not self.active(index):
                raise GateError("it does not run")
            release = tool.release(index)
            # A unit that an earlier version started did not note it.
            if started_release(tool.paths, index) not in (None, release.id):
                raise GateError(f"what runs is not release {release.id}")
            engine = tool.engine(index)
            # Once: the replica is out meanwhile. A try that was slow by chance only makes the gate milder.
            speed = engine.generate(release.served_model_name, limits.tokens, MEASURE_TIMEOUT_S).tokens_per_s
            if speed <= 0:
                raise GateError("it generates nothing")
        except ToolError as error:
            self.say(f"replica {index}: its speed is not measured, so the next release's is not compared: {error}")
            return None
        self.say(f"replica {index}: release {release.id} generates {speed:.1f} tokens/s")
        return speed

    def verify(self, index: int, since: float, before: float | None) -> float:
        if not self.active(index):
            raise StepError(f"{self._tool.node.replica(index).unit} is {self._tool.unit_state(index).word}")
        limits = self._tool.node.gate
        compared = before if limits.speed_factor > 0 else None
        # What an engine needs for these tokens when it is as slow as two in a second.
        timeout_s = max(GATE_TIMEOUT_S, limits.tokens / 2)

        def speed(engine: Engine, model: str) -> float:
            return gate.measure(
                lambda: engine.generate(model, limits.tokens, timeout_s), limits.tokens, compared, limits.speed_factor
            )

        try:
            after = UnitSteps(self._tool, index).verify_with(speed)
        except ToolError as error:
            raise StepError(self._with_last_lines(index, str(error), since)) from None
        if found := self.kernel_faults(index, since):
            raise StepError(self._with_last_lines(index, found[0], since))
        compare = f" ({compared:.1f} before)" if compared else ""
        self.say(f"replica {index}: generates {after:.1f} tokens/s{compare}")
        return after

    def kernel_faults(self, index: int, since: float) -> list[str]:
        """What the kernel's log has of this replica since a time, a sentence for each fault."""
        done = self._tool.host.run(
            # By the name of its writer, and not of this boot alone: a fault right before a restart is one as well.
            [
                "journalctl",
                "-q",
                "-t",
                "kernel",
                "--since",
                f"@{math.floor(since * 1000) / 1000:.3f}",
                "-o",
                "json",
                "--no-pager",
            ],
            timeout_s=20,
        )
        try:
            addresses = [address for address, _ in self._tool.release(index).gpus]
        except ToolError:
            addresses = []
        return kernel_log.faults(kernel_log.parse_messages(done.stdout), self._tool.node.replica(index).unit, addresses)

    def _with_last_lines(self, index: int, why: str, since: float) -> str:
        """The sentence, after the engine's last lines were shown."""
        mine = unit_journal.own_line(index)
        entries = unit_journal.read_unit(self._tool.host, self._tool.node.replica(index).unit, since)
        lines = unit_journal.engine_lines(entries, index, LAST_LINES)
        for line in lines:
            self.say(f"{mine}engine: {line[:300]}")
        last = f"; the engine's last line: {lines[-1][:300]}" if lines else ""
        return f"{mine}{why.removeprefix(mine)}{last}"

    def finished(self, index: int, journal: Journal) -> None:
        paths = self._tool.paths
        line = history.entry(paths, index, journal, utc(self._tool.host), self._rollout, self._by)
        history.add(paths, line)

    def remove_unused_caches(self, index: int) -> None:
        caches.remove_unused(self._tool, index)
