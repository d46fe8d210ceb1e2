# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Engine arguments that vLLM 0.33.0 has no code for on sm_120, the cards of both GPU profiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import read_value

_B200 = "a data center Blackwell card (sm_100)"
_HOPPER = "a Hopper card (sm_90)"
_HOPPER_OR_B200 = "a Hopper or data center Blackwell card (sm_90, sm_100)"
_AMD = "an AMD card"
_MOE_REMEDY = "flashinfer_cutlass"
_ATTENTION_REMEDY = "FLASHINFER_MLA_SPARSE_DSV41, or FLASHINFER_MLA_SPARSE_DSV4 for V4"
# Short names for a part of one of the mappings, and short options.
_ALIASES = {
    "moe-backend": "kernel-config.moe-backend",
    "sparse-indexer-topk-backend": "kernel-config.sparse-indexer-topk-backend",
    "attention-backend": "attention-config.backend",
    "ac": "attention-config",
}
_ARGUMENTS = (
    *_ALIASES, "kernel-config", "attention-config", "additional-config", "kv-cache-dtype", "engram-config",
)  # fmt: skip
# By argument: the values (lower case, hyphens) that vLLM 0.33.0 has no sm_120 code for with what they want, and what to
# take instead.
_UNSUPPORTED: dict[str, tuple[dict[str, str], str]] = {
    "kernel-config.moe-backend": (
        {
            "deep-gemm-mega-moe": _B200,
            "flashinfer-moe-ep-mega-deep-gemm": _B200,
            "flashinfer-trtllm": _B200,
            "flashinfer-cutedsl": _B200,
            "hpc": _HOPPER,
            "aiter": _AMD,
            "aiter-mega-moe": _AMD,
            "aiter-triton-mxfp4-bf16": _AMD,
            "aiter-triton-mxfp4-mxfp4": _AMD,
            "flydsl": _AMD,
            "rdna3": _AMD,
        },
        _MOE_REMEDY,
    ),
    "kernel-config.sparse-indexer-topk-backend": (
        {"cooperative": _HOPPER_OR_B200, "deep-select": _B200, "aiter": _AMD},
        "auto",
    ),
    "attention-config.backend": (
        {
            "flashmla": _HOPPER_OR_B200,
            "flashmla-sparse": _HOPPER_OR_B200,
            "flashmla-sparse-dsv4": _HOPPER_OR_B200,
            "flashmla-sparse-dsv41": _HOPPER_OR_B200,
            "flashmla-mega-attn-dsv41": _B200,
            "flashinfer-mla": _B200,
            "flashinfer-mla-sparse": _B200,
            "flashinfer-mla-sparse-sm90": _HOPPER,
            "cutlass-mla": _B200,
            "tokenspeed-mla": _B200,
            "flash-attn-mla": _HOPPER,
            "flash-attn-mla-sparse": _HOPPER,
            "flash-attn-mla-sparse-fa4": _B200,
            "hpc-attn": _HOPPER,
        },
        _ATTENTION_REMEDY,
    ),
    "attention-config.indexer-kv-dtype": ({"mxfp4": _B200}, "fp8"),
    "attention-config.indexer-sparse-logits": ({"true": _B200}, "false"),
    "attention-config.mla-prefill-backend": (
        {"flashinfer": _B200, "trtllm-ragged": _B200, "tokenspeed-mla": _B200},
        "",
    ),
    "kv-cache-dtype": ({"nvfp4-ds-mla": _B200}, "fp8"),
    "additional-config.decode-backend": ({"latency-specialized": "a GB300 card (sm_103) and NVLink"}, "auto"),
}
# Gone from 0.33.0, whose parser refuses the name whatever its value; recipes for B200 still carry it.
_GONE = {"attention-config.use-fp4-indexer-cache": "attention-config.indexer_kv_dtype: fp8"}


def _word(value: Any) -> str:
    return str(value).strip().lower().replace("_", "-")


def _canonical(name: str) -> str:
    """Return an argument's whole name in lower case with hyphens; vLLM's parser also takes the beginning of one."""
    first, dot, rest = name.strip().lstrip("-").lower().replace("_", "-").partition(".")
    if first and first not in _ARGUMENTS:
        first = next((known for known in _ARGUMENTS if len(first) > 2 and known.startswith(first)), first)
    return _ALIASES.get(first, first) + dot + rest


def _flat(engine_args: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield whole name, name as given, and value of every argument, and of every part of those that are mappings."""
    waiting = [(_canonical(str(key)), str(key), value) for key, value in engine_args.items()]
    while waiting:
        name, given, value = waiting.pop(0)
        parts = read_value(value)
        if isinstance(parts, Mapping):
            waiting += [(f"{name}.{_word(key)}", f"{given}.{key}", part) for key, part in parts.items()]
        else:
            yield name, given, value


def unsupported_arguments(engine_args: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every engine argument that cannot work on sm_120 cards (RTX PRO 6000 Blackwell).

    Recipes for B200 carry such arguments. The engine would fail on them after minutes, when the model is loaded.

    :param engine_args: names in any of vLLM's spellings (``moe-backend``, ``kernel-config.moe_backend``, or
        ``kernel_config`` with a mapping or its JSON text).
    """
    problems = []
    for name, given, value in _flat(engine_args):
        if name in _GONE:
            problems.append(
                f"engine_args: '{given}' is gone from vLLM 0.33.0 and was for {_B200}; leave it out, or write "
                f"{_GONE[name]}"
            )
        wants, instead = _UNSUPPORTED.get(name, ({}, ""))
        if _word(value) in wants:
            problems.append(
                f"engine_args: '{given}: {value}' needs {wants[_word(value)]}, and these cards are sm_120 (vLLM's "
                f"sources); leave it out" + (f", or take {instead}" if instead else "")
            )
    return problems
