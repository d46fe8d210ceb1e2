"""A figure of the report: a number, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu_node_bench import arithmetic
from gpu_node_bench.errors import DisturbedError, NoFigureError

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
_STREAM = ("tokens_short", "tokens_long", "ignore_eos", "thinking_off")
# kind -> the options that say what a figure is of. Made with others, it is another figure.
METHOD: dict[str, tuple[str, ...]] = {
    "decode": _STREAM,
    "first_token": ("thinking_off",),
    "prefill": ("thinking_off",),
    "cache_repeat": ("thinking_off",),
    "acceptance": _STREAM,
    "accepted": _STREAM,
    "load": ("level_tokens", "level_requests", "ignore_eos", "thinking_off"),
    "memory": (),
}


def figure(target: str, measure: str, kind: str, options: object, **details: Any) -> Figure:
    """An empty figure; `measure` is what references and comparisons know it by, `options` are the run's."""
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
        "notes": [],
        "method": {name: getattr(options, name) for name in METHOD[kind]},
        "details": details,
    }


def settle(made: Figure, values: Sequence[float], limit: float, middle: bool = False) -> Figure:
    """Put runs into a figure: their mean (or median) and their spread.

    Raises NoFigureError when they give no number, DisturbedError when they are further apart than the limit, a share of
    their mean.
    """
    found = arithmetic.summary(values)
    if found.spread > limit:
        runs = ", ".join(f"{value:.4g}" for value in values)
        raise DisturbedError(f"the runs differ by {found.spread:.1%} of their mean, more than {limit:.0%}: {runs}")
    made["value"] = arithmetic.median(values) if middle else found.mean
    made["runs"] = list(values)
    made["spread"] = found.spread if len(values) > 1 else None
    return made


def invalid(made: Figure, why: str) -> Figure:
    """Say that there is no number. Whatever was put in before is gone."""
    made.update(value=None, spread=None, runs=[], invalid=why)
    return made


def guarded(made: Figure, fill: Callable[[Figure], object]) -> Figure:
    """Fill a figure in, or say why not."""
    try:
        fill(made)
    except NoFigureError as why:
        invalid(made, str(why))
    return made
