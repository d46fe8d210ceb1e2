"""Podman, with a line now and then while it works."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpu_node_image.errors import ImageError

_EVERY_S = 15.0
# What a build takes when its base is there already: the layers are shared.
_LAYERS_GIB = 2
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


def size_of(image: str) -> int:
    """Return an image's bytes."""
    return int(json.loads(answer("podman", "image", "inspect", image))[0]["Size"])


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


def require_space(base: str, free_gib: int) -> None:
    """See that there is room for what is built on a base, and for the base unless it is there.

    :param base: empty when it is not known.
    :param free_gib: GiB that must be free where Podman keeps images before the base is pulled.
    """
    store = Path(answer("podman", "info", "--format", "{{.Store.GraphRoot}}"))
    need = _LAYERS_GIB if base and exists(base) else free_gib
    free = shutil.disk_usage(store).free / 2**30
    if free < need:
        raise ImageError(
            f"too little disk for the image: {store} has {free:.1f} GiB free, {need} GiB are needed "
            "(serving_image_free_gib); remove what nothing runs (podman image prune), or keep images elsewhere "
            "(container_runtime_graphroot)"
        )


def pull(image: str, auth: list[str], log: Path, environment: Mapping[str, str], step: str) -> None:
    """Bring an image by its digest, unless it is there.

    :param auth: what tells Podman the credentials of registries.
    """
    if exists(image):
        say(f"{step}: {image} is there")
        return
    try:
        work(f"{step}: pulling {image}", ["podman", "pull", *auth, image], log, environment)
    except ImageError as error:
        raise ImageError(
            f"{image} could not be pulled: {error}. See that the registry still has this digest and that the node may "
            "read it (serving_image_registries); without a way there, give an archive (serving_image_archive)"
        ) from None


def work(
    what: str, argv: list[str], log: Path, environment: Mapping[str, str], folder: Path | None = None, lines: int = 1
) -> None:
    """Run a long command and say every 15 seconds how far it is.

    :param folder: where it is run; None for where this program is.
    :raises ImageError: with its last ``lines`` when it fails.
    """
    say(what)
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(environment), cwd=folder
        )
        while True:
            try:
                code = process.wait(_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                say(f"{what}: {_last(log.read_text('utf-8', 'replace'))[:100]}")
    if code != 0:
        raise ImageError(f"{_last(log.read_text('utf-8', 'replace'), lines)} (exit code {code}; all of it: {log})")


def _last(text: str, count: int = 1) -> str:
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return "\n".join(lines[-count:]) or "it said nothing"
