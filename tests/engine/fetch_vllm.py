#!/usr/bin/env python3
"""Bring the Python sources of the vLLM that the GPU profiles run, for tests that ask its own argument parser.

Prints the folder that holds them. There is no build of this version for CPUs, so the sources come out of the wheel for
CUDA: 336 MB once, 57 MB of files stay. Nothing of the wheel is run here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Test nodes see this folder (tests/host/image_cache.py).
CACHE = ROOT / ".demo" / "cache"
VERSION = "0.33.0"
# The sources are the same in the wheels of all architectures; one of them is named here, so that its hash can be, too.
SHA256 = "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"
PLATFORM = "manylinux_2_28_x86_64"
# The whole download takes a minute or so; one that says nothing for longer than this is stuck.
TIMEOUT_S = 1800


class FetchError(Exception):
    """One line for the person who called."""


def say(text: str) -> None:
    print(f"fetch_vllm: {text}", file=sys.stderr, flush=True)


def sources() -> Path:
    return CACHE / f"vllm-{VERSION}"


def download(folder: Path) -> Path:
    """Return the wheel; pip refuses one with another hash."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"]
    argv += ["--platform", PLATFORM, "--require-hashes", "--requirement", str(wanted), "--dest", str(folder)]
    log = folder / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        start = time.monotonic()
        while process.poll() is None:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                past = time.monotonic() - start
                if past > TIMEOUT_S:
                    process.kill()
                    process.wait()
                    raise FetchError(f"pip did not bring vllm {VERSION} within {TIMEOUT_S} s") from None
                say(f"  {past:.0f} s: pip downloads vllm {VERSION} (336 MB)")
    if process.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        raise FetchError(f"pip download of vllm {VERSION} failed: {lines[-1] if lines else 'no reason given'}")
    (wheel,) = folder.glob("vllm-*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> int:
    """Unpack what Python reads, which is what arguments need: modules and the package's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
        archive.extractall(folder, members)
    return len(members)


def fetch() -> Path:
    """Return the folder of the sources; an interrupted call leaves nothing behind that looks whole."""
    there = sources()
    if there.is_dir():
        return there
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".vllm-{VERSION}-") as name:
        folder = Path(name)
        say(f"downloading the wheel of vllm {VERSION} (336 MB) ...")
        wheel = download(folder)
        unpacked = folder / "sources"
        count = unpack(wheel, unpacked)
        try:
            os.rename(unpacked, there)
        except OSError:
            # Another run was quicker.
            if not there.is_dir():
                raise
            shutil.rmtree(unpacked)
        say(f"{count} files of vllm {VERSION} are in {there.relative_to(ROOT)}")
    return there


def main() -> int:
    try:
        print(fetch())
    except FetchError as error:
        print(f"fetch_vllm: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fetch_vllm: interrupted; run it again to begin anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
