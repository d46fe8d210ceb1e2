#!/usr/bin/env python3
"""Fetching and verifying weights, against the tools that people use for it. Ratios are of one run on one machine.

    bench/weights.py fetch     a repository of 200 files, against `hf download` and `aria2c -x16`
    bench/weights.py verify    hashing it again, against `sha256sum` on every core
    bench/weights.py resume    killed at half: how much is fetched again
    bench/weights.py fan-out   one node, then a chain of nodes, every sender held to the same rate

Ours hashes every file on the disk and has it there for good (fsync) before it says complete; the others do neither.
So each time is given until the bytes are on the disk (`sync -f`), and without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "roles/model_weights/files"), str(ROOT / "collections")]

from tests.doubles.hub.server import Hub, Repository, make_repository  # noqa: E402

GOALS = {"fetch": 0.95, "verify": 0.95, "resume": 0.01, "fan-out": 1.5}
NAME = "bench"


class BenchError(Exception):
    """One line for the person who called."""


@dataclass(frozen=True)
class Timed:
    """How long a tool took, and how long until its bytes were on the disk."""

    seconds: float
    durable_s: float


@dataclass(frozen=True)
class Site:
    """A hub in a process of its own, and its one repository."""

    process: subprocess.Popen[str]
    url: str
    repository: Repository

    def stats(self) -> dict[str, Any]:
        from urllib.request import urlopen

        with urlopen(f"{self.url}/_stats") as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def bytes_sent(self) -> int:
        return sum(item["bytes"] for item in self.stats()["files"].values())


@contextlib.contextmanager
def hub_site(folder: Path, files: int, size: int, rate: int = 0) -> Iterator[Site]:
    """Serve a repository of random files."""
    print(f"making {files} files of {size / 1e6:.1f} MB", flush=True)
    named = {f"model-{number:05d}.safetensors": size for number in range(files)}
    repository = make_repository(folder / "hub/owner/name", named, seed=1)
    server = [sys.executable, str(ROOT / "tests/doubles/hub/server.py"), "--root", str(folder / "hub"), "--port", "0"]
    process = subprocess.Popen(
        [*server, "--static", str(folder / "hub"), "--rate", str(rate)], stdout=subprocess.PIPE, text=True
    )
    try:
        if process.stdout is None:
            raise BenchError("the hub has no output")
        yield Site(process, json.loads(process.stdout.readline())["hub"], repository)
    finally:
        process.terminate()
        process.wait()


def request(site: Site, root: Path, **more: Any) -> dict[str, Any]:
    """Return what our program is asked for."""
    return {
        "schema": 1,
        "root": str(root),
        "name": NAME,
        "key": "0" * 12,
        "source": {"type": "hub", "repository": site.repository.name, "revision": site.repository.revision},
        "files": site.repository.wanted(),
        "endpoint": site.url,
        "python": sys.executable,
        "transports": ["http"],
        "streams": 8,
        "stall_s": 60,
        "tries": 3,
        "report_s": 3600,
        **more,
    }


def start_ours(folder: Path, told: dict[str, Any], label: str = "request") -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{label}.json"
    path.write_text(json.dumps(told), encoding="utf-8")
    paths = f"{ROOT / 'roles/model_weights/files'}:{ROOT / 'collections'}"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "gpu_node_weights", "fetch", str(path)],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def run_ours(folder: Path, told: dict[str, Any]) -> None:
    if start_ours(folder, told).wait() != 0:
        raise BenchError("our fetch failed; its last line says why")


def forget(folder: Path) -> None:
    """Remove a folder, also one that was made read-only."""
    for base, _, _ in os.walk(folder):
        Path(base).chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["sync"], check=True)


def timed(folder: Path, run: Any) -> Timed:
    forget(folder)
    folder.mkdir()
    start = time.monotonic()
    run()
    end = time.monotonic()
    subprocess.run(["sync", "-f", str(folder)], check=True)
    return Timed(end - start, time.monotonic() - start)


def tool(argv: list[str], **more: Any) -> None:
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **more)
    if done.returncode != 0:
        raise BenchError(f"{argv[0]} failed with {done.returncode}: {done.stderr.strip()[-300:]}")


def compare_fetch(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    size = arguments.mib * (1 << 20) // arguments.files
    with hub_site(folder, arguments.files, size) as site:
        urls = folder / "urls"
        base = f"{site.url}/static/owner/name/{site.repository.revision}"
        urls.write_text("".join(f"{base}/{path}\n" for path in site.repository.wanted()), encoding="utf-8")
        out = folder / "out"
        hf_own = {"HF_ENDPOINT": site.url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}
        hf = [str(Path(sys.executable).parent / "hf"), "download", site.repository.name]
        runs = {
            "ours": lambda: run_ours(out, request(site, out / "artifacts")),
            "hf download": lambda: tool(
                [*hf, "--revision", site.repository.revision, "--local-dir", str(out)], env={**os.environ, **hf_own}
            ),
            "aria2c -x16": lambda: tool(["aria2c", "-q", "-x16", "-d", str(out), "-i", str(urls)]),
        }
        best: dict[str, Timed] = {}
        for number in range(arguments.rounds):
            for name, run in runs.items():
                took = timed(out, run)
                print(
                    f"round {number + 1}: {name}: {took.seconds:.1f} s, {took.durable_s:.1f} s to the disk", flush=True
                )
                if name not in best or took.durable_s < best[name].durable_s:
                    best[name] = took
        forget(out)
    rate = {name: arguments.mib * 1.048576 / took.durable_s for name, took in best.items()}
    fastest = max(value for name, value in rate.items() if name != "ours")
    quickest = min(took.seconds for name, took in best.items() if name != "ours")
    return {
        "MB_per_s_to_the_disk": {name: round(value) for name, value in rate.items()},
        "ratio": round(rate["ours"] / fastest, 3),
        "ratio_without_sync": round(quickest / best["ours"].seconds, 3),
    }


def compare_verify(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    size = arguments.mib * (1 << 20) // arguments.files
    with hub_site(folder, arguments.files, size) as site:
        run_ours(folder, request(site, folder / "artifacts"))
    place = next(path for path in (folder / "artifacts" / NAME).iterdir() if not path.name.startswith("."))
    paths = f"{ROOT / 'roles/model_weights/files'}:{ROOT / 'collections'}"
    ours = [sys.executable, "-P", "-m", "gpu_node_weights", "verify", str(folder / "artifacts")]
    theirs = f"find . -type f -print0 | xargs -0 -P {os.cpu_count()} -n 4 sha256sum"
    best = {"ours": 1e9, "sha256sum": 1e9}
    for _ in range(arguments.rounds + 1):
        start = time.monotonic()
        tool(ours, env={**os.environ, "PYTHONPATH": paths})
        best["ours"] = min(best["ours"], time.monotonic() - start)
        start = time.monotonic()
        tool(["sh", "-c", theirs], cwd=place)
        best["sha256sum"] = min(best["sha256sum"], time.monotonic() - start)
    rate = {name: round(arguments.mib * 1.048576 / seconds) for name, seconds in best.items()}
    return {"MB_per_s": rate, "ratio": round(best["sha256sum"] / best["ours"], 3)}


def compare_resume(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    size = arguments.mib * (1 << 20) // arguments.files
    with hub_site(folder, arguments.files, size) as site:
        told = request(site, folder / "artifacts")
        process = start_ours(folder, told)
        while site.bytes_sent() < site.repository.total / 2:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        run_ours(folder, told)
        again = site.bytes_sent() - site.repository.total
    return {"bytes": site.repository.total, "fetched_again": again, "ratio": round(again / site.repository.total, 5)}


def compare_fan_out(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One node from a hub of a limited rate; then a chain of nodes, each of which sends at that rate too."""
    size = arguments.mib * (1 << 20) // arguments.files
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(hub_site(folder, arguments.files, size, arguments.rate))
        start = time.monotonic()
        run_ours(folder / "alone", request(site, folder / "alone/artifacts", streams=2))
        alone = time.monotonic() - start
        processes = []
        upstreams: list[str] = []
        start, sent = time.monotonic(), site.bytes_sent()
        for number in range(arguments.nodes):
            place = folder / f"node-{number}"
            root = place / "artifacts"
            told = request(site, root, streams=2, upstreams=list(reversed(upstreams)))
            processes.append(start_ours(place, told))
            served = root / NAME / ".served"
            served.mkdir(parents=True)
            peer = stack.enter_context(Hub(place / "none", static=served, rate=arguments.rate))
            upstreams.append(f"{peer.url}/static/{'0' * 12}")
        if any(process.wait() for process in processes):
            raise BenchError("a node of the chain failed; its last line says why")
        chain = time.monotonic() - start
        copies = (site.bytes_sent() - sent) / site.repository.total
    return {
        "one_node_s": round(alone, 1),
        f"{arguments.nodes}_nodes_s": round(chain, 1),
        "copies_from_hub": round(copies, 3),
        "ratio": round(chain / alone, 3),
    }


def main() -> int:
    """Run one comparison and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(GOALS))
    parser.add_argument("--mib", type=int, default=0, help="size of the repository (4096; fan-out 512)")
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=4, help="nodes of the chain")
    parser.add_argument("--rate", type=int, default=16 << 20, help="bytes a second of each sender in fan-out")
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="where the bytes go; its disk is measured")
    arguments = parser.parse_args()
    arguments.mib = arguments.mib or (512 if arguments.what == "fan-out" else 4096)
    runs = {"fetch": compare_fetch, "verify": compare_verify, "resume": compare_resume, "fan-out": compare_fan_out}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-weights-", dir=arguments.folder))
    try:
        result = runs[arguments.what](folder, arguments)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        forget(folder)
    print(json.dumps({"what": arguments.what, "goal": GOALS[arguments.what], **result}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
