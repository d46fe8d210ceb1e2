"""The fleet as the last version of this project deployed it, brought to this one, and back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fleet as machines
import pytest
from fleet_view import PLAY_TIMEOUT_S, Fleet
from testhost import ROOT

pytestmark = pytest.mark.full

# Where no version is tagged yet: the last one whose site.yml switched replicas one by one.
BEFORE_ROLLOUTS = "981e884"
# What that version has no setting for.
NEWER = ("gate_tokens", "gate_speed_factor", "balancer_announce")
CONVERGE = """\
- import_playbook: {checkout}/playbooks/plan.yml
- hosts: gpu_nodes
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {{name: serving.gpu_node.container_runtime, tasks_from: verify}}
- import_playbook: {checkout}/playbooks/artifacts.yml
- import_playbook: {checkout}/playbooks/serve.yml
"""


def git(*argv: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *argv], check=True, capture_output=True, timeout=60).stdout


def last_version() -> str:
    tags = git("tag", "--merged", "HEAD", "--sort=-creatordate").decode().split()
    return tags[0] if tags else BEFORE_ROLLOUTS


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A checkout of the last version, which has the same inventory and secrets."""
    checkout = tmp_path / "old"
    checkout.mkdir()
    subprocess.run(["tar", "-x", "-C", str(checkout)], input=git("archive", last_version()), check=True, timeout=60)
    yield checkout
    shutil.rmtree(checkout)


def test_this_version_takes_the_last_ones_fleet_over_and_can_go_back(_fleet: Fleet, old: Path) -> None:
    fleet = _fleet
    machines.down()
    machines.up(range(1, 4))
    converge = fleet.folder / "old.yml"
    converge.write_text(CONVERGE.format(checkout=old))
    overrides = {name: value for name, value in fleet.inventory_overrides().items() if name not in NEWER}
    variables = {"fleet_overrides": overrides, "serving_plan_save_dir": ""}
    play = machines.start_playbook(str(converge), extra=variables, checkout=old).finish(PLAY_TIMEOUT_S)
    assert play.rc == 0, play.tail(60)
    fleet.changes = {}
    before = {name: text.split() for name, text in fleet.each(CURRENT).items()}
    machines.configure_front(fleet.front_backend())
    fleet.wait_for_front()
    with fleet.load() as load:
        # The node's own parts are the new version's, and so is the release, which has another setting.
        fleet.rollout(changes=fleet.another())
        assert load.failed() == []
        after = fleet.releases()
        assert all(old != new for name in before for old, new in zip(before[name], after[name], strict=True))
        back = fleet.run("playbooks/rollback.yml")
        assert back.rc == 0, back.tail(60)
    assert load.failed() == []
    assert fleet.releases() == before
    fleet.wait_for_front()


CURRENT = "for one in /var/lib/gpu-node/replicas/*/current; do basename $(readlink $one); done"
