"""playbooks/benchmark.yml on a node with two real engines: the figures, the page, the baseline, and a second run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nodes import Node, Play

# One workload and one prompt of each kind: what is tested is the path, not the speed.
SHORT = {
    "workloads": ["code"], "tokens_short": 8, "tokens_long": 40, "short_runs": 1, "long_runs": 1,
    "prompt_lengths": [107_016], "spread_limit": 3.0, "first_spread_limit": 3.0,
}  # fmt: skip


def benchmark(node: Node, folder: Path, *args: str, options: dict[str, Any], **more: Any) -> Play:
    # vLLM on CPU keeps no prefixes of this model and drafts nothing in its random text: such figures have no number.
    extra = {"benchmark_report_dir": str(folder), "benchmark_options": options, "benchmark_allow_invalid": True, **more}
    return node.playbook(*args, playbook="playbooks/benchmark.yml", extra=extra, timeout=900)


def figures(folder: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((folder / "benchmark.json").read_text())
    return {one["id"]: one for one in report["figures"]}


def test_a_single_stream_of_each_replica(served: Node, tmp_path: Path) -> None:
    """Decode, first token and acceptance; each line of the job is seen meanwhile; no key anywhere."""
    play = benchmark(
        served, tmp_path, "-vv", options=SHORT, benchmark_parts=["decode", "first"], benchmark_replace_baseline=True
    )
    assert play.rc == 0, play.tail()
    found = figures(tmp_path)
    for replica in ("replica 0", "replica 1"):
        assert "drafted nothing" in found[f"{replica}/acceptance/code"]["invalid"]
        assert found[f"{replica}/decode/code"]["value"] > 5
        assert found[f"{replica}/first/short"]["value"] < 30
        # 107,016 of 262,144 in a window of 2,048: by the engine's own count
        assert found[f"{replica}/first/836"]["details"]["prompt_tokens"] == 836
        assert found[f"{replica}/prefill/836"]["value"] > 0
    assert "[gpu-node] replica 1/decode/code: " in play.output
    page = (tmp_path / "benchmark.html").read_text()
    assert "<h2>Figures</h2>" in page
    key = served.ssh("cat /etc/gpu-node/secrets/engine.env").strip().removeprefix("VLLM_API_KEY=")
    for text in (play.output, page, (tmp_path / "benchmark.json").read_text()):
        assert key not in text
        assert served.client_key not in text


@pytest.mark.full
def test_check_mode_measures_nothing(served: Node, tmp_path: Path) -> None:
    play = benchmark(served, tmp_path, "--check", "--diff", options=SHORT, benchmark_parts=["decode"])
    assert play.rc == 0, play.tail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_replica_that_is_out_is_not_measured(served: Node, tmp_path: Path) -> None:
    served.ssh("gpu-node drain 0", timeout=180)
    try:
        play = benchmark(served, tmp_path, options=SHORT)
    finally:
        served.ssh("gpu-node undrain 0", timeout=180)
    assert play.rc != 0
    assert "replica 0 is out of the balancer (operator)" in play.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_the_whole_of_it_as_the_profile_has_it(served: Node, tmp_path: Path) -> None:
    """With the load generator of the image, against each replica and through the balancer."""
    options = {"spread_limit": 3.0, "first_spread_limit": 3.0}
    play = benchmark(served, tmp_path, options=options, benchmark_replace_baseline=True)
    assert play.rc == 0, play.tail()
    found = figures(tmp_path)
    # Over both replicas there are twice as many.
    for level in ("replica 0/load/code/1", "replica 1/load/code/4", "node/total/code/2", "node/total/code/8"):
        assert found[level]["value"] > 1, found[level]
    # What has no number is in no baseline.
    (baseline,) = served.ssh("ls /var/lib/gpu-node/baselines").split()
    kept = json.loads(served.ssh(f"cat /var/lib/gpu-node/baselines/{baseline}"))
    assert {one["id"] for one in kept["figures"]} >= {name for name, one in found.items() if one["value"] is not None}
    assert all(one["value"] is not None for one in kept["figures"])


@pytest.mark.full
def test_two_points_as_the_published_runs_had_them(served: Node, tmp_path: Path) -> None:
    """64 and 896 tokens agree with 64 and 480: what is measured is a speed, whatever the lengths."""
    speeds = []
    for long in (480, 896):
        options = {**SHORT, "tokens_short": 64, "tokens_long": long}
        play = benchmark(served, tmp_path, options=options, benchmark_parts=["decode"], benchmark_keep_baseline=False)
        assert play.rc == 0, play.tail()
        speeds.append(figures(tmp_path)["replica 0/decode/code"]["value"])
    assert 1 / 3 < speeds[0] / speeds[1] < 3
