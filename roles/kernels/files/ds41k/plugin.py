"""The vLLM plugin (entry point `vllm.general_plugins`): reads the switches, and puts in place what they ask for.

Every switch is off by default and read once, when vLLM starts:

DS41_IDX_CHUNK=1        decode logits of the sparse indexer in chunks of rows, so that they stay within a budget
DS41_IDX_CHUNK_MB=256   that budget, in MiB, for each GPU
DS41_ROWTOPK=1          ds41k::rowtopk instead of vLLM's top-k of a decode step
DS41_CAND=1             ds41k::cand_blocks and ds41k::cand_topk instead of vLLM's candidate functions
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

# The vLLM whose class is replaced: its decode step was read, not guessed.
KNOWN_VLLM = ("0.33.0",)

logger = logging.getLogger("vllm.ds41k")


class PluginError(RuntimeError):
    """vLLM must not start like this; one line."""


@dataclass(frozen=True)
class Switches:
    """What the environment asks for. ``chunk_bytes`` is the budget of decode logits, for each GPU."""

    chunk: bool = False
    chunk_bytes: int = 256 << 20
    rowtopk: bool = False
    cand: bool = False

    @property
    def kernels(self) -> bool:
        return self.rowtopk or self.cand

    @property
    def any(self) -> bool:
        return self.chunk or self.kernels


def read_switches(environment: Mapping[str, str]) -> Switches:
    """Return the switches; raises PluginError that names the variable whose value is none."""

    def switch(name: str) -> bool:
        value = environment.get(name, "") or "0"
        if value not in ("0", "1"):
            raise PluginError(f"ds41k: {name}={value} is no switch: 1 is on, 0 or nothing is off")
        return value == "1"

    text = environment.get("DS41_IDX_CHUNK_MB", "") or "256"
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1 << 20:
        raise PluginError(f"ds41k: DS41_IDX_CHUNK_MB={text} is no budget: a whole number of MiB, from 1 to 1048576")
    return Switches(switch("DS41_IDX_CHUNK"), int(text) << 20, switch("DS41_ROWTOPK"), switch("DS41_CAND"))


def check_version() -> None:
    """Raise PluginError unless the installed vLLM is one whose decode step is known."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise PluginError("ds41k: vLLM is not installed here, and the switches DS41_* are for it") from None
    if found.split("+")[0] not in KNOWN_VLLM:
        raise PluginError(
            f"ds41k: vLLM {found} is unknown, its indexer's decode step is replaced in {', '.join(KNOWN_VLLM)} alone: "
            "unset DS41_IDX_CHUNK, DS41_ROWTOPK and DS41_CAND, or take a known vLLM"
        )


_registered = False


def register() -> None:
    """Do what the switches ask for; vLLM calls this in each of its processes, and may call it again."""
    global _registered
    switches = read_switches(os.environ)
    if not switches.any or _registered:
        return
    check_version()
    # Only now: both import vLLM or torch, which nobody needs for switches that are off.
    from ds41k import indexer, library

    if switches.kernels:
        library.load()
    indexer.register(switches)
    _registered = True
    logger.info("ds41k: sparse indexer's decode: %s", switches)
