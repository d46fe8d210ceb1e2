"""Podman, with a line now and then while it works."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_node_image.errors import ImageError

_EVERY_S = 15.0
_START = time.monotonic()


def say(text: str) -> None:
    """Print a line that the play shows."""
    print(f"[{time.monotonic() - _START:.0f} s] {text}", flush=True)


def answer(*argv: str) -> str:
    """Return what a quick command prints."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise ImageError(f"`{' '.join(argv)}` failed: {_last(done.stderr)}")
    return done.stdout.strip()


def exists(image: str) -> bool:
    """Return whether Podman has an image."""
    return subprocess.run(["podman", "image", "exists", image], check=False).returncode == 0


def image_id(image: str) -> str:
    """Return an image's 64 hex digits."""
    return str(json.loads(answer("podman", "image", "inspect", image))[0]["Id"])


def labels_of(image: str) -> dict[str, str]:
    """Return an image's labels."""
    found: dict[str, Any] = json.loads(answer("podman", "image", "inspect", image))[0]
    return dict(found.get("Labels") or {})


@contextlib.contextmanager
def mounted(image: str) -> Iterator[Path]:
    """Give the file system of an image, to read."""
    root = Path(answer("podman", "image", "mount", image))
    try:
        yield root
    finally:
        subprocess.run(["podman", "image", "unmount", image], check=False, capture_output=True)


def work(what: str, argv: list[str], log: Path, environment: Mapping[str, str]) -> None:
    """Run a long command and say every 15 seconds how far it is.

    :raises ImageError: with its last line when it fails.
    """
    say(what)
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(environment))
        while True:
            try:
                code = process.wait(_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                say(f"{what}: {_last(log.read_text('utf-8', 'replace'))[:100]}")
    if code != 0:
        raise ImageError(f"{_last(log.read_text('utf-8', 'replace'))} (exit code {code}; all of it: {log})")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return lines[-1] if lines else "it said nothing"
