"""Memory, power and throttling of the cards, sampled by nvidia-smi while the benchmark runs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_FIELDS = ("uuid", "pci.bus_id", "name", "memory.used", "memory.total", "power.draw", "temperature.gpu")
# The newer name first. A driver that does not know it answers with a usage error.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of the reasons that make a figure wrong. Reaching the power limit (0x4) is normal under load and is only noted.
SLOWED = {0x8: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
POWER_CAP = 0x4
_PLOTTED = 240
# Beyond its interval, nvidia-smi may take that long for a look.
_SEEN_WITHIN_S = 5.0
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Sample:
    """One card at one moment. None: the card does not say."""

    at: float
    uuid: str
    memory_mib: float | None
    total_mib: float | None
    power_w: float | None
    temperature_c: float | None
    reasons: int | None


@dataclass
class Card:
    """What was seen of a card."""

    uuid: str
    address: str
    name: str
    samples: list[Sample] = field(default_factory=list)


def number(text: str) -> float | None:
    """A value as nvidia-smi prints it without units; None for what a card does not support."""
    try:
        return float(text)
    except ValueError:
        return None


def parse_line(line: str, at: float) -> tuple[Card, Sample] | None:
    """A line of nvidia-smi's CSV; None when it is something else."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(_FIELDS) + 1 or not parts[0].startswith("GPU-"):
        return None
    try:
        reasons: int | None = int(parts[7], 16)
    except ValueError:
        reasons = None
    card = Card(uuid=parts[0], address=parts[1], name=parts[2])
    return card, Sample(at, parts[0], number(parts[3]), number(parts[4]), number(parts[5]), number(parts[6]), reasons)


def _command(reasons: str, interval_ms: int) -> list[str]:
    query = ",".join((*_FIELDS, reasons))
    return ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--loop-ms={interval_ms}"]


class Sampler:
    """Runs nvidia-smi beside the benchmark. `why` says why there are no samples, or no further ones."""

    def __init__(self, interval_ms: int, only: Sequence[str] = ()) -> None:
        self.cards: dict[str, Card] = {}
        self.why = ""
        self._interval_ms = interval_ms
        self._only = set(only)
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = False

    def __enter__(self) -> Sampler:
        if shutil.which("nvidia-smi") is None:
            self.why = "there is no nvidia-smi here"
            return self
        for reasons in _REASONS:
            once = [part for part in _command(reasons, 0) if not part.startswith("--loop-ms")]
            try:
                done = subprocess.run(once, capture_output=True, text=True, timeout=30, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                self.why = f"nvidia-smi does not answer: {type(error).__name__}"
                return self
            if done.returncode == 0 and any(parse_line(line, 0.0) for line in done.stdout.splitlines()):
                self._start(_command(reasons, self._interval_ms))
                return self
            self.why = f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:200] or 'no output'}"
        return self

    def _start(self, argv: list[str]) -> None:
        self.why = ""
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if found := parse_line(line, time.monotonic()):
                self.take(*found)
        code = process.wait()
        if not self._stopping:
            self.why = f"nvidia-smi ended by itself (exit code {code})"

    def take(self, card: Card, sample: Sample) -> None:
        """Add a sample, unless the card is none of ours."""
        if self._only and card.uuid not in self._only:
            return
        with self._lock:
            self.cards.setdefault(card.uuid, card).samples.append(sample)

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        if self._thread is not None:
            self._thread.join(5)

    def during(self, begin: float, end: float, uuids: Sequence[str] = ()) -> list[Sample]:
        """The samples of a while (monotonic seconds)."""
        with self._lock:
            return [
                sample
                for card in self.cards.values()
                if not uuids or card.uuid in uuids
                for sample in card.samples
                if begin <= sample.at <= end
            ]

    def unseen(self, since: float, uuids: Sequence[str]) -> str:
        """Wait until each of these cards was seen after that moment; the sentence about those that were not.

        Without it, cards that nobody looks at would count as cards that were not slowed down.
        """
        limit = time.monotonic() + _SEEN_WITHIN_S + 3 * self._interval_ms / 1000
        while True:
            gone = self.why
            with self._lock:
                missing = [uuid for uuid in uuids if uuid not in self.cards or self.cards[uuid].samples[-1].at < since]
            if not missing:
                return ""
            if gone or time.monotonic() >= limit:
                why = gone or f"nvidia-smi said nothing of {', '.join(uuid[:12] for uuid in missing)}"
                return f"whether cards were slowed down cannot be seen: {why}"
            time.sleep(_LOOK_EVERY_S)

    def slowed(self, begin: float, end: float, uuids: Sequence[str] = ()) -> str:
        """The sentence about cards that were slowed down in that while; empty when none was."""
        found = {
            f"{sample.uuid[:12]}: {word}"
            for sample in self.during(begin, end, uuids)
            for bit, word in SLOWED.items()
            if (sample.reasons or 0) & bit
        }
        return "throttled meanwhile: " + ", ".join(sorted(found)) if found else ""

    def report(self, origin: float) -> list[dict[str, Any]]:
        """Each card with its peaks and its power over time."""
        with self._lock:
            return [card_report(card, origin) for card in sorted(self.cards.values(), key=lambda card: card.address)]


def _peak(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def card_report(card: Card, origin: float) -> dict[str, Any]:
    """A card's part of the report; `power` is [seconds since the start, watts], thinned out, peaks kept."""
    samples = card.samples
    step = -(-len(samples) // _PLOTTED) or 1
    power = []
    for begin in range(0, len(samples), step):
        group = [sample for sample in samples[begin : begin + step] if sample.power_w is not None]
        if group:
            top = max(group, key=lambda sample: sample.power_w or 0.0)
            power.append([round(top.at - origin, 1), top.power_w])
    reasons = {sample.reasons or 0 for sample in samples}
    return {
        "uuid": card.uuid,
        "address": card.address.lower()[-12:],
        "name": card.name,
        "samples": len(samples),
        "memory_peak_mib": _peak([sample.memory_mib for sample in samples]),
        "memory_total_mib": _peak([sample.total_mib for sample in samples]),
        "power_peak_w": _peak([sample.power_w for sample in samples]),
        "temperature_peak_c": _peak([sample.temperature_c for sample in samples]),
        "power_capped": any(reason & POWER_CAP for reason in reasons),
        "slowed": sorted({word for reason in reasons for bit, word in SLOWED.items() if reason & bit}),
        "power": power,
    }
