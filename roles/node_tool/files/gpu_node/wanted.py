"""The record of what this node has to run and who said so: wanted.json. Whoever changes it holds its lock."""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_node import files
from gpu_node.config import RELEASE_ID, Fields
from gpu_node.errors import ConfigError, RefusedError
from gpu_node.host import Host
from gpu_node.paths import Paths

STATES = ("staged", "running", "done", "failed")
LOCK_TIMEOUT_S = 30
REMEDY = "run the rollout's playbook again, it writes this file"


@dataclass(frozen=True)
class Wanted:
    """The record. before: what each replica served when the targets were first wanted. value: all of its fields."""

    rollout: str
    by: str
    state: str
    renewed: float
    step: str
    error: str
    outcome: str | None
    targets: Mapping[int, str]
    before: Mapping[int, str | None]
    value: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes_something(self) -> bool:
        """Whether a replica served something else when the targets were first wanted."""
        return any(self.before.get(index) != release for index, release in self.targets.items())

    def public(self, index: int) -> dict[str, Any]:
        """The record as the replica's row shows it."""
        shown = {name: item for name, item in self.value.items() if name not in ("targets", "before")}
        return shown | {"target": self.targets.get(index)}


def _releases(value: Any, where: str, *, empty: bool) -> dict[int, Any]:
    good = isinstance(value, dict) and all(
        index.isascii() and index.isdecimal() and len(index) < 6
        and ((release is None and empty) or (isinstance(release, str) and RELEASE_ID.fullmatch(release)))
        for index, release in value.items()
    )  # fmt: skip
    if not good:
        raise ConfigError(f"{where}: expected release ids by replica: {REMEDY}")
    return {int(index): release for index, release in value.items()}


def parse_wanted(text: str, where: str) -> Wanted:
    """The record of a text. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not valid JSON: {REMEDY}") from None
    fields = Fields(value, where)
    state = fields.take("state", str, lambda word: word in STATES, f"one of {', '.join(STATES)}")
    renewed, outcome = value.get("renewed", 0), value.get("outcome")
    return Wanted(
        rollout=fields.text("rollout"),
        by=fields.text("by"),
        state=state,
        renewed=float(renewed) if type(renewed) in (int, float) else 0.0,
        step=str(value.get("step", "")),
        error=str(value.get("error", "")),
        outcome=outcome if isinstance(outcome, str) else None,
        targets=_releases(value.get("targets"), f"{where}: 'targets'", empty=False),
        before=_releases(value.get("before", {}), f"{where}: 'before'", empty=True),
        value=value,
    )


class Record:
    """The record on this node, as one rollout sees it."""

    def __init__(self, paths: Paths, host: Host, holder: str) -> None:
        self._paths = paths
        self._host = host
        self._holder = holder

    def read(self) -> Wanted | None:
        """The record; None when nobody asked for anything yet. Raises ConfigError."""
        text = files.read_text(self._paths.wanted)
        return None if text is None else parse_wanted(text, str(self._paths.wanted))

    def of(self, rollout: str) -> Wanted:
        """The record, which is that rollout's. Raises RefusedError when it is another's."""
        wanted = self.read()
        if wanted is None:
            raise RefusedError(f"{self._paths.wanted} is missing, so rollout {rollout} wants nothing: {REMEDY}")
        if wanted.rollout != rollout:
            raise RefusedError(
                f"{self._paths.wanted} is of rollout {wanted.rollout} by {wanted.by}, not of {rollout}:"
                " the later one decides; run your playbook again if it should be yours"
            )
        return wanted

    def update(self, rollout: str, **changes: Any) -> None:
        """Change fields of that rollout's record, which renews it. Raises RefusedError when it is another's."""
        with files.lock(self._paths.wanted_lock, self._holder, LOCK_TIMEOUT_S):
            value = dict(self.of(rollout).value) | changes | {"renewed": self._host.wall_clock()}
            files.atomic_write(self._paths.wanted, json.dumps(value) + "\n")


def utc(host: Host) -> str:
    """Now, as text."""
    return datetime.datetime.fromtimestamp(host.wall_clock(), datetime.UTC).isoformat(timespec="seconds")
