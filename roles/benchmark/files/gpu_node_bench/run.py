"""A whole run: every target in turn, every figure or the reason why there is none."""

from __future__ import annotations

import datetime
import json
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gpu_node_bench import VERSION, arithmetic, engine_counters, generator, prompts
from gpu_node_bench.arithmetic import Calibration, Drafts
from gpu_node_bench.endpoint import Answer
from gpu_node_bench.errors import BenchError, DisturbedError, NoFigureError
from gpu_node_bench.figures import Figure, figure, guarded, invalid, settle
from gpu_node_bench.gpus import Sampler
from gpu_node_bench.request import Options, Request, Target
from gpu_node_bench.watch import Own, Watch, Watched

SCHEMA = 1
# A wall clock that is being corrected goes faster or slower by this share; more is a step.
_CLOCK_DRIFT = 0.0005
_CLOCK_STEP_S = 0.05
# Of a new prompt, this share may be cached (the template's head); of a repeated one, this share has to be.
_COLD_SHARE = 0.02
_WARM_SHARE = 0.5
_FILLERS = 16
# Of two runs that just differ by the limit, each is off by half of it: so much may come from a pause.
_PAUSE_SHARE = 0.5
# What the first token's request has to leave free.
_ROOM = 1

Say = Callable[[str], None]


class TargetRun:
    """One target."""

    def __init__(self, request: Request, target: Target, sampler: Sampler, folder: Path, say: Say) -> None:
        self.request = request
        self.target = target
        self.figures: list[Figure] = []
        self.speculation: dict[str, Any] = {}
        self.engine: dict[str, Any] = {}
        self.window: int | None = None
        self.phases: list[dict[str, Any]] = []
        self._options: Options = request.options
        self._watch = Watch(target, request.options, sampler)
        self._folder = folder
        self._say = say
        self._drafts: dict[str, Drafts] = {}

    def run(self) -> None:
        """Measure all of its parts. Whatever goes wrong is in the figures."""
        why = ""
        try:
            self.window = self._watch.endpoint.window() or self._options.window or None
        except NoFigureError as error:
            why = str(error)
        if not why:
            self._watch.begin()
            self.engine = self._facts()
        steps = {"decode": self._decode_part, "first": self._first_part, "levels": self._levels_part}
        for part in self.target.parts:
            with self._phase(part):
                steps[part](why)

    def _facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with suppress(NoFigureError, ValueError, KeyError, TypeError):
            found["version"] = str(json.loads(self._watch.endpoint.get("/version"))["version"])
        with suppress(NoFigureError):
            for page in self._watch.pages()[:1]:
                found |= engine_counters.engine_facts(page)
        return found

    @contextmanager
    def _phase(self, part: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.phases.append({"name": f"{self.target.name}: {part}", "begin": begin, "end": time.monotonic()})

    def _figure(self, measure: str, kind: str, **details: Any) -> Figure:
        return figure(self.target.name, measure, kind, self._options, **details)

    def _add(self, made: Figure, why: str, fill: Callable[[Figure], object]) -> Figure:
        """Measure a figure, or say why not, and print it."""
        self.figures.append(invalid(made, why) if why else guarded(made, fill))
        self._say(f"{made['id']}: {in_words(made)}")
        return made

    # decode

    def _decode_part(self, why: str) -> None:
        for workload in self._options.workloads:
            self._add(
                self._figure(f"decode/{workload}", "decode", tokens=self._options.tokens_long),
                why,
                partial(self._decode, workload=workload),
            )
        self._speculation()

    def _decode(self, made: Figure, workload: str) -> None:
        options, prompt = self._options, prompts.WORKLOADS[workload]

        def work() -> list[tuple[Answer, Answer]]:
            self._watch.ask(prompt, options.tokens_short)
            return [
                (self._watch.ask(prompt, options.tokens_short), self._watch.ask(prompt, options.tokens_long))
                for _ in range(options.runs)
            ]

        def once() -> tuple[list[tuple[Answer, Answer]], Watched]:
            pairs, seen = self._watch.watched_once(work)
            for short, long in pairs:
                refuse_pause(short, long, options.spread_limit * _PAUSE_SHARE)
            speeds = [arithmetic.two_point(a.tokens, a.last_s, b.tokens, b.last_s) for a, b in pairs]
            settle(made, speeds, options.spread_limit)
            return pairs, seen

        pairs, seen = self._watch.repeated(once)
        first, last = pairs[0]
        made["details"].update(
            prompt_tokens=last.prompt_tokens,
            tokens=[options.tokens_short, options.tokens_long],
            seconds=[[a.last_s, b.last_s] for a, b in pairs],
            tokens_per_event=options.tokens_long / last.events,
        )
        if any(b.text != last.text for _, b in pairs) or not last.text.startswith(first.text.rstrip("\ufffd")):
            made["notes"].append("the same greedy prompt did not give the same text each time")
        if seen.moved and seen.moved.cached_tokens == 0:
            made["notes"].append(
                "nothing of the prompt came from the prefix cache; both points have the same prefill, so it cancels"
            )
        if seen.moved and seen.moved.preemptions:
            raise NoFigureError(
                f"{seen.moved.preemptions:g} preemptions: the engine's KV cache is too small for a single stream"
            )
        if seen.moved and seen.moved.speculation:
            self._drafts[workload] = seen.moved.speculation

    def _speculation(self) -> None:
        """Acceptance over the decode runs of each workload, and of all three where all three were asked for."""
        if not self._drafts:
            return
        asked = self._options.workloads
        for workload in asked:
            why = "" if workload in self._drafts else f"decode/{workload} has no number"
            self._accepted(f"/{workload}", why, self._drafts.get(workload))
        if set(asked) == set(prompts.WORKLOADS):
            silent = [name for name in asked if name not in self._drafts or not self._drafts[name].drafts]
            why = f"not of all workloads: {' and '.join(silent)} gave no drafts" if silent else ""
            self._accepted("", why, engine_counters.add(list(self._drafts.values())))

    def _accepted(self, suffix: str, why: str, drafts: Drafts | None) -> None:
        def fill(made: Figure) -> None:
            if drafts is None:
                raise NoFigureError(why)
            found = arithmetic.acceptance(drafts)
            made["value"] = found.rate if made["kind"] == "acceptance" else found.per_draft
            made["details"].update(drafts=drafts.drafts, draft_tokens=drafts.draft_tokens, accepted=drafts.accepted)
            self.speculation[suffix.removeprefix("/") or "all"] = asdict(found)

        for kind in ("acceptance", "accepted"):
            self._add(self._figure(kind + suffix, kind), why, fill)

    # time to the first token

    def _first_part(self, why: str) -> None:
        self._add(self._figure("first/short", "first_token"), why, self._short)
        if not self._options.prompt_lengths:
            return
        if not why and self.window is None:
            why = "the endpoint does not say its window (max_model_len): give it as option window"
        lengths = self._options.prompt_lengths
        calibration = None
        if not why:
            lengths = tuple(arithmetic.scaled_lengths(lengths, self._options.reference_window, self.window or 0, _ROOM))
            try:
                calibration, _ = self._watch.watched(self._calibrate)
            except NoFigureError as error:
                why = str(error)
        for length in lengths:
            self._long(length, calibration, why)

    def _short(self, made: Figure) -> None:
        def work() -> list[Answer]:
            # The first one may compile something.
            self._watch.ask(prompts.short(secrets.randbits(48)), 1)
            return [self._watch.ask(prompts.short(secrets.randbits(48)), 1) for _ in range(self._options.short_runs)]

        def once() -> list[Answer]:
            answers, _ = self._watch.watched_once(work)
            settle(made, [answer.first_s for answer in answers], self._options.first_spread_limit, middle=True)
            return answers

        made["details"].update(prompt_tokens=self._watch.repeated(once)[0].prompt_tokens)

    def _calibrate(self) -> Calibration:
        def cost(blocks: int, fillers: int) -> int:
            return self._watch.ask(prompts.text(blocks, fillers, secrets.randbits(48)), 1).prompt_tokens

        return arithmetic.calibrate(
            cost(0, 0), cost(1, 0), cost(3, 0), cost(0, _FILLERS), _FILLERS, prompts.BLOCK_WORDS,
            (self._options.tokens_per_word_least, self._options.tokens_per_word_most),
        )  # fmt: skip

    def _long(self, length: int, calibration: Calibration | None, why: str) -> None:
        """The first token of a cold prompt of that length, its prefill rate, and the same prompt again."""
        cold: list[float] = []
        warm: list[float] = []
        troubles: list[str] = []
        notes: set[str] = set()

        def once(made: Figure, calibration: Calibration) -> None:
            for runs in (cold, warm, troubles):
                runs.clear()
            for _ in range(self._options.long_runs):
                prompt, seconds = self._cold(length, calibration)
                cold.append(seconds)
                try:
                    warm.append(self._warm(length, prompt, notes))
                except NoFigureError as error:
                    troubles.append(str(error))
            settle(made, cold, self._options.spread_limit)

        def measure(made: Figure) -> None:
            if calibration is None:
                raise NoFigureError(why)
            self._watch.repeated(lambda: once(made, calibration))

        def made(name: str, kind: str) -> Figure:
            return self._figure(f"{name}/{length}", kind, prompt_tokens=length)

        first = self._add(made("first", "first_token"), why, measure)
        bad = first["invalid"] or ""
        rates = [length / seconds for seconds in cold]
        # The same runs as the first token's, which are near enough to each other.
        self._add(made("prefill", "prefill"), bad, lambda one: settle(one, rates, math.inf))
        repeat = self._add(
            made("repeat", "cache_repeat"),
            bad or "".join(troubles[:1]),
            lambda one: settle(one, warm, self._options.first_spread_limit),
        )
        repeat["notes"] += sorted(notes)

    def _cold(self, length: int, calibration: Calibration) -> tuple[str, float]:
        """A prompt that nobody asked before, and the seconds to its first token. Raises NoFigureError."""
        blocks, fillers = calibration.parts(length)
        asked: list[str] = []

        def once() -> Answer:
            # Another attempt must not find the prompt of the one before in the cache.
            asked.append(prompts.text(blocks, fillers, secrets.randbits(48)))
            return self._watch.ask(asked[-1], 1)

        answer, seen = self._watch.watched(once)
        if answer.prompt_tokens != length:
            raise NoFigureError(
                f"tokenizer mismatch: by the calibration the prompt has {length} tokens, "
                f"the endpoint counted {answer.prompt_tokens}"
            )
        if cached(answer, seen) > _COLD_SHARE * length + calibration.fixed:
            raise NoFigureError(
                f"the prefix cache held {cached(answer, seen):g} of the {length} tokens: this is no cold prompt"
            )
        return asked[-1], answer.first_s

    def _warm(self, length: int, prompt: str, notes: set[str]) -> float:
        """The seconds that the same prompt takes again. Raises NoFigureError."""
        answer, seen = self._watch.watched(lambda: self._watch.ask(prompt, 1))
        if not knows_cache(answer, seen):
            notes.add("whether the prefix cache was hit cannot be seen")
        elif cached(answer, seen) < _WARM_SHARE * length:
            raise NoFigureError(
                f"the repeat found {cached(answer, seen):g} of {length} tokens in the prefix cache: no cache repeat"
            )
        return answer.last_s

    # load

    def _levels_part(self, why: str) -> None:
        options = self._options
        levels = tuple(streams * self.target.replicas for streams in self._levels())
        if not levels:
            return
        # A node's figures are of all of its replicas together: other ones than a replica's.
        word = "total" if self.target.kind == "balancer" else "load"
        made = {
            streams: self._figure(f"{word}/{options.level_workload}/{streams}", "load", streams=streams)
            for streams in levels
        }
        if not why and self.request.generator is None:
            why = "no load generator: the request names no serving image"
        if why or self.request.generator is None:
            for one in made.values():
                self._add(one, why, lambda _: None)
            return
        load = generator.Load(
            levels, options.level_tokens, options.level_requests, options.level_workload, options.ignore_eos,
            {"chat_template_kwargs": {"thinking": False}} if options.thinking_off else {},
            options.generator_start_s, options.level_limit_s,
        )  # fmt: skip
        try:
            with generator.start(
                load, self._watch.endpoint.url, self.target.model, self._watch.key, self.request.generator,
                self._folder / "load" / self.target.name.replace(" ", "-"),
            ) as running:  # fmt: skip
                for number, one in enumerate(made.values()):
                    if not why:
                        try:
                            running.begin(number)
                        except NoFigureError as error:
                            why = str(error)
                    self._add(one, why, partial(self._level, running=running, number=number))
        except NoFigureError as error:
            for one in list(made.values())[sum(one in self.figures for one in made.values()) :]:
                self._add(one, str(error), lambda _: None)

    def _levels(self) -> list[int]:
        """The numbers of streams for each engine that it can have at once."""
        most = self.target.max_num_seqs
        fitting = [streams for streams in self._options.levels if streams <= most or not most]
        if left := [streams for streams in self._options.levels if streams not in fitting]:
            note = (
                f"not measured with {' and '.join(map(str, left))} streams a replica: "
                f"it decodes {most} at once (max_num_seqs), the others would wait"
            )
            self._watch.note(note)
            self._say(f"{self.target.name}: {note}")
        return fitting

    def _level(self, made: Figure, running: generator.Running, number: int) -> None:
        """A level cannot be repeated: the container goes on to the next one."""
        level, seen = self._watch.watched_once(
            lambda: running.level(number),
            lambda found: Own(found.own_requests, found.own_tokens, found.own_prompt_tokens),
        )
        made["value"] = level.tokens_per_s
        made["details"].update(
            each_tokens_per_s=1 / level.between_p50_s if level.between_p50_s else None,
            first_p50_s=level.first_p50_s,
            first_p99_s=level.first_p99_s,
            seconds=level.seconds,
            requests=self._options.level_requests * level.streams,
        )
        if seen.moved and seen.moved.preemptions:
            made["notes"].append(
                f"{seen.moved.preemptions:g} requests were preempted: the KV cache is full at this level"
            )

    def report(self) -> dict[str, Any]:
        """The target's part of the report, without its figures."""
        return {
            "name": self.target.name,
            "kind": self.target.kind,
            "url": self.target.url,
            "model": self.target.model,
            "release": self.target.release,
            "gpus": list(self.target.gpus),
            "window": self.window,
            "engine": self.engine,
            "speculation": self.speculation,
            "notes": self._watch.notes,
        }

    @property
    def clock_step_s(self) -> float:
        """The largest step of the wall clock during a request."""
        return self._watch.clock_step_s


def refuse_pause(short: Answer, long: Answer, share: float) -> None:
    """Refuse two points whose difference holds a pause of more than that share of it. Raises DisturbedError.

    What comes before the first token cancels where it takes as long in both.
    """
    between = max(short.gap_longest_s, long.gap_longest_s) - long.gap_median_s
    before = abs(long.first_s - short.first_s)
    difference = long.last_s - short.last_s
    if max(between, before) > share * max(arithmetic.LEAST_DIFFERENCE_S, difference):
        where = "before a first token" if before > between else "between two tokens"
        raise DisturbedError(
            f"a pause of {max(between, before):.3g} s {where}: too long for a speed out of a difference of "
            f"{difference:.3g} s"
        )


def knows_cache(answer: Answer, seen: Watched) -> bool:
    """Whether the endpoint says what came from its prefix cache."""
    return answer.cached_tokens is not None or bool(seen.moved and seen.moved.cached_tokens is not None)


def cached(answer: Answer, seen: Watched) -> float:
    """Tokens of the prompt that came from the prefix cache; 0 when the endpoint does not say."""
    counted = seen.moved.cached_tokens if seen.moved and seen.moved.cached_tokens is not None else 0.0
    return max(counted, float(answer.cached_tokens or 0))


def in_words(made: Figure) -> str:
    """A figure as a line of the job's output."""
    if made["invalid"]:
        return f"invalid: {made['invalid']}"
    value = f"{made['value']:.1%}" if made["unit"] == "share" else f"{made['value']:.4g} {made['unit']}"
    spread = f" (spread {made['spread']:.1%})" if made["spread"] is not None else ""
    return value + spread


def run(request: Request, folder: Path, say: Say) -> dict[str, Any]:
    """Measure; return the report. Raises BenchError when nothing can be measured at all."""
    origin, wall = time.monotonic(), time.time()
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    uuids = [uuid for target in request.targets for uuid in target.gpus]
    runs = []
    with Sampler(request.options.sample_interval_ms, uuids) as sampler:
        if sampler.why:
            say(f"no figures of cards: {sampler.why}")
        # Keys and URLs are read before the first request, so that nothing fails in the middle.
        runs = [TargetRun(request, target, sampler, folder, say) for target in request.targets]
        for number, one in enumerate(runs, 1):
            say(f"{one.target.name} ({number} of {len(runs)}): {one.target.url}")
            one.run()
    cards = sampler.report(origin)
    figures = [made for one in runs for made in one.figures] + memory_figures(cards, request.options, sampler.why)
    step = (time.time() - wall) - (time.monotonic() - origin)
    largest = max([step, *(one.clock_step_s for one in runs)], key=abs)
    return {
        "schema": SCHEMA,
        "program": VERSION,
        "created": created,
        "name": request.name,
        "profile": request.profile,
        "release": request.release,
        "seconds": round(time.monotonic() - origin, 1),
        "clock": clock(largest, time.monotonic() - origin),
        "method": {**asdict(request.options), "generator": asdict(request.generator) if request.generator else None},
        "targets": [one.report() for one in runs],
        "figures": figures,
        "cards": cards,
        "cards_note": sampler.why,
        "phases": [
            {**phase, "begin": round(phase["begin"] - origin, 1), "end": round(phase["end"] - origin, 1)}
            for one in runs
            for phase in one.phases
        ],
        "node": request.node,
        "summary": {"figures": len(figures), "invalid": sum(bool(made["invalid"]) for made in figures)},
    }


def clock(step_s: float, seconds: float) -> dict[str, Any]:
    """What the wall clock did in that many seconds. No figure depends on it."""
    moved = abs(step_s) > _CLOCK_STEP_S + _CLOCK_DRIFT * seconds
    note = f"the wall clock was moved by {step_s:+.2f} s during the run; the figures are by the monotonic clock"
    return {"step_s": round(step_s, 4), "note": note if moved else ""}


def memory_figures(cards: list[dict[str, Any]], options: Options, why: str) -> list[Figure]:
    """The peak of each card's memory; `why` nobody looked any more, if so."""
    made = []
    for card in cards:
        one = figure("cards", f"memory/{card['address']}", "memory", options, total_mib=card["memory_total_mib"])
        if why:
            invalid(one, f"not seen to the end: {why}")
        elif card["memory_peak_mib"] is None:
            invalid(one, "nvidia-smi does not say how much of the card's memory is used")
        else:
            one["value"] = card["memory_peak_mib"]
        made.append(one)
    return made


def write(report: dict[str, Any], path: Path) -> None:
    """Write the report, whole or not at all. Raises BenchError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
