"""The switch's side effects on the real node."""

from collections.abc import Sequence

from gpu_node import drain, files
from gpu_node import journal as unit_journal
from gpu_node.config import linked_release, release_for
from gpu_node.errors import EngineError, GateError, ToolError
from gpu_node.switch import Journal, StepError, parse_journal
from gpu_node.tool import Tool
from gpu_node.unit import UnitSteps

GATE_TIMEOUT_S = 60


class LiveNode:
    """`switch.Node` over systemd, nginx and the engine."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool

    def say(self, text: str) -> None:
        self._tool.host.say(text)

    def indexes(self) -> Sequence[int]:
        return [replica.index for replica in self._tool.node.replicas]

    def journal(self, index: int) -> Journal | None:
        path = self._tool.paths.journal(index)
        text = files.read_text(path)
        return None if text is None else parse_journal(text, str(path))

    def save(self, index: int, journal: Journal) -> None:
        files.atomic_write(self._tool.paths.journal(index), journal.dump())

    def check_release(self, index: int, release: str) -> None:
        release_for(self._tool.paths, self._tool.node.replica(index), release)

    def linked(self, index: int, link: str) -> str | None:
        return linked_release(self._tool.paths, index, link)

    def point(self, index: int, link: str, release: str) -> None:
        files.replace_link(self._tool.paths.replica(index) / link, f"../../releases/{release}")

    def active(self, index: int) -> bool:
        return self._tool.unit_state(index).active == "active"

    def loading(self, index: int) -> bool:
        return self._tool.unit_state(index).word == "activating"

    def reasons(self, index: int) -> Sequence[str]:
        return self._tool.reasons.of(index)

    def take_out(self, index: int) -> None:
        membership = self._tool.membership
        drain.prove_out(membership, self._tool.host, membership.take_out(index, "rollout", self._tool.by))

    def let_in(self, index: int) -> None:
        self._tool.membership.let_in(index, "rollout")

    def wait_idle(self, index: int) -> str | None:
        timeout_s = self._tool.node.drain_timeout_s
        left = self._tool.wait_idle(index, timeout_s)
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
                host.say(line)

        since = host.wall_clock()
        if not self.loading(index):
            host.run(["systemctl", "reset-failed", unit])
        with host.follow(["journalctl", "-q", "-f", "-n", "0", "-u", unit, "-o", "cat"], relay):
            done = host.run(["systemctl", "start", unit], timeout_s=node.start_timeout_s + 120)
        if done.returncode or not self.active(index):
            raise StepError(f"{unit} did not start: {self._cause(index, since) or done.message}")

    def _cause(self, index: int, since: float) -> str:
        """The error of the unit's own step, which says more than systemd does."""
        self._tool.host.run(["journalctl", "--sync"], timeout_s=10)
        marker = "gpu-node: error: "
        entries = unit_journal.read_unit(self._tool.host, self._tool.node.replica(index).unit, since)
        errors = [entry.message.removeprefix(marker) for entry in entries if entry.message.startswith(marker)]
        return errors[0] if errors else ""

    def verify(self, index: int) -> None:
        if not self.active(index):
            raise StepError(f"{self._tool.node.replica(index).unit} is {self._tool.unit_state(index).word}")
        try:
            UnitSteps(self._tool, index).verify(GATE_TIMEOUT_S)
        except (GateError, EngineError, ToolError) as error:
            raise StepError(str(error)) from None
