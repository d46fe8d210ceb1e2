"""Reading what an engine publishes in Prometheus' text format, and differences of two such texts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from gpu_node_bench.arithmetic import Drafts
from gpu_node_bench.errors import NoFigureError

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*", re.ASCII)
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)


@dataclass(frozen=True)
class Counters:
    """What the engines behind an endpoint have counted so far, summed. None: not published."""

    running: float
    waiting: float
    requests: float
    prompt_tokens: float
    generation_tokens: float
    cached_tokens: float | None
    preemptions: float
    drafts: float | None
    draft_tokens: float
    accepted: float
    accepted_at: tuple[float, ...]
    # When the engines were started: another value means counters that began anew.
    started: tuple[float, ...]


@dataclass
class _Sums:
    plain: dict[str, float] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each line that has a number."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#") and (match := _SAMPLE.fullmatch(line)):
            try:
                value = float(match[3])
            except ValueError:
                continue
            found.append((match[1], dict(_LABEL.findall(match[2] or "")), value))
    return found


def counters(texts: list[str]) -> Counters:
    """Add up the texts of one or several engines. Raises NoFigureError when one of them is no engine's."""
    sums = _Sums()
    started = []
    for text in texts:
        names = set()
        for name, labels, value in samples(text):
            if name == "process_start_time_seconds":
                started.append(value)
            if not name.startswith("vllm:") or not math.isfinite(value):
                continue
            names.add(name)
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total" and labels.get("position", "").isdecimal():
                position = int(labels["position"])
                sums.at[position] = sums.at.get(position, 0.0) + value
            else:
                sums.plain[name] = sums.plain.get(name, 0.0) + value
        for name in ("num_requests_running", "request_success_total", "generation_tokens_total", "prompt_tokens_total"):
            if f"vllm:{name}" not in names:
                raise NoFigureError(f"/metrics has no vllm:{name}: is this server a vLLM?")

    def get(name: str) -> float:
        return sums.plain.get(f"vllm:{name}", 0.0)

    return Counters(
        running=get("num_requests_running"),
        waiting=get("num_requests_waiting"),
        requests=get("request_success_total"),
        prompt_tokens=get("prompt_tokens_total"),
        generation_tokens=get("generation_tokens_total"),
        # The first one has the hits in memory beside the GPU too.
        cached_tokens=sums.plain.get("vllm:prompt_tokens_cached_total", sums.plain.get("vllm:prefix_cache_hits_total")),
        preemptions=get("num_preemptions_total"),
        drafts=sums.plain.get("vllm:spec_decode_num_drafts_total"),
        draft_tokens=get("spec_decode_num_draft_tokens_total"),
        accepted=get("spec_decode_num_accepted_tokens_total"),
        accepted_at=tuple(sums.at.get(position, 0.0) for position in range(max(sums.at, default=-1) + 1)),
        started=tuple(started),
    )


def engine_facts(text: str) -> dict[str, str]:
    """What an engine says of its cache: the labels of vllm:cache_config_info."""
    for name, labels, _ in samples(text):
        if name == "vllm:cache_config_info":
            wanted = ("cache_dtype", "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching")
            return {key: labels[key] for key in wanted if labels.get(key) not in (None, "None")}
    return {}


@dataclass(frozen=True)
class Moved:
    """How far the counters went between two looks."""

    requests: float
    prompt_tokens: float
    generation_tokens: float
    cached_tokens: float | None
    preemptions: float
    speculation: Drafts | None


def moved(before: Counters, after: Counters) -> Moved:
    """The difference. Raises NoFigureError when an engine began anew between the two."""
    steps = (
        after.requests - before.requests,
        after.prompt_tokens - before.prompt_tokens,
        after.generation_tokens - before.generation_tokens,
        after.draft_tokens - before.draft_tokens,
        after.accepted - before.accepted,
    )
    if before.started != after.started or min(steps) < 0:
        raise NoFigureError("an engine was restarted during the measurement: its counters began anew")
    speculation = None
    if after.drafts is not None:
        old = before.accepted_at + (0.0,) * (len(after.accepted_at) - len(before.accepted_at))
        speculation = Drafts(
            after.drafts - (before.drafts or 0.0),
            steps[3],
            steps[4],
            tuple(new - was for new, was in zip(after.accepted_at, old, strict=True)),
        )
    cached = None
    if after.cached_tokens is not None:
        cached = after.cached_tokens - (before.cached_tokens or 0.0)
    return Moved(steps[0], steps[1], steps[2], cached, after.preemptions - before.preemptions, speculation)


def add(parts: list[Drafts]) -> Drafts:
    """Several whiles as one."""
    width = max((len(part.accepted_at) for part in parts), default=0)
    return Drafts(
        sum(part.drafts for part in parts),
        sum(part.draft_tokens for part in parts),
        sum(part.accepted for part in parts),
        tuple(sum(part.accepted_at[at] for part in parts if at < len(part.accepted_at)) for at in range(width)),
    )
