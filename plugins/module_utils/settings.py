# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The settings of a profile: their types, units and limits, and how overrides are laid over them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# What podman takes for --memory and --shm-size: a whole number of bytes, or of binary k, m, g.
# Fifteen digits are more than any machine has.
_PODMAN_SIZE = re.compile(r"[1-9][0-9]{0,14}[bkmg]?")
_PODMAN_FACTORS = {"b": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
# vLLM's human-readable integers: k, m, g, t are decimal, and only they take a fraction; K, M, G, T are binary.
_VLLM_SIZE = re.compile(r"[1-9][0-9]{0,14}(?:(?:\.[0-9]{1,15})?[kmgt]|[KMGT])?")


_VLLM_FACTORS = {"": 1} | {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_VLLM_FACTORS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}


class SettingsError(ValueError):
    """One or more settings are wrong; ``problems`` holds a sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Setting:
    """One setting an operator may override.

    ``kind`` is ``int``, ``number``, ``flag``, ``text``, ``podman_size``, ``vllm_size``, ``list`` or ``mapping``;
    ``environment`` is the name that the source recipe, or the kernels' plugin, uses for it.
    """

    kind: str
    unit: str
    description: str
    environment: str = ""
    minimum: int = 0
    maximum: int = 2**53
    choices: tuple[str, ...] = ()


SETTINGS: dict[str, Setting] = {
    "replicas": Setting("int", "replicas", "vLLM servers on this node", minimum=1, maximum=64),
    "gpus": Setting(
        "list", "PCI addresses", "the GPUs to serve with; empty takes every one that the profile is made for"
    ),
    "mixed_gpus": Setting("flag", "", "lets one replica have GPUs of different models: the slowest one sets its pace"),
    "span_sockets": Setting(
        "flag", "", "lets one replica have GPUs on different sockets: slower, and more memory traffic"
    ),
    "cpus_per_replica": Setting(
        "int", "CPUs", "CPUs that each replica is pinned to; 0 shares those of its NUMA node evenly", maximum=4096
    ),
    "served_model_name": Setting("text", "", "the model name that clients ask for"),
    "tensor_parallel_size": Setting("int", "GPUs", "GPUs of each replica", minimum=1, maximum=16),
    "expert_parallel": Setting("flag", "", "gives each GPU whole experts (as many groups as the replica has GPUs)"),
    "max_model_len": Setting("int", "tokens", "context window", "MAX_MODEL_LEN", minimum=16),
    "max_num_seqs": Setting("int", "sequences", "sequences decoded at once", "MAX_NUM_SEQS", minimum=1, maximum=65536),
    "max_num_batched_tokens": Setting("int", "tokens", "prefill chunk", "MAX_BATCHED", minimum=16),
    "gpu_memory_utilization": Setting(
        "number",
        "share",
        "part of each GPU's memory that weights, KV cache and activations may use",
        minimum=0,
        maximum=1,
    ),
    "kv_cache_memory": Setting(
        "vllm_size", "bytes (18G is 18 GiB, 18g is decimal)", "KV cache of each device", "KV_MEM"
    ),
    "kv_offload_gb": Setting(
        "int",
        "GB (decimal)",
        "KV cache in host memory, for a whole replica, 0 for none: long conversations of many turns find more of their "
        "beginning there; decode is no faster",
        "KV_OFFLOAD_GB",
        maximum=16384,
    ),
    "speculative_method": Setting("text", "", "how draft tokens are made", choices=("none", "ngram", "mtp")),
    "speculative_tokens": Setting("int", "tokens", "draft tokens per step", "SPEC_K", minimum=1, maximum=64),
    "drafter": Setting(
        "text",
        "",
        "the DSpark head that drafts tokens: `released` comes with the model, `code` is tuned for code",
        "DS41_DRAFTER",
        choices=("code", "released", "none"),
    ),
    "chunked_indexer": Setting("flag", "", "decodes the sparse indexer in chunks of whole sequences", "DS41_IDX_CHUNK"),
    "length_aware_topk": Setting("flag", "", "top-k of the indexer over each sequence's own length", "DS41_ROWTOPK"),
    "candidate_kernels": Setting(
        "flag", "", "chooses the indexer's candidate blocks, and within them, with kernels of our own", "DS41_CAND"
    ),
    "moe_kernel": Setting("flag", "", "the deterministic MoE kernel for decode batches", "DS41_XMOE"),
    "moe_flat_max_rows": Setting(
        "int",
        "rows",
        "largest decode batch on the MoE kernel's flat path",
        "XMOE_FLAT_MAX_BSZ",
        minimum=1,
        maximum=1152,
    ),
    "all_reduce_8bit": Setting("flag", "", "8-bit all-reduce between the GPUs of a replica", "DS41_AR8"),
    "all_reduce_8bit_min_rows": Setting(
        "int", "rows", "smallest batch on the 8-bit all-reduce", "DS41_AR8_MIN_ROWS", minimum=1, maximum=1048576
    ),
    "pcie_all_reduce": Setting(
        "flag", "", "FlashInfer's PCIe IPC all-reduce for smaller batches", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"
    ),
    "packed_engram_gather": Setting("flag", "", "gathers Engram rows as they are stored", "DS41_ENGRAM_PACKED"),
    "gathered_lm_head": Setting("flag", "", "gathers the lm_head once instead of logits each step", "DS41_LMHEAD_REPL"),
    "replicated_wkv_min_rows": Setting(
        "int",
        "rows",
        "prefill chunks from this size on use Engram's wkv whole on every GPU; 0 never does",
        "DS41_WKV_REPL_MIN_ROWS",
        maximum=1048576,
    ),
    "container_memory": Setting(
        "podman_size", "bytes (4g is 4 GiB)", "memory cap of each replica's container", "CONTAINER_MEM"
    ),
    "shm_size": Setting("podman_size", "bytes (256m is 256 MiB)", "size of each container's /dev/shm"),
    "first_port": Setting(
        "int", "TCP port", "loopback port of replica 0; the next replicas take the next ports", minimum=1, maximum=65535
    ),
    "balancer_address": Setting("text", "IP address", "address the balancer listens on; 0.0.0.0 is every one"),
    "balancer_port": Setting("int", "TCP port", "port the balancer listens on", minimum=1, maximum=65535),
    "balancer_status_port": Setting(
        "int", "TCP port", "loopback port on which the balancer tells its own state", minimum=1, maximum=65535
    ),
    "balancer_announce": Setting(
        "int",
        "seconds",
        "how long /health answers 503 while requests are still served, before the last replica that is in goes out: "
        "a balancer in front of the node stops sending; 0 does without",
        maximum=600,
    ),
    "drain_timeout": Setting("int", "seconds", "longest wait for running requests before a stop", minimum=1),
    "shutdown_timeout": Setting(
        "int", "seconds", "how long the engine finishes running requests after it was told to stop", minimum=1
    ),
    "start_timeout": Setting("int", "seconds", "longest wait for a replica's first token after its start", minimum=10),
    "prober_interval": Setting("int", "seconds", "time between two looks at a replica", minimum=1, maximum=3600),
    "prober_stall": Setting(
        "int", "seconds", "a replica with running requests and no progress for this long goes out", minimum=2
    ),
    "gate_tokens": Setting(
        "int",
        "tokens",
        "a replica that was switched generates this many before it goes in again",
        minimum=4,
        maximum=512,
    ),
    "gate_speed_factor": Setting(
        "number",
        "share",
        "a new release may generate no slower than this share of the one before; 0 does not look at it",
        maximum=1,
    ),
    "engine_args": Setting("mapping", "", "more vLLM arguments by their long names, laid over the profile's"),
    "engine_env": Setting("mapping", "", "more environment variables of the engine: what a pack's own image asks for"),
}
# A setting of this value is worked out by the plan, where the profile itself says so.
AUTO = "auto"

# The types by the names that argument specifications use: Ansible hands in subclasses whose own names say nothing.
_TYPES = (bool, int, float, str, dict, list)

_BY_ENVIRONMENT = {setting.environment: name for name, setting in SETTINGS.items() if setting.environment}


def podman_bytes(size: str) -> int:
    """Return the bytes of a podman size like ``4g``."""
    return int(size.rstrip("bkmg")) * _PODMAN_FACTORS.get(size[-1], 1)


def vllm_bytes(size: str) -> int:
    """Return the bytes of a vLLM size: ``18G`` is 18 GiB, ``18g`` is 18 billion."""
    number = size.rstrip("kmgtKMGT")
    return int(Fraction(number) * _VLLM_FACTORS[size[len(number) :]])


def _nearest(name: str, profile: Iterable[str]) -> str:
    # Known names are lower case and the recipe's upper case: compare without it, or MAX_NUM_SEQ is near nothing. Of a
    # pair like max_num_seqs and MAX_NUM_SEQS the last one here stays, which is the one in the case that was asked in.
    ours = [key for key in SETTINGS if key in profile]
    recipe = [key for key, setting in _BY_ENVIRONMENT.items() if setting in profile]
    known = {key.lower(): key for key in ([*ours, *recipe] if name.isupper() else [*recipe, *ours])}
    return known[difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]]


def type_word(value: Any) -> str:
    """Return the name of a value's type, for people."""
    if value is None or value == "":
        return "empty"
    return next((kind.__name__ for kind in _TYPES if isinstance(value, kind)), "of another type")


def _number_problem(name: str, setting: Setting, value: Any) -> str:
    shown = f"{name}: {value!r:.80}"
    whole = setting.kind == "int"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        wanted, example = ("a whole number", "8") if whole else ("a number", "0.93")
        return f"{shown} is {type_word(value)}, {wanted} of {setting.unit} is needed; write {name}: {example}"
    if not setting.minimum <= value <= setting.maximum:
        return f"{shown} is outside {setting.minimum} to {setting.maximum} {setting.unit}"
    return ""


def _type_problem(name: str, setting: Setting, value: Any) -> str:
    """Return a sentence that says why ``value`` cannot be ``name``, or an empty string."""
    shown = f"{name}: {value!r:.80}"
    if setting.kind in ("int", "number"):
        return _number_problem(name, setting, value)
    if setting.kind == "flag":
        if not isinstance(value, bool):
            return f"{shown} is {type_word(value)}, true or false is needed; write {name}: true"
    elif setting.kind == "mapping":
        if not isinstance(value, dict):
            return f"{shown} is {type_word(value)}, a mapping is needed; write {name}: {{}} for none"
    elif setting.kind == "list":
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            return f"{shown} is no list of {setting.unit}; write {name}: [] for none, and each of them in quotes"
    elif not isinstance(value, str) or not value:
        return f"{shown} is {type_word(value)}, a text is needed; put it in quotes"
    elif not value.isprintable():
        return f"{shown} holds control characters; write it in one line of plain text"
    elif setting.choices and value not in setting.choices:
        return f"{shown} is not one of {', '.join(setting.choices)}"
    elif setting.kind == "podman_size" and not _PODMAN_SIZE.fullmatch(value):
        return f"{shown} is no size that podman takes; write a whole number and b, k, m or g, like 4g"
    elif setting.kind == "vllm_size" and not _VLLM_SIZE.fullmatch(value):
        return f"{shown} is no size that vLLM takes; write 18G for 18 GiB or 18g for 18 billion bytes"
    return ""


def _value(name: str, key: str, value: Any) -> Any:
    """Return a value as the setting has it: by the recipe's name a switch is 0 or 1."""
    if key != name and SETTINGS[name].kind == "flag" and not isinstance(value, bool) and value in (0, 1, "0", "1"):
        return value in (1, "1")
    return value


def given_settings(overrides: dict[str, Any]) -> set[str]:
    """Return our names of the settings that the operator wrote, also where the profile has the same value."""
    return {_BY_ENVIRONMENT.get(key, key) for key in overrides}


def _elsewhere(setting: Setting) -> str:
    """Say where a switch of the pack's kernels belongs: its document has it on "both profiles", and means its own."""
    if setting.kind == "text" or not setting.environment.startswith(("DS41_", "XMOE_")):
        return ""
    return ": it is of the kernels for DeepSeek-V4.1, profile 8x (the pack has a 2x profile of its own, not this one)"


def resolve_settings(defaults: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Lay overrides over a profile's defaults.

    :param defaults: the profile's value for each setting that it has; settings it does not list mean nothing to it.
    :param overrides: values by our names, or by the source recipe's environment names.
    :raises SettingsError: with a sentence for every unknown name, wrong type and value out of range.
    """
    problems = [
        f"the profile has a value for '{name}', which is no setting" for name in defaults if name not in SETTINGS
    ]
    settings = dict(defaults)
    given: dict[str, str] = {}
    for key, value in overrides.items():
        if key == "PROFILE":
            problems.append(f"PROFILE: {value!r} cannot be set here; set serving_plan_profile")
            continue
        name = _BY_ENVIRONMENT.get(key, key)
        if name not in SETTINGS:
            problems.append(f"unknown setting '{key}'; the nearest known one is '{_nearest(str(key), defaults)}'")
            continue
        if name not in defaults:
            problems.append(f"'{key}' means nothing to this profile{_elsewhere(SETTINGS[name])}; leave it out")
            continue
        if name in given:
            problems.append(f"'{key}' and '{given[name]}' are the same setting; give one of them")
        given[name] = key
        settings[name] = _value(name, key, value)
    for name, value in settings.items():
        if name in SETTINGS and not (value == AUTO and defaults[name] == AUTO):
            problem = _type_problem(name, SETTINGS[name], value)
            if problem:
                problems.append(problem)
    if problems:
        raise SettingsError(problems)
    return settings


def environment_names(names: Iterable[str]) -> set[str]:
    """Return the recipe's names of settings."""
    return {SETTINGS[name].environment for name in names}


_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Where a pack's image reads the Engram tables from; the containers have no io_uring, which it needs for a disk.
_TABLES = "ENGRAM_TABLE_MEMORY"
# Everything in the environment is shown with the plan.
_SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|PASSWORD|SECRET)$", re.IGNORECASE)


def check_engine_env(given: dict[str, Any], own: Iterable[str]) -> list[str]:
    """Return a sentence for every environment variable that cannot be given to the engine.

    :param own: the names that the plan sets itself.
    """
    problems, taken = [], set(own)
    for name, value in given.items():
        where = f"engine_env: '{name}'"
        if not isinstance(name, str) or not _ENVIRONMENT_NAME.fullmatch(name):
            problems.append(f"{where} is no name of an environment variable; write letters, digits and _")
        elif _SECRET.search(name):
            problems.append(f"{where} looks like a secret, and the environment is shown with the plan; leave it out")
        elif name in _BY_ENVIRONMENT:
            problems.append(f"{where} is a setting; set {_BY_ENVIRONMENT[name]} in serving_plan_overrides")
        elif name in taken:
            problems.append(f"{where} is set by the plan itself; leave it out")
        elif not isinstance(value, str) or not value.isprintable():
            problems.append(f"{where}: {value!r:.80} is no text in one line; write it in quotes")
        elif name == _TABLES and value.strip().lower() == "disk":
            problems.append(
                f"{where}: {value!r} reads the Engram tables with io_uring, which replicas' containers do not have; "
                "leave it out: the plan has room for them in host memory"
            )
    return problems


def recipe_environment(settings: dict[str, Any]) -> dict[str, str]:
    """Return the settings that the source recipe knows, by its names, so that whoever knows the recipe finds them."""
    found = {}
    for name, value in settings.items():
        environment = SETTINGS[name].environment
        if environment and value != AUTO:
            found[environment] = str(int(value)) if isinstance(value, bool) else str(value)
    return found
