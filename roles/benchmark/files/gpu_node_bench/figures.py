"""A figure of the report: a number, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu_node_bench import arithmetic
from gpu_node_bench.errors import NoFigureError

Figure = dict[str, Any]

# kind -> (unit, whether more is better)
KINDS: dict[str, tuple[str, bool]] = {
    "decode": ("tok/s", True),
    "first_token": ("s", False),
    "prefill": ("tok/s", True),
    "cache_repeat": ("s", False),
    "acceptance": ("share", True),
    "accepted": ("tokens", True),
    "load": ("tok/s", True),
    "memory": ("MiB", False),
}


def figure(target: str, measure: str, kind: str, **details: Any) -> Figure:
    """An empty figure; `measure` is what references and comparisons know it by."""
    unit, more_is_better = KINDS[kind]
    return {
        "id": f"{target}/{measure}",
        "target": target,
        "measure": measure,
        "kind": kind,
        "unit": unit,
        "better": "higher" if more_is_better else "lower",
        "value": None,
        "spread": None,
        "runs": [],
        "invalid": None,
        "unsteady": None,
        "notes": [],
        "details": details,
    }


def settle(made: Figure, values: Sequence[float], limit: float, middle: bool = False) -> Figure:
    """Put runs into a figure: their mean (or median), their spread, and whether they are too far apart.

    Raises NoFigureError when they give no number.
    """
    found = arithmetic.summary(values)
    made["value"] = arithmetic.median(values) if middle else found.mean
    made["runs"] = list(values)
    made["spread"] = found.spread if len(values) > 1 else None
    made["unsteady"] = arithmetic.unsteady(found, len(values), limit)
    return made


def invalid(made: Figure, why: str) -> Figure:
    """Say that there is no number. Whatever was put in before is gone."""
    made.update(value=None, spread=None, runs=[], unsteady=None, invalid=why)
    return made


def guarded(made: Figure, fill: Callable[[Figure], object]) -> Figure:
    """Fill a figure in, or say why not."""
    try:
        fill(made)
    except NoFigureError as why:
        invalid(made, str(why))
    return made
