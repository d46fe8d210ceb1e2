"""What a streamed generation has to be like before a replica is in: pure decisions."""

from collections.abc import Callable

from gpu_node.engine import Generation
from gpu_node.errors import GateError

TRIES = 3
# From here on no engine's speculation brings all of the tokens in one event.
ONE_EVENT_TOKENS = 32


def check(generation: Generation, tokens: int) -> None:
    """Raise GateError unless the tokens that were asked for came, one after the other, with a text."""
    if generation.completion_tokens < 1 or not generation.arrivals:
        raise GateError("the engine is healthy and generates nothing: it answered without a token")
    if generation.completion_tokens != tokens:
        raise GateError(
            f"the engine generated {generation.completion_tokens} tokens where {tokens} were asked for (ignore_eos)"
        )
    if not generation.text.strip():
        raise GateError(
            f"the engine is healthy and generates nothing: its {tokens} tokens are an empty text;"
            " damaged weights do that"
        )
    if tokens >= ONE_EVENT_TOKENS and len(generation.arrivals) < 2:
        raise GateError(f"no progress of tokens: all {tokens} came in one event at the stream's end")


def fast_enough(after: float, before: float, factor: float) -> bool:
    return after >= before * factor


def measure(generate: Callable[[], Generation], tokens: int, before: float | None, factor: float) -> float:
    """The speed of a release that may serve, in tokens/s, the best of a few tries. Raises GateError, EngineError.

    before: the speed of the release before; None: not compared.
    """
    best = 0.0
    for _ in range(TRIES):
        generation = generate()
        check(generation, tokens)
        best = max(best, generation.tokens_per_s)
        if before is None or fast_enough(best, before, factor):
            return best
    raise GateError(
        f"the new release generates {best:.1f} tokens/s, the one before {before:.1f}: less than"
        f" {factor:g} of it (gate_speed_factor); find out why, or set gate_speed_factor lower (0: not looked at)"
    )
