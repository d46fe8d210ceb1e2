# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a replica needs and what there is: GPU memory, host memory, KV tokens, rows of a decode step.

Pure functions. Figures that no formula gives are handed in as the profile's measured data; what the engine does with a
setting is read from vLLM 0.33.0's sources. A sentence names setting, value, limit, remedy and where the limit is from:
"the 8x document" and "the 2x document" (measured there), "public reports", "vLLM's sources", or "estimated".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MIB, GIB = 1024**2, 1024**3

# The least memory (MiB) that was left on a card of a server that worked: 97,887 - 96,917, the 2x document.
SMALLEST_FREE_MIB = 970
# Anonymous memory of one worker process: below 9 GiB in public reports of DeepSeek-V4.1 at tensor parallel 4.
WORKER_BYTES = 9 * GIB
# API server and engine core together, and what allocators, page tables and page cache want besides: estimated.
SERVER_BYTES = 8 * GIB
MARGIN_BYTES = 16 * GIB
# Besides, what another API server takes at least (0.6 GiB of a CPU build's was seen).
_API_SERVER_BYTES = GIB
# The engine's default for processed images, which each API server and the engine core keep; in SERVER_BYTES already.
IMAGE_CACHE_GIB = 4
# /dev/shm besides the KV offload. A tmpfs size is a limit and takes nothing until it is used: estimated, generous.
SHM_HEADROOM_BYTES = 20 * GIB
# What it is filled with for each GPU at least: the engine's message queues (10 chunks of 24 MiB each, vLLM's sources)
# and NCCL's buffers (estimated).
SHM_LEAST_PER_GPU_BYTES = 512 * MIB
# The Engram rows: 256 values of one byte and 8 scales (one for 32 values).
_ENGRAM_ROW, _ENGRAM_VALUES = 264, 256
# The engine rounds the offload down to whole chunks of a few MiB, so this much less than asked for is no loss.
_OFFLOAD_CHUNK_BYTES = 5 * MIB


@dataclass(frozen=True)
class Findings:
    """What checks found: refusals say why a plan cannot work, warnings what to know about one that can."""

    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vram:
    """One card's memory, in MiB: ``other_mib`` is weights and all else that is not KV cache."""

    total_mib: int
    other_mib: int
    kv_mib: int

    @property
    def free_mib(self) -> int:
        """What is left; negative when it does not fit."""
        return self.total_mib - self.other_mib - self.kv_mib


@dataclass(frozen=True)
class HostMemory:
    """One replica's host memory, in bytes, by what takes it. All of it counts against its container's cap."""

    engram_bytes: int
    engram_padding_bytes: int
    kv_offload_bytes: int
    workers_bytes: int
    server_bytes: int
    margin_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return (
            self.engram_bytes
            + self.engram_padding_bytes
            + self.kv_offload_bytes
            + self.workers_bytes
            + self.server_bytes
            + self.margin_bytes
        )


@dataclass(frozen=True)
class ReplicaMemory:
    """A replica's need and cap (bytes) and the NUMA nodes it is pinned to; no nodes: it is not pinned."""

    name: str
    nodes: tuple[int, ...]
    need_bytes: int
    cap_bytes: int


def merge(findings: Iterable[Findings]) -> Findings:
    """Lay the results of several checks together."""
    every = list(findings)
    return Findings(
        tuple(text for one in every for text in one.refusals),
        tuple(text for one in every for text in one.warnings),
    )


def _refuse(text: str) -> Findings:
    return Findings(refusals=(text,))


def _warn(text: str) -> Findings:
    return Findings(warnings=(text,))


def gib_text(size: int) -> str:
    """Return bytes for people: ``139.7 GiB``."""
    # In whole numbers: a float has no room for every size that an operator can write.
    tenths = (abs(size) * 10 + GIB // 2) // GIB
    return f"{'-' if size < 0 else ''}{tenths // 10:,}.{tenths % 10} GiB"


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


# --- GPU memory and KV cache ---------------------------------------------------------------------------------------


def kv_tokens(kv_bytes: int, measured: Mapping[str, int]) -> int:
    """Return how many tokens the KV cache of a replica holds.

    :param kv_bytes: KV cache on each GPU.
    :param measured: the profile's ``{"bytes": on each GPU, "tokens": those that it held}``; it grows linearly.
    """
    return max(0, kv_bytes) * int(measured["tokens"]) // int(measured["bytes"])


def full_length_requests(tokens: int, window: int) -> float:
    """Return how many requests of a whole context window fit at once, to two digits."""
    return round(tokens / window, 2)


def check_window(window: int, tokens: int, *, source: str = "the 8x document") -> Findings:
    """Refuse a context window that the KV cache cannot hold even once.

    :param window: tokens (``max_model_len``).
    :param tokens: what the KV cache holds, see :func:`kv_tokens`.
    :param source: where the figure of :func:`kv_tokens` was measured.
    """
    if window <= tokens:
        return Findings()
    return _refuse(
        f"max_model_len: a request of {window:,} tokens does not fit the KV cache, which holds {tokens:,} (scaled from "
        f"{source}); set max_model_len to at most {tokens}, or raise kv_cache_memory"
    )


def vram_after_boot(kv_bytes: int, after_boot: Mapping[str, int], card_mib: int, *, tables_mib: int = 0) -> Vram:
    """Estimate a card's memory after boot: what was measured, with another KV cache.

    :param kv_bytes: KV cache on each GPU.
    :param after_boot: the profile's ``{"kv_bytes": bytes, "mib": in use with them}``.
    :param card_mib: the card's memory.
    :param tables_mib: Engram tables on each card, which lay in host memory when it was measured.
    """
    return Vram(
        total_mib=card_mib,
        other_mib=int(after_boot["mib"]) - int(after_boot["kv_bytes"]) // MIB + tables_mib,
        kv_mib=_ceil_div(max(0, kv_bytes), MIB),
    )


def check_vram(
    kv_bytes: int,
    after_boot: Mapping[str, int],
    measured_card_mib: int,
    card_mib: int | None,
    *,
    source: str = "the 8x document",
    tables_mib: int = 0,
) -> Findings:
    """Refuse a KV cache that leaves too little of the card, and warn of one that leaves less than was tried.

    :param kv_bytes: KV cache on each GPU.
    :param after_boot: see :func:`vram_after_boot`.
    :param measured_card_mib: memory of the card that was measured on.
    :param card_mib: memory of this card; None when the driver has not told yet.
    :param source: where ``after_boot`` was measured.
    :param tables_mib: see :func:`vram_after_boot`.
    """
    total = measured_card_mib if card_mib is None else card_mib
    vram = vram_after_boot(kv_bytes, after_boot, total, tables_mib=tables_mib)
    tried = measured_card_mib - int(after_boot["mib"])
    left = f"leave {vram.free_mib:,}" if vram.free_mib >= 0 else f"are {-vram.free_mib:,} MiB more than"
    tables = f", with {tables_mib:,} MiB of Engram tables (engram-config.cpu_offload is off)" if tables_mib else ""
    said = (
        f"kv_cache_memory: {gib_text(kv_bytes)} of KV cache and {vram.other_mib:,} MiB for all else ({source}{tables}) "
        f"{left}{' of' if vram.free_mib >= 0 else ''} the card's {total:,} MiB"
    )
    if vram.free_mib < SMALLEST_FREE_MIB:
        largest = total - vram.other_mib - SMALLEST_FREE_MIB
        remedy = f"set it to at most {largest}M" if largest > 0 else "these cards are too small for this profile"
        if tables_mib:
            remedy = "leave engram-config.cpu_offload on"
        return _refuse(
            f"{said} (estimated), and {SMALLEST_FREE_MIB} MiB is the least that is known to work (the 2x document); "
            f"{remedy}"
        )
    if vram.free_mib < tried:
        return _warn(
            f"{said} (estimated), less than the {tried:,} MiB of {source}; long prefills may run out of memory: "
            f"{gib_text(int(after_boot['kv_bytes']))} on a card of {measured_card_mib:,} MiB is what was tried"
        )
    return Findings()


def utilization_vram(utilization: float, measured: Mapping[str, float], card_mib: int) -> Vram:
    """Estimate the KV cache that ``gpu_memory_utilization`` leaves beside the weights.

    :param utilization: share of the card, 0 to 1. It bounds what the engine plans for, not what the card ever holds.
    :param measured: the profile's ``weights_mib``, see :func:`utilization_tokens`.
    :param card_mib: the card's memory.
    """
    weights = int(measured["weights_mib"])
    return Vram(total_mib=card_mib, other_mib=weights, kv_mib=max(0, math.floor(utilization * card_mib - weights)))


def utilization_tokens(
    utilization: float, measured: Mapping[str, float], measured_card_mib: int, card_mib: int | None
) -> int:
    """Estimate the tokens that the KV cache holds when ``gpu_memory_utilization`` sizes it, linear to the measured run.

    :param utilization: share of the card, 0 to 1.
    :param measured: the profile's ``{"share": 0 to 1, "weights_mib": on each card, "tokens": that fitted}``.
    :param measured_card_mib: memory of the card that was measured on.
    :param card_mib: memory of this card; None when the driver has not told yet.
    """
    total = measured_card_mib if card_mib is None else card_mib
    room = utilization * total - measured["weights_mib"]
    measured_room = measured["share"] * measured_card_mib - measured["weights_mib"]
    return max(0, int(measured["tokens"] * (room / measured_room)))


def check_utilization(
    utilization: float,
    window: int,
    measured: Mapping[str, float],
    measured_card_mib: int,
    card_mib: int | None,
    peaks_mib: Sequence[int],
) -> Findings:
    """Refuse a window that ``gpu_memory_utilization`` leaves no KV cache for, and warn of a share that is too large.

    The measured peaks lie above share x card: CUDA graphs and communication come on top. So the share is no ceiling,
    and a card that is as full as those were is in order.

    :param window: tokens (``max_model_len``).
    :param measured: see :func:`utilization_tokens`.
    :param peaks_mib: the most that each card held in the measured run.
    """
    if not 0 < utilization <= 1:
        return _refuse(f"gpu_memory_utilization: {utilization} is no share of a card; write a number like 0.93")
    tokens = utilization_tokens(utilization, measured, measured_card_mib, card_mib)
    total = measured_card_mib if card_mib is None else card_mib
    if window > tokens:
        return _refuse(
            f"max_model_len: a request of {window:,} tokens does not fit; weights of about "
            f"{measured['weights_mib'] / 1024:.0f} GiB on each card of {total:,} MiB leave KV cache for about "
            f"{tokens:,} tokens at gpu_memory_utilization {utilization} (estimated from the 2x document); "
            + (f"set max_model_len to at most {tokens}" if tokens else "these cards are too small for this profile")
            + ", or serve with more cards"
        )
    # CUDA graphs and communication take the same whatever the share is.
    beyond = max(peaks_mib, default=0) - measured["share"] * measured_card_mib
    peak = round(utilization * total + beyond)
    if peak <= total - SMALLEST_FREE_MIB:
        return Findings()
    # A hair more, or 0.93 of a float that is just below it would come out as 0.92.
    best = math.floor((total - SMALLEST_FREE_MIB - beyond) / total * 100 + 1e-6) / 100
    return _warn(
        f"gpu_memory_utilization: at {utilization} a card would peak at about {peak:,} of {total:,} MiB (estimated; it "
        f"was {max(peaks_mib, default=0):,} at {measured['share']} in the 2x document), and {SMALLEST_FREE_MIB} MiB is "
        f"the least that has to be left; set it to at most {best}"
    )


# --- rows of a decode step -----------------------------------------------------------------------------------------


def decode_rows(sequences: int, draft_tokens: int) -> int:
    """Return the rows of the largest decode step: each sequence verifies its draft tokens and one more."""
    return sequences * (1 + draft_tokens)


def graph_sizes(max_rows: int) -> list[int]:
    """Return the CUDA graph sizes: 1, then 8 and its doublings, and the largest decode step last.

    The engine itself would end at 512 rows on sm_120. It rounds sizes up to whole sequences (1 + draft tokens) and
    drops those that then exceed the last one, so the last must be a whole number of sequences.

    :raises ValueError: for less than one row.
    """
    if max_rows < 1:
        raise ValueError(f"a decode step of {max_rows} rows has no CUDA graph; at least 1 is needed")
    sizes = [1]
    size = 8
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return sizes if max_rows == 1 else [*sizes, max_rows]


def check_indexer(sequences: int, draft_tokens: int, window: int, chunked: bool, limit: int) -> Findings:
    """Refuse decode steps whose indexer logits do not fit a card. In chunks of whole sequences they always do.

    :param window: tokens; the logits are sized by it and not by the real contexts.
    :param chunked: whether the chunked indexer is on (``DS41_IDX_CHUNK``).
    :param limit: largest rows x window without it, 2^29 in the 8x document.
    """
    rows = decode_rows(sequences, draft_tokens)
    if chunked or rows * window <= limit:
        return Findings()
    remedies = ["set chunked_indexer to true (DS41_IDX_CHUNK=1)"]
    if limit // rows >= 16:
        remedies.append(f"set max_model_len to at most {limit // rows}")
    if limit // window // (1 + draft_tokens) >= 1:
        remedies.append(f"set max_num_seqs to at most {limit // window // (1 + draft_tokens)}")
    return _refuse(
        f"max_model_len: without the chunked indexer {rows:,} rows ({sequences} sequences x (1 + {draft_tokens})) x "
        f"{window:,} tokens exceed {limit:,} (the 8x document: DS41_IDX_CHUNK=0 takes MAX_MODEL_LEN=524288 with 128 "
        f"sequences at k=7, and runs out of memory at a 1M window); {', or '.join(remedies)}"
    )


def check_flat_rows(sequences: int, draft_tokens: int, flat_rows: int) -> Findings:
    """Warn when the largest decode step leaves the MoE kernel's flat path."""
    rows = decode_rows(sequences, draft_tokens)
    if rows <= flat_rows:
        return Findings()
    return _warn(
        f"moe_flat_max_rows: {rows:,} rows ({sequences} sequences x (1 + {draft_tokens})) leave the flat path of "
        f"{flat_rows:,} rows; off it, 128 code streams at k=7 decoded at 1,942 instead of 4,469 tok/s a replica (the "
        f"8x document); set max_num_seqs to at most {max(1, flat_rows // (1 + draft_tokens))}, or draft fewer tokens"
    )


# --- host memory ---------------------------------------------------------------------------------------------------


def offload_gib(offload_gb: int) -> float:
    """Return decimal GB as GiB, to one digit, as ``kv-offloading-size`` wants it: the sum over a replica's GPUs.

    It rounds down, but what is less than one of the engine's chunks short of a full tenth counts as full.
    """
    return (max(0, offload_gb) * 10**9 + _OFFLOAD_CHUNK_BYTES) * 10 // GIB / 10 if offload_gb > 0 else 0.0


def offload_bytes(gib: float) -> int:
    """Return the bytes that ``kv-offloading-size`` takes at most, for all GPUs of a replica together.

    The native backend maps files of that size in all below /dev/shm, touches every page and pins them; it rounds down
    to whole chunks and never up. So they are the container's shared memory and count against its cap.
    """
    return int(Fraction(gib) * GIB)


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def engram_padding(table_bytes: int, layers: int, gpus: int) -> int:
    """Return the bytes that are lost to rounding when each GPU's part of the Engram tables is pinned block by block.

    PyTorch's pinned blocks are rounded up to a power of two: of 23.6 GiB a layer and GPU, values and scales become 32
    and 1 GiB. Nothing is lost with ``engram-config.use_thp``.

    :param table_bytes: all tables of the model together.
    :param layers: the layers that have one.
    :param gpus: of the replica; each keeps its own share.
    """
    if table_bytes <= 0:
        return 0
    part = _ceil_div(table_bytes, layers * gpus)
    values = part * _ENGRAM_VALUES // _ENGRAM_ROW
    return (_power_of_two(values) + _power_of_two(part - values)) * layers * gpus - table_bytes


def host_memory(
    engram_bytes: int,
    engram_padding_bytes: int,
    kv_offload_bytes: int,
    gpus: int,
    *,
    worker_bytes: int = WORKER_BYTES,
    server_bytes: int = SERVER_BYTES,
    margin_bytes: int = MARGIN_BYTES,
) -> HostMemory:
    """Add up one replica's host memory. There is a worker process for each GPU."""
    return HostMemory(
        engram_bytes=engram_bytes,
        engram_padding_bytes=engram_padding_bytes,
        kv_offload_bytes=kv_offload_bytes,
        workers_bytes=gpus * worker_bytes,
        server_bytes=server_bytes,
        margin_bytes=margin_bytes,
    )


def server_bytes(image_cache_gib: float, servers: int) -> int:
    """Return what API servers and engine core take.

    :param image_cache_gib: ``mm-processor-cache-gb``, of each of them.
    :param servers: ``api-server-count``.
    """
    more = max(0, servers - 1)
    caches = Fraction(max(0, image_cache_gib)) * (2 + more) - 2 * IMAGE_CACHE_GIB
    return SERVER_BYTES + more * _API_SERVER_BYTES + max(0, int(caches * GIB))


def memory_text(need: HostMemory) -> str:
    """Return what a replica's host memory is made of, for people."""
    parts = (
        ("Engram tables", need.engram_bytes),
        ("rounding of their pinned blocks", need.engram_padding_bytes),
        ("KV offload", need.kv_offload_bytes),
        ("workers", need.workers_bytes),
        ("server and engine core", need.server_bytes),
        ("margin", need.margin_bytes),
    )
    return ", ".join(f"{name} {gib_text(size)}" for name, size in parts if size)


def check_container_memory(need: HostMemory, cap_bytes: int) -> Findings:
    """Refuse a container cap below what the replica needs.

    Pinned tables and /dev/shm count against it: with too small a cap, workers are killed while the model loads.
    """
    if need.total_bytes <= cap_bytes:
        return Findings()
    remedies = []
    if need.total_bytes - need.engram_padding_bytes <= cap_bytes:
        remedies.append("set engram-config.use_thp in engine_args (no rounding)")
    remedies.append(f"set container_memory to at least {_ceil_div(need.total_bytes, GIB)}g")
    if need.total_bytes - need.kv_offload_bytes < cap_bytes:
        spare = (cap_bytes - need.total_bytes + need.kv_offload_bytes) // 10**9
        remedies.append(f"set kv_offload_gb to at most {spare}")
    return _refuse(
        f"container_memory: a replica needs {gib_text(need.total_bytes)} ({memory_text(need)}; public reports and "
        f"estimated), and its container is capped at {gib_text(cap_bytes)}; {', or '.join(remedies)}"
    )


def _pools(node_sets: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Return the sets of NUMA nodes to check: each one that is pinned to, and those that overlap taken together."""
    distinct = set(node_sets)
    pools: set[frozenset[int]] = set(distinct)
    joined: list[frozenset[int]] = []
    for nodes in sorted(distinct, key=sorted):
        touching = [one for one in joined if one & nodes]
        joined = [one for one in joined if not one & nodes] + [nodes.union(*touching)]
    return sorted(pools.union(joined), key=sorted)


def _sum_known(sizes: Iterable[int | None]) -> int | None:
    every = list(sizes)
    known = [size for size in every if size is not None]
    return sum(known) if known and len(known) == len(every) else None


def check_node_memory(
    replicas: Sequence[ReplicaMemory], numa_nodes: Sequence[Mapping[str, Any]], memory_bytes: int | None
) -> Findings:
    """Refuse replicas whose needs together exceed the memory of the NUMA nodes they share.

    Needs are compared and not caps: the needs are really taken (pinned, nothing swaps), a cap is only a limit. Caps
    that together exceed the memory are a warning: then the kernel of the whole node, not the cap, ends what grows.

    :param numa_nodes: the topology's, each ``{"id": int, "memory_bytes": int | None, ...}``.
    :param memory_bytes: of the whole node, for replicas that are not pinned; None when unknown.
    """
    memory: dict[int, int | None] = {int(node["id"]): node["memory_bytes"] for node in numa_nodes}
    found = []
    for pool in _pools(frozenset(one.nodes) for one in replicas if one.nodes):
        inside = [one for one in replicas if one.nodes and set(one.nodes) <= pool]
        name = f"NUMA node {', '.join(map(str, sorted(pool)))}"
        found.append(_check_pool(name, inside, _sum_known(memory.get(node) for node in pool)))
    if not all(one.nodes for one in replicas):
        # What is pinned nowhere takes memory from everywhere, and the pinned ones with it.
        ram = _sum_known(memory.values()) if memory_bytes is None else memory_bytes
        found.append(_check_pool("this node", replicas, ram))
    return merge(found)


def _check_pool(place: str, inside: Sequence[ReplicaMemory], ram: int | None) -> Findings:
    """Check the replicas that share the memory ``ram`` (bytes, None when unknown)."""
    names = " and ".join(one.name for one in inside)
    need, caps = sum(one.need_bytes for one in inside), sum(one.cap_bytes for one in inside)
    if ram is None:
        return _warn(
            f"memory of {place} is not known, so the {gib_text(need)} of {names} was not checked against it; take "
            "the topology on the node itself"
        )
    if need > ram:
        return _refuse(
            f"replicas: the host memory of {names} on {place} is {gib_text(need)} (public reports and estimated), and "
            f"there are {gib_text(ram)}; lower kv_offload_gb, serve fewer replicas there, or add memory"
        )
    if caps > ram:
        return _warn(
            f"container_memory: the caps of {names} on {place} are {gib_text(caps)} together and it has "
            f"{gib_text(ram)}; they need {gib_text(need)} (estimated), but lower the caps so that one that grows "
            "meets its own"
        )
    return Findings()


def shm_size(kv_offload_bytes: int) -> str:
    """Return a /dev/shm size for podman, in whole GiB: ``160g``.

    :param kv_offload_bytes: see :func:`offload_bytes`. Engram tables lie there only when data parallel replicas share
        them, which ours do not.
    """
    return f"{_ceil_div(kv_offload_bytes + SHM_HEADROOM_BYTES, GIB)}g"


def check_shm(given_bytes: int, kv_offload_bytes: int, gpus: int) -> Findings:
    """Refuse a /dev/shm that the engine finds too small when it starts.

    :param given_bytes: size of the container's /dev/shm.
    :param gpus: of the replica; a single one needs no message queues.
    """
    queues = SHM_LEAST_PER_GPU_BYTES * gpus if gpus > 1 else 0
    least = kv_offload_bytes + queues
    if given_bytes >= least:
        return Findings()
    return _refuse(
        f"shm_size: {gib_text(given_bytes)} of /dev/shm is too small: KV offload {gib_text(kv_offload_bytes)}"
        + f" and {gib_text(queues)} for the engine's queues and NCCL (vLLM's sources, estimated) need at least "
        f"{gib_text(least)}; set shm_size to {shm_size(kv_offload_bytes)}, or lower kv_offload_gb"
    )


# --- the model's own limits ----------------------------------------------------------------------------------------


def check_drafter(
    method: str, draft_tokens: int, drafter: Mapping[str, Any] | None, *, source: str = "profile data"
) -> Findings:
    """Refuse more draft tokens than the drafter was made for. The engine starts with them and drafts badly.

    :param method: how draft tokens are made; only ``dspark`` has a head with a limit.
    :param drafter: the profile's ``{"name": text, "block_size": int | None, "max_tokens": int | None}``, or None.
    :param source: what says so.
    """
    if method != "dspark" or drafter is None:
        return Findings()
    name = drafter.get("name") or "drafter"
    limits = [int(drafter[key]) for key in ("block_size", "max_tokens") if drafter.get(key) is not None]
    if not limits:
        return _warn(
            f"speculative_tokens: how many tokens the head '{name}' can draft is not known before it is there, so "
            f"{draft_tokens} is estimated; its config.json (dspark_block_size) tells"
        )
    if draft_tokens <= min(limits):
        return Findings()
    return _refuse(
        f"speculative_tokens: {draft_tokens} is more than the {min(limits)} that the head '{name}' drafts in one block "
        f"({source}); the engine would start and draft badly (4.4% accepted with 7 on a head of 5, public reports)"
        f"; set it to at most {min(limits)}, or take another drafter"
    )


def check_parallel(attention_heads: int, tensor_parallel: int, experts: int, expert_parallel: int) -> Findings:
    """Refuse group sizes that do not divide the model: each GPU has as many heads and experts as the next.

    :param expert_parallel: GPUs that share the routed experts; 1 for none.
    """
    refusals = []
    for count, what, size in (
        (attention_heads, "attention heads", tensor_parallel),
        (experts, "routed experts", expert_parallel),
    ):
        if size < 1 or count % size:
            fitting = ", ".join(str(number) for number in range(1, 17) if count % number == 0)
            refusals.append(
                f"tensor_parallel_size: {count} {what} do not divide by {size} (the model's config); "
                f"take one of {fitting}"
            )
    return Findings(refusals=tuple(refusals))
