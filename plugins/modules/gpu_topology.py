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
  - Reads sysfs and procfs, so it works on a bare node without a driver, and changes nothing.
  - A loaded NVIDIA driver completes the answer with UUIDs, models, memory, MIG and NVLink. What it says is compared
    with sysfs, and what differs is told. C(nvidia-smi) is asked where it is there, and is given up after 20 seconds.
  - The answer is what C(serving_plan) needs to place replicas, and can be saved for a node that is not there yet.
options: {}
extends_documentation_fragment: [serving.gpu_node.reads_only]
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
    schema:
      description: Version of this form.
      type: int
    cpus:
      description: CPUs that services on this node may use.
      type: list
      elements: int
    memory_bytes:
      description: Memory of the whole node, in bytes.
      type: int
    numa_nodes:
      description:
        - NUMA nodes with at least one such CPU and with memory, each with C(id), C(cpus), C(memory_bytes) and C(socket)
          (null = unknown).
      type: list
      elements: dict
    cores:
      description: The CPUs of each physical core, as lists; empty when unknown.
      type: list
      elements: list
    gpus:
      description:
        - NVIDIA GPUs on the PCI bus in the order of their addresses, each with C(pci_address), C(device_id) (PCI device
          number), C(numa_node), C(uuid), C(model), C(memory_mib) and C(mig). Null or an empty text is unknown.
        - A card that the driver does not have, or that cannot be used, has no C(uuid) and is named in C(warnings).
      type: list
      elements: dict
    links:
      description:
        - The link of each pair of GPUs, as address, address and kind (C(PIX), C(PXB), C(PHB), C(NODE), C(SYS) as in
          C(nvidia-smi topo -m), or C(NV) and a number of NVLinks). Unknown ones are left out.
      type: list
      elements: list
    driver:
      description: The loaded NVIDIA driver's C(version) (empty = none) and whether it is C(open) (null = unknown).
      type: dict
    warnings:
      description: A sentence for everything that could not be read, or on which the readings disagree.
      type: list
      elements: str
    listeners:
      description: Listening TCP sockets, each with C(address), C(port), C(pid), C(command) and C(unit) (of systemd).
      type: list
      elements: dict
    releases:
      description: By replica number (as text) the C(release.json) that the replica points at now.
      type: dict
"""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.listeners import parse_listeners
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_smi import (
    GPU_QUERY,
    compare_with_matrix,
    complete_gpus,
    parse_driver_version,
    parse_gpu_information,
    parse_gpu_query,
    parse_topo_matrix,
    without_driver,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import (
    TopologyError,
    group_cores,
    is_nvidia_gpu,
    parse_allowed_cpus,
    parse_cpu_list,
    parse_meminfo_total,
    parse_numa_node,
    parse_socket,
    pci_address,
    pci_order,
    pcie_links,
    usable_numa_nodes,
)

# A lost card can hold nvidia-smi up for ever, and nothing ends a process that waits in the driver.
NVIDIA_SMI_SECONDS = 20


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _read_if_there(path: Path) -> str:
    """Read a file that a container, a virtual machine or another kernel may lack; blank then."""
    try:
        return _read(path)
    except OSError:
        return ""


def read_numa_nodes(root: Path, cpus: Path | None = None) -> list[dict[str, Any]]:
    """Read every NUMA node below ``root`` (``/sys/devices/system/node``); empty on a kernel without NUMA.

    :param cpus: ``/sys/devices/system/cpu``, which knows their sockets.
    """
    nodes = []
    for folder in root.glob("node[0-9]*"):
        numbers = parse_cpu_list(_read(folder / "cpulist"))
        packages = [_read_if_there(cpus / f"cpu{cpu}/topology/physical_package_id") for cpu in numbers] if cpus else []
        nodes.append(
            {
                "id": int(folder.name[4:]),
                "cpus": numbers,
                "memory_bytes": parse_meminfo_total(_read(folder / "meminfo")),
                "socket": parse_socket(packages),
            }
        )
    return nodes


def read_usable_cpus(proc: Path, cpus: Path) -> list[int]:
    """Read which CPUs services may use: those of the first process that are online.

    In a virtual machine that can be given more CPUs, that process is allowed those that are not there yet as well.
    """
    allowed = parse_allowed_cpus(_read(proc / "1/status"))
    online = parse_cpu_list(_read_if_there(cpus / "online"))
    return sorted(set(allowed) & set(online)) if online else allowed


def read_cores(cpus: Path, usable: list[int]) -> list[list[int]]:
    """Read which usable CPUs share a physical core; empty when the kernel does not tell."""
    texts = {cpu: _read_if_there(cpus / f"cpu{cpu}/topology/thread_siblings_list").strip() for cpu in usable}
    return group_cores({cpu: text for cpu, text in texts.items() if text}, usable)


def _read_gpu(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Read one PCI device; None when it is no NVIDIA GPU, and a sentence for each file that cannot be read."""
    warnings: list[str] = []

    def read(name: str) -> str:
        try:
            return _read(folder / name)
        except OSError as error:
            warnings.append(
                f"{folder.name}: {name} could not be read ({error.strerror or error}); it counts as unknown"
            )
            return ""

    if not is_nvidia_gpu(read("vendor"), read("class")):
        return None, warnings
    # The file is not there on a kernel without NUMA.
    node = parse_numa_node(read("numa_node")) if (folder / "numa_node").exists() else None
    return {"pci_address": folder.name, "device_id": read("device").strip(), "numa_node": node}, warnings


def read_gpus(root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read every NVIDIA GPU below ``root`` (``/sys/bus/pci/devices``), in PCI order, and what could not be read."""
    gpus, warnings = [], []
    for folder in sorted(root.glob("*"), key=lambda item: pci_order(item.name)):
        gpu, problems = _read_gpu(folder)
        warnings += problems
        if gpu is not None:
            gpus.append(without_driver(gpu))
    return gpus, warnings


def read_driver(root: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[str]]:
    """Read the loaded driver below ``root`` (``/proc/driver/nvidia``).

    :returns: ``{"version", "open"}``, the version empty when none is loaded; by PCI address
        what it says of each GPU; and what could not be read.
    """
    driver: dict[str, Any] = {"version": "", "open": None}
    warnings: list[str] = []
    if (root / "version").exists():
        try:
            driver = parse_driver_version(_read(root / "version"))
        except (OSError, TopologyError) as error:
            # It is loaded all the same, and can be asked.
            driver["version"] = "unknown"
            warnings.append(f"the NVIDIA driver's version could not be read: {error}")
    known: dict[str, dict[str, Any]] = {}
    for folder in sorted((root / "gpus").glob("*")):
        address = pci_address(folder.name)
        try:
            information = parse_gpu_information(_read(folder / "information"))
        except OSError as error:
            warnings.append(f"{folder.name}: the driver's information could not be read ({error.strerror or error})")
            continue
        instances = root / f"capabilities/gpu{information['minor']}/mig"
        known[address] = {**information, "mig": any(instances.glob("gi[0-9]*"))}
    return driver, known, warnings


def ask_nvidia_smi(command: str, arguments: list[str]) -> tuple[str, str]:
    """Run nvidia-smi.

    :returns: what it printed, and a sentence when it failed or did not end in time.
    """
    shown = f"nvidia-smi {' '.join(arguments)}"
    try:
        process = subprocess.Popen(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        return "", f"{shown} could not be started: {error.strerror or error}"
    with contextlib.ExitStack() as stack:
        if process.stdout:
            stack.callback(process.stdout.close)
        try:
            text, _ = process.communicate(timeout=NVIDIA_SMI_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            # One that waits in the driver does not die of it, so it is not waited for.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            return "", f"{shown} did not answer in {NVIDIA_SMI_SECONDS} s; look into the kernel's log"
    if process.returncode:
        # The GPUs that work come first, the complaint after them.
        said = [line.strip() for line in text.splitlines() if line.strip() and not pci_address(line.split(",")[0])]
        return text, f"{shown} failed with exit status {process.returncode}: {(said or ['it said nothing'])[0][:300]}"
    return text, ""


def read_nvidia_smi(command: str | None) -> tuple[dict[str, dict[str, Any]], list[str], str, list[str]]:
    """Ask nvidia-smi for the GPUs and the matrix of links.

    :returns: by PCI address what it says of each GPU, the lines in which it complains, the matrix's text, and a
        sentence for each question that it did not answer.
    """
    if command is None:
        return {}, [], "", ["nvidia-smi is not on this node: memory, MIG mode and NVLink are unknown"]
    query, problem = ask_nvidia_smi(command, [f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"])
    cards, complaints = parse_gpu_query(query)
    warnings = [problem] if problem else [f"nvidia-smi says: {line}" for line in complaints]
    if not cards:
        # One that hangs would hang again.
        return {}, complaints, "", warnings
    matrix, problem = ask_nvidia_smi(command, ["topo", "-m"])
    return cards, complaints, "" if problem else matrix, warnings + ([problem] if problem else [])


def read_hardware(sys: Path, proc: Path, nvidia_smi: str | None) -> dict[str, Any]:
    """Read what the node has below ``sys`` (``/sys``) and ``proc`` (``/proc``).

    :param nvidia_smi: the command, or None where there is none. It is run only when a driver is loaded, because it
        would load one.
    :raises OSError, TopologyError: when CPUs or memory cannot be read. GPUs never are a reason: they give warnings.
    """
    cpus = sys / "devices/system/cpu"
    usable = read_usable_cpus(proc, cpus)
    gpus, warnings = read_gpus(sys / "bus/pci/devices")
    paths = {gpu["pci_address"]: os.path.realpath(sys / "bus/pci/devices" / gpu["pci_address"]) for gpu in gpus}
    links = pcie_links(gpus, paths)
    driver, known, problems = read_driver(proc / "driver/nvidia")
    warnings += problems
    if driver["version"] and (gpus or known):
        cards, complaints, matrix, problems = read_nvidia_smi(nvidia_smi)
        warnings += problems
        gpus, problems = complete_gpus(gpus, known, cards, complaints)
        warnings += problems
        if matrix:
            try:
                links, problems = compare_with_matrix(gpus, links, parse_topo_matrix(matrix), list(cards))
            except TopologyError as error:
                problems = [f"nvidia-smi topo -m: {error}"]
            warnings += problems
    return {
        "schema": 1,
        "cpus": usable,
        "memory_bytes": parse_meminfo_total(_read(proc / "meminfo")),
        "numa_nodes": usable_numa_nodes(read_numa_nodes(sys / "devices/system/node", cpus), usable),
        "cores": read_cores(cpus, usable),
        "gpus": gpus,
        "links": links,
        "driver": driver,
        "warnings": warnings,
    }


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
        topology = {
            **read_hardware(Path("/sys"), Path("/proc"), module.get_bin_path("nvidia-smi")),
            "listeners": read_listeners(Path("/proc")),
            "releases": read_releases(Path("/var/lib/gpu-node/replicas")),
        }
    except (OSError, TopologyError) as error:
        module.fail_json(msg=f"the node's topology could not be read: {error}")
    module.exit_json(changed=False, topology=topology)


if __name__ == "__main__":
    main()
