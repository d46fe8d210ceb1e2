"""A plan that cannot be completed before its node is drained: only one that waits for a free GPU is taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.unit.plugins.playbooks import ROOT, run_playbook
from tests.unit.plugins.samples import DRAFTER, IMAGE, MODEL, intent, record

# What the tasks do first on a node with GPUs; here its outcome is given.
DONE_ALREADY = {"topology": "main", "acceptance": "all_reduce", "kernels": "qualify"}


def test_a_node_is_not_drained_for_a_plan_that_no_check_completes(tmp_path: Path) -> None:
    collection = tmp_path / "collections/ansible_collections/serving/gpu_node"
    (collection / "roles").mkdir(parents=True)
    (collection / "plugins").symlink_to(ROOT / "plugins")
    for role in ("rollout", "serving_plan"):
        (collection / "roles" / role).symlink_to(ROOT / "roles" / role)
    for role, entry in DONE_ALREADY.items():
        (collection / "roles" / role / "tasks").mkdir(parents=True)
        (collection / "roles" / role / "tasks" / f"{entry}.yml").write_text("---\n[]\n")

    plan = intent(name="8x")
    plan["topology"]["releases"] = {"0": {"id": "0123456789ab"}}
    busy = {**record(), "report": {}, "why": "replica 0 runs on it", "busy": True}
    given: dict[str, Any] = {
        "serving_plan_result": plan,
        "serving_image_result": IMAGE,
        "topology_result": {"topology": plan["topology"]},
        "kernels_qualification": [busy],
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
    }
    weights = {"digests": {"model": MODEL, "drafter": DRAFTER}, "draft_tokens": {}}
    head_of_five = {**weights, "draft_tokens": {"drafter": 5}}
    steps = {"rollout_drained_steps": ["qualify"]}
    hosts = {
        "waits": {**given, **steps, "model_weights_result": weights},
        "wrong-head": {**given, **steps, "model_weights_result": head_of_five},
        "no-step": {**given, "rollout_drained_steps": [], "model_weights_result": weights},
    }
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
    tasks = [
        {"ansible.builtin.include_role": {"name": "serving.gpu_node.rollout", "tasks_from": "complete_plan"}},
        {"ansible.builtin.debug": {"msg": "TARGETS {{ rollout_unresolved_targets | to_json }}"}},
    ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))

    counts, output = run_playbook(
        tmp_path, tmp_path / "hosts.json", tmp_path / "play.yml", collections=tmp_path / "collections"
    )

    failed = {host: count["failed"] for host, count in counts.items()}
    assert failed == {"waits": 0, "wrong-head": 1, "no-step": 1}, output
    assert 'TARGETS {\\"0\\": \\"0123456789ab\\"}' in output
    refused = " ".join(output.replace("\\n", " ").split())
    assert "speculative_tokens: 7 is more than the 5 that the head 'code' drafts in one block" in refused
    assert "that is off: not qualified: replica 0 runs on it" in refused
