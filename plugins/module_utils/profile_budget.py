# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a profile's settings come to on a node: the figures of ``budgets`` put together, as bars and as sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils import budgets
from ansible_collections.serving.gpu_node.plugins.module_utils.budgets import Findings
from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import lay_over
from ansible_collections.serving.gpu_node.plugins.module_utils.placement import Domain, Place
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import AUTO, podman_bytes, vllm_bytes
from ansible_collections.serving.gpu_node.plugins.module_utils.unsupported_args import unsupported_arguments

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Budget:
    """What the plan takes over: values for the engine and the container, bars to show, figures to prove later.

    ``bars`` hold ``name``, ``used``, ``total``, ``unit``, ``basis`` (measured, estimated or derived) and ``detail``;
    ``expected`` is what ``acceptance`` compares with what the engine reports.
    """

    shm_size: str
    kv_offload_gib: float = 0.0
    graph_sizes: list[int] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _bar(name: str, used: float, total: float, unit: str, basis: str, detail: str = "") -> dict[str, Any]:
    return {"name": name, "used": used, "total": total, "unit": unit, "basis": basis, "detail": detail}


def _window_bar(window: int, tokens: int) -> dict[str, Any]:
    full = budgets.full_length_requests(tokens, window)
    detail = f"{full:.2f} full-length requests in {tokens:,} tokens of KV cache"
    return _bar("context window", window, tokens, "tokens of a replica", "estimated", detail)


def _check_batch(profile: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return what vLLM refuses only when it starts: a prefill chunk that is too small."""
    chunk, problems = settings["max_num_batched_tokens"], []
    if chunk < settings["max_num_seqs"]:
        problems.append(
            f"max_num_batched_tokens: {chunk} is less than one token for each of {settings['max_num_seqs']} sequences; "
            f"set it to at least {settings['max_num_seqs']}, or lower max_num_seqs"
        )
    whole_prompts = lay_over(profile["engine_args"], settings["engine_args"]).get("enable-chunked-prefill") is False
    if whole_prompts and chunk < settings["max_model_len"]:
        problems.append(
            f"max_num_batched_tokens: {chunk} is less than a prompt of {settings['max_model_len']} tokens, and "
            "enable-chunked-prefill is off; turn it on, or set them equal"
        )
    return problems


def check_caps(places: Iterable[Place], cap: str) -> list[str]:
    """Return a sentence for every NUMA node whose memory is smaller than the caps of its replicas together."""
    counts: dict[Domain, int] = {}
    for place in places:
        counts[place.domain] = counts.get(place.domain, 0) + 1
    problems = []
    for domain, count in counts.items():
        need, have = count * podman_bytes(cap), domain.memory_bytes
        if have is not None and need > have:
            problems.append(
                f"container_memory: {cap} for {count} replicas is {need / GIB:.1f} GiB, and {domain.name} "
                f"has {have / GIB:.1f} GiB; lower container_memory or replicas"
            )
    return problems


def budget(profile: dict[str, Any], settings: dict[str, Any], places: list[Place], topology: dict[str, Any]) -> Budget:
    """Return what the settings come to.

    :param settings: resolved settings.
    :param places: where the replicas go; empty when they cannot be placed, and what depends on it is then left out.
    """
    if profile["device"] == "cpu":
        tokens = budgets.kv_tokens(vllm_bytes(settings["kv_cache_memory"]), profile["measured"]["kv_cache"])
        window = budgets.check_window(settings["max_model_len"], tokens, source="what this profile's engine reports")
        return Budget(
            settings["shm_size"],
            bars=[_window_bar(settings["max_model_len"], tokens)],
            expected={"kv_tokens": tokens},
            problems=[
                *check_caps(places, settings["container_memory"]),
                *window.refusals,
                *_check_batch(profile, settings),
            ],
        )
    return _gpu_budget(profile, settings, places, topology)


def _gpu_budget(
    profile: dict[str, Any], settings: dict[str, Any], places: list[Place], topology: dict[str, Any]
) -> Budget:
    measured, size = profile["measured"], settings["tensor_parallel_size"]
    drafts = 0 if settings["drafter"] == "none" else settings["speculative_tokens"]
    rows = budgets.decode_rows(settings["max_num_seqs"], drafts)
    sizes = budgets.graph_sizes(rows) if profile["graph_sizes"] == "derived" else []
    sizes_known = [gpu["memory_mib"] for place in places for gpu in place.gpus if gpu["memory_mib"]]
    card = min(sizes_known, default=None)
    bars, expected, findings = _gpu_memory(settings, measured, card)
    findings += [
        _check_model(profile, settings),
        _check_drafter(profile, settings),
        _check_rows(profile, settings, rows),
    ]
    findings.append(Findings((*unsupported_arguments(settings["engine_args"]), *_check_batch(profile, settings))))
    gib = budgets.offload_gib(settings.get("kv_offload_gb", 0))
    offload = budgets.offload_bytes(gib)
    shm = budgets.shm_size(offload) if settings["shm_size"] == AUTO else settings["shm_size"]
    findings.append(budgets.check_shm(podman_bytes(shm), offload, size))
    host_bars, host = _host_memory(profile, settings, offload, places, topology)
    found = budgets.merge([*findings, host])
    shm_text = (
        f"{budgets.gib_text(offload)} of KV offload, the rest for queues and NCCL" if offload else "queues and NCCL"
    )
    shm_bar = _bar("/dev/shm", offload / GIB, podman_bytes(shm) / GIB, "GiB", "derived", shm_text)
    if sizes:
        expected["graph_sizes"] = sizes
    return Budget(
        shm_size=shm,
        kv_offload_gib=gib,
        graph_sizes=sizes,
        bars=[*bars, *host_bars, shm_bar],
        expected={**expected, "kv_offload_bytes": offload},
        warnings=list(found.warnings),
        problems=list(found.refusals),
    )


def _gpu_memory(
    settings: dict[str, Any], measured: dict[str, Any], card: int | None
) -> tuple[list[dict[str, Any]], dict[str, Any], list[Findings]]:
    """Return bars, expectations and findings about the GPUs' memory and the KV cache in it.

    :param card: memory of the smallest GPU in MiB, None when no driver has told.
    """
    window, measured_card = settings["max_model_len"], measured["card_mib"]
    total = card or measured_card
    if settings["kv_cache_memory"] == AUTO:
        reference, share = measured["utilization"], settings["gpu_memory_utilization"]
        tokens = budgets.utilization_tokens(share, reference, measured_card, card)
        vram = budgets.utilization_vram(share, reference, total)
        detail = (
            f"weights {vram.other_mib:,}, KV cache about {vram.kv_mib:,} at gpu_memory_utilization {share}; "
            f"measured peaks {', '.join(f'{peak:,}' for peak in measured['peak_mib'])} MiB, so the share is no ceiling"
        )
        bars = [_bar("GPU memory, each card", vram.other_mib + vram.kv_mib, total, "MiB", "estimated", detail)]
        found = budgets.check_utilization(share, window, reference, measured_card, card, measured["peak_mib"])
        expected: dict[str, Any] = {"vram_peak_mib": measured["peak_mib"]}
        findings = [found]
    else:
        kv_bytes = vllm_bytes(settings["kv_cache_memory"])
        kv_cache, after_boot = _kv_reference(measured)
        source = f"the {measured['document']} document"
        tokens = budgets.kv_tokens(kv_bytes, kv_cache)
        vram = budgets.vram_after_boot(kv_bytes, after_boot, total)
        same = kv_bytes == after_boot["kv_bytes"] and total == measured_card
        bars = [
            _bar(
                "GPU memory after boot, each card",
                vram.other_mib + vram.kv_mib,
                total,
                "MiB",
                "measured" if same else "estimated",
                f"KV cache {vram.kv_mib:,}, weights and all else {vram.other_mib:,}",
            )
        ]
        findings = [
            budgets.check_window(window, tokens, source=source),
            budgets.check_vram(kv_bytes, after_boot, measured_card, card, source=source),
        ]
        expected = {"vram_after_boot_mib": vram.other_mib + vram.kv_mib}
    bars.append(_window_bar(window, tokens))
    return bars, {**expected, "kv_tokens": tokens}, findings


def _kv_reference(measured: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the measured pairs of KV cache and tokens, and of KV cache and GPU memory in use.

    Where only a share of the memory was measured, what it left beside the weights is the KV cache.
    """
    if "kv_cache" in measured:
        return measured["kv_cache"], measured["after_boot"]
    share = measured["utilization"]
    room = budgets.utilization_vram(share["share"], share, measured["card_mib"]).kv_mib * MIB
    return {"bytes": room, "tokens": share["tokens"]}, {"kv_bytes": room, "mib": max(measured["peak_mib"])}


def _check_model(profile: dict[str, Any], settings: dict[str, Any]) -> Findings:
    model, size = profile["model"], settings["tensor_parallel_size"]
    experts = size if settings.get("expert_parallel") else 1
    # What is not known of a model is 0, which every size divides.
    found = budgets.check_parallel(model.get("attention_heads", 0), size, model.get("routed_experts", 0), experts)
    return budgets.merge([found, _check_size(profile["measured"], size)])


def _check_size(measured: dict[str, Any], size: int) -> Findings:
    """Say that figures were measured with another number of GPUs; fewer do not hold the weights."""
    reference, card = measured["tensor_parallel_size"], measured["card_mib"]
    _, after_boot = _kv_reference(measured)
    each = after_boot["mib"] - after_boot["kv_bytes"] // MIB
    said = f"tensor_parallel_size: all figures are of {reference} GPUs (the {measured['document']} document)"
    if size < reference:
        return Findings(
            (
                f"{said}; on {size} the {each:,} MiB that each holds beside the KV cache are about "
                f"{each * reference // size:,} of the card's {card:,}; set it to {reference}",
            )
        )
    return Findings(warnings=(f"{said}; {size} leave more room than is shown",)) if size > reference else Findings()


def _check_drafter(profile: dict[str, Any], settings: dict[str, Any]) -> Findings:
    wanted = settings["drafter"]
    if wanted == "none":
        return Findings()
    if wanted not in profile["drafters"]:
        return Findings((f"drafter: '{wanted}' is not one of {', '.join(profile['drafters'])}, none",))
    head = {"name": wanted, **profile["drafters"][wanted]}
    return budgets.check_drafter("dspark", settings["speculative_tokens"], head)


def _check_rows(profile: dict[str, Any], settings: dict[str, Any], rows: int) -> Findings:
    drafts = rows // settings["max_num_seqs"] - 1
    found = []
    if "chunked_indexer" in settings:
        limit = profile["measured"]["indexer_max_rows_x_window"]
        window, chunked = settings["max_model_len"], settings["chunked_indexer"]
        found.append(budgets.check_indexer(settings["max_num_seqs"], drafts, window, chunked, limit))
    if settings.get("moe_kernel"):
        found.append(budgets.check_flat_rows(settings["max_num_seqs"], drafts, settings["moe_flat_max_rows"]))
    captured = lay_over(profile["engine_args"], settings["engine_args"]).get("max-cudagraph-capture-size")
    if isinstance(captured, int) and rows > captured:
        found.append(
            Findings(
                warnings=(
                    f"max_num_seqs: {rows:,} rows ({settings['max_num_seqs']} sequences x (1 + {drafts})) are more "
                    f"than the largest CUDA graph of {captured}, and such batches decode without one; set "
                    f"engine_args: {{max-cudagraph-capture-size: {rows}}}",
                )
            )
        )
    return budgets.merge(found)


def _host_memory(
    profile: dict[str, Any], settings: dict[str, Any], offload: int, places: list[Place], topology: dict[str, Any]
) -> tuple[list[dict[str, Any]], Findings]:
    """Return the bar of a replica's host memory against its cap, and what the node's RAM has to say."""
    size, tables = settings["tensor_parallel_size"], profile["measured"].get("engram", {"gib": 0, "layers": 1})
    arguments = lay_over(profile["engine_args"], settings["engine_args"])
    engram = int(tables["gib"] * GIB)
    tables_config = arguments.get("engram-config")
    packed = isinstance(tables_config, dict) and tables_config.get("use_thp") is True
    padding = 0 if packed else budgets.engram_padding(engram, tables["layers"], size)
    need = budgets.host_memory(engram, padding, offload, size)
    cap = podman_bytes(settings["container_memory"])
    bars = [_bar("host memory, cap", need.total_bytes / GIB, cap / GIB, "GiB", "estimated", budgets.memory_text(need))]
    replicas = [
        budgets.ReplicaMemory(f"replica {index}", place.domain.nodes, need.total_bytes, cap)
        for index, place in enumerate(places)
    ]
    for domain in dict.fromkeys(place.domain for place in places):
        here = sum(place.domain == domain for place in places)
        if domain.memory_bytes is not None:
            used, ram = here * need.total_bytes / GIB, domain.memory_bytes / GIB
            detail = f"{here} replica{'s' if here > 1 else ''}"
            bars.append(_bar(f"host memory, {domain.name}", used, ram, "GiB", "estimated", detail))
    node = budgets.check_node_memory(replicas, topology["numa_nodes"], topology["memory_bytes"])
    return bars, budgets.merge([budgets.check_container_memory(need, cap), node])
