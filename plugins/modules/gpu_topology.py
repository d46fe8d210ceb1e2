#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Read what a node has and what runs on it: CPUs, NUMA nodes, GPUs, listening sockets, releases."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_topology
short_description: Read a node's CPUs, NUMA nodes, memory, GPUs, listening sockets and releases
version_added: "0.1.0"
description:
  - Reads sysfs and procfs only, so it works on a bare node without a driver, and changes nothing.
  - The answer is what C(serving_plan) needs to place replicas, and can be saved for a node that is not there yet.
options: {}
attributes:
  check_mode:
    description: Reads only, so check mode makes no difference.
    support: full
  diff_mode:
    description: There is nothing to show a difference of.
    support: none
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Read the node
  serving.gpu_node.gpu_topology:
  register: node
"""

RETURN = r"""
topology:
  description: What the node has.
  returned: always
  type: dict
  contains:
    cpus:
      description: CPUs that services on this node may use.
      type: list
      elements: int
    numa_nodes:
      description: NUMA nodes with at least one such CPU and with memory, each with C(id), C(cpus) and C(memory_bytes).
      type: list
      elements: dict
    memory_bytes:
      description: Memory of the whole node, in bytes.
      type: int
    gpus:
      description: NVIDIA GPUs on the PCI bus, each with C(pci_address), C(device_id) and C(numa_node) (null = unknown).
      type: list
      elements: dict
    listeners:
      description: Listening TCP sockets, each with C(address), C(port), C(pid), C(command) and C(unit) (of systemd).
      type: list
      elements: dict
    releases:
      description: By replica number (as text) the C(release.json) that the replica points at now.
      type: dict
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.listeners import parse_listeners
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import (
    TopologyError,
    is_nvidia_gpu,
    parse_allowed_cpus,
    parse_cpu_list,
    parse_meminfo_total,
    parse_numa_node,
    usable_numa_nodes,
)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read_numa_nodes(root: Path) -> list[dict[str, Any]]:
    """Read every NUMA node below ``root`` (``/sys/devices/system/node``); empty on a kernel without NUMA."""
    nodes = []
    for folder in root.glob("node[0-9]*"):
        nodes.append(
            {
                "id": int(folder.name[4:]),
                "cpus": parse_cpu_list(_read(folder / "cpulist")),
                "memory_bytes": parse_meminfo_total(_read(folder / "meminfo")),
            }
        )
    return nodes


def read_gpus(root: Path) -> list[dict[str, Any]]:
    """Read every NVIDIA GPU below ``root`` (``/sys/bus/pci/devices``), in PCI order."""
    gpus = []
    for folder in sorted(root.glob("*")):
        if is_nvidia_gpu(_read(folder / "vendor"), _read(folder / "class")):
            # The file is not there on a kernel without NUMA.
            numa_node = folder / "numa_node"
            gpus.append(
                {
                    "pci_address": folder.name,
                    "device_id": _read(folder / "device").strip(),
                    "numa_node": parse_numa_node(_read(numa_node)) if numa_node.exists() else None,
                }
            )
    return gpus


def _socket_owners(proc: Path, wanted: set[int]) -> dict[int, dict[str, Any]]:
    """Find which process holds each socket inode; a process that ends meanwhile is passed over."""
    owners: dict[int, dict[str, Any]] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            links = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
            inodes = {int(link[8:-1]) for link in links if link.startswith("socket:[")} & wanted
            if not inodes:
                continue
            command = _read(folder / "cmdline").replace("\0", " ").strip() or _read(folder / "comm").strip()
            units = re.findall(r"([^/\s]+\.service)", _read(folder / "cgroup"))
        except OSError:
            continue
        for inode in inodes:
            # The master of a forking server holds the socket as well; the lowest process number is the oldest.
            if inode not in owners or int(folder.name) < owners[inode]["pid"]:
                owners[inode] = {"pid": int(folder.name), "command": command[:120], "unit": units[-1] if units else ""}
    return owners


def read_listeners(proc: Path) -> list[dict[str, Any]]:
    """Read the listening TCP sockets and their owners below ``proc`` (``/proc``)."""
    sockets = []
    for name in ("tcp", "tcp6"):
        path = proc / "net" / name
        if path.exists():
            sockets += parse_listeners(_read(path))
    owners = _socket_owners(proc, {item["inode"] for item in sockets})
    unknown = {"pid": 0, "command": "", "unit": ""}
    return [
        {"address": item["address"], "port": item["port"], **owners.get(item["inode"], unknown)}
        for item in sorted(sockets, key=lambda item: (item["port"], item["address"]))
    ]


def read_releases(root: Path) -> dict[str, dict[str, Any]]:
    """Read the release of every replica below ``root`` (``/var/lib/gpu-node/replicas``).

    One that cannot be read counts as none (the replica is then given its release anew); the replica still counts.
    """
    releases: dict[str, dict[str, Any]] = {}
    for folder in root.glob("[0-9]*"):
        if not folder.name.isdecimal():
            continue
        try:
            release = json.loads(_read(folder / "current" / "release.json"))
        except (OSError, ValueError):
            release = {}
        whole = isinstance(release, dict) and {"id", "model", "image"} <= release.keys()
        releases[folder.name] = release if whole else {}
    return releases


def main() -> None:
    """Run the module."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    try:
        allowed = parse_allowed_cpus(_read(Path("/proc/1/status")))
        memory = parse_meminfo_total(_read(Path("/proc/meminfo")))
        nodes = usable_numa_nodes(read_numa_nodes(Path("/sys/devices/system/node")), allowed)
        topology = {
            "cpus": allowed,
            "numa_nodes": nodes,
            "memory_bytes": memory,
            "gpus": read_gpus(Path("/sys/bus/pci/devices")),
            "listeners": read_listeners(Path("/proc")),
            "releases": read_releases(Path("/var/lib/gpu-node/replicas")),
        }
    except (OSError, TopologyError) as error:
        module.fail_json(msg=f"the node's topology could not be read: {error}")
    module.exit_json(changed=False, topology=topology)


if __name__ == "__main__":
    main()
