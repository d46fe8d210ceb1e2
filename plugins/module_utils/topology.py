# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a node's hardware looks like, read from the text of sysfs and /proc.

Pure functions only: the module ``gpu_topology`` does the reading. What the driver adds is in ``nvidia_smi.py``.
"""

from __future__ import annotations

import re
from typing import Any

NVIDIA_VENDOR = "0x10de"
# PCI base class 03 is a display controller: 0300 a VGA one, 0302 a 3D one (server cards without outputs).
GPU_CLASSES = ("0x0300", "0x0302")
# The cards this collection is made for, by PCI device number: their names are known before a driver is (source: the
# PCI ID repository). Any other card has no name until the driver gives one.
GPU_MODELS = {
    "0x2bb1": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "0x2bb4": "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    "0x2bb5": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
}
# What nvidia-smi calls the ways between two GPUs over PCIe, closest first.
PCIE_LINKS = ("PIX", "PXB", "PHB", "NODE", "SYS")

_PCI_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


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

    :param nodes: each ``{"id": int, "cpus": [int], "memory_bytes": int, "socket": int or None}``, the last optional.
    :param allowed: the CPUs that may be used at all.
    """
    usable = []
    for node in sorted(nodes, key=lambda item: int(item["id"])):
        cpus = sorted(set(node["cpus"]) & set(allowed))
        if cpus and int(node["memory_bytes"]) > 0:
            usable.append(
                {
                    "id": int(node["id"]),
                    "cpus": cpus,
                    "memory_bytes": int(node["memory_bytes"]),
                    "socket": node.get("socket"),
                }
            )
    return usable


def parse_socket(packages: list[str]) -> int | None:
    """Return the socket that a NUMA node's CPUs are on, from their ``physical_package_id`` texts.

    None when they do not tell (``-1``), or name several: some virtual machines give every CPU a socket of its own.
    """
    sockets = {parse_numa_node(text) for text in packages}
    return sockets.pop() if len(sockets) == 1 else None


def group_cores(siblings: dict[int, str], usable: list[int]) -> list[list[int]]:
    """Group usable CPUs by physical core.

    :param siblings: by CPU number the text of its ``thread_siblings_list``.
    :param usable: the CPUs that may be used; the others are left out of their core.
    :returns: sorted cores of sorted CPUs, for example ``[[0, 64], [1, 65]]``; empty when a CPU does not tell.
    :raises TopologyError: when a text is not in the kernel's list format.
    """
    if not set(usable) <= set(siblings):
        return []
    wanted = set(usable)
    cores = {tuple(sorted((set(parse_cpu_list(siblings[cpu])) & wanted) | {cpu})) for cpu in wanted}
    # Every CPU is in one core, or the texts contradict each other and tell nothing.
    if sum(len(core) for core in cores) != len(wanted):
        return []
    return [list(core) for core in sorted(cores)]


def is_nvidia_gpu(vendor: str, device_class: str) -> bool:
    """Tell an NVIDIA GPU from its audio function and everything else, by the texts of sysfs."""
    return vendor.strip() == NVIDIA_VENDOR and device_class.strip()[:6] in GPU_CLASSES


def parse_numa_node(text: str) -> int | None:
    """Return a device's NUMA node, or None when the platform does not tell (``-1``, as in most virtual machines)."""
    match = re.fullmatch(r"\s*([0-9]{1,7})\s*", text)
    return int(match[1]) if match else None


def pci_address(text: str) -> str:
    """Return a PCI address as sysfs writes it: the driver writes ``00000000:38:00.0`` for ``0000:38:00.0``.

    Empty when the text is no PCI address.
    """
    match = _PCI_ADDRESS.fullmatch(text.strip())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""


def pci_addresses_in(text: str) -> set[str]:
    """Return the PCI addresses that a message names, as sysfs writes them."""
    # The driver also writes "GPU0000:C1:00.0", so a word's beginning is no help.
    return {pci_address(match[0]) for match in _PCI_ADDRESS.finditer(text)}


def pci_order(address: str) -> tuple[int, str]:
    """Return what sorts PCI addresses: the domain is a number of four digits or more."""
    domain, _, rest = address.partition(":")
    return (int(domain, 16), rest) if re.fullmatch("[0-9a-f]{4,8}", domain) else (-1, address)


def _below_host_bridge(path: str) -> tuple[str, list[str]] | None:
    """Split a device's path into its host bridge and the PCI bridges from there down to it."""
    parts = path.strip().split("/")
    # Some virtual machines and disk controllers put a whole PCI domain below other devices: the last one counts.
    bridges = [number for number, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    if not bridges:
        return None
    last = bridges[-1] + 1
    return "/".join(parts[:last]), parts[last:-1]


def pcie_link(paths: tuple[str, str], numa_nodes: tuple[int | None, int | None]) -> str | None:
    """Return the way between two devices over PCIe, in the words of ``nvidia-smi topo -m``; None when unknown.

    - ``PIX``: they meet in one bridge. A switch is one bridge in this count, though sysfs shows its upstream port and,
      on the way to each device, a downstream port.
    - ``PXB``: they meet below the host bridge, with more bridges than that between them.
    - ``PHB``: they meet in the host bridge (``pci0000:30``), each below a port of its own.
    - ``NODE``: different host bridges of the same NUMA node.
    - ``SYS``: different NUMA nodes, also those of one socket.

    :param paths: of both devices, resolved, for example ``/sys/devices/pci0000:30/0000:30:01.0/0000:31:00.0``.
    :param numa_nodes: of both devices.
    """
    first, second = (_below_host_bridge(path) for path in paths)
    if first is not None and second is not None and first[0] == second[0]:
        shared = 0
        for one, other in zip(first[1], second[1], strict=False):
            if one != other:
                break
            shared += 1
        if not shared:
            return "PHB"
        return "PIX" if max(len(first[1]), len(second[1])) - shared <= 1 else "PXB"
    if None in numa_nodes:
        return None
    return "NODE" if numa_nodes[0] == numa_nodes[1] else "SYS"


def pcie_links(gpus: list[dict[str, Any]], paths: dict[str, str]) -> list[list[str]]:
    """Return the PCIe link of every pair of GPUs as ``[address, address, kind]``; unknown ones are left out.

    :param gpus: in PCI order, with ``pci_address`` and ``numa_node``.
    :param paths: by address the device's resolved path in sysfs.
    """
    links = []
    for number, one in enumerate(gpus):
        for other in gpus[number + 1 :]:
            pair = (one["pci_address"], other["pci_address"])
            kind = pcie_link((paths.get(pair[0], ""), paths.get(pair[1], "")), (one["numa_node"], other["numa_node"]))
            if kind:
                links.append([*pair, kind])
    return links
