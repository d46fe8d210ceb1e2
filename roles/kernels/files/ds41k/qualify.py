"""Whether this GPU computes what the kernels promise, and whether it does so faster than what they replace.

    python -m ds41k.qualify [--json FILE] [--vllm DIR] [--quick]

Exit codes: 0 every kernel is correct; 1 one is not, or the run failed; 2 wrong usage; 3 not qualified, since there is
no GPU here (or no library for it): nothing was found out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds41k import cases, library, peers, reference, timing
from ds41k.chunks import chunk_rows

NOT_QUALIFIED = 3
KERNELS = ("rowtopk", "cand_blocks", "cand_topk")
# Beside the kernels' verdicts: all of them over chunks of rows, as the decode step in chunks calls them.
CHUNKS = "chunks"
K = 512
BLOCKS = 2048
WIDTH = 1 << 20
POISON = -77
# What a decode step of the 8x profile brings: 128 sequences of 8 tokens, contexts from short to the window.
MAIN_SHAPES: tuple[tuple[int, int], ...] = ((1024, 2048), (1024, 32768), (1024, 262144))
FEW_SHAPES: tuple[tuple[int, int], ...] = (
    (1, 2048),
    (8, 2048),
    (64, 2048),
    (256, 2048),
    (1, 32768),
    (8, 32768),
    (64, 32768),
    (256, 32768),
)
FEW_SHAPES += ((1, 131072), (8, 131072), (64, 131072), (256, 131072), (1, 1048576), (8, 1048576))


@dataclass
class Verdict:
    """One kernel's part of the report."""

    correct: bool = True
    checks: int = 0
    failures: list[str] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, got: Tensor, wanted: Tensor) -> None:
        self.checks += 1
        if not torch.equal(got, wanted):
            rows = int((got != wanted).any(dim=1).sum())
            self.correct = False
            self.failures.append(f"{name}: {rows} of {got.shape[0]} rows differ from the reference")

    def report(self) -> dict[str, Any]:
        faster = bool(self.shapes) and all(shape["speedup"] >= 1.0 for shape in self.shapes if shape["in_use"])
        return {
            "correct": self.correct,
            "faster": faster,
            "checks": self.checks,
            "failures": self.failures[:20],
            "shapes": self.shapes,
        }


def poisoned(rows: int, width: int, device: torch.device) -> Tensor:
    """Return int32 [rows, width] in which every element is POISON: what a kernel leaves out shows."""
    return torch.full((rows, width), POISON, dtype=torch.int32, device=device)


def check_case(case: cases.Case, verdicts: dict[str, Verdict], k: int) -> None:
    """Compare the three kernels with their references, element by element."""
    logits, lens, device = case.logits, case.lens, case.logits.device
    rows = logits.shape[0]
    out = poisoned(rows, k, device)
    library.rowtopk(logits, lens, out, k)
    verdicts["rowtopk"].check(f"{case.name} k={k}", out, reference.rowtopk(logits, lens, k))
    blocks = poisoned(rows, BLOCKS, device)
    library.cand_blocks(logits, lens, blocks)
    wanted = reference.cand_blocks(logits, lens, BLOCKS)
    verdicts["cand_blocks"].check(case.name, blocks, wanted)
    out = poisoned(rows, k, device)
    library.cand_topk(logits, lens, wanted, out, k)
    verdicts["cand_topk"].check(f"{case.name} k={k}", out, reference.cand_topk(logits, lens, wanted, k))


def run_ranges(case: cases.Case, ranges: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Return what the kernels choose when each range of rows is a call of its own."""
    rows, device = case.logits.shape[0], case.logits.device
    found = {name: poisoned(rows, BLOCKS if name == "cand_blocks" else K, device) for name in KERNELS}
    for first, last in ranges:
        logits, lens = case.logits[first:last], case.lens[first:last]
        blocks = found["cand_blocks"][first:last]
        library.rowtopk(logits, lens, found["rowtopk"][first:last], K)
        library.cand_blocks(logits, lens, blocks)
        library.cand_topk(logits, lens, blocks, found["cand_topk"][first:last], K)
    return found


def check_chunks(case: cases.Case, verdict: Verdict) -> None:
    """Compare calls over chunks of rows with a single call over all of them."""
    rows, width = case.logits.shape
    whole = run_ranges(case, [(0, rows)])
    # A third of the rows at a time, the last chunk smaller, and one row at a time.
    for at_once in {max(1, rows // 3), 1}:
        chunked = run_ranges(case, chunk_rows(rows, 1, width, 4 * width * at_once))
        for name in KERNELS:
            verdict.check(f"{name} {case.name} in chunks of {at_once}", chunked[name], whole[name])


def check_all(device: torch.device, verdicts: dict[str, Verdict], quick: bool) -> None:
    """Run every case; the middle ones with the other values of k, too."""
    for number, case in enumerate(cases.cases(device)):
        if quick and case.logits.numel() > 20_000_000:
            continue
        for k in (512, 1024, 2048) if number < len(cases.DISTRIBUTIONS) else (512,):
            check_case(case, verdicts, k)
        # values as they come, and values with many ties
        if case.name.startswith(("normal", "few_levels")):
            check_chunks(case, verdicts[CHUNKS])


def time_shapes(device: torch.device, found: peers.Peers, verdicts: dict[str, Verdict], quick: bool) -> None:
    """Time every shape over a window of 1,048,576 columns; three inputs take turns."""
    for rows, length in MAIN_SHAPES if quick else MAIN_SHAPES + FEW_SHAPES:
        inputs = []
        for _ in range(3):
            logits = torch.empty((rows, WIDTH), device=device)
            logits[:, :length].normal_()
            lens = torch.full((rows,), length, dtype=torch.int32, device=device)
            inputs.append((logits, lens))
        time_rowtopk(inputs, length, found, verdicts["rowtopk"])
        if (rows, length) in MAIN_SHAPES:
            time_candidates(inputs, length, found, verdicts)
        del inputs, logits, lens
        torch.cuda.empty_cache()


Input = tuple[Tensor, Tensor]


def add_shape(verdict: Verdict, rows: int, length: int, ours: float, others: dict[str, float], moved: float) -> None:
    """``ours`` and ``others`` in microseconds; ``moved`` the bytes that must be read or written at least."""
    best = min(others, key=lambda name: others[name])
    verdict.shapes.append(
        {
            "rows": rows,
            "length": length,
            "window": WIDTH,
            "us": round(ours, 2),
            "gb_s": round(moved / ours / 1e3, 1),
            "peers_us": {name: round(value, 2) for name, value in others.items()},
            "best_peer": best,
            "speedup": round(others[best] / ours, 2),
            "in_use": (rows, length) in MAIN_SHAPES,
        }
    )


def time_rowtopk(inputs: Sequence[Input], length: int, found: peers.Peers, verdict: Verdict) -> None:
    device, rows = inputs[0][0].device, inputs[0][0].shape[0]
    out, scratch = poisoned(rows, K, device), peers.workspace(device)
    others = {"torch.topk": timing.median_us([partial(torch.topk, x[:, :length], K) for x, _ in inputs], 5)}
    if found.persistent_topk is not None:
        calls = [partial(found.topk, x, n, out, scratch, length) for x, n in inputs]
        others["persistent_topk"] = timing.median_us(calls)
    ours = timing.median_us([partial(library.rowtopk, x, n, out, K) for x, n in inputs])
    add_shape(verdict, rows, length, ours, others, rows * (length + K) * 4)


def torch_blocks(logits: Tensor) -> None:
    """Candidate blocks with torch alone, of the columns that count."""
    scores = logits.unflatten(1, (-1, library.BLOCK_SIZE)).amax(dim=2)
    scores.topk(min(BLOCKS, scores.shape[1]), dim=1)


def time_candidates(inputs: Sequence[Input], length: int, found: peers.Peers, verdicts: dict[str, Verdict]) -> None:
    device, rows = inputs[0][0].device, inputs[0][0].shape[0]
    triples = [(x, n, poisoned(rows, BLOCKS, device)) for x, n in inputs]
    out, scratch = poisoned(rows, K, device), peers.workspace(device)
    others = {"torch": timing.median_us([partial(torch_blocks, x[:, :length]) for x, _ in inputs], 5)}
    if found.select_candidate_blocks is not None:
        select = found.select_candidate_blocks
        calls = [partial(select, x, None, n, BLOCKS, library.BLOCK_SIZE, blocks) for x, n, blocks in triples]
        others["upstream"] = timing.median_us(calls, 5)
    ours = timing.median_us([partial(library.cand_blocks, x, n, blocks) for x, n, blocks in triples])
    add_shape(verdicts["cand_blocks"], rows, length, ours, others, rows * (length + BLOCKS) * 4)

    ours = timing.median_us([partial(library.cand_topk, x, n, blocks, out, K) for x, n, blocks in triples])
    if found.apply_candidate_mask is not None and found.persistent_topk is not None:
        mask = found.apply_candidate_mask

        def masked(x: Tensor, n: Tensor, blocks: Tensor) -> None:
            mask(x, None, n, blocks, library.BLOCK_SIZE)
            found.topk(x, n, out, scratch, length)

        # Last: it overwrites the inputs.
        others = {"upstream": timing.median_us([partial(masked, *triple) for triple in triples], 5)}
    else:
        others = {"rowtopk of all": timing.median_us([partial(library.rowtopk, x, n, out, K) for x, n in inputs])}
    read = min(length, BLOCKS * library.BLOCK_SIZE)
    add_shape(verdicts["cand_topk"], rows, length, ours, others, rows * (read + BLOCKS + K) * 4)


def driver_version() -> str:
    """Return the NVIDIA driver's version, or why it is unknown."""
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.split("\n")[0].strip()


def qualify(vllm: Path | None, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the report of this process's GPU 0."""
    device = torch.device("cuda", 0)
    manifest = library.path().with_name("manifest.json")
    built = json.loads(manifest.read_text(encoding="utf-8")).get(library.NAME, {}) if manifest.is_file() else {}
    verdicts = {name: Verdict() for name in (*KERNELS, CHUNKS)}
    say("comparing with the references ...")
    check_all(device, verdicts, quick)
    found = peers.find(vllm)
    ceiling = timing.copy_ceiling_gb_s(device)
    say(f"timing against {found.source} ...")
    time_shapes(device, found, verdicts, quick)
    return {
        "kernels": {name: verdict.report() for name, verdict in verdicts.items()},
        "device": torch.cuda.get_device_name(device),
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "driver": driver_version(),
        "torch": torch.__version__,
        "peers": found.source,
        "copy_ceiling_gb_s": round(ceiling, 1),
        "library": {name: built[name] for name in ("key", "sha256", "arches") if name in built},
    }


def describe(report: dict[str, Any]) -> str:
    """Return the report as a table for a person."""
    ceiling = report["copy_ceiling_gb_s"]
    lines = [
        f"{report['device']}, driver {report['driver']}, copy ceiling {ceiling:.0f} GB/s, peers: {report['peers']}"
    ]
    lines.append(f"{'kernel':<12}{'rows':>6}{'length':>9}{'us':>10}{'GB/s':>8}{'of copy':>9}{'speed-up':>10}  peer")
    for name, kernel in report["kernels"].items():
        for shape in kernel["shapes"]:
            part = shape["gb_s"] / ceiling
            others = ", ".join(f"{other} {value:g} us" for other, value in shape["peers_us"].items())
            lines.append(
                f"{name:<12}{shape['rows']:>6}{shape['length']:>9}{shape['us']:>10.1f}{shape['gb_s']:>8.0f}{part:>9.0%}"
                f"{shape['speedup']:>9.2f}x  {others}"
            )
    for name, kernel in report["kernels"].items():
        speed = f", faster: {kernel['faster']}" if kernel["shapes"] else ""
        verdict = f"correct: {kernel['correct']}{speed} ({kernel['checks']} checks)"
        lines.append("\n".join([f"{name}: {verdict}", *(f"  {failure}" for failure in kernel["failures"])]))
    return "\n".join(lines)


def why_not_here() -> str | None:
    """Return why this machine cannot be asked at all, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU here"
    try:
        library.load()
    except library.LibraryError as error:
        return str(error)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of ``python -m ds41k.qualify``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ds41k.qualify", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument(
        "--vllm", type=Path, metavar="DIR", help="take the peers from DIR/vllm, not from an installed vLLM"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and shapes, about half a minute")
    arguments = parser.parse_args(argv)

    def say(text: str) -> None:
        print(f"qualify: {text}", file=sys.stderr, flush=True)

    missing = why_not_here()
    if missing is not None:
        report: dict[str, Any] = {"kernels": {}, "not_qualified": missing}
        text, code = f"not qualified: {missing}", NOT_QUALIFIED
    else:
        report = qualify(arguments.vllm, arguments.quick, say)
        text, code = describe(report), 0 if all(k["correct"] for k in report["kernels"].values()) else 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(text, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
