# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a probe container should have seen of the GPUs, against what it saw. Pure functions; ``gpu_probe`` runs it."""

from __future__ import annotations

import re
from typing import Any

_CARD_NODE = re.compile(r"/dev/nvidia[0-9]+")


def _node_problems(seen: dict[str, Any], nodes: dict[str, list[int]]) -> list[str]:
    problems = []
    if missing := sorted(nodes.keys() - seen.keys()):
        problems.append(f"does not have {', '.join(missing)}")
    if extra := sorted(path for path in seen.keys() - nodes.keys() if _CARD_NODE.fullmatch(path)):
        problems.append(f"has {', '.join(extra)} as well, a GPU that is not one of its own")
    for path in sorted(nodes.keys() & seen.keys()):
        node = seen[path]
        if node["error"]:
            problems.append(f"cannot open {path}: {node['error']}")
        elif node["device"] != nodes[path]:
            now, then = (":".join(map(str, numbers)) for numbers in (nodes[path], node["device"]))
            problems.append(f"has {path} as device {then}, and on the node it is {now}")
    return problems


def _cuda_problems(cuda: dict[str, Any], uuids: list[str]) -> list[str]:
    if cuda["error"]:
        return [f"cannot start CUDA: {cuda['error']}"]
    problems = []
    if missing := [uuid for uuid in uuids if uuid not in cuda["uuids"]]:
        problems.append(f"finds no {', '.join(missing)} with CUDA")
    if extra := [uuid for uuid in cuda["uuids"] if uuid not in uuids]:
        problems.append(f"finds {', '.join(extra)} with CUDA, which it was not given")
    return problems


def look_problems(look: dict[str, Any], nodes: dict[str, list[int]], uuids: list[str], moment: str) -> list[str]:
    """Return what is wrong with what a container saw, a sentence each.

    :param look: what ``gpu_look`` said: ``{"nodes": {path: {"device": [major, minor], "error": text}},
        "cuda": {"error": text, "uuids": [...]} or None}``; None when CUDA was not asked.
    :param nodes: the device nodes that it should have, each with major and minor number on the node.
    :param uuids: the GPUs that it should have.
    :param moment: when, for example ``at its start``.
    """
    problems = _node_problems(look["nodes"], nodes)
    if look["cuda"] is not None:
        problems += _cuda_problems(look["cuda"], uuids)
    return [f"{moment} the container {problem}" for problem in problems]


def start_problem(said: str, uuids: list[str]) -> str:
    """Return a sentence on a container that did not start, from what Podman said."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next(
        (line for line in reversed(lines) if line.lower().startswith("error")), lines[-1] if lines else "nothing"
    )
    if "unresolvable CDI devices" in said:
        # It names all that were asked for, also those that it found.
        return (
            f"Podman does not find every CDI device of {', '.join(uuids)}: the specification in /etc/cdi lacks one, or"
            " Podman cannot read that (run the same with `podman --log-level debug` to see why)"
        )
    if "executing hook" in said:
        return (
            "the container did not start, because a hook in the CDI specification failed: crun makes a read-only root"
            f" read-only before it runs hooks; make a specification without any: `systemctl start gpu-node-cdi.service`"
            f" ({last[:300]})"
        )
    return f"the container did not start: {last[:400]}"
