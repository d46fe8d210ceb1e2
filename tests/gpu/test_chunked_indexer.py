"""The decode step in chunks against vLLM's own single call: its real code and DeepGEMM's real kernel, on one GPU.

DS41K_VLLM=DIR pytest tests/gpu/test_chunked_indexer.py     # DIR holds vllm/, the unpacked wheel of 0.33.0
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no torch in this Python")

import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

# vLLM's unpacked wheel (it holds vllm/).
VLLM = os.environ.get("DS41K_VLLM", "")
if not VLLM:
    pytest.skip("DS41K_VLLM names no unpacked vLLM wheel", allow_module_level=True)

import vllm_standin as standin  # noqa: E402
from ds41k import library, reference  # noqa: E402
from ds41k.plugin import Switches  # noqa: E402

DEVICE = torch.device("cuda", 0)
K = 512
BLOCKS = 2048


class Recorder:
    """Keeps the logits of each call of DeepGEMM."""

    def __init__(self, real: Callable[..., torch.Tensor]) -> None:
        self.real = real
        self.calls: list[torch.Tensor] = []
        self.on = False

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits = self.real(*args, **kwargs)
        if self.on:
            self.calls.append(logits.clone())
        return logits


class Bench:
    """vLLM's module, ours, and one cache of keys."""

    def __init__(self) -> None:
        self.upstream = standin.install(Path(VLLM))
        self.stock_class = self.upstream.SparseAttnIndexer
        self.recorder = Recorder(self.upstream.fp8_fp4_paged_mqa_logits)
        self.upstream.fp8_fp4_paged_mqa_logits = self.recorder
        from ds41k import indexer

        self.ours = indexer
        indexer.register(Switches())
        library.load()
        self.cache = standin.make_cache(1024, torch.Generator(device=DEVICE).manual_seed(1))

    def step(self, sequences: int, each: int, window: int, seed: int, write: bool, candidates: bool = True) -> Any:
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        last = torch.randint(each, window + 1, (sequences, 1), generator=generator, device=DEVICE)
        # Padding of a captured batch has no keys, and stands at the end. Elsewhere vLLM has none of it, and must not:
        # after a sequence without keys DeepGEMM's kernel for SM90 scores the next one's first tiles with another's
        # query.
        last[sequences - int(torch.randint(0, 4, (1,), generator=generator, device=DEVICE)) :] = 0
        lens = (last - each + 1 + torch.arange(each, device=DEVICE)).clamp(min=0).to(torch.int32)
        blocks = None
        if candidates:
            blocks = torch.full((sequences * each, BLOCKS), -77, dtype=torch.int32, device=DEVICE)
            if not write:
                scores = torch.randn((sequences * each, window), generator=generator, device=DEVICE)
                blocks.copy_(reference.cand_blocks(scores, lens.flatten(), BLOCKS))
        step = standin.make_step(self.cache, sequences, each, window, lens, K, blocks, seed)
        step.layer = standin.make_layer(self.upstream, step, window, K, write)
        return step

    def run(self, step: Any, switches: Switches, record: bool = False) -> list[torch.Tensor]:
        """Return top-k, candidate blocks and, when recorded, the logits; the outputs are poisoned before."""
        self.ours._switches = switches
        kept = None if step.blocks is None or not step.layer.candidate_write else step.blocks.fill_(-77)
        step.topk.fill_(-77)
        self.recorder.calls, self.recorder.on = [], record
        step.run()
        outputs = [step.topk.clone()] + ([kept.clone()] if kept is not None else [])
        return [*outputs, *([torch.cat(self.recorder.calls)] if record else [])]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    yield Bench()


def chunked(megabytes: int, kernels: bool = False) -> Switches:
    return Switches(chunk=True, chunk_bytes=megabytes << 20, rowtopk=kernels, cand=kernels)


def test_the_layer_that_the_model_makes_is_ours(bench: Bench) -> None:
    step = bench.step(2, 1, 4096, 0, True)
    assert type(step.layer) is bench.ours.ChunkedSparseAttnIndexer
    assert isinstance(step.layer, bench.stock_class)


def values_at(logits: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
    """The chosen values, sorted: what is left of a selection when ties are free and order is."""
    picked = logits.gather(1, topk.clamp(min=0).long()).masked_fill(topk < 0, float("-inf"))
    return picked.sort(dim=1).values


def test_1200_chunked_calls_give_what_the_single_call_gives(bench: Bench) -> None:
    draw = random.Random(7)
    several = 0
    for seed in range(1200):
        each = draw.choice([1, 1, 2])
        sequences, window = draw.randint(1, 160), draw.choice([2048, 4096, 9984, 20480])
        write = draw.random() < 0.5
        step = bench.step(sequences, each, window, seed, write, candidates=draw.random() < 0.8)
        single = bench.run(step, Switches(), record=True)
        switches = Switches(chunk=True, chunk_bytes=draw.randint(4 * window, 4 * window * max(2, sequences * each)))
        parts = bench.run(step, switches, record=True)
        several += len(bench.recorder.calls) > 1
        inside = torch.arange(window, device=DEVICE) < step.lens.reshape(-1, 1)
        logits, logits_of_parts = (
            torch.where(inside, found[-1][:, :window], torch.zeros((), device=DEVICE)) for found in (single, parts)
        )
        assert torch.equal(logits.view(torch.int32), logits_of_parts.view(torch.int32)), f"logits differ, draw {seed}"
        free = logits.masked_fill(~inside, float("-inf"))
        assert torch.equal(values_at(free, single[0]), values_at(free, parts[0])), f"selection differs, draw {seed}"
        if len(single) == 3:
            same = single[1].sort(dim=1).values == parts[1].sort(dim=1).values
            assert same.all(), f"candidate blocks differ, draw {seed}"
        # With our kernels nothing is free: the very indices, whatever the chunks.
        ours = bench.run(step, Switches(rowtopk=True, cand=True))
        ours_in_parts = bench.run(step, Switches(True, switches.chunk_bytes, True, True))
        for whole, part in zip(ours, ours_in_parts, strict=True):
            assert torch.equal(whole, part), f"our kernels differ in chunks, draw {seed}"
        if step.blocks is None or write:
            assert torch.equal(ours[0], reference.rowtopk(logits, step.lens.flatten(), K)), f"draw {seed}"
        else:
            wanted = reference.cand_topk(logits, step.lens.flatten(), step.blocks, K)
            assert torch.equal(ours[0], wanted), f"draw {seed}"
        if write and step.blocks is not None:
            assert torch.equal(ours[1], reference.cand_blocks(logits, step.lens.flatten(), BLOCKS)), f"draw {seed}"
    assert several > 900, "too few draws had more than one chunk"


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_captured_chunks_follow_lengths_and_queries_changed_in_place(bench: Bench, write: bool, kernels: bool) -> None:
    window, sequences = 9984, 130
    step = bench.step(sequences, 1, window, 3, write)
    switches = Switches(True, 16 * 4 * window, kernels, kernels)
    bench.run(step, switches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for seed in range(50):
        other = bench.step(sequences, 1, window, 100 + seed, write)
        for name in ("query", "weights", "lens") + (() if write else ("blocks",)):
            getattr(step, name).copy_(getattr(other, name))
        step.metadata.decode.block_table.copy_(other.metadata.decode.block_table)
        step.topk.fill_(-77)
        graph.replay()
        captured = step.topk.clone()
        # Row by row the lengths have changed; vLLM's schedule metadata is the builder's to renew, ours is in the
        # graph.
        eager = bench.run(step, switches)[0]
        if kernels:
            assert torch.equal(captured, eager), f"replay {seed}"
        else:
            assert torch.equal(captured.sort(dim=1).values, eager.sort(dim=1).values), f"replay {seed}"


def test_memory_stays_within_the_budget(bench: Bench) -> None:
    window = 1 << 18
    step = bench.step(256, 1, window, 5, True)
    peaks = {}
    for name, switches in {"single": Switches(), "chunked": chunked(64, True)}.items():
        bench.run(step, switches)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step.run()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    assert peaks["single"] >= 256 << 20
    assert peaks["chunked"] <= (64 << 20) + (2 << 20), f"{peaks}"


def test_one_range_and_no_kernels_is_vllms_own_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    step = bench.step(8, 1, 4096, 9, True)
    called: list[str] = []
    monkeypatch.setattr(bench.ours, "_upstream_indexer", lambda *args, **kwargs: called.append("upstream"))
    monkeypatch.setattr(bench.ours, "run_decode", lambda *args: called.append("ours"))
    bench.run(step, chunked(256))
    assert called == ["upstream"]
