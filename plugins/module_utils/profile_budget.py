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
    # Of one replica; None where nothing but the cap is known.
    need_bytes: int | None = None


def _bar(name: str, used: float, total: float, unit: str, basis: str, detail: str = "") -> dict[str, Any]:
    return {"name": name, "used": used, "total": total, "unit": unit, "basis": basis, "detail": detail}


def _arguments(profile: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that no setting covers: the profile's, with the operator's laid over."""
    return lay_over(profile["engine_args"], settings["engine_args"])


def _parts(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    value = arguments.get(name)
    return value if isinstance(value, dict) else {}


def _window_bar(window: int, tokens: int) -> dict[str, Any]:
    full = budgets.full_length_requests(tokens, window)
    detail = f"{full:.2f} full-length requests in {tokens:,} tokens of KV cache"
    return _bar("context window", window, tokens, "tokens of a replica", "estimated", detail)


def _check_batch(settings: dict[str, Any], arguments: dict[str, Any], rows: int) -> list[str]:
    """Return what vLLM refuses, or does otherwise, only when it starts.

    :param rows: of the largest decode step that has to fit into one batch.
    """
    chunk, sequences, problems = settings["max_num_batched_tokens"], settings["max_num_seqs"], []
    if chunk < sequences:
        problems.append(
            f"max_num_batched_tokens: {chunk} is less than one token for each of {sequences} sequences; "
            f"set it to at least {rows}, or lower max_num_seqs"
        )
    elif chunk < rows:
        problems.append(
            f"max_num_batched_tokens: {chunk} is less than the {rows:,} rows of a full decode step ({sequences} "
            f"sequences x (1 + {rows // sequences - 1})): the engine would have no CUDA graph above it, and decode "
            f"fewer sequences at once; set it to at least {rows}, or lower max_num_seqs or speculative_tokens"
        )
    if arguments.get("enable-chunked-prefill") is False and chunk < settings["max_model_len"]:
        problems.append(
            f"max_num_batched_tokens: {chunk} is less than a prompt of {settings['max_model_len']} tokens, and "
            "enable-chunked-prefill is off; turn it on, or set them equal"
        )
    for name, limit in (("max-num-active-seqs", "max_num_seqs"), ("long-prefill-token-threshold", "max_model_len")):
        value = arguments.get(name)
        if isinstance(value, int) and value > settings[limit]:
            problems.append(
                f"engine_args: {name}: {value} is more than {limit} ({settings[limit]}), which the engine refuses; set "
                f"it to at most {settings[limit]}"
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
                *_check_batch(settings, _arguments(profile, settings), settings["max_num_seqs"]),
            ],
        )
    return _gpu_budget(profile, settings, places, topology)


def _gpu_budget(
    profile: dict[str, Any], settings: dict[str, Any], places: list[Place], topology: dict[str, Any]
) -> Budget:
    measured, size = profile["measured"], settings["tensor_parallel_size"]
    drafts = 0 if settings["drafter"] == "none" else settings["speculative_tokens"]
    rows = budgets.decode_rows(settings["max_num_seqs"], drafts)
    arguments = _arguments(profile, settings)
    derived = profile["graph_sizes"] == "derived"
    sizes = budgets.graph_sizes(rows) if derived and _has_graphs(arguments) else []
    tables = _engram_tables(measured, arguments)
    sizes_known = [gpu["memory_mib"] for place in places for gpu in place.gpus if gpu["memory_mib"]]
    card = min(sizes_known, default=None)
    bars, expected, findings = _gpu_memory(settings, measured, card, tables.card_mib(size))
    findings += [
        _check_model(profile, settings),
        _check_drafter(profile, settings),
        _check_rows(profile, settings, rows, None if derived else arguments.get("max-cudagraph-capture-size")),
        _check_arguments(settings["engine_args"], arguments, tables, derived),
        _check_measured(profile, arguments),
        Findings(tuple(_check_batch(settings, arguments, rows))),
    ]
    gib = budgets.offload_gib(settings.get("kv_offload_gb", 0))
    offload = budgets.offload_bytes(gib)
    shm = budgets.shm_size(offload) if settings["shm_size"] == AUTO else settings["shm_size"]
    findings.append(budgets.check_shm(podman_bytes(shm), offload, size))
    need = _host_need(arguments, tables, offload, size)
    host_bars, host = _host_memory(settings, need, places, topology)
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
        need_bytes=need.total_bytes,
    )


def _has_graphs(arguments: dict[str, Any]) -> bool:
    """Tell whether the engine captures CUDA graphs at all."""
    mode = _parts(arguments, "compilation-config").get("cudagraph_mode")
    return arguments.get("enforce-eager") is not True and str(mode).upper() not in ("NONE", "0")


@dataclass(frozen=True)
class _EngramTables:
    """A model's Engram tables (0 bytes for none): on the cards or in host memory, there packed or block by block."""

    size: int
    layers: int
    on_cards: bool
    packed: bool

    def card_mib(self, gpus: int) -> int:
        return -(-self.size // gpus // MIB) if self.on_cards else 0


def _engram_tables(measured: dict[str, Any], arguments: dict[str, Any]) -> _EngramTables:
    tables, asked = measured.get("engram", {"gib": 0, "layers": 1}), _parts(arguments, "engram-config")
    # The engine takes 0 and 1 as well.
    on_cards, packed = not asked.get("cpu_offload", True), bool(asked.get("use_thp"))
    return _EngramTables(int(tables["gib"] * GIB), tables["layers"], on_cards, packed)


def _check_measured(profile: dict[str, Any], arguments: dict[str, Any]) -> Findings:
    """Say that the KV cache holds another number of tokens than was measured."""
    document = profile["measured"]["document"]
    return Findings(
        warnings=tuple(
            f"engine_args: {name}: the tokens of KV cache that are shown are of {own} (the {document} document); with "
            f"{arguments.get(name)} there are others, which the engine tells when it has started"
            for name, default in (("kv-cache-dtype", "auto"), ("decode-context-parallel-size", 1))
            if arguments.get(name, default) != (own := profile["engine_args"].get(name, default))
        )
    )


def _check_arguments(
    given: dict[str, Any], arguments: dict[str, Any], tables: _EngramTables, derived: bool
) -> Findings:
    """Refuse what the engine refuses only when it starts.

    :param given: the operator's own arguments.
    :param arguments: those with the profile's below them.
    :param derived: whether the plan lists the sizes of CUDA graphs.
    """
    problems = unsupported_arguments(given)
    if derived and "max-cudagraph-capture-size" in arguments:
        problems.append(
            "engine_args: max-cudagraph-capture-size is not for overriding: the plan lists the sizes of CUDA graphs, "
            "and the engine refuses another largest one beside them; they follow from max_num_seqs and "
            "speculative_tokens"
        )
    if "max_cudagraph_capture_size" in _parts(arguments, "compilation-config"):
        problems.append(
            "engine_args: max_cudagraph_capture_size in compilation-config is not for overriding; "
            + ("the sizes follow from max_num_seqs and speculative_tokens" if derived else "give it by its short name")
        )
    engram = _parts(arguments, "engram-config")
    if "engram-config" in arguments and not tables.size:
        problems.append("engine_args: engram-config: this profile's model has no Engram tables; leave it out")
    if tables.on_cards and tables.packed:
        problems.append(
            "engine_args: engram-config: use_thp is for tables in host memory, and cpu_offload is off, which the "
            "engine refuses together; set use_thp to false as well, or leave cpu_offload on"
        )
    if engram.get("dp_shared_memory"):
        problems.append(
            "engine_args: engram-config: dp_shared_memory needs data parallel replicas in one container, and ours are "
            "in one each; leave it out"
        )
    return Findings(tuple(problems))


def _gpu_memory(
    settings: dict[str, Any], measured: dict[str, Any], card: int | None, tables_mib: int
) -> tuple[list[dict[str, Any]], dict[str, Any], list[Findings]]:
    """Return bars, expectations and findings about the GPUs' memory and the KV cache in it.

    :param card: memory of the smallest GPU in MiB, None when no driver has told.
    :param tables_mib: Engram tables on each of them.
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
        vram = budgets.vram_after_boot(kv_bytes, after_boot, total, tables_mib=tables_mib)
        same = kv_bytes == after_boot["kv_bytes"] and total == measured_card and not tables_mib
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
            budgets.check_vram(kv_bytes, after_boot, measured_card, card, source=source, tables_mib=tables_mib),
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


def _check_rows(profile: dict[str, Any], settings: dict[str, Any], rows: int, captured: Any) -> Findings:
    drafts = rows // settings["max_num_seqs"] - 1
    found = []
    if "chunked_indexer" in settings:
        limit = profile["measured"]["indexer_max_rows_x_window"]
        window, chunked = settings["max_model_len"], settings["chunked_indexer"]
        found.append(budgets.check_indexer(settings["max_num_seqs"], drafts, window, chunked, limit))
    if settings.get("moe_kernel"):
        found.append(budgets.check_flat_rows(settings["max_num_seqs"], drafts, settings["moe_flat_max_rows"]))
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


def _host_need(arguments: dict[str, Any], tables: _EngramTables, offload: int, gpus: int) -> budgets.HostMemory:
    """Return what one replica takes of the host's memory."""
    if tables.on_cards:
        return budgets.host_memory(0, 0, offload, gpus, server_bytes=_server_bytes(arguments))
    padding = 0 if tables.packed else budgets.engram_padding(tables.size, tables.layers, gpus)
    return budgets.host_memory(tables.size, padding, offload, gpus, server_bytes=_server_bytes(arguments))


def _server_bytes(arguments: dict[str, Any]) -> int:
    cache, servers = arguments.get("mm-processor-cache-gb"), arguments.get("api-server-count")
    return budgets.server_bytes(
        cache if isinstance(cache, (int, float)) else budgets.IMAGE_CACHE_GIB,
        servers if isinstance(servers, int) else 1,
    )


def _host_memory(
    settings: dict[str, Any], need: budgets.HostMemory, places: list[Place], topology: dict[str, Any]
) -> tuple[list[dict[str, Any]], Findings]:
    """Return the bar of a replica's host memory against its cap, and what the node's RAM has to say."""
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
