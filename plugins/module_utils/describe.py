# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The plan as lines of text that a person reads before anything changes."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import canonical
from ansible_collections.serving.gpu_node.plugins.module_utils.qualification import describe_switches
from ansible_collections.serving.gpu_node.plugins.module_utils.release import STATE, release_of
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import (
    AUTO,
    environment_names,
    recipe_environment,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.sources import source_words
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import format_cpu_list

BAR = 24
NAME = 34
WIDTH = 118


def bar(used: float, total: float) -> str:
    """Return a bar of :data:`BAR` characters; what is beyond the total shows as ``!``."""
    full = min(round(BAR * used / total) if total else 0, BAR)
    return "#" * full + ("!" if used > total else "-" * (BAR - full))


def command_line(arguments: dict[str, Any]) -> list[str]:
    """Return the engine's arguments as the command that they amount to, an argument a line."""
    lines = [f"vllm serve {shlex.quote(str(arguments['model']))}"]
    for name, value in sorted(arguments.items()):
        if name == "model":
            continue
        if isinstance(value, bool):
            lines.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            lines.append(f"--{name} {' '.join(shlex.quote(str(item)) for item in value)}")
        else:
            lines.append(f"--{name} {shlex.quote(canonical(value) if isinstance(value, dict) else str(value))}")
    return lines


def _size(number: int | None) -> str:
    return "memory not known" if number is None else f"{number / 2**30:.0f} GiB"


def _link(links: dict[frozenset[str], str], one: str, other: str) -> str:
    return links.get(frozenset((one, other)), "?")


def _gpu_lines(replica: dict[str, Any], topology: dict[str, Any]) -> list[str]:
    """Return a replica's GPUs by rank, the links of the pairs {0,1} and {2,3} drawn beside them."""
    links = {frozenset(item[:2]): item[2] for item in topology["links"]}
    cards = {gpu["pci_address"]: gpu for gpu in topology["gpus"]}
    addresses = [gpu["pci_address"] for gpu in replica["gpus"]]
    lines = []
    for rank, gpu in enumerate(replica["gpus"]):
        card = cards[gpu["pci_address"]]
        partner = rank ^ 1
        link = ""
        if partner < len(addresses):
            kind = _link(links, addresses[rank], addresses[partner])
            link = f"--+ {kind}" if rank % 2 == 0 else "--+"
        name = card["model"] or card["device_id"]
        node = "?" if card["numa_node"] is None else card["numa_node"]
        lines.append(f"rank {rank}  {addresses[rank]}  node {node}  {link:<9}  {gpu['uuid']}  {name}".rstrip())
    across = sorted(
        {
            _link(links, one, other)
            for first, one in enumerate(addresses)
            for second, other in enumerate(addresses)
            if first < second and first ^ 1 != second
        }
    )
    return [*lines, f"between the pairs: {', '.join(across)}"] if across else lines


def _node_lines(nodes: Iterable[dict[str, Any]]) -> list[str]:
    lines = []
    for node in nodes:
        socket = "" if node.get("socket") is None else f"socket {node['socket']}, "
        cpus = format_cpu_list(node["cpus"])
        lines.append(f"{socket}NUMA node {node['id']}: CPUs {cpus}, {_size(node['memory_bytes'])}")
    return lines or ["no NUMA nodes"]


def _picture(plan: dict[str, Any]) -> list[str]:
    """Return the machine: its sockets and nodes, and on each the replicas with their GPUs."""
    topology = plan["topology"]
    lines = [] if plan["device"] == "cpu" else [f"driver: {topology['driver']['version'] or 'none loaded'}"]
    seats: dict[str, list[dict[str, Any]]] = {}
    for replica in plan["replicas"]:
        seats.setdefault(replica["memory_nodes"], []).append(replica)
    by_node = {str(node["id"]): node for node in topology["numa_nodes"]}
    shown: set[str] = set()
    for memory_nodes, replicas in seats.items():
        numbers = [number for number in memory_nodes.split(",") if number]
        shown.update(numbers)
        lines += _node_lines(by_node[number] for number in numbers) if numbers else ["anywhere on this machine"]
        for replica in replicas:
            lines.append(
                f"  +-- replica {replica['index']}: {replica['unit']} port {replica['port']} "
                f"CPUs {replica['cpus'] or 'any'} memory node {memory_nodes or 'any'} "
                f"cap {plan['container']['memory']}"
            )
            lines += [f"  |     {line}" for line in _gpu_lines(replica, topology)]
    rest = [node for number, node in by_node.items() if number not in shown]
    lines += [f"{line}: no replica" for line in _node_lines(rest)] if rest else []
    used = {gpu["pci_address"] for replica in plan["replicas"] for gpu in replica["gpus"]}
    spare = [gpu["pci_address"] for gpu in topology["gpus"] if gpu["pci_address"] not in used]
    return lines + ([f"GPUs without a replica: {', '.join(spare)}"] if spare and plan["device"] == "cuda" else [])


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:,.1f}"


def _budget_lines(budgets: list[dict[str, Any]]) -> list[str]:
    lines = []
    for item in budgets:
        drawn = (
            f"[{bar(item['used'], item['total'])}] {_number(item['used'])} of {_number(item['total'])} {item['unit']}"
        )
        lines.append(f"{item['name']:<{NAME}} {drawn}, {item['basis']}")
        lines += [f"{'':<{NAME}} {line}" for line in textwrap.wrap(item["detail"], WIDTH - NAME - 1)]
    return lines


def describe_plan(plan: dict[str, Any], running: dict[str, dict[str, Any]]) -> list[str]:
    """Return the plan as lines.

    :param running: by replica number (as text) the ``release.json`` that it points at now; empty when it has none.
    """
    balancer = plan["balancer"]
    lines = [
        f"profile {plan['profile']} ({plan['state']}), served as '{plan['served_model_name']}'",
        f"balancer on {balancer['address']}:{balancer['port']}, replicas on loopback",
    ]
    for key, artifact in plan["artifacts"].items():
        lines.append(f"{key} {artifact['name']}: from {source_words(artifact['source'])}")
    if plan["changed_settings"]:
        changed = ", ".join(f"{name}={canonical(value)}" for name, value in sorted(plan["changed_settings"].items()))
        lines.append(f"changed from the profile: {changed}")
    lines += [f"warning: {warning}" for warning in plan["warnings"]]
    lines += [f"to be filled in before site.yml can fetch: {what}" for what in plan["missing"]]
    lines += _section("the machine", _picture(plan))
    lines += _section("budgets, for each replica", _budget_lines(plan["budgets"]))
    lines += _section("kernels, by what was found on this node's GPUs", describe_switches(plan["kernels"]))
    lines += _section("engine", _engine_lines(plan["replicas"], plan["settings"]))
    lines += _section("what changes", _change_lines(plan, running))
    return lines


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"--- {title} ---", *lines] if lines else []


def _engine_lines(replicas: list[dict[str, Any]], settings: dict[str, Any]) -> list[str]:
    """Return the engine's command and the recipe's environment once, and what differs between the replicas."""
    first, *others = replicas
    lines = command_line(first["engine_args"])
    shown = {**recipe_environment(settings), **settings["engine_env"]}
    recipe = " ".join(f"{name}={value}" for name, value in shown.items())
    lines += textwrap.wrap(f"environment: {recipe}", WIDTH, subsequent_indent="  ")
    for other in others:
        differs = {key: value for key, value in other["engine_args"].items() if first["engine_args"].get(key) != value}
        differing = ", ".join(f"--{key} {canonical(value)}" for key, value in sorted(differs.items()))
        lines.append(f"replica {other['index']} the same, but for {differing}")
    return lines


def _change_lines(plan: dict[str, Any], running: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for replica in plan["replicas"]:
        now = running.get(str(replica["index"]))
        lines.append(f"replica {replica['index']}: release {_release_change(plan, replica, now)}")
        if plan["state"] == "resolved" and replica["release"] != (now or {}).get("id"):
            lines.append(f"  new: {STATE}/releases/{replica['release']}/{{{','.join(sorted(replica['files']))}}}")
    surplus = sorted({int(index) for index in running} - {replica["index"] for replica in plan["replicas"]})
    lines += [f"replica {index}: no longer in the plan, will be drained, stopped and removed" for index in surplus]
    if plan["device"] == "cuda" and not plan["topology"]["driver"]["version"]:
        lines.append(
            "driver: none is loaded; GPUs are known by PCI address alone until one is, which may take a reboot"
        )
    else:
        lines.append("reboots: none")
    lines.append("other files of the node: site.yml --check --diff shows each change")
    return lines


def _release_change(plan: dict[str, Any], replica: dict[str, Any], running: dict[str, Any] | None) -> str:
    """Say what becomes of a replica: started, switched (and why), or left alone."""
    if not running:
        return f"{replica['release']}; none now, will be started"
    differing = []
    if plan["state"] == "intent":
        # With what runs now, so that what is known already shows in the intent plan.
        later = environment_names(plan["kernels"].get("wanted", {}))
        kept = {name: value for name, value in running.get("env", {}).items() if name in later}
        replica = {**replica, "env": {**replica["env"], **kept}}
    for part in ("engine_args", "env"):
        want, have = replica[part], running.get(part, {})
        for name in sorted(set(want) | set(have)):
            # The release adds the GPUs that are seen to the environment; they are compared below.
            if want.get(name) != have.get(name) and name != "CUDA_VISIBLE_DEVICES":
                differing.append(f"{name} {canonical(have.get(name))} -> {canonical(want.get(name))}")
    for part in ("cpus", "memory_nodes", "port"):
        if replica[part] != running.get(part):
            differing.append(f"{part} {canonical(running.get(part))} -> {canonical(replica[part])}")
    differing += _gpu_changes(replica["gpus"], running.get("gpus", []))
    release = replica["release"]
    if release == AUTO:
        same = dict(replica)
        same.update({part: running[part] for part in ("model", "image", "drafter") if part in running})
        release = release_of(plan, same)["id"]
    if release != running["id"] and not differing:
        differing.append("image, model or container settings")
    if not differing:
        return f"{running['id']} stays" + (" unless image or model change" if replica["release"] == AUTO else "")
    return f"{running['id']} -> {replica['release']}, will be switched: {'; '.join(differing)}"


def _gpu_changes(want: list[dict[str, str]], have: list[dict[str, str]]) -> list[str]:
    """Say which cards differ, rank by rank; one that no driver has named yet differs by its address alone."""
    changes = []
    for rank in range(max(len(want), len(have))):
        new = want[rank] if rank < len(want) else {"pci_address": "none", "uuid": "none"}
        old = have[rank] if rank < len(have) else {"pci_address": "none", "uuid": "none"}
        if new["pci_address"] != old["pci_address"] or new["uuid"] not in (AUTO, old["uuid"]):
            changes.append(f"rank {rank} {old['pci_address']} {old['uuid']} -> {new['pci_address']} {new['uuid']}")
    return changes
