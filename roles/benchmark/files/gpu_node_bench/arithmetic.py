"""The sums: pure functions from what was observed to a figure, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_node_bench.errors import NoFigureError

# Two requests that differ by less cannot be told apart from noise of the scheduler.
LEAST_DIFFERENCE_S = 0.02


def two_point(tokens_short: int, seconds_short: float, tokens_long: int, seconds_long: float) -> float:
    """Tokens/s between two requests of the same prompt: what comes before the first token cancels.

    Raises NoFigureError when the two points give no speed.
    """
    if tokens_long <= tokens_short:
        raise NoFigureError(f"two points need two lengths: {tokens_short} and {tokens_long} tokens")
    difference = seconds_long - seconds_short
    if not math.isfinite(difference) or difference < LEAST_DIFFERENCE_S:
        raise NoFigureError(
            f"{tokens_long} tokens took {seconds_long:.3f} s and {tokens_short} took {seconds_short:.3f} s: "
            f"a difference below {LEAST_DIFFERENCE_S} s gives no speed; ask for more tokens"
        )
    return (tokens_long - tokens_short) / difference


@dataclass(frozen=True)
class Summary:
    """Several runs of one thing. spread: (largest - smallest) / mean."""

    mean: float
    spread: float


def summary(values: Sequence[float]) -> Summary:
    """Mean and spread. Raises NoFigureError without values, or with one that is no positive number."""
    if not values:
        raise NoFigureError("there is no run")
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise NoFigureError(f"a run gave no positive number: {', '.join(f'{value:g}' for value in values)}")
    mean = sum(values) / len(values)
    return Summary(mean, (max(values) - min(values)) / mean)


def median(values: Sequence[float]) -> float:
    """The middle value. Raises NoFigureError without values."""
    if not values:
        raise NoFigureError("there is no run")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class Drafts:
    """What an engine counted of its drafts over a while. accepted_at: by position in the draft."""

    drafts: float
    draft_tokens: float
    accepted: float
    accepted_at: tuple[float, ...]


@dataclass(frozen=True)
class Acceptance:
    """Shares from 0 to 1. per_draft: accepted tokens for each draft, without the one that the model itself adds."""

    rate: float
    per_draft: float
    drafted_per_draft: float
    at: tuple[float, ...]


def acceptance(seen: Drafts) -> Acceptance:
    """How much of what was drafted was accepted. Raises NoFigureError when the counters give no answer or disagree."""
    if seen.drafts <= 0 or seen.draft_tokens <= 0:
        raise NoFigureError("the engine drafted nothing: speculation is off, or found nothing to propose")
    if min(seen.accepted, *seen.accepted_at, 0.0) < 0 or seen.accepted > seen.draft_tokens:
        raise NoFigureError(
            f"the counters disagree: {seen.accepted:g} of {seen.draft_tokens:g} drafted tokens accepted"
        )
    if seen.accepted_at and abs(sum(seen.accepted_at) - seen.accepted) > 0.5:
        raise NoFigureError(
            f"the counters disagree: {seen.accepted:g} tokens accepted, {sum(seen.accepted_at):g} by position"
        )
    if any(count > seen.drafts for count in seen.accepted_at):
        raise NoFigureError(
            f"the counters disagree: a position was accepted more often than the {seen.drafts:g} drafts"
        )
    return Acceptance(
        rate=seen.accepted / seen.draft_tokens,
        per_draft=seen.accepted / seen.drafts,
        drafted_per_draft=seen.draft_tokens / seen.drafts,
        at=tuple(count / seen.drafts for count in seen.accepted_at),
    )


def scaled_lengths(lengths: Sequence[int], reference_window: int, window: int, room: int) -> list[int]:
    """The prompt lengths for a window: as they are where they fit, else in proportion to the window.

    :param room: tokens that must stay free behind the prompt.
    """
    if window >= reference_window:
        return list(lengths)
    return [max(1, min(length * window // reference_window, window - room)) for length in lengths]


@dataclass(frozen=True)
class Calibration:
    """What a prompt costs, in tokens by the endpoint's own count: `fixed` + a block's + 1 for each filler word."""

    fixed: int
    block: int

    def parts(self, tokens: int) -> tuple[int, int]:
        """Blocks and filler words of a prompt of that many tokens. Raises NoFigureError when they are too few."""
        rest = tokens - self.fixed
        if rest < 0:
            raise NoFigureError(f"a prompt has at least {self.fixed} tokens here, so {tokens} are too few")
        return divmod(rest, self.block)


def calibrate(
    empty: int, one: int, three: int, filled: int, fillers: int, words: int, per_word: tuple[float, float]
) -> Calibration:
    """Find the cost of blocks and fillers from the token counts of four prompts.

    :param empty, one, three: counts with that many blocks; filled: with no block and that many filler words.
    :param words: words in a block; per_word: least and most tokens that a word may have.
    Raises NoFigureError when counts do not add up: then no length can be made exact.
    """
    block = one - empty
    if three - one != 2 * block:
        raise NoFigureError(
            f"tokenizer mismatch: one block of text has {block} tokens and two more have {three - one}, not {2 * block}"
        )
    if filled - empty != fillers:
        raise NoFigureError(f"tokenizer mismatch: {fillers} filler words have {filled - empty} tokens, not one each")
    if not per_word[0] <= block / words <= per_word[1]:
        raise NoFigureError(
            f"tokenizer mismatch: {block / words:.2f} tokens a word in plain English, "
            f"expected {per_word[0]:g} to {per_word[1]:g}: is this the model's own tokenizer?"
        )
    return Calibration(empty, block)
