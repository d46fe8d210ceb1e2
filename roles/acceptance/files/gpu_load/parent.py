"""Starts the workers that use torch, and ends them when they hang: only a process that is watched can be given up.

A copy or a collective that hangs in the driver never comes back, so each one has a limit of its own, and what was under
way when it passed is named.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

# Starting torch and CUDA on a machine with many cards takes this long at most.
START_S = 180.0
WORKER = (sys.executable, "-m", "gpu_load.worker")
# NVLink multicast off: it is not for these cards, and hangs on machines that hand out some cards of a switch.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def say(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


class Worker:
    """One child in its own process group, whose lines of JSON come with a limit."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [*WORKER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._hear, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _hear(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-20:], line.strip()]

    def next(self, limit_s: float) -> dict[str, Any] | None:
        """The next line; None at the end. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return None
            # Libraries print, too.
            if line.startswith("{"):
                row: dict[str, Any] = json.loads(line)
                return row

    def last_words(self) -> str:
        """The exit code, and the last line that tells something."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "it does not end"
        telling = [line for line in self._errors if line]
        return f"exit {code}: {telling[-1][:200]}" if telling else f"exit {code}"

    def end(self) -> None:
        """Kill it with all that it started. One that waits in the driver stays, and is left alone."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def in_order(arguments: Sequence[str], todo: list[list[int]], limit_s: float) -> Iterator[dict[str, Any]]:
    """The rows of a worker that does one thing after the other; one that hangs or dies costs that thing alone."""
    left = list(todo)
    while left:
        worker = Worker([*arguments, json.dumps(left)])
        began = False
        try:
            while left:
                row = worker.next(limit_s if began else START_S)
                if row is None:
                    yield {"item": left.pop(0), "error": f"the worker ended: {worker.last_words()}"}
                    break
                if "begin" in row:
                    began = True
                    continue
                yield {"item": left.pop(0), **row}
        except TimeoutError:
            what = f"hung: nothing within {limit_s:.0f} s" if began else f"torch did not start within {START_S:.0f} s"
            yield {"item": left.pop(0), "error": what}
            if not began:
                for item in left:
                    yield {"item": item, "error": what}
                left = []
        finally:
            worker.end()


def pairs(count: int, limit_s: float, mib: int) -> None:
    """Copy each way of each pair of cards."""
    ways = [[a, b] for a in range(count) for b in range(count) if a != b]
    for row in in_order(["pairs", str(mib)], ways, limit_s):
        say(row)


def all_reduce(count: int, limit_s: float, sizes: Sequence[int]) -> None:
    """Sum up over all cards: a process for each, all of them watched."""
    port = 20000 + os.getpid() % 20000
    workers = [
        Worker(["rank", str(rank), str(count), json.dumps(list(sizes))], {"GPU_LOAD_PORT": str(port)})
        for rank in range(count)
    ]
    under_way: object = "the start of NCCL"
    try:
        began = False
        while True:
            row = workers[0].next(limit_s if began else START_S)
            if row is None:
                words = [worker.last_words() for worker in workers]
                if any(not text.startswith("exit 0") for text in words):
                    say({"error": f"a rank ended in {under_way}: {'; '.join(dict.fromkeys(words))}"[:400]})
                return
            if "begin" in row:
                began, under_way = True, f"an all-reduce of {row['begin']:,} bytes"
                continue
            say(row)
    except TimeoutError:
        say({"error": f"hung in {under_way}: nothing within {limit_s if began else START_S:.0f} s"})
    finally:
        for worker in workers:
            worker.end()


def load(seconds: float) -> None:
    """Keep all cards and their links busy for a time."""
    worker = Worker(["load", str(seconds)])
    try:
        while (row := worker.next(START_S + seconds)) is not None:
            say(row)
        words = worker.last_words()
        if not words.startswith("exit 0"):
            say({"error": words})
    except TimeoutError:
        say({"error": f"hung: not done {START_S:.0f} s after its time"})
    finally:
        worker.end()


def cards() -> list[str]:
    """The cards in torch's order, by UUID. Raises ValueError."""
    worker = Worker(["cards"])
    try:
        row = worker.next(START_S)
        if row is None:
            raise ValueError(f"torch sees no card: {worker.last_words()}")
        found: list[str] = row["cards"]
        say(row)
        return found
    except TimeoutError:
        raise ValueError(f"torch did not start within {START_S:.0f} s") from None
    finally:
        worker.end()


def main(arguments: Sequence[str]) -> int:
    """Entry point: 0 when it ran, whatever it found; 2 when it could not."""
    parser = argparse.ArgumentParser(prog="gpu_load")
    parser.add_argument("what", choices=["load", "pairs", "allreduce"])
    parser.add_argument("--limit", type=float, default=30, help="seconds for one copy or one sum (default: 30)")
    parser.add_argument("--seconds", type=float, default=20, help="how long the load lasts (default: 20)")
    parser.add_argument("--mib", type=int, default=256, help="size of one copy (default: 256)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 4096, 524288, 4194304, 67108864], metavar="BYTES")
    options = parser.parse_args(arguments)
    try:
        found = cards()
    except ValueError as error:
        say({"error": str(error)})
        return 2
    if options.what == "load":
        load(options.seconds)
    elif options.what == "pairs":
        pairs(len(found), options.limit, options.mib)
    else:
        all_reduce(len(found), options.limit, options.sizes)
    return 0
