"""What the journal holds of a replica's unit."""

import json
import re
from dataclasses import dataclass

from gpu_node.host import Host

_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """One message and the process that wrote it (0: unknown)."""

    pid: int
    message: str


def parse_journal(text: str) -> list[Entry]:
    """The entries of `journalctl -o json`. A line that is not understood (cut off) is left out: logs only inform."""
    entries = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
            if "PODMAN_EVENT" in value:
                # Podman notes the container's life in the unit's journal, after the engine's last words.
                continue
            message = value["MESSAGE"]
            # Messages with bytes that are no text come as lists of numbers.
            message = bytes(message).decode(errors="replace") if isinstance(message, list) else str(message)
            pid = str(value.get("_PID", "0"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        entries.append(Entry(int(pid) if pid.isascii() and pid.isdecimal() and len(pid) < 10 else 0, message))
    return entries


def own_line(index: int) -> str:
    """How the lines begin that this tool writes about a replica: the engine's share the unit's journal."""
    return f"replica {index}: "


def start_line(index: int) -> str:
    """How the line begins that this tool writes right before an engine is started."""
    return f"{own_line(index)}starting release "


def engine_lines(entries: list[Entry], index: int, count: int) -> list[str]:
    """The last lines that the engine wrote since its start, not systemd (process 1), not Podman, not this tool."""
    ours = (own_line(index), "gpu-node: ")
    starts = [place for place, entry in enumerate(entries) if entry.message.startswith(start_line(index))]
    lines = [
        entry.message.rstrip()
        for entry in (entries[starts[-1] :] if starts else entries)
        if entry.pid != 1 and not entry.message.startswith(ours) and not _CONTAINER_ID.fullmatch(entry.message.strip())
    ]
    return [line for line in lines if line][-count:]


def read_unit(host: Host, unit: str, since: float, count: int = 300) -> list[Entry]:
    """The unit's last entries since a time (seconds since the epoch); none when there is no journal."""
    done = host.run(
        ["journalctl", "-q", "-u", unit, "--since", f"@{int(since)}", "-n", str(count), "-o", "json", "--no-pager"],
        timeout_s=20,
    )
    return parse_journal(done.stdout)
