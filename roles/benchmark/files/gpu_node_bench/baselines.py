"""Reports that are kept on a node, one for each set of releases, to compare later runs with."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_node_bench import compare
from gpu_node_bench.errors import BenchError
from gpu_node_bench.run import write

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def path(folder: Path, release: str) -> Path:
    """Where the baseline of a set of releases is. Raises BenchError on a name that is no file's."""
    if not _NAME.fullmatch(release):
        raise BenchError(f"release {release!r}: a baseline's name has letters, digits and ._- only (at most 200)")
    return folder / f"{release}.json"


def choose(folder: Path, release: str) -> Path | None:
    """This set's own baseline, else the one of another set that was made last; None when there is none."""
    own = path(folder, release)
    if own.exists():
        return own
    others = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return max(others, key=lambda one: (str(compare.load(one).get("created")), one.name), default=None)


def comparison(report: dict[str, Any], baseline: Path) -> dict[str, Any]:
    """What becomes `comparison` of the report."""
    old = compare.load(baseline)
    rows = compare.compare(old, report)
    return {
        "release": old.get("release"),
        "created": old.get("created"),
        "same_release": old.get("release") == report["release"],
        "exit_code": compare.exit_code(rows),
        "rows": [asdict(row) for row in rows],
        "old": {one["id"]: one["value"] for one in old["figures"]},
    }


def keep(report: dict[str, Any], folder: Path, replace: bool) -> str:
    """Make the report the baseline of its releases; return what was done, or why not."""
    target = path(folder, report["release"])
    summary = report["summary"]
    if summary["invalid"] or not summary["figures"]:
        return f"not kept as a baseline: {summary['invalid']} of {summary['figures']} figures are invalid"
    if target.exists() and not replace:
        return f"the baseline of these releases stays: {target}"
    write({name: value for name, value in report.items() if name != "comparison"}, target)
    return f"kept as the baseline of these releases: {target}"
