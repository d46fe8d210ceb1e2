"""What this node says of itself to Prometheus: which release each replica runs, since when, who is in, and why not."""

import os
import re

from gpu_node import files
from gpu_node.config import linked_release, load_release, started_release
from gpu_node.errors import ConfigError
from gpu_node.tool import Tool
from gpu_node.wanted import Record

HELP = {
    "gpu_node_release_info": "The release that the replica runs.",
    "gpu_node_replica_in": "Whether the balancer sends requests to the replica.",
    "gpu_node_out_reason": "Why the replica is not in the balancer.",
    "gpu_node_release_since_seconds": "When the replica was pointed at its release, in seconds since the epoch.",
    "gpu_node_rollout_info": "The last rollout that wanted something of this node, and how far it is.",
}


def _label(value: str) -> str:
    return re.sub(r'(["\\])', r"\\\1", value).replace("\n", r"\n")


def render(samples: list[tuple[str, dict[str, str], float]]) -> str:
    """Prometheus' text of the samples (name, labels, value), by name in the order of HELP."""
    lines = []
    for name, words in HELP.items():
        own = [(labels, value) for sample, labels, value in samples if sample == name]
        if own:
            lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge"]
        for labels, value in own:
            inner = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
            lines.append(f"{name}{{{inner}}} {value:.0f}")
    return "\n".join(lines) + "\n"


def samples(tool: Tool) -> list[tuple[str, dict[str, str], float]]:
    """What is so now."""
    found: list[tuple[str, dict[str, str], float]] = []
    for replica in tool.node.replicas:
        index, label = replica.index, {"replica": str(replica.index)}
        current = linked_release(tool.paths, index, "current")
        # What the container was started from; a unit that an earlier version started did not note it.
        running = started_release(tool.paths, index) or current
        if running:
            try:
                release = load_release(tool.paths, running)
                model = {"model": release.model, "model_digest": release.model_digest}
                made_of = {**model, "image": release.image_id[:12]}
            except ConfigError:
                made_of = {"model": "", "model_digest": "", "image": ""}
            found.append(("gpu_node_release_info", {**label, "release": running, **made_of}, 1))
        if current:
            since = os.lstat(tool.paths.replica(index) / "current").st_mtime
            found.append(("gpu_node_release_since_seconds", label, since))
        reasons = tool.reasons.of(index)
        found.append(("gpu_node_replica_in", label, float(not reasons)))
        found += [("gpu_node_out_reason", {**label, "reason": reason}, 1) for reason in reasons]
    try:
        wanted = Record(tool.paths, tool.host, tool.by).read()
    except ConfigError:
        wanted = None
    if wanted:
        found.append(("gpu_node_rollout_info", {"rollout": wanted.rollout, "state": wanted.state}, 1))
    return found


def write(tool: Tool) -> None:
    """Bring the file that nginx serves up to date."""
    text = render(samples(tool))
    if files.read_text(tool.paths.metrics) != text:
        files.open_folder(tool.paths.metrics.parent)
        files.atomic_write(tool.paths.metrics, text)
