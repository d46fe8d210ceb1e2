"""What the integration tests read out of a playbook's output."""

from __future__ import annotations

from nodes import Play, parse_recap

OUTPUT = """
TASK [something] *****
ok: [gpu-node]

PLAY RECAP *********************************************************************
gpu-node                   : ok=12   changed=3    unreachable=0    failed=0    skipped=4    rescued=0    ignored=0
localhost                  : ok=1    changed=1    unreachable=0    failed=0    skipped=0    rescued=0    ignored=0

TASKS RECAP ****
"""


def test_recap_counts_per_host() -> None:
    recap = parse_recap(OUTPUT)
    assert recap["gpu-node"]["ok"] == 12
    assert recap["localhost"]["changed"] == 1
    assert Play(0, OUTPUT, recap).changed == 4


def test_a_run_that_ended_early_has_no_recap() -> None:
    assert parse_recap("ERROR! the playbook: site.yml could not be found") == {}
