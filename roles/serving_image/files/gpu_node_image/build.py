"""From a base to an image under its name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.image_inputs import build_jobs
from ansible_collections.serving.gpu_node.plugins.module_utils.patch_series import (
    missing_patches,
    refusals,
    try_series,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.sbom import (
    cyclonedx,
    dpkg_components,
    python_components,
)

from gpu_node_image import podman, trees
from gpu_node_image.errors import ImageError
from gpu_node_image.podman import say

# What a build takes when the base is there already: its layers are shared.
_LAYERS_GIB = 2


@dataclass(frozen=True)
class Request:
    """What an image is to be; the role writes it as JSON into the build's folder."""

    folder: Path
    ref: str
    bill: Path
    package: str
    version: str
    patches: list[str]
    labels: dict[str, str]
    base: str = ""
    wheel: str = ""
    free_gib: int = 0
    auth_file: str = ""

    @property
    def label_arguments(self) -> list[str]:
        """What gives a build its labels."""
        return [f"--label={name}={value}" for name, value in sorted(self.labels.items())]

    @property
    def series(self) -> list[tuple[str, str]]:
        """Names and texts of the patches, in order."""
        return [(name, (self.folder / "patches" / name).read_text("utf-8")) for name in self.patches]


def read_request(folder: Path) -> Request:
    """Return the request that lies in a build's folder."""
    raw: dict[str, Any] = json.loads((folder / "request.json").read_text("utf-8"))
    return Request(folder=folder, bill=Path(raw.pop("bill")), free_gib=int(raw.pop("free_gib", 0)), **raw)


def check(series: Iterable[tuple[str, str]], read: trees.Read, what: str) -> dict[str, str]:
    """Return the changed files; say of each patch whether it applies, and refuse when one does not."""
    results, changed = try_series(series, read)
    for result in results:
        say(f"patch {result.file}: {result.state}{': ' + result.why if result.why else ''}")
    problems = refusals(results, what)
    if problems:
        raise ImageError("; ".join(problems))
    return changed


def build(request: Request) -> None:
    """Build an image on a base that another made, unless it is there."""
    if podman.exists(request.ref):
        say(f"{request.ref} is there")
        return
    _require_space(request)
    environment = _environment()
    pull(request, request.base, environment, "step 1 of 4")
    say("step 2 of 4: the base and the patches")
    overlay = request.folder / "overlay"
    shutil.rmtree(overlay, ignore_errors=True)
    overlay.mkdir()
    with podman.mounted(request.base) as root:
        _lay_over(request, root, overlay)
    _open_to_all(overlay)
    file = request.folder / "image-id"
    # chroot isolation: the build also works where the node is itself a container. No tag: that is the last step's.
    argv = ["podman", "build", "--isolation", "chroot", "--pull-never", "--layers", "--jobs", environment["MAX_JOBS"]]
    argv += ["--build-arg", f"BASE={request.base}", *request.label_arguments, "--iidfile", str(file)]
    argv += ["--file", str(request.folder / "Containerfile"), str(request.folder)]
    try:
        podman.work("step 3 of 4: the layers", argv, request.folder / "build.log", environment)
    except ImageError as error:
        raise ImageError(f"the image could not be built: {error}") from None
    finish(request, file.read_text("utf-8").strip().removeprefix("sha256:"))


def _require_space(request: Request) -> None:
    store = Path(podman.answer("podman", "info", "--format", "{{.Store.GraphRoot}}"))
    need = _LAYERS_GIB if podman.exists(request.base) else request.free_gib
    free = shutil.disk_usage(store).free / 2**30
    if free < need:
        raise ImageError(
            f"too little disk for the image: {store} has {free:.1f} GiB free, {need} GiB are needed "
            "(serving_image_free_gib); remove what nothing runs (podman image prune), or keep images elsewhere "
            "(container_runtime_graphroot)"
        )


def _environment() -> dict[str, str]:
    """Return the environment of the build, with as many workers as the memory that is free now carries."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    jobs = build_jobs(available, len(os.sched_getaffinity(0)))
    say(f"{available / 2**30:.0f} GiB of memory are free: {jobs} at a time")
    # Podman is a Go program: this bounds how many layers and blocks it unpacks at a time.
    return {**os.environ, "GOMAXPROCS": str(jobs), "MAX_JOBS": str(jobs)}


def pull(request: Request, image: str, environment: dict[str, str], step: str) -> None:
    """Bring an image by its digest, unless it is there."""
    if podman.exists(image):
        say(f"{step}: {image} is there")
        return
    auth = ["--authfile", request.auth_file] if request.auth_file else []
    argv = ["podman", "pull", *auth, image]
    try:
        podman.work(f"{step}: pulling {image}", argv, request.folder / "pull.log", environment)
    except ImageError as error:
        raise ImageError(
            f"{image} could not be pulled: {error}. See that the registry still has this digest and that the node may "
            "read it (serving_image_registries); without a way there, give an archive (serving_image_archive)"
        ) from None


def _lay_over(request: Request, root: Path, overlay: Path) -> None:
    what = f"{request.package} in {request.base}"
    packages = trees.find_packages(root, request.base)
    version = trees.version_of(packages, request.package, request.base)
    if version != request.version:
        raise ImageError(
            f"{request.base} has {request.package} {version} and the profile is made for {request.version}: set "
            f"serving_image_base to an image of {request.version}"
        )
    changed = check(request.series, trees.folder_reader(packages), f"{what} (version {version})")
    target = overlay / packages.relative_to(root.resolve())
    target.mkdir(parents=True)
    for path, text in changed.items():
        compile(text, path, "exec", dont_inherit=True)
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8", newline="")
    if request.wheel:
        python = next((part for part in packages.parts if part.startswith("python3.")), "python3")
        count = trees.unpack_wheel(Path(request.wheel), target, python)
        say(f"{Path(request.wheel).name}: {count} files")


def _open_to_all(overlay: Path) -> None:
    """Make what is laid over the base readable for everybody: the copy keeps modes, also for folders of the base."""
    overlay.chmod(0o755)
    for path in overlay.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def finish(request: Request, image: str) -> None:
    """Prove that the patches are in, write the bill of materials, and give the image its name: in this order."""
    say("the last step: patches, bill of materials, name")
    missing = lacking(request, image)
    if missing:
        raise ImageError(
            f"the new image lacks the patch {missing[0]}, which was applied; nothing is tagged, build it anew"
        )
    write_bill(request, image)
    podman.answer("podman", "tag", image, request.ref)
    say(f"built {request.ref}")


def write_bill(request: Request, image: str) -> None:
    """Write what is in an image beside it."""
    with podman.mounted(image) as root:
        components = python_components(trees.all_metadata(root))
        status = root / "var/lib/dpkg/status"
        if status.is_file():
            components += dpkg_components(status.read_text("utf-8", "replace"), _distribution(root))
    bill = cyclonedx(request.ref, podman.image_id(image), components, podman.labels_of(image))
    request.bill.parent.mkdir(parents=True, exist_ok=True)
    fresh = request.bill.with_suffix(".new")
    fresh.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n", "utf-8")
    fresh.replace(request.bill)
    say(f"{len(components)} packages: {request.bill}")


def lacking(request: Request, image: str) -> list[str]:
    """Return the patches that are not in an image."""
    with podman.mounted(image) as root:
        return missing_patches(request.series, trees.folder_reader(trees.find_packages(root, request.ref)))


def _distribution(root: Path) -> str:
    for name in ("etc/os-release", "usr/lib/os-release"):
        file = root / name
        # Its link is absolute in some images and would be read from the node.
        if file.is_file() and file.resolve().is_relative_to(root.resolve()):
            fields = dict(line.split("=", 1) for line in file.read_text("utf-8").splitlines() if "=" in line)
            return fields.get("ID", "linux").strip('"')
    return "linux"


def take(request: Request) -> None:
    """Take over an image that an operator built, by its digest."""
    if not podman.exists(request.base):
        _require_space(request)
    pull(request, request.base, _environment(), "step 1 of 2")
    say("step 2 of 2: what is in it")
    try:
        for name in lacking(request, request.base):
            say(f"warning: {request.base} lacks the patch {name}; patches/series.yml says what happens without it")
    except ImageError as error:
        say(f"warning: the patches could not be looked for: {error}")
    write_bill(request, request.base)


def load(request: Request, archive: str) -> None:
    """Load an archive, and write what is in the wanted image when it holds it."""
    say(f"loading {archive}")
    podman.answer("podman", "load", "--quiet", "--input", archive)
    if podman.exists(request.ref):
        write_bill(request, request.ref)
