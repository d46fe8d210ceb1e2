# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a node's hardware looks like, read from the text of sysfs and /proc.

Pure functions only: the module ``gpu_topology`` does the reading.
"""

from __future__ import annotations

import re
from typing import Any

NVIDIA_VENDOR = "0x10de"
# PCI base class 03 is a display controller: 0300 a VGA one, 0302 a 3D one (server cards without outputs).
GPU_CLASSES = ("0x0300", "0x0302")


class TopologyError(ValueError):
    """A text that sysfs or /proc should have produced and did not."""


def parse_cpu_list(text: str) -> list[int]:
    """Turn the kernel's list format into sorted CPU (or node) numbers.

    :param text: for example ``0-3,8,10-11``; blank means none. Interleaved numbering (``0,8,16``) is normal.
    :raises TopologyError: when the text is not in the kernel's list format.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        item = part.strip()
        if not item:
            continue
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", item)
        if match is None:
            raise TopologyError(f"'{item}' in the CPU list '{text.strip()}' is neither a number nor a range like 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise TopologyError(f"the range '{item}' in the CPU list '{text.strip()}' ends before it begins")
        if last - first > 65535:
            raise TopologyError(f"the range '{item}' in the CPU list '{text.strip()}' has more than 65536 members")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def format_cpu_list(numbers: list[int]) -> str:
    """Turn CPU numbers into the kernel's list format, the inverse of :func:`parse_cpu_list`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_meminfo_total(text: str) -> int:
    """Return the bytes of ``MemTotal`` in ``/proc/meminfo`` or a NUMA node's ``meminfo``.

    :raises TopologyError: when there is no such line.
    """
    match = re.search(r"\bMemTotal:\s+([0-9]{1,15}) kB", text)
    if match is None:
        raise TopologyError("no 'MemTotal: N kB' line in the meminfo text")
    return int(match[1]) * 1024


def parse_allowed_cpus(status: str) -> list[int]:
    """Return ``Cpus_allowed_list`` of a ``/proc/PID/status``: a container or slice may own fewer CPUs than are online.

    :raises TopologyError: when there is no such line.
    """
    match = re.search(r"^Cpus_allowed_list:[ \t]*(\S+)", status, re.MULTILINE)
    if match is None:
        raise TopologyError("no 'Cpus_allowed_list:' line in the process status text")
    return parse_cpu_list(match[1])


def usable_numa_nodes(nodes: list[dict[str, Any]], allowed: list[int]) -> list[dict[str, Any]]:
    """Keep the NUMA nodes that something can be pinned to: with CPUs that may be used and with memory.

    :param nodes: each ``{"id": int, "cpus": [int], "memory_bytes": int}``.
    :param allowed: the CPUs that may be used at all.
    """
    usable = []
    for node in sorted(nodes, key=lambda item: int(item["id"])):
        cpus = sorted(set(node["cpus"]) & set(allowed))
        if cpus and int(node["memory_bytes"]) > 0:
            usable.append({"id": int(node["id"]), "cpus": cpus, "memory_bytes": int(node["memory_bytes"])})
    return usable


def is_nvidia_gpu(vendor: str, device_class: str) -> bool:
    """Tell an NVIDIA GPU from its audio function and everything else, by the texts of sysfs."""
    return vendor.strip() == NVIDIA_VENDOR and device_class.strip()[:6] in GPU_CLASSES


def parse_numa_node(text: str) -> int | None:
    """Return a device's NUMA node, or None when the platform does not tell (``-1``, as in most virtual machines)."""
    match = re.fullmatch(r"\s*([0-9]{1,7})\s*", text)
    return int(match[1]) if match else None
