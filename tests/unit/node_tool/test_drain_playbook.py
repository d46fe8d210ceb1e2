"""playbooks/drain.yml on a stand-in node."""

import json
import os
from pathlib import Path

import pytest

from tests.unit.plugins.playbooks import ROOT
from tests.unit.plugins.rollout_stage import Stage


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Replica 0 is out by the operator, replica 1 is in. Jobs and commands of `gpu-node` are in its calls."""
    stage = Stage(tmp_path, {"n1": {}})
    stage.build()
    (tmp_path / "drain.yml").write_text((ROOT / "playbooks/drain.yml").read_text())
    command = tmp_path / "bin/gpu-node"
    command.parent.mkdir()
    rows = [{"index": 0, "out": ["operator"]}, {"index": 1, "out": []}]
    command.write_text(
        f"#!/bin/sh\n[ $1 = status ] && exec echo '{json.dumps(rows)}'\necho n1 gpu-node $* >>{tmp_path}/calls\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return stage


@pytest.mark.parametrize(("replica", "changed"), [(0, 0), (1, 1)], ids=["is out", "is in"])
def test_drain_ends_when_the_requests_ended(node: Stage, replica: int, changed: int) -> None:
    """Also when it is out already: whoever switches the node off next relies on it."""
    counts, text = node.run("drain", "-e", f"drain_replica={replica}")
    assert counts["n1"]["failed"] == 0 and counts["n1"]["changed"] == changed, text
    assert node.calls("n1") == [f"gpu-node-drain-{replica}: drain {replica}"]


def test_requests_that_still_run_fail_it(node: Stage) -> None:
    node.hosts["n1"] = {"jobs": {"drain": "replica 0: still 1 requests after 600 s; it stays out"}}
    counts, text = node.run("drain", "-e", "drain_replica=0")
    assert counts["n1"]["failed"] == 1 and "still 1 requests" in text


def test_back_in(node: Stage) -> None:
    counts, text = node.run("drain", "-e", "drain_replica=0", "-e", "drain_state=in")
    assert counts["n1"]["failed"] == 0 and counts["n1"]["changed"] == 1, text
    assert node.calls("n1") == ["gpu-node undrain 0"]
