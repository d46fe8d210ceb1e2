"""Artifacts that come from this node itself: a folder, an archive, or the demo's generated model."""

from __future__ import annotations

import errno
import fcntl
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import BLOCK, taken_below
from ansible_collections.serving.gpu_node.plugins.module_utils.listing import take
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import MANIFEST, path_problem
from ansible_collections.serving.gpu_node.plugins.module_utils.tiny_model import model_files

from gpu_node_weights.errors import WeightsError

_FICLONE = 0x40049409
Tick = Callable[[int], None]
# What reading a damaged archive raises; errors of the disk have a number.
_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


def source_folder(source: dict[str, Any]) -> dict[str, Path]:
    """Return the files that a source of type ``path`` takes from its folder, by relative path.

    :raises WeightsError: when there is no such folder, nothing to take in it, or a name that cannot be an artifact's.
    """
    path = source["path"]
    folder = Path(path)
    if not folder.is_dir():
        raise WeightsError(f"{path} is no folder on this node; mount it, or correct the source's path")
    links = [
        Path(base) / name for base, names, _ in os.walk(folder) for name in names if (Path(base) / name).is_symlink()
    ]
    if links:
        raise WeightsError(
            f"{links[0]} is a link to a folder, whose files would be missed; give a folder without such links"
        )
    files = {name: file for name, file in taken_below(source).items() if not name.startswith(".cache/")}
    if not files:
        narrowed = " that its include and exclude take" if source.get("include") or source.get("exclude") else ""
        raise WeightsError(f"{path} holds no file{narrowed}; correct the source's path")
    problems = [problem for problem in map(path_problem, files) if problem]
    if problems:
        raise WeightsError(f"{path}: {'; '.join(problems[:5])}")
    return files


def leaves_folder(path: str, files: dict[str, Path]) -> list[str]:
    """Return the files that are links out of their folder, which a container cannot follow."""
    folder = Path(path).resolve()
    return [name for name, file in files.items() if not file.resolve().is_relative_to(folder)]


def copy_file(source: Path, part: Path, tick: Tick) -> None:
    """Copy a file, sharing its blocks where the file system can; an unfinished part is gone on with."""
    part.parent.mkdir(parents=True, exist_ok=True)
    size = source.stat().st_size
    with source.open("rb", buffering=0) as taken, part.open("r+b" if part.exists() else "w+b", buffering=0) as given:
        start = os.fstat(given.fileno()).st_size
        if start == 0 and size and _share_blocks(taken, given):
            tick(size)
            return
        start = start if start <= size else 0
        given.truncate(start)
        given.seek(start)
        taken.seek(start)
        tick(start)
        while block := taken.read(BLOCK):
            given.write(block)
            tick(len(block))


def _share_blocks(taken: IO[bytes], given: IO[bytes]) -> bool:
    try:
        fcntl.ioctl(given.fileno(), _FICLONE, taken.fileno())
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM):
            return False
        raise
    return True


def archive_members(source: dict[str, Any], skip: Callable[[str, int], bool]) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, size and stream of every file that a source of type ``archive`` takes, without those to skip.

    :raises WeightsError: when it is no archive, ends early, or names a path outside an artifact.
    """
    path = source["path"]
    if not Path(path).is_file():
        raise WeightsError(f"{path} is no file on this node; copy it there, or correct the source's path")
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isdir() or name == MANIFEST:
                    continue
                problem = path_problem(name)
                if problem or not member.isfile():
                    raise WeightsError(f"{path} cannot be unpacked: {problem or f'{name!r} is no ordinary file'}")
                stream = archive.extractfile(member)
                taken = take(source, [name]).get(name)
                if stream and taken and not skip(taken, member.size):
                    yield taken, member.size, stream
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise WeightsError(f"{path} is damaged, or no tar archive: {error}; copy it again") from error


def write_member(archive: str, stream: IO[bytes], part: Path, tick: Tick) -> None:
    """Write a file of an archive.

    :raises WeightsError: when the archive ends early or is damaged.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as given:
        while block := _read_member(archive, stream):
            given.write(block)
            tick(len(block))


def _read_member(archive: str, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(BLOCK)
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise WeightsError(f"{archive} is damaged: {error}; copy it again") from error


def write_generated(seed: int, parts: Path, tick: Tick) -> list[str]:
    """Write the tiny model's files as parts; return their names."""
    files = model_files(seed)
    for name, data in files.items():
        part = parts / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        tick(len(data))
    return list(files)


def remove_tree(folder: Path) -> None:
    """Remove a folder, also one that was made read-only."""
    if folder.is_dir() and not folder.is_symlink():
        for base, _, _ in os.walk(folder):
            Path(base).chmod(0o755)
        shutil.rmtree(folder)
