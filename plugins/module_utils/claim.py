# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Who may say what a node has to run: one rollout at a time, and one whose controller is gone holds nobody up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
# A rollout in one of these states holds its node.
HELD = ("staged", "running")
STATES = (*HELD, "done", "failed")
HOLDS = ("take", "renew", "release")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


class RecordError(ValueError):
    """The record on the node is not one of ours."""


@dataclass(frozen=True)
class Wish:
    """What a controller wants of a node.

    ``targets`` are release ids by replica, empty to go back to what was there before the node's latest rollout
    (``back``), if that is the one that is taken back (``back_of``, empty for any).
    ``hold``: the node is taken, or, where it is this rollout's already, shown a sign of life or let go.
    ``lease``: how long it stays this rollout's without a sign of life.
    ``drained``: the steps for which the node is touched although no release differs, and ``drained_done``: whether they
    were done here. ``unfinished``: the rollouts with these steps that other nodes of the play still have to finish.
    """

    rollout: str
    by: str
    controller: Mapping[str, Any]
    now: float
    since: str
    targets: Mapping[str, str] = field(default_factory=dict)
    back: bool = False
    back_of: str = ""
    drained: str = ""
    drained_done: bool = False
    unfinished: frozenset[str] = frozenset()
    hold: str = "take"
    lease: float = 21600
    take_over: str = ""


@dataclass(frozen=True)
class Seen:
    """What a node shows: the release that each replica points at, those that do not serve it, whether a job runs.

    ``alive``: whether the controller of the record's rollout still runs, where that can be told and was looked up.
    ``served``: what a replica served before, where it points at a release that never passed its gates.
    """

    current: Mapping[str, str | None]
    unsettled: frozenset[str] = frozenset()
    job: bool = False
    alive: bool | None = None
    served: Mapping[str, str | None] = field(default_factory=dict)

    def proven(self, index: str) -> str | None:
        """Return the release that a replica can go back to."""
        return self.served[index] if index in self.served else self.current.get(index)


@dataclass(frozen=True)
class Verdict:
    """What comes of a wish: the record that has to be there, or why not."""

    record: dict[str, Any] | None
    differs: tuple[str, ...] = ()
    changed: bool = False
    renewed: bool = False
    conflict: str = ""
    note: str = ""
    ask: bool = False


def check_record(value: Any, where: str) -> dict[str, Any]:
    """Return a record as it was read, or say that it is none.

    :raises RecordError: when something of it is missing or of a wrong type.
    """
    texts = ("rollout", "by", "since", "state", "step")
    if (
        not isinstance(value, dict)
        or not all(isinstance(value.get(name), str) for name in texts)
        or not all(isinstance(value.get(name), dict) for name in ("targets", "before", "controller"))
        or not isinstance(value.get("renewed"), (int, float))
        or not isinstance(value.get("lease", 0), (int, float))
        or value["state"] not in STATES
    ):
        raise RecordError(f"{where} is no record of a rollout: look at `gpu-node status`, then remove the file")
    return value


def duration(seconds: float) -> str:
    """Return seconds as people say them: ``40 s``, ``7 min``, ``3 h``."""
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def same_process(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two controllers are the same run."""
    return same_machine(one, other) and all(one.get(name) == other.get(name) for name in ("pid", "started"))


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether a process id means the same to both: the same machine, and the same space of processes on it."""
    return all(one.get(name, "") == other.get(name, "") for name in ("host", "machine", "space"))


def decide(record: dict[str, Any] | None, wish: Wish, seen: Seen) -> Verdict:
    """Decide on a wish: take the node, go on with what is ours, or say who holds it.

    :param record: what ``wanted.json`` holds now, or None.
    """
    if wish.hold != "take":
        return _hold_on(record, wish, seen)
    targets, back_of, nothing = _targets(record, wish, seen)
    if nothing:
        return Verdict(record, note=nothing)
    same = record is not None and record["targets"] == targets
    held = record is not None and record["state"] in HELD
    mine = record is not None and held and same_process(record["controller"], wish.controller)
    note = ""
    if record is not None and held and not mine:
        theirs = _held(record, wish, seen)
        if theirs.conflict or theirs.ask:
            return theirs
        if seen.job and not same:
            return Verdict(
                record,
                conflict=f"{_who(record, wish, seen)}. Its controller is gone, but its job runs on this node until it "
                "ends, with other releases than are wanted now. Wait for it (journalctl -fu gpu-node-rollout), "
                "then run this again",
            )
        note = theirs.note
    differs = tuple(
        index for index, release in targets.items() if seen.current.get(index) != release or index in seen.unsettled
    )
    if record is not None and same and record["state"] == "done" and not differs and _steps_done(record, wish):
        return Verdict(record)
    steps: dict[str, Any] = {"drained": wish.drained, "drained_done": wish.drained_done}
    if record is not None and same and held and (mine or seen.job):
        # The job that runs, or will, goes on in its own step. Another controller's may have done the steps.
        if not mine and record.get("drained") == wish.drained:
            steps["drained_done"] = bool(record.get("drained_done"))
        kept = {**record, **steps, "controller": dict(wish.controller), "renewed": wish.now, "lease": wish.lease}
        return Verdict(kept, differs, changed=not mine, renewed=True, note=note)
    before = {index: seen.proven(index) for index in targets}
    rollout, unproven = wish.rollout, False
    if record is not None and (mine or _goes_on(record, wish, same)):
        # Who wants the same goes on with the rollout that wanted it first, whose way back it keeps.
        rollout, back_of = record["rollout"], record.get("back_of")
        before |= {index: record["before"][index] for index in targets if index in record["before"]}
        # All may be switched already and only its bake be left, which has to come before the next node.
        unproven = record["state"] != "done" and before != targets
    touched = bool(differs) or bool(wish.drained) or unproven
    fresh = {
        "schema": SCHEMA,
        "rollout": rollout,
        "by": wish.by,
        "controller": dict(wish.controller),
        "since": wish.since,
        "renewed": wish.now,
        "lease": wish.lease,
        "state": "staged" if touched else "done",
        "step": "waits for its turn" if touched else "no replica differs",
        "error": "",
        "outcome": None,
        "targets": targets,
        "before": before,
        "back_of": back_of,
        **steps,
    }
    return Verdict(fresh, differs, changed=True, note=note)


def _hold_on(record: dict[str, Any] | None, wish: Wish, seen: Seen) -> Verdict:
    """Show a sign of life on a node that is this rollout's, or let go of it. Of another's nothing changes."""
    if record is None or record["state"] not in HELD or not same_process(record["controller"], wish.controller):
        return Verdict(record)
    renewed = {**record, "renewed": wish.now}
    if wish.hold == "renew":
        return Verdict(renewed, renewed=True)
    if seen.job:
        # It says itself how it ends.
        return Verdict(record)
    return Verdict({**renewed, "state": "failed", "step": "let go, its rollout has ended"}, changed=True)


def latest_rollout(record: Mapping[str, Any]) -> str:
    """Return the rollout that a node goes back from, or went back from."""
    return str(record.get("back_of") or record["rollout"])


def has_steps_left(record: Mapping[str, Any], steps: str) -> bool:
    """Tell whether a node's rollout with these drained steps is unfinished there."""
    return record.get("drained") == steps and (record["state"] != "done" or not record.get("drained_done"))


def _steps_done(record: dict[str, Any], wish: Wish) -> bool:
    """Tell whether the node's steps need not be done: by a rollout that ended on every node they are wanted again."""
    if not wish.drained:
        return True
    ended_here = record.get("drained") == wish.drained and not has_steps_left(record, wish.drained)
    return ended_here and record["rollout"] in wish.unfinished


def _goes_on(record: dict[str, Any], wish: Wish, same: bool) -> bool:
    """Tell whether a wish is that of the record's rollout."""
    if wish.back:
        return record.get("back_of") is not None
    if not wish.drained:
        return same
    # With a new driver a plan may resolve to other releases.
    return has_steps_left(record, wish.drained) or (same and bool(record["state"] != "done"))


def _targets(record: dict[str, Any] | None, wish: Wish, seen: Seen) -> tuple[dict[str, str], str | None, str]:
    """Return the wanted releases, the rollout that they take back, and why there is nothing to want."""
    if not wish.back:
        return dict(wish.targets), None, ""
    if record is None:
        return {}, None, "no rollout is known on this node, so there is nothing to take back"
    if wish.back_of not in ("", latest_rollout(record)):
        return {}, None, f"nothing of rollout {wish.back_of} to take back: its latest is {latest_rollout(record)}"
    if record.get("back_of") is not None:
        if record["state"] == "done":
            return {}, None, f"rollout {record['back_of']} was taken back already"
        return dict(record["targets"]), record["back_of"], ""
    wanted = {index: record["before"].get(index) or seen.proven(index) for index in record["targets"]}
    targets = {index: release for index, release in wanted.items() if release}
    if not targets:
        return {}, None, f"nothing served here before rollout {record['rollout']}"
    return targets, record["rollout"], ""


def _age(record: dict[str, Any], wish: Wish, seen: Seen) -> float:
    return 0 if seen.job else max(wish.now - record["renewed"], 0)


def _who(record: dict[str, Any], wish: Wish, seen: Seen) -> str:
    step = f", {record['step']}" if record["step"] else ""
    return (
        f"rollout {record['rollout']} of {record['by']} has this node since {record['since']} "
        f"({record['state']}{step}; last sign of it {duration(_age(record, wish, seen))} ago)"
    )


def _held(record: dict[str, Any], wish: Wish, seen: Seen) -> Verdict:
    """Say whether another rollout holds the node still; ``note`` says that it is taken over."""
    who, theirs = _who(record, wish, seen), record["controller"]
    if same_machine(theirs, wish.controller):
        if seen.alive is None:
            return Verdict(record, ask=True)
        if not seen.alive:
            return Verdict(record, note=f"takes over: {who}; its controller runs no more")
        return Verdict(
            record,
            conflict=f"{who}. Its ansible-playbook runs on this controller (process {theirs.get('pid')}): wait for its "
            "end, or end it",
        )
    if wish.take_over == record["rollout"]:
        return Verdict(record, note=f"takes over, as told: {who}")
    # The one that holds the node knows how long its batches take.
    lease = record.get("lease", wish.lease)
    if _age(record, wish, seen) > lease:
        return Verdict(record, note=f"takes over: {who}, longer than its rollout_lease ({duration(lease)})")
    return Verdict(
        record,
        conflict=f"{who}. Its controller is {theirs.get('host')}, where this one cannot look: wait for its end, or "
        f"when you know that it runs no more, -e rollout_take_over={record['rollout']}. Without a sign of it for "
        f"{duration(lease)} (its rollout_lease) it is taken over by itself",
    )
