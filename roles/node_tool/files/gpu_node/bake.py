"""The watch over replicas that just came in: for a while nothing may go out, restart, fault or answer with errors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpu_node.errors import ToolError
from gpu_node.live import LiveNode
from gpu_node.paths import Paths
from gpu_node.tool import Tool

LOOK_EVERY_S = 1.0
REPORT_EVERY_S = 10
# So many answers say enough about their share before the time is over.
ENOUGH_REQUESTS = 100


class BakeError(ToolError):
    """What the watch found."""


@dataclass(frozen=True)
class Traffic:
    """Answers on /v1, and those with a status from 500 on."""

    requests: int = 0
    errors: int = 0

    def over(self, budget: float) -> bool:
        """Whether the errors are a larger share than the budget."""
        return self.errors > 0 and self.errors > budget * self.requests

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.errors} errors"


def count(lines: list[str], before: Traffic) -> Traffic:
    """Add the lines of nginx's access log. A line that is not understood is left out."""
    requests, errors = before.requests, before.errors
    for line in lines:
        try:
            value = json.loads(line)
            path, status = str(value["path"]), int(value["status"])
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            continue
        if path == "/v1" or path.startswith("/v1/"):
            requests += 1
            errors += status >= 500
    return Traffic(requests, errors)


class AccessLog:
    """What comes into nginx's access log from now on."""

    def __init__(self, paths: Paths) -> None:
        self._path = paths.access_log
        self._file, self._place = self._end()
        self._cut_off = b""

    def _end(self) -> tuple[int, int]:
        try:
            state = self._path.stat()
        except FileNotFoundError:
            return 0, 0
        return state.st_ino, state.st_size

    def new_lines(self) -> list[str]:
        """The whole lines since the last call. After a rotation the new file is read, and the old one's end is left."""
        file, size = self._end()
        if file != self._file or size < self._place:
            self._file, self._place, self._cut_off = file, 0, b""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._place)
                data = stream.read()
        except FileNotFoundError:
            return []
        self._place += len(data)
        *lines, self._cut_off = (self._cut_off + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class Bake:
    """One watch. since: by replica the time (seconds since the epoch) from which on the kernel's log counts."""

    def __init__(self, tool: Tool, node: LiveNode, since: Mapping[int, float], budget: float) -> None:
        self._tool = tool
        self._node = node
        self._since = since
        self._budget = budget
        self._log = AccessLog(tool.paths)
        self._traffic = Traffic()
        self._units = {index: self._run_of(index) for index in since}

    def _run_of(self, index: int) -> tuple[int, int]:
        state = self._tool.unit_state(index)
        return state.main_pid, state.restarts

    def _look(self) -> None:
        for index, unit in self._units.items():
            if out := [reason for reason in self._tool.reasons.of(index) if reason != "operator"]:
                raise BakeError(
                    f"replica {index} went out of the balancer ({', '.join(out)}):"
                    f" see `journalctl -u gpu-node-prober` and `gpu-node logs {index}`"
                )
            if self._run_of(index) != unit:
                raise BakeError(f"{self._tool.node.replica(index).unit} was restarted: see `gpu-node logs {index}`")
        self._traffic = count(self._log.new_lines(), self._traffic)

    def _check(self, *, ended: bool) -> None:
        for index, since in self._since.items():
            if found := self._node.kernel_faults(index, since):
                raise BakeError(f"replica {index}: {found[0]}")
        # A few answers say little of a share; with no error allowed, one says all.
        enough = ended or self._budget == 0 or self._traffic.requests >= ENOUGH_REQUESTS
        if enough and self._traffic.over(self._budget):
            raise BakeError(
                f"{self._traffic.errors} of {self._traffic.requests} answers on /v1 have a status from 500 on, more"
                f" than the error budget of {self._budget:g}: see {self._tool.paths.access_log}"
            )

    def run(self, seconds: float, say: Callable[[str], None]) -> None:
        """Watch for that long. Raises BakeError with what it found; the replicas stay in service then."""
        host = self._tool.host
        began = host.clock()
        report = float(REPORT_EVERY_S)
        while (past := host.clock() - began) < seconds:
            self._look()
            if past >= report:
                self._check(ended=False)
                say(f"baking, {past:.0f} of {seconds:.0f} s: {self._traffic}")
                report += REPORT_EVERY_S
            host.sleep(min(LOOK_EVERY_S, seconds - past))
        self._look()
        self._check(ended=True)
        say(f"baked {seconds:.0f} s: {self._traffic}")
