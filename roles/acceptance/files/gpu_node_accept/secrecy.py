"""Where the engines' key may have got to although others can read it there. Verdicts are pure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gpu_node_accept.checks import Outcome, failed, passed

PROCESSES, CACHES = Path("/proc"), Path("/var/lib/gpu-node/cache")
# An engine's cache keeps what its compiled code depends on as small texts; kernels and graphs are larger.
TEXT_BYTES = 1 << 20


def key_kept(key: str, texts: Iterable[tuple[str, bytes]]) -> Outcome:
    """The key is in none of the texts.

    :param texts: the name of a place, and what is there.
    """
    wanted = "the key in none of the engine's log, caches and command lines"
    found, count = [], 0
    for name, text in texts:
        count += 1
        if key.encode() in text:
            found.append(name)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        remedy = "take an image whose vLLM keeps it to itself, then make a new key (docs/operate.md)"
        return failed(f"it is in {', '.join(found[:3])}{more}", wanted, remedy)
    return passed(f"{count} places looked at", wanted)


def command_lines(folder: Path = PROCESSES) -> Iterable[tuple[str, bytes]]:
    """The command line of each process; everyone on the node can read them."""
    for file in sorted(folder.glob("[0-9]*/cmdline")):
        try:
            yield f"the command line of process {file.parent.name}", file.read_bytes()
        except OSError:  # it has ended
            continue


def cached_texts(index: int, folder: Path = CACHES) -> Iterable[tuple[str, bytes]]:
    """The small files of a replica's cache."""
    for file in sorted((folder / str(index)).rglob("*")):
        try:
            if file.is_file() and file.stat().st_size <= TEXT_BYTES:
                yield str(file), file.read_bytes()
        except OSError:  # the engine took it away meanwhile
            continue
