"""The node's part of a rollout, as one job: each replica to its target, then the bake. Run again, it goes on."""

import contextlib
import json
import sys
from collections.abc import Collection, Iterator
from typing import Any

from gpu_node import drain, files
from gpu_node.bake import Bake, BakeError
from gpu_node.errors import RefusedError, ToolError
from gpu_node.live import LiveNode
from gpu_node.paths import Paths
from gpu_node.switch import GO_ON, OUTCOMES, Journal, StepError, half_switched, switch
from gpu_node.tool import Tool
from gpu_node.wanted import Record, Wanted, utc

BAKE_FAILED = 5


class EndedError(Exception):
    """The rollout ends here. outcome: of the replica that stopped it."""

    def __init__(self, text: str, code: int, outcome: str | None, step: str) -> None:
        super().__init__(text)
        self.code = code
        self.outcome = outcome
        self.step = step


def held_by(paths: Paths) -> dict[str, Any] | None:
    """Who has the whole node stopped; None: nobody. A damaged file holds the node as well."""
    text = files.read_text(paths.held)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"rollout": "unknown", "by": "unknown", "since": "unknown"}


def refuse_while_held(paths: Paths) -> None:
    """Raise RefusedError when the node is stopped as a whole."""
    if held := held_by(paths):
        raise RefusedError(
            f"{paths.held}: rollout {held.get('rollout')} by {held.get('by')} has stopped this node since"
            f" {held.get('since')}: run its playbook again, or `gpu-node rollout {held.get('rollout')}`"
        )


class Rollout:
    """One rollout on this node."""

    def __init__(self, tool: Tool, identity: str, force_drain: bool) -> None:
        self._tool = tool
        self._identity = identity
        self._force_drain = force_drain
        self._holder = f"rollout {identity}, {tool.by}"
        self._record = Record(tool.paths, tool.host, self._holder)
        self._lost = False
        self._node = LiveNode(tool, identity, None, self._heard)

    # -- the record ---------------------------------------------------------------------------------------------------

    def _heard(self, text: str) -> None:
        """Every progress line is the record's step, which also shows that this job is alive."""
        self._note(step=text)

    def _note(self, **changes: Any) -> None:
        if self._lost:
            return
        try:
            self._record.update(self._identity, **changes)
        except RefusedError as error:
            # A replica is not left half-switched for it; the next one is not begun.
            self._lost = True
            self._tool.host.warn(str(error))
        except (ToolError, OSError) as error:
            self._tool.host.warn(str(error))

    def _ended(self, end: EndedError) -> int:
        self._note(state="failed", step=end.step, error=str(end), outcome=end.outcome)
        print(f"gpu-node: error: {end}", file=sys.stderr)
        return end.code

    @contextlib.contextmanager
    def _job(self) -> Iterator[Wanted]:
        """Hold the node; the record is this rollout's."""
        with files.lock(self._tool.paths.rollout_lock, self._holder, timeout_s=0):
            wanted = self._record.of(self._identity)
            try:
                for index in wanted.targets:
                    self._tool.node.replica(index)
            except ToolError as error:
                self._note(state="failed", step="refused", error=str(error), outcome="refused")
                raise
            self._node = LiveNode(self._tool, self._identity, wanted.by, self._heard)
            yield wanted

    # -- each replica to its target -----------------------------------------------------------------------------------

    def run(self, bake_s: float, budget: float) -> int:
        """Do all that is left; the exit code. Raises ToolError when it may not begin."""
        with self._job() as wanted:
            speeds = self._let_go()
            # A `gpu-node leave` that was killed may have announced what is not to come any more.
            with self._tool.membership.locked():
                for index in self._node.indexes():
                    self._tool.membership.stay(index)
            self._note(state="running", step="begins", error="", outcome=None)
            try:
                since = self._switch_all(wanted, speeds)
                # A rollout that was killed in its bake finds nothing to switch and still has to bake.
                unproven = wanted.changes_something and wanted.state != "done"
                if not since and not unproven:
                    self._node.say("every replica serves its target already: nothing to do")
                elif bake_s:
                    self._bake({index: since.get(index, self._node.now()) for index in wanted.targets}, bake_s, budget)
            except EndedError as end:
                return self._ended(end)
            except RefusedError:
                # Another rollout has taken the record over.
                raise
            except (ToolError, OSError) as error:
                return self._ended(EndedError(str(error), OUTCOMES["refused"], "refused", "stopped"))
            self._note(state="done", step="done", error="", outcome=None)
        return 0

    def _targets(self, wanted: Wanted) -> dict[int, str]:
        """What each replica has to serve, in the order in which they are to be switched."""
        targets: dict[int, str] = {}
        for index in self._node.indexes():
            journal = self._node.journal(index)
            current = self._node.linked(index, "current")
            if index in wanted.targets:
                targets[index] = wanted.targets[index]
            elif journal is not None and journal.outcome is None:
                targets[index] = journal.target
            elif current is not None and "rollout" in self._node.reasons(index) and not self._node.active(index):
                # A `gpu-node leave` stopped it with the others.
                targets[index] = current
        # A replica that is half-switched must be finished before another one is begun.
        order = sorted(targets, key=lambda index: (not half_switched(self._node, index), index))
        return {index: targets[index] for index in order}

    def _switch_all(self, wanted: Wanted, speeds: dict[int, float]) -> dict[int, float]:
        """Switch what differs; by replica that was switched the time of its start."""
        since: dict[int, float] = {}
        for index, target in self._targets(wanted).items():
            self._record.of(self._identity)
            journal = self._switch(index, target, speeds.get(index))
            if journal is None:
                continue
            if journal.outcome != "new":
                raise EndedError(
                    journal.error, OUTCOMES[str(journal.outcome)], journal.outcome, f"stopped at replica {index}"
                )
            since[index] = journal.started or self._node.now()
        return since

    def _switch(self, index: int, target: str, speed: float | None) -> Journal | None:
        try:
            with files.lock(self._tool.paths.switch_lock, self._holder, timeout_s=0):
                return switch(self._node, index, target, self._force_drain, speed)
        except (ToolError, OSError) as error:
            # Half-switched it is out; otherwise nothing was begun.
            outcome, text = "refused", str(error)
            if half_switched(self._node, index):
                outcome, text = "failed", f"{error}; {GO_ON}"
            raise EndedError(text, OUTCOMES[outcome], outcome, f"stopped at replica {index}") from None

    def _bake(self, since: dict[int, float], bake_s: float, budget: float) -> None:
        try:
            Bake(self._tool, self._node, since, budget).run(bake_s, self._node.say)
        except BakeError as error:
            raise EndedError(f"the bake failed: {error}", BAKE_FAILED, None, "stopped in its bake") from None

    # -- the whole node -----------------------------------------------------------------------------------------------

    def _let_go(self) -> dict[int, float]:
        """Let replicas start again; the speeds that were measured before they were stopped."""
        held = held_by(self._tool.paths)
        files.remove(self._tool.paths.held)
        speeds = held.get("tokens_per_s") if held else None
        found = speeds.items() if isinstance(speeds, dict) else ()
        return {int(index): float(speed) for index, speed in found if type(speed) in (int, float) and index.isdecimal()}

    def _hold(self, wanted: Wanted, speeds: dict[int, float]) -> None:
        held = {
            "rollout": self._identity, "by": wanted.by, "since": utc(self._tool.host),
            "tokens_per_s": {str(index): speed for index, speed in speeds.items()},
        }  # fmt: skip
        files.atomic_write(self._tool.paths.held, json.dumps(held) + "\n")

    def leave(self) -> int:
        """Take the whole node out and stop its replicas; the exit code. Raises ToolError when it may not begin."""
        with self._job() as wanted, files.lock(self._tool.paths.switch_lock, self._holder, timeout_s=0):
            # Of a run that was killed: what it measured cannot be measured again.
            speeds = self._let_go()
            self._note(state="running", step="leaves", error="", outcome=None)
            try:
                self._leave(wanted, speeds)
            except EndedError as end:
                return self._ended(end)
            self._node.say(f"this node serves nothing until `gpu-node rollout {self._identity}`")
        return 0

    def _leave(self, wanted: Wanted, speeds: dict[int, float]) -> None:
        node = self._node
        try:
            self._go_out(wanted, speeds)
        except (ToolError, OSError) as error:
            self._stay()
            raise EndedError(f"{error}; nothing changed", OUTCOMES["refused"], "refused", "did not leave") from None
        stopped: list[int] = []
        for index in node.indexes():
            if self._tool.unit_state(index).active in ("", "inactive"):
                continue
            node.say(f"replica {index}: stop")
            try:
                node.stop(index)
            except StepError as error:
                self._stay(index, stopped)
                raise EndedError(str(error), OUTCOMES["failed"], "failed", f"stopped at replica {index}") from None
            stopped.append(index)

    def _go_out(self, wanted: Wanted, speeds: dict[int, float]) -> None:
        """All that comes before the first stop. Raises ToolError."""
        tool, node = self._tool, self._node
        self._hold(wanted, speeds)
        tool.membership.announce(tool.by, node.say)
        for index in node.indexes():
            applied = tool.membership.take_out(index, "rollout", tool.by)
        drain.prove_out(tool.membership, tool.host, applied)
        busy = self._wait_idle()
        if busy and not self._force_drain:
            raise RefusedError(f"{'; '.join(busy.values())} (--force-drain would cut them)")
        for index in node.indexes():
            if index not in busy and node.active(index) and (speed := node.measure(index)) is not None:
                speeds[index] = speed
        self._hold(wanted, speeds)

    def _wait_idle(self) -> dict[int, str]:
        """Wait until no replica has a request; by replica that still has some what it has."""
        tool = self._tool
        timeout_s = tool.node.drain_timeout_s
        until = tool.host.clock() + timeout_s
        busy = {}
        for index in self._node.indexes():
            if left := tool.wait_idle(index, max(until - tool.host.clock(), 0), self._node.say):
                busy[index] = f"replica {index} is not drained: still {left} after {timeout_s} s"
        return busy

    def _stay(self, stuck: int | None = None, stopped: Collection[int] = ()) -> None:
        """Undo what `leave` did so far. stuck: this replica stays out; stopped: these are started again."""
        node = self._node
        files.remove(self._tool.paths.held)
        files.remove(self._tool.paths.leaving)
        # Who only has to be let in does not wait for a start.
        for index in sorted(node.indexes(), key=lambda index: index in stopped):
            try:
                journal = node.journal(index)
                if index == stuck or (journal is not None and journal.outcome in (None, "failed")):
                    continue
                if index in stopped:
                    node.say(f"replica {index}: start")
                    node.start(index)
                node.let_in(index)
            except (StepError, ToolError, OSError) as error:
                self._tool.host.warn(f"replica {index}: {error}")
