"""What others had of an engine while a check ran: how far its counters went, less our own part."""

from __future__ import annotations

import time

from gpu_node_accept.server import Metrics, Server

_RUNNING = "vllm:num_requests_running"
_GENERATED = "vllm:generation_tokens"
# An engine counts a step a moment after it sent the step's tokens.
_LOOKS, _BETWEEN_S = 10, 0.1


def settled(server: Server) -> Metrics:
    """The metrics once nothing runs, so that they hold all of ours; as they are when something still does after 1 s."""
    for _ in range(_LOOKS):
        metrics = server.metrics()
        if not metrics.value(_RUNNING):
            break
        time.sleep(_BETWEEN_S)
    return metrics


def moved(before: Metrics, after: Metrics, name: str) -> float | None:
    """By how much a counter went up; None when there is no such counter."""
    start, end = before.value(name), after.value(name)
    return None if end is None else end - (start or 0.0)


def others(before: Metrics, after: Metrics, own_tokens: int) -> str:
    """What somebody else had meanwhile, in words; empty when nobody had anything.

    Ended requests are no sign of it: one long answer may begin before a check and end after it.

    :param own_tokens: what the check itself had generated.
    """
    running = max(before.value(_RUNNING) or 0.0, after.value(_RUNNING) or 0.0)
    tokens = (moved(before, after, _GENERATED) or 0.0) - own_tokens
    said = [f"{running:.0f} requests of others ran"] if running > 0 else []
    said += [f"{tokens:,.0f} tokens were generated for others"] if tokens > 0 else []
    return " and ".join(said)
