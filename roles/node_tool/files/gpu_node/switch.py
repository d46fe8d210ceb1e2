"""The switch of one replica to another release: a journal and steps that are all safe to repeat.

The journal is written before its step is done. Killed anywhere and run again, the switch repeats the step at which it
was killed and goes on. All side effects go through `Node`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gpu_node.errors import BalancerError, ConfigError, RefusedError

OUTCOMES = {"new": 0, "refused": 2, "rolled_back": 3, "failed": 4}  # outcome -> exit code
GO_ON = "the replica is half-switched and stays out: repair that, then run the same again, which goes on"


class StepError(Exception):
    """A step of the switch did not come out well; the text says why."""


@dataclass(frozen=True)
class Journal:
    """Where a switch is. source: the release that served before (None: none did); outcome: None while unfinished.

    began, started: when the switch and the last start of the unit began, in seconds since the epoch (0: not noted).
    before, after: tokens/s of the two releases (None: not measured). seconds: what each step took.
    """

    source: str | None
    target: str
    step: str
    force_drain: bool = False
    error: str = ""
    outcome: str | None = None
    began: float = 0.0
    started: float = 0.0
    before: float | None = None
    after: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    def dump(self) -> str:
        return json.dumps({
            "from": self.source, "to": self.target, "step": self.step, "force_drain": self.force_drain,
            "error": self.error, "outcome": self.outcome, "began": self.began, "started": self.started,
            "before": self.before, "after": self.after, "seconds": dict(self.seconds),
        }) + "\n"  # fmt: skip


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < 1e15 else None


def _notes(value: dict[str, Any]) -> dict[str, Any]:
    """What a journal notes beyond its steps. A journal of an earlier version has none of it, and is as good."""
    seconds = value.get("seconds")
    return {
        "began": _number(value.get("began")) or 0.0,
        "started": _number(value.get("started")) or 0.0,
        "before": _number(value.get("before")),
        "after": _number(value.get("after")),
        "seconds": {
            str(step): number
            for step, item in (seconds.items() if isinstance(seconds, dict) else ())
            if (number := _number(item)) is not None
        },
    }


def parse_journal(text: str, where: str) -> Journal:
    """The journal of a text. Raises ConfigError."""
    try:
        value: Any = json.loads(text)
        journal = Journal(
            value["from"], value["to"], value["step"], value["force_drain"], value["error"], value["outcome"],
            **_notes(value),
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, RecursionError):
        journal = None
    if (
        journal is None
        or not (journal.source is None or isinstance(journal.source, str))
        or not isinstance(journal.target, str)
        or journal.step not in STEPS
        or type(journal.force_drain) is not bool
        or not isinstance(journal.error, str)
        or not (journal.outcome is None or journal.outcome in OUTCOMES)
    ):
        raise ConfigError(f"{where} is not a switch's journal: look at `gpu-node status`, then remove the file")
    return journal


class Node(Protocol):
    """One node's side effects, each safe to repeat. They raise StepError or, for nginx, BalancerError."""

    def say(self, text: str) -> None: ...

    def now(self) -> float:
        """Seconds since the epoch."""

    def clock(self) -> float:
        """Seconds that only go forward."""

    def indexes(self) -> Sequence[int]: ...

    def journal(self, index: int) -> Journal | None: ...

    def save(self, index: int, journal: Journal) -> None: ...

    def check_release(self, index: int, release: str) -> None:
        """Raise ConfigError when the release cannot be served by this replica."""

    def linked(self, index: int, link: str) -> str | None:
        """The release that `current` or `previous` points at."""

    def point(self, index: int, link: str, release: str) -> None: ...

    def active(self, index: int) -> bool: ...

    def loading(self, index: int) -> bool:
        """Whether systemd is in the middle of its start, and not between two tries."""

    def running(self, index: int) -> str | None:
        """The release that its container was started from; None when it cannot be told."""

    def reasons(self, index: int) -> Sequence[str]: ...

    def take_out(self, index: int) -> None:
        """Add the reason `rollout` and prove that no new request arrives."""

    def let_in(self, index: int) -> None:
        """Remove the reason `rollout`."""

    def wait_idle(self, index: int) -> str | None:
        """None when the running requests ended in time, else what still runs."""

    def stop(self, index: int) -> None: ...

    def start(self, index: int) -> None: ...

    def measure(self, index: int) -> float | None:
        """The speed of the drained replica in tokens/s; None, and said why, when it cannot be measured."""

    def verify(self, index: int, since: float, before: float | None) -> float:
        """The gates, for a start at `since`; the speed. before: what it may not fall far below (None: anything)."""

    def finished(self, index: int, journal: Journal) -> None:
        """Note the finished switch in the history; once, however often it is called for the same one."""

    def remove_unused_caches(self, index: int) -> None:
        """Remove what engines of images keep that no release of the replica needs any more."""


def _failed(journal: Journal, error: Exception) -> Journal:
    """Where a failed step leads: back to the release before, or, without one, to a replica that stays out."""
    text = f"{journal.error}; then: {error}" if journal.error else str(error)
    back = journal.step in FORWARD and journal.source not in (None, journal.target)
    return replace(journal, step="roll_back_stop" if back else "give_up", error=text)


def _drain(node: Node, index: int, journal: Journal) -> Journal:
    try:
        node.take_out(index)
    except BalancerError as error:
        return replace(journal, step="undo_drain", error=f"{error}; nothing changed")
    if (left := node.wait_idle(index)) and not journal.force_drain:
        return replace(
            journal, step="undo_drain",
            error=f"replica {index} is not drained: still {left}; nothing changed (--force-drain would cut them)",
        )  # fmt: skip
    if left:
        node.say(f"replica {index}: requests still run, so its speed is not measured")
    return replace(journal, step="stop" if left else "measure")


def _measure(node: Node, index: int, journal: Journal) -> Journal:
    # What was measured before a kill stands: by now the replica may be another one. The way back is not compared: it
    # served at its own speed, which may well be below that of what is worse in other ways.
    way_back = journal.target == node.linked(index, "previous")
    if journal.before is None and journal.source is not None and not way_back:
        journal = replace(journal, before=node.measure(index))
    return replace(journal, step="stop")


def _undo_drain(node: Node, index: int, journal: Journal) -> Journal:
    node.let_in(index)
    return replace(journal, outcome="refused")


def _stop(node: Node, index: int, journal: Journal) -> Journal:
    node.stop(index)
    return replace(journal, step="point")


def _point(node: Node, index: int, journal: Journal) -> Journal:
    # After a reboot between the steps the unit runs again, from the release that is about to be left.
    node.stop(index)
    node.point(index, "current", journal.target)
    return replace(journal, step="start", started=node.now())


def _start(node: Node, index: int, journal: Journal) -> Journal:
    node.start(index)
    return replace(journal, step="gate")


def _gate(node: Node, index: int, journal: Journal) -> Journal:
    after = node.verify(index, journal.started or node.now(), journal.before)
    return replace(journal, step="in", after=after)


def _in(node: Node, index: int, journal: Journal) -> Journal:
    if journal.source not in (None, journal.target):
        node.point(index, "previous", str(journal.source))
    node.let_in(index)
    return replace(journal, outcome="new")


def _roll_back_stop(node: Node, index: int, journal: Journal) -> Journal:
    node.say(f"replica {index}: {journal.error}")
    node.stop(index)
    return replace(journal, step="roll_back_point")


def _roll_back_point(node: Node, index: int, journal: Journal) -> Journal:
    node.stop(index)
    node.point(index, "current", str(journal.source))
    return replace(journal, step="roll_back_start", started=node.now())


def _roll_back_start(node: Node, index: int, journal: Journal) -> Journal:
    node.start(index)
    return replace(journal, step="roll_back_gate")


def _roll_back_gate(node: Node, index: int, journal: Journal) -> Journal:
    # It served at that speed, or it would not be the way back.
    node.verify(index, journal.started or node.now(), None)
    return replace(journal, step="roll_back_in")


def _roll_back_in(node: Node, index: int, journal: Journal) -> Journal:
    node.let_in(index)
    return replace(journal, outcome="rolled_back")


def _give_up(node: Node, index: int, journal: Journal) -> Journal:
    try:
        node.stop(index)
    except StepError as error:
        return replace(journal, error=f"{journal.error}; then: {error}", outcome="failed")
    return replace(journal, outcome="failed")


Step = Callable[[Node, int, Journal], Journal]
FORWARD: dict[str, Step] = {
    "drain": _drain, "measure": _measure, "stop": _stop, "point": _point, "start": _start, "gate": _gate, "in": _in,
}  # fmt: skip
STEPS: dict[str, Step] = FORWARD | {
    "undo_drain": _undo_drain,
    "roll_back_stop": _roll_back_stop,
    "roll_back_point": _roll_back_point,
    "roll_back_start": _roll_back_start,
    "roll_back_gate": _roll_back_gate,
    "roll_back_in": _roll_back_in,
    "give_up": _give_up,
}

# A restart of the node, or a `gpu-node leave`, takes back what these steps found running.
NEEDS_START = {"gate": "start", "in": "start", "roll_back_gate": "roll_back_start", "roll_back_in": "roll_back_start"}

# Nothing is left at these steps but to put a replica that serves into the balancer again.
ONLY_LET_IN = ("in", "roll_back_in", "undo_drain")


def _begin(node: Node, index: int, target: str, force_drain: bool, before: float | None) -> Journal | None:
    """The journal to go on with; None when there is nothing to do."""
    for other in node.indexes():
        journal = node.journal(other)
        if other != index and journal is not None and journal.outcome is None:
            if journal.step in ONLY_LET_IN:
                _finish(node, other, journal)
                continue
            raise RefusedError(
                f"replica {other} is half-switched (step {journal.step}):"
                f" finish it first with `gpu-node switch {other} {journal.target}`"
            )
    old = node.journal(index)
    if old is not None and old.outcome is None and old.step in ONLY_LET_IN and old.target != target:
        # What runs is proven, and is what a failure of the new switch goes back to.
        old = _finish(node, index, old)
    if old is not None and old.outcome is None:
        if old.target == target:
            step = old.step if node.active(index) else NEEDS_START.get(old.step, old.step)
            node.say(f"replica {index}: going on with the switch to {target} at step {step}")
            return replace(old, step=step, force_drain=old.force_drain or force_drain)
        node.check_release(index, target)
        node.say(f"replica {index}: {target} takes the place of {old.target}, whose switch was at step {old.step}")
        step = old.step if old.step in ("drain", "measure") else "stop"
        return Journal(old.source, target, step, force_drain, began=node.now(), before=old.before)
    current = node.linked(index, "current")
    unchanged = current == target and "rollout" not in node.reasons(index)
    served = node.running(index) if node.active(index) else None
    if unchanged and (
        (node.active(index) and served in (None, target)) or (node.loading(index) and _join_start(node, index, target))
    ):
        return None
    node.check_release(index, target)
    # After a failed switch `current` may be a release that never served: what did serve stays the way back.
    # Neither is a link that was moved by hand.
    source = old.source if old is not None and old.outcome == "failed" else served or current
    for other in node.indexes():
        if other != index and (reasons := node.reasons(other)):
            node.say(f"replica {index}: warning: replica {other} is out too ({', '.join(reasons)})")
    return Journal(source, target, "drain", force_drain, began=node.now(), before=before)


def _join_start(node: Node, index: int, target: str) -> bool:
    """Wait for a start that is under way, after a boot for example: to begin again would lose what it has loaded.

    False when it fails.
    """
    node.say(f"replica {index}: release {target} is being started already, waiting for it")
    try:
        node.start(index)
    except StepError as error:
        node.say(f"replica {index}: {error}; starting it again")
        return False
    return True


def _finish(node: Node, index: int, journal: Journal) -> Journal:
    """Do the steps that are left. Raises BalancerError, with the journal unfinished, when nginx takes nothing over."""
    while journal.outcome is None:
        node.save(index, journal)
        node.say(f"replica {index}: {journal.step.replace('_', ' ')}")
        step, began = journal.step, node.clock()
        try:
            journal = STEPS[journal.step](node, index, journal)
        except StepError as error:
            journal = _failed(journal, error)
        took = journal.seconds.get(step, 0.0) + node.clock() - began
        journal = replace(journal, seconds={**journal.seconds, step: round(took, 2)})
    node.finished(index, journal)
    node.save(index, journal)
    return journal


def switch(
    node: Node, index: int, target: str, force_drain: bool = False, before: float | None = None
) -> Journal | None:
    """Switch the replica; the finished journal, or None when the release serves already. Raises ToolError.

    before: the speed of the release before, in tokens/s, when it was measured by somebody who stopped it since.
    """
    journal = _begin(node, index, target, force_drain, before)
    if journal is None:
        node.say(f"replica {index}: release {target} serves already, nothing to do")
        return None
    journal = _finish(node, index, journal)
    if journal.outcome == "new":
        node.remove_unused_caches(index)
    node.say(f"replica {index}: " + {
        "new": f"release {journal.target} serves",
        "refused": "the switch was refused",
        "rolled_back": f"release {journal.target} failed; {journal.source} serves again",
        "failed": f"release {journal.target} failed and no release before serves; the replica stays out",
    }[str(journal.outcome)])  # fmt: skip
    return journal


def half_switched(node: Node, index: int) -> bool:
    """Whether a switch of the replica began and did not end: then it is out."""
    try:
        journal = node.journal(index)
    except ConfigError:
        # A switch does not begin over a damaged journal.
        return False
    return journal is not None and journal.outcome is None


def way_back(node: Node, index: int) -> str:
    """The release that a roll-back goes to. Raises ConfigError when there is none."""
    journal = node.journal(index)
    half_way = journal is not None and journal.outcome is None
    release = journal.source if journal and half_way else node.linked(index, "previous")
    if release is None:
        raise ConfigError(f"replica {index} has no previous release to go back to")
    return release
