"""The filters that roles call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.filter.plan import (
    FilterModule,
    intent_plan,
    project_version,
    release_manifests,
    resolved_plan,
)

from tests.unit.plugins.samples import IMAGE, MODEL, ROOT, cpu_profile, intent, resolved, topology


def test_the_names_that_roles_use() -> None:
    assert set(FilterModule().filters()) == {
        "intent_plan",
        "resolved_plan",
        "describe_plan",
        "node_config",
        "release_manifests",
    }


def test_problems_come_back_as_data() -> None:
    answer = intent_plan(cpu_profile(), {"replicas": 9, "balancer_address": "0.0.0.0"}, topology(), False, {})
    assert answer["plan"] == {}
    assert [text.split(":")[0] for text in answer["problems"]] == ["balancer_address", "replicas"]


def test_a_plan_is_completed() -> None:
    answer = intent_plan(cpu_profile(), {}, topology(), False, {})
    assert answer["problems"] == []
    complete = resolved_plan(answer["plan"], {"model": MODEL}, IMAGE, [], [], {})
    assert complete == {"plan": resolved(), "problems": [], "waits": False}
    with pytest.raises(AnsibleFilterError, match="run the role serving_plan first"):
        resolved_plan({}, {"model": MODEL}, IMAGE, [], [], {})


def test_what_keeps_a_plan_from_being_completed_comes_back_as_data() -> None:
    plan = intent(name="2x")
    cards = [{**card, "uuid": ""} for card in plan["topology"]["gpus"]]
    answer = resolved_plan(plan, {"model": MODEL}, IMAGE, cards, [], {})
    assert answer["plan"] == {}
    assert len(answer["problems"]) == 2
    assert "the driver does not see GPU 0000:00:00.0" in answer["problems"][0]


def test_a_releases_manifest_says_what_its_id_stands_for() -> None:
    plan = resolved()
    found = release_manifests(plan, {**IMAGE, "recipe": "own"}, "590.48.01")
    assert sorted(found) == sorted(replica["release"] for replica in plan["replicas"])
    one = found[plan["replicas"][1]["release"]]
    assert (one["release"], one["replica"], one["profile"]) == (plan["replicas"][1]["release"], 1, "cpu")
    assert one["model"]["digest"] == MODEL
    assert one["model"]["source"] == {"type": "generated", "seed": 0}
    assert (one["image"]["id"], one["image"]["recipe"], one["image"]["engine_version"]) == (
        IMAGE["id"],
        "own",
        "0.32.0",
    )
    assert (one["driver"], one["drafter"], one["kernels"]) == ("590.48.01", None, [])
    assert re.fullmatch(r".+@.+", one["by"])
    assert one["project"] == {"name": "serving.gpu_node", "version": project_version(ROOT)}


def test_the_projects_version_is_found_where_it_is_installed_too(tmp_path: Path) -> None:
    assert re.fullmatch(r"[0-9.]+", project_version(ROOT))
    (tmp_path / "MANIFEST.json").write_text('{"collection_info": {"version": "9.8.7"}}')
    assert project_version(tmp_path) == "9.8.7"
