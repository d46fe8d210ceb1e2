# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The settings of a profile: their types, units and limits, and how overrides are laid over them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

# What podman takes for --memory and --shm-size: a whole number of bytes, or of binary k, m, g.
_PODMAN_SIZE = re.compile(r"[1-9][0-9]*[bkmg]?")
_PODMAN_FACTORS = {"b": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
# What vLLM's human-readable integers take: k, m, g, t are decimal and K, M, G, T binary; 18GiB is refused by it.
_VLLM_SIZE = re.compile(r"[1-9][0-9]*(?:\.[0-9]+)?[kKmMgGtT]?")


class SettingsError(ValueError):
    """One or more settings are wrong; ``problems`` holds a sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Setting:
    """One setting an operator may override.

    ``kind`` is ``int``, ``text``, ``podman_size``, ``vllm_size`` or ``mapping``; ``environment`` is the name that the
    source recipe uses for it.
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
    "cpus_per_replica": Setting(
        "int", "CPUs", "CPUs that each replica is pinned to; 0 shares those of its NUMA node evenly", maximum=4096
    ),
    "served_model_name": Setting("text", "", "the model name that clients ask for"),
    "max_model_len": Setting("int", "tokens", "context window", "MAX_MODEL_LEN", minimum=16),
    "max_num_seqs": Setting("int", "sequences", "sequences decoded at once", "MAX_NUM_SEQS", minimum=1, maximum=65536),
    "max_num_batched_tokens": Setting("int", "tokens", "prefill chunk", "MAX_BATCHED", minimum=16),
    "kv_cache_memory": Setting("vllm_size", "bytes (18G is 18 GiB, 18g is decimal)", "KV cache per device", "KV_MEM"),
    "speculative_method": Setting("text", "", "how draft tokens are made", choices=("none", "ngram", "mtp", "dspark")),
    "speculative_tokens": Setting("int", "tokens", "draft tokens per step", "SPEC_K", minimum=1, maximum=64),
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
    "drain_timeout": Setting("int", "seconds", "longest wait for running requests before a stop", minimum=1),
    "shutdown_timeout": Setting(
        "int", "seconds", "how long the engine finishes running requests after it was told to stop", minimum=1
    ),
    "start_timeout": Setting("int", "seconds", "longest wait for a replica's first token after its start", minimum=10),
    "prober_interval": Setting("int", "seconds", "time between two looks at a replica", minimum=1, maximum=3600),
    "prober_stall": Setting(
        "int", "seconds", "a replica with running requests and no progress for this long goes out", minimum=2
    ),
    "engine_args": Setting("mapping", "", "more vLLM arguments by their long names, laid over the profile's"),
}

# The types by the names that argument specifications use: Ansible hands in subclasses whose own names say nothing.
_TYPES = (bool, int, float, str, dict, list)

_BY_ENVIRONMENT = {setting.environment: name for name, setting in SETTINGS.items() if setting.environment}


def podman_bytes(size: str) -> int:
    """Return the bytes of a podman size like ``4g``."""
    return int(size.rstrip("bkmg")) * _PODMAN_FACTORS.get(size[-1], 1)


def _nearest(name: str) -> str:
    # Known names are lower case and the recipe's upper case: compare without it, or MAX_NUM_SEQ is near nothing. Of a
    # pair like max_num_seqs and MAX_NUM_SEQS the last one here stays, which is the one in the case that was asked in.
    names = (*SETTINGS, *_BY_ENVIRONMENT) if name.isupper() else (*_BY_ENVIRONMENT, *SETTINGS)
    known = {key.lower(): key for key in names}
    match = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    return known[match[0]]


def type_word(value: Any) -> str:
    """Return the name of a value's type, for people."""
    if value is None or value == "":
        return "empty"
    return next((kind.__name__ for kind in _TYPES if isinstance(value, kind)), "of another type")


def _type_problem(name: str, setting: Setting, value: Any) -> str:
    """Return a sentence that says why ``value`` cannot be ``name``, or an empty string."""
    shown = f"{name}: {value!r}"
    if setting.kind == "int":
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{shown} is {type_word(value)}, a whole number of {setting.unit} is needed; write {name}: 8"
        if not setting.minimum <= value <= setting.maximum:
            return f"{shown} is outside {setting.minimum} to {setting.maximum} {setting.unit}"
    elif setting.kind == "mapping":
        if not isinstance(value, dict):
            return f"{shown} is {type_word(value)}, a mapping is needed; write {name}: {{}} for none"
    elif not isinstance(value, str) or not value:
        return f"{shown} is {type_word(value)}, a text is needed; put it in quotes"
    elif setting.choices and value not in setting.choices:
        return f"{shown} is not one of {', '.join(setting.choices)}"
    elif setting.kind == "podman_size" and not _PODMAN_SIZE.fullmatch(value):
        return f"{shown} is no size that podman takes; write a whole number and b, k, m or g, like 4g"
    elif setting.kind == "vllm_size" and not _VLLM_SIZE.fullmatch(value):
        return f"{shown} is no size that vLLM takes; write 18G for 18 GiB or 18g for 18 billion bytes"
    return ""


def resolve_settings(defaults: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Lay overrides over a profile's defaults.

    :param defaults: a value for every name of :data:`SETTINGS`.
    :param overrides: values by our names, or by the source recipe's environment names.
    :raises SettingsError: with a sentence for every unknown name, wrong type and value out of range.
    """
    problems: list[str] = []
    settings = dict(defaults)
    given: dict[str, str] = {}
    for key, value in overrides.items():
        name = _BY_ENVIRONMENT.get(key, key)
        if name not in SETTINGS:
            problems.append(f"unknown setting '{key}'; the nearest known one is '{_nearest(str(key))}'")
            continue
        if name in given:
            problems.append(f"'{key}' and '{given[name]}' are the same setting; give one of them")
        given[name] = key
        settings[name] = value
    missing = sorted(set(SETTINGS) - set(settings))
    if missing:
        problems.append(f"the profile has no value for {', '.join(missing)}")
    for name in SETTINGS:
        if name in settings:
            problem = _type_problem(name, SETTINGS[name], settings[name])
            if problem:
                problems.append(problem)
    if problems:
        raise SettingsError(problems)
    return settings
