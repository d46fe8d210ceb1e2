"""A profile and nodes to plan with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import build_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.release import resolve_plan

ROOT = Path(__file__).parents[3]
MODEL = "a" * 64
IMAGE = {"ref": "localhost/gpu-node/vllm-cpu:key", "id": "b" * 64}


def profile(name: str) -> dict[str, Any]:
    """A profile that the role ships, as the role loads it."""
    data = yaml.safe_load((ROOT / f"roles/serving_plan/vars/{name}.yml").read_text())
    loaded: dict[str, Any] = copy.deepcopy(data["_serving_plan_profile"])
    return loaded


def cpu_profile() -> dict[str, Any]:
    return profile("cpu")


def numa_node(number: int, cpus: list[int], gib: float = 64, socket: int | None = None) -> dict[str, Any]:
    return {"id": number, "cpus": cpus, "memory_bytes": int(gib * 2**30), "socket": socket}


def gpu(number: int, node: int | None, device: str = "0x2bb5", **more: Any) -> dict[str, Any]:
    """Card ``number`` as a driver sees it: its PCI address and UUID end in the number."""
    card = {
        "pci_address": f"0000:{number:02x}:00.0",
        "device_id": device,
        "numa_node": node,
        "uuid": f"GPU-00000000-0000-0000-0000-{number:012d}",
        "model": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "memory_mib": 97887,
        "mig": False,
    }
    return {**card, **more}


def topology(
    nodes: list[dict[str, Any]] | None = None,
    listeners: list[dict[str, Any]] | None = None,
    gpus: list[dict[str, Any]] | None = None,
    links: list[list[str]] | None = None,
    cores: list[list[int]] | None = None,
) -> dict[str, Any]:
    """What `gpu_topology` answers; without arguments for a node with two CPUs and free ports."""
    nodes = [numa_node(0, [0, 1])] if nodes is None else nodes
    return {
        "schema": 1,
        "cpus": sorted(cpu for node in nodes for cpu in node["cpus"]),
        "numa_nodes": nodes,
        "memory_bytes": sum(node["memory_bytes"] for node in nodes),
        "cores": cores or [],
        "gpus": gpus or [],
        "links": links or [],
        "driver": {"version": "590.48.01" if gpus else "", "open": True if gpus else None},
        "warnings": [],
        "listeners": listeners or [],
        "releases": {},
    }


def two_sockets(gib: float = 700) -> dict[str, Any]:
    """Eight cards on two sockets, pairs of them behind one switch, 32 cores with two threads each."""
    halves = ([*range(0, 32), *range(64, 96)], [*range(32, 64), *range(96, 128)])
    cards = [gpu(number, number // 4) for number in range(8)]
    links = []
    for one in range(8):
        for other in range(one + 1, 8):
            kind = "PIX" if one // 2 == other // 2 else "NODE" if one // 4 == other // 4 else "SYS"
            links.append([cards[one]["pci_address"], cards[other]["pci_address"], kind])
    nodes = [numa_node(number, cpus, gib, socket=number) for number, cpus in enumerate(halves)]
    return topology(nodes, gpus=cards, links=links, cores=[[core, core + 64] for core in range(64)])


def two_cards(gib: float = 116) -> dict[str, Any]:
    """Two cards in a one-socket machine of 64 cores."""
    cards = [gpu(number, 0) for number in range(2)]
    links = [[cards[0]["pci_address"], cards[1]["pci_address"], "PHB"]]
    cores = [[core, core + 64] for core in range(64)]
    return topology([numa_node(0, [*range(128)], gib, socket=0)], gpus=cards, links=links, cores=cores)


PACK = {"type": "hub", "repository": "example/pack", "revision": "0123456789" * 4, "folder": "drafter-code-k7"}
REVISION = {"revision": "89abcdef01" * 4}
SOURCES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "2x": {"model": REVISION},
    "8x": {"model": REVISION, "drafter": PACK},
}
DRAFTER = "c" * 64


def listener(port: int, unit: str = "", pid: int = 77, command: str = "python3 -m http.server") -> dict[str, Any]:
    return {"address": "127.0.0.1", "port": port, "pid": pid, "command": command, "unit": unit}


def record(correct: bool = True, speedup: float = 1.5, **verdicts: Any) -> dict[str, Any]:
    """What was found on the cards of the samples: the same for every kernel, but for ``verdicts``."""
    shapes = [{"rows": rows, "length": length, "speedup": speedup} for rows in (64, 1024) for length in (2048, 32768)]
    verdict = {"correct": correct, "failures": [] if correct else ["few_levels: 3 of 48 rows differ"], "shapes": shapes}
    kernels = {name: {**verdict} for name in ("rowtopk", "cand_blocks", "cand_topk")}
    kernels["chunks"] = {"correct": correct, "failures": verdict["failures"], "shapes": []}
    return {
        "gpu": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "driver": "590.48.01",
        "why": "",
        "pending": False,
        "busy": False,
        "report": {"kernels": {**kernels, **verdicts}},
    }


def intent(
    overrides: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    client_auth: bool = False,
    name: str = "cpu",
    sources: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The intent plan of a profile on a node that suits it."""
    usual = topology() if name == "cpu" else two_cards() if name == "2x" else two_sockets()
    return build_plan(
        profile(name), overrides or {}, node or usual, client_auth, SOURCES[name] if sources is None else sources
    )


def resolved(
    overrides: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    client_auth: bool = False,
    model: str = MODEL,
    image: dict[str, str] | None = None,
    name: str = "cpu",
    records: list[dict[str, Any]] | None = None,
    draft_tokens: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The resolved plan; the cards are those that ``node`` shows, and every kernel of ours was found good on them."""
    plan = intent(overrides, node, client_auth, name)
    found = [record()] if records is None else records
    digests, cards = {"model": model, "drafter": DRAFTER}, plan["topology"]["gpus"]
    return resolve_plan(plan, digests, image or IMAGE, cards, found, draft_tokens or {})
