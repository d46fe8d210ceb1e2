# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What the benchmark is asked to do on a node: its request, made of the plan, the node's state and its releases."""

from __future__ import annotations

from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import MODEL_PATH
from ansible_collections.serving.gpu_node.plugins.module_utils.release import release_of
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import environment_names

ENGINE_KEY = "/etc/gpu-node/secrets/engine.env"
CLIENT_KEYS = "/etc/gpu-node/secrets/clients.json"
_ANY = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "": "127.0.0.1", "::": "::1", "[::]": "::1"}


class BenchmarkError(ValueError):
    """The node cannot be measured as it is; ``problems`` holds a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _problems(status: list[dict[str, Any]]) -> list[str]:
    """Return what keeps a node from being measured."""
    if not status:
        return ["the node has no replicas: run site.yml first"]
    found = []
    for row in status:
        name = f"replica {row['index']}"
        if row["state"] != "active":
            found.append(f"{name} is {row['state']}, not active: gpu-node status says why")
        elif row["out"]:
            found.append(f"{name} is out of the balancer ({', '.join(row['out'])}): let it in first")
        elif row.get("differs"):
            found.append(f"{name} does not serve what it should yet: let the rollout end first")
    return found


def _mounted(release: dict[str, Any], inside: str) -> str:
    """Return the node's folder that the release's container sees there; empty when there is none."""
    for value in release["podman_args"]:
        outside, _, rest = value.partition(":")
        if rest.split(":")[0] == inside:
            return str(outside)
    return ""


def _url(release: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{release['port']}"


def _proofs(release: dict[str, Any]) -> str:
    """Return the file in which the node's prober counts what it asks an idle engine."""
    return f"/run/gpu-node/{release['replica']}/probe.json"


def _max_num_seqs(release: dict[str, Any]) -> int:
    """Return how many sequences the engine decodes at once, 0 when its arguments do not say."""
    found = release["engine_args"].get("max-num-seqs")
    return found if isinstance(found, int) else 0


def _replica_target(
    row: dict[str, Any], release: dict[str, Any], releases: list[dict[str, Any]], parts: list[str]
) -> dict[str, Any]:
    url = _url(release)
    others = [other for other in releases if other["replica"] != release["replica"]]
    return {
        "name": f"replica {row['index']}",
        "kind": "replica",
        "url": url,
        "model": release["served_model_name"],
        "key_file": ENGINE_KEY,
        "metrics": [url],
        "proofs": [_proofs(release)],
        "neighbours": [_url(other) for other in others],
        "neighbours_proofs": [_proofs(other) for other in others],
        "max_num_seqs": _max_num_seqs(release),
        "parts": parts,
        "gpus": [gpu["uuid"] for gpu in release["gpus"]],
        "release": release["id"],
    }


def _balancer_target(plan: dict[str, Any], replicas: list[dict[str, Any]]) -> dict[str, Any]:
    host = plan["balancer"]["address"]
    host = _ANY.get(host, host).strip("[]")
    return {
        "name": "node",
        "kind": "balancer",
        "url": f"http://{f'[{host}]' if ':' in host else host}:{plan['balancer']['port']}",
        "model": replicas[0]["model"],
        "key_file": CLIENT_KEYS,
        "metrics": [replica["url"] for replica in replicas],
        "proofs": [file for replica in replicas for file in replica["proofs"]],
        # It spreads its streams over them.
        "replicas": len(replicas),
        "max_num_seqs": min(replica["max_num_seqs"] for replica in replicas),
        # The two points need the same engine, and so does a repeated prompt.
        "parts": ["levels"],
        "gpus": [uuid for replica in replicas for uuid in replica["gpus"]],
        "release": "",
    }


def _planned(plan: dict[str, Any], release: dict[str, Any]) -> str:
    """Return the id that the plan gives to a replica's release; empty when it has no such replica.

    What an intent plan leaves open (digests, the kernels' switches) is taken from the release that serves.
    """
    replica = next((one for one in plan["replicas"] if one["index"] == release["replica"]), None)
    if replica is None:
        return ""
    if plan["state"] == "intent":
        open_names = environment_names(plan["kernels"].get("wanted", {}))
        switches = {name: value for name, value in release["env"].items() if name in open_names}
        served = {part: release[part] for part in ("model", "drafter", "image")}
        replica = {**replica, **served, "env": {**replica["env"], **switches}}
    return str(release_of(plan, replica)["id"])


def _outdated(plan: dict[str, Any], releases: list[dict[str, Any]]) -> list[str]:
    """Return the sentences about replicas that serve something else than the inventory's plan of now."""
    other = [
        f"replica {release['replica']} serves release {release['id']}"
        for release in releases
        if _planned(plan, release) != release["id"]
    ]
    if not other:
        return []
    return [
        f"the inventory's plan of now makes something else than what was measured ({', '.join(other)}): "
        "its settings and budgets are not shown; playbooks/plan.yml names the differences"
    ]


def node_picture(plan: dict[str, Any], releases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the report shows of the node: sockets, cards, replicas, versions, settings, budgets."""
    topology = plan["topology"]
    cards = {gpu["pci_address"]: gpu for gpu in topology["gpus"]}
    notes = _outdated(plan, releases)
    return {
        "profile": releases[0]["profile"],
        "notes": notes,
        "memory_bytes": topology["memory_bytes"],
        "driver": (topology["driver"] or {}).get("version") or "",
        "numa_nodes": [
            {
                "id": node["id"],
                "socket": node.get("socket"),
                "cpus": len(node["cpus"]),
                "memory_bytes": node["memory_bytes"],
            }
            for node in topology["numa_nodes"]
        ],
        "gpus": [
            {
                "address": gpu["pci_address"],
                "uuid": gpu["uuid"],
                "numa_node": gpu["numa_node"],
                "model": gpu.get("model") or "",
                "memory_mib": gpu.get("memory_mib"),
            }
            for gpu in cards.values()
        ],
        "replicas": [
            {
                "index": release["replica"],
                "release": release["id"],
                "port": release["port"],
                "cpus": release["cpus"],
                "memory_nodes": release["memory_nodes"],
                "gpus": [gpu["pci_address"] for gpu in release["gpus"]],
            }
            for release in releases
        ],
        "model": releases[0]["model"],
        "drafter": releases[0]["drafter"],
        "image": releases[0]["image"],
        "engine_args": releases[0]["engine_args"],
        "changed_settings": {} if notes else plan["changed_settings"],
        "budgets": [] if notes else plan["budgets"],
    }


def benchmark_request(
    name: str,
    plan: dict[str, Any],
    status: list[dict[str, Any]],
    releases: list[dict[str, Any]],
    options: dict[str, Any],
    parts: list[str],
) -> dict[str, Any]:
    """Return the request for ``gpu_node_bench run``: every replica by itself, then the node through its balancer.

    :param status: what ``gpu-node status --json`` says.
    :param releases: the release.json that each replica serves, in the order of ``status``.
    :param options: the method, where it differs from the program's own.
    :param parts: out of decode, first and levels.
    :raises BenchmarkError: when a replica is not in.
    """
    if problems := _problems(status):
        raise BenchmarkError(problems)
    targets = [_replica_target(row, release, releases, parts) for row, release in zip(status, releases, strict=True)]
    if "levels" in parts:
        targets.append(_balancer_target(plan, targets))
    first = releases[0]
    return {
        "name": name,
        "profile": first["profile"],
        "release": "-".join(release["id"] for release in releases),
        "options": options,
        "targets": targets,
        "generator": {
            "image": first["image"]["id"].removeprefix("sha256:"),
            "model_folder": _mounted(first, MODEL_PATH),
            "tokenizer_mode": str(first["engine_args"].get("tokenizer-mode") or ""),
        },
        "node": node_picture(plan, releases),
    }


def benchmark_summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return what the play decides and shows by: sentences about figures that are invalid, worse or not compared.

    A figure that the baseline does not have yet, or that was not asked for this time, is no such figure.
    """
    figures = report["figures"]
    comparison = report.get("comparison") or {}
    rows, old = comparison.get("rows") or [], comparison.get("old") or {}
    both = {one["id"] for one in figures} & old.keys()
    unknown = [row for row in rows if row["verdict"] == "unknown" and row["id"] in both]
    return {
        "figures": len(figures),
        "invalid": [f"{one['id']}: {one['invalid']}" for one in figures if one["invalid"]],
        "compared": bool(comparison),
        "not_compared": [f"{row['id']}: {row['why']}" for row in unknown] + report.get("unusable_baselines", []),
        "worse": [
            f"{row['id']}: {row['old']:.4g} before, {row['new']:.4g} {row['unit']} now ({row['change']:+.1%})"
            for row in rows
            if row["verdict"] == "worse"
        ],
    }
