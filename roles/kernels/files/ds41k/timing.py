"""Times of device work as a captured decode step sees it: medians over replays of a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def median_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Return the median microseconds of one call.

    One graph holds all ``calls``, which should work on different inputs: together larger than the GPU's cache, so
    that no call finds its input there.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times: list[float] = [start.elapsed_time(end) * 1e3 for start, end in events]
    return statistics.median(times) / len(calls)


def copy_ceiling_gb_s(device: torch.device, size: int = 4 << 30) -> float:
    """Return the GB/s at which the GPU copies ``size`` bytes within its memory, bytes read plus bytes written.

    By a kernel, not by the copy operation: inside a graph that one reached two thirds of it on an H200.
    """
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    took = median_us([lambda: torch.add(source, 1.0, out=target)])
    return 2 * size / took / 1e3
