"""Whether so many right answers are as many as they should be. Pure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gpu_node_accept.checks import CheckError, Outcome, failed, not_here, not_run, passed, warned

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("gates.json").read_text(encoding="utf-8"))


def tail(right: int, count: int, share: float) -> float:
    """The chance of so few right answers, or fewer, of somebody who gives the right one with that probability."""
    return math.fsum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(right + 1))


def least(count: int, share: float, chance: float) -> int:
    """The fewest right answers that are still likely enough: each fewer has less than that chance."""
    return next(right for right in range(count + 1) if tail(right, count, share) >= chance)


def judge(name: str, profile: str, right: int, count: int, broken: int, minimum: float | None) -> Outcome:
    """The verdict over a set of questions.

    A share that was measured once is itself uncertain, and so is this one: only what the binomial spread makes unlikely
    fails.

    :param broken: answers that did not come at all; they are wrong answers, and a reason to look.
    :param minimum: the operator's own share, which has no tolerance.
    """
    if count == 0:
        return not_run("no question was asked")
    gate = DATA["gates"].get(name, {}).get(profile)
    seen = f"{right} of {count} right, {right / count:.1%}" + (f"; {broken} did not come" if broken else "")
    remedy = "compare with the release before: quality_checks=[agreement], and switches off one at a time"
    if minimum is not None:
        wanted = f"{minimum:.1%} at least (quality_minimum)"
        return passed(seen, wanted) if right / count >= minimum else failed(seen, wanted, remedy)
    if gate is None:
        return not_here(f"{seen}; profile {profile} has no figure to hold it against (quality_minimum sets one)")
    fewest = least(count, gate["share"], DATA["chance"])
    wanted = (
        f"{gate['share']:.1%} ({gate['source']}); {fewest} of {count} at least:"
        f" fewer come by chance in less than {DATA['chance']:.0%} of runs"
    )
    if right < fewest:
        return failed(seen, wanted, remedy)
    if broken:
        return warned(seen, wanted, "look at the engine's log for the requests that failed")
    return passed(seen, wanted)


def first_difference(one: str, other: str) -> int | None:
    """The place of the first character in which two texts differ; None when they are the same."""
    if one == other:
        return None
    shared = min(len(one), len(other))
    return next((place for place in range(shared) if one[place] != other[place]), shared)


def same_questions(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Raises CheckError when two records were not asked the same thing in the same way."""
    for key in ("model", "prompts", "thinking", "max_tokens"):
        if first[key] != second[key]:
            raise CheckError(
                f"{first['label']} and {second['label']} have another {key}: {first[key]} and {second[key]}",
                "the same questions, asked in the same way",
                "ask with the settings that those were kept with, or keep them again",
            )


def agreement(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Compare two records of texts. Raises CheckError when they are of different questions.

    :returns: ``count``, ``same``, ``share``, ``differ`` (id, place, both texts around it), and ``shared`` (the mean
        share of an answer before its first difference).
    """
    same_questions(first, second)
    differ, shared = [], []
    for name, text in first["texts"].items():
        other = second["texts"][name]
        place = first_difference(text, other)
        shared.append(1.0 if place is None else place / max(len(text), len(other), 1))
        if place is not None:
            around = slice(max(0, place - 20), place + 40)
            differ.append({"id": name, "place": place, "first": text[around], "second": other[around]})
    count = len(first["texts"])
    return {
        "count": count,
        "same": count - len(differ),
        "share": (count - len(differ)) / count if count else 0.0,
        "shared": sum(shared) / len(shared) if shared else 0.0,
        "differ": sorted(differ, key=lambda row: row["place"]),
    }


def judge_agreement(found: dict[str, Any], minimum: float, own: float | None) -> Outcome:
    """The verdict over the comparison.

    :param own: the share in which the second record agrees with its own repeat; None when it was not repeated.
    """
    noise = "" if own is None else f"; with itself {own:.1%}"
    seen = f"{found['same']} of {found['count']} answers the same, {found['share']:.1%}{noise}"
    if found["differ"]:
        first = found["differ"][0]
        shared = f"{found['shared']:.0%} shared in the mean"
        seen += f"; the first at character {first['place']} ({first['id']}), {shared}"
    wanted = f"{minimum:.1%} at least (quality_agreement_minimum)"
    if found["count"] == 0:
        return not_run("no text was compared")
    if found["share"] >= minimum:
        return passed(seen, wanted)
    if own is not None and own < minimum:
        return not_run(
            f"{seen}: the engine does not agree with itself, so this says nothing about the change",
            "look at the check `the same answer each time` of playbooks/verify.yml first",
            wanted,
        )
    return failed(seen, wanted, "the change moves answers: hold the gates of right answers against it, or leave it off")
