"""The decode step of vLLM's sparse indexer, in chunks of rows and with our kernels. For vLLM 0.33.0.

vLLM scores every decode row against the whole window at once: float32 [rows, window], 4 GiB at 1,024 rows and
1,048,576 columns, whatever the contexts really hold. Here whole sequences are scored and selected chunk by chunk, so
the logits stay within a budget. Each row's logits come from its own query and its own key blocks alone, so the result
is the same to the bit.

:class:`ChunkedSparseAttnIndexer` takes the place of ``SparseAttnIndexer`` through vLLM's registry of out-of-tree
operators; nothing of vLLM is patched. Everything but the decode step (key insert, prefill, the profiling run) is
vLLM's own code. Steps of a form that an RTX PRO 6000 does not bring (ragged native batches, SM100's variable-length
form, decode context parallelism) are left to vLLM whole, so they are not bounded by the budget.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config.compilation import CompilationConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import sparse_attn_indexer as upstream
from vllm.utils.deep_gemm import get_paged_mqa_logits_metadata
from vllm.utils.platform_utils import num_compute_units
from vllm.utils.torch_utils import _encode_layer_name, _resolve_layer_name, direct_register_custom_op

from ds41k import library
from ds41k.chunks import chunk_rows
from ds41k.plugin import Switches

OPERATOR = "ds41k_sparse_attn_indexer"
_TOPK = (512, 1024, 2048)

# vLLM's own function, without the break in graph capture: ours around it has one already.
_upstream_indexer: Any = upstream.sparse_attn_indexer.__wrapped__
_signature = inspect.signature(_upstream_indexer)
_switches = Switches()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one decode step is done: row ranges, rows of a sequence, and which kernels are ours."""

    ranges: list[tuple[int, int]]
    each: int
    rowtopk: bool
    cand: bool


def plan_decode(call: Any, metadata: Any) -> Plan | None:
    """Return how to do the decode step, or None when it is vLLM's own: from shapes and switches alone.

    ``call`` has the indexer's arguments as attributes, ``metadata`` is its DeepseekV32IndexerMetadata.
    """
    decode, rows = metadata.decode, metadata.num_decode_tokens
    if metadata.num_decodes == 0 or rows == 0 or call.dcp_world_size != 1:
        return None
    sequences = decode.decode_lens.shape[0]
    if decode.requires_padding or decode.indices is not None or rows % sequences != 0:
        return None
    each = rows // sequences
    if decode.seq_lens[:sequences].numel() != rows:
        return None
    rowtopk = _switches.rowtopk and call.topk_tokens in _TOPK
    blocks = call.candidate_blocks
    cand = _switches.cand and blocks is not None and call.topk_tokens in _TOPK
    cand = cand and call.candidate_block_size == library.BLOCK_SIZE and blocks.shape[1] <= 2048
    budget = _switches.chunk_bytes if _switches.chunk else 4 * rows * call.max_model_len
    # An operator of ours takes no more rows than that; vLLM's scheduler brings 1,152 at most.
    if (rowtopk or cand) and rows > library.MAX_ROWS:
        budget = min(budget, library.MAX_ROWS // each * each * 4 * call.max_model_len)
    ranges = chunk_rows(rows, each, call.max_model_len, budget)
    if len(ranges) == 1 and not rowtopk and not cand:
        return None
    return Plan(ranges, each, rowtopk, cand)


def run_decode(call: Any, metadata: Any, plan: Plan) -> None:
    """Score and select all decode rows: ``topk_indices_buffer`` and, at a candidate source, ``candidate_blocks``."""
    decode = metadata.decode
    cache = upstream.kv_cache_as_quant_view(call.kv_cache, call.head_dim, call.use_fp4_cache)
    for first, last in plan.ranges:
        begin, end = first // plan.each, last // plan.each
        shape = (end - begin, plan.each)
        lens = decode.seq_lens[begin:end]
        schedule = decode.schedule_metadata
        if len(plan.ranges) > 1:
            # Made for the whole batch: it deals its tiles to multiprocessors. A device kernel, so a graph can hold
            # it.
            units = num_compute_units(call.q_quant.device.index)
            schedule = get_paged_mqa_logits_metadata(lens, cache.shape[1], units)
        query = call.q_quant[first:last].reshape(*shape, *call.q_quant.shape[1:])
        query = query.view(torch.int8) if call.use_fp4_cache else query
        scale = call.q_scale
        if scale is not None:
            scale = scale[first:last].reshape(*shape, *scale.shape[1:])
        scale, weights = upstream.mqa_logits_mx_inputs(query, scale, call.weights[first:last])
        logits = upstream.fp8_fp4_paged_mqa_logits(
            (query, scale),
            cache,
            weights,
            lens,
            decode.block_table[begin:end],
            schedule,
            max_model_len=call.max_model_len,
            indices=None,
        )
        logits = upstream.as_fp32_logits(logits, lens.view(-1))
        select(call, metadata, plan, logits, lens, first, last)
        # Before the next chunk's are made, or two chunks' logits would be there at once.
        del logits


def select(call: Any, metadata: Any, plan: Plan, logits: Tensor, lens: Tensor, first: int, last: int) -> None:
    """Choose from ``logits``, float32 [last - first, window] of rows [first, last); ``lens`` are their lengths."""
    lengths = lens.reshape(-1)
    out = call.topk_indices_buffer[first:last, : call.topk_tokens]
    if call.candidate_blocks is not None:
        blocks = call.candidate_blocks[first:last]
        if plan.cand and not call.candidate_write:
            library.cand_topk(logits, lengths, blocks, out, call.topk_tokens, call.candidate_block_size)
            return
        if plan.cand:
            library.cand_blocks(logits, lengths, blocks, call.candidate_block_size)
        elif call.candidate_write:
            upstream._select_candidate_blocks(
                logits, None, lengths, blocks.shape[1], call.candidate_block_size, blocks, 1
            )
        else:
            upstream._apply_candidate_mask(logits, None, lengths, blocks, call.candidate_block_size, 1)
    if plan.rowtopk:
        library.rowtopk(logits, lengths, out, call.topk_tokens)
    else:
        choose = upstream.get_indexer_topk(call.topk_backend)
        choose(logits, lens, plan.each, out, call.topk_tokens, metadata.max_seq_len)


@contextmanager
def _metadata_as(context: Any, metadata: Any) -> Iterator[None]:
    """Let vLLM's code see other attention metadata for a while."""
    before = context.attn_metadata
    context.attn_metadata = metadata
    try:
        yield
    finally:
        context.attn_metadata = before


@functools.wraps(_upstream_indexer)
def indexer(*args: Any, **kwargs: Any) -> Tensor:
    """The operator: arguments, outputs and result as vLLM's ``sparse_attn_indexer``."""
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        # The profiling run has no batch. vLLM then accounts for prefill logits; decode logits take up to our budget.
        if _switches.chunk:
            device = _signature.bind(*args, **kwargs).arguments["hidden_states"].device
            torch.empty(_switches.chunk_bytes, dtype=torch.uint8, device=device)
        return _upstream_indexer(*args, **kwargs)
    bound = _signature.bind(*args, **kwargs)
    bound.apply_defaults()
    # By name: there are 27.
    call: Any = SimpleNamespace(**bound.arguments)
    name = _resolve_layer_name(call.k_cache_prefix)
    metadata = context.attn_metadata[name]
    plan = plan_decode(call, metadata)
    if plan is None:
        return _upstream_indexer(*args, **kwargs)
    rest = dataclasses.replace(metadata, num_decodes=0, decode=None)
    with _metadata_as(context, {**context.attn_metadata, name: rest}):
        _upstream_indexer(*args, **kwargs)
    run_decode(call, metadata, plan)
    return call.topk_indices_buffer


class ChunkedSparseAttnIndexer(upstream.SparseAttnIndexer):  # type: ignore[misc]  # vLLM's class is untyped here
    """vLLM's layer, with the operator of this module in its forward pass."""

    def forward_cuda(self, hidden_states: Tensor, q_quant: Any, k: Tensor | None, weights: Tensor) -> Any:
        """Arguments and result as in vLLM's class; ``q_quant`` is a tensor, or values and scales."""
        values, scale = q_quant if isinstance(q_quant, tuple) else (q_quant, None)
        operator = getattr(torch.ops.vllm, OPERATOR)
        return operator(
            hidden_states,
            _encode_layer_name(self.k_cache.prefix),
            self.k_cache.kv_cache,
            values,
            scale,
            k,
            weights,
            self.quant_block_size,
            self.scale_fmt,
            self.topk_tokens,
            self.head_dim,
            self.max_model_len,
            self.max_total_seq_len,
            self.topk_indices_buffer,
            self.skip_k_cache_insert,
            self.use_pcp,
            self.pcp_shard_decode_requests,
            _encode_layer_name(self.dense_mha_metadata_layer_name),
            self.use_fp4_cache,
            self.dcp_rank,
            self.dcp_world_size,
            self._parallel_config.cp_kv_cache_interleave_size,
            False,
            candidate_blocks=self.candidate_blocks,
            candidate_block_size=self.candidate_block_size,
            candidate_write=self.candidate_write,
            topk_backend=self.topk_backend,
        )


def register(switches: Switches) -> None:
    """Register operator and class with vLLM; call once per process, before a model is made."""
    global _switches
    _switches = switches
    direct_register_custom_op(
        op_name=OPERATOR,
        op_func=eager_break_during_capture(indexer),
        mutates_args=["topk_indices_buffer", "candidate_blocks"],
        fake_impl=upstream.sparse_attn_indexer_fake,
    )
    # Where the compiler splits the model for piecewise graphs: the operator reads the step's metadata, as attention
    # does.
    name = f"vllm::{OPERATOR}"
    if name not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append(name)
    CustomOp.register_oot(name="SparseAttnIndexer")(ChunkedSparseAttnIndexer)
