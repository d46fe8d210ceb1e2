"""The code that our kernels replace, for comparison in the same process.

On the node it is the installed vLLM. Elsewhere a folder with vLLM's sources and its compiled operators is enough: the
module with the candidate functions needs little of the package, and that little is stood in for.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CANDIDATES = "vllm.model_executor.kernels.attention.dsa.candidate_blocks"
_OPERATORS = "_C_stable_libtorch.abi3.so"
_WORKSPACE = 1 << 20  # bytes that vLLM gives persistent_topk


@dataclass(frozen=True)
class Peers:
    """What was found; None where it was not. ``source`` says from where."""

    source: str
    select_candidate_blocks: Callable[..., None] | None = None
    apply_candidate_mask: Callable[..., None] | None = None
    persistent_topk: Callable[..., None] | None = None

    def topk(self, logits: Tensor, lens: Tensor, out: Tensor, workspace: Tensor, longest: int) -> None:
        """vLLM's top-k of a decode step; ``longest`` is the host's bound of ``lens``."""
        assert self.persistent_topk is not None
        self.persistent_topk(logits, lens, out, workspace, out.shape[1], longest)


def workspace(device: torch.device) -> Tensor:
    """Return the scratch memory that persistent_topk wants, zeroed."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def find(folder: Path | None = None) -> Peers:
    """Return the peers from ``folder`` (it holds ``vllm/``), or from the installed vLLM, or none."""
    if folder is not None:
        return _from_folder(folder / "vllm")
    if importlib.util.find_spec("vllm") is None:
        return Peers("no vLLM here: compared with torch alone")
    import vllm._custom_ops  # type: ignore[import-not-found,unused-ignore]  # registers the operators
    from vllm.model_executor.kernels.attention.dsa import (  # type: ignore[import-not-found,unused-ignore]
        candidate_blocks,
    )

    return Peers(
        f"vLLM {vllm.__version__}",
        candidate_blocks.select_candidate_blocks,
        candidate_blocks.apply_candidate_mask,
        torch.ops._C.persistent_topk,
    )


def _from_folder(package: Path) -> Peers:
    topk = None
    if (package / _OPERATORS).is_file():
        torch.ops.load_library(str(package / _OPERATORS))
        topk = torch.ops._C.persistent_topk
    module = _candidate_module(package / Path(*_CANDIDATES.split(".")[1:]).with_suffix(".py"))
    return Peers(f"files in {package}", module.select_candidate_blocks, module.apply_candidate_mask, topk)


def _candidate_module(file: Path) -> Any:
    """Load the module with stand-ins for what it imports: DeepSelect is for SM100 alone, the rest are helpers."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def never(*_args: object, **_kwargs: object) -> Any:
        raise NotImplementedError("DeepSelect runs on SM100 alone")

    names: dict[str, dict[str, Any]] = {
        "vllm.model_executor.kernels.attention.dsa.sparse_mqa_logits": {"has_deep_select": lambda: False},
        "vllm.model_executor.layers.indexer_topk": {
            "deep_select_topk": never,
            "get_deep_select_stride_requirement": never,
            "is_deep_select_supported": lambda *_: False,
        },
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
        "vllm.utils.math_utils": {"round_up": lambda value, step: -(-value // step) * step},
    }
    before = dict(sys.modules)
    try:
        for name, members in names.items():
            parts = name.split(".")
            for end in range(1, len(parts)):
                sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
            module = types.ModuleType(name)
            module.__dict__.update(members)
            sys.modules[name] = module
        spec = importlib.util.spec_from_file_location("ds41k_peer_candidates", file)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        # Triton reads a kernel's source through its module.
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
        return loaded
    finally:
        for name in list(sys.modules):
            if name not in before and (name == "vllm" or name.startswith("vllm.")):
                del sys.modules[name]
