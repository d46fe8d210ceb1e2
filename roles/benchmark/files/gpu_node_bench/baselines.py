"""Figures that are kept on a node, for each set of releases, to compare later runs with."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_node_bench import compare
from gpu_node_bench.errors import BenchError
from gpu_node_bench.run import write

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
# What is of one run alone.
_PASSING = ("comparison", "unusable_baselines")


def path(folder: Path, release: str) -> Path:
    """Where the baseline of a set of releases is. Raises BenchError on a name that is no file's."""
    if not _NAME.fullmatch(release):
        raise BenchError(f"release {release!r}: a baseline's name has letters, digits and ._- only (at most 200)")
    return folder / f"{release}.json"


def choose(folder: Path, release: str) -> tuple[Path | None, list[str]]:
    """This set's own baseline, else the one of another set that was made last; and why some cannot be used."""
    own = path(folder, release)
    found: dict[Path, str] = {}
    troubles = []
    # False comes before True.
    for one in sorted(folder.glob("*.json"), key=lambda one: (one != own, one.name)):
        try:
            found[one] = compare.load(one)["created"]
        except BenchError as why:
            troubles.append(str(why))
        if own in found:
            break
    return max(found, key=lambda one: (found[one], one.name), default=None), troubles


def comparison(report: dict[str, Any], baseline: Path) -> dict[str, Any]:
    """What becomes `comparison` of the report."""
    old = compare.load(baseline)
    rows = compare.compare(old, report)
    return {
        "release": old["release"],
        "created": old["created"],
        "same_release": old["release"] == report["release"],
        "exit_code": compare.exit_code(rows),
        "rows": [asdict(row) for row in rows],
        "old": {one["id"]: one["value"] for one in old["figures"]},
    }


def keep(report: dict[str, Any], folder: Path, replace: bool) -> str:
    """Put the report's numbers into the baseline of its releases; return what was done, or why not.

    A number that is there stays, unless it is to be replaced; what has no number is never in it.
    """
    target = path(folder, report["release"])
    new = {one["id"]: one for one in report["figures"] if one["value"] is not None}
    if not new:
        return "not kept as a baseline: no figure has a number"
    head, old = report, dict[str, Any]()
    if target.exists():
        try:
            kept = compare.load(target)
        except BenchError as why:
            if not replace:
                return f"the baseline of these releases stays as it is, and is of no use until it is replaced: {why}"
        else:
            if kept["program"] == report["program"]:
                old = {one["id"]: one for one in kept["figures"]}
            elif not replace:
                return f"the baseline of these releases stays, of version {kept['program']} of the program: {target}"
            head = report if replace else kept
    added = len(new.keys() - old.keys())
    if old and not replace and not added:
        return f"the baseline of these releases stays: {target}"
    figures = list(({**old, **new} if replace else {**new, **old}).values())
    summary = {"figures": len(figures), "invalid": 0}
    whole = {**head, "figures": figures, "summary": summary}
    write({name: value for name, value in whole.items() if name not in _PASSING}, target)
    if old and not replace:
        return f"{added} figures put into the baseline of these releases, which lacked them: {target}"
    return f"{len(new)} figures kept as the baseline of these releases: {target}"
