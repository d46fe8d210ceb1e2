"""verify.yml on a node that serves, at every level, and on one where something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_node_accept import engine_report
from nodes import Node, Play
from testhost import ROOT, STATE

VERIFY = "playbooks/verify.yml"


@pytest.fixture
def asks(served: Node, tmp_path: Path) -> Iterator[Any]:
    """Runs verify.yml; the play and its report."""

    def ask(level: str, **more: Any) -> tuple[Play, dict[str, Any]]:
        extra = {"acceptance_level": level, "acceptance_report_dir": str(tmp_path / level), **more}
        play = served.playbook(playbook=VERIFY, extra=extra)
        report = tmp_path / level / "acceptance.json"
        return play, json.loads(report.read_text()) if report.exists() else {}

    yield ask


def verdicts(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(check["target"], check["id"]): check["verdict"] for check in report["checks"]}


def test_standard_on_a_node_that_serves(asks: Any, tmp_path: Path) -> None:
    play, report = asks("standard", acceptance_determinism_tokens=48)
    assert play.rc == 0, play.tail(60)
    assert report["result"] == "pass", report["checks"]
    found = verdicts(report)
    for index in (0, 1):
        for name in ("kv_tokens", "determinism"):
            assert found[f"replica {index}", name] == "pass"
        # vLLM switches it off for this kind of attention on CPUs, and says so.
        assert found[f"replica {index}", "prefix_cache"] == "not run"
    # What means nothing on a node without cards did not run, and says why.
    assert found["cards", "gpu_all_reduce"] == "not run"
    assert "profile cpu has no GPUs" in play.output
    page = (tmp_path / "standard" / "acceptance.html").read_text()
    assert page.count("<tr>") >= len(report["checks"])


def test_every_check_is_collected_before_the_play_fails(asks: Any) -> None:
    """A plan with a larger KV cache than the engines have: the report is whole, and the play fails with both."""
    play, report = asks("smoke", serving_plan_overrides={"balancer_address": "0.0.0.0", "kv_cache_memory": "128M"})
    assert play.rc != 0
    assert "is not as it should be" in play.output
    found = verdicts(report)
    assert found["replica 0", "kv_tokens"] == found["replica 1", "kv_tokens"] == "fail"
    # What serves is of other settings, and that is said, too.
    assert found["replica 0", "settings"] == found["replica 1", "settings"] == "warn"
    assert {verdict for (_, name), verdict in found.items() if name not in ("kv_tokens", "settings")} == {"pass"}


@pytest.mark.full
def test_full_goes_to_the_limits_and_leaves_the_node_serving(served: Node, asks: Any) -> None:
    play, report = asks("full", acceptance_determinism_tokens=64, acceptance_concurrency_tokens=256)
    assert play.rc == 0, play.tail(60)
    found = verdicts(report)
    for index in (0, 1):
        assert found[f"replica {index}", "full_window"] == "pass"
        assert found[f"replica {index}", "restart"] in ("pass", "warn")
        assert found[f"replica {index}", "concurrency"] in ("pass", "warn")
    status = json.loads(served.ssh("gpu-node status --json"))
    assert [(row["state"], row["out"]) for row in status] == [("active", []), ("active", [])]


@pytest.mark.full
def test_a_drained_replica_is_not_restarted(served: Node, asks: Any) -> None:
    served.ssh("gpu-node drain 1", timeout=180)
    try:
        play, report = asks("full", acceptance_determinism_tokens=16, acceptance_concurrency_tokens=16)
        assert verdicts(report)["replica 1", "restart"] == "not run"
        row = json.loads(served.ssh("gpu-node status --json"))[1]
        assert row["out"] == ["operator"], play.tail(20)
    finally:
        served.ssh("gpu-node undrain 1")


@pytest.mark.full
def test_dry_run_changes_nothing(served: Node) -> None:
    for level in ("smoke", "standard"):
        play = served.playbook("--check", "--diff", playbook=VERIFY, extra={"acceptance_level": level})
        assert play.rc == 0, play.tail(40)


def test_the_patterns_are_of_the_sources() -> None:
    subprocess.run([sys.executable, str(ROOT / "tests/engine/fetch_vllm.py")], check=True, capture_output=True)
    folder = STATE / "cache" / f"vllm-{engine_report.LINES['vllm']}"
    for name, line in engine_report.LINES["lines"].items():
        assert line["text"] in (folder / line["file"]).read_text(), name
    for name, metric in engine_report.LINES["metrics"].items():
        assert metric["label"] in (folder / metric["file"]).read_text(), name
