# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Arguments of ``vllm serve``, as the mapping that its ``--config`` file holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import canonical
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import AUTO

# Where things lie inside the container.
MODEL_PATH = "/model"
DRAFTER_PATH = "/drafter"
# Switches that cannot be turned off by a name of their own: they are off unless given.
_WITHOUT_OPPOSITE = ("aggregate-engine-logging",)
# Lists that the engine reads as one JSON text, where it takes the others word by word.
_JSON_LISTS = ("allowed-origins", "allowed-methods", "allowed-headers")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9.-]*")
# The plan decides these; an override would make the plan say something else than what runs.
OWNED = {
    "host": "replicas listen on loopback only; see balancer_address",
    "port": "set first_port",
    "model": "the profile names the artifact",
    "served-model-name": "set served_model_name",
    "max-model-len": "set max_model_len",
    "max-num-seqs": "set max_num_seqs",
    "max-num-batched-tokens": "set max_num_batched_tokens",
    "tensor-parallel-size": "set tensor_parallel_size",
    "tp": "set tensor_parallel_size",
    "enable-expert-parallel": "set expert_parallel",
    "gpu-memory-utilization": "set gpu_memory_utilization",
    "device-memory-utilization": "set gpu_memory_utilization",
    "num-gpu-blocks-override": "set kv_cache_memory or gpu_memory_utilization",
    "kv-cache-memory-bytes": "set kv_cache_memory",
    "kv-offloading-size": "set kv_offload_gb",
    "kv-offloading-backend": "set kv_offload_gb",
    "kv-transfer-config": "the engine has the connector of kv_offload_gb, and host memory for no other; set that",
    "cudagraph-capture-sizes": "they follow from max_num_seqs and speculative_tokens",
    "speculative-config": "set speculative_tokens, and drafter or speculative_method",
    "shutdown-timeout": "set shutdown_timeout",
    "config": "the plan writes this file itself",
    "api-key": "the engine's key is made on the node and never an argument",
    "hf-token": "a secret is never an argument; the engine downloads nothing",
    "uds": "replicas listen on loopback; see first_port",
    "grpc": "balancer and prober speak HTTP to it",
    "grpc-port": "balancer and prober speak HTTP to it",
    "headless": "balancer and prober speak HTTP to it",
    "disable-log-stats": "the prober and the checks read the engine's metrics",
    "device-ids": "set gpus",
    "pipeline-parallel-size": "a replica is one tensor-parallel group; set tensor_parallel_size and replicas",
    "prefill-context-parallel-size": "a replica is one tensor-parallel group; set tensor_parallel_size and replicas",
    "nnodes": "a replica is one container on one node",
    "node-rank": "a replica is one container on one node",
    "master-addr": "a replica is one container on one node",
    "master-port": "a replica is one container on one node",
    "ssl-keyfile": "replicas listen on loopback only, without TLS",
    "ssl-certfile": "replicas listen on loopback only, without TLS",
}
# The same for every argument whose name begins so.
OWNED_FAMILIES = {
    "data-parallel-": "each replica is an engine of its own behind the balancer; set replicas",
    "numa-bind": "the container's cpuset pins CPUs and memory; see cpus_per_replica",
    "spec-": "set speculative_tokens, and drafter or speculative_method",
    # The 8x document: every expert is in GPU memory, and the host-RAM expert machinery is off.
    "cpu-offload-": "weights are in GPU memory, and none of the host memory is planned for them; leave it out",
    "offload-": "weights are in GPU memory, and none of the host memory is planned for them; leave it out",
}
# What recipes still carry and the parser of vLLM 0.33.0 has no more, with what took its place.
GONE = {
    "swap-space": "set kv_offload_gb for KV cache in host memory (profile 8x)",
    "disable-log-requests": "leave it out: requests are logged only with enable-log-requests",
    "enable-reasoning": "leave it out: reasoning-parser is enough",
    "num-scheduler-steps": "leave it out: async-scheduling took its place",
    "use-v2-block-manager": "leave it out",
    "max-seq-len-to-capture": "leave it out",
    "cuda-graph-sizes": "leave it out: the profile chooses the CUDA graph sizes",
    "full-cuda-graph": "write compilation-config: {cudagraph_mode: FULL}",
    "guided-decoding-backend": "write structured-outputs-config: {backend: auto}",
    "task": "leave it out: runner and convert took its place",
    "device": "leave it out",
    "speculative-model": "set drafter",
    "num-speculative-tokens": "set speculative_tokens",
    "rope-scaling": "write it into hf-overrides",
    "rope-theta": "write it into hf-overrides",
    "disable-mm-preprocessor-cache": "write mm-processor-cache-gb: 0",
}
# Short names for a part of a mapping. Given both, the engine refuses them or takes the short one without a word.
_SHORT_NAMES = {
    "attention-backend": ("attention-config", "backend"),
    "max-cudagraph-capture-size": ("compilation-config", "max_cudagraph_capture_size"),
    "enable-flashinfer-autotune": ("kernel-config", "enable_flashinfer_autotune"),
    "linear-backend": ("kernel-config", "linear_backend"),
    "moe-backend": ("kernel-config", "moe_backend"),
    "monokernel": ("kernel-config", "monokernel"),
    "sparse-indexer-topk-backend": ("kernel-config", "sparse_indexer_topk_backend"),
    "log-level": ("logging-config", "log_level"),
    "reasoning-parser": ("structured-outputs-config", "reasoning_parser"),
    "reasoning-parser-plugin": ("structured-outputs-config", "reasoning_parser_plugin"),
}


def normalise(name: str) -> str:
    """Return an argument's name as the configuration file has it: ``--max_num_seqs`` becomes ``max-num-seqs``."""
    return name.strip().lstrip("-").replace("_", "-")


def _is_plain(value: Any) -> bool:
    """Tell whether a value has one JSON text: a date, for example, which YAML makes of 2030-01-01, has none."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(_is_plain(inner) for inner in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (str, int))


def read_value(value: Any) -> Any:
    """Return what a value means: a text that is a mapping or a list in JSON is that mapping or list."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _is_broken_json(text: str) -> bool:
    """Tell whether a text was to be JSON: not a chat template, and not an address like ``[::1]:8000``."""
    bare = text.strip()
    return (bare.startswith("{") and bare[1:2] not in ("{", "%", "#")) or (bare[:1] == "[" and bare[-1:] == "]")


def _text_problem(text: str) -> str:
    # Someone's shell quoting, kept literally, would reach the engine inside the value (and be ignored by it).
    if text.lstrip()[:1] in ("'", '"'):
        return f"begins with a quote: {text!r}; give the bare text, and JSON as a YAML mapping"
    if text.strip().lower() in ("true", "false"):
        return f"is the text {text!r}, which the engine takes for something else; write it without quotes"
    return ""


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a value, names of a mapping's parts too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _value_problem(value: Any) -> str:
    """Return what is wrong with an argument's value (see ``read_value``), or an empty text.

    Each of these is taken by the engine's parser as something else than it says (seen with vLLM 0.33.0).
    """
    if not _is_plain(value):
        return (
            f"holds something that JSON has not: {value!r}; "
            "give text (in quotes), numbers, booleans, lists and mappings with text keys"
        )
    if value is None:
        return "is empty, which the engine reads as the text 'None'; leave the argument out"
    for text in _texts(value):
        problem = _text_problem(text)
        if problem:
            return problem if text is value else f"has a part that {problem}"
    if isinstance(value, str):
        if _is_broken_json(value):
            return f"is {value!r}, which is no JSON; write it as a YAML mapping or list, like {{cudagraph_mode: FULL}}"
        if not value or value.startswith("-"):
            return f"is {value!r}, which the engine does not take for a value; give a text that begins otherwise"
    if isinstance(value, list) and (
        not value or any(isinstance(item, (dict, list, bool)) or item is None for item in value)
    ):
        return f"is {value!r}; the engine takes lists of texts and numbers, with one at least"
    return ""


def _owner(name: str) -> str:
    """Return what to set in place of an argument that the plan decides, or an empty text for any other.

    The engine's parser also takes the beginning of a name, and one part of a mapping as name.part.
    """
    whole = name.partition(".")[0]
    for known, instead in OWNED.items():
        if whole and (known.startswith(whole) or known == whole.removeprefix("no-")):
            return instead
    for family, instead in OWNED_FAMILIES.items():
        if whole and (family.startswith(whole) or whole.removeprefix("no-").startswith(family)):
            return instead
    return ""


def check_engine_args(args: dict[str, Any]) -> list[str]:
    """Return a sentence for every argument that an operator may not give, or not in this form."""
    problems = []
    given: dict[str, Any] = {}
    for key, text in args.items():
        name, value = normalise(str(key)), read_value(text)
        if not isinstance(key, str) or not _NAME.fullmatch(name):
            problems.append(f"engine_args: '{key}' is no name of an argument; write one like max-logprobs")
        if name in given:
            problems.append(f"engine_args: '{key}' and '{given[name]}' are the same argument; give one of them")
        given[name] = key
        owner = _owner(name)
        if owner:
            # Its value is not looked at: it may be a key, and would be shown.
            problems.append(f"engine_args: '{key}' is not for overriding; {owner}")
            continue
        whole = name.partition(".")[0]
        if whole.removeprefix("no-") in GONE:
            problems.append(f"engine_args: '{key}' is gone from vLLM 0.33.0; {GONE[whole.removeprefix('no-')]}")
            continue
        other = next((known for known in given if known != name and whole in (known, known.partition(".")[0])), None)
        # Two parts of one mapping go together; a part and the whole do not.
        if other is not None and whole in (name, other):
            problems.append(f"engine_args: '{key}' is also in '{given[other]}'; give one of them")
        if "cudagraph_capture_sizes" in (
            name.partition(".")[2].replace("-", "_"),
            *(value if isinstance(value, dict) else ()),
        ):
            sizes = OWNED["cudagraph-capture-sizes"]
            problems.append(f"engine_args: cudagraph_capture_sizes in '{key}' is not for overriding; {sizes}")
        problem = _value_problem(value)
        if problem:
            problems.append(f"engine_args: the value of '{key}' {problem}")
    return problems


def said_twice(fixed: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """Return a sentence for everything that the engine would be told by two names.

    :param fixed: the profile's arguments.
    :param given: the operator's, which name one of the two at least.
    """
    merged, problems = lay_over(fixed, given), []
    for name, (mapping, part) in _SHORT_NAMES.items():
        inner = merged.get(mapping)
        if name in merged and isinstance(inner, dict) and part in inner:
            long = f"{mapping}.{part}"
            ours = long if part in fixed.get(mapping, {}) else name
            problems.append(
                f"engine_args: '{name}' and '{long}' are the same thing, and the engine does not take both; give it by "
                f"the name '{ours}'"
            )
    return problems


def lay_over(args: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return ``args`` with ``more`` laid over; ``name.part`` changes that part of a mapping and leaves the others.

    As an argument of its own, ``name.part`` would make the engine forget the whole mapping ``name``.
    """
    merged = dict(args)
    for key, text in more.items():
        name, *parts = normalise(key).split(".")
        value = read_value(text)
        if parts:
            base = merged.get(name)
            # Parts of a mapping are the engine's own field names, with underscores.
            merged[name] = _with_part(
                base if isinstance(base, dict) else {}, [p.replace("-", "_") for p in parts], value
            )
        else:
            merged[name] = canonical(value) if name in _JSON_LISTS and isinstance(value, list) else value
    return merged


def _with_part(base: dict[str, Any], parts: list[str], value: Any) -> dict[str, Any]:
    first, *rest = parts
    inner = base.get(first)
    return {**base, first: _with_part(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def config_lines(args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as the engine's configuration file must spell them.

    ``name: false`` changes nothing there; what turns a switch off is ``no-name: true``.
    """
    spelled = {}
    for name, value in args.items():
        if value is False:
            if name not in _WITHOUT_OPPOSITE:
                spelled[f"no-{name}"] = True
        else:
            spelled[name] = value
    return spelled


def speculative_config(settings: dict[str, Any], drafter_path: str) -> dict[str, Any] | None:
    """Return vLLM's ``speculative-config``, or None for no speculation.

    :param settings: ``speculative_tokens`` and either ``drafter`` (a DSpark head) or ``speculative_method``.
    :param drafter_path: where the head lies inside the container; empty when it is part of the model.
    """
    tokens = settings["speculative_tokens"]
    if "drafter" in settings:
        if settings["drafter"] == "none":
            return None
        config = {"method": "dspark", "num_speculative_tokens": tokens, "draft_sample_method": "probabilistic"}
        return {**config, "model": drafter_path} if drafter_path else config
    if settings["speculative_method"] == "none":
        return None
    config = {"method": settings["speculative_method"], "num_speculative_tokens": tokens}
    if config["method"] == "ngram":
        config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return config


def engine_args(
    settings: dict[str, Any],
    fixed: dict[str, Any],
    port: int,
    graph_sizes: list[int],
    kv_offload_gib: float,
    drafter_path: str,
) -> dict[str, Any]:
    """Return the complete arguments of one replica.

    :param settings: resolved settings (see ``settings.SETTINGS``).
    :param fixed: arguments that the profile sets and no setting covers.
    :param port: loopback TCP port.
    :param graph_sizes: rows of each CUDA graph; empty leaves the choice to the engine.
    :param kv_offload_gib: KV cache in host memory, GiB summed over the replica's GPUs; 0 for none.
    :param drafter_path: see :func:`speculative_config`.
    """
    args: dict[str, Any] = {
        "model": MODEL_PATH,
        "served-model-name": settings["served_model_name"],
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": settings["max_model_len"],
        "max-num-seqs": settings["max_num_seqs"],
        "max-num-batched-tokens": settings["max_num_batched_tokens"],
        "shutdown-timeout": settings["shutdown_timeout"],
    }
    if "tensor_parallel_size" in settings:
        args["tensor-parallel-size"] = settings["tensor_parallel_size"]
    if settings.get("expert_parallel"):
        args["enable-expert-parallel"] = True
    if settings["kv_cache_memory"] == AUTO:
        args["gpu-memory-utilization"] = settings["gpu_memory_utilization"]
    else:
        args["kv-cache-memory-bytes"] = settings["kv_cache_memory"]
    if graph_sizes:
        args["cudagraph-capture-sizes"] = graph_sizes
    if kv_offload_gib:
        args |= {"kv-offloading-size": kv_offload_gib, "kv-offloading-backend": "native"}
    speculation = speculative_config(settings, drafter_path)
    if speculation is not None:
        args["speculative-config"] = speculation
    return lay_over(lay_over(args, fixed), settings["engine_args"])
