"""Preflight on a real node without GPUs: it says everything and changes nothing; `cpu` passes and `8x` fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testinfra.host import Host

Preflight = Callable[..., Any]
# What it could have changed: packages, and the configuration of the system.
EVERYTHING = (
    "dpkg-query -W; apt-mark showhold; find /etc /var/lib/gpu-node -type f -exec sha256sum {} + 2>/dev/null; true"
)


def test_a_node_without_gpus_fails_for_8x_with_everything_at_once(host: Host, preflight: Preflight) -> None:
    before = host.check_output(EVERYTHING)
    play = preflight(serving_plan_profile="8x")
    assert play.rc == 2, play.output
    assert play.changed == 0, play.output
    failed = play.output.partition("gpu-node is not ready; nothing was changed:")[2]
    for words in ("- sources: serving_plan_sources: model: revision", "- plan: drafter", "- gpus: 0 on PCI: none"):
        assert words in failed, play.output
    assert "lspci -d 10de:" in play.words
    assert host.check_output(EVERYTHING) == before


def test_it_passes_for_cpu_and_the_report_is_written(preflight: Preflight, tmp_path: Path) -> None:
    play = preflight(serving_plan_profile="cpu", preflight_report_dir=str(tmp_path))
    assert play.rc == 0, play.output
    report = json.loads((tmp_path / "gpu-node.preflight.json").read_text())
    assert report["passed"]
    seen = {check["check"]: check["seen"] for check in report["checks"]}
    assert seen["os"].startswith("Debian GNU/Linux 12")
    assert seen["apt_lock"] == "free"
    assert f"{len(report['checks'])} checks: 0 failed" in play.words


def test_who_holds_apts_lock_is_seen(
    host: Host, preflight: Preflight, apt_lock: Callable[[int], int], tmp_path: Path
) -> None:
    pid = apt_lock(120)
    play = preflight(serving_plan_profile="cpu", preflight_report_dir=str(tmp_path))
    assert play.rc == 0, play.output
    report = json.loads((tmp_path / "gpu-node.preflight.json").read_text())
    (check,) = [check for check in report["checks"] if check["check"] == "apt_lock"]
    assert check["level"] == "warning"
    assert check["seen"].startswith(f"held by process {pid} (/usr/bin/python3")
