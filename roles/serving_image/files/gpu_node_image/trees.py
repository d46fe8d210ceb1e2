"""Where vLLM lies: in an image's file system, in a folder of packages, or in a wheel."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from gpu_node_image.errors import ImageError

# Of Debian's and Ubuntu's Python, of Python's own images, and of a virtual environment.
_PLACES = (
    "usr/local/lib/python3*/dist-packages",
    "usr/local/lib/python3*/site-packages",
    "usr/lib/python3*/site-packages",
    "usr/lib/python3/dist-packages",
    "opt/*/lib/python3*/site-packages",
)
Read = Callable[[str], "str | None"]


def find_packages(root: Path, what: str) -> Path:
    """Return the folder of an image that holds vLLM.

    :param root: where the image's file system is.
    :param what: the image, for the error.
    """
    found = sorted({path.parent.resolve() for place in _PLACES for path in root.glob(f"{place}/vllm") if path.is_dir()})
    if len(found) != 1:
        seen = ", ".join(f"/{path.relative_to(root.resolve())}" for path in found) or "none of " + ", ".join(_PLACES)
        raise ImageError(f"{what} must have vLLM once; it is in {seen}. Take an image of vLLM as serving_image_base")
    if not found[0].is_relative_to(root.resolve()):
        raise ImageError(f"{what}: the folder of vLLM is a link out of the image, to {found[0]}; take another base")
    return found[0]


def metadata_of(packages: Path) -> list[str]:
    """Return the METADATA texts of the distributions in a folder."""
    return [path.read_text("utf-8", "replace") for path in sorted(packages.glob("*.dist-info/METADATA"))]


def all_metadata(root: Path) -> list[str]:
    """Return the METADATA texts of every distribution of an image."""
    folders = sorted({path.resolve() for place in _PLACES for path in root.glob(place)})
    return [text for folder in folders if folder.is_relative_to(root.resolve()) for text in metadata_of(folder)]


def version_of(packages: Path, distribution: str, what: str) -> str:
    """Return a distribution's version, without a build's own suffix (``0.33.0+cu130``)."""
    for text in metadata_of(packages):
        head = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].split("\n") if ": " in line)
        if head.get("Name", "").lower().replace("_", "-") == distribution:
            return head.get("Version", "").partition("+")[0]
    raise ImageError(f"{what} has no metadata of {distribution}, so its version is unknown; take another base")


def folder_reader(packages: Path) -> Read:
    """Return how a file of a folder is read; a link is none of the files that a patch may change."""

    def read(path: str) -> str | None:
        file = packages / path
        if not file.is_file() or file.resolve() != packages.resolve() / path:
            return None
        with file.open(encoding="utf-8", newline="") as stream:
            return stream.read()

    return read


def wheel_reader(wheel: Path) -> Read:
    """Return how a file of a wheel is read."""

    def read(path: str) -> str | None:
        with zipfile.ZipFile(wheel) as archive:
            try:
                return archive.read(path).decode()
            except KeyError:
                return None

    return read


def unpack_wheel(wheel: Path, folder: Path, python: str) -> int:
    """Put a wheel's files where an installation would, and return how many there are.

    :param python: name of the folder of the base's Python (``python3.12``).
    """
    tag = wheel.name.split("-")[-3]
    own = python.replace("python", "cp").replace(".", "")
    if not {"py3", own} & set(tag.split(".")) and "abi3" not in wheel.name.split("-")[-2]:
        raise ImageError(f"{wheel.name} is for {tag} and the base has {python}: build the wheel for that, or with abi3")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for name in names:
            if name.startswith("/") or ".." in name.split("/") or ".data/" in name:
                raise ImageError(f"{wheel.name} holds {name}: only files for the folder of packages can be put in")
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
    return len(names)
