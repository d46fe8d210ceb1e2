"""`playbooks/plan.yml` with the example inventory and a file for the machine: nothing answers at its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.unit.plugins.playbooks import ROOT, run_playbook

EXAMPLE = ROOT / "inventories" / "example"
PLAN = ROOT / "playbooks" / "plan.yml"
TOPOLOGIES = ROOT / "inventories" / "topologies"


def plan(folder: Path, limit: str, topology: str, *more: str) -> tuple[dict[str, dict[str, int]], str]:
    arguments = ("-l", limit, "-e", f"topology_file={TOPOLOGIES / topology}", *more)
    return run_playbook(folder, EXAMPLE, PLAN, *arguments)


def test_a_node_and_a_fleet_are_planned_from_a_file_and_saved_once(tmp_path: Path) -> None:
    nodes = ["gpu-node", "fleet-1", "fleet-2"]
    counts, output = plan(tmp_path, ",".join(nodes), "8x.yml")
    assert sorted(counts) == sorted(nodes), output
    assert all(count["failed"] == count["unreachable"] == 0 for count in counts.values()), output
    assert "4.33 full-length requests in 4,538,321 tokens of KV cache" in output
    assert "between the pairs: NODE" in output
    for node in nodes:
        saved = json.loads((tmp_path / "plans" / f"{node}.json").read_text())
        assert saved["profile"] == "8x"
        assert [len(replica["gpus"]) for replica in saved["replicas"]] == [4, 4]
        assert yaml.safe_load((tmp_path / "plans" / f"{node}.yml").read_text()) == saved
    again, output = plan(tmp_path, ",".join(nodes), "8x.yml")
    assert all(count["changed"] == 0 for count in again.values()), output


def test_the_two_card_node_of_the_example(tmp_path: Path) -> None:
    counts, output = plan(tmp_path, "gpu-node-2x", "2x.yml")
    assert counts["gpu-node-2x"]["failed"] == 0, output
    saved = json.loads((tmp_path / "plans" / "gpu-node-2x.json").read_text())
    assert saved["replicas"][0]["engine_args"]["max-model-len"] == 262144
    # what the operator has to fill in is said, and nothing is made up for it
    assert len(saved["missing"]) == 1
    assert "to be filled in before site.yml can fetch" in output


def test_a_plan_that_cannot_work_is_refused_and_nothing_saved(tmp_path: Path) -> None:
    more = {"serving_plan_sources": {}, "serving_plan_overrides": {"DS41_IDX_CHUNK": 0}}
    counts, output = plan(tmp_path, "gpu-node", "8x.yml", "-e", json.dumps(more))
    assert counts["gpu-node"]["failed"] == 1
    assert "set chunked_indexer to true (DS41_IDX_CHUNK=1)" in output
    # each reason in a line of its own
    assert "nothing was changed:\\n- drafter: 'code' has no source" in output
    assert "\\n- max_model_len: without the chunked indexer" in output
    assert not (tmp_path / "plans").exists()
