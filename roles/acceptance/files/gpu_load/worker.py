"""What uses torch: copies, sums, load. It may hang in the driver; gpu_load.parent watches it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

# A sum of these stays exact in fp32, so that a wrong bit shows.
SMALL = 1024


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def cards() -> None:
    """The cards in torch's order."""
    found = [f"GPU-{torch.cuda.get_device_properties(n).uuid!s}" for n in range(torch.cuda.device_count())]
    if not found:
        raise SystemExit("torch.cuda.device_count() is 0")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    say({"cards": found, "torch": torch.__version__, "nccl": nccl})


def pattern(words: int, seed: int, device: str) -> Any:
    """Data that no other copy has."""
    return torch.arange(words, dtype=torch.int32, device=device) * 2654435 + seed


def pairs(mib: int, ways: list[list[int]]) -> None:
    """Copy, look whether the same arrived, and time it."""
    words = mib << 18
    for number, (source, target) in enumerate(ways):
        say({"begin": [source, target]})
        data = pattern(words, number * 977 + source * 31 + target, f"cuda:{source}")
        there = torch.zeros(words, dtype=torch.int32, device=f"cuda:{target}")
        there.copy_(data)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        # Compared on the host: a broken path would compare its own error with itself.
        correct = bool(torch.equal(there.cpu(), data.cpu()))
        began = time.monotonic()
        for _ in range(5):
            there.copy_(data, non_blocking=True)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        seconds = time.monotonic() - began
        gb_s = 5 * words * 4 / seconds / 1e9
        say(
            {
                "gb_s": round(gb_s, 2),
                "correct": correct,
                "peer": bool(torch.cuda.can_device_access_peer(source, target)),
            }
        )
        del data, there


def rank(number: int, count: int, sizes: list[int]) -> None:
    """One rank of the all-reduce; the first one tells."""
    torch.cuda.set_device(number)
    store = f"tcp://127.0.0.1:{os.environ['GPU_LOAD_PORT']}"
    torch.distributed.init_process_group("nccl", init_method=store, rank=number, world_size=count)
    # A run before the first measured one: NCCL connects at its first use.
    torch.distributed.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    for size in sizes:
        if number == 0:
            say({"begin": size})
        words = max(1, size // 4)
        own = (torch.arange(words, dtype=torch.int64, device="cuda") % SMALL + number).to(torch.float32)
        wanted = (torch.arange(words, dtype=torch.int64) % SMALL * count + count * (count - 1) // 2).to(torch.float32)
        data = own.clone()
        torch.distributed.all_reduce(data)
        torch.cuda.synchronize()
        right = torch.tensor([int(torch.equal(data.cpu(), wanted))], device="cuda")
        torch.distributed.all_reduce(right, op=torch.distributed.ReduceOp.MIN)
        began = time.monotonic()
        times = 10
        for _ in range(times):
            torch.distributed.all_reduce(data)
        torch.cuda.synchronize()
        seconds = (time.monotonic() - began) / times
        if number == 0:
            bus = words * 4 / seconds * 2 * (count - 1) / count / 1e9
            say(
                {
                    "bytes": words * 4,
                    "us": round(seconds * 1e6, 1),
                    "bus_gb_s": round(bus, 3),
                    "correct": bool(right.item()),
                }
            )
    torch.distributed.destroy_process_group()


def load(seconds: float) -> None:
    """Matrix products on all cards, and copies from and to the host, so that the link goes to full speed."""
    count = torch.cuda.device_count()
    work = []
    for number in range(count):
        side = torch.randn(8192, 8192, dtype=torch.bfloat16, device=f"cuda:{number}")
        host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(64 << 20, dtype=torch.uint8, device=f"cuda:{number}")
        work.append((number, side, host, there, torch.cuda.Stream(number)))
    say({"begin": "load"})
    ends, rounds = time.monotonic() + seconds, 0
    began = time.monotonic()
    while time.monotonic() < ends:
        for number, side, host, there, stream in work:
            with torch.cuda.device(number):
                for _ in range(4):
                    side @ side
                with torch.cuda.stream(stream):
                    there.copy_(host, non_blocking=True)
                    host.copy_(there, non_blocking=True)
        for number, *_ in work:
            torch.cuda.synchronize(number)
        rounds += 1
    took = time.monotonic() - began
    say({"cards": count, "tflops": round(rounds * 4 * 2 * 8192**3 / took / 1e12, 1), "seconds": round(took, 1)})


def main(arguments: list[str]) -> None:
    """Entry point."""
    what, *rest = arguments
    if what == "cards":
        cards()
    elif what == "pairs":
        pairs(int(rest[0]), json.loads(rest[1]))
    elif what == "rank":
        rank(int(rest[0]), int(rest[1]), json.loads(rest[2]))
    else:
        load(float(rest[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
