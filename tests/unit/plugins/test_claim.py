"""Who may say what a node has to run: the verdict, the module on a made-up node, and the action on this controller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.action import claim as claim_action
from ansible_collections.serving.gpu_node.plugins.module_utils.claim import Seen, Verdict, Wish, decide, duration
from ansible_collections.serving.gpu_node.plugins.modules import claim

from tests.unit.plugins.module_runner import run_module

ALICE = {"host": "ctl", "machine": "m1", "pid": 10, "started": "Tue Dec 1 08:00:00 2026", "space": "pid:[1]"}
BOB = {**ALICE, "pid": 11, "started": "Tue Dec 1 09:00:00 2026"}
FAR = {**ALICE, "host": "far"}
OLD, NEW, OTHER = "0" * 12, "1" * 12, "2" * 12
BOTH = {"0": NEW, "1": NEW}
NOW = 1_000_000.0


def record(**more: Any) -> dict[str, Any]:
    """What a rollout of Alice's left a minute ago, in the middle."""
    return {
        "schema": 1,
        "rollout": "a",
        "by": "alice@ctl",
        "controller": ALICE,
        "since": "2026-12-01T08:00:00+00:00",
        "renewed": NOW - 60,
        "state": "running",
        "step": "replica 0: gate",
        "error": "",
        "outcome": None,
        "targets": BOTH,
        "before": {"0": OLD, "1": OLD},
        "back_of": None,
        "drained": "",
        "drained_done": False,
        "lease": 21600,
        **more,
    }


def wish(**more: Any) -> Wish:
    made: dict[str, Any] = {
        "rollout": "b",
        "by": "bob@ctl",
        "controller": BOB,
        "now": NOW,
        "since": "2026-12-01T09:00:00+00:00",
        "targets": BOTH,
    }
    return Wish(**{**made, **more})


def back(**more: Any) -> Wish:
    return wish(targets={}, back=True, **more)


def seen(zero: str | None = OLD, one: str | None = OLD, **more: Any) -> Seen:
    return Seen({"0": zero, "1": one}, **more)


def taken(verdict: Verdict) -> dict[str, Any]:
    """The record of a verdict that takes the node."""
    assert (verdict.conflict, verdict.ask, verdict.changed) == ("", False, True)
    assert verdict.record is not None
    return verdict.record


# What a rollout finds


def test_a_node_that_nobody_has_is_taken() -> None:
    verdict = decide(None, wish(), seen(OLD, NEW))
    made = taken(verdict)
    assert verdict.differs == ("0",)
    assert (made["rollout"], made["by"], made["controller"], made["state"]) == ("b", "bob@ctl", BOB, "staged")
    assert (made["targets"], made["before"]) == (BOTH, {"0": OLD, "1": NEW})


def test_a_bare_node_served_nothing_before() -> None:
    assert taken(decide(None, wish(), seen(None, None)))["before"] == {"0": None, "1": None}


def test_nothing_changes_where_the_same_was_done() -> None:
    done = record(state="done")
    verdict = decide(done, wish(), seen(NEW, NEW))
    assert (verdict.record, verdict.differs, verdict.changed, verdict.renewed) == (done, (), False, False)


def test_a_replica_that_left_its_release_is_brought_back() -> None:
    assert decide(record(state="done"), wish(), seen(NEW, OTHER)).differs == ("1",)
    assert decide(record(state="done"), wish(), seen(NEW, NEW, unsettled=frozenset("0"))).differs == ("0",)


def test_a_node_where_nothing_differs_is_done_at_once() -> None:
    assert taken(decide(None, wish(), seen(NEW, NEW)))["state"] == "done"


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_rollout_that_ended_holds_nobody_up(state: str) -> None:
    assert taken(decide(record(state=state), wish(targets={"0": OTHER}), seen()))["rollout"] == "b"


@pytest.mark.parametrize("state", ["running", "staged", "failed"])
def test_what_served_first_stays_the_way_back_of_an_unfinished_rollout(state: str) -> None:
    # replica 0 was switched already
    verdict = decide(record(state=state), wish(), seen(NEW, OLD, alive=False))
    assert taken(verdict)["before"] == {"0": OLD, "1": OLD}
    assert verdict.differs == ("1",)


def test_other_releases_have_their_own_way_back() -> None:
    verdict = decide(record(state="failed"), wish(targets={"0": OTHER, "1": OTHER}), seen(NEW, OLD))
    assert taken(verdict)["before"] == {"0": NEW, "1": OLD}


@pytest.mark.parametrize("state", ["running", "staged", "failed", "done"])
def test_who_wants_the_same_goes_on_with_the_rollout_that_wanted_it_first(state: str) -> None:
    verdict = decide(record(state=state), wish(), seen(NEW, OTHER, alive=False))
    made = taken(verdict)
    assert (made["rollout"], made["by"], made["controller"], made["since"]) == (
        "a",
        "bob@ctl",
        BOB,
        "2026-12-01T09:00:00+00:00",
    )
    assert taken(decide(record(state=state), wish(targets={"0": OTHER}), seen(alive=False)))["rollout"] == "b"


def test_a_replica_that_died_does_not_cost_the_way_back() -> None:
    again = taken(decide(record(state="done"), wish(), seen(NEW, NEW, unsettled=frozenset("0"))))
    assert again["before"] == {"0": OLD, "1": OLD}
    verdict = decide({**again, "state": "done"}, back(), seen(NEW, NEW))
    assert (taken(verdict)["targets"], verdict.differs) == ({"0": OLD, "1": OLD}, ("0", "1"))


@pytest.mark.parametrize("state", ["failed", "running"])
def test_a_node_whose_bake_failed_or_was_cut_short_still_has_to_bake(state: str) -> None:
    verdict = decide(record(state=state), wish(), seen(NEW, NEW, alive=False))
    assert (taken(verdict)["state"], verdict.differs) == ("staged", ())
    # nothing was switched here, so there is nothing to prove
    alike = record(state=state, before=BOTH)
    assert taken(decide(alike, wish(), seen(NEW, NEW, alive=False)))["state"] == "done"


def test_the_way_back_that_becomes_the_wish_stays_the_way_back() -> None:
    """The inventory was mended after it, and a replica is down: going back once more is no way forward."""
    gone_back = record(state="done", targets={"0": OLD}, before={"0": NEW}, back_of="a", rollout="x")
    again = taken(decide(gone_back, wish(targets={"0": OLD}), seen(OLD, unsettled=frozenset("0"))))
    assert (again["rollout"], again["back_of"]) == ("x", "a")
    assert "taken back already" in decide({**again, "state": "done"}, back(), seen(OLD)).note


def test_a_release_that_never_passed_its_gates_is_no_way_back() -> None:
    """v1 -> v2 is cut short by a reboot, v3 takes its place."""
    half = seen(OTHER, OLD, unsettled=frozenset("0"), served={"0": OLD}, alive=False)
    made = taken(decide(record(targets={"0": OTHER, "1": OTHER}), wish(), half))
    assert made["before"] == {"0": OLD, "1": OLD}
    first = seen(OTHER, None, unsettled=frozenset("01"), served={"0": None})
    assert taken(decide(None, wish(), first))["before"] == {"0": None, "1": None}


def test_our_own_claim_is_only_renewed() -> None:
    mine = record(controller=BOB, rollout="b")
    verdict = decide(mine, wish(), seen())
    assert (verdict.changed, verdict.renewed, verdict.differs) == (False, True, ("0", "1"))
    assert verdict.record == {**mine, "renewed": NOW}


# What is done on a drained node

DRIVER = {"drained": "driver"}
STEPS_DONE = {"drained": "driver", "drained_done": True}


def test_a_node_is_drained_though_nothing_differs_and_by_a_rollout_of_its_own() -> None:
    verdict = decide(record(state="done"), wish(**DRIVER), seen(NEW, NEW))
    made = taken(verdict)
    assert (made["rollout"], made["state"], verdict.differs) == ("b", "staged", ())
    assert (made["drained"], made["drained_done"], made["before"]) == ("driver", False, BOTH)


def test_steps_that_were_done_are_not_done_again_while_their_rollout_is_unfinished_elsewhere() -> None:
    done = record(state="done", before=BOTH, **STEPS_DONE)
    verdict = decide(done, wish(**DRIVER, unfinished=frozenset("a")), seen(NEW, NEW))
    assert (verdict.record, verdict.changed, verdict.differs) == (done, False, ())
    # it ended everywhere, or what is unfinished is another one: the operator wants them again
    for unfinished in ("", "z"):
        again = decide(done, wish(**DRIVER, unfinished=frozenset(unfinished)), seen(NEW, NEW))
        assert (taken(again)["rollout"], taken(again)["state"]) == ("b", "staged")
    other = decide(done, wish(drained="qualify", unfinished=frozenset("a")), seen(NEW, NEW))
    assert taken(other)["state"] == "staged"


@pytest.mark.parametrize(
    "left",
    [
        {"state": "running", **DRIVER},
        {"state": "failed", **STEPS_DONE},
        # the step failed, and its replicas were started again
        {"state": "done", **DRIVER},
    ],
)
def test_steps_that_are_left_are_done_by_the_same_rollout(left: dict[str, Any]) -> None:
    found = record(before=BOTH, **left)
    verdict = decide(found, wish(**DRIVER, unfinished=frozenset("a")), seen(NEW, NEW, alive=False))
    made = taken(verdict)
    assert (made["rollout"], made["state"], made["drained_done"]) == ("a", "staged", False)
    # a driver may bring other releases
    moved = decide(found, wish(**DRIVER, targets={"0": OTHER, "1": OTHER}), seen(NEW, NEW, alive=False))
    assert (taken(moved)["rollout"], taken(moved)["before"]) == ("a", BOTH)


def test_our_own_steps_are_noted_as_done_and_keep_rollout_and_way_back() -> None:
    mine = record(controller=BOB, rollout="a", **DRIVER)
    verdict = decide(mine, wish(**STEPS_DONE, targets={"0": OTHER, "1": OTHER}), seen(unsettled=frozenset("01")))
    made = taken(verdict)
    assert (made["rollout"], made["state"], made["drained_done"]) == ("a", "staged", True)
    assert made["before"] == {"0": OLD, "1": OLD}
    same = decide(mine, wish(**STEPS_DONE), seen(unsettled=frozenset("01")))
    assert same.record == {**mine, "renewed": NOW, "drained_done": True}


def test_who_rolls_out_without_the_steps_gives_them_up() -> None:
    made = taken(decide(record(state="failed", **DRIVER), wish(), seen(OLD, OLD)))
    assert (made["rollout"], made["drained"]) == ("a", "")


def test_a_job_that_outlived_its_controller_keeps_the_steps_that_were_done() -> None:
    verdict = decide(record(**STEPS_DONE), wish(**DRIVER), seen(NEW, OLD, job=True, alive=False))
    assert taken(verdict)["drained_done"] is True


# Whose it is


def test_a_controller_on_this_machine_is_looked_up() -> None:
    assert decide(record(), wish(), seen()).ask


def test_a_rollout_whose_controller_runs_is_left_alone() -> None:
    verdict = decide(record(), wish(take_over="a"), seen(alive=True))
    assert (verdict.changed, verdict.ask) == (False, False)
    for part in ("rollout a of alice@ctl", "2026-12-01T08:00:00", "replica 0: gate", "60 s ago", "process 10"):
        assert part in verdict.conflict


def test_a_rollout_whose_controller_is_gone_is_taken_over() -> None:
    verdict = decide(record(), wish(targets={"0": OTHER}), seen(alive=False))
    assert taken(verdict)["rollout"] == "b"
    assert "takes over: rollout a of alice@ctl" in verdict.note


@pytest.mark.parametrize("theirs", [FAR, {**ALICE, "space": "pid:[2]"}, {**ALICE, "machine": "m2"}])
def test_another_controller_is_left_alone_until_its_lease_is_over(theirs: dict[str, Any]) -> None:
    held = record(controller=theirs, renewed=NOW - 700, lease=700)
    # the lease of who holds the node, and not of who wants it
    refused = decide(held, wish(lease=600), seen())
    assert "rollout_take_over=a" in refused.conflict
    assert "for 12 min (its rollout_lease)" in refused.conflict
    over = decide({**held, "lease": 699}, wish(), seen())
    assert "rollout_lease" in over.note
    assert taken(over)["lease"] == 21600
    # a record of an earlier version has none
    del held["lease"]
    assert "rollout_lease" in decide(held, wish(lease=699), seen()).note


def test_a_running_job_is_a_sign_of_its_rollout() -> None:
    held = record(controller=FAR, renewed=NOW - 10**6)
    assert "0 s ago" in decide(held, wish(), seen(job=True)).conflict


def test_another_controller_that_is_known_to_be_gone_is_taken_over_by_name() -> None:
    assert decide(record(controller=FAR), wish(take_over="other"), seen()).conflict
    made = taken(decide(record(controller=FAR), wish(take_over="a"), seen()))
    assert (made["controller"], made["by"]) == (BOB, "bob@ctl")


# A sign of life, and letting go

MINE = {"controller": BOB, "state": "staged"}


def test_a_node_that_waits_is_shown_a_sign_of_life() -> None:
    verdict = decide(record(**MINE), wish(hold="renew"), seen())
    assert verdict == Verdict(record(**MINE, renewed=NOW), renewed=True)


@pytest.mark.parametrize("state", ["staged", "running"])
def test_a_rollout_that_has_ended_holds_no_node(state: str) -> None:
    verdict = decide(record(controller=BOB, state=state), wish(hold="release"), seen())
    released = taken(verdict)
    assert (released["state"], released["step"]) == ("failed", "let go, its rollout has ended")
    colleague = decide(released, back(controller=FAR), seen())
    assert (taken(colleague)["back_of"], colleague.differs) == ("a", ())


@pytest.mark.parametrize("hold", ["renew", "release"])
@pytest.mark.parametrize("found", [None, record(), record(controller=BOB, state="done")])
def test_of_what_is_not_ours_to_hold_nothing_changes(hold: str, found: dict[str, Any] | None) -> None:
    assert decide(found, wish(hold=hold), seen()) == Verdict(found)


def test_a_job_that_runs_is_not_let_go() -> None:
    mine = record(controller=BOB)
    assert decide(mine, wish(hold="release"), seen(job=True)) == Verdict(mine)


# A job that outlived its controller


def test_a_job_that_still_runs_for_the_same_is_gone_on_with_under_its_id() -> None:
    verdict = decide(record(), wish(), seen(NEW, OLD, job=True, alive=False))
    assert taken(verdict) == record(controller=BOB, renewed=NOW)


def test_a_job_that_still_runs_for_something_else_is_waited_for() -> None:
    verdict = decide(record(), wish(targets={"0": OTHER}), seen(job=True, alive=False))
    assert not verdict.changed
    assert "until it ends" in verdict.conflict


# The way back


def test_the_way_back_is_what_served_before() -> None:
    verdict = decide(record(state="done"), back(), seen(NEW, NEW))
    made = taken(verdict)
    assert (made["targets"], made["before"], made["back_of"]) == ({"0": OLD, "1": OLD}, BOTH, "a")
    assert verdict.differs == ("0", "1")


def test_only_the_rollout_that_is_taken_back_goes_back() -> None:
    """R1 changed one node and failed, R0 is what the others have."""
    other = record(state="done", rollout="r0")
    verdict = decide(other, back(back_of="r1"), seen(NEW, NEW))
    assert (verdict.record, verdict.changed, verdict.differs) == (other, False, ())
    assert verdict.note == "nothing of rollout r1 to take back: its latest is r0"
    assert taken(decide(record(rollout="r1"), back(back_of="r1"), seen(NEW, NEW, alive=False)))["back_of"] == "r1"
    # also one that is held by somebody else is left alone
    assert not decide(record(rollout="r0", controller=FAR), back(back_of="r1"), seen()).conflict
    half = record(rollout="b", back_of="r1", state="failed", targets={"0": OLD}, before={"0": NEW})
    assert taken(decide(half, back(back_of="r1"), seen(NEW)))["targets"] == {"0": OLD}


def test_only_what_was_switched_goes_back() -> None:
    verdict = decide(record(state="failed"), back(), seen(NEW, OLD))
    assert verdict.differs == ("0",)
    untouched = decide(record(state="staged"), back(), seen(OLD, OLD, alive=False))
    assert (untouched.differs, taken(untouched)["state"]) == ((), "done")


def test_the_way_back_is_a_rollout_of_its_own_also_where_nothing_differs() -> None:
    made = taken(decide(record(state="failed", before=BOTH), back(), seen(NEW, NEW)))
    assert (made["rollout"], made["back_of"], made["state"]) == ("b", "a", "done")


def test_going_back_twice_is_going_back_once() -> None:
    once = taken(decide(record(state="done"), back(), seen(NEW, NEW)))
    again = decide({**once, "state": "done"}, back(), seen(OLD, OLD))
    assert (again.changed, again.renewed, again.differs) == (False, False, ())
    assert "taken back already" in again.note


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_way_back_that_was_interrupted_goes_on_in_the_same_direction(state: str) -> None:
    half = {**taken(decide(record(state="done"), back(), seen(NEW, NEW))), "state": state}
    verdict = decide(half, back(rollout="c", controller=ALICE), seen(OLD, NEW, alive=False))
    made = taken(verdict)
    assert (made["targets"], made["back_of"], verdict.differs) == ({"0": OLD, "1": OLD}, "a", ("1",))


def test_where_nothing_served_before_there_is_no_way_back() -> None:
    assert "no rollout is known" in decide(None, back(), seen()).note
    first = record(state="done", before={"0": None, "1": None})
    verdict = decide(first, back(), seen(None, None))
    assert (verdict.changed, verdict.differs) == (False, ())


@pytest.mark.parametrize(("seconds", "text"), [(-3, "0 s"), (119, "119 s"), (120, "2 min"), (21600, "6 h")])
def test_an_age_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# The module


class Node:
    """A node's folders and systemd, as far as the module looks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units = {"gpu-node-rollout.service": "ActiveState=inactive\nSubState=dead\n"}
        for index in "01":
            (root / "replicas" / index / "out").mkdir(parents=True)
            self.point(index, OLD)

    def point(self, index: str, release: str) -> None:
        link = self.root / "replicas" / index / "current"
        link.unlink(missing_ok=True)
        link.symlink_to(f"../../releases/{release}")

    def run_command(self, argv: list[str]) -> tuple[int, str, str]:
        return 0, self.units.get(argv[-1], "ActiveState=active\nSubState=running\n"), ""

    def ask(self, check: bool = False, **options: Any) -> dict[str, Any]:
        base = {
            "targets": BOTH,
            "state_dir": str(self.root),
            "lock": str(self.root / "lock"),
            "rollout": "b",
            "by": "bob@ctl",
            "controller": BOB,
        }
        return run_module(claim.main, {**base, **options}, check)

    def written(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.root / "wanted.json").read_text())
        return value


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    monkeypatch.setattr(AnsibleModule, "run_command", lambda self, argv: made.run_command(argv))
    monkeypatch.setattr(AnsibleModule, "get_bin_path", lambda self, name: f"/usr/bin/{name}")
    return made


def test_the_record_is_for_everybody_to_read(node: Node) -> None:
    answer = node.ask()
    assert (answer["changed"], answer["id"], answer["differs"]) == (True, "b", ["0", "1"])
    assert node.written() == answer["record"]
    assert (node.root / "wanted.json").stat().st_mode & 0o777 == 0o644


def test_a_dry_run_writes_nothing(node: Node) -> None:
    answer = node.ask(check=True)
    assert (answer["changed"], answer["differs"]) == (True, ["0", "1"])
    assert sorted(path.name for path in node.root.iterdir()) == ["replicas"]


def test_a_second_run_changes_nothing(node: Node) -> None:
    node.ask()
    for index in "01":
        node.point(index, NEW)
    (node.root / "wanted.json").write_text(json.dumps({**node.written(), "state": "done"}))
    before = node.written()
    answer = node.ask(rollout="c", controller=ALICE)
    assert (answer["changed"], answer["id"], answer["differs"]) == (False, "b", [])
    assert node.written() == before


@pytest.mark.parametrize("what", ["out", "half", "down", "held"])
def test_a_replica_that_does_not_serve_its_release_differs(node: Node, what: str) -> None:
    node.point("0", NEW)
    node.point("1", NEW)
    if what == "out":
        (node.root / "replicas/1/out/rollout").write_text("{}")
    elif what == "half":
        (node.root / "replicas/1/switch.json").write_text('{"outcome": null, "step": "in"}')
    elif what == "down":
        node.units["vllm-replica@1.service"] = "ActiveState=failed\nSubState=failed\n"
    else:
        (node.root / "held").write_text("{}")
    assert node.ask()["differs"] == (["0", "1"] if what == "held" else ["1"])


def test_a_replica_that_an_operator_took_out_serves_its_release_all_the_same(node: Node) -> None:
    node.point("0", NEW)
    node.point("1", NEW)
    (node.root / "replicas/1/out/operator").write_text("{}")
    (node.root / "replicas/1/switch.json").write_text('{"outcome": "new", "step": "in"}')
    assert node.ask()["differs"] == []


@pytest.mark.parametrize(
    ("journal", "before"),
    [
        ({"outcome": None, "step": "gate", "from": OLD}, OLD),
        ({"outcome": None, "step": "start", "from": None}, None),
        ({"outcome": "failed", "step": "give_up", "from": OLD}, OLD),
        # it passed its gates
        ({"outcome": None, "step": "in", "from": OLD}, OTHER),
        ({"outcome": "new", "step": "in", "from": OLD}, OTHER),
        ([], OTHER),
    ],
)
def test_what_served_before_is_what_passed_its_gates(node: Node, journal: Any, before: str | None) -> None:
    node.point("1", OTHER)
    (node.root / "replicas/1/out/rollout").write_text("{}")
    (node.root / "replicas/1/switch.json").write_text(json.dumps(journal))
    answer = node.ask()
    assert answer["record"]["before"] == {"0": OLD, "1": before}
    assert answer["current"] == {"0": OLD, "1": OTHER}


def test_what_was_looked_up_counts_for_that_rollout_alone(node: Node) -> None:
    (node.root / "wanted.json").write_text(json.dumps(record()))
    assert node.ask()["ask"] is True
    # another one came meanwhile
    assert node.ask(seen_rollout="z", seen_alive=False)["ask"] is True
    assert node.written() == record()
    assert node.ask(seen_rollout="a", seen_alive=False)["changed"] is True
    assert node.written()["by"] == "bob@ctl"


def test_a_job_is_seen(node: Node) -> None:
    (node.root / "wanted.json").write_text(json.dumps(record()))
    node.units["gpu-node-rollout.service"] = "ActiveState=active\nSubState=running\n"
    assert node.ask(seen_rollout="a", seen_alive=False)["record"]["state"] == "running"
    # one that ended stays loaded
    node.units["gpu-node-rollout.service"] = "ActiveState=active\nSubState=exited\n"
    (node.root / "wanted.json").write_text(json.dumps(record()))
    assert node.ask(seen_rollout="a", seen_alive=False)["record"]["state"] == "staged"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"rollout": 3}', json.dumps({**record(), "state": "new"}), json.dumps({**record(), "lease": "6 h"})],
)
def test_a_file_that_is_no_record_is_named(node: Node, text: str) -> None:
    (node.root / "wanted.json").write_text(text)
    answer = node.ask()
    assert answer["failed"]
    assert "wanted.json is no record of a rollout" in answer["msg"]
    assert (node.root / "wanted.json").read_text() == text


def test_nothing_to_take_back_has_no_id(node: Node) -> None:
    answer = node.ask(targets={}, back=True)
    assert (answer["changed"], answer["id"], answer["differs"]) == (False, "", [])


# The action


def run_action(
    monkeypatch: pytest.MonkeyPatch, folder: Path, answers: list[dict[str, Any]], check: bool = False, **args: Any
) -> Any:
    """Run it on a made-up node; return its result, what the module was asked, and what was shown."""
    asked: list[dict[str, Any]] = []
    shown: list[str] = []
    monkeypatch.setattr("ansible.constants.DEFAULT_LOCAL_TMP", str(folder))
    display = SimpleNamespace(display=shown.append, warning=shown.append)
    monkeypatch.setattr(claim_action, "Display", lambda: display)
    task = MagicMock(check_mode=check, args={"targets": BOTH, **args}, async_val=0, delegate_to=None)
    action = claim_action.ActionModule(task, MagicMock(), MagicMock(), MagicMock(), MagicMock(), None)

    def execute(module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        asked.append(module_args)
        if "lost" in answers[0]:
            raise AnsibleConnectionFailure(answers[0]["lost"])
        return {"note": "", "conflict": "", "ask": False, **answers[min(len(asked), len(answers)) - 1]}

    monkeypatch.setattr(action, "_execute_module", execute)
    return action.run(task_vars={"inventory_hostname": "n1"}), asked, shown


def test_all_workers_of_a_run_are_the_same_rollout(tmp_path: Path) -> None:
    first = claim_action.identity(tmp_path, os.getpid())
    assert claim_action.identity(tmp_path, 1) == first
    assert first["rollout"].endswith(f"-{os.getpid()}")
    assert first["controller"]["pid"] == os.getpid()
    assert claim_action.still_runs(first["controller"])


def test_a_machine_is_told_from_another_one_of_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("one-start-of-one-machine\n")
    monkeypatch.setattr(claim_action, "_BOOT_ID", tmp_path / "boot_id")
    controller = claim_action.identity(tmp_path, os.getpid())["controller"]
    assert controller["machine"] == "one-start-of-one-machine"
    monkeypatch.setattr(claim_action, "_BOOT_ID", tmp_path / "none")
    assert claim_action.machine() == f"{uuid.getnode():012x}"


def test_a_process_that_ended_runs_no_more() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = claim_action.process_start(process.pid)
        assert claim_action.still_runs({"pid": process.pid, "started": started})
        process.kill()
    assert not claim_action.still_runs({"pid": process.pid, "started": started})
    # its number was given to another one
    assert not claim_action.still_runs({"pid": os.getpid(), "started": "Tue Dec 1 08:00:00 2020"})


def test_a_start_may_be_told_a_second_off() -> None:
    assert claim_action.same_start("Tue Dec 1 08:00:00 2026", "Tue Dec  1 08:00:01 2026")
    assert not claim_action.same_start("Tue Dec 1 08:00:00 2026", "Tue Dec 1 08:00:09 2026")


def test_a_controller_without_ps_still_knows_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    started = claim_action.process_start(os.getpid())
    assert "ticks" in started
    assert claim_action.still_runs({"pid": os.getpid(), "started": started})


def test_the_controller_is_looked_up_when_the_node_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask = {"ask": True, "record": record(controller={"host": "x", "pid": 0, "started": "then"})}
    result, asked, shown = run_action(monkeypatch, tmp_path, [ask, {"note": "takes over: it"}])
    assert not result.get("failed")
    assert (asked[1]["seen_rollout"], asked[1]["seen_alive"]) == ("a", False)
    assert shown == ["  [n1] takes over: it"]


def test_a_refusal_names_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, _, _ = run_action(monkeypatch, tmp_path, [{"conflict": "rollout a has this node"}])
    assert (result["failed"], result["msg"]) == (True, "n1: rollout a has this node")


def test_a_dry_run_only_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result, _, shown = run_action(monkeypatch, tmp_path, [{"conflict": "rollout a has this node"}], check=True)
    assert not result.get("failed")
    assert shown == ["n1: rollout a has this node"]


def test_a_node_that_others_keep_taking_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ask = {"ask": True, "record": record(controller={"host": "x", "pid": 0, "started": "then"})}
    result, asked, _ = run_action(monkeypatch, tmp_path, [ask])
    assert result["failed"]
    assert len(asked) == 6


@pytest.mark.parametrize(
    "answer", [{"lost": "no route to it"}, {"failed": True, "rc": 1, "exception": "...", "msg": "no route to it"}]
)
def test_a_node_that_does_not_hear_that_it_is_let_go_stops_nothing(
    answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, asked, shown = run_action(monkeypatch, tmp_path, [answer], hold="release")
    assert (result, shown) == ({"changed": False, "msg": "no route to it"}, ["n1: no route to it"])
    assert asked[0]["controller"]["pid"] == os.getppid()
