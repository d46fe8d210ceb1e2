"""What an engine says of itself against the plan."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_node_accept import engine_report
from gpu_node_accept.checks import Outcome
from gpu_node_accept.server import Metrics, parse_metrics

SIZES = [1, 8, 16, 32, 64, 128, 256, 512, 1024]
EXPECTED = {"kv_tokens": 4538321, "graph_sizes": SIZES, "kv_offload_bytes": 150001732812, "vram_after_boot_mib": 91629}
ARGUMENTS = {
    "attention-backend": "FLASHINFER_MLA_SPARSE_DSV41",
    "moe-backend": "flashinfer_cutlass",
    "tensor-parallel-size": 4,
}
IPC = {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}
# Written after the format strings of vLLM 0.33.0 (test_the_patterns_are_of_the_sources looks them up).
LOG = """\
INFO [core.py:140] Initializing a V1 LLM engine (v0.33.0) with config: model='/model', compilation_config={'mode': 3, \
'cudagraph_mode': 'FULL_AND_PIECEWISE', 'cudagraph_capture_sizes': [1, 8, 16, 32, 64, 128, 256, 512, 1024]}
INFO [cuda.py:448] Using AttentionBackendEnum.FLASHINFER_MLA_SPARSE_DSV41 backend.
INFO [mxfp4.py:539] Using 'FLASHINFER_CUTLASS_MXFP4_MXFP8' Mxfp4 MoE backend.
INFO [cuda_communicator.py:340] Using ['PYNCCL'] all-reduce backends (in dispatch order) for group 'world:0' out of \
potential backends: ['FLASHINFER_PCIE_IPC', 'FLASHINFER', 'PYNCCL'].
INFO [cuda_communicator.py:340] Using ['FLASHINFER_PCIE_IPC', 'PYNCCL'] all-reduce backends (in dispatch order) for \
group 'tp:0' out of potential backends: ['FLASHINFER_PCIE_IPC', 'FLASHINFER', 'PYNCCL'].
INFO [shared_offload_region.py:178] Created mmap file /dev/shm/vllm_offload_x.mmap (150.00 GB)
INFO [gpu_model_runner.py:6517] Graph capturing finished in 31 secs, took 2.94 GiB
"""
EMPTY = parse_metrics("")


def info(tokens: str) -> Metrics:
    return parse_metrics(f'vllm:cache_config_info{{block_size="256",kv_cache_size_tokens="{tokens}"}} 1.0\n')


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [("4538321", "pass"), ("4084489", "pass"), ("4084488", "fail"), ("0", "fail"), ("None", "not run")],
)
def test_the_kv_cache_is_as_large_as_planned(tokens: str, verdict: str) -> None:
    assert engine_report.kv_tokens(EXPECTED, info(tokens)).verdict == verdict


def test_a_plan_without_a_figure_leaves_nothing_open() -> None:
    for outcome in (
        engine_report.kv_tokens({}, EMPTY),
        engine_report.graph_sizes({}, LOG, "0.33.0"),
        engine_report.kv_offload({}, LOG, EMPTY, "0.33.0"),
        engine_report.attention_backend({}, LOG, "0.33.0"),
        engine_report.all_reduce_backends({"tensor-parallel-size": 1}, {}, LOG, "0.33.0"),
        engine_report.memory_after_boot({}, {"a": 1}),
    ):
        assert (outcome.verdict, outcome.applies) == ("not run", False)


def all_reports(log: str, engine: str = "0.33.0") -> dict[str, Outcome]:
    return {
        "graphs": engine_report.graph_sizes(EXPECTED, log, engine),
        "offload": engine_report.kv_offload(EXPECTED, log, EMPTY, engine),
        "attention": engine_report.attention_backend(ARGUMENTS, log, engine),
        "moe": engine_report.moe_backend(ARGUMENTS, log, engine),
        "sums": engine_report.all_reduce_backends(ARGUMENTS, IPC, log, engine),
    }


def test_a_log_that_says_what_was_planned() -> None:
    assert {name: one.verdict for name, one in all_reports(LOG).items()} == dict.fromkeys(all_reports(LOG), "pass")


def test_a_log_without_the_lines_is_no_pass() -> None:
    for outcome in all_reports("nothing of it", "0.34.0").values():
        assert (outcome.verdict, outcome.applies) == ("not run", True)
        assert "the patterns are of vLLM 0.33.0, this is 0.34.0" in outcome.why


@pytest.mark.parametrize(
    ("which", "old", "new"),
    [
        ("graphs", "512, 1024]", "512]"),
        ("offload", "(150.00 GB)", "(139.70 GB)"),
        ("attention", "FLASHINFER_MLA_SPARSE_DSV41 backend", "TRITON_MLA backend"),
        ("moe", "FLASHINFER_CUTLASS_MXFP4_MXFP8", "MARLIN"),
        ("sums", "['FLASHINFER_PCIE_IPC', 'PYNCCL'] all", "['PYNCCL'] all"),
    ],
)
def test_each_difference_fails_alone(which: str, old: str, new: str) -> None:
    verdicts = {name: one.verdict for name, one in all_reports(LOG.replace(old, new)).items()}
    assert [name for name, verdict in verdicts.items() if verdict != "pass"] == [which]
    assert verdicts[which] == "fail"


def test_the_offload_metric_is_taken_before_the_log() -> None:
    metrics = parse_metrics('vllm:kv_offload_config_info{cpu_kv_cache_size_bytes="100000000000"} 1\n')
    assert engine_report.kv_offload(EXPECTED, LOG, metrics, "").verdict == "fail"


@pytest.mark.parametrize(
    ("expected", "used", "verdict"),
    [
        (EXPECTED, [91629, 91000], "pass"),
        (EXPECTED, [91629, 94000], "warn"),
        (EXPECTED, [91629, 60000], "warn"),
        ({"vram_peak_mib": 96917}, [80000, 96917], "pass"),
        (EXPECTED, [], "not run"),
    ],
)
def test_memory_of_the_cards(expected: dict[str, Any], used: list[int], verdict: str) -> None:
    by_card = {f"GPU-{number}": mib for number, mib in enumerate(used)}
    assert engine_report.memory_after_boot(expected, by_card).verdict == verdict
