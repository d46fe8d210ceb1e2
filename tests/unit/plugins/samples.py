"""A profile and nodes to plan with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import build_plan, resolve_plan

ROOT = Path(__file__).parents[3]
MODEL = "a" * 64
IMAGE = {"ref": "localhost/gpu-node/vllm-cpu:key", "id": "b" * 64}


def cpu_profile() -> dict[str, Any]:
    """The profile that the role ships, as the role loads it."""
    data = yaml.safe_load((ROOT / "roles/serving_plan/vars/cpu.yml").read_text())
    profile: dict[str, Any] = copy.deepcopy(data["_serving_plan_profile"])
    return profile


def numa_node(number: int, cpus: list[int], gib: float = 64) -> dict[str, Any]:
    return {"id": number, "cpus": cpus, "memory_bytes": int(gib * 2**30)}


def topology(
    nodes: list[dict[str, Any]] | None = None, listeners: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """What `gpu_topology` answers; without arguments for a node with two CPUs and free ports."""
    nodes = [numa_node(0, [0, 1])] if nodes is None else nodes
    return {
        "cpus": sorted(cpu for node in nodes for cpu in node["cpus"]),
        "numa_nodes": nodes,
        "memory_bytes": sum(node["memory_bytes"] for node in nodes),
        "gpus": [],
        "listeners": listeners or [],
    }


def listener(port: int, unit: str = "", pid: int = 77, command: str = "python3 -m http.server") -> dict[str, Any]:
    return {"address": "127.0.0.1", "port": port, "pid": pid, "command": command, "unit": unit}


def intent(
    overrides: dict[str, Any] | None = None, node: dict[str, Any] | None = None, client_auth: bool = False
) -> dict[str, Any]:
    return build_plan(cpu_profile(), overrides or {}, node or topology(), client_auth)


def resolved(
    overrides: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    client_auth: bool = False,
    model: str = MODEL,
    image: dict[str, str] | None = None,
) -> dict[str, Any]:
    return resolve_plan(intent(overrides, node, client_auth), model, image or IMAGE)
