"""Reports of runs that never took place, to compare and to draw: an 8x node and a 2x node."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.benchmark import node_picture
from ansible_collections.serving.gpu_node.plugins.module_utils.release import release_of
from gpu_node_bench.figures import figure, invalid, settle
from gpu_node_bench.request import Options
from gpu_node_bench.run import memory_figures

from tests.unit.plugins.samples import resolved


def _card(number: int, peak: float) -> dict[str, Any]:
    return {
        "uuid": f"GPU-00000000-0000-0000-0000-{number:012d}",
        "address": f"0000:{number:02x}:00.0",
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "samples": 240,
        "memory_peak_mib": peak,
        "memory_total_mib": 97887.0,
        "power_peak_w": 590.0 + number,
        "temperature_peak_c": 70.0 + number,
        "power_capped": number == 1,
        "slowed": [],
        "power": [[at * 2.0, 300 + 200 * abs(math.sin(at / 23 + number / 9)) + 9 * (at % 5)] for at in range(240)],
    }


def _speculation(rate: float, drafted: int) -> dict[str, Any]:
    at = [rate**number for number in range(1, drafted + 1)]
    return {"rate": sum(at) / drafted, "per_draft": sum(at), "drafted_per_draft": drafted, "at": at}


def _put(name: str, measure: str, kind: str, runs: list[float], **details: Any) -> dict[str, Any]:
    return settle(figure(name, measure, kind, Options(), **details), runs, 0.15)


def _replica_figures(name: str, factor: float, drafted: int, lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    found = [
        _put(name, f"decode/{workload}", "decode", [speed * factor * share for share in (0.98, 1.0, 1.03)])
        for workload, speed in (("code", 270.0), ("prose", 151.0), ("math", 281.0))
    ]
    for workload, rate in (("code", 0.72), ("prose", 0.5), ("math", 0.74), ("", 0.66)):
        spec, suffix = _speculation(rate, drafted), f"/{workload}" if workload else ""
        found.append(_put(name, f"acceptance{suffix}", "acceptance", [spec["rate"]]))
        found.append(_put(name, f"accepted{suffix}", "accepted", [spec["per_draft"]]))
    found.append(_put(name, "first/short", "first_token", [0.061, 0.063, 0.066], prompt_tokens=24))
    for length in lengths:
        cold = [length / 10_300 * (1 + length / 400_000) * share / factor for share in (0.99, 1.01)]
        found.append(_put(name, f"first/{length}", "first_token", cold, prompt_tokens=length))
        rates = [length / seconds for seconds in cold]
        found.append(_put(name, f"prefill/{length}", "prefill", rates, prompt_tokens=length))
        found.append(_put(name, f"repeat/{length}", "cache_repeat", [length / 230_000] * 2, prompt_tokens=length))
    return found


def _level_figures(name: str, factor: float, most: int, replicas: int = 1) -> list[dict[str, Any]]:
    speeds = {1: 255.0, 8: 1240.0, 32: 2650.0, 64: 3600.0, 128: 4390.0}
    word = "total" if name == "node" else "load"
    return [
        _put(
            name, f"{word}/code/{streams * replicas}", "load", [speed * factor], streams=streams * replicas,
            each_tokens_per_s=speed / streams, first_p50_s=0.07 * streams**0.5, first_p99_s=0.11 * streams**0.6,
        )
        for streams, speed in speeds.items()
        if streams <= most
    ]  # fmt: skip


def _report(name: str, profile: str, figures: list[dict[str, Any]], cards: list[dict[str, Any]]) -> dict[str, Any]:
    plan = resolved(name=profile)
    releases = [release_of(plan, replica) for replica in plan["replicas"]]
    names = dict.fromkeys(one["target"] for one in figures)
    figures = [*figures, *memory_figures(cards, Options(), "")]
    return {
        "schema": 1,
        "program": "1",
        "created": "2026-12-01T08:30:12+00:00",
        "name": name,
        "profile": profile,
        "release": "-".join(release["id"] for release in releases),
        "seconds": 478.0,
        "clock": {"step_s": 0.0, "note": ""},
        "method": {**asdict(Options()), "generator": {"image": "b" * 64, "model_folder": "/x", "tokenizer_mode": ""}},
        "targets": [
            {
                "name": target,
                "kind": "balancer" if target == "node" else "replica",
                "url": f"http://127.0.0.1:{8080 if target == 'node' else 8000 + number}",
                "model": plan["served_model_name"],
                "release": "",
                "gpus": [],
                "window": plan["settings"]["max_model_len"],
                "engine": {} if target == "node" else {"version": "0.33.0", "kv_cache_size_tokens": "4538321"},
                "speculation": {} if target == "node" else {"all": _speculation(0.66, 7 if profile == "8x" else 5)},
                "notes": ["a measurement was repeated: other traffic meanwhile: 1 requests"] if number == 0 else [],
            }
            for number, target in enumerate(names)
        ],
        "figures": figures,
        "cards": cards,
        "cards_note": "",
        "phases": [
            {"name": "replica 0: decode", "begin": 0.0, "end": 90.0},
            {"name": "replica 0: first", "begin": 90.0, "end": 210.0},
            {"name": "replica 0: levels", "begin": 210.0, "end": 478.0},
        ],
        "node": node_picture(plan, releases),
        "summary": {
            "figures": len(figures),
            "invalid": sum(bool(one["invalid"]) for one in figures),
        },
    }


def two_card_report(factor: float = 1.0) -> dict[str, Any]:
    """A 2x node, all of whose figures have a number."""
    figures = _replica_figures("replica 0", factor, 5, (107_016, 211_722)) + _level_figures("replica 0", factor, 64)
    return _report("gpu-node-2x", "2x", figures, [_card(0, 96799), _card(1, 96917)])


def eight_card_report() -> dict[str, Any]:
    """An 8x node with three figures that have no number."""
    figures = []
    for index, factor in enumerate((1.0, 0.97)):
        figures += _replica_figures(f"replica {index}", factor, 7, (107_016, 211_722))
        figures += _level_figures(f"replica {index}", factor, 128)
    figures += _level_figures("node", 1.93, 128, replicas=2)
    by_id = {one["id"]: one for one in figures}
    invalid(by_id["replica 1/decode/prose"], "ended early: 512 of 896 tokens (finish_reason stop)")
    invalid(by_id["node/total/code/64"], "other traffic meanwhile: 3 requests, 1536 generated tokens")
    by_id["replica 1/load/code/128"]["notes"].append("37 requests were preempted: the KV cache is full at this level")
    invalid(by_id["replica 0/decode/math"], "the runs differ by 30.7% of their mean, more than 15%: 210, 281, 290")
    return _report("gpu-node-8x", "8x", figures, [_card(number, 91_629 + 40 * number) for number in range(8)])
