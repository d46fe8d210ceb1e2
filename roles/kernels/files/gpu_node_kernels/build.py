"""From sources to a wheel, in a container that has the compilers. What is under a key is whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_node_image import podman
from gpu_node_image.errors import ImageError
from gpu_node_image.podman import say

from gpu_node_kernels import container
from gpu_node_kernels.wheel import wheel_bytes

PACKAGE = "ds41k"
CONTAINER = "gpu-node-kernels-build"
# Sources, objects and the result together take a tenth of it.
NEED_GIB = 1


@dataclass(frozen=True)
class Request:
    """What is to be built: ``sources`` below ``source`` into the folder ``result``, in a container of ``image``."""

    key: str
    image: str
    target: str
    arch: str
    source: Path
    sources: list[str]
    result: Path
    wheel: str
    free_gib: int
    auth: list[str]

    @property
    def work(self) -> Path:
        """Where it is built; what an interrupted build finished is found there by the next."""
        return self.result.with_name(f".work-{self.result.name}")


def read_request(file: Path) -> Request:
    """Return the request that the role wrote."""
    raw: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return Request(**{**raw, "source": Path(raw["source"]), "result": Path(raw["result"])})


def run(file: Path) -> None:
    """Build the kernels' wheel, unless it is there."""
    request = read_request(file)
    if request.result.is_dir():
        say(f"{request.result} is there")
        return
    root = request.result.parent
    root.mkdir(parents=True, exist_ok=True)
    _require_space(root)
    podman.require_space(request.image, request.free_gib)
    podman.pull(request.image, request.auth, root / "pull.log", os.environ, "step 1 of 3")
    for other in root.glob(".work-*"):
        if other != request.work:
            shutil.rmtree(other)
    try:
        _copy_sources(request)
        _compile(request, root / "build.log")
        _pack(request)
    except ImageError:
        # What an error leaves is of no use to the next try; what an interruption leaves is.
        shutil.rmtree(request.work)
        raise
    request.work.rename(request.result)
    say(f"built {request.result / request.wheel}")


def _require_space(root: Path) -> None:
    free = shutil.disk_usage(root).free / 2**30
    if free < NEED_GIB:
        raise ImageError(
            f"too little disk for kernels: {root} has {free:.2f} GiB free, {NEED_GIB} GiB are needed; make room"
        )


def _copy_sources(request: Request) -> None:
    """Put the sources, and nothing else, where the container sees them."""
    target = request.work / "src"
    shutil.rmtree(target, ignore_errors=True)
    for name in request.sources:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(request.source / name, target / name)


def _compile(request: Request, log: Path) -> None:
    library = request.work / "lib"
    library.mkdir(exist_ok=True)
    volumes = [f"--volume={request.work / 'src'}:/src:ro", f"--volume={library}:/lib-out"]
    command = ["/bin/sh", "/src/build.sh", request.target, "--arch", request.arch, "--out", "/lib-out"]
    try:
        container.work("step 2 of 3: the compilers", CONTAINER, volumes, request.image, command, log)
    except ImageError as error:
        raise ImageError(
            f"the kernels could not be built in {request.image}: {error}. The image needs nvcc 12.9 or newer, a C++ "
            "compiler and torch: name one that has them (kernels_image), or give a wheel that was built elsewhere "
            "(serving_image_plugin_wheel)"
        ) from None


def _pack(request: Request) -> None:
    """Put sources and library into a wheel; keep that, the manifest and what is known of them."""
    say("step 3 of 3: the wheel")
    source, library = request.work / "src", request.work / "lib"
    files = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in sorted((source / PACKAGE).rglob("*"))
        if path.is_file()
    }
    files |= {
        f"{PACKAGE}/lib/{path.name}": path.read_bytes() for path in (library / "manifest.json", *library.glob("*.so"))
    }
    content = wheel_bytes(files, (source / "pyproject.toml").read_text("utf-8"), request.wheel)
    known = {
        "key": request.key,
        "image": request.image,
        "wheel": request.wheel,
        "sha256": hashlib.sha256(content).hexdigest(),
        "libraries": json.loads((library / "manifest.json").read_text("utf-8")),
    }
    shutil.rmtree(source)
    shutil.rmtree(library)
    (request.work / request.wheel).write_bytes(content)
    (request.work / "result.json").write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", "utf-8")
