# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""A node's artifacts on its disk: what is complete, what was hashed when, what a fetch can take from what is there.

Unlike its neighbours it reads and writes files. The modules and the node's fetching program share it, so that both mean
the same by "complete".

Below the root, for an artifact NAME::

    NAME/DIGEST               complete: read-only files and their manifest; a link to a folder that was adopted
    NAME/.adopted/DIGEST.json that folder's manifest
    NAME/.sources/KEY.json    which source gave which artifact
    NAME/.verified/DIGEST.json what was hashed last, with each file's size, modification time and inode
    NAME/.incoming/KEY/       what is being fetched; only verified files are in its files/
    NAME/DIGEST.bad-N         moved aside because its bytes were wrong
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.listing import take
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import (
    MANIFEST,
    SHORT,
    ManifestError,
    parse_manifest,
)

BLOCK = 4 * 1024 * 1024
_DIGEST_FOLDER = re.compile(rf"[0-9a-f]{{{SHORT}}}")
# size, modification time in ns, inode
Stamp = list[int]


@dataclass(frozen=True)
class Sums:
    """What hashing a file gave: ``git_sha1`` is git's name of such a file, empty when it was not asked for."""

    size: int
    sha256: str
    git_sha1: str = ""


def hash_file(path: Path, git: bool = False, tick: Callable[[], None] | None = None) -> Sums:
    """Hash a file on the disk; ``tick`` is called after each block."""
    sha256, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        expected = os.fstat(stream.fileno()).st_size
        # git hashes a header with the size before the content
        sha1 = hashlib.sha1(b"blob %d\0" % expected, usedforsecurity=False) if git else None
        block = memoryview(bytearray(min(BLOCK, max(expected, 1))))
        while count := stream.readinto(block):
            size += count
            sha256.update(block[:count])
            if sha1:
                sha1.update(block[:count])
            if tick:
                tick()
    return Sums(size, sha256.hexdigest(), sha1.hexdigest() if sha1 else "")


def cores() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def hash_files(paths: Iterable[Path], tick: Callable[[], None] | None = None) -> dict[Path, Sums]:
    """Hash files on every core at once, the largest first; hashing runs outside of Python's lock."""
    ordered = sorted(paths, key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(cores()) as pool:
        return dict(zip(ordered, pool.map(lambda path: hash_file(path, tick=tick), ordered), strict=True))


def stamp(path: Path) -> Stamp:
    """Return what tells whether a file is still the one that was hashed."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def files_below(folder: Path) -> dict[str, Path]:
    """Return every file below a folder but its manifest, by relative path; links to files count as files."""
    found = {}
    for base, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(base) / name
            relative = path.relative_to(folder).as_posix()
            if relative != MANIFEST and path.is_file():
                found[relative] = path
    return found


def taken_below(source: dict[str, Any]) -> dict[str, Path]:
    """Return the files that a source of type ``path`` takes, by relative path."""
    found = files_below(Path(source["path"]))
    return {name: found[name] for name in take(source, list(found))}


def write_json(path: Path, value: Any) -> None:
    """Write a file so that it is on the disk whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    fresh.chmod(0o444)
    fresh.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's mapping; an empty one when there is none or it is damaged, which only costs hashing again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def seen_at_source(source: dict[str, Any]) -> dict[str, list[int]]:
    """Return what tells whether a folder or archive on this node has changed; empty for other sources, or when gone."""
    if source["type"] not in ("path", "archive"):
        return {}
    path = Path(source["path"])
    files = taken_below(source) if path.is_dir() else {"": path} if path.is_file() else {}
    return {name: stamp(file)[:2] for name, file in files.items()}


class Store:
    """The artifacts of one name."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.base = root / name

    def folder(self, digest: str) -> Path:
        return self.base / digest[:SHORT]

    def incoming(self, key: str) -> Path:
        return self.base / ".incoming" / key

    def manifest_path(self, folder: Path) -> Path:
        return self.base / ".adopted" / f"{folder.name}.json" if folder.is_symlink() else folder / MANIFEST

    def manifest(self, folder: Path) -> dict[str, Any]:
        """Return a complete artifact's manifest.

        :raises ManifestError: when it has none, or one that is not its own.
        """
        path = self.manifest_path(folder)
        try:
            manifest = parse_manifest(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise ManifestError(f"{path} cannot be read: {error.strerror}") from error
        except ManifestError as error:
            raise ManifestError(f"{path}: {error}") from error
        if folder.name != manifest["digest"][:SHORT]:
            raise ManifestError(f"{folder} holds the artifact with digest {manifest['digest'][:SHORT]}")
        return manifest

    def recorded(self, key: str) -> dict[str, Any]:
        """Return what a source gave, as it was recorded; empty when it gave nothing yet."""
        return read_json(self.base / ".sources" / f"{key}.json")

    def record(self, key: str, value: dict[str, Any]) -> None:
        write_json(self.base / ".sources" / f"{key}.json", value)

    def stamps(self, digest: str) -> dict[str, Stamp]:
        """Return the stamps of what was hashed last, by file."""
        record = read_json(self.base / ".verified" / f"{digest[:SHORT]}.json")
        files = record.get("files")
        return files if isinstance(files, dict) and record.get("digest") == digest else {}

    def write_stamps(self, digest: str, at: str, files: dict[str, Stamp]) -> None:
        write_json(
            self.base / ".verified" / f"{digest[:SHORT]}.json", {"digest": digest, "at": at, "files": dict(files)}
        )

    def check(
        self, folder: Path, again: bool = False, tick: Callable[[], None] | None = None
    ) -> tuple[list[str], dict[str, Stamp], dict[str, Any]]:
        """Say what is wrong with a complete artifact.

        :param again: whether to hash every file; else only one whose stamp is not that of its last hashing.
        :returns: problems (none: complete, every byte hashed on this disk), the sound files' stamps, the manifest.
        """
        try:
            manifest = self.manifest(folder)
        except ManifestError as error:
            return [str(error)], {}, {}
        known = {} if again else self.stamps(manifest["digest"])
        wanted = manifest["files"]
        found = files_below(folder)
        problems = [f"{path} is missing" for path in wanted if path not in found]
        # An adopted folder is the operator's, and may have more in it.
        if not folder.is_symlink():
            problems += [f"{path} does not belong to it" for path in found if path not in wanted]
        sound: dict[str, Stamp] = {}
        unsure = {}
        for path, entry in wanted.items():
            if path not in found:
                continue
            seen = stamp(found[path])
            if seen[0] != entry["size"]:
                problems.append(f"{path} has {seen[0]} bytes, not {entry['size']}")
            elif known.get(path) == seen:
                sound[path] = seen
            else:
                unsure[path] = seen
        sums = hash_files([found[path] for path in unsure], tick)
        for path, seen in unsure.items():
            have = sums[found[path]].sha256
            if have == wanted[path]["sha256"]:
                sound[path] = seen
            else:
                problems.append(f"{path} has SHA-256 {have}, not {wanted[path]['sha256']}")
        return problems, sound, manifest

    def move_aside(self, folder: Path) -> Path:
        """Keep a folder that is not what its name says, under another name, for whoever wants to know why."""
        number = 1
        while (aside := folder.with_name(f"{folder.name}.bad-{number}")).is_symlink() or aside.exists():
            number += 1
        if folder.is_symlink():
            # Only our link to the operator's folder.
            folder.unlink()
            return folder
        folder.rename(aside)
        return aside


def stores(root: Path) -> Iterator[Store]:
    """Yield every artifact name below the root."""
    if root.is_dir():
        for base in sorted(root.iterdir()):
            if base.is_dir() and not base.name.startswith("."):
                yield Store(root, base.name)


def complete_folders(store: Store) -> list[Path]:
    """Return an artifact's folders that are named like complete ones."""
    if not store.base.is_dir():
        return []
    return sorted(path for path in store.base.iterdir() if _DIGEST_FOLDER.fullmatch(path.name) and path.is_dir())


def reusable(root: Path, files: dict[str, dict[str, Any]]) -> dict[str, Path]:
    """Return for the files of a listing those that some complete artifact holds already, on the root's file system.

    :param files: by path ``size`` and ``sha256``; those without a SHA-256 cannot be found again.
    :returns: by path a file with the same bytes, as far as its stamp tells; the taker hashes where it must.
    """
    wanted = {(entry.get("sha256"), entry["size"]) for entry in files.values() if entry.get("sha256")}
    if not wanted:
        return {}
    at: dict[tuple[str, int], Path] = {}
    device = root.stat().st_dev if root.exists() else None
    for store in stores(root):
        for folder in complete_folders(store):
            with contextlib.suppress(ManifestError, OSError):
                manifest = store.manifest(folder)
                stamps = store.stamps(manifest["digest"])
                for path, entry in manifest["files"].items():
                    identity = (entry["sha256"], entry["size"])
                    if identity in wanted and identity not in at:
                        file = folder / path
                        # A foreign folder's files are not ours to link to.
                        if not folder.is_symlink() and stamps.get(path) == stamp(file) and file.stat().st_dev == device:
                            at[identity] = file
    return {
        path: at[(entry["sha256"], entry["size"])]
        for path, entry in files.items()
        if (entry.get("sha256"), entry["size"]) in at
    }


def begun(incoming: Path) -> dict[str, int]:
    """Return by path how many bytes of an unfinished artifact are on the disk."""
    found: dict[str, int] = {}
    parts = incoming / "parts"
    if parts.is_dir():
        for path in (path for path in parts.rglob("*.part") if path.is_file()):
            found[path.relative_to(parts).as_posix().removesuffix(".part")] = path.stat().st_size
    files = incoming / "files"
    if files.is_dir():
        found |= {path: file.stat().st_size for path, file in files_below(files).items()}
    return found


def needed_bytes(root: Path, incoming: Path, files: dict[str, dict[str, Any]]) -> tuple[int, int, list[str]]:
    """Return what a listing still takes on the disk: bytes to fetch, bytes reused by hard link, files to fetch."""
    links = reusable(root, files)
    there = begun(incoming)
    lacking = [path for path in files if path not in links and there.get(path, 0) < files[path]["size"]]
    fetch = sum(files[path]["size"] - there.get(path, 0) for path in lacking)
    return fetch, sum(files[path]["size"] for path in links), lacking


def free_bytes(root: Path) -> int:
    """Return the free bytes of the file system that holds, or will hold, the root."""
    while not root.exists():
        root = root.parent
    found = os.statvfs(root)
    return found.f_bavail * found.f_frsize
