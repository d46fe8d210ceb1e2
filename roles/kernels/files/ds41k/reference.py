"""What the operators compute, in plain torch on any device: slow, exact, the yardstick of every test.

Keys carry the index in their low bits, so no two are equal and nothing depends on how torch orders ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INDEX_BITS = 22
_NO_KEY = -1


def order_keys(values: Tensor) -> Tensor:
    """Return int64 keys of float32 ``values`` in the order of the values: -0 equals +0, NaN is the lowest."""
    bits = torch.where(values == 0, torch.zeros_like(values), values).contiguous().view(torch.int32).to(torch.int64)
    bits = bits & 0xFFFFFFFF
    keys = torch.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits | 0x80000000)
    return torch.where(torch.isnan(values), torch.zeros_like(keys), keys)


def _first(keys: Tensor, valid: Tensor, width: int) -> Tensor:
    """Return int32 [rows, width]: positions of the first valid keys of each row, ascending, then -1."""
    positions = torch.arange(keys.shape[1], device=keys.device)
    unique = (keys << _INDEX_BITS) | ((1 << _INDEX_BITS) - 1 - positions)
    unique = torch.where(valid, unique, torch.full_like(unique, _NO_KEY))
    top = unique.topk(min(width, keys.shape[1]), dim=1)
    none = keys.shape[1]
    chosen = torch.where(top.values == _NO_KEY, torch.full_like(top.indices, none), top.indices).sort(dim=1).values
    out = torch.full((keys.shape[0], width), -1, dtype=torch.int32, device=keys.device)
    out[:, : chosen.shape[1]] = torch.where(chosen == none, torch.full_like(chosen, -1), chosen).to(torch.int32)
    return out


def _effective(logits: Tensor, lens: Tensor) -> Tensor:
    return lens.reshape(-1, 1).to(torch.int64).clamp(0, logits.shape[1])


def rowtopk(logits: Tensor, lens: Tensor, k: int) -> Tensor:
    """Return int32 [rows, k]; see :func:`ds41k.library.rowtopk`, also for the arguments."""
    if logits.shape[0] == 0 or logits.shape[1] == 0:
        return torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    valid = torch.arange(logits.shape[1], device=logits.device) < _effective(logits, lens)
    return _first(order_keys(logits), valid, k)


def cand_blocks(logits: Tensor, lens: Tensor, count: int, block_size: int = 8) -> Tensor:
    """Return int32 [rows, count]; see :func:`ds41k.library.cand_blocks`."""
    rows, width = logits.shape
    if rows == 0 or width == 0:
        return torch.full((rows, count), -1, dtype=torch.int32, device=logits.device)
    lengths = _effective(logits, lens)
    blocks = -(-width // block_size)
    columns = torch.arange(blocks * block_size, device=logits.device)
    padded = torch.nn.functional.pad(logits, (0, blocks * block_size - width))
    values = torch.where(columns < lengths, padded, torch.full_like(padded, float("-inf")))
    values = values.view(rows, blocks, block_size)
    nan = values.isnan().any(dim=2)
    scores = values.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")).amax(dim=2)
    ids = torch.arange(blocks, device=logits.device)
    newest = ids == (lengths - 1).clamp(min=0) // block_size
    scores = torch.where(nan | newest, torch.full_like(scores, float("inf")), scores)
    return _first(order_keys(scores), ids * block_size < lengths, count)


def cand_topk(logits: Tensor, lens: Tensor, blocks: Tensor, k: int, block_size: int = 8) -> Tensor:
    """Return int32 [rows, k]; see :func:`ds41k.library.cand_topk`."""
    rows, width = logits.shape
    if rows == 0 or width == 0:
        return torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    lengths = _effective(logits, lens)
    count = -(-width // block_size)
    known = torch.where((blocks >= 0) & (blocks < count), blocks, torch.full_like(blocks, count)).to(torch.int64)
    among = torch.zeros((rows, count + 1), dtype=torch.bool, device=logits.device).scatter_(1, known, True)[:, :count]
    columns = torch.arange(width, device=logits.device)
    valid = among.repeat_interleave(block_size, dim=1)[:, :width] & (columns < lengths)
    return _first(order_keys(logits), valid, k)
