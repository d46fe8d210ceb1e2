"""Lines that tell people how far a fetch is."""

from __future__ import annotations

import sys
import time
from collections import deque

UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def say(text: str) -> None:
    """Print one line; under systemd it goes to the journal, and from there to whoever follows the job."""
    print(text, flush=True)


def warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def size_text(count: float) -> str:
    """Return a number of bytes for people, in decimal units: `130.2 GB`."""
    for factor, unit in UNITS:
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def time_text(seconds: float) -> str:
    """Return a duration for people: `42 s`, `15 min`, `3 h 5 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


class Rate:
    """Bytes per second over the last seconds."""

    def __init__(self, window_s: float) -> None:
        self._window = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self._seen.append((now, count))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self._window:
            self._seen.popleft()

    def per_second(self) -> float:
        if len(self._seen) < 2 or self._seen[-1][0] == self._seen[0][0]:
            return 0.0
        return max(0.0, (self._seen[-1][1] - self._seen[0][1]) / (self._seen[-1][0] - self._seen[0][0]))


def progress_line(name: str, files: tuple[int, int], count: tuple[int, int], rate: float) -> str:
    """Return one line; ``files`` and ``count`` (bytes) are what is done, and what there is in all."""
    total = size_text(count[1])
    number, unit = size_text(count[0]), total.rsplit(" ", 1)[1]
    if number.endswith(f" {unit}"):
        number = number.removesuffix(f" {unit}")
    left = f", {time_text((count[1] - count[0]) / rate)} left" if rate > 0 else ""
    return f"{name}: {files[0]} of {files[1]} files, {number} of {total}, {size_text(rate)}/s{left}"
