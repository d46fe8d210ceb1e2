"""What an operator reads of a rollout and of a fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.filter.rollout import (
    latest_rollouts,
    nodes_without,
    rollout_facts,
    status_answers,
    unfinished_rollouts,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.rollout_report import (
    batch_sizes,
    describe_ahead,
    describe_fleet,
    describe_stop,
    failure_text,
    fleet_rows,
    names,
    nodes_to_hold,
)

OLD, NEW = "0" * 12, "1" * 12


def due(differs: list[str], **more: Any) -> dict[str, Any]:
    record = {"targets": {"0": NEW, "1": NEW}, "before": {"0": OLD, "1": None}}
    return {"due": True, "differs": differs, "record": record, "current": {"0": OLD, "1": None}, **more}


def test_what_is_ahead_names_each_replica() -> None:
    nodes = {"n1": due(["0", "1"]), "n2": {"due": False, "differs": [], "record": {}}, "n3": due([])}
    assert describe_ahead(nodes, [1, "100%"]) == [
        "2 of 3 nodes to be changed, in batches of 1, 1",
        f"n1: replica 0: {OLD} -> {NEW}",
        f"n1: replica 1: none -> {NEW}",
        "n3: no release differs; its bake is left",
    ]
    nodes["n3"]["record"]["drained"] = "qualify"
    assert describe_ahead(nodes, [1])[-1] == "n3: no release differs; its replicas are started anew"


def test_a_replica_that_only_does_not_serve_is_said_to() -> None:
    text = describe_ahead({"n1": due(["0"], current={"0": NEW})}, [1])[1]
    assert text == f"n1: replica 0: {NEW}, which does not serve"


def test_nothing_is_ahead() -> None:
    assert describe_ahead({"n1": {"due": False}}, [1]) == ["no replica differs on 1 node: none is switched"]


@pytest.mark.parametrize(
    ("count", "batches", "sizes"),
    [
        (1, [1, "10%", "25%", "100%"], [1]),
        (20, [1, "10%", "25%", "100%"], [1, 2, 5, 12]),
        (3, [1, "10%", "25%", "100%"], [1, 1, 1]),
        (5, ["50%"], [2, 2, 1]),
        (4, [3], [3, 1]),
        (4, [], [4]),
        (4, ["2"], [2, 2]),
        (3, [0], [3]),
    ],
)
def test_batches_are_cut_as_ansible_cuts_them(count: int, batches: list[Any], sizes: list[int]) -> None:
    assert batch_sizes(count, batches) == sizes


def stopped() -> dict[str, dict[str, Any]]:
    def part(rollout: str = "r1", **more: Any) -> dict[str, Any]:
        return {"due": True, "record": {"rollout": rollout, "back_of": None}, **more}

    return {
        "n1": part(finished=True),
        "n2": part(failure={"task": "Switch", "result": {"msg": "exit code 3:\nEngineError"}}),
        "n3": part(),
        "n4": part("r2"),
        "n5": {"due": False},
    }


def test_where_it_stopped_why_and_what_now() -> None:
    lines = describe_stop(stopped(), ["n2", "n3"])
    assert lines == [
        "rollout r1 stopped at n2, n3",
        "- n2, Switch: exit code 3:\nEngineError",
        "- n3: the connection was lost; what its job does goes on there",
        "done: n1",
        "not touched: n4",
        "Go on: mend the cause and run rollout.yml again as before; it continues where it stopped",
        "Go back: ansible-playbook playbooks/rollback.yml -e rollback_of=r1",
    ]


def test_the_way_back_is_that_of_the_nodes_that_were_touched() -> None:
    """One of them was not part of the rollout that the others go on with."""
    nodes = stopped()
    nodes["n1"]["record"]["rollout"] = "r0"
    assert describe_stop(nodes, ["n2", "n3"], limit="a:!b")[-2:] == [
        "Go back: ansible-playbook playbooks/rollback.yml -e rollback_of=r1 -l 'a:!b'",
        "Go back: ansible-playbook playbooks/rollback.yml -e rollback_of=r0 -l 'a:!b'",
    ]


def test_a_rollback_that_stopped_is_gone_on_with() -> None:
    nodes = stopped()
    for node in nodes.values():
        node.setdefault("record", {})["back_of"] = "r7"
    lines = describe_stop(nodes, ["n2"], back=True)
    assert lines[0] == "rollback of r7 stopped at n2"
    assert lines[-1] == (
        "Go on: mend the cause and run it again: ansible-playbook playbooks/rollback.yml -e rollback_of=r7"
    )
    assert not any("Go back" in line for line in lines)


def test_after_a_batch_those_that_wait_are_renewed_and_at_the_end_let_go() -> None:
    def node(renewed: float, **more: Any) -> dict[str, Any]:
        return {"due": True, "record": {"renewed": renewed}, **more}

    nodes = {
        "n1": node(0, finished=True),
        "n2": node(100),
        "n3": node(101),
        "n4": {"due": False, "record": {"renewed": 0}},
    }
    assert nodes_to_hold(nodes, ["n1"], 400, 200) == ([], False)
    assert nodes_to_hold(nodes, ["n1"], 400, 200.5) == (["n2"], False)
    nodes["n1"]["finished"] = False
    assert nodes_to_hold(nodes, ["n1"], 400, 200) == (["n1", "n2", "n3"], True)


def test_of_many_nodes_the_first_are_named() -> None:
    assert names([f"n{number}" for number in range(15)]).endswith("n11 and 3 more")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"msg": "why"}, "why"),
        ({"msg": "One or more items failed", "results": [{"msg": "ok"}, {"failed": True, "msg": "why"}]}, "why"),
        ({"msg": "", "stderr": "why\n"}, "why"),
        ({}, "no reason was given"),
    ],
)
def test_why_a_task_failed(result: dict[str, Any], text: str) -> None:
    assert failure_text(result) == text


# The fleet

ROW = {
    "index": 0,
    "release": OLD,
    "model": "tiny",
    "state": "active",
    "out": [],
    "drift": [],
    "differs": False,
    "rollout": {"rollout": "r1", "state": "done", "target": OLD},
}


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [line.split(maxsplit=7) for line in describe_fleet(rows)]


def test_a_row_for_each_replica_of_each_node() -> None:
    rows = fleet_rows({"n1": {"rows": [ROW, {**ROW, "index": 1, "out": ["operator", "prober"]}]}})
    table = cells(rows)
    assert table[0] == ["node", "replica", "release", "model", "state", "out", "rollout", "drift"]
    assert describe_fleet(rows)[1].split() == ["n1", "0", OLD, "tiny", "active", "-", "r1", "done", "-"]
    assert "operator,prober" in describe_fleet(rows)[2]


def test_what_is_not_as_wanted_stands_at_the_end() -> None:
    row = {**ROW, "drift": ["cmdline differs"], "differs": True, "rollout": {**ROW["rollout"], "target": NEW}}  # type: ignore[dict-item]
    assert describe_fleet(fleet_rows({"n1": {"rows": [row]}}))[1].endswith(f"cmdline differs; has to run {NEW}")


def test_a_node_that_says_nothing_is_a_row_too() -> None:
    rows = fleet_rows(
        {
            "n1": {"error": "no route", "unreachable": True},
            "n2": {"error": "gpu-node: not found"},
            "n3": {"rows": [ROW]},
        }
    )
    assert [row["reachable"] for row in rows] == [False, True, True]
    lines = describe_fleet(rows)
    assert "unreachable" in lines[1] and lines[1].endswith("no route")
    assert "no answer" in lines[2]


def test_one_name_for_several_models_is_said() -> None:
    """Two nodes with another `revision` each: the table alone shows the same model on both."""
    old = {**ROW, "served_model_name": "tiny", "model_digest": OLD}
    new = {**old, "model_digest": NEW}
    both = [old, {**old, "index": 1}]
    other = {**old, "served_model_name": "other", "model_digest": "2" * 12}
    unknown = {**old, "model_digest": None}
    same: dict[str, dict[str, Any]] = {
        "n1": {"rows": both},
        "n2": {"rows": [old, other]},
        "n3": {"rows": [ROW, unknown]},
        "n4": {"error": "away"},
    }
    assert len(describe_fleet(fleet_rows(same))) == 1 + 7
    assert describe_fleet(fleet_rows({**same, "n5": {"rows": [new]}}))[1 + 8 :] == [
        f"'tiny' is served with 2 different models: {OLD} on n1, n2; {NEW} on n5: "
        "set one revision for all of these nodes and roll it out"
    ]


def test_an_older_command_says_less() -> None:
    row = {"index": 0, "release": None, "model": None, "state": "inactive", "out": ["unit"]}
    line = describe_fleet(fleet_rows({"n1": {"rows": [row]}}))[1]
    assert line.split() == ["n1", "0", "-", "-", "inactive", "unit", "-", "-"]


def test_what_the_nodes_said_is_read() -> None:
    hostvars = {
        "n1": {"rollout_status": {"stdout": json.dumps([ROW])}},
        "n2": {"rollout_status": {"unreachable": True, "msg": "no route"}},
        "n3": {
            "rollout_status": {
                "rc": 2,
                "stdout": "",
                "msg": "non-zero return code",
                "stderr": "a\ngpu-node: error: no node.json",
            }
        },
        "n4": {},
    }
    found = status_answers(list(hostvars), hostvars)
    assert found["n1"] == {"rows": [ROW]}
    assert found["n2"] == {"error": "no route", "unreachable": True}
    assert found["n3"] == {"error": "gpu-node: error: no node.json", "unreachable": False}
    assert found["n4"]["unreachable"] is True


def test_facts_of_nodes_that_did_not_come_far() -> None:
    hostvars = {"n1": {"rollout_result": {"due": True}, "rollout_finished": True}, "n2": {}}
    found = rollout_facts(["n1", "n2"], hostvars)
    assert (found["n1"]["due"], found["n1"]["finished"]) == (True, True)
    assert found["n2"] == {"finished": False, "failure": {}}
    assert nodes_without(["n1", "n2"], hostvars, "rollout_result") == ["n2"]


def test_a_drained_rollout_is_unfinished_while_a_node_has_its_steps_left() -> None:
    def look(**found: Any) -> dict[str, Any]:
        return {"__rollout_look": {"found": {"state": "done", "drained": "driver", "drained_done": True, **found}}}

    hostvars = {
        "n1": look(rollout="r1"),
        "n2": look(rollout="r2", state="failed"),
        "n3": look(rollout="r3", drained_done=False),
        "n4": look(rollout="r4", state="failed", drained="qualify"),
        "n5": {"__rollout_look": {"found": {}}},
        "n6": {"__rollout_look": {"unreachable": True}},
        "n7": {},
        # written by an earlier version
        "n8": {"__rollout_look": {"found": {"rollout": "r8", "state": "failed"}}},
    }
    assert unfinished_rollouts(list(hostvars), hostvars, "driver") == ["r2", "r3"]
    assert unfinished_rollouts(list(hostvars), hostvars, "") == []


def test_the_newest_rollout_comes_first_with_the_nodes_whose_latest_it_is() -> None:
    def look(**found: Any) -> dict[str, Any]:
        return {"__rollout_look": {"found": found}}

    hostvars = {
        "n1": look(rollout="r0", since="2026-12-01T08:00:00+00:00"),
        "n2": look(rollout="r1", since="2026-12-02T08:00:00+00:00"),
        "n3": {"__rollout_look": {"found": {}}},
        # was taken back already, or is being
        "n4": look(rollout="b", since="2026-12-03T08:00:00+00:00", back_of="r1"),
        "n5": {},
    }
    found = latest_rollouts(list(hostvars), hostvars)
    assert list(found.items()) == [("r1", ["n4", "n2"]), ("r0", ["n1"])]
