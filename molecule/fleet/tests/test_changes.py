"""What else a rollout may bring: another image, other weights, a step that needs the whole node."""

from __future__ import annotations

import sys
from typing import Any

import fleet as machines
import pytest
from fleet_view import Fleet, words

pytestmark = pytest.mark.full

# A container does not come back from a reboot by itself.
DRAINED_TASKS = """\
- name: See that nothing runs
  ansible.builtin.command:
    argv: [sh, -c, "test -e /var/lib/gpu-node/held && ! podman ps --quiet | grep ."]
  changed_when: false
- name: Reboot
  ansible.builtin.command:
    argv: [{python}, {testhost}, reboot, "{{{{ inventory_hostname | replace('fleet', 'gpu-node-fleet') }}}}"]
  delegate_to: localhost
  become: false
- name: Come back
  ansible.builtin.wait_for_connection:
    timeout: 60
- name: See that no engine was started
  ansible.builtin.command:
    argv: [sh, -c, "! podman ps --quiet | grep ."]
  changed_when: false
- name: Leave a trace
  ansible.builtin.file:
    path: /srv/firmware-new
    state: touch
    mode: "0644"
"""


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("image", {"fleet_image": "two"}),
        ("model", {"serving_plan_sources": {"model": {"type": "generated", "seed": 1}}}),
    ],
)
def test_another_image_and_other_weights_reach_every_replica(
    fleet: Fleet, name: str, variables: dict[str, Any]
) -> None:
    before = fleet.serving()
    with fleet.load() as load:
        fleet.rollout(**variables)
    fleet.variables |= variables
    assert load.failed() == []
    after = fleet.serving()
    for one in fleet.nodes:
        for old, new in zip(before[one.name], after[one.name], strict=True):
            assert old[name] != new[name]
            assert {key for key in old if old[key] != new[key]} <= {name, "id", "files", "podman_args"}
    assert set(fleet.releases()) == {one.name for one in fleet.nodes}
    fleet.wait_for_front()


def test_a_step_that_needs_the_whole_node_loses_nothing_behind_the_balancer_in_front(fleet: Fleet) -> None:
    before = fleet.releases()
    tasks = fleet.folder / "drained.yml"
    program = machines.ROOT / "tests" / "host" / "fleet.py"
    tasks.write_text(DRAINED_TASKS.format(python=sys.executable, testhost=program))
    # Without a replica a node's own balancer has nobody to send to: only clients of the one in front are spared.
    with fleet.load(direct=False) as load:
        play = fleet.run(changes={"balancer_announce": 8}, rollout_drained_tasks=str(tasks))
    assert play.rc == 0, play.tail(80)
    assert load.failed() == []
    assert set(fleet.each("stat -c %s /srv/firmware-new").values()) == {"0\n"}
    assert fleet.releases() == before
    assert set(fleet.each("ls /var/lib/gpu-node/held 2>/dev/null || true").values()) == {""}
    fleet.wait_for_front()


def test_a_drained_step_that_fails_ends_the_rollout_which_goes_on_with_the_nodes_that_are_left(fleet: Fleet) -> None:
    before = fleet.releases()
    tasks = fleet.folder / "drained.yml"
    trace = "- name: Leave a trace\n  ansible.builtin.shell: echo done >>/srv/drained-trace\n"
    fail = (
        "- name: Flash\n  ansible.builtin.fail:\n    msg: the card did not take its firmware\n"
        "  when: inventory_hostname == 'fleet-2'\n"
    )
    fleet.each("rm -f /srv/drained-trace")
    with fleet.load(direct=False) as load:
        tasks.write_text(trace + fail)
        play = fleet.run(changes={"balancer_announce": 8}, rollout_drained_tasks=str(tasks))
        found = fleet.wanted()
        assert play.rc != 0
        assert "the card did not take its firmware" in words(play)
        assert f"rollback.yml -e rollback_of={found['fleet-2']['rollout']}" in words(play)
        assert fleet.releases() == before
        # Nobody holds the node whose turn did not come.
        assert [found[name]["state"] for name in sorted(found)] == ["done", "done", "failed"]
        assert [found[name]["drained_done"] for name in sorted(found)] == [True, False, False]
        tasks.write_text(trace)
        play = fleet.run(changes={"balancer_announce": 8}, rollout_drained_tasks=str(tasks))
    assert play.rc == 0, play.tail(80)
    assert load.failed() == []
    assert fleet.releases() == before
    traces = fleet.each("cat /srv/drained-trace")
    assert [traces[name].split() for name in sorted(traces)] == [["done"], ["done", "done"], ["done"]]
    fleet.wait_for_front()
