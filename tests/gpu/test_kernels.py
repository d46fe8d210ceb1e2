"""The indexer kernels against their references, bit for bit.

pytest tests/gpu/test_kernels.py        # needs a GPU, a CUDA torch, and the built library (DS41K_LIBRARY_DIR)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no torch in this Python")

import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU here", allow_module_level=True)

from ds41k import cases, library, reference
from ds41k.qualify import BLOCKS, POISON, poisoned

DEVICE = torch.device("cuda", 0)
ALL = list(cases.cases(DEVICE)) if os.environ.get("DS41K_SANITIZED") is None else []


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    library.load()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    wrong = (got != wanted).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, (
        f"rows {wrong[:10]} differ, the first: {got[wrong[0]].tolist()[:20]}, {wanted[wrong[0]].tolist()[:20]}"
    )


@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_rowtopk(case: cases.Case, k: int) -> None:
    out = poisoned(case.logits.shape[0], k, DEVICE)
    library.rowtopk(case.logits, case.lens, out, k)
    same(out, reference.rowtopk(case.logits, case.lens, k))


@pytest.mark.parametrize("count", [1, 64, 2047, 2048])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_cand_blocks(case: cases.Case, count: int) -> None:
    out = poisoned(case.logits.shape[0], count, DEVICE)
    library.cand_blocks(case.logits, case.lens, out)
    same(out, reference.cand_blocks(case.logits, case.lens, count))


@pytest.mark.parametrize("k", [512, 1024, 2048])
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_cand_topk(case: cases.Case, k: int) -> None:
    blocks = reference.cand_blocks(case.logits, case.lens, BLOCKS)
    # Scores of another layer than the blocks come from, as it is in the model.
    logits = case.logits.flip(0).contiguous()
    out = poisoned(case.logits.shape[0], k, DEVICE)
    library.cand_topk(logits, case.lens, blocks, out, k)
    same(out, reference.cand_topk(logits, case.lens, blocks, k))


@pytest.mark.parametrize("width", [1, 5, 512, 513, 2048])
def test_cand_topk_takes_any_number_of_blocks_and_passes_over_what_is_none(width: int) -> None:
    logits = torch.randn((40, 30_000), generator=generator(), device=DEVICE)
    lens = cases.lengths_for(40, 30_000, generator())
    blocks = torch.randint(0, 3750, (40, width), generator=generator(), device=DEVICE).sort(dim=1).values
    # Unique, as the contract wants, with gaps of -1, and ids past every row.
    blocks[:, 1:][blocks[:, 1:] == blocks[:, :-1]] = -1
    blocks[::3, -1] = 2**31 - 1
    blocks[1::3, -1] = 3_750
    blocks = blocks.to(torch.int32)
    out = poisoned(40, 512, DEVICE)
    library.cand_topk(logits, lens, blocks, out, 512)
    same(out, reference.cand_topk(logits, lens, blocks, 512))


def test_cand_topk_survives_ids_that_repeat_and_do_not_ascend() -> None:
    logits = torch.randn((64, 100_000), generator=generator(), device=DEVICE)
    lens = torch.full((64,), 100_000, dtype=torch.int32, device=DEVICE)
    blocks = torch.randint(-5, 14_000, (64, BLOCKS), generator=generator(), device=DEVICE).to(torch.int32)
    out = poisoned(64, 512, DEVICE)
    library.cand_topk(logits, lens, blocks, out, 512)
    torch.cuda.synchronize()
    inside = (out[:, :, None] // 8 == blocks[:, None, :]).any(dim=2)
    assert inside.all() and (out < 100_000).all()


@pytest.mark.parametrize("rows", [0, 1, 2, 33, 34, 131, 133, 264, 265, 1024, 8192])
def test_any_number_of_rows(rows: int) -> None:
    logits = torch.randn((rows, 9_001), generator=generator(), device=DEVICE)
    lens = torch.randint(0, 9_002, (rows,), generator=generator(), device=DEVICE).to(torch.int32)
    out, blocks = poisoned(rows, 512, DEVICE), poisoned(rows, 256, DEVICE)
    library.rowtopk(logits, lens, out, 512)
    same(out, reference.rowtopk(logits, lens, 512)) if rows else None
    library.cand_blocks(logits, lens, blocks)
    same(blocks, reference.cand_blocks(logits, lens, 256)) if rows else None
    library.cand_topk(logits, lens, blocks, out, 512)
    same(out, reference.cand_topk(logits, lens, blocks, 512)) if rows else None


@pytest.mark.parametrize(("extra", "offset"), [(0, 0), (4, 0), (4, 4), (1, 0), (4, 1), (3, 2)])
@pytest.mark.parametrize("rows", [3, 40, 300])
def test_strides_and_bases_aligned_and_not(rows: int, extra: int, offset: int) -> None:
    logits = cases.with_row_stride(torch.randn((rows, 40_000), generator=generator(), device=DEVICE), extra, offset)
    lens = cases.lengths_for(rows, 40_000, generator())
    wide = poisoned(rows, 700, DEVICE)
    out = wide[:, 5:517]
    library.rowtopk(logits, lens[:, None], out, 512)
    same(out, reference.rowtopk(logits, lens, 512))
    blocks = poisoned(rows, 2100, DEVICE)[:, 3:2051]
    library.cand_blocks(logits, lens, blocks)
    same(blocks, reference.cand_blocks(logits, lens, BLOCKS))
    library.cand_topk(logits, lens, blocks, out, 512)
    same(out, reference.cand_topk(logits, lens, blocks, 512))
    assert (wide[:, :5] == POISON).all() and (wide[:, 517:] == POISON).all(), "written beside out"


def test_fifty_repeats_are_identical_and_rows_do_not_see_each_other() -> None:
    logits = cases.fill("few_levels", 200, 70_000, generator())
    lens = cases.lengths_for(200, 70_000, generator())
    first: list[torch.Tensor] = []
    for repeat in range(50):
        results = []
        for rows in (slice(0, 200), slice(0, 200)) if repeat else (slice(0, 200), slice(17, 18)):
            out, blocks = poisoned(200, 512, DEVICE)[rows], poisoned(200, BLOCKS, DEVICE)[rows]
            library.rowtopk(logits[rows], lens[rows], out, 512)
            library.cand_blocks(logits[rows], lens[rows], blocks)
            picked = torch.empty_like(out)
            library.cand_topk(logits[rows], lens[rows], blocks, picked, 512)
            results.append((out, blocks, picked))
        first = first or list(results[0])
        for got, wanted in zip(results[0], first, strict=True):
            same(got, wanted)
        for got, wanted in zip(results[1], first, strict=True):
            same(got, wanted[17:18] if got.shape[0] == 1 else wanted)


def test_graph_replays_follow_lengths_and_values_changed_in_place() -> None:
    rows, width = 160, 50_000
    logits = torch.randn((rows, width), generator=generator(), device=DEVICE)
    lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    out, blocks, picked = (poisoned(rows, n, DEVICE) for n in (512, BLOCKS, 512))

    def step() -> None:
        library.rowtopk(logits, lens, out, 512)
        library.cand_blocks(logits, lens, blocks)
        library.cand_topk(logits, lens, blocks, picked, 512)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(20):
        lens.copy_(cases.lengths_for(rows, width, generator(seed))[torch.randperm(rows, device=DEVICE)])
        logits.copy_(cases.fill(cases.DISTRIBUTIONS[seed % len(cases.DISTRIBUTIONS)], rows, width, generator(seed)))
        for tensor in (out, blocks, picked):
            tensor.fill_(POISON)
        graph.replay()
        same(out, reference.rowtopk(logits, lens, 512))
        same(blocks, reference.cand_blocks(logits, lens, BLOCKS))
        same(picked, reference.cand_topk(logits, lens, blocks, 512))


def test_the_current_stream_is_used() -> None:
    logits = torch.zeros((64, 400_000), device=DEVICE)
    values = torch.randn((64, 400_000), generator=generator(), device=DEVICE)
    lens = torch.full((64,), 400_000, dtype=torch.int32, device=DEVICE)
    out = poisoned(64, 512, DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        logits.copy_(values)
        library.rowtopk(logits, lens, out, 512)
        torch.cuda.current_stream().synchronize()
    same(out, reference.rowtopk(values, lens, 512))


FLOATS = torch.zeros((4, 1024), device=DEVICE)
LENS = torch.zeros(4, dtype=torch.int32, device=DEVICE)
OUT = torch.zeros((4, 512), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: library.rowtopk(FLOATS.half(), LENS, OUT, 512), "rowtopk: logits must be float32"),
        (lambda: library.rowtopk(FLOATS[0], LENS, OUT, 512), r"logits must be float32 \[rows, width\].*\[1024\]"),
        (lambda: library.rowtopk(FLOATS.T.contiguous().T, LENS, OUT, 512), r"stride\(1\) is 4"),
        (lambda: library.rowtopk(FLOATS[:1].expand(4, -1), LENS, OUT, 512), "rows of logits overlap"),
        (lambda: library.rowtopk(FLOATS, LENS.long(), OUT, 512), r"lens must be int32 \[4\]"),
        (lambda: library.rowtopk(FLOATS, LENS[:3], OUT, 512), r"lens must be int32 \[4\].*\[3\]"),
        (lambda: library.rowtopk(FLOATS, LENS.cpu(), OUT, 512), "lens must be on the same GPU as logits"),
        (lambda: library.rowtopk(FLOATS, LENS, OUT, 513), "k must be 512, 1024 or 2048, not 513"),
        (lambda: library.rowtopk(FLOATS, LENS, OUT, 1024), "out must have k = 1024 columns, not 512"),
        (lambda: library.rowtopk(FLOATS, LENS, OUT.long(), 512), "out must be int32"),
        (
            lambda: library.rowtopk(torch.zeros((8193, 8), device=DEVICE), LENS, OUT, 512),
            "8193 rows, the limit is 8192",
        ),
        (lambda: library.cand_blocks(FLOATS, LENS, OUT, 16), "cand_blocks: block_size must be 8, not 16"),
        (
            lambda: library.cand_blocks(FLOATS, LENS, torch.zeros((4, 2049), dtype=torch.int32, device=DEVICE)),
            "1 to 2048",
        ),
        (lambda: library.cand_topk(FLOATS, LENS, OUT[:3], OUT, 512), r"blocks must be int32 \[4, ...\]"),
    ],
)
def test_what_is_wrong_is_refused_by_name(call: object, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        call()  # type: ignore[operator]


SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.skipif(not Path(SANITIZER).exists(), reason="no compute-sanitizer here")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_is_silent(tool: str) -> None:
    argv = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        "99",
        sys.executable,
        str(Path(__file__).with_name("sanitized.py")),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0 and "sanitized: done" in done.stdout, (done.stdout + done.stderr)[-3000:]
