"""Engine arguments that recipes for other cards carry."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.unsupported_args import unsupported_arguments
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("args", "value"),
    [
        ({"moe-backend": "deep_gemm_mega_moe"}, "deep_gemm_mega_moe"),
        ({"--moe_backend": "DEEP-GEMM-MEGA-MOE"}, "DEEP-GEMM-MEGA-MOE"),
        ({"moe-back": "hpc"}, "hpc"),
        ({"kernel-config": {"moe_backend": "flashinfer_trtllm"}}, "flashinfer_trtllm"),
        ({"kernel_config": '{"moe_backend": "flashinfer_cutedsl"}'}, "flashinfer_cutedsl"),
        ({"kernel-config.moe_backend": "aiter"}, "aiter"),
        ({"sparse-indexer-topk-backend": "cooperative"}, "cooperative"),
        ({"kernel-config.sparse_indexer_topk_backend": "deep_select"}, "deep_select"),
        ({"attention-backend": "FLASHMLA_SPARSE_DSV41"}, "FLASHMLA_SPARSE_DSV41"),
        ({"attention-config": {"backend": "FLASHMLA_MEGA_ATTN_DSV41"}}, "FLASHMLA_MEGA_ATTN_DSV41"),
        ({"-ac": {"indexer_kv_dtype": "mxfp4"}}, "mxfp4"),
        ({"attention_config.use_fp4_indexer_cache": True}, "use_fp4_indexer_cache"),
        ({"attention-config": {"use_fp4_indexer_cache": False}}, "use_fp4_indexer_cache"),
        ({"attention-config": {"indexer_sparse_logits": True}}, "indexer_sparse_logits"),
        ({"kv-cache-dtype": "nvfp4_ds_mla"}, "nvfp4_ds_mla"),
        ({"additional-config": {"decode_backend": "latency_specialized"}}, "latency_specialized"),
    ],
)
def test_arguments_without_sm_120_code_are_named(args: dict[str, Any], value: str) -> None:
    problems = unsupported_arguments(args)
    assert len(problems) == 1
    assert value in problems[0]
    assert "leave it out" in problems[0]


def test_every_such_argument_gets_its_own_sentence() -> None:
    args = {"moe-backend": "deep_gemm_mega_moe", "attention_config.use_fp4_indexer_cache": True}
    assert len(unsupported_arguments(args)) == 2


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"moe-backend": "flashinfer_cutlass", "attention-backend": "FLASHINFER_MLA_SPARSE_DSV41"},
        {"kernel-config": {"moe_backend": "flashinfer_cutlass"}, "attention-backend": "FLASHINFER_MLA_SPARSE_DSV4"},
        {"moe-backend": "deep_gemm"},
        {"moe-backend": "marlin"},
        {"attention-config": {"indexer_kv_dtype": "fp8", "indexer_sparse_logits": False}},
        {"kv-cache-dtype": "fp8", "kernel-config": "{not JSON", "enforce-eager": True},
        {"compilation-config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "custom_ops": ["all"]}},
    ],
)
def test_arguments_that_sm_120_has_code_for(args: dict[str, Any]) -> None:
    assert unsupported_arguments(args) == []


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["mxfp4", '{"backend": "x"}']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text() | st.sampled_from(["moe-backend", "attention-config"]), ANYTHING, max_size=4))
def test_any_arguments_give_sentences_and_no_error(args: dict[str, Any]) -> None:
    assert all("engine_args" in problem for problem in unsupported_arguments(args))
