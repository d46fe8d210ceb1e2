"""Plots as inline SVG: colours are the page's classes, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 8, 24, 34
_PLOT_W, _PLOT_H = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_TICKS = 4


@dataclass(frozen=True)
class Series:
    """One line or one colour of bars. points: x and y; a missing y has no point."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class Mark:
    """A published or earlier figure, and where it belongs."""

    x: float
    y: float
    text: str
    kind: str = "ref"


def ticks(top: float) -> list[float]:
    """Round values from 0 to at least ``top``."""
    if not math.isfinite(top) or top <= 0:
        return [0.0, 1.0]
    raw = top / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw - 1e-12)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)]


def short(value: float) -> str:
    """A value for an axis."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k"
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:g}" if abs(value) >= 1 or value == 0 else f"{value:.2g}"


def _y(value: float, top: float) -> float:
    return _TOP + _PLOT_H * (1 - value / top)


def _frame(top: float, y_title: str, x_title: str, percent: bool = False) -> list[str]:
    parts = []
    for tick in ticks(top):
        y = _y(tick, ticks(top)[-1])
        label = f"{tick:.0%}" if percent else short(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    right = WIDTH - _RIGHT
    parts.append(f'<text class="axis" x="{right}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_title)}</text>')
    if y_title:
        parts.append(f'<text class="axis" x="0" y="10">{escape(y_title)}</text>')
    return parts


def _svg(parts: Sequence[str], label: str) -> str:
    name = escape(label, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def _x_label(x: float, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{_TOP + _PLOT_H + 14}" text-anchor="middle">{escape(text)}</text>'


def _stroke(x: float, half: float, y: float, mark: Mark) -> str:
    """A mark is a short line, on bars as on lines."""
    return (
        f'<line class="{mark.kind}" x1="{x - half:.1f}" x2="{x + half:.1f}" y1="{y:.1f}" y2="{y:.1f}">'
        f"<title>{escape(mark.text)}</title></line>"
    )


def _highest(series: Sequence[Series], marks: Sequence[Mark]) -> float:
    values = [y for one in series for _, y in one.points if y is not None] + [mark.y for mark in marks]
    return max(values, default=0.0)


def lines(
    series: Sequence[Series],
    marks: Sequence[Mark],
    *,
    label: str,
    x_title: str,
    y_title: str,
    places: Sequence[float] = (),
    dots: bool = True,
    bands: Sequence[tuple[float, float, str]] = (),
) -> str:
    """Lines over numbers; with ``places`` over these values, evenly spaced.

    :param bands: whiles in the background, with their names.
    """
    top = ticks(_highest(series, marks))[-1]
    xs = [x for one in series for x, _ in one.points] + [mark.x for mark in marks]
    least, most = (0.0, max(xs, default=1.0) or 1.0)

    def at(x: float) -> float:
        if places:
            return _LEFT + _PLOT_W * (list(places).index(x) + 0.5) / len(places)
        return _LEFT + 6 + (_PLOT_W - 12) * (x - least) / (most - least)

    parts = []
    for number, (begin, end, name) in enumerate(bands):
        left, right = at(begin), at(min(end, most))
        kind = "band odd" if number % 2 else "band"
        parts.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{_TOP}" width="{max(0.0, right - left):.1f}" height="{_PLOT_H}">'
            f"<title>{escape(name)}</title></rect>"
        )
    parts += _frame(_highest(series, marks), y_title, x_title)
    for x in places or ticks(most)[:-1] or [most]:
        if places or x <= most:
            parts.append(_x_label(at(x), short(x)))
    for number, one in enumerate(series):
        found = [(at(x), _y(y, top), x, y) for x, y in one.points if y is not None]
        if len(found) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in found)
            parts.append(f'<polyline class="line s{number % 8}" points="{path}"/>')
        if dots:
            parts += [
                f'<circle class="dot s{number % 8}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
                f"<title>{escape(one.name)}: {short(value_x)}: {value_y:,.4g}</title></circle>"
                for x, y, value_x, value_y in found
            ]
    parts += [_stroke(at(mark.x), 9, _y(mark.y, top), mark) for mark in marks]
    return _svg(parts, label)


def bars(
    names: Sequence[str],
    series: Sequence[Series],
    marks: Sequence[Mark],
    *,
    label: str,
    x_title: str,
    y_title: str,
    percent: bool = False,
) -> str:
    """Groups of bars; a point's or mark's x is the group's number."""
    top = ticks(_highest(series, marks))[-1]
    group = _PLOT_W / max(1, len(names))
    width = min(34.0, group * 0.72 / max(1, len(series)))
    parts = _frame(_highest(series, marks), y_title, x_title, percent)
    for number, name in enumerate(names):
        parts.append(_x_label(_LEFT + group * (number + 0.5), name))
    for number, one in enumerate(series):
        for x, y in one.points:
            if y is None:
                continue
            left = _LEFT + group * (x + 0.5) + width * (number - len(series) / 2)
            text = f"{y:.1%}" if percent else f"{y:,.4g}"
            parts.append(
                f'<rect class="bar s{number % 8}" x="{left + 1:.1f}" y="{_y(y, top):.1f}" width="{width - 2:.1f}" '
                f'height="{_TOP + _PLOT_H - _y(y, top):.1f}" rx="1.5"><title>{escape(one.name)}: {text}</title></rect>'
            )
    half = width * len(series) / 2 + 3
    parts += [_stroke(_LEFT + group * (mark.x + 0.5), half, _y(mark.y, top), mark) for mark in marks]
    return _svg(parts, label)


def legend(names: Sequence[str], marks: Sequence[Mark]) -> str:
    """The names of colours and marks."""
    parts = [f'<li><i class="key s{number % 8}"></i>{escape(name)}</li>' for number, name in enumerate(names)]
    kinds = dict.fromkeys(mark.kind for mark in marks)
    words = {"ref": "published", "ref2": "published, other", "base": "baseline"}
    parts += [f'<li><i class="key {kind}"></i>{words[kind]}</li>' for kind in kinds]
    return f'<ul class="legend">{"".join(parts)}</ul>'
