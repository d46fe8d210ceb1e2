"""From a base to an image under its name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.image_inputs import LABEL, build_jobs
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

# Of every file that is laid over a base: the same inputs then give the same image, byte for byte, on every node.
_MADE = 315532800
# What registries answer about an image that nobody has pushed yet.
_NOT_THERE = re.compile(r"manifest unknown|name unknown|not found", re.IGNORECASE)


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
    # Of an image that a pack's own recipe makes: the pack's folder, the recipe's argument, and the image's name there.
    pack: str = ""
    profile: str = ""
    pack_image: str = ""
    # Where the fleet keeps its image; empty when nodes make it themselves or take it from each other.
    shared: str = ""

    @property
    def label_arguments(self) -> list[str]:
        """What gives a build its labels."""
        return [f"--label={name}={value}" for name, value in sorted(self.labels.items())]

    @property
    def auth(self) -> list[str]:
        """What tells Podman the credentials of registries."""
        return ["--authfile", self.auth_file] if self.auth_file else []

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
    podman.require_space(request.base, request.free_gib)
    environment = working_environment()
    _pull(request, environment, "step 1 of 4")
    say("step 2 of 4: the base and the patches")
    overlay = request.folder / "overlay"
    shutil.rmtree(overlay, ignore_errors=True)
    overlay.mkdir()
    with podman.mounted(request.base) as root:
        _lay_over(request, root, overlay)
    finish(request, lay(request, request.base, environment, "step 3 of 4"))


def lay(request: Request, base: str, environment: Mapping[str, str], step: str) -> str:
    """Lay what is in the build's ``overlay/`` over a base, with the labels; return the image, which has no name yet."""
    _open_to_all(request.folder / "overlay")
    file = request.folder / "image-id"
    # chroot isolation: the build also works where the node is itself a container. No tag: that is the last step's.
    argv = ["podman", "build", "--isolation", "chroot", "--pull-never", "--layers", "--jobs", environment["MAX_JOBS"]]
    argv += [
        "--timestamp",
        str(_MADE),
        "--build-arg",
        f"BASE={base}",
        *request.label_arguments,
        "--iidfile",
        str(file),
    ]
    argv += ["--file", str(request.folder / "Containerfile"), str(request.folder)]
    try:
        podman.work(f"{step}: the layers", argv, request.folder / "build.log", environment)
    except ImageError as error:
        raise ImageError(f"the image could not be built: {error}") from None
    return file.read_text("utf-8").strip().removeprefix("sha256:")


def working_environment() -> dict[str, str]:
    """Return the environment of the build, with as many workers as the memory that is free now carries."""
    lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    jobs = build_jobs(available, len(os.sched_getaffinity(0)))
    say(f"{available / 2**30:.0f} GiB of memory are free: {jobs} at a time")
    # Podman is a Go program: this bounds how many layers and blocks it unpacks at a time.
    return {**os.environ, "GOMAXPROCS": str(jobs), "MAX_JOBS": str(jobs)}


def _pull(request: Request, environment: Mapping[str, str], step: str) -> None:
    podman.pull(request.base, request.auth, request.folder / "pull.log", environment, step)


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
    if not request.patches:
        return []
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
        podman.require_space(request.base, request.free_gib)
    _pull(request, working_environment(), "step 1 of 2")
    say("step 2 of 2: what is in it")
    try:
        for name in lacking(request, request.base):
            say(f"warning: {request.base} lacks the patch {name}; patches/series.yml says what happens without it")
    except ImageError as error:
        say(f"warning: the patches could not be looked for: {error}")
    write_bill(request, request.base)


def load(request: Request, archive: str) -> None:
    """Load an archive, and take over the wanted image when it holds it."""
    say(f"loading {archive}")
    podman.answer("podman", "load", "--quiet", "--input", archive)
    if podman.exists(request.ref):
        _accept(request, request.ref, archive)


def save(request: Request, folder: Path) -> None:
    """Write an archive of the image for other nodes, unless it is there; half of one is never under its name."""
    archive = folder / "image.tar"
    if archive.exists():
        say(f"{archive} is there")
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    need, free = podman.size_of(request.ref) / 2**30, shutil.disk_usage(folder).free / 2**30
    if free < need:
        raise ImageError(
            f"too little disk to give the image to other nodes: {folder} has {free:.1f} GiB free, {need:.1f} GiB are "
            "needed; make room, or name a registry (serving_image_registry)"
        )
    half = folder / ".image.tar"
    # This format keeps an image's id, which nodes compare.
    argv = ["podman", "save", "--format", "oci-archive", "--output", str(half), request.ref]
    podman.work(f"an archive of {request.ref}, {need:.1f} GiB", argv, request.folder / "save.log", os.environ)
    half.replace(archive)


def fetch(request: Request) -> None:
    """Take the image from the fleet's registry, if somebody has pushed it."""
    argv = ["podman", "pull", *request.auth, request.shared]
    try:
        podman.work(f"pulling {request.shared}", argv, request.folder / "pull.log", working_environment())
    except ImageError as error:
        if _NOT_THERE.search(str(error)):
            say(f"{request.shared} is not there yet")
            return
        raise ImageError(
            f"{request.shared} could not be pulled: {error}. See that the node reaches this registry and may read it "
            "(serving_image_registry, serving_image_registries)"
        ) from None
    _accept(request, request.shared, request.shared)
    podman.answer("podman", "tag", request.shared, request.ref)


def push(request: Request) -> None:
    """Give the image to the fleet's registry."""
    argv = ["podman", "push", *request.auth, request.ref, request.shared]
    try:
        podman.work(f"pushing {request.shared}", argv, request.folder / "push.log", working_environment())
    except ImageError as error:
        raise ImageError(
            f"{request.shared} could not be pushed: {error}. See that the node reaches this registry and may write to "
            "it (serving_image_registry, serving_image_registries)"
        ) from None


def _accept(request: Request, image: str, where: str) -> None:
    """Refuse an image that another hand made under our name; write what is in it."""
    name = f"{LABEL}.image.key"
    if (found := podman.labels_of(image).get(name)) != request.labels[name]:
        raise ImageError(
            f"{where} holds an image that is not {request.ref}: its label {name} is {found or 'missing'}, not "
            f"{request.labels[name]}; remove it there, and the image is made anew"
        )
    if missing := lacking(request, image):
        raise ImageError(
            f"{where} holds an image under {request.ref} that lacks the patch {missing[0]}; remove it there"
        )
    write_bill(request, image)
