"""What the role makes of a report: which runs fail, and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_node_bench import baselines
from gpu_node_bench.figures import invalid

from tests.unit.bench.reports import two_card_report
from tests.unit.plugins.playbooks import run_playbook

PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: serving.gpu_node.benchmark, tasks_from: conclude.yml}
      vars:
        _benchmark_folder: "{{ playbook_dir }}/{{ inventory_hostname }}"
        benchmark_report_dir: "{{ playbook_dir }}/reports/{{ inventory_hostname }}"
"""


def test_a_run_that_has_to_fail_when_it_is_worse_fails_too_when_that_is_not_known(tmp_path: Path) -> None:
    same, worse, stalled, broken, first, alone = (two_card_report() for _ in range(6))
    (tmp_path / "old.json").write_text(json.dumps(two_card_report()))
    worse["figures"][0]["value"] = 50.0
    invalid(stalled["figures"][0], "a pause of 0.12 s between two tokens (3 attempts)")
    broken["unusable_baselines"] = ["x.json is no whole report: figures[1] has no 'value'"]
    for report in (same, worse, stalled):
        report["comparison"] = baselines.comparison(report, tmp_path / "old.json")
    hosts: dict[str, dict[str, Any]] = {
        "same": same, "worse": worse, "stalled": stalled, "broken": broken, "first": first, "alone": alone,
    }  # fmt: skip
    lines = []
    for name, report in hosts.items():
        (tmp_path / name / "latest").mkdir(parents=True)
        (tmp_path / name / "latest/report.json").write_text(json.dumps(report))
        (tmp_path / name / "latest/page.html").write_text("page")
        keeps = " benchmark_keep_baseline=false" if name == "alone" else ""
        # Texts, as of the command line's -e NAME=VALUE.
        takes = " benchmark_allow_invalid=true benchmark_fail_when_worse=true"
        lines.append(f"{name} ansible_connection=local{takes}{keeps}\n")
    (tmp_path / "hosts").write_text("".join(lines))
    (tmp_path / "play.yml").write_text(PLAY)
    counts, output = run_playbook(tmp_path, tmp_path / "hosts", tmp_path / "play.yml")
    failed = {name: bool(count["failed"]) for name, count in counts.items()}
    assert failed == {
        "same": False, "worse": True, "stalled": True, "broken": True, "first": False, "alone": True,
    }, output  # fmt: skip
    told = output.replace("\\n", "\n")
    assert "worse is worse than its baseline:\n- replica 0/decode/code: 270.9 before, 50 tok/s now (-81.5%)\n" in told
    assert "\n- replica 0/decode/code: new: invalid: a pause of 0.12 s between two tokens (3 attempts)" in told
    assert "\n- x.json is no whole report: figures[1] has no 'value'" in told
    assert "alone has no baseline to be worse than" in told
    # The report is there in any case.
    assert json.loads((tmp_path / "reports/worse/benchmark.json").read_text())["name"] == "gpu-node-2x"
