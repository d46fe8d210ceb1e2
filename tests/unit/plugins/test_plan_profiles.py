"""The plans of both GPU profiles: the documents' settings as they reach the engine, and any node with any overrides."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.describe import describe_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import PlanError
from ansible_collections.serving.gpu_node.plugins.module_utils.release import ResolveError, resolve_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import SETTINGS
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import parse_cpu_list
from ansible_collections.serving.gpu_node.plugins.module_utils.topology_file import load_topology, saved_topology
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.samples import (
    DRAFTER,
    IMAGE,
    MODEL,
    PACK,
    REVISION,
    gpu,
    intent,
    listener,
    numa_node,
    profile,
    record,
    resolved,
    two_cards,
    two_sockets,
)

Plan = dict[str, Any]
DIGESTS = {"model": MODEL, "drafter": DRAFTER}


def problems(overrides: dict[str, Any], name: str = "8x", **more: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        intent(overrides, name=name, **more)
    return caught.value.problems


def arguments(plan: Plan, index: int = 0) -> dict[str, Any]:
    """What the engine reads of its arguments."""
    loaded: dict[str, Any] = yaml.safe_load(plan["replicas"][index]["files"]["engine.yaml"])
    return loaded


def environment(plan: Plan, index: int = 0) -> dict[str, str]:
    """What the container gets."""
    lines = plan["replicas"][index]["files"]["engine.env"].splitlines()
    return dict(line.split("=", 1) for line in lines)


def release(plan: Plan, index: int = 0) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(plan["replicas"][index]["files"]["release.json"])
    return loaded


def option(plan: Plan, name: str, index: int = 0) -> str:
    argv: list[str] = release(plan, index)["podman_args"]
    return argv[argv.index(name) + 1]


def ids(plan: Plan) -> list[str]:
    return [replica["release"] for replica in plan["replicas"]]


# The 8x document


def test_the_8x_document_reaches_the_engine() -> None:
    plan = resolved(name="8x")
    assert len(plan["replicas"]) == 2
    for index in range(2):
        found = arguments(plan, index)
        document = {
            "host": "127.0.0.1",
            "port": 8000 + index,
            "tensor-parallel-size": 4,
            "enable-expert-parallel": True,
            "max-model-len": 1_048_576,
            "kv-cache-dtype": "fp8",
            "kv-cache-memory-bytes": "18G",
            "max-num-seqs": 128,
            "max-num-batched-tokens": 16_384,
            "cudagraph-capture-sizes": [1, 8, 16, 32, 64, 128, 256, 512, 1024],
            "kv-offloading-backend": "native",
            "speculative-config": {
                "method": "dspark",
                "num_speculative_tokens": 7,
                "draft_sample_method": "probabilistic",
                "model": "/drafter",
            },
        }
        assert {name: found[name] for name in document} == document
        # 150 GB, in the GiB that the engine counts in
        assert found["kv-offloading-size"] * 2**30 == pytest.approx(150e9, rel=1e-3)
        # every expert is in GPU memory, and the KV cache is sized by itself alone
        assert not [name for name in found if "offload" in name and not name.startswith("kv-offloading")]
        assert "gpu-memory-utilization" not in found
    assert (plan["warnings"], plan["missing"]) == ([], [])


def test_the_8x_recipe_is_recognisable() -> None:
    recipe = {
        "PROFILE": "8x",
        "SPEC_K": "7",
        "MAX_MODEL_LEN": "1048576",
        "MAX_NUM_SEQS": "128",
        "MAX_BATCHED": "16384",
        "KV_MEM": "18G",
        "KV_OFFLOAD_GB": "150",
        "CONTAINER_MEM": "400g",
        "DS41_IDX_CHUNK": "1",
        "DS41_ROWTOPK": "1",
        "DS41_DRAFTER": "code",
        "XMOE_FLAT_MAX_BSZ": "1152",
        # the kernels' own switches
        "DS41_CAND": "1",
        "DS41_XMOE": "1",
        "DS41_AR8": "1",
        "DS41_AR8_MIN_ROWS": "64",
        "DS41_ENGRAM_PACKED": "1",
        "DS41_LMHEAD_REPL": "1",
        "DS41_WKV_REPL_MIN_ROWS": "1024",
        "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    plan = resolved(name="8x", image={**IMAGE, "recipe": "pack"})
    for index in range(2):
        found = environment(plan, index)
        assert {name: found.get(name) for name in recipe} == recipe
    assert recipe.keys() - {"CUDA_DEVICE_ORDER", "PROFILE"} <= {item.environment for item in SETTINGS.values()}


def test_two_replicas_each_on_its_own_socket_behind_the_balancer() -> None:
    plan = resolved(name="8x")
    placed = [
        ([int(card["pci_address"][5:7], 16) for card in item["gpus"]], item["port"], item["cpus"], item["memory_nodes"])
        for item in plan["replicas"]
    ]
    assert placed == [([0, 1, 2, 3], 8000, "0-31,64-95", "0"), ([4, 5, 6, 7], 8001, "32-63,96-127", "1")]
    for index in range(2):
        assert option(plan, "--cpuset-cpus", index) == placed[index][2]
        assert option(plan, "--cpuset-mems", index) == placed[index][3]
        assert option(plan, "--memory", index) == "400g"
        assert environment(plan, index)["CUDA_VISIBLE_DEVICES"].count("GPU-") == 4
    assert plan["balancer"]["port"] not in (8000, 8001)


def test_the_8x_figures() -> None:
    plan = resolved(name="8x")
    assert plan["expected"]["kv_tokens"] == 4_538_321
    assert plan["expected"]["vram_after_boot_mib"] == 91_629
    bars = {item["name"]: item for item in plan["budgets"]}
    memory = bars["GPU memory after boot, each card"]
    assert (memory["used"], memory["total"], memory["basis"]) == (91_629, 97_887, "measured")
    assert "4.33 full-length requests" in bars["context window"]["detail"]
    # /dev/shm holds all of the KV offload
    size = option(plan, "--shm-size")
    assert size.endswith("g") and int(size[:-1]) * 2**30 >= 150 * 10**9
    assert all(item["used"] <= item["total"] for item in plan["budgets"])


def test_the_tested_node_had_1400_gb() -> None:
    node = two_sockets(gib=1.4e12 / 2 / 2**30)
    assert intent({}, node, name="8x")["warnings"] == []


def test_half_the_memory_is_too_little() -> None:
    (one, two) = problems({}, node=two_sockets(gib=300))
    assert "replica 0 on NUMA node 0" in one and "replica 1 on NUMA node 1" in two and "300.0 GiB" in one


def test_prose_is_taken_without_protest() -> None:
    plan = resolved({"SPEC_K": 3}, name="8x")
    assert plan["warnings"] == []
    assert arguments(plan)["cudagraph-capture-sizes"] == [1, 8, 16, 32, 64, 128, 256, 512]
    assert arguments(plan)["speculative-config"]["num_speculative_tokens"] == 3
    assert environment(plan)["SPEC_K"] == "3"
    assert plan["changed_settings"] == {"speculative_tokens": 3}
    assert resolved({"speculative_tokens": 3}, name="8x")["replicas"] == plan["replicas"]


def test_more_draft_tokens_than_the_head_has() -> None:
    (problem,) = problems({"SPEC_K": 8, "max_num_seqs": 64})
    assert problem.startswith("speculative_tokens: 8 is more than the 7 that the head 'code' drafts")


def test_the_head_that_is_there_decides_how_many_it_drafts() -> None:
    """A folder of another head, named as the code head's source; the profile's data know nothing of it."""
    with pytest.raises(ResolveError) as caught:
        resolved({}, name="8x", draft_tokens={"drafter": 5, "model": 7})
    (problem,) = caught.value.problems
    assert problem.startswith("speculative_tokens: 7 is more than the 5 that the head 'code' drafts in one block")
    assert "config.json of the artifact 'drafter'" in problem
    assert problem.endswith("set it to at most 5, or take another drafter")
    assert ids(resolved({}, name="8x", draft_tokens={"drafter": 7, "model": 5})) == ids(resolved({}, name="8x"))
    assert resolved({"SPEC_K": 3}, name="8x", draft_tokens={"drafter": 7})["warnings"] == []
    # without a head nothing is drafted, whatever the model has
    assert resolved({"drafter": "none"}, name="8x", draft_tokens={"model": 5})["draft"] == {}


def test_the_head_in_the_model_is_not_known_before_it_is_there() -> None:
    (warning,) = intent({"drafter": "released"}, name="8x")["warnings"]
    assert "how many tokens the head 'released' can draft is not known" in warning
    # still so when its configuration does not say
    assert resolved({"drafter": "released"}, name="8x", draft_tokens={"model": 0})["warnings"] == [warning]
    with pytest.raises(ResolveError) as caught:
        resolved({"drafter": "released"}, name="8x", draft_tokens={"model": 5})
    assert "the 5 that the head 'released' drafts" in caught.value.problems[0]
    plan = resolved({"drafter": "released", "SPEC_K": 5}, name="8x", draft_tokens={"model": 5})
    assert plan["warnings"] == []
    assert resolve_plan(plan, DIGESTS, IMAGE, two_sockets()["gpus"], [record()], {"model": 5}) == plan
    with pytest.raises(ResolveError):
        resolved({}, name="2x", draft_tokens={"model": 3})


def test_the_code_head_without_a_source_has_two_remedies() -> None:
    (problem,) = problems({}, sources={"model": REVISION})
    assert problem.startswith("drafter: 'code' has no source")
    assert "serving_plan_sources.drafter" in problem and "drafter: released" in problem
    # both work
    assert intent({}, name="8x", sources={"model": REVISION, "drafter": PACK})["missing"] == []
    assert intent({"DS41_DRAFTER": "released"}, name="8x", sources={"model": REVISION})["missing"] == []


def test_a_source_whose_revision_nobody_has_filled_in() -> None:
    plan = intent({}, name="8x", sources={"drafter": {**PACK, "revision": ""}})
    assert plan["missing"] == [
        "serving_plan_sources: model: revision of the source of type hub",
        "serving_plan_sources: drafter: revision of the source of type hub",
    ]


def test_the_head_that_comes_with_the_model() -> None:
    plan = resolved({"DS41_DRAFTER": "released"}, name="8x")
    assert "model" not in arguments(plan)["speculative-config"]
    assert arguments(plan)["speculative-config"]["num_speculative_tokens"] == 7
    assert environment(plan)["DS41_DRAFTER"] == "released"
    assert plan["replicas"][0]["drafter"] is None and "drafter" not in plan["artifacts"]
    assert not [part for part in release(plan)["podman_args"] if part.endswith(":/drafter:ro")]
    # with the code head it is there
    mounts = [part for part in release(resolved(name="8x"))["podman_args"] if part.endswith(":/drafter:ro")]
    assert mounts == [f"/var/lib/gpu-node/artifacts/drafter-code-k7/{DRAFTER[:12]}:/drafter:ro"]


OWN_PACK = {name: value for name, value in PACK.items() if name != "folder"}


def test_a_pack_is_an_artifact_and_gives_the_drafter_too() -> None:
    plan = intent({}, name="8x", sources={"model": REVISION, "pack": OWN_PACK})
    assert plan["missing"] == []
    assert list(plan["artifacts"]) == ["model", "pack", "drafter"]
    assert plan["artifacts"]["pack"]["name"] == "pack-8x"
    assert "recipe/" in plan["artifacts"]["pack"]["source"]["include"]
    assert plan["artifacts"]["drafter"] == {"name": "drafter-code-k7", "source": PACK}
    assert plan["replicas"][0]["drafter"]["name"] == "drafter-code-k7"


def test_a_drafter_of_its_own_goes_before_the_packs() -> None:
    own = {"type": "path", "path": "/srv/head"}
    plan = intent({}, name="8x", sources={"model": REVISION, "pack": OWN_PACK, "drafter": own})
    assert plan["artifacts"]["drafter"]["source"] == own
    plan = intent({"drafter": "released"}, name="8x", sources={"model": REVISION, "pack": OWN_PACK})
    assert list(plan["artifacts"]) == ["model", "pack"]


def test_what_lacks_in_a_packs_source_is_said_once() -> None:
    plan = intent({}, name="8x", sources={"model": REVISION, "pack": {**OWN_PACK, "revision": ""}})
    assert plan["missing"] == ["serving_plan_sources: pack: revision of the source of type hub"]
    mirror = {"type": "mirror", "url": "https://m.example/pack", "digest": "a" * 64}
    with pytest.raises(PlanError) as caught:
        intent({}, name="8x", sources={"model": REVISION, "pack": mirror})
    (problem,) = caught.value.problems
    assert problem.startswith("drafter: 'code' has no source")


def test_an_images_own_entry_point_is_not_asked() -> None:
    for name in ("8x", "2x"):
        found = release(resolved(name=name))
        assert found["podman_args"][-2:] == ["--entrypoint", "vllm"]
        assert found["command"] == ["serve", "--config", "/etc/vllm/engine.yaml"]


def test_how_an_image_was_made_is_no_part_of_a_release() -> None:
    image = {"ref": "localhost/x:1", "id": "b" * 64}
    plan = resolved(name="8x", image={**image, "recipe": "pack"})
    assert plan["replicas"][0]["image"] == release(plan)["image"] == image


def test_without_a_drafter() -> None:
    plan = resolved({"drafter": "none"}, name="8x")
    assert "speculative-config" not in arguments(plan)
    # one row for each of 128 sequences
    assert arguments(plan)["cudagraph-capture-sizes"] == [1, 8, 16, 32, 64, 128]
    assert plan["replicas"][0]["drafter"] is None
    assert environment(plan)["DS41_DRAFTER"] == "none"


def test_without_the_chunked_indexer() -> None:
    (problem,) = problems({"DS41_IDX_CHUNK": 0})
    assert "1,024 rows" in problem and "1,048,576" in problem and "the 8x document" in problem
    assert "MAX_MODEL_LEN=524288" in problem
    plan = resolved({"DS41_IDX_CHUNK": 0, "MAX_MODEL_LEN": 524288}, name="8x")
    assert environment(plan)["DS41_IDX_CHUNK"] == "0"
    assert len(problems({"DS41_IDX_CHUNK": 0, "MAX_MODEL_LEN": 524289})) == 1
    # half the rows take the whole window
    assert intent({"DS41_IDX_CHUNK": 0, "SPEC_K": 3}, name="8x")["settings"]["max_model_len"] == 1_048_576


def test_rows_beyond_the_flat_path_are_a_warning() -> None:
    (warning,) = intent({"max_num_seqs": 145}, name="8x")["warnings"]
    assert "1,160 rows" in warning and "1,152" in warning
    assert intent({"max_num_seqs": 144}, name="8x")["warnings"] == []


def test_experts_that_do_not_divide() -> None:
    found = problems({"tensor_parallel_size": 5, "replicas": 1, "gpus": [f"0000:0{n}:00.0" for n in range(5)]})
    assert any("384 routed experts do not divide by 5" in text for text in found)


# Arguments of the operator's own


def test_a_prefill_chunk_below_a_decode_step() -> None:
    (problem,) = problems({"MAX_BATCHED": 512})
    assert problem.startswith("max_num_batched_tokens: 512 is less than the 1,024 rows of a full decode step")
    assert "128 sequences x (1 + 7)" in problem and "set it to at least 1024" in problem
    assert intent({"MAX_BATCHED": 1024}, name="8x")["warnings"] == []
    assert intent({"MAX_BATCHED": 512, "SPEC_K": 3}, name="8x")["warnings"] == []
    (problem,) = problems({"MAX_BATCHED": 383}, "2x")
    assert "384 rows" in problem
    assert intent({"MAX_BATCHED": 384}, name="2x")["warnings"] == []


@pytest.mark.parametrize(
    "given_args",
    [
        {"max-cudagraph-capture-size": 512},
        {"max_cudagraph_capture_size": 1024},
        {"compilation-config": {"max_cudagraph_capture_size": 512}},
        {"compilation-config": '{"max_cudagraph_capture_size": 512}'},
        {"compilation-config.max_cudagraph_capture_size": 512},
    ],
)
def test_a_largest_graph_beside_the_listed_ones(given_args: dict[str, Any]) -> None:
    (problem,) = problems({"engine_args": given_args})
    assert "is not for overriding" in problem and "max_num_seqs and speculative_tokens" in problem


def test_the_largest_graph_of_two_cards_has_one_name() -> None:
    assert intent({"engine_args": {"max-cudagraph-capture-size": 384}}, name="2x")["warnings"] == []
    (problem,) = problems({"engine_args": {"compilation-config.max_cudagraph_capture_size": 384}}, "2x")
    assert problem.endswith("give it by the name 'max-cudagraph-capture-size'")


@pytest.mark.parametrize("given_args", [{"enforce-eager": True}, {"compilation-config.cudagraph_mode": "NONE"}])
def test_without_graphs_none_are_listed(given_args: dict[str, Any]) -> None:
    plan = resolved({"engine_args": given_args}, name="8x")
    assert "graph_sizes" not in plan["expected"]
    assert "cudagraph-capture-sizes" not in arguments(plan)


@pytest.mark.parametrize(
    ("given_args", "words"),
    [
        ({"engram-config.cpu_offload": False}, "use_thp is for tables in host memory, and cpu_offload is off"),
        ({"engram-config": {"cpu_offload": 0, "use_thp": 1}}, "use_thp is for tables in host memory"),
        ({"engram-config.dp_shared_memory": True}, "dp_shared_memory needs data parallel replicas"),
        ({"max-num-active-seqs": 129}, "max-num-active-seqs: 129 is more than max_num_seqs (128)"),
        ({"long-prefill-token-threshold": 1048577}, "is more than max_model_len (1048576)"),
        ({"numa-bind": True}, "cpuset"),
        ({"data-parallel-size": 2}, "set replicas"),
        ({"pipeline-parallel-size": 2}, "set tensor_parallel_size and replicas"),
        ({"swap-space": 16}, "is gone from vLLM 0.33.0"),
        ({"spec-tokens": 3}, "set speculative_tokens"),
        ({"cpu-offload-gb": 50}, "weights are in GPU memory"),
        ({"kv-transfer-config": {"kv_connector": "LMCacheMPConnector"}}, "set that"),
        ({"kernel-config.moe_backend": "marlin"}, "the same thing"),
    ],
)
def test_arguments_that_the_engine_refuses_or_that_say_otherwise(given_args: dict[str, Any], words: str) -> None:
    found = problems({"engine_args": given_args})
    assert [words in problem for problem in found].count(True) == 1
    assert all(problem.startswith(("engine_args: ", "kv_cache_memory: ")) for problem in found)


@pytest.mark.parametrize("config", [{"use_thp": True}, {}])
def test_a_model_without_engram_tables_has_no_configuration_of_them(config: dict[str, Any]) -> None:
    (problem,) = problems({"engine_args": {"engram-config": config}}, "2x")
    assert "no Engram tables" in problem


def test_engram_tables_on_the_cards_are_counted_there() -> None:
    """189 GiB on four cards are 48,384 MiB each; the document's 91,629 MiB are without them."""
    (problem,) = problems({"engine_args": {"engram-config": {"cpu_offload": False}}})
    assert "121,581 MiB for all else (the 8x document, with 48,384 MiB of Engram tables" in problem
    assert problem.endswith("leave engram-config.cpu_offload on")
    # and not in host memory: 139.7 + 36 + 8 + 16 GiB remain
    found = problems({"engine_args": {"engram-config": {"cpu_offload": False}}, "CONTAINER_MEM": "200g"})
    assert found == [problem]


def test_caches_of_images_count_against_the_cap() -> None:
    def need(given_args: dict[str, Any]) -> float:
        plan = intent({"engine_args": given_args, "CONTAINER_MEM": "600g"}, name="8x")
        assert plan["container"]["need_bytes"] == round(
            next(item["used"] for item in plan["budgets"] if item["name"] == "host memory, cap") * 2**30
        )
        return float(plan["container"]["need_bytes"] / 2**30)

    usual = need({})
    assert need({"mm-processor-cache-gb": 4}) == usual
    # one copy of the API server's, one of the engine core's
    assert need({"mm-processor-cache-gb": 20}) == usual + 32
    assert need({"api-server-count": 2}) == usual + 1 + 4
    (problem,) = problems({"engine_args": {"mm-processor-cache-gb": 20}})
    assert "container_memory: a replica needs 420." in problem


@pytest.mark.parametrize("name", ["8x", "2x"])
@pytest.mark.parametrize(
    ("argument", "value", "own"), [("kv-cache-dtype", "bfloat16", "fp8"), ("decode_context_parallel_size", 2, "1")]
)
def test_another_form_of_kv_cache_has_other_tokens(name: str, argument: str, value: Any, own: str) -> None:
    (warning,) = intent({"engine_args": {argument: value}}, name=name)["warnings"]
    assert f"the tokens of KV cache that are shown are of {own} (the {name} document); with {value}" in warning
    assert intent({"engine_args": {"kv-cache-dtype": "fp8"}}, name=name)["warnings"] == []


def test_an_argument_that_nobody_knows_is_a_warning() -> None:
    (warning,) = intent({"engine_args": {"max-logprobz": 5}}, name="8x")["warnings"]
    assert "max-logprobz" in warning and "'max-logprobs'" in warning
    # the demo runs another version
    assert intent({"engine_args": {"max-logprobz": 5}})["warnings"] == []


def test_a_cap_below_the_need() -> None:
    (problem,) = problems({"CONTAINER_MEM": "300g"})
    assert "container_memory" in problem and "Engram tables" in problem and "300.0 GiB" in problem


# The 2x document


def test_the_observed_command_of_two_cards() -> None:
    observed = {
        "tensor-parallel-size": 2,
        "decode-context-parallel-size": 1,
        "kv-cache-dtype": "fp8",
        "block-size": 256,
        "gpu-memory-utilization": 0.93,
        "max-model-len": 262_144,
        "max-num-seqs": 64,
        "max-num-batched-tokens": 8_192,
        "max-cudagraph-capture-size": 512,
        "compilation-config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "custom_ops": ["all"]},
        "async-scheduling": True,
        "enable-chunked-prefill": True,
        "enable-flashinfer-autotune": True,
        "tokenizer-mode": "deepseek_v4",
        "speculative-config": {
            "method": "dspark",
            "num_speculative_tokens": 5,
            "draft_sample_method": "probabilistic",
        },
        "attention-backend": "FLASHINFER_MLA_SPARSE_DSV4",
        "kernel-config": {"moe_backend": "flashinfer_cutlass"},
        "enable-prefix-caching": True,
    }
    plan = resolved(name="2x")
    ours = {"model", "served-model-name", "host", "port", "shutdown-timeout", "disable-uvicorn-access-log"}
    found = arguments(plan)
    assert {name: value for name, value in found.items() if name not in ours} == observed
    assert ours <= found.keys()
    assert (plan["warnings"], len(plan["replicas"]), found["port"]) == ([], 1, 8000)


def test_the_2x_recipe_is_recognisable() -> None:
    found = environment(resolved(name="2x"))
    recipe = {"PROFILE": "2x", "SPEC_K": "5", "MAX_MODEL_LEN": "262144", "MAX_NUM_SEQS": "64", "MAX_BATCHED": "8192"}
    assert {name: found.get(name) for name in recipe} == recipe
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    # nothing of the other recipe's kernels
    assert not [name for name in found if name.startswith(("DS41_IDX", "DS41_AR8", "XMOE"))]


def test_the_measured_peaks_are_no_reason_to_refuse() -> None:
    plan = intent({}, name="2x")
    assert plan["expected"]["vram_peak_mib"] == [96_799, 96_917]
    assert plan["warnings"] == []


@pytest.mark.parametrize("window", [262_145, 524_288, 1_048_576])
def test_a_window_beyond_the_kv_cache_of_two_cards(window: int) -> None:
    (problem,) = problems({"MAX_MODEL_LEN": window}, "2x")
    assert f"{window:,}" in problem and "81 GiB" in problem and "262,144" in problem


@pytest.mark.parametrize(("tokens", "fits"), [(1, True), (5, True), (6, False), (7, False)])
def test_the_head_of_two_cards_has_five_tokens(tokens: int, fits: bool) -> None:
    if fits:
        assert intent({"SPEC_K": tokens}, name="2x")["settings"]["speculative_tokens"] == tokens
    else:
        (problem,) = problems({"SPEC_K": tokens}, "2x")
        assert problem.startswith(f"speculative_tokens: {tokens} is more than the 5 that the head 'released' drafts")


def test_the_code_head_is_not_made_for_this_model() -> None:
    found = problems({"drafter": "code"}, "2x")
    assert found == ["drafter: 'code' is not one of released, none"]


def test_the_document_s_machine_has_enough_memory() -> None:
    # 125 GB, of which a running kernel shows less
    assert intent({}, two_cards(gib=116), name="2x")["warnings"] == []


# Overrides


@pytest.mark.parametrize(
    ("name", "key", "nearest"),
    [
        ("8x", "SPEC_KK", "SPEC_K"),
        ("8x", "DS41_IDX_CHUNKS", "DS41_IDX_CHUNK"),
        ("8x", "kv_ofload_gb", "kv_offload_gb"),
        ("2x", "MAX_MODEL_LENGTH", "MAX_MODEL_LEN"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest(name: str, key: str, nearest: str) -> None:
    assert problems({key: 1}, name) == [f"unknown setting '{key}'; the nearest known one is '{nearest}'"]


@pytest.mark.parametrize(
    ("name", "key"), [("2x", "KV_OFFLOAD_GB"), ("2x", "expert_parallel"), ("8x", "gpu_memory_utilization")]
)
def test_a_setting_of_another_profile(name: str, key: str) -> None:
    assert problems({key: 1}, name) == [f"'{key}' means nothing to this profile; leave it out"]


@pytest.mark.parametrize("key", ["DS41_ROWTOPK", "length_aware_topk", "DS41_IDX_CHUNK", "XMOE_FLAT_MAX_BSZ"])
def test_a_switch_of_the_other_models_kernels_is_refused_with_the_reason(key: str) -> None:
    """The pack's document has DS41_ROWTOPK on "both profiles", of which one is another 2x than ours."""
    (problem,) = problems({key: 1}, "2x")
    assert problem.startswith(
        f"'{key}' means nothing to this profile: it is of the kernels for DeepSeek-V4.1, profile 8x"
    )
    assert "the pack has a 2x profile of its own" in problem


def test_a_setting_by_both_of_its_names() -> None:
    (problem,) = problems({"SPEC_K": 3, "speculative_tokens": 7})
    assert problem == "'speculative_tokens' and 'SPEC_K' are the same setting; give one of them"


@pytest.mark.parametrize("environment_name", [item.environment for item in SETTINGS.values() if item.environment])
def test_every_name_of_the_recipe_sets_what_its_own_name_sets(environment_name: str) -> None:
    (name,) = [key for key, item in SETTINGS.items() if item.environment == environment_name]
    for chosen in ("8x", "2x"):
        own = profile(chosen)["settings"].get(name)
        if own in (None, "auto"):
            continue
        assert intent({environment_name: own}, name=chosen) == intent({name: own}, name=chosen)


def test_ports_that_are_taken() -> None:
    node = two_sockets()
    node["listeners"] = [listener(8001)]
    (problem,) = problems({}, node=node)
    assert problem.startswith("port 8001, wanted for replica 1, is in use by process 77")
    assert [item["port"] for item in intent({"first_port": 9000}, node, name="8x")["replicas"]] == [9000, 9001]


# Intent and resolved


def without_driver(node: dict[str, Any]) -> dict[str, Any]:
    for card in node["gpus"]:
        card |= {"uuid": "", "memory_mib": None, "mig": None}
    node["driver"] = {"version": "", "open": None}
    return node


def test_a_bare_node_has_a_plan_by_pci_address() -> None:
    plan = intent({}, without_driver(two_sockets()), name="8x")
    assert plan["state"] == "intent" and plan["warnings"] == []
    assert [card for item in plan["replicas"] for card in item["gpus"]] == [
        {"pci_address": f"0000:0{number}:00.0", "uuid": "auto"} for number in range(8)
    ]
    assert all(item["release"] == "auto" for item in plan["replicas"])
    # and the driver, once there, completes it to what it would have been
    cards = two_sockets()["gpus"]
    assert ids(resolve_plan(plan, DIGESTS, IMAGE, cards, [record()], {})) == ids(resolved(name="8x"))


def test_a_card_that_the_driver_does_not_see_resolves_nothing() -> None:
    plan = intent({}, without_driver(two_sockets()), name="8x")
    cards = two_sockets()["gpus"]
    cards[6]["uuid"] = ""
    del cards[1]
    with pytest.raises(ResolveError) as caught:
        resolve_plan(plan, DIGESTS, IMAGE, cards, [record()], {})
    assert [text.split(";")[0] for text in caught.value.problems] == [
        "replica 0: the driver does not see GPU 0000:01:00.0",
        "replica 1: the driver does not see GPU 0000:06:00.0",
    ]


@pytest.mark.parametrize("number", range(8))
def test_a_swapped_card_changes_its_replica_alone(number: int) -> None:
    before = ids(resolved(name="8x"))
    node = two_sockets()
    node["gpus"][number]["uuid"] = "GPU-99999999-0000-0000-0000-000000000000"
    plan = resolved({}, node, name="8x")
    after = ids(plan)
    assert [one == two for one, two in zip(before, after, strict=True)] == [number // 4 == 1, number // 4 == 0]
    assert "GPU-99999999" in environment(plan, number // 4)["CUDA_VISIBLE_DEVICES"]


def test_a_card_in_another_slot_changes_its_replica_alone() -> None:
    node = two_sockets()
    node["gpus"][7]["pci_address"] = "0000:19:00.0"
    node["links"] = [[part.replace("0000:07:", "0000:19:") for part in link] for link in node["links"]]
    before, after = ids(resolved(name="8x")), ids(resolved({}, node, name="8x"))
    assert before[0] == after[0] and before[1] != after[1]


def test_a_saved_topology_gives_the_same_plan() -> None:
    for name, node in (("8x", two_sockets()), ("2x", two_cards())):
        # zeros alone are what a driver says of a card that it does not know
        for card in node["gpus"]:
            card["uuid"] = card["uuid"].replace("GPU-00000000", "GPU-12345678")
        loaded = load_topology(yaml.safe_dump(saved_topology(node)))
        assert intent({}, loaded, name=name) == intent({}, node, name=name)


def test_the_plan_is_plain_data() -> None:
    for name in ("8x", "2x"):
        plan = resolved(name=name)
        assert json.loads(json.dumps(plan)) == plan
        assert yaml.safe_load(yaml.safe_dump(plan)) == plan


# Any node, any overrides

NUMBERS = st.sampled_from([None, 0, 1, 0, 1, 0, 1, 2, 3, -1, 7])
DEVICES = st.sampled_from(["0x2bb5"] * 12 + ["0x2bb4", "0x2bb1", "0x1eb8", ""])
LINKS = st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS", "NV4", "NV18", "?", ""])


@st.composite
def nodes_of(draw: Callable[..., Any], numbers: list[int]) -> tuple[list[int], list[dict[str, Any]]]:
    """CPUs, and NUMA nodes with some of them."""
    cpus = draw(st.permutations(range(draw(st.sampled_from([1, 3, 16, 16, 64])))))
    nodes, used = [], 0
    for position, number in enumerate(numbers):
        left = len(cpus) - used
        count = left if position == len(numbers) - 1 else draw(st.integers(0, left))
        if count:
            gib = draw(st.sampled_from([700, 700, 1400, 1400, 400, 116, 0.001, None]))
            node = numa_node(number, sorted(cpus[used : used + count]), gib or 1)
            node["socket"] = draw(st.sampled_from([None, 0, 1, number, number // 2]))
            node["memory_bytes"] = None if gib is None else node["memory_bytes"]
            nodes.append(node)
        used += count
    return sorted(cpus), sorted(nodes, key=lambda item: int(item["id"]))


@st.composite
def machines(draw: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """A profile, and a machine from one that suits it to one that has nothing, each thing by itself."""
    name, own = draw(st.sampled_from([("8x", 8), ("2x", 2)]))
    node: dict[str, Any] = {"8x": two_sockets, "2x": two_cards}[name]()
    if draw(st.booleans()):
        numbers = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), unique=True, max_size=5))
        node["cpus"], node["numa_nodes"] = draw(nodes_of(numbers))
        sizes = [item["memory_bytes"] for item in node["numa_nodes"]]
        node["memory_bytes"] = draw(st.sampled_from([None, 1, 116 * 2**30, 1400 * 2**30]))
        if sizes:
            node["memory_bytes"] = None if None in sizes else sum(sizes)
        width = draw(st.integers(1, 4))
        cores = [node["cpus"][first : first + width] for first in range(0, len(node["cpus"]), width)]
        node["cores"] = draw(st.sampled_from([[], cores, cores[::2]]))
    if draw(st.booleans()):
        count = draw(st.sampled_from([own] * 30 + [*range(17)]))
        layout = draw(st.sampled_from(["halves", "any", "one"]))
        same = draw(st.booleans())
        node["gpus"] = []
        for number in range(count):
            place = {"halves": 2 * number // max(count, 1), "one": 0, "any": None}[layout]
            card = gpu(number, draw(NUMBERS) if layout == "any" else place)
            if not same:
                card |= {"device_id": draw(DEVICES), "mig": draw(st.sampled_from([None] + [False] * 24 + [True]))}
                card["memory_mib"] = draw(st.sampled_from([97887] * 12 + [97250, None, 15360, 1, 143771]))
            node["gpus"].append(card)
        pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
        kinds = draw(st.lists(LINKS, min_size=len(pairs), max_size=len(pairs))) if draw(st.booleans()) else []
        addresses = [card["pci_address"] for card in node["gpus"]]
        node["links"] = [[addresses[a], addresses[b], kind] for (a, b), kind in zip(pairs, kinds, strict=False) if kind]
    driver = draw(st.sampled_from(["all", "all", "all", "none", "none", "some"]))
    node["driver"] = {"version": "" if driver == "none" else "590.48.01", "open": draw(st.sampled_from([None, True]))}
    unseen = {"all": [], "none": node["gpus"], "some": node["gpus"][draw(st.integers(0, 7)) :][:1]}[driver]
    for card in unseen:
        card |= {"uuid": "", "model": draw(st.sampled_from(["", card["model"]]))}
    node["listeners"] = [listener(port) for port in draw(st.sampled_from([[], [], [], [22], [8000], [8080]]))]
    if draw(st.booleans()):
        node["releases"] = draw(st.sampled_from(RUNNING))
    return name, node


RUNNING: list[dict[str, Any]] = [
    {},
    {"0": release(resolved(name="8x")), "1": release(resolved(name="8x"), 1)},
    {"0": release(resolved(name="2x")), "5": release(resolved(name="cpu"))},
]
VALUES: dict[str, list[Any]] = {
    "replicas": [1, 2, 3, 4, 8],
    "tensor_parallel_size": [1, 2, 4, 8, 3, 16],
    "gpus": [
        [],
        ["0000:00:00.0", "0000:01:00.0"],
        [f"0000:0{number}:00.0" for number in range(4)],
        ["0000:05:00.0", "0000:02:00.0", "06:00.0", "00000000:07:00.0"],
        ["0000:ff:00.0"],
    ],
    "mixed_gpus": [True],
    "span_sockets": [True],
    "cpus_per_replica": [0, 1, 2, 3, 8, 64, 4096],
    "max_model_len": [16, 4096, 262_144, 524_288, 1_048_576, 2**53],
    "max_num_seqs": [1, 64, 128, 145, 65_536],
    "speculative_tokens": [1, 3, 5, 7, 8, 64],
    "drafter": ["none", "released", "code"],
    "kv_cache_memory": ["18G", "18g", "1", "26G", "1.5g", "9999999999T"],
    "gpu_memory_utilization": [0, 0.5, 0.93, 0.99, 1],
    "kv_offload_gb": [0, 1, 150, 16_384],
    "container_memory": ["400g", "100g", "1b", "700g", "99999999999999g"],
    "shm_size": ["auto", "1b", "256m", "160g"],
    "chunked_indexer": [False],
    "expert_parallel": [False],
    "first_port": [1, 8079, 65_535],
    "engine_args": [{"max-cudagraph-capture-size": 16}, {"moe-backend": "flashinfer_trtllm"}, {"max-logprobs": 2}],
}
OVERRIDES = st.lists(
    st.sampled_from(sorted(VALUES)).flatmap(
        lambda name: st.sampled_from(VALUES[name]).map(lambda value: (name, value))
    ),
    max_size=4,
).map(dict)


def sockets_of(node: dict[str, Any], cards: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """The sockets of the cards whose place is told: by number, or by NUMA node where that is all there is."""
    known = {item["id"]: item["socket"] for item in node["numa_nodes"]}
    found = set()
    for card in cards:
        number = card["numa_node"]
        if number is not None and number >= 0:
            socket = known.get(number)
            found.add(("node", number) if socket is None else ("socket", socket))
    return found


def check_plan(plan: Plan, node: dict[str, Any]) -> None:
    settings = plan["settings"]
    size, span = settings["tensor_parallel_size"], settings["span_sockets"]
    by_address = {card["pci_address"]: card for card in node["gpus"]}
    by_number = {item["id"]: item for item in node["numa_nodes"]}
    used = [card["pci_address"] for item in plan["replicas"] for card in item["gpus"]]
    assert len(used) == len(set(used)) == settings["replicas"] * size == len(plan["replicas"]) * size
    taken: list[int] = []
    needs: dict[str, float] = {}
    need = next(item["used"] for item in plan["budgets"] if item["name"] == "host memory, cap")
    for item in plan["replicas"]:
        cards = [by_address[card["pci_address"]] for card in item["gpus"]]
        where = sockets_of(node, cards)
        assert len(where) <= 1 or span
        assert not any(card["mig"] for card in cards)
        assert not node["driver"]["version"] or all(card["uuid"] for card in cards)
        assert len({card["device_id"] or card["model"] for card in cards}) == 1 or settings["mixed_gpus"]
        cpus = parse_cpu_list(item["cpus"])
        assert len(cpus) == item["cpu_count"] and set(cpus) <= set(node["cpus"])
        numbers = [int(number) for number in item["memory_nodes"].split(",") if number]
        assert set(numbers) <= set(by_number)
        if numbers:
            assert cpus and set(cpus) <= {cpu for number in numbers for cpu in by_number[number]["cpus"]}
            # pinned where its cards are
            assert {card["numa_node"] for card in cards} - {None, -1} <= set(numbers)
            # and to all of the socket
            for number in numbers:
                socket = by_number[number]["socket"]
                assert socket is None or {n for n in by_number if by_number[n]["socket"] == socket} <= set(numbers)
        elif settings["cpus_per_replica"] == 0:
            assert not cpus
        if len(where) <= 1:
            taken += cpus
        needs[item["memory_nodes"]] = needs.get(item["memory_nodes"], 0) + need
        if settings["cpus_per_replica"]:
            assert len(cpus) == settings["cpus_per_replica"]
    assert len(taken) == len(set(taken))
    for memory_nodes, sum_of_needs in needs.items():
        sizes = [by_number[int(number)]["memory_bytes"] for number in memory_nodes.split(",") if number]
        if sizes and None not in sizes:
            assert sum_of_needs * 2**30 <= sum(sizes) * (1 + 1e-9)
    assert all(item["used"] <= item["total"] * (1 + 1e-9) for item in plan["budgets"] if "peaks" not in item["detail"])


@given(machines(), st.sampled_from([{}, {"span_sockets": True, "mixed_gpus": True}]) | OVERRIDES)
def test_any_node_has_a_valid_plan_or_sentences(machine: tuple[str, dict[str, Any]], overrides: dict[str, Any]) -> None:
    name, node = machine
    before = copy.deepcopy((node, overrides))
    fitting = {key: value for key, value in overrides.items() if key in profile(name)["settings"]}
    try:
        plan = intent(fitting, node, name=name)
    except PlanError as error:
        assert error.problems and len(set(error.problems)) == len(error.problems)
        # a sentence says what and what to do
        assert all(len(text.split()) >= 5 and text == text.strip() for text in error.problems)
        return
    finally:
        assert (node, overrides) == before
    check_plan(plan, node)
    # the same again, whatever the order in which the links are told
    assert intent(fitting, {**node, "links": node["links"][::-1]}, name=name)["replicas"] == plan["replicas"]
    assert describe_plan(plan, node["releases"])
    if node["driver"]["version"]:
        complete = resolve_plan(plan, DIGESTS, IMAGE, node["gpus"], [record()], {})
        assert describe_plan(complete, node["releases"])
        assert all(len(replica["release"]) == 12 for replica in complete["replicas"])
    else:
        with pytest.raises(ResolveError):
            resolve_plan(plan, DIGESTS, IMAGE, [{**card, "uuid": ""} for card in node["gpus"]], [], {})
