# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Arguments of ``vllm serve``, as the mapping that its ``--config`` file holds."""

from __future__ import annotations

import math
import re
from typing import Any

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
    "kv-cache-memory-bytes": "set kv_cache_memory",
    "speculative-config": "set speculative_method and speculative_tokens",
    "shutdown-timeout": "set shutdown_timeout",
    "config": "the plan writes this file itself",
    "api-key": "the engine's key is made on the node and never an argument",
    "hf-token": "a secret is never an argument; the engine downloads nothing",
    "uds": "replicas listen on loopback; see first_port",
    "ssl-keyfile": "replicas listen on loopback only, without TLS",
    "ssl-certfile": "replicas listen on loopback only, without TLS",
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


def check_engine_args(args: dict[str, Any]) -> list[str]:
    """Return a sentence for every argument that an operator may not give, or not in this form."""
    problems = []
    given: dict[str, Any] = {}
    for key, value in args.items():
        name = normalise(str(key))
        if not isinstance(key, str) or not _NAME.fullmatch(name):
            problems.append(f"engine_args: '{key}' is no name of an argument; write one like max-logprobs")
        if name in given:
            problems.append(f"engine_args: '{key}' and '{given[name]}' are the same argument; give one of them")
        given[name] = key
        # The engine's parser also takes the beginning of a name, and one part of a mapping as name.part.
        owned = next((known for known in OWNED if name and known.startswith(name.partition(".")[0])), None)
        if owned is not None:
            # Its value is not looked at: it may be a key, and would be shown.
            problems.append(f"engine_args: '{key}' is not for overriding; {OWNED[owned]}")
            continue
        if not _is_plain(value):
            problems.append(
                f"engine_args: the value of '{key}' holds something that JSON has not: {value!r}; "
                "give text (in quotes), numbers, booleans, lists and mappings with text keys"
            )
        # Someone's shell quoting, kept literally, would reach the engine inside the value (and be ignored by it).
        if isinstance(value, str) and value[:1] in ("'", '"'):
            problems.append(
                f"engine_args: the value of '{key}' begins with a quote: {value!r}; give the bare text, "
                "and JSON as a YAML mapping"
            )
    return problems


def speculative_config(method: str, tokens: int) -> dict[str, Any] | None:
    """Return vLLM's ``speculative-config``, or None for no speculation."""
    if method == "none":
        return None
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
    if method == "ngram":
        config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return config


def engine_args(settings: dict[str, Any], fixed: dict[str, Any], model_path: str, port: int) -> dict[str, Any]:
    """Return the complete arguments of one replica.

    :param settings: resolved settings (see ``settings.SETTINGS``).
    :param fixed: arguments that the profile sets and no setting covers.
    :param model_path: where the model lies inside the container.
    :param port: loopback TCP port.
    """
    args: dict[str, Any] = {
        "model": model_path,
        "served-model-name": settings["served_model_name"],
        "host": "127.0.0.1",
        "port": port,
        "max-model-len": settings["max_model_len"],
        "max-num-seqs": settings["max_num_seqs"],
        "max-num-batched-tokens": settings["max_num_batched_tokens"],
        "kv-cache-memory-bytes": settings["kv_cache_memory"],
        "shutdown-timeout": settings["shutdown_timeout"],
    }
    args |= {normalise(name): value for name, value in fixed.items()}
    speculation = speculative_config(settings["speculative_method"], settings["speculative_tokens"])
    if speculation is not None:
        args["speculative-config"] = speculation
    args |= {normalise(name): value for name, value in settings["engine_args"].items()}
    return args
