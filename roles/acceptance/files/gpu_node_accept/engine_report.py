"""What an engine says of itself, in its log and metrics, against the plan. Pure: text in, verdict out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gpu_node_accept.checks import Outcome, failed, not_here, not_run, passed, warned
from gpu_node_accept.server import Metrics

LINES: dict[str, Any] = json.loads(Path(__file__).with_name("engine_lines.json").read_text(encoding="utf-8"))
# An estimate may be off by this share. The engine counts in whole blocks, and a profile's figure is of one machine.
KV_TOLERANCE = 0.1
OFFLOAD_TOLERANCE = 0.02
# Used memory moves a little with the driver's version; a whole step of the plan's bars is some hundred MiB.
MEMORY_TOLERANCE = 0.02
_SWITCH = "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"


def found(name: str, log: str) -> list[str]:
    """What the engine's log says for a name of engine_lines.json, each once, in order."""
    return list(dict.fromkeys(re.findall(LINES["lines"][name]["pattern"], log)))


def _silent(what: str, engine: str) -> Outcome:
    known = LINES["vllm"]
    of = "" if engine in ("", known) else f"; the patterns are of vLLM {known}, this is {engine}"
    return not_run(
        f"the engine's log has no line about its {what} since it started{of}",
        "restart the replica when the journal no longer holds its start",
    )


def settings(planned: dict[str, Any], release: dict[str, Any]) -> Outcome:
    """The running release is made of the settings that this run has; after a rollback it is not."""
    wanted = "a release of these settings"
    named = ("port", "served_model_name")
    differ = [f"{name} {release.get(name)} ({planned[name]})" for name in named if release.get(name) != planned[name]]
    runs, plans = release.get("engine_args") or {}, planned["engine_args"]
    differ += [
        f"{name} {json.dumps(runs.get(name))} ({json.dumps(plans.get(name))})"
        for name in sorted(runs.keys() | plans.keys())
        if runs.get(name) != plans.get(name)
    ]
    seen = f"release {release.get('id', '')}"
    if not differ:
        return passed(seen, wanted)
    remedy = (
        "the other checks compare with the settings, which are in brackets: run playbooks/rollout.yml, or set them"
        " back when the release is the wanted one"
    )
    return warned(f"{seen} has {'; '.join(differ)}"[:400], wanted, remedy)


def kv_tokens(expected: dict[str, Any], metrics: Metrics) -> Outcome:
    """The KV cache's size."""
    planned = expected.get("kv_tokens")
    if planned is None:
        return not_here("the plan has no figure for it")
    where = LINES["metrics"]["kv_tokens"]
    said = metrics.label(where["name"], where["label"]) or ""
    wanted = f"{planned:,} tokens, a tenth less at most"
    if not said.isdecimal():
        return not_run(f"/metrics has no {where['name']} with {where['label']}", "look whether this server is a vLLM")
    if int(said) < planned * (1 - KV_TOLERANCE):
        remedy = "look at the engine's log for what took the memory; lower max_model_len or raise kv_cache_memory"
        return failed(f"{int(said):,} tokens", wanted, remedy)
    return passed(f"{int(said):,} tokens", wanted)


def graph_sizes(expected: dict[str, Any], log: str, engine: str) -> Outcome:
    """The batch sizes with a CUDA graph: above the largest, each decode step runs without one."""
    planned = expected.get("graph_sizes")
    if not planned:
        return not_here("the plan has no CUDA graph sizes")
    said = found("graph_sizes", log)
    if not said:
        return _silent("CUDA graph sizes", engine)
    sizes = sorted({int(part) for part in said[-1].replace(",", " ").split()})
    seen, wanted = ", ".join(map(str, sizes)) or "none", ", ".join(map(str, planned))
    if sizes == sorted(planned):
        return passed(seen, wanted)
    return failed(seen, wanted, "compare cudagraph-capture-sizes with what the engine got (gpu-node smoke)")


def kv_offload(expected: dict[str, Any], log: str, metrics: Metrics, engine: str) -> Outcome:
    """The KV cache's tier in host memory."""
    planned = expected.get("kv_offload_bytes")
    if not planned:
        return not_here("the plan has no KV offload")
    where = LINES["metrics"]["kv_offload_bytes"]
    label = metrics.label(where["name"], where["label"]) or ""
    said = found("kv_offload_gb", log)
    if not label.isdecimal() and not said:
        return _silent("KV offload", engine)
    size = int(label) if label.isdecimal() else float(said[-1]) * 1e9
    seen, wanted = f"{size / 1e9:.2f} GB", f"{planned / 1e9:.2f} GB"
    if abs(size - planned) > planned * OFFLOAD_TOLERANCE:
        return failed(seen, wanted, "compare kv_offload_gb with kv-offloading-size (GiB, over all ranks) of the plan")
    return passed(seen, wanted)


def attention_backend(arguments: dict[str, Any], log: str, engine: str) -> Outcome:
    """The attention backend: another one than the plan's is slower, or reads the cache in another form."""
    return _backend("attention", str(arguments.get("attention-backend") or ""), log, engine)


def moe_backend(arguments: dict[str, Any], log: str, engine: str) -> Outcome:
    """The backend of the routed experts; the log's name goes on where the argument's ends (.._MXFP4_MXFP8)."""
    planned = arguments.get("moe-backend") or (arguments.get("kernel-config") or {}).get("moe_backend") or ""
    return _backend("moe", str(planned), log, engine)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "", name.upper())


def _backend(name: str, planned: str, log: str, engine: str) -> Outcome:
    if not planned or planned == "auto":
        said = found(name, log)
        return not_here(f"the plan leaves the choice to the engine{': ' + ', '.join(said) if said else ''}")
    said = found(name, log)
    if not said:
        return _silent(f"{name} backend", engine)
    if all(_plain(one).startswith(_plain(planned)) for one in said):
        return passed(", ".join(said), planned)
    return failed(", ".join(said), planned, "the engine took another one: read its log from the start for the reason")


def all_reduce_backends(arguments: dict[str, Any], env: dict[str, Any], log: str, engine: str) -> Outcome:
    """What sums up over the cards of a replica."""
    if int(arguments.get("tensor-parallel-size") or 1) < 2:
        return not_here("the replica has one card at most, nothing is summed up")
    said = found("all_reduce", log)
    if not said:
        return _silent("all-reduce backends", engine)
    names = re.findall(r"'([^']+)'", said[-1])
    seen = ", ".join(names) or "none"
    if str(env.get(_SWITCH, "")) == "1":
        wanted = "FLASHINFER_PCIE_IPC among them"
        if "FLASHINFER_PCIE_IPC" not in names:
            return failed(seen, wanted, "look in the engine's log why FlashInfer's PCIe all-reduce is off; P2P?")
        return passed(seen, wanted)
    return passed(seen, "one at least") if names else failed(seen, "one at least", "look at the engine's log")


def memory_after_boot(expected: dict[str, Any], used_mib: dict[str, int]) -> Outcome:
    """The cards' used memory against the plan's bar.

    :param used_mib: by UUID, of the replica's cards.
    """
    after, peak = expected.get("vram_after_boot_mib"), expected.get("vram_peak_mib")
    planned = after or peak
    if not planned:
        return not_here("the plan has no figure for it")
    if not used_mib:
        return not_run("nvidia-smi told nothing of the replica's cards", "run nvidia-smi on the node")
    seen = ", ".join(f"{mib:,}" for mib in used_mib.values()) + " MiB"
    wanted = f"{planned:,} MiB {'after boot' if after else 'at most'}"
    most = max(used_mib.values())
    if most > planned * (1 + MEMORY_TOLERANCE):
        return warned(seen, wanted, "look what else has memory on that card (nvidia-smi), and at the engine's log")
    if after and min(used_mib.values()) < planned * (1 - 5 * MEMORY_TOLERANCE):
        return warned(seen, wanted, "less than planned: compare kv_cache_memory and the model with the plan")
    return passed(seen, wanted)
