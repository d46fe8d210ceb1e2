"""What the kernel's log says of a replica: faults of its GPUs, and kills for lack of memory. Pure functions."""

import json
import re
from collections.abc import Iterable, Sequence

_XID = re.compile(r"NVRM:? Xid \(PCI:([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f])?\): (\d+)", re.I)
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f])?", re.I)
_OOM = re.compile(r"oom-kill:|out of memory", re.I)
_KILLED = re.compile(r"Killed process (?:\d+ )?\(([^)]*)\)")
_TASK = re.compile(r"\btask=([^,]+)")

_XID_REMEDIES = (
    ({79}, "the card fell off the bus: power the machine off and on; look at its power, riser and cooling"),
    ({8, 61, 62, 109, 119, 120}, "the card hangs: reset it or reboot the machine, and look at its driver's version"),
    ({48, 63, 64, 92, 94, 95}, "its memory has errors: drain it, reset it, and have it looked at"),
    ({13, 31, 32, 43, 45}, "a kernel of the engine failed: look at its last lines, at the image and its kernels"),
)
OTHER_XID = "look this Xid up in NVIDIA's list"
OOM_REMEDY = (
    "raise container_memory, or lower kv_offload_gb: pinned and shared tables in host memory count against the cap too"
)
HOST_OOM_REMEDY = "the machine itself has no memory left: lower kv_offload_gb, or end what else runs on it"


def parse_messages(text: str) -> list[str]:
    """The messages of `journalctl -o json`; a line that is not understood is left out."""
    messages = []
    for line in text.splitlines():
        try:
            message = json.loads(line)["MESSAGE"]
            messages.append(bytes(message).decode(errors="replace") if isinstance(message, list) else str(message))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return messages


def _card(match: re.Match[str]) -> tuple[int, int, int]:
    return int(match[1], 16), int(match[2], 16), int(match[3], 16)


def _quoted(message: str) -> str:
    return f'"{message.strip()[:300]}"'


def _xid(message: str, cards: Iterable[tuple[int, int, int]]) -> str | None:
    match = _XID.search(message)
    if match is None or _card(match) not in cards:
        return None
    number = int(match[4])
    remedy = next((words for numbers, words in _XID_REMEDIES if number in numbers), OTHER_XID)
    return f"Xid {number} of its GPU: {_quoted(message)}: {remedy}"


def faults(messages: Sequence[str], unit: str, pci_addresses: Iterable[str]) -> list[str]:
    """A sentence for each fault that is this replica's: kernel line and remedy.

    The kernel names a card without its function (0000:01:00), and a kill by the control group, which holds the unit.
    """
    cards = {_card(match) for address in pci_addresses if (match := _ADDRESS.fullmatch(address))}
    found = []
    for place, message in enumerate(messages):
        if said := _xid(message, cards):
            found.append(said)
        if _OOM.search(message) and re.search(rf"(?<![\w@.-]){re.escape(unit)}(?![\w.])", message):
            killed = _killed_after(messages[place + 1 : place + 6]) or message
            task = _TASK.search(message)
            capped = "CONSTRAINT_MEMCG" in message or "emory cgroup out of memory" in message
            remedy = OOM_REMEDY if capped else HOST_OOM_REMEDY
            found.append(f"the kernel killed {task[1] if task else 'a process'}: {_quoted(killed)}: {remedy}")
    return found


def _killed_after(messages: Sequence[str]) -> str | None:
    """The line with the sizes, which the kernel writes right after and which does not name the control group."""
    return next((message for message in messages if _KILLED.search(message)), None)
