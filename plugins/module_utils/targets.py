# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The nodes of a fleet as a router or balancer in front of them takes them."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.settings import resolve_settings

_HEAD = "# Written by playbooks/targets.yml from the inventory: run it again after a node came or went.\n"
# A node says that it leaves for balancer_announce seconds; two looks within half of that see it in time.
_CHECK_MS = 2000
_LEAST_CHECK_MS = 250


def balancer_endpoint(profile: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return where a node's own balancer listens, what it serves, and how long it says that it leaves.

    :raises SettingsError: when the overrides cannot be used.
    """
    settings = resolve_settings(profile["settings"], overrides)
    return {
        "listen": settings["balancer_address"],
        "port": settings["balancer_port"],
        "model": settings["served_model_name"],
        "announce": settings["balancer_announce"],
        "loopback": ipaddress.ip_address(settings["balancer_address"]).is_loopback,
    }


def target_files(targets: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the texts of the files by name.

    :param targets: for each node ``node``, ``address``, ``port``, ``model`` and ``announce``.
    """
    models: dict[str, list[dict[str, Any]]] = {}
    for target in targets:
        models.setdefault(target["model"], []).append(target)
    named = {"gpu-nodes" if len(models) == 1 else f"gpu-nodes-{_slug(model)}": models[model] for model in models}
    return {
        "haproxy.cfg": _HEAD + "\n".join(_haproxy(name, nodes) for name, nodes in named.items()),
        "vllm-router.args": "".join(_vllm_router(nodes) for nodes in named.values()),
        "kubernetes.yml": _HEAD + "".join(_kubernetes(name, nodes) for name, nodes in named.items()),
        "targets.json": json.dumps(
            [
                {"node": one["node"], "url": _url(one), "health": f"{_url(one)}/health", "model": one["model"]}
                for one in targets
            ],
            indent=2,
        )
        + "\n",
    }


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "model"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _url(target: dict[str, Any]) -> str:
    return f"http://{_host(target['address'])}:{target['port']}"


def _haproxy(name: str, nodes: Sequence[dict[str, Any]]) -> str:
    soonest = min((node["announce"] for node in nodes if node["announce"]), default=0)
    every = max(min(_CHECK_MS, soonest * 250), _LEAST_CHECK_MS) if soonest else _CHECK_MS
    servers = "".join(
        f"    server {re.sub(r'[^A-Za-z0-9_.:-]', '_', node['node'])} {_host(node['address'])}:{node['port']}\n"
        for node in nodes
    )
    return f"""\
backend {name}
    mode http
    balance leastconn
    # 503 there means that the node leaves, or that nothing on it is in service. What runs on it already goes on.
    option httpchk GET /health
    http-check expect status 200
    default-server check inter {every}ms fall 2 rise 2
    # Only what reached no node is sent to another one: a request that may have been processed is never repeated.
    option redispatch
    # A token goes on when it comes; otherwise the first ones of an answer wait for more, a fifth of a second.
    option http-no-delay
    retries 3
    retry-on conn-failure
    timeout connect 5s
    timeout queue 60s
    # The longest silence of a stream: a prompt of a million tokens is read before the first one comes.
    timeout server 1h
{servers}"""


def _vllm_router(nodes: Sequence[dict[str, Any]]) -> str:
    urls = " ".join(_url(node) for node in nodes)
    return f"--worker-urls {urls} --policy consistent_hash\n"


def _kubernetes(name: str, nodes: Sequence[dict[str, Any]]) -> str:
    """A service without selector, and a slice for each kind of address and port."""
    slices: dict[tuple[str, int], list[dict[str, Any]]] = {}
    left_out = []
    for node in nodes:
        try:
            version = ipaddress.ip_address(node["address"]).version
        except ValueError:
            left_out.append(node["node"])
            continue
        slices.setdefault((f"IPv{version}", node["port"]), []).append(node)
    families = sorted({kind for kind, _ in slices})
    text = "".join(f"# Left out, a slice takes IP addresses alone (targets_address): {node}\n" for node in left_out)
    text += f"""\
---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  ipFamilyPolicy: {"PreferDualStack" if len(families) > 1 else "SingleStack"}
  ipFamilies: {json.dumps(families or ["IPv4"])}
  ports:
    - name: http
      port: 80
      protocol: TCP
"""
    for (kind, port), members in sorted(slices.items()):
        text += f"""\
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {name}-{kind.lower()}-{port}
  labels:
    kubernetes.io/service-name: {name}
    endpointslice.kubernetes.io/managed-by: gpu-node
addressType: {kind}
ports:
  - name: http
    port: {port}
    protocol: TCP
endpoints:
"""
        text += "".join(
            f"  # {node['node']}\n  - addresses: [{json.dumps(node['address'])}]\n    conditions: {{ready: true}}\n"
            for node in members
        )
    return text
