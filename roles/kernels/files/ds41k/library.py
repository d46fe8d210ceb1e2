"""The operators of libds41k_idx.so, typed.

Each one writes into a tensor of the caller's, on the current stream of that tensor's GPU, allocates nothing, reads
nothing back to the host and may be captured into a CUDA graph. The exact results are those of :mod:`ds41k.reference`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

NAME = "libds41k_idx.so"
# Where the library is when it is not beside this file.
FOLDER_VARIABLE = "DS41K_LIBRARY_DIR"
BLOCK_SIZE = 8
MAX_ROWS = 8192


class LibraryError(RuntimeError):
    """The library is missing or cannot be loaded; one line."""


_loaded: Path | None = None


def path() -> Path:
    """Return where the library is expected; the file need not exist."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) / NAME if folder else Path(__file__).parent / "lib" / NAME


def load() -> Path:
    """Load the library once per process, with its operators for fake tensors, and return its path.

    Raises LibraryError when there is none or when torch cannot load it.
    """
    global _loaded
    if _loaded is None:
        wanted = path()
        if not wanted.is_file():
            raise LibraryError(
                f"ds41k: {wanted} is missing: build it (build.sh), or name its folder in {FOLDER_VARIABLE}"
            )
        try:
            torch.ops.load_library(str(wanted))
        except OSError as error:
            raise LibraryError(f"ds41k: {wanted} cannot be loaded by torch {torch.__version__}: {error}") from error
        for name in ("rowtopk", "cand_blocks", "cand_topk"):
            # Every operator writes into its argument and returns nothing: there is no shape to tell a tracer.
            torch.library.register_fake(f"ds41k::{name}")(_nothing)
        _loaded = wanted
    return _loaded


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def rowtopk(logits: Tensor, lens: Tensor, out: Tensor, k: int) -> None:
    """Write the indices of the first k columns of each row into ``out``, ascending, then -1.

    A column precedes another when its value is larger, or when they are equal and its index is smaller; -0 equals +0;
    NaN comes last.

    ``logits`` float32 [rows, width], columns adjacent, at most 8,192 rows and 4,194,304 columns. ``lens`` int32
    [rows] or [rows, 1]: columns of a row that count, clamped to [0, width]. ``out`` int32 [rows, k], columns
    adjacent. ``k`` 512, 1,024 or 2,048. Raises RuntimeError, which names operator and argument, for anything else.
    """
    torch.ops.ds41k.rowtopk(logits, lens, out, k)


def cand_blocks(logits: Tensor, lens: Tensor, blocks: Tensor, block_size: int = BLOCK_SIZE) -> None:
    """Write the ids of the first blocks of each row into ``blocks``, ascending, then -1.

    A block is ``block_size`` adjacent columns; its score is the largest of its values inside the row. A block with a
    NaN and the row's newest block score +inf. Order, ``logits`` and ``lens`` as in :func:`rowtopk`. ``blocks`` int32
    [rows, 1 to 2,048], columns adjacent, any distance between rows. ``block_size`` 8.
    """
    torch.ops.ds41k.cand_blocks(logits, lens, blocks, block_size)


def cand_topk(logits: Tensor, lens: Tensor, blocks: Tensor, out: Tensor, k: int, block_size: int = BLOCK_SIZE) -> None:
    """Write the indices of the first k columns that lie in the row's ``blocks`` into ``out``, ascending, then -1.

    ``blocks`` int32 [rows, 1 to 2,048] as :func:`cand_blocks` wrote it: ids unique and ascending; numbers that are no
    block of the row are passed over. Everything else as in :func:`rowtopk`.
    """
    torch.ops.ds41k.cand_topk(logits, lens, blocks, out, block_size, k)
