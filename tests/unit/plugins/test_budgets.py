"""Budgets: the documents' own figures come out, and what cannot work is refused with numbers and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.budgets import (
    GIB,
    Findings,
    HostMemory,
    ReplicaMemory,
    check_container_memory,
    check_drafter,
    check_flat_rows,
    check_indexer,
    check_node_memory,
    check_parallel,
    check_shm,
    check_utilization,
    check_vram,
    check_window,
    engram_padding,
    full_length_requests,
    gib_text,
    graph_sizes,
    host_memory,
    kv_tokens,
    merge,
    offload_bytes,
    offload_gib,
    shm_size,
    utilization_tokens,
    utilization_vram,
    vram_after_boot,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import podman_bytes
from hypothesis import given
from hypothesis import strategies as st

FINE = Findings()
CARD = 97_887
MILLION = 1_048_576
# the 8x document
KV = {"bytes": 18 * GIB, "tokens": 4_538_321}
AFTER_BOOT = {"kv_bytes": 18 * GIB, "mib": 91_629}
LIMIT = 2**29
# the 2x document
UTILIZATION = {"share": 0.93, "weights_mib": 81 * 1024, "tokens": 262_144}
PEAKS = (96_799, 96_917)
# two sockets, 1.4 TB together
SOCKETS = [{"id": node, "cpus": [node], "memory_bytes": 700 * 10**9, "socket": node} for node in (0, 1)]


def refusal(found: Findings, *parts: str) -> str:
    """Return the one refusal, which has all the parts."""
    assert len(found.refusals) == 1
    assert not found.warnings
    for part in parts:
        assert part in found.refusals[0]
    return found.refusals[0]


def warning(found: Findings, *parts: str) -> str:
    """Return the one warning, which has all the parts."""
    assert len(found.warnings) == 1
    assert not found.refusals
    for part in parts:
        assert part in found.warnings[0]
    return found.warnings[0]


def default_8x(engram: int = 189 * GIB, padding: int = 0, offload_gb: int = 150) -> HostMemory:
    return host_memory(engram, padding, offload_bytes(offload_gib(offload_gb)), 4)


def test_findings_are_laid_together_in_order() -> None:
    assert merge([Findings(("a",), ("b",)), FINE, Findings(("c",), ("d",))]) == Findings(("a", "c"), ("b", "d"))


def test_bytes_for_people() -> None:
    assert gib_text(150 * 10**9) == "139.7 GiB"
    assert gib_text(-GIB // 2) == "-0.5 GiB"
    assert gib_text(1303 * GIB) == "1,303.0 GiB"


# --- KV cache and GPU memory


def test_kv_tokens_of_the_8x_document() -> None:
    assert kv_tokens(18 * GIB, KV) == 4_538_321
    assert full_length_requests(4_538_321, MILLION) == 4.33


def test_half_the_kv_cache_holds_half_the_tokens() -> None:
    assert kv_tokens(9 * GIB, KV) == 2_269_160
    assert kv_tokens(0, KV) == 0


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_more_kv_cache_never_holds_fewer_tokens(one: int, more: int) -> None:
    assert kv_tokens(one, KV) <= kv_tokens(one + more, KV)


def test_a_window_that_fits_once_is_accepted_and_one_token_more_refused() -> None:
    assert check_window(MILLION, 4_538_321) == FINE
    assert check_window(4_538_321, 4_538_321) == FINE
    refusal(check_window(4_538_322, 4_538_321), "max_model_len", "4,538,322", "4,538,321", "kv_cache_memory")


def test_the_source_of_the_figures_is_named() -> None:
    refusal(check_window(2, 1), "the 8x document")
    refusal(check_window(2, 1, source="the 2x document"), "scaled from the 2x document")
    warning(check_vram(20 * GIB, AFTER_BOOT, CARD, None, source="the 2x document"), "6,258 MiB of the 2x document")


def test_vram_after_boot_of_the_8x_document() -> None:
    vram = vram_after_boot(18 * GIB, AFTER_BOOT, CARD)
    assert (vram.other_mib + vram.kv_mib, vram.kv_mib, vram.free_mib) == (91_629, 18_432, 6_258)
    assert check_vram(18 * GIB, AFTER_BOOT, CARD, None) == FINE
    assert check_vram(18 * GIB, AFTER_BOOT, CARD, CARD) == FINE


def test_a_larger_kv_cache_than_the_documents_is_a_warning() -> None:
    # 20 GiB is 2,048 MiB more, of 6,258 that were free
    warning(
        check_vram(20 * GIB, AFTER_BOOT, CARD, None), "kv_cache_memory", "20.0 GiB", "4,210", "6,258", "8x document"
    )


def test_the_least_headroom_known_to_work_is_the_limit() -> None:
    # 97,887 - 970 - 73,197 for all but the KV cache
    largest = 23_720 * 2**20
    assert not check_vram(largest, AFTER_BOOT, CARD, None).refusals
    text = refusal(check_vram(largest + 2**20, AFTER_BOOT, CARD, None), "969", "970 MiB", "2x document")
    assert "at most 23720M" in text


def test_part_of_a_mib_of_kv_cache_is_a_whole_one() -> None:
    assert vram_after_boot(18 * GIB + 1, AFTER_BOOT, CARD).kv_mib == 18_433


def test_a_smaller_card_is_refused() -> None:
    refusal(
        check_vram(18 * GIB, AFTER_BOOT, CARD, 49_140),
        "42,489 MiB more than the card's 49,140 MiB",
        "too small for this profile",
    )
    refusal(check_vram(18 * GIB, AFTER_BOOT, CARD, 81_920), "81,920 MiB", "set it to at most 7753M")
    warning(check_vram(18 * GIB, AFTER_BOOT, CARD, 97_250), "97,250 MiB")


@given(st.integers(0, 2**50), st.integers(0, 2**50), st.integers(1, 10**6) | st.none())
def test_more_kv_cache_never_makes_more_room(one: int, more: int, card: int | None) -> None:
    small, large = (check_vram(size, AFTER_BOOT, CARD, card) for size in (one, one + more))
    assert bool(small.refusals) <= bool(large.refusals)
    assert not (small.refusals and small.warnings)


def test_the_2x_documents_window_fits_and_one_of_a_million_does_not() -> None:
    assert utilization_tokens(0.93, UTILIZATION, CARD, None) == 262_144
    assert check_utilization(0.93, 262_144, UTILIZATION, CARD, CARD, PEAKS) == FINE
    found = check_utilization(0.93, MILLION, UTILIZATION, CARD, CARD, PEAKS)
    refusal(found, "max_model_len", "1,048,576", "81 GiB", "262,144", "0.93", "2x document", "estimated")


def test_the_share_is_no_ceiling() -> None:
    """The measured run held more than 0.93 of its cards, and that is in order."""
    assert min(PEAKS) > 0.93 * CARD
    assert check_utilization(0.93, 262_144, UTILIZATION, CARD, CARD, PEAKS) == FINE
    assert check_utilization(0.90, 1024, UTILIZATION, CARD, CARD, PEAKS) == FINE


def test_a_share_above_the_tried_one_is_a_warning_with_the_peak_to_expect() -> None:
    # 0.95 of the card and the 5,882 MiB by which the peak exceeded 0.93 of it are more than the card has
    found = check_utilization(0.95, 262_144, UTILIZATION, CARD, CARD, PEAKS)
    warning(found, "gpu_memory_utilization", "0.95", "96,917", "98,875", "97,887", "970 MiB", "at most 0.93")


def test_a_slightly_smaller_card_takes_a_slightly_smaller_share() -> None:
    # 0.93 x 97,250 + 5,882 leaves 926
    warning(check_utilization(0.93, 200_000, UTILIZATION, CARD, 97_250, PEAKS), "96,325", "97,250", "at most 0.92")
    assert check_utilization(0.92, 200_000, UTILIZATION, CARD, 97_250, PEAKS) == FINE


def test_room_beside_the_weights() -> None:
    vram = utilization_vram(0.93, UTILIZATION, CARD)
    assert (vram.other_mib, vram.kv_mib) == (82_944, 8_090)
    assert utilization_tokens(0.93, UTILIZATION, CARD, 49_140) == 0
    refusal(check_utilization(0.93, 1024, UTILIZATION, CARD, 49_140, PEAKS), "too small for this profile")


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_what_is_no_share_is_refused(share: float) -> None:
    refusal(check_utilization(share, 1024, UTILIZATION, CARD, None, PEAKS), "gpu_memory_utilization", "0.93")


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.integers(1, 10**6))
def test_a_larger_share_never_holds_fewer_tokens(one: float, other: float, card: int) -> None:
    small, large = (utilization_tokens(share, UTILIZATION, CARD, card) for share in sorted((one, other)))
    assert 0 <= small <= large


# --- rows


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1024, [1, 8, 16, 32, 64, 128, 256, 512, 1024]),
        (512, [1, 8, 16, 32, 64, 128, 256, 512]),
        (768, [1, 8, 16, 32, 64, 128, 256, 512, 768]),
        (1, [1]),
        (2, [1, 2]),
        (8, [1, 8]),
        (9, [1, 8, 9]),
    ],
)
def test_graph_sizes(rows: int, sizes: list[int]) -> None:
    assert graph_sizes(rows) == sizes


def test_a_decode_step_without_rows_has_no_graph() -> None:
    with pytest.raises(ValueError, match="0 rows"):
        graph_sizes(0)


@given(st.integers(1, 2**40))
def test_graph_sizes_rise_from_one_to_the_largest_step(rows: int) -> None:
    sizes = graph_sizes(rows)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, rows)


def test_the_unchunked_indexer_takes_half_a_million_at_1024_rows() -> None:
    assert check_indexer(128, 7, 524_288, False, LIMIT) == FINE
    text = refusal(
        check_indexer(128, 7, MILLION, False, LIMIT),
        "max_model_len",
        "1,024 rows",
        "1,048,576",
        "536,870,912",
        "DS41_IDX_CHUNK=0",
        "MAX_MODEL_LEN=524288",
        "8x document",
    )
    for remedy in ("chunked_indexer to true", "max_model_len to at most 524288", "max_num_seqs to at most 64"):
        assert remedy in text
    assert check_indexer(64, 7, MILLION, False, LIMIT) == FINE
    assert check_indexer(128, 3, MILLION, False, LIMIT) == FINE


def test_the_chunked_indexer_has_no_limit() -> None:
    assert check_indexer(65_536, 64, 2**53, True, LIMIT) == FINE


@given(st.integers(1, 65_536), st.integers(0, 64), st.integers(16, 2**53))
def test_the_remedies_of_the_indexer_work(sequences: int, draft: int, window: int) -> None:
    for text in check_indexer(sequences, draft, window, False, LIMIT).refusals:
        for name, number in _remedies(text):
            fixed = {"max_model_len": (sequences, number), "max_num_seqs": (number, window)}[name]
            assert check_indexer(fixed[0], draft, fixed[1], False, LIMIT) == FINE


def _remedies(text: str) -> list[tuple[str, int]]:
    words = text.replace(",", "").split()
    return [(words[i - 3], int(words[i + 1])) for i, word in enumerate(words) if word == "most"]


def test_leaving_the_flat_path_is_a_warning_with_its_price() -> None:
    assert check_flat_rows(128, 7, 1152) == FINE
    assert check_flat_rows(144, 7, 1152) == FINE
    found = check_flat_rows(145, 7, 1152)
    warning(found, "1,160 rows", "1,152", "1,942", "4,469", "max_num_seqs to at most 144")


# --- host memory


def test_150_gb_are_139_7_gib() -> None:
    assert offload_gib(150) == 139.7
    assert offload_gib(0) == 0
    # 46.57 GiB, and not 46.6
    assert offload_gib(50) == 46.5


@given(st.integers(0, 16_384))
def test_the_offload_is_never_more_than_a_chunk_above_what_was_asked(gb: int) -> None:
    size = offload_bytes(offload_gib(gb))
    assert gb * 10**9 - 0.1 * GIB < size <= gb * 10**9 + 5 * 2**20


def test_pinned_blocks_are_rounded_to_powers_of_two() -> None:
    # of 188.8 GiB each of four GPUs holds 22.9 GiB of values and 0.7 of scales a layer, which become 32 and 1
    table = 188_800 * GIB // 1000
    assert table + engram_padding(table, 2, 4) == 264 * GIB
    assert engram_padding(0, 2, 4) == 0


@given(st.integers(1, 2**50), st.integers(1, 8), st.integers(1, 16))
def test_rounding_never_gives_and_at_most_doubles(table: int, layers: int, gpus: int) -> None:
    assert 0 <= engram_padding(table, layers, gpus) <= table + 4 * layers * gpus


def test_the_default_replica_fits_its_400_gib() -> None:
    need = default_8x()
    # 189 + 139.7 + 4 x 9 + 8 + 16
    assert gib_text(need.total_bytes) == "388.7 GiB"
    assert check_container_memory(need, podman_bytes("400g")) == FINE


def test_a_cap_of_300_gib_is_refused_with_its_parts() -> None:
    text = refusal(
        check_container_memory(default_8x(), podman_bytes("300g")),
        "container_memory",
        "388.7 GiB",
        "300.0 GiB",
        "Engram tables 189.0 GiB",
        "KV offload 139.7 GiB",
        "workers 36.0 GiB",
        "at least 389g",
    )
    # 300 - 249 GiB are left for it
    assert "kv_offload_gb to at most 54" in text
    assert check_container_memory(default_8x(offload_gb=54), podman_bytes("300g")) == FINE


def test_rounded_tables_do_not_fit_400_gib_and_the_remedy_is_named_first() -> None:
    """Workers were killed by the memory cgroup while the model loaded, in public reports."""
    padding = engram_padding(189 * GIB, 2, 4)
    text = refusal(check_container_memory(default_8x(padding=padding), podman_bytes("400g")), "463.7 GiB")
    assert text.index("engram-config.use_thp") < text.index("container_memory to at least 464g")
    assert check_container_memory(default_8x(padding=padding), podman_bytes("464g")) == FINE


def replica(name: str, *nodes: int, need: int = 389, cap: int = 400) -> ReplicaMemory:
    return ReplicaMemory(name, nodes, need * GIB, cap * GIB)


def test_two_replicas_fit_a_node_of_two_sockets_and_1_4_tb() -> None:
    assert check_node_memory([replica("replica 0", 0), replica("replica 1", 1)], SOCKETS, 1400 * 10**9) == FINE


def test_two_replicas_on_the_memory_of_one_are_refused() -> None:
    # 700 GB are 651.9 GiB, twice 389 are 778
    found = check_node_memory([replica("replica 0", 0), replica("replica 1", 0)], SOCKETS, 1400 * 10**9)
    refusal(found, "replica 0 and replica 1", "NUMA node 0", "778.0 GiB", "651.9 GiB", "kv_offload_gb")


def test_a_node_with_too_little_memory_is_refused() -> None:
    nodes = [{"id": 1, "memory_bytes": 256 * GIB}]
    refusal(check_node_memory([replica("replica 1", 1)], nodes, 256 * GIB), "NUMA node 1", "389.0 GiB", "256.0 GiB")


def test_nodes_that_replicas_share_in_part_are_checked_together() -> None:
    nodes = [{"id": node, "memory_bytes": 400 * GIB} for node in range(3)]
    # each has 800 GiB to itself, but the 1,200 GiB of all three hold no two of 700
    found = check_node_memory([replica("a", 0, 1, need=700), replica("b", 1, 2, need=700)], nodes, None)
    refusal(found, "a and b", "NUMA node 0, 1, 2", "1,400.0 GiB", "1,200.0 GiB")


def test_replicas_without_a_pin_share_the_whole_node() -> None:
    pair = [replica("replica 0"), replica("replica 1")]
    assert check_node_memory(pair, SOCKETS, 1400 * 10**9) == FINE
    refusal(check_node_memory(pair, SOCKETS[:1], 700 * 10**9), "778.0 GiB", "651.9 GiB")
    refusal(check_node_memory(pair, [], 700 * 10**9), "this node", "778.0 GiB", "651.9 GiB")


def test_a_pinned_replica_has_only_the_memory_of_its_nodes() -> None:
    """The topology leaves out nodes that nothing can be pinned to, so its nodes can be fewer than the machine's."""
    small = [{"id": 0, "memory_bytes": GIB}]
    refusal(check_node_memory([replica("replica 0", 0)], small, 1400 * 10**9), "replica 0 on NUMA node 0", "1.0 GiB")
    assert check_node_memory([replica("replica 0")], small, 1400 * 10**9) == FINE


def test_a_replica_without_a_pin_takes_from_the_pinned_ones_memory_too() -> None:
    pair = [replica("replica 0", 0), replica("replica 1")]
    refusal(check_node_memory(pair, SOCKETS, 700 * 10**9), "replica 0 and replica 1 on this node")


def test_unknown_memory_is_a_warning() -> None:
    nodes = [{"id": 0, "memory_bytes": None}]
    warning(check_node_memory([replica("replica 0", 0)], nodes, None), "NUMA node 0", "not checked")
    warning(check_node_memory([replica("replica 0")], [], None), "this node", "not checked")
    # a node that the topology does not have
    warning(check_node_memory([replica("replica 0", 7)], nodes, 1400 * 10**9), "NUMA node 7", "not checked")


def test_caps_that_exceed_the_memory_are_a_warning() -> None:
    nodes = [{"id": 0, "memory_bytes": 790 * GIB}]
    found = check_node_memory([replica("a", 0), replica("b", 0)], nodes, None)
    warning(found, "container_memory", "800.0 GiB", "790.0 GiB", "778.0 GiB")


@given(
    st.lists(st.tuples(st.frozensets(st.integers(0, 5)), st.integers(0, 2**45), st.integers(0, 2**45)), max_size=5),
    st.dictionaries(st.integers(0, 5), st.integers(0, 2**45) | st.none(), max_size=6),
    st.integers(0, 2**45) | st.none(),
)
def test_any_replicas_on_any_nodes_are_found_fine_or_not(
    replicas: list[tuple[frozenset[int], int, int]], memory: dict[int, int | None], total: int | None
) -> None:
    placed = [ReplicaMemory(f"r{i}", tuple(nodes), need, cap) for i, (nodes, need, cap) in enumerate(replicas)]
    found = check_node_memory(placed, [{"id": node, "memory_bytes": size} for node, size in memory.items()], total)
    for one in placed:
        sizes = [memory.get(node) for node in one.nodes]
        if one.nodes and None not in sizes and one.need_bytes > sum(size for size in sizes if size is not None):
            assert any(one.name in text for text in found.refusals)


def test_dev_shm_for_150_gb_of_offload() -> None:
    offload = offload_bytes(139.7)
    assert shm_size(offload) == "160g"
    assert check_shm(podman_bytes("160g"), offload, 4) == FINE
    refusal(check_shm(podman_bytes("32g"), offload, 4), "shm_size", "32.0 GiB", "139.7 GiB", "set shm_size to 160g")


def test_dev_shm_without_offload_may_be_small() -> None:
    assert check_shm(podman_bytes("256m"), 0, 1) == FINE
    refusal(check_shm(podman_bytes("64m"), 0, 2), "0.1 GiB", "1.0 GiB")


@given(st.integers(0, 2**45), st.integers(1, 16))
def test_the_derived_dev_shm_is_enough(offload: int, gpus: int) -> None:
    assert check_shm(podman_bytes(shm_size(offload)), offload, gpus) == FINE


# --- the model's own limits


@pytest.mark.parametrize(
    ("drafter", "tokens"),
    [
        ({"name": "released", "block_size": 5, "max_tokens": None}, 3),
        ({"name": "released", "block_size": 5, "max_tokens": None}, 5),
        ({"name": "code", "block_size": None, "max_tokens": 7}, 7),
        ({"name": "code", "block_size": None, "max_tokens": 7}, 3),
        ({"name": "code", "max_tokens": 7}, 1),
    ],
)
def test_draft_tokens_within_the_head(drafter: dict[str, Any], tokens: int) -> None:
    assert check_drafter("dspark", tokens, drafter) == FINE


def test_more_draft_tokens_than_the_head_has() -> None:
    released = {"name": "released", "block_size": 5, "max_tokens": None}
    refusal(check_drafter("dspark", 6, released), "speculative_tokens", "6", "'released'", "at most 5", "4.4%")
    refusal(check_drafter("dspark", 6, {"name": "both", "block_size": 5, "max_tokens": 7}), "at most 5")
    refusal(check_drafter("dspark", 8, {"name": "code", "block_size": None, "max_tokens": 7}), "'code'", "at most 7")


def test_a_head_of_unknown_size_is_a_warning() -> None:
    unknown = {"name": "released", "block_size": None, "max_tokens": None}
    warning(check_drafter("dspark", 7, unknown), "released", "estimated", "dspark_block_size")


def test_other_methods_have_no_head() -> None:
    for method in ("none", "ngram", "mtp"):
        assert check_drafter(method, 64, {"name": "x", "block_size": 5}) == FINE
    assert check_drafter("dspark", 7, None) == FINE


def test_heads_and_experts_divide() -> None:
    assert check_parallel(64, 4, 384, 4) == FINE
    assert check_parallel(64, 2, 256, 1) == FINE
    refusal(check_parallel(64, 4, 384, 5), "384 routed experts", "by 5", "4, 6, 8")
    refusal(check_parallel(64, 3, 384, 3), "tensor_parallel_size", "64 attention heads", "by 3", "1, 2, 4, 8, 16")
    assert len(check_parallel(64, 5, 384, 5).refusals) == 2
    assert len(check_parallel(64, 0, 384, 0).refusals) == 2


@given(
    st.integers(1, 65_536),
    st.integers(0, 64),
    st.integers(16, 2**53),
    st.integers(0, 16_384),
    st.integers(1, 16),
    st.integers(1, 2**60),
)
def test_any_settings_in_range_give_findings(
    sequences: int, draft: int, window: int, offload_gb: int, gpus: int, size: int
) -> None:
    need = host_memory(size, engram_padding(size, 2, gpus), offload_bytes(offload_gib(offload_gb)), gpus)
    found = [
        check_window(window, kv_tokens(size, KV)),
        check_vram(size, AFTER_BOOT, CARD, None),
        check_indexer(sequences, draft, window, False, LIMIT),
        check_flat_rows(sequences, draft, 1152),
        check_container_memory(need, size),
        check_shm(size, need.kv_offload_bytes, gpus),
        check_parallel(64, gpus, 384, gpus),
        check_drafter("dspark", draft, {"name": "code", "max_tokens": 7}),
    ]
    for text in (*merge(found).refusals, *merge(found).warnings):
        setting, _, rest = text.partition(": ")
        assert setting.replace("_", "").isalpha()
        assert rest
