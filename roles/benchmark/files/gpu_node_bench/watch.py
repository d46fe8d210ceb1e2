"""Guards around a measurement: nobody else on the engines, no restart, no card slowed down."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpu_node_bench.endpoint import Answer, Endpoint, Limits
from gpu_node_bench.engine_counters import Counters, Moved, counters, moved
from gpu_node_bench.errors import DisturbedError, NoFigureError
from gpu_node_bench.gpus import Sampler
from gpu_node_bench.request import Options, Target, key

T = TypeVar("T")
# An engine counts a request some time after its last token was sent.
_COUNTED_WITHIN_S = 5.0
# The prober notes a proof after it has the answer; by then the engine may have counted it.
_NOTED_WITHIN_S = 2.0
_LOOK_EVERY_S = 0.05


@dataclass
class Own:
    """What was asked for in one measurement."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0

    def add(self, answer: Answer) -> None:
        self.requests += 1
        self.tokens += answer.tokens
        self.prompt_tokens += answer.prompt_tokens

    def with_proofs(self, before: Proofs, now: Proofs) -> Own:
        """This and what the node's prober asked for meanwhile: one token each time."""
        proofs, prompt_tokens = now.count - before.count, now.prompt_tokens - before.prompt_tokens
        return Own(self.requests + proofs, self.tokens + proofs, self.prompt_tokens + prompt_tokens)


@dataclass(frozen=True)
class Proofs:
    """What the prober asked idle engines for, since their units started."""

    count: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Look:
    """The counters of the target's engines and of the node's other ones. None: not looked at."""

    own: Counters | None
    others: Counters | None
    proofs: Proofs = Proofs()
    others_proofs: Proofs = Proofs()

    @property
    def running(self) -> float:
        return sum(one.running for one in (self.own, self.others) if one)

    @property
    def waiting(self) -> float:
        return sum(one.waiting for one in (self.own, self.others) if one)


@dataclass(frozen=True)
class Watched:
    """moved: None when the engines' counters cannot be read. begin, end: monotonic."""

    moved: Moved | None
    begin: float
    end: float


class Watch:
    """Asks one target, and keeps an eye on what else happens there."""

    def __init__(self, target: Target, options: Options, sampler: Sampler) -> None:
        self.target = target
        self.key = key(target.key_file)
        self.endpoint = Endpoint(target.url, self.key, target.model)
        self.notes: list[str] = []
        self.clock_step_s = 0.0
        self._options = options
        self._limits = Limits(options.first_token_s, options.stall_s)
        self._sampler = sampler
        self._sources = [Endpoint(url, None, target.model) for url in target.metrics]
        # They share the processors, the memory and the links of the node.
        self._others = [Endpoint(url, None, target.model) for url in target.neighbours]
        self._own = Own()

    def begin(self) -> None:
        """Find out whether somebody's endpoint has counters that can be read. Without them its figures say so.

        Replicas and a node have them: one that cannot be read at some time leaves a figure without a number.
        """
        if self.target.kind != "endpoint":
            return
        try:
            self.look()
        except NoFigureError as why:
            self._sources = []
            self.note(f"other traffic and speculation cannot be seen: {why}")
        if not self._sources:
            self.note("the engines' counters were not read")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def pages(self) -> list[str]:
        """The engines' metrics as they are."""
        return [source.get("/metrics") for source in self._sources]

    def look(self) -> Look:
        """All the counters now. Raises NoFigureError."""
        # First: a proof that is noted between is in the next look.
        proofs, others_proofs = read_proofs(self.target.proofs), read_proofs(self.target.neighbours_proofs)
        own = counters(self.pages()) if self._sources else None
        others = counters([one.get("/metrics") for one in self._others]) if self._others else None
        return Look(own, others, proofs, others_proofs)

    def ask(self, prompt: str, tokens: int) -> Answer:
        """One streamed answer of that length. Raises NoFigureError."""
        answer = self.endpoint.stream(prompt, tokens, self._limits, self._options.more())
        self._own.add(answer)
        if abs(answer.clock_step_s) > abs(self.clock_step_s):
            self.clock_step_s = answer.clock_step_s
        return answer

    def watched(self, work: Callable[[], T]) -> tuple[T, Watched]:
        """Do a measurement with nobody else there. Raises NoFigureError."""
        return self.repeated(lambda: self.watched_once(work))

    def repeated(self, measure: Callable[[], T]) -> T:
        """Measure. What was disturbed is done again, and that is noted. Raises NoFigureError."""
        for attempt in range(self._options.repeats + 1):
            try:
                return measure()
            except DisturbedError as why:
                if attempt == self._options.repeats:
                    raise NoFigureError(f"{why} ({attempt + 1} attempts)") from None
                self.note(f"a measurement was repeated: {why}")
        raise AssertionError

    def watched_once(self, work: Callable[[], T], own: Callable[[T], Own] | None = None) -> tuple[T, Watched]:
        """Do a measurement that cannot be repeated. Raises NoFigureError; DisturbedError: somebody else was there.

        :param own: what the work asked for, where `ask` did not do it.
        """
        before = self._idle()
        self._own = Own()
        begin = time.monotonic()
        result = work()
        end = time.monotonic()
        difference = self._settled(before, own(result) if own else self._own)
        if self.target.gpus and (unseen := self._sampler.unseen(end, self.target.gpus)):
            raise NoFigureError(unseen)
        # A short one may lie between two looks: the next one is of it too.
        if slowed := self._sampler.slowed(begin, time.monotonic(), self.target.gpus):
            raise NoFigureError(slowed)
        return result, Watched(difference, begin, end)

    def _idle(self) -> Look:
        """The counters once nothing runs there."""
        limit = time.monotonic() + self._options.busy_wait_s
        while (seen := self.look()).running + seen.waiting > 0:
            if time.monotonic() >= limit:
                raise NoFigureError(
                    f"other traffic: {seen.running:g} requests run and {seen.waiting:g} wait since "
                    f"{self._options.busy_wait_s:g} s; drain clients away or measure later"
                )
            time.sleep(min(1.0, self._options.busy_wait_s / 10))
        return seen

    def _settled(self, before: Look, own: Own) -> Moved | None:
        """How far the target's counters went, once they hold all of ours. Raises DisturbedError when they hold more."""
        begin = time.monotonic()
        limit = begin + _COUNTED_WITHIN_S
        noted = begin + (_NOTED_WITHIN_S if self.target.proofs or self.target.neighbours_proofs else 0)
        while True:
            now = self.look()
            found = moved(before.own, now.own) if before.own and now.own else None
            missing = bool(found and (found.requests < own.requests or found.generation_tokens < own.tokens))
            words = self._meanwhile(before, now, found, own)
            if not missing and now.running + now.waiting == 0 and (not words or time.monotonic() >= noted):
                break
            if time.monotonic() >= limit:
                if found and missing:
                    raise NoFigureError(
                        f"the engines counted {found.requests:g} requests and {found.generation_tokens:g} tokens, "
                        f"we had {own.requests} and {own.tokens}: these are not the counters of {self.endpoint.url}"
                    )
                break
            time.sleep(_LOOK_EVERY_S)
        if not words and now.running + now.waiting > 0:
            words = [f"{now.running + now.waiting:g} requests still there"]
        if words:
            raise DisturbedError(f"other traffic meanwhile: {', '.join(words)}")
        return found

    @staticmethod
    def _meanwhile(before: Look, now: Look, found: Moved | None, own: Own) -> list[str]:
        """What others had asked for, in words."""
        words = strangers(found, own.with_proofs(before.proofs, now.proofs)) if found else []
        if before.others and now.others:
            theirs = Own().with_proofs(before.others_proofs, now.others_proofs)
            more = strangers(moved(before.others, now.others), theirs)
            words += [f"{word} of the node's other replicas" for word in more]
        return words


def read_proofs(files: Iterable[str]) -> Proofs:
    """What the prober noted in these files; nothing yet where there is none."""
    count = prompt_tokens = 0
    for file in files:
        try:
            noted = json.loads(Path(file).read_text(encoding="utf-8"))
            count, prompt_tokens = count + int(noted["proofs"]), prompt_tokens + int(noted["proof_tokens"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return Proofs(count, prompt_tokens)


def strangers(found: Moved, own: Own) -> list[str]:
    """What was counted beyond our own requests, in words."""
    more = {
        "requests": found.requests - own.requests,
        "generated tokens": found.generation_tokens - own.tokens,
        # A request that was preempted has its prompt counted again.
        "prompt tokens": 0 if found.preemptions else found.prompt_tokens - own.prompt_tokens,
    }
    return [f"{count:g} {name}" for name, count in more.items() if count > 0]
