"""One row of the report, and how it comes about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

PASS, WARN, FAIL, NOT_RUN = "pass", "warn", "fail", "not run"


@dataclass(frozen=True)
class Check:
    """What was looked at, seen and wanted, and the verdict.

    why: with `not run` the reason. applies: False when it means nothing on this node, so that nothing is left open.
    """

    id: str
    part: str
    target: str
    what: str
    verdict: str
    seen: str = ""
    wanted: str = ""
    why: str = ""
    remedy: str = ""
    applies: bool = True
    seconds: float = 0.0

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """The part of a check that a verdict function decides."""

    verdict: str
    seen: str = ""
    wanted: str = ""
    why: str = ""
    remedy: str = ""
    applies: bool = True


def passed(seen: str, wanted: str = "") -> Outcome:
    return Outcome(PASS, seen, wanted)


def warned(seen: str, wanted: str, remedy: str) -> Outcome:
    return Outcome(WARN, seen, wanted, "", remedy)


def failed(seen: str, wanted: str, remedy: str) -> Outcome:
    return Outcome(FAIL, seen, wanted, "", remedy)


def not_run(why: str, remedy: str = "", wanted: str = "") -> Outcome:
    """It could be run, and was not: an open question, never a pass."""
    return Outcome(NOT_RUN, "", wanted, why, remedy)


def not_here(why: str) -> Outcome:
    """It means nothing on this node."""
    return Outcome(NOT_RUN, "", "", why, "", applies=False)


@dataclass(frozen=True)
class Title:
    """What a check is called. id is stable: programs compare by it."""

    id: str
    part: str
    what: str


class Book:
    """Collects the checks and says each one as it comes. One that breaks is a failed check, and not the end."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.checks: list[Check] = []
        self._say = say
        self._clock = clock

    def add(self, title: Title, target: str, outcome: Outcome, seconds: float = 0.0) -> None:
        check = Check(title.id, title.part, target, title.what, **asdict(outcome), seconds=round(seconds, 2))
        self.checks.append(check)
        said = check.why if check.verdict == NOT_RUN else check.seen
        self._say(f"{check.verdict:<8}{check.target}: {check.what}: {said}"[:400])

    def run(self, title: Title, target: str, find: Callable[[], Outcome]) -> Outcome:
        """Find the outcome out; an expected error of the way there is the check's failure."""
        began = self._clock()
        try:
            outcome = find()
        except CheckError as error:
            outcome = Outcome(FAIL, str(error), error.wanted, "", error.remedy)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            # The other checks must still run; what broke is a finding of its own.
            outcome = failed(f"{type(error).__name__}: {error}"[:300], "an answer", "look at the node's journal")
        self.add(title, target, outcome, self._clock() - began)
        return outcome


class CheckError(Exception):
    """A check could not come to its end; the text says what was seen."""

    def __init__(self, seen: str, wanted: str = "an answer", remedy: str = "look at the engine's log") -> None:
        super().__init__(seen)
        self.wanted = wanted
        self.remedy = remedy


def counts(checks: Iterable[Check]) -> dict[str, int]:
    """How many checks have which verdict; `open` are those that did not run and could have."""
    every = list(checks)
    found = {name: sum(check.verdict == name for check in every) for name in (PASS, WARN, FAIL, NOT_RUN)}
    return {**found, "open": sum(check.verdict == NOT_RUN and check.applies for check in every)}


def result(checks: Iterable[Check]) -> str:
    """The whole report in a word: fail, incomplete, warn or pass."""
    found = counts(checks)
    if found[FAIL]:
        return FAIL
    if found["open"] or not found[PASS]:
        return "incomplete"
    return WARN if found[WARN] else PASS


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcomes of several things as one: the worst verdict, with what was seen of those that have it."""
    every = list(outcomes)
    for verdict in (FAIL, WARN, NOT_RUN):
        bad = [one for one in every if one.verdict == verdict]
        if bad:
            seen = "; ".join(dict.fromkeys(one.seen for one in bad if one.seen))
            why = "; ".join(dict.fromkeys(one.why for one in bad if one.why))
            return replace(bad[0], seen=seen, why=why)
    if not every:
        return not_run("nothing was looked at")
    return replace(every[0], seen="; ".join(dict.fromkeys(one.seen for one in every)))
