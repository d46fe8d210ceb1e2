"""vLLM's real indexer code on a machine that has no vLLM installed: for tests and benchmarks of the chunked decode.

From an unpacked wheel come, unchanged, `sparse_attn_indexer.py`, `indexer_topk.py`, `candidate_blocks.py`,
`custom_op.py`, the compiled top-k operators and DeepGEMM with its kernels. What those modules import beyond that is
stood in for here: configuration, platform, distribution, the forward context and the attention metadata.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

HEADS = 32
HEAD_DIM = 128
PAGE = 64  # keys of a page of the cache
LAYER = "model.layers.20.indexer.k_cache"


class GraphMode(Enum):
    NONE = 0
    FULL = 2


@dataclasses.dataclass
class Context:
    attn_metadata: Any = None
    cudagraph_runtime_mode: GraphMode = GraphMode.NONE


@dataclasses.dataclass
class DecodeMetadata:
    """As vLLM's DeepSeekV32IndexerDecodeMetadata: the fields that the indexer reads."""

    block_table: Tensor
    seq_lens: Tensor
    decode_lens: Tensor
    requires_padding: bool
    schedule_metadata: Tensor
    global_seq_lens: Tensor | None = None
    indices: Tensor | None = None


@dataclasses.dataclass
class Metadata:
    """As vLLM's DeepseekV32IndexerMetadata: the fields that the indexer reads."""

    max_seq_len: int
    slot_mapping: Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: DecodeMetadata | None = None
    prefill: Any = None


context = Context()


class Platform:
    dispatch_key = "CUDA"

    def __init__(self) -> None:
        self.family: int = torch.cuda.get_device_capability()[0] * 10

    def is_cuda(self) -> bool:
        return True

    def _is_not(self) -> bool:
        return False

    is_rocm = is_cpu = is_xpu = is_tpu = is_out_of_tree = _is_not

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def is_device_capability_family(self, family: int) -> bool:
        return self.family == family

    def has_device_capability(self, capability: int) -> bool:
        return self.family >= capability


class Workspace:
    """As vLLM's: one buffer that only grows."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")

    def get_simultaneous(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        views, at = [], 0
        for shape, dtype in wanted:
            size = -(-functools.reduce(int.__mul__, shape, 1) * dtype.itemsize // 256) * 256
            views.append(self.buffer[at : at + size].view(dtype)[: functools.reduce(int.__mul__, shape, 1)].view(shape))
            at += size
        return views


def _module(name: str, **members: Any) -> types.ModuleType:
    """Put a module with these members in place, below packages of the same kind."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = ".".join(parts[:end])
        if package not in sys.modules:
            made = types.ModuleType(package)
            made.__path__ = []
            _place(package, made)
    module = sys.modules.get(name) or types.ModuleType(name)
    module.__dict__.update(members)
    _place(name, module)
    return module


def _place(name: str, module: types.ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _real(name: str, folder: Path) -> Any:
    """Load a module of vLLM from its own file."""
    _module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, folder / Path(*name.split(".")).with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _place(name, module)
    spec.loader.exec_module(module)
    return module


def _never(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("this part of vLLM is not stood in for: the test must not come here")


def _register_operator(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str],
    fake_impl: Callable[..., Any],
    dispatch_key: str = "CUDA",
) -> None:
    _library.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args))
    _library.impl(op_name, op_func, dispatch_key)
    _library._register_fake(op_name, fake_impl)


_library = torch.library.Library("vllm", "FRAGMENT")


def _break(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def install(folder: Path) -> Any:
    """Make ``import vllm...`` find the real indexer of ``folder/vllm``; return its module."""
    import triton
    import triton.language

    sys.path.insert(0, str(folder / "vllm" / "third_party"))
    import deep_gemm

    torch.ops.load_library(str(folder / "vllm" / "_C_stable_libtorch.abi3.so"))
    platform, workspace = Platform(), Workspace()
    parallel = types.SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pcp_shard_decode_requests=False,
        cp_kv_cache_interleave_size=1,
    )
    kernels = types.SimpleNamespace(sparse_indexer_topk_backend="auto", enable_jit_warmup=False)
    config = types.SimpleNamespace(parallel_config=parallel, kernel_config=kernels)
    compilation = types.SimpleNamespace(custom_ops=["all"], enabled_custom_ops=set(), disabled_custom_ops=set(), mode=0)

    class CompilationConfig:
        _attention_ops: ClassVar[list[str]] = ["vllm::sparse_attn_indexer"]

    def metadata(lens: Tensor, page: int, units: int, indices: Tensor | None = None) -> Tensor:
        assert indices is None
        return deep_gemm.get_paged_mqa_logits_metadata(lens, page, units)

    def paged(
        q: Any, cache: Tensor, weights: Tensor, lens: Tensor, table: Tensor, schedule: Tensor, **more: Any
    ) -> Tensor:
        assert more.pop("indices", None) is None
        return deep_gemm.fp8_fp4_paged_mqa_logits(q, cache, weights, lens, table, schedule, more["max_model_len"])

    _module("vllm.envs", VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=512)
    _module("vllm._custom_ops", top_k_per_row_prefill=_never, indexer_k_quant_and_cache=_never)
    _module("vllm._aiter_ops", rocm_aiter_ops=None)
    _module("vllm.compilation.breakable_cudagraph", eager_break_during_capture=_break)
    _module(
        "vllm.config",
        CUDAGraphMode=GraphMode,
        get_current_vllm_config=lambda: config,
        get_current_vllm_config_or_none=lambda: None,
        get_cached_compilation_config=lambda: compilation,
    )
    _module(
        "vllm.config.compilation", CompilationConfig=CompilationConfig, CompilationMode=types.SimpleNamespace(NONE=0)
    )
    _module(
        "vllm.distributed",
        get_dcp_group=_never,
        get_pcp_group=_never,
        get_tensor_model_parallel_rank=_never,
        get_tp_group=_never,
    )
    _module("vllm.forward_context", get_forward_context=lambda: context)
    _module("vllm.logger", init_logger=logging.getLogger)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.triton_utils", tl=triton.language, triton=triton)
    _module("vllm.utils.math_utils", round_up=lambda value, step: -(-value // step) * step)
    _module("vllm.utils.flashinfer", has_flashinfer=lambda: False)
    _module("vllm.utils.import_utils", has_cutedsl=lambda: False)
    units = torch.cuda.get_device_properties(0).multi_processor_count
    _module("vllm.utils.platform_utils", num_compute_units=lambda _device: units)
    _module(
        "vllm.utils.torch_utils",
        LayerNameType=str,
        _encode_layer_name=lambda name: name,
        _resolve_layer_name=lambda name: name,
        direct_register_custom_op=_register_operator,
    )
    _module(
        "vllm.utils.deep_gemm",
        fp8_fp4_mqa_logits=_never,
        fp8_fp4_paged_mqa_logits=paged,
        get_paged_mqa_logits_metadata=metadata,
        has_deep_gemm=lambda: True,
        mqa_logits_mx_inputs=lambda query, scale, weights: (scale, weights),
        mqa_logits_use_mx_scales=lambda: False,
    )
    _module(
        "vllm.v1.attention.backends.mla.indexer",
        DeepseekV32IndexerMetadata=Metadata,
        tp_prefill_row_sharding_supported=_never,
    )
    _module("vllm.v1.attention.ops.common", pack_seq_triton=_never, unpack_seq_triton=_never)
    _module("vllm.v1.attention.ops.pcp", maybe_gather_indexer_k=_never)
    _module("vllm.v1.worker.workspace", current_workspace_manager=lambda: workspace)
    _module("vllm.model_executor.layers.quantization.utils.quant_utils", get_fp8_min_max=_never)
    _module("vllm.model_executor.utils", maybe_disable_graph_partition=_never)
    _module("vllm.model_executor.kernels.attention.dsa.sparse_mqa_logits", has_deep_select=lambda: False)
    for name in ("custom_op", "layers.indexer_topk", "kernels.attention.dsa.candidate_blocks"):
        _real(f"vllm.model_executor.{name}", folder)
    return _real("vllm.model_executor.layers.sparse_attn_indexer", folder)


@dataclasses.dataclass
class Step:
    """One decode step of a candidate layer: what the model holds, and the layer's arguments."""

    cache: Tensor
    query: Tensor
    weights: Tensor
    lens: Tensor  # int32 [sequences, rows of a sequence]
    topk: Tensor
    blocks: Tensor | None
    metadata: Metadata
    layer: Any = None

    def run(self) -> None:
        """Run the layer's forward pass on this step."""
        context.attn_metadata = {LAYER: self.metadata}
        self.layer.forward_cuda(self.query, self.query, None, self.weights)


def make_cache(pages: int, generator: torch.Generator) -> Tensor:
    """Return uint8 [pages, PAGE, HEAD_DIM + 4]: FP8 keys of a page, then their float32 scales."""
    device = generator.device
    cache = torch.empty((pages, PAGE * (HEAD_DIM + 4)), dtype=torch.uint8, device=device)
    keys = torch.randn((pages, PAGE * HEAD_DIM), generator=generator, device=device).to(torch.float8_e4m3fn)
    cache[:, : PAGE * HEAD_DIM] = keys.view(torch.uint8)
    scales = torch.rand((pages, PAGE), generator=generator, device=device) + 0.5
    cache[:, PAGE * HEAD_DIM :] = scales.view(torch.uint8)
    return cache.view(pages, PAGE, HEAD_DIM + 4)


def make_step(
    cache: Tensor, sequences: int, each: int, window: int, lens: Tensor, k: int, blocks: Tensor | None, seed: int
) -> Step:
    """Return a step of ``sequences`` x ``each`` rows; ``lens`` int32 [sequences, each], ``k`` columns to choose."""
    import deep_gemm

    device, rows = cache.device, sequences * each
    generator = torch.Generator(device=device).manual_seed(seed)
    query = torch.randn((rows, HEADS, HEAD_DIM), generator=generator, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn((rows, HEADS), generator=generator, device=device)
    table = torch.randint(0, cache.shape[0], (sequences, -(-window // PAGE)), generator=generator, device=device)
    units = torch.cuda.get_device_properties(0).multi_processor_count
    decode = DecodeMetadata(
        block_table=table.to(torch.int32),
        seq_lens=lens,
        decode_lens=torch.full((sequences,), each, dtype=torch.int32, device=device),
        requires_padding=False,
        schedule_metadata=deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, units),
    )
    none = torch.empty(0, dtype=torch.int64, device=device)
    metadata = Metadata(int(lens.max()), none, sequences, rows, 0, decode)
    topk = torch.full((rows, k), -77, dtype=torch.int32, device=device)
    return Step(cache, query, weights, lens, topk, blocks, metadata)


def make_layer(upstream: Any, step: Step, window: int, k: int, write: bool) -> Any:
    """Return vLLM's layer for the step: with the plugin registered, the plugin's class."""
    cache = types.SimpleNamespace(prefix=LAYER, kv_cache=step.cache)
    return upstream.SparseAttnIndexer(
        cache,
        128,
        "ue8m0",
        k,
        HEAD_DIM,
        window,
        window,
        step.topk,
        skip_k_cache_insert=True,
        candidate_blocks=step.blocks,
        candidate_block_size=8 if step.blocks is not None else 0,
        candidate_write=write,
    )
