"""Every kernel on small inputs of every form, for compute-sanitizer; see test_kernels.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "roles" / "kernels" / "files"))

from ds41k import cases, library

DEVICE = torch.device("cuda", 0)


def main() -> None:
    library.load()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    # Rows for every multiprocessor and rows that a cluster shares; groups of 1, 8, 64 and 512 columns; loads of 16
    # bytes and of 4.
    for rows, width, offset in (
        (136, 9_001, 0),
        (2, 9_001, 0),
        (40, 9_001, 0),
        (2, 66_003, 0),
        (1, 1_048_576, 0),
        (3, 9_001, 1),
    ):
        for kind in ("normal", "few_levels", "nan_in_blocks"):
            logits = cases.with_row_stride(cases.fill(kind, rows, width, generator), -width % 4, offset)
            lens = cases.lengths_for(rows, width, generator)
            lens[-1] = width
            out = torch.empty((rows, 512), dtype=torch.int32, device=DEVICE)
            blocks = torch.empty((rows, 2048), dtype=torch.int32, device=DEVICE)
            library.rowtopk(logits, lens, out, 512)
            library.cand_blocks(logits, lens, blocks)
            library.cand_topk(logits, lens, blocks, out, 512)
    torch.cuda.synchronize()
    print("sanitized: done")


if __name__ == "__main__":
    main()
