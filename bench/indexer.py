#!/usr/bin/env python3
"""Time and memory of the sparse indexer's decode step on one GPU: vLLM's own, in chunks, and with our kernels.

    PYTHONPATH=roles/kernels/files python bench/indexer.py --vllm DIR [--json FILE]

DIR holds vllm/, the unpacked wheel of vLLM 0.33.0. The kernels alone: python -m ds41k.qualify --vllm DIR.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

WINDOW = 1 << 20
ROWS = 1024
K = 512


def measure(bench: Any, step: Any, switches: Any) -> dict[str, float]:
    """Return milliseconds of a captured step and the MiB that it needs beyond what is there before."""
    from ds41k import timing

    bench.ours._switches = switches
    step.run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    took = timing.median_us([step.run], 9)
    torch.cuda.empty_cache()
    return {"ms": round(took / 1e3, 3), "peak_mib": round(peak / (1 << 20), 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and memory of the sparse indexer's decode step.")
    parser.add_argument("--vllm", type=Path, required=True, help="folder that holds vllm/, the unpacked wheel")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    import os

    os.environ["DS41K_VLLM"] = str(arguments.vllm)
    import test_chunked_indexer
    import vllm_standin
    from ds41k.plugin import Switches

    bench = test_chunked_indexer.Bench()
    variants = {
        "vLLM 0.33.0": Switches(),
        "chunks, 256 MiB": Switches(chunk=True),
        "our kernels": Switches(rowtopk=True, cand=True),
        "chunks, 256 MiB, our kernels": Switches(chunk=True, rowtopk=True, cand=True),
        "chunks, 512 MiB, our kernels": Switches(True, 512 << 20, True, True),
    }
    figures: list[dict[str, Any]] = []
    print(f"{'layer':<20}{'context':>9}  {'variant':<30}{'ms':>9}{'peak MiB':>10}")
    for length in (2048, 32768, 262144):
        for layer, write in (("candidate source", True), ("candidate consumer", False)):
            blocks = torch.arange(2048, device="cuda", dtype=torch.int32).expand(ROWS, 2048).contiguous()
            lens = torch.full((ROWS, 1), length, dtype=torch.int32, device="cuda")
            step = vllm_standin.make_step(bench.cache, ROWS, 1, WINDOW, lens, K, blocks, 0)
            step.layer = vllm_standin.make_layer(bench.upstream, step, WINDOW, K, write)
            for name, switches in variants.items():
                found = measure(bench, step, switches)
                figures.append({"layer": layer, "context": length, "variant": name, **found})
                print(f"{layer:<20}{length:>9}  {name:<30}{found['ms']:>9.3f}{found['peak_mib']:>10.1f}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
