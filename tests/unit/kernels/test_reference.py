"""The references against the definition, written out with sorted(): the kernels are compared with the references."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

SPECIAL = [0.0, -0.0, 1.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42, 3e38]


def order(value: float) -> tuple[bool, float]:
    """Larger precedes; NaN comes after -inf."""
    return (not math.isnan(value), 0.0 if math.isnan(value) else value)


def first(keys: dict[int, tuple[bool, float]], count: int, width: int) -> list[int]:
    """The first `count` positions, ascending, then -1."""
    ranked = sorted(keys, key=lambda at: at)
    ranked.sort(key=lambda at: keys[at], reverse=True)
    chosen = sorted(ranked[:count])
    return chosen + [-1] * (width - len(chosen))


def rows(seed: int) -> tuple[list[list[float]], list[int], int]:
    draw = random.Random(seed)
    width = draw.choice([1, 7, 8, 9, 40, 65])
    made = []
    for _ in range(6):
        few = draw.random() < 0.5
        made.append([draw.choice(SPECIAL) if few else draw.gauss(0, 1) for _ in range(width)])
    lens = [draw.choice([-3, 0, 1, 8, width - 1, width, width + 5, draw.randint(0, width)]) for _ in made]
    return made, lens, width


@pytest.mark.parametrize("seed", range(60))
def test_references_are_the_definition(torch: Any, seed: int) -> None:
    from ds41k import reference

    made, lens, width = rows(seed)
    # float32, as the kernels see it
    logits = torch.tensor(made, dtype=torch.float32)
    made = logits.tolist()
    lengths = torch.tensor(lens, dtype=torch.int32)
    k, count = random.Random(seed).choice([1, 5, 30, 100]), random.Random(seed + 1).choice([1, 3, 20])
    topk, blocks = reference.rowtopk(logits, lengths, k), reference.cand_blocks(logits, lengths, count)
    given = blocks.clone()
    given[0, 0], given[1, -1] = -1, 2**30
    picked = reference.cand_topk(logits, lengths, given, k)
    for at, values in enumerate(made):
        n = min(max(lens[at], 0), width)
        keys = {i: order(values[i]) for i in range(n)}
        assert topk[at].tolist() == first(keys, k, k)
        scores = {}
        for block in range(-(-n // 8)):
            inside = values[block * 8 : min(n, block * 8 + 8)]
            pinned = block == (n - 1) // 8 or any(map(math.isnan, inside))
            scores[block] = (True, math.inf if pinned else max(inside))
        assert blocks[at].tolist() == first(scores, count, count)
        among = {i: key for i, key in keys.items() if i // 8 in given[at].tolist()}
        assert picked[at].tolist() == first(among, k, k)


def test_empty_shapes(torch: Any) -> None:
    from ds41k import reference

    for shape in ((0, 9), (3, 0)):
        logits, lens = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int32)
        blocks = reference.cand_blocks(logits, lens, 4)
        assert blocks.shape == (shape[0], 4) and (blocks == -1).all()
        assert (reference.rowtopk(logits, lens, 5) == -1).all()
        assert (reference.cand_topk(logits, lens, blocks, 5) == -1).all()


def test_the_cases_hold_what_they_are_named_after(torch: Any) -> None:
    from ds41k import cases

    generator = torch.Generator().manual_seed(0)
    made = {kind: cases.fill(kind, 4, 6000, generator) for kind in cases.DISTRIBUTIONS}
    assert all(values.dtype == torch.float32 and values.shape == (4, 6000) for values in made.values())
    zeros = made["zeros_of_both_signs"]
    assert (torch.signbit(zeros[zeros == 0])).any() and (~torch.signbit(zeros[zeros == 0])).any()
    tiny = torch.finfo(torch.float32).tiny
    assert (made["denormal"].abs() < tiny).all() and (made["denormal"] != 0).any() and (made["denormal"] < 0).any()
    assert (made["nan_at_threshold"].isnan().sum(dim=1) > 6000 - 512).all() and not made["normal"].isnan().any()
    assert made["random_bits"].isnan().any() and made["infinities"].isinf().any()
    assert (made["negative_infinity"] > -math.inf).sum(dim=1).max() < 512
    view = cases.with_row_stride(made["normal"], 3, 2)
    assert view.stride() == (6003, 1) and view.storage_offset() == 2 and torch.equal(view, made["normal"])
