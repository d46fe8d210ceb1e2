"""A pack's own recipe: its scripts make the image and the kernels, and a last layer of ours puts them together.

The scripts are the pack's and run as root, as they would by hand: whoever configures a pack trusts it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpu_node_image import build as images
from gpu_node_image import podman
from gpu_node_image.build import Request
from gpu_node_image.errors import ImageError
from gpu_node_image.podman import say

IMAGE_SCRIPT = "docker/build.sh"
KERNELS_SCRIPT = "kernels/build.sh"
# Where the image has the recipe with its kernels.
PLACE = "opt/pack/recipe"
# How much of a script's end an operator needs to see why it failed.
_LAST_LINES = 10
# What a build takes that was interrupted: what it had pulled is there.
_REST_GIB = 2
_SHORT_NAMES = 'unqualified-search-registries = ["docker.io"]\n'


@dataclass(frozen=True)
class Engine:
    """What `docker` is in the scripts: a Docker engine with its folder, or Podman."""

    root: str = ""

    @property
    def docker(self) -> bool:
        """Whether it is a Docker engine."""
        return bool(self.root)


@dataclass
class State:
    """What builds of a pack know of earlier ones.

    ``before`` are the images by name that were there when a build began that is not finished yet (``begun``), ``made``
    is the name of the image that the pack's script made last.
    """

    file: Path
    pack: str
    begun: bool = False
    before: dict[str, str] = field(default_factory=dict)
    made: str = ""

    @classmethod
    def read(cls, file: Path, pack: str) -> State:
        """Return what is known of this pack; of another one only the name of its image."""
        try:
            known = json.loads(file.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            known = {}
        return cls(file=file, **known) if known.get("pack") == pack else cls(file, pack, made=known.get("made", ""))

    def write(self) -> None:
        """Keep it for the next build."""
        known = {"pack": self.pack, "begun": self.begun, "before": self.before, "made": self.made}
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(known), "utf-8")
        fresh.replace(self.file)


def build(request: Request) -> None:
    """Run the two scripts of a pack's recipe and put what they made under our name, unless it is there."""
    if podman.exists(request.ref):
        say(f"{request.ref} is there")
        return
    pack = Path(request.pack)
    recipe = find_recipe(pack)
    engine = find_engine()
    state = State.read(request.folder / "pack-images.json", pack.name)
    _require_space(request, engine, resumed=state.begun)
    work = request.folder / "pack"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(pack, work)
    for path in [work, *work.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    at = work / recipe.relative_to(pack)
    environment = _environment(request, engine)
    if not state.begun:
        state.begun, state.before = True, _named_images(environment)
        state.write()
    _run(request, f"step 1 of 4: {IMAGE_SCRIPT}", at, [IMAGE_SCRIPT], "pack-image.log", environment)
    name, image = _made_image(request, engine, state, environment)
    state.made = name
    state.write()
    arguments = [KERNELS_SCRIPT, request.profile]
    _run(request, f"step 2 of 4: {KERNELS_SCRIPT} {request.profile}", at, arguments, "pack-kernels.log", environment)
    base = _take_over(request, name, environment) if engine.docker else image
    _lay_out(request, recipe, at)
    images.finish(request, images.lay(request, base, environment, "step 4 of 4"))
    # The next build of this pack has nothing to go on with; it knows the image's name all the same.
    state.begun, state.before = False, {}
    state.write()
    shutil.rmtree(work)


def find_recipe(pack: Path) -> Path:
    """Return the folder of a pack that holds its scripts: `recipe/`, or the pack itself."""
    for folder in (pack / "recipe", pack):
        if all((folder / script).is_file() for script in (IMAGE_SCRIPT, KERNELS_SCRIPT)):
            return folder
    raise ImageError(
        f"{pack} holds no recipe: {IMAGE_SCRIPT} and {KERNELS_SCRIPT} are neither in it nor in its folder recipe/. See "
        "that serving_plan_sources.pack names the pack and takes them, or set serving_image_recipe: own"
    )


def find_engine() -> Engine:
    """Return the node's Docker engine, or Podman where none answers; nothing is started or stopped."""
    if not shutil.which("docker"):
        return Engine()
    # Podman's own `docker` knows no such field, and fails.
    argv = ["docker", "info", "--format", "{{.DockerRootDir}}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    root = done.stdout.strip()
    if done.returncode == 0 and root.startswith("/"):
        say(f"the node's Docker engine builds ({root})")
        return Engine(root)
    return Engine()


def _require_space(request: Request, engine: Engine, resumed: bool) -> None:
    need = min(_REST_GIB, request.free_gib) if resumed else request.free_gib
    podman.require_space("", need)
    free = shutil.disk_usage(engine.root).free / 2**30 if engine.docker else need
    if free < need:
        raise ImageError(
            f"too little disk for the pack's image: {engine.root} of the Docker engine has {free:.1f} GiB free, {need} "
            "GiB are needed (serving_image_free_gib); remove what nothing runs (docker image prune)"
        )


def _environment(request: Request, engine: Engine) -> dict[str, str]:
    """Return the scripts' environment; where `docker` is Podman, it is so for them alone."""
    environment = images.working_environment()
    # Our own program's, and none of theirs.
    environment.pop("PYTHONPATH", None)
    environment.setdefault("HOME", "/root")
    if request.auth_file:
        config = request.folder / "docker-config"
        shutil.rmtree(config, ignore_errors=True)
        config.mkdir(mode=0o700)
        (config / "config.json").symlink_to(request.auth_file)
        environment |= {"DOCKER_CONFIG": str(config), "REGISTRY_AUTH_FILE": request.auth_file}
    if engine.docker:
        return environment
    say("Podman builds: for the pack's scripts, `docker` is Podman")
    command = request.folder / "bin" / "docker"
    command.parent.mkdir(exist_ok=True)
    command.write_text('#!/bin/sh\nexec podman "$@"\n', "utf-8")
    command.chmod(0o755)
    registries = request.folder / "registries.conf"
    registries.write_text(short_names(Path("/etc/containers/registries.conf")), "utf-8")
    return environment | {
        "PATH": f"{command.parent}:{environment['PATH']}",
        # The build also works where the node is itself a container. Docker's format keeps all of a Dockerfile.
        "BUILDAH_ISOLATION": "chroot",
        "BUILDAH_FORMAT": "docker",
        "CONTAINERS_REGISTRIES_CONF": str(registries),
    }


def short_names(file: Path) -> str:
    """Return the node's settings of registries, in which a name without one is Docker Hub's, as the scripts expect."""
    text = file.read_text("utf-8") if file.is_file() else ""
    told = any(line.strip().startswith("unqualified-search-registries") for line in text.splitlines())
    return text if told else _SHORT_NAMES + text


def _run(request: Request, what: str, at: Path, arguments: list[str], log: str, environment: Mapping[str, str]) -> None:
    try:
        podman.work(what, ["bash", *arguments], request.folder / log, environment, at, _LAST_LINES)
    except ImageError as error:
        raise ImageError(f"{' '.join(arguments)} of the pack failed; its last lines:\n{error}") from None


def _docker(environment: Mapping[str, str], *arguments: str) -> str:
    """Return what the `docker` of the scripts says."""
    done = subprocess.run(
        ["docker", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise ImageError(f"`docker {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _named_images(environment: Mapping[str, str]) -> dict[str, str]:
    """Return every image that has a name, with its id."""
    lines = _docker(environment, "images", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}").splitlines()
    named = dict(line.rsplit(" ", 1) for line in lines if "<none>" not in line)
    return {name: image.removeprefix("sha256:") for name, image in named.items()}


def _made_image(request: Request, engine: Engine, state: State, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return name and id of the image that the pack's script made."""
    after = _named_images(environment)
    if request.pack_image:
        return named_image(request.pack_image, after)
    # To Podman, what has no registry is localhost's: all else was pulled.
    fresh = {
        name: image
        for name, image in after.items()
        if state.before.get(name) != image and (engine.docker or name.startswith("localhost/"))
    }
    made = state.made if state.made in after else ""
    layers: dict[str, list[str]] = {}
    pulled = set()
    for image in {*fresh.values(), *([after[made]] if made else [])}:
        found = json.loads(_docker(environment, "image", "inspect", image))[0]
        layers[image] = list((found.get("RootFS") or {}).get("Layers") or [])
        if engine.docker and found.get("RepoDigests"):
            pulled.add(image)
    name = choose_image(fresh, layers, pulled, made)
    return name, after[name]


def named_image(wanted: str, there: Mapping[str, str]) -> tuple[str, str]:
    """Return full name and id of the image that the operator named, among those that are there.

    :param wanted: a name, with or without its tag; Podman puts `localhost/` before one that has no registry.
    """
    tagged = wanted if ":" in wanted.rpartition("/")[2] else f"{wanted}:latest"
    for name in (tagged, f"localhost/{tagged}"):
        if name in there:
            return name, there[name]
    raise ImageError(
        f"serving_image_pack_image: {IMAGE_SCRIPT} of the pack made no image {wanted}; there are now "
        f"{', '.join(sorted(there)) or 'none'}"
    )


def choose_image(fresh: Mapping[str, str], layers: Mapping[str, list[str]], pulled: Iterable[str], made: str) -> str:
    """Return the name of the one image that a script made.

    :param fresh: ids by name of what appeared or changed while it ran.
    :param layers: the layers of these ids and of the image made before; what one of them is built on was pulled, or is
        a step on the way.
    :param pulled: ids that came from a registry, as far as it shows: some engines say so of what they built, too.
    :param made: name of the image that was made before, empty when there is none. Built again with the same result
        (perhaps for other kernels), it neither appears nor changes.
    :raises ImageError: when it is none, or more than one.
    """
    ids = [image for image in dict.fromkeys(fresh.values()) if not _is_below(layers[image], layers.values())]
    built = [image for image in ids if image not in set(pulled)]
    ids = built or ids
    if len(ids) == 1 and (built or not made or made in fresh):
        return min(name for name, image in fresh.items() if image == ids[0])
    if not ids and made:
        return made
    names = sorted(name for name, image in fresh.items() if image in ids)
    seen = f"made or pulled {', '.join(names)}" if names else "made no image with a name, or none that changed"
    raise ImageError(
        f"{IMAGE_SCRIPT} of the pack {seen}; set serving_image_pack_image to the name of the one that replicas run"
    )


def _is_below(layers: list[str], others: Iterable[list[str]]) -> bool:
    return any(len(other) > len(layers) and other[: len(layers)] == layers for other in others)


def _take_over(request: Request, name: str, environment: Mapping[str, str]) -> str:
    """Bring an image of the Docker engine to Podman, and return its id there."""
    # Not `podman pull docker-daemon:`, which older versions of Podman speak too old a dialect for.
    argv = ["bash", "-o", "pipefail", "-c", 'docker save "$1" | podman load', "-", name]
    log = request.folder / "pack-take.log"
    podman.work(f"step 3 of 4: {name} from Docker to Podman", argv, log, environment)
    loaded = [line for line in log.read_text("utf-8").splitlines() if line.startswith("Loaded image")]
    if not loaded:
        raise ImageError(f"{name} did not come from Docker to Podman: {log}")
    return podman.image_id(loaded[-1].partition(": ")[2].split(",")[0])


def _lay_out(request: Request, recipe: Path, at: Path) -> None:
    """Put the recipe and the kernels that its script made where the layer takes them from."""
    kernels = new_libraries(recipe, at)
    if not kernels:
        raise ImageError(
            f"{KERNELS_SCRIPT} {request.profile} of the pack made no library below {at}; its log: "
            f"{request.folder / 'pack-kernels.log'}"
        )
    say(f"{len(kernels)} kernel libraries: {', '.join(Path(name).name for name in kernels)}")
    overlay = request.folder / "overlay"
    shutil.rmtree(overlay, ignore_errors=True)
    # The recipe's own files, too: what hooks its kernels into the engine lies beside them.
    own = [path.relative_to(recipe).as_posix() for path in sorted(recipe.rglob("*")) if path.is_file()]
    for name in dict.fromkeys([*own, *kernels]):
        target = overlay / PLACE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile((at if name in kernels else recipe) / name, target)


def new_libraries(recipe: Path, at: Path) -> list[str]:
    """Return the libraries below ``at`` that the recipe does not have, or has with other bytes, by relative path."""
    found = []
    for path in sorted(at.rglob("*.so")):
        name = path.relative_to(at).as_posix()
        if path.is_file() and path.resolve().is_relative_to(at.resolve()):
            own = recipe / name
            if not own.is_file() or own.read_bytes() != path.read_bytes():
                found.append(name)
    return found
