"""Inputs that make selection kernels fail: lengths at every border, ties, NaN, infinities, odd strides.

Used by :mod:`ds41k.qualify` on the node and by the project's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

DISTRIBUTIONS = (
    "normal",
    "all_equal",
    "two_values",
    "ascending",
    "descending",
    "few_levels",
    "negative_infinity",
    "infinities",
    "nan_at_threshold",
    "nan_in_blocks",
    "all_nan",
    "denormal",
    "zeros_of_both_signs",
    "random_bits",
)
# 2,048 candidate blocks of 8 columns end at 16,384; groups of 8, 64 and 512 columns and the shared memory's 8,192 and
# 16,384 keys end at the others.
LENGTHS: tuple[int, ...] = (0, 1, 7, 8, 9, 511, 512, 513, 1023, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8193)
LENGTHS += (16376, 16377, 16383, 16384, 16385, 16391, 16393, 65535, 65536, 65537, 131071, 131073, -1, -2147483648)


@dataclass(frozen=True)
class Case:
    """``logits`` float32 [rows, width] and ``lens`` int32 [rows], on one GPU."""

    name: str
    logits: Tensor
    lens: Tensor


def fill(kind: str, rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Return float32 [rows, width] on the generator's device."""
    device = generator.device

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (rows, width), generator=generator, device=device)

    normal = torch.randn((rows, width), generator=generator, device=device)
    ramp = torch.arange(width, device=device, dtype=torch.float32).expand(rows, width)
    some, zero = draw(0, 16) == 0, torch.zeros_like(normal)
    makers: dict[str, Callable[[], Tensor]] = {
        "normal": lambda: normal,
        "all_equal": lambda: torch.full((rows, width), 0.25, device=device),
        "two_values": lambda: draw(0, 2).float(),
        "ascending": lambda: ramp * 0.001,
        "descending": lambda: ramp * -0.001,
        "few_levels": lambda: (normal * 2).round(),
        "negative_infinity": lambda: normal.masked_fill(draw(0, 50) > 0, float("-inf")),
        "infinities": lambda: normal.masked_fill(some, float("inf")).masked_fill(draw(0, 16) == 0, float("-inf")),
        "nan_at_threshold": lambda: normal.masked_fill(draw(0, 30) > 0, float("nan")),
        "nan_in_blocks": lambda: normal.masked_fill(draw(0, 1000) == 0, float("nan")),
        "all_nan": lambda: torch.full((rows, width), float("nan"), device=device),
        "denormal": lambda: (draw(-(2**20), 2**20).to(torch.int32) & -0x7F800001).view(torch.float32),
        "zeros_of_both_signs": lambda: torch.where(some, -normal.abs(), torch.where(draw(0, 2) == 0, zero, -zero)),
        "random_bits": lambda: draw(-(2**31), 2**31).to(torch.int32).view(torch.float32),
    }
    return makers[kind]().contiguous()


def lengths_for(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Return int32 [rows]: the borders that fit, the width's own, and random ones."""
    borders = [n for n in LENGTHS if n <= width] + [width - 1, width, width + 1, 2**31 - 1]
    lens = torch.randint(0, width + 2, (rows,), generator=generator, device=generator.device)
    fixed = torch.tensor(borders[:rows], device=generator.device)
    lens[: fixed.numel()] = fixed
    return lens.to(torch.int32)


def cases(device: torch.device, seed: int = 0) -> Iterator[Case]:
    """Yield every distribution with every border length, few rows and many, narrow rows and wide."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for rows, width in ((48, 20_001), (300, 9_000), (3, 150_000), (40, 140_004), (140, 66_048)):
        for kind in DISTRIBUTIONS:
            logits = fill(kind, rows, width, generator)
            yield Case(f"{kind} {rows}x{width}", logits, lengths_for(rows, width, generator))
    for rows, width in ((2, 1_048_576), (17, 1_048_576), (270, 600_000)):
        for kind in ("normal", "few_levels", "ascending", "all_equal"):
            logits = fill(kind, rows, width, generator)
            lens = torch.randint(width - 9000, width + 1, (rows,), generator=generator, device=device)
            lens[0] = width
            yield Case(f"{kind} {rows}x{width}", logits, lens.to(torch.int32))


def with_row_stride(logits: Tensor, extra: int, offset: int = 0) -> Tensor:
    """Return the values with ``extra`` unused columns after each row, ``offset`` elements into their storage."""
    rows, width = logits.shape
    storage = torch.full((offset + rows * (width + extra),), float("nan"), device=logits.device)
    view = storage[offset:].view(rows, width + extra)[:, :width]
    view.copy_(logits)
    return view
