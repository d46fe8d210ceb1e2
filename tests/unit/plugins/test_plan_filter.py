"""The filters that roles call."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.filter.plan import (
    FilterModule,
    differing_replicas,
    intent_plan,
    resolved_plan,
)

from tests.unit.plugins.samples import IMAGE, MODEL, cpu_profile, intent, resolved, topology


def test_the_names_that_roles_use() -> None:
    assert set(FilterModule().filters()) == {
        "compare_kv_tokens",
        "intent_plan",
        "resolved_plan",
        "describe_plan",
        "differing_replicas",
        "node_config",
    }


def test_problems_come_back_as_data() -> None:
    answer = intent_plan(cpu_profile(), {"replicas": 9, "balancer_address": "0.0.0.0"}, topology(), False, {})
    assert answer["plan"] == {}
    assert [text.split(":")[0] for text in answer["problems"]] == ["balancer_address", "replicas"]


def test_a_plan_is_completed() -> None:
    answer = intent_plan(cpu_profile(), {}, topology(), False, {})
    assert answer["problems"] == []
    complete = resolved_plan(answer["plan"], {"model": MODEL}, IMAGE, [], [])
    assert complete == {"plan": resolved(), "problems": []}
    with pytest.raises(AnsibleFilterError, match="run the role serving_plan first"):
        resolved_plan({}, {"model": MODEL}, IMAGE, [], [])


def test_what_keeps_a_plan_from_being_completed_comes_back_as_data() -> None:
    plan = intent(name="2x")
    cards = [{**card, "uuid": ""} for card in plan["topology"]["gpus"]]
    answer = resolved_plan(plan, {"model": MODEL}, IMAGE, cards, [])
    assert answer["plan"] == {}
    assert len(answer["problems"]) == 2
    assert "the driver does not see GPU 0000:00:00.0" in answer["problems"][0]


@pytest.mark.parametrize(
    ("state", "release", "out", "differs"),
    [
        ("active", "the plan's", [], False),
        # taken out by someone else: on its release all the same
        ("active", "the plan's", ["operator", "prober"], False),
        ("active", "the plan's", ["rollout"], True),
        ("failed", "the plan's", [], True),
        ("active", "another", [], True),
        ("inactive", None, [], True),
    ],
)
def test_which_replicas_are_switched(state: str, release: str | None, out: list[str], differs: bool) -> None:
    replicas = resolved()["replicas"]
    found = replicas[0]["release"] if release == "the plan's" else release
    status = [
        {"index": 0, "state": state, "release": found, "out": out},
        {"index": 1, "state": "active", "release": replicas[1]["release"], "out": []},
    ]
    assert differing_replicas(replicas, status) == (replicas[:1] if differs else [])


def test_on_a_bare_node_every_replica_is_switched() -> None:
    assert differing_replicas(resolved()["replicas"], []) == resolved()["replicas"]
