"""What can be told wrong about an artifact's files without knowing what they should be.

A listing without hashes (a folder, an archive) says nothing of a shard that was cut short, or of a repository that was
cloned without its large files. Both would fail much later, in the engine.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/v1"
# A header has a few hundred bytes for each tensor.
_LONGEST_HEADER = 512 * 1024 * 1024


def content_problems(files: dict[str, Path]) -> list[str]:
    """Return a sentence for each file that cannot be right.

    :param files: an artifact's files on the disk, by relative path.
    """
    problems = []
    for path, file in sorted(files.items()):
        problem = _pointer_problem(file)
        if not problem and path.endswith(".safetensors"):
            problem = _safetensors_problem(file)
        if not problem and path.endswith(".safetensors.index.json"):
            problem = _index_problem(path, file, files)
        if problem:
            problems.append(f"{path} {problem}")
    return problems


def _pointer_problem(file: Path) -> str:
    if file.stat().st_size > 1024:
        return ""
    if not file.read_bytes().startswith(_POINTER):
        return ""
    return "is a pointer of git LFS, not the file itself; fetch it with `git lfs pull`"


def _safetensors_problem(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _LONGEST_HEADER or 8 + length > size:
            return f"has {size} bytes and no safetensors header in them: it was cut short, or is another kind of file"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            wanted = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "has a safetensors header that cannot be read"
    return f"has {size} bytes, and its header lists {wanted}: it was cut short" if size != wanted else ""


def _index_problem(path: str, file: Path, files: dict[str, Path]) -> str:
    folder = path.rsplit("/", 1)[0] + "/" if "/" in path else ""
    try:
        shards = {folder + shard for shard in json.loads(file.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is no index of safetensors files"
    lacking = sorted(shards - set(files))
    if not lacking:
        return ""
    named = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
    return f"lists files that are not there: {named}; look at include and exclude"
