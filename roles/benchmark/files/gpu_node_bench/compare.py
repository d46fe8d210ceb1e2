"""Two reports against each other: figure by figure, with a tolerance for each kind."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_node_bench.errors import BenchError
from gpu_node_bench.figures import KINDS

# How much worse than before still counts as the same, as a share. The published runs' own spread is about 7%.
TOLERANCES = {
    "decode": 0.07,
    "first_token": 0.15,
    "prefill": 0.10,
    "cache_repeat": 0.25,
    "acceptance": 0.05,
    "accepted": 0.05,
    "load": 0.10,
    "memory": 0.02,
}
# What has to be in a report, and of which types.
_NUMBER = (int, float)
_REPORT: dict[str, Any] = {
    "program": str, "created": str, "name": str, "profile": str, "release": str, "seconds": _NUMBER, "clock": dict,
    "method": dict, "targets": list, "figures": list, "cards": list, "cards_note": str, "phases": list, "node": dict,
    "summary": dict,
}  # fmt: skip
_FIGURE: dict[str, Any] = {
    "id": str, "target": str, "measure": str, "kind": str, "unit": str, "value": (*_NUMBER, type(None)),
    "spread": (*_NUMBER, type(None)), "runs": list, "invalid": (str, type(None)), "notes": list, "method": dict,
    "details": dict,
}  # fmt: skip
_TARGET: dict[str, Any] = {
    "name": str, "kind": str, "model": str, "engine": dict, "speculation": dict, "notes": list,
}  # fmt: skip

WORDS = {"same": "same", "better": "better", "worse": "WORSE", "unknown": "cannot be compared"}


@dataclass(frozen=True)
class Row:
    """One figure in both. change: as a share of the old one, None when there is no number in one of them."""

    id: str
    unit: str
    old: float | None
    new: float | None
    change: float | None
    tolerance: float
    verdict: str
    why: str = ""


def _fault(value: Any, wanted: dict[str, Any], where: str) -> str:
    """What a part of a report lacks, or has of another type; empty when nothing."""
    if not isinstance(value, dict):
        return f"{where} is no object"
    for name, kind in wanted.items():
        if name not in value:
            return f"{where} has no {name!r}"
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            return f"{where} has {name!r}: {json.dumps(value[name])[:60]}"
    return ""


def _figure_fault(one: Any, where: str) -> str:
    if fault := _fault(one, _FIGURE, where):
        return fault
    if one["kind"] not in KINDS:
        return f"{where} has 'kind': {one['kind']!r}"
    if one["value"] is not None and not math.isfinite(one["value"]):
        return f"{where} has 'value': {one['value']}"
    return "" if (one["value"] is None) == bool(one["invalid"]) else f"{where} has a value and is invalid, or neither"


def _report_fault(report: dict[str, Any]) -> str:
    faults = [_fault(report, _REPORT, "the report")]
    if not faults[0]:
        faults += [_figure_fault(one, f"figures[{at}]") for at, one in enumerate(report["figures"])]
        faults += [_fault(one, _TARGET, f"targets[{at}]") for at, one in enumerate(report["targets"])]
    return next(filter(None, faults), "")


def load(path: Path) -> dict[str, Any]:
    """A report in a file, with all that a report has. Raises BenchError."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BenchError(f"{path} is not JSON: {error}") from None
    if not isinstance(report, dict) or report.get("schema") != 1:
        raise BenchError(f"{path} is no report of this program (schema 1)")
    if fault := _report_fault(report):
        raise BenchError(f"{path} is no whole report: {fault}")
    return report


def different_method(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The sentence about two figures that are of different things; empty when they are not."""
    names = dict.fromkeys([*old["method"], *new["method"]])
    words = [
        f"{name} {old['method'].get(name)!r} and {new['method'].get(name)!r}"
        for name in names
        if old["method"].get(name) != new["method"].get(name)
    ]
    return "measured in different ways: " + ", ".join(words) if words else ""


def _row(one: dict[str, Any], other: dict[str, Any] | None, tolerance: float, program: str) -> Row:
    def unknown(why: str) -> Row:
        old, new = one["value"], other["value"] if other else None
        return Row(one["id"], one["unit"], old, new, None, tolerance, "unknown", why)

    if other is None:
        return unknown("not in the new report")
    for which, figure in (("old", one), ("new", other)):
        if figure["value"] is None:
            return unknown(f"{which}: invalid: {figure['invalid']}")
    if why := program or different_method(one, other):
        return unknown(why)
    old, new = float(one["value"]), float(other["value"])
    if old == 0:
        return unknown("the old figure is 0")
    change = new / old - 1
    gain = change if KINDS[one["kind"]][1] else -change
    verdict = "same" if abs(gain) <= tolerance else "better" if gain > 0 else "worse"
    return Row(one["id"], one["unit"], old, new, change, tolerance, verdict)


def compare(old: dict[str, Any], new: dict[str, Any], tolerances: dict[str, float] | None = None) -> list[Row]:
    """Every figure of the old report, and those that only the new one has."""
    limits = TOLERANCES | (tolerances or {})
    versions = [old["program"], new["program"]]
    program = f"measured by versions {' and '.join(versions)} of the program" if versions[0] != versions[1] else ""
    found = {one["id"]: one for one in new["figures"]}
    rows = [_row(one, found.get(one["id"]), limits[one["kind"]], program) for one in old["figures"]]
    known = {one["id"] for one in old["figures"]}
    for one in new["figures"]:
        if one["id"] not in known:
            why = "not in the old report"
            rows.append(Row(one["id"], one["unit"], None, one["value"], None, limits[one["kind"]], "unknown", why))
    return rows


def exit_code(rows: list[Row]) -> int:
    """0: nothing is worse, 1: something is, 3: nothing is, but something cannot be compared."""
    verdicts = {row.verdict for row in rows}
    return 1 if "worse" in verdicts else 3 if "unknown" in verdicts or not rows else 0


def shown(value: float | None, unit: str) -> str:
    """A value with as many digits as it is worth."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.1%}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def table(rows: list[Row]) -> str:
    """The comparison as aligned text."""
    cells = [("figure", "unit", "old", "new", "change", "allowed", "verdict")]
    for row in rows:
        change = "-" if row.change is None else f"{row.change:+.1%}"
        verdict = WORDS[row.verdict] + (f": {row.why}" if row.why else "")
        cells.append(
            (
                row.id,
                row.unit,
                shown(row.old, row.unit),
                shown(row.new, row.unit),
                change,
                f"{row.tolerance:.0%}",
                verdict,
            )
        )
    widths = [max(len(line[at]) for line in cells) for at in range(6)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  "
        + "  ".join(f"{line[at]:>{widths[at]}}" for at in range(2, 6))
        + f"  {line[6]}"
        for line in cells
    )
