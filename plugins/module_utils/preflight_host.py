# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The checks that concern every node: the machine, its packages and boot, the container runtime."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.budgets import gib_text
from ansible_collections.serving.gpu_node.plugins.module_utils.host_state import kernel_order
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import check_ports
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_facts import (
    EMPTY_HOST,
    FAILURE,
    OK,
    WARNING,
    Check,
    Facts,
    complete,
    finding,
    split_remedy,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import podman_bytes

# Where one NUMA node has less than this part of another one's memory, a module is missing or off.
_MEMORY_BALANCE = 0.8
_ACS_HINT = (
    "pcie_acs_override needs a patched kernel and does nothing on the distributions' own; remove it, and clear the ACS "
    "redirect bits with setpci on root ports and on switches' downstream ports (host_settings_acs_redirect: off)"
)


# --- the machine


def _check_os(facts: Facts) -> list[Check]:
    supported = facts.wanted.get("os", {})
    os = complete(EMPTY_HOST["os"], facts.host["os"])
    wanted = " or ".join(f"{name} {', '.join(map(str, versions))}" for name, versions in supported.items())
    seen = os["name"] or f"{os['id']} {os['version_id']}".strip() or "unknown"
    # A testing release has no number yet.
    fits = os["version_id"] in [str(version) for version in supported.get(os["id"], [])]
    return [finding("os", OK if fits else FAILURE, seen, wanted, "install one of these")]


def _check_kernel(facts: Facts) -> list[Check]:
    kernel = complete(EMPTY_HOST["kernel"], facts.host["kernel"])
    newest = kernel["installed"][-1] if kernel["installed"] else ""
    seen = kernel["release"] or "unknown"
    if facts.host["container"] or not newest or not kernel["release"]:
        return [finding("kernel", OK, seen, "any")]
    older = kernel_order(kernel["release"]) < kernel_order(newest)
    return [
        finding(
            "kernel",
            WARNING if older else OK,
            seen,
            f"the newest installed one, {newest}",
            f"the next boot starts {newest}, which needs the driver's module too; reboot before the driver is built",
        )
    ]


def _check_parameters(facts: Facts) -> list[Check]:
    cmdline = str(complete(EMPTY_HOST["kernel"], facts.host["kernel"])["cmdline"])
    added = [str(item) for item in facts.wanted.get("kernel_parameters", [])]
    checks = []
    for word in [*cmdline.split(), *added]:
        name, _, value = word.partition("=")
        where = "the kernel's command line" if word in cmdline.split() else "host_settings"
        if name == "pcie_acs_override":
            checks.append(finding("kernel_parameters", FAILURE, f"{where}: {word}", "not there", _ACS_HINT))
        elif name in ("module_blacklist", "modprobe.blacklist") and "nvidia" in value.split(","):
            remedy = "the driver's module can never be loaded with it; remove it from the boot loader's configuration"
            checks.append(finding("kernel_parameters", FAILURE, f"{where}: {word}", "not there", remedy))
    return checks or [finding("kernel_parameters", OK, "nothing that cannot work", "nothing that cannot work")]


def _check_space(facts: Facts) -> list[Check]:
    """Add up what is needed on each file system, because folders may share one."""
    by_device: dict[Any, list[dict[str, Any]]] = {}
    checks = []
    for item in facts.wanted.get("space", []):
        told = complete({}, facts.host["space"]).get(item["folder"])
        if told is None:
            remedy = "look whether there is room, with df"
            wanted = f"{gib_text(item['bytes'])} for {item['for']}"
            checks.append(finding("space", WARNING, f"{item['folder']}: not told", wanted, remedy))
            continue
        there = told.get("used_bytes") or 0
        need = max(0, item["bytes"] - there)
        by_device.setdefault(told.get("device", item["folder"]), []).append({**item, **told, "need": need})
    for items in by_device.values():
        need, free = sum(item["need"] for item in items), min(item["free_bytes"] for item in items)
        folders = ", ".join(item["folder"] for item in items)
        parts = ", ".join(f"{gib_text(item['need'])} for {item['for']}" for item in items)
        remedy = f"{gib_text(need - free)} are missing: free them, mount a larger disk there, or say what is needed"
        remedy += " in preflight_space_gib where these estimates are wrong"
        level = FAILURE if free < need else OK
        checks.append(
            finding("space", level, f"{folders}: {gib_text(free)} free", f"{gib_text(need)} free ({parts})", remedy)
        )
    return checks


def _check_memory(facts: Facts) -> list[Check]:
    nodes = {node["id"]: node["memory_bytes"] for node in facts.topology.get("numa_nodes", []) if node["memory_bytes"]}
    checks = []
    if len(nodes) > 1 and min(nodes.values()) < _MEMORY_BALANCE * max(nodes.values()):
        seen = ", ".join(f"node {node}: {gib_text(size)}" for node, size in sorted(nodes.items()))
        remedy = (
            "a memory module may be missing or off; look at the board's log (ipmitool sel list) and at dmidecode -t 17"
        )
        checks.append(finding("memory", WARNING, seen, "the same on each NUMA node", remedy))
    for pinned, count, caps, need in _memory_of_replicas(facts):
        known = [nodes[node] for node in pinned if node in nodes]
        there = sum(known) if pinned and len(known) == len(pinned) else facts.topology.get("memory_bytes")
        where = f"NUMA node {', '.join(map(str, pinned))}" if pinned else "the machine"
        replicas = f"{count} {'replica' if count == 1 else 'replicas'}"
        wanted = f"{gib_text(caps)} for {replicas}"
        if not there:
            checks.append(finding("memory", WARNING, f"{where}: not told", wanted, "look at free -g"))
            continue
        # Whether what they need fits is the plan's to say; a cap is a limit, which takes nothing.
        remedy = "lower container_memory, so that one that grows meets its own cap before the machine's end"
        level = WARNING if there < caps else OK
        checks.append(finding("memory", level, f"{where}: {gib_text(there)}", wanted, remedy))
        free = _free_memory(facts, pinned)
        if need and free is not None and free < need:
            remedy = (
                "see what holds it (numastat -m, reserved huge pages too) and end that; where it goes by itself, as a "
                "file system's own cache does, set preflight_accepted: [memory]"
            )
            wanted = f"{gib_text(need)}, which {replicas} will take"
            checks.append(finding("memory", FAILURE, f"{where}: {gib_text(free)} not in use", wanted, remedy))
    return checks


def _memory_of_replicas(facts: Facts) -> list[tuple[list[int], int, int, int]]:
    """Return NUMA nodes, replicas, and the bytes of their caps and needs (0 when not known) by where they are pinned.

    Without a plan nothing is known of needs and places.
    """
    if not facts.plan:
        settings = facts.wanted.get("settings", {})
        count, cap = settings.get("replicas", 0), settings.get("container_memory")
        return [([], count, count * podman_bytes(cap), 0)] if count and cap else []
    container = facts.plan["container"]
    pinned = [replica["memory_nodes"] for replica in facts.plan["replicas"]]
    found = []
    for nodes in dict.fromkeys(pinned):
        count = pinned.count(nodes)
        numbers = [int(node) for node in nodes.split(",") if node]
        found.append(
            (numbers, count, count * podman_bytes(container["memory"]), count * (container["need_bytes"] or 0))
        )
    return found


def _free_memory(facts: Facts, pinned: list[int]) -> int | None:
    """Return the bytes that nothing uses; None when nobody can tell, or when the node's own replicas may use some."""
    if facts.topology.get("releases"):
        return None
    free: dict[str, Any] = facts.host["free_memory"]
    if not pinned:
        return free.get("machine")
    nodes = [free.get("nodes", {}).get(str(node)) for node in pinned]
    return None if None in nodes else sum(nodes)


def _check_numa_balancing(facts: Facts) -> list[Check]:
    several = len(facts.topology.get("numa_nodes", [])) > 1
    on = facts.host["numa_balancing"]
    seen = "not told" if on is None else "on" if on else "off"
    remedy = "it moves memory between nodes while replicas are pinned to them; host_settings turns it off"
    return [
        finding(
            "numa_balancing", WARNING if on and several else OK, seen, "off" if several else "any (one node)", remedy
        )
    ]


def _check_time(facts: Facts) -> list[Check]:
    told = facts.host["time_synchronized"]
    seen = "not told" if told is None else "synchronized" if told else "not synchronized"
    # A container has its host's clock, and cannot set it.
    level = OK if told or facts.host["container"] else WARNING
    remedy = (
        "start systemd-timesyncd or chrony, and let it reach a time server: with a wrong clock package lists and "
        "certificates are refused"
    )
    return [finding("time", level, seen, "synchronized", remedy)]


def _check_ports(facts: Facts) -> list[Check]:
    settings = facts.plan.get("settings") or facts.wanted.get("settings")
    if not settings:
        return []
    problems = check_ports(settings, facts.topology.get("listeners", []))
    ports = [settings["first_port"] + index for index in range(settings["replicas"])]
    wanted = ", ".join(map(str, [*ports, settings["balancer_port"], settings["balancer_status_port"]]))
    if not problems:
        return [finding("ports", OK, "free, or the node's own", wanted)]
    return [finding("ports", FAILURE, *split_remedy(problem, wanted)) for problem in problems]


# --- packages and boot


def _check_apt_lock(facts: Facts) -> list[Check]:
    lock = facts.host["apt_lock"]
    if not lock:
        return [finding("apt_lock", OK, "free", "free")]
    seen = f"held by process {lock['pid']} ({lock['command'] or 'unknown'})"
    remedy = "the roles wait 10 minutes for it; let that process end, or stop it when it hangs"
    return [finding("apt_lock", WARNING, seen, "free", remedy)]


def _check_packages(facts: Facts) -> list[Check]:
    broken = facts.host["broken_packages"]
    remedy = "finish what was interrupted with dpkg --configure -a and apt-get -f install"
    return [
        finding("packages", WARNING if broken else OK, ", ".join(broken) or "whole", "none half installed", remedy),
    ]


def _check_reboot(facts: Facts) -> list[Check]:
    asked = facts.host["reboot_required"]
    remedy = "reboot before the driver is built, so that it is built for the kernel that will run"
    return [
        finding(
            "reboot", WARNING if asked else OK, f"asked for by {', '.join(asked)}" if asked else "none", "none", remedy
        )
    ]


# --- the container runtime


def _check_podman(facts: Facts) -> list[Check]:
    minimum, seen = str(facts.wanted.get("podman", "")), str(facts.host["podman"])
    wanted = f"{minimum} or newer"
    if not seen:
        level = OK if facts.wanted.get("runtime_manage", True) else FAILURE
        shown = "none; will be installed" if level == OK else "none"
        return [finding("podman", level, shown, wanted, "install it, or set container_runtime_manage: true")]
    level = FAILURE if _numbers(seen) < _numbers(minimum) else OK
    return [
        finding("podman", level, seen, wanted, "upgrade the distribution; older ones know neither CDI nor our units")
    ]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]{1,9}", version)]


def _check_docker(facts: Facts) -> list[Check]:
    """Replicas have no daemon and do not notice Docker's upgrades; what an operator runs in it does."""
    if not facts.host["docker"]:
        return [finding("docker", OK, "none", "not needed")]
    loose = [name for name in facts.host["docker_packages"] if name not in facts.nvidia["held"]]
    if facts.host["unattended_upgrades"] and loose:
        remedy = f"replicas run on, but containers of your own in Docker stop: apt-mark hold {' '.join(loose)}"
        seen = f"{', '.join(loose)} may be upgraded unattended"
        return [finding("docker", WARNING, seen, "held, where it is used", remedy)]
    return [finding("docker", OK, "there; replicas do not use it", "left alone")]


# In the order of the report.
HOST_CHECKS: dict[str, Callable[[Facts], list[Check]]] = {
    "os": _check_os,
    "kernel": _check_kernel,
    "kernel_parameters": _check_parameters,
    "space": _check_space,
    "memory": _check_memory,
    "numa_balancing": _check_numa_balancing,
    "time": _check_time,
    "ports": _check_ports,
    "apt_lock": _check_apt_lock,
    "packages": _check_packages,
    "reboot": _check_reboot,
    "podman": _check_podman,
    "docker": _check_docker,
}
