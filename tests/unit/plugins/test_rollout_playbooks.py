"""The order of a rollout over a fleet, and where it stops; the roles around it and the nodes are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.plugins.rollout_stage import Stage

CONVERGE = ["replica/retire", "node_tool/main", "replica/main", "balancer/main"]
STAGE = ["serving_plan/resolve", "replica/write_releases", "claim 111111111111"]
BAKE = " --bake 60 --error-budget 0.01"


def stage(folder: Path, **hosts: dict[str, Any]) -> Stage:
    return Stage(folder, hosts)


def switched(found: Stage) -> list[str]:
    """The nodes whose job was run, in order."""
    return [line.split()[0] for line in found.calls() if "gpu-node-rollout: rollout" in line]


@pytest.mark.full
def test_a_node_alone_goes_from_plan_to_served(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={})
    found.build()
    (tmp_path / "both.yml").write_text((tmp_path / "plan.yml").read_text() + (tmp_path / "artifacts.yml").read_text())
    (tmp_path / "both.yml").write_text(
        "".join(f"- {{ansible.builtin.import_playbook: {name}.yml}}\n" for name in ("plan", "artifacts", "serve"))
    )
    counts, output = found.run("both", "-e", "{rollout_drained_tasks: /nowhere}")
    assert counts["n1"]["failed"] == 1, output
    counts, output = found.run("both")
    assert counts["n1"]["failed"] == 0, output
    # no bake, and nobody leaves
    assert found.calls("n1") == [*STAGE, *CONVERGE, "gpu-node-rollout: rollout r1"]
    found.hosts["n1"] = {"breaks": "balancer/main"}
    counts, output = found.run("both")
    assert counts["n1"]["failed"] == 1
    assert "balancer/main broke" in output.rpartition("TASK [serving.gpu_node.rollout : Fail")[2]
    assert found.calls("n1") == [*STAGE, *CONVERGE, "release"]


def test_everything_is_on_all_nodes_before_anything_is_switched_on_one(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={}, n2={"differs": []}, n3={})
    counts, output = found.run("rollout", "-e", "rollout_on_drain_timeout=cut")
    assert all(count["failed"] == 0 for count in counts.values()), output
    assert "2 of 3 nodes to be changed, in batches of 1, 1" in output
    assert "n1: replica 0: 000000000000 -> 111111111111" in output
    calls = found.calls()
    first = calls.index("n1 replica/retire")
    for name in ("n1", "n2", "n3"):
        assert f"{name} claim 111111111111" in calls[:first]
        assert found.calls(name)[2:5] == STAGE
    assert switched(found) == ["n1", "n3"]
    turn = ["claim 111111111111", *CONVERGE, f"gpu-node-rollout: rollout r1{BAKE} --force-drain"]
    assert found.calls("n3")[5:] == turn
    # a node's own parts change in its own batch, and those of the others come last
    assert calls.index("n3 replica/retire") > calls.index(f"n1 {turn[-1]}")
    assert found.calls("n2")[5:] == CONVERGE
    assert calls.index("n2 replica/retire") > calls.index(f"n3 {turn[-1]}")


@pytest.mark.full
def test_nothing_differs(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={"differs": []}, n2={"differs": []})
    counts, output = found.run("rollout")
    assert all(count["failed"] == 0 for count in counts.values()), output
    assert "no replica differs on 2 nodes: none is switched" in output
    assert switched(found) == []


def test_a_node_that_fails_stops_the_rollout_and_says_how_to_go_on(tmp_path: Path) -> None:
    found = stage(
        tmp_path,
        n1={},
        n2={"jobs": {"rollout": "exit code 3; its last lines: EngineError"}},
        n3={},
        n4={},
        n5={"differs": []},
    )
    counts, output = found.run("rollout")
    assert counts["n2"]["failed"] == 1
    assert switched(found) == ["n1", "n2"]
    # nobody waits for a rollout that has ended
    assert [line for line in found.calls() if line.endswith(" release")] == ["n2 release", "n3 release", "n4 release"]
    for part in (
        "rollout r1 stopped at n2",
        "EngineError",
        "done: n1",
        "not touched: n3, n4",
        "run rollout.yml again",
        "Go back: ansible-playbook playbooks/rollback.yml -e rollback_of=r1",
    ):
        assert part in output


@pytest.mark.full
def test_nodes_that_wait_get_a_sign_of_life_between_two_batches(tmp_path: Path) -> None:
    long_ago = {"renewed": 0}
    found = stage(tmp_path, n1={}, n2={}, n3=long_ago, n4=long_ago, n5=long_ago, n6={})
    found.group["rollout_batches"] = [2, 2, 2]
    counts, output = found.run("rollout")
    assert all(count["failed"] == 0 for count in counts.values()), output
    renewed = [line for line in found.calls() if "renew" in line]
    assert sorted(renewed[:3]) == ["n3 renew", "n4 renew", "n5 renew"]
    assert renewed[3:] == ["n5 renew"]


def test_a_node_that_cannot_be_claimed_ends_it_and_holds_up_nobody(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={}, n2={"refuses": "the disk is full"})
    _, output = found.run("rollout")
    assert "see above what is the matter with n2" in output
    assert found.calls("n1")[-1] == "release"


@pytest.mark.full
def test_a_node_whose_own_parts_cannot_be_changed_stops_it_too(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={"breaks": "balancer/main"}, n2={})
    _, output = found.run("rollout")
    assert "rollout r1 stopped at n1" in output
    assert "balancer/main broke" in output
    assert switched(found) == []


@pytest.mark.parametrize(
    "fake", [{"broken": "plan"}, {"broken": "artifacts"}, {"conflict": "rollout x of bob has this node"}]
)
def test_a_node_that_cannot_take_part_ends_it_before_any_is_claimed(tmp_path: Path, fake: dict[str, Any]) -> None:
    found = stage(tmp_path, n1={}, n2=fake)
    counts, output = found.run("rollout", "-l", "n1,n2")
    assert counts["n1"]["failed"] == 1
    assert "No replica was touched" in output
    assert "-l 'n1,n2:!n2'" in output
    assert switched(found) == []
    assert fake.get("conflict", "") in output
    assert "n1 claim 111111111111" not in found.calls()
    assert not any("balancer" in line for line in found.calls())


@pytest.mark.full
def test_batches_are_the_operators_to_choose(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={}, n2={"jobs": {"rollout": "it broke"}}, n3={}, n4={})
    # in the inventory, as most of what they set
    found.group["rollout_batches"] = ["50%", 1]
    _, output = found.run("rollout")
    assert "in batches of 2, 1, 1" in output
    assert sorted(switched(found)) == ["n1", "n2"]
    assert "done: n1" in output
    assert "not touched: n3, n4" in output


# What needs the whole node


def own_tasks(folder: Path, calls: Path, text: str = "") -> str:
    """A file of the operator's."""
    path = folder / "own.yml"
    note = f"- ansible.builtin.shell: echo '{{{{ inventory_hostname }}}} own tasks' >> {calls}\n"
    path.write_text("---\n" + note + text)
    return f"rollout_drained_tasks={path}"


def test_a_drained_step_is_done_between_leaving_and_coming_back(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={"differs": []})
    _, output = found.run("rollout", "-e", own_tasks(tmp_path, tmp_path / "calls"))
    assert "no release differs; its replicas are started anew" in output
    staged = ["serving_plan/resolve", "replica/write_releases", "claim own.yml done 111111111111"]
    assert found.calls("n1")[5:] == [
        "claim own.yml 111111111111",
        *CONVERGE,
        "gpu-node-rollout: leave r1",
        "own tasks",
        *staged,
        f"gpu-node-rollout: rollout r1{BAKE}",
    ]


def test_a_drained_step_that_fails_brings_the_replicas_back_and_stops(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={}, n2={})
    step = "- ansible.builtin.fail: {msg: no firmware}\n"
    _, output = found.run("rollout", "-e", own_tasks(tmp_path, tmp_path / "calls", step))
    assert found.calls("n1")[-5:] == [
        "gpu-node-rollout: leave r1",
        "own tasks",
        "claim own.yml 000000000000",
        "gpu-node-rollout: rollout r1",
        "release",
    ]
    assert "no firmware; its replicas serve again what they served before" in output
    assert "rollout r1 stopped at n1" in output
    assert not any("leave" in line for line in found.calls("n2"))


@pytest.mark.full
def test_drained_steps_that_were_interrupted_go_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    steps = own_tasks(tmp_path, tmp_path / "calls")
    record = {"drained": steps.partition("=")[2], "rollout": "r0"}
    ended = {"differs": [], "found": {**record, "state": "done", "drained_done": True}}
    # its replicas were started again after the step had failed
    failed = {"differs": [], "found": {**record, "state": "done", "drained_done": False}}
    found = stage(tmp_path, n1=ended, n2=failed)
    counts, output = found.run("rollout", "-e", steps)
    assert counts["n2"]["failed"] == 0, output
    assert "1 of 2 nodes to be changed" in output
    assert ("own tasks" in found.calls("n1"), "own tasks" in found.calls("n2")) == (False, True)
    # where no node is left the operator wants them again
    found.hosts["n2"] = ended
    assert "2 of 2 nodes to be changed" in found.run("rollout", "-e", steps)[1]


@pytest.mark.full
def test_a_node_that_does_not_leave_stops_it(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={"jobs": {"leave": "still 3 requests after 120 s"}})
    _, output = found.run("rollout", "-e", own_tasks(tmp_path, tmp_path / "calls"))
    assert "still 3 requests" in output
    assert "own tasks" not in found.calls("n1")


@pytest.mark.full
def test_a_dry_run_does_no_step(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={})
    counts, output = found.run("rollout", "--check", "-e", own_tasks(tmp_path, tmp_path / "calls"))
    assert counts["n1"]["failed"] == 0, output
    assert "own tasks" not in found.calls("n1")


@pytest.mark.full
def test_what_cannot_be_done_is_refused_first_and_all_of_it_at_once(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={})
    given = ["rollout_bake=-1", "rollout_error_budget=2", "rollout_lease=60", "rollout_drained_tasks=/nowhere.yml"]
    _, output = found.run("rollout", "-e", " ".join(given), "-e", "{rollout_drained_steps: [driver]}")
    for part in (
        "rollout_bake: -1 is outside 0 to 86400 seconds",
        "rollout_error_budget: 2 is no share",
        "rollout_lease: 60 is less than 600 seconds; nodes that wait get a sign of life between two batches, so write",
        "there is no file /nowhere.yml on the controller",
        "of the profile cpu, which has no driver and no kernels; leave driver out",
    ):
        assert part in output
    assert "replica/write_releases" not in found.calls("n1")


# The way back


R0 = {"found": {"rollout": "r0", "since": "2026-12-01T08:00:00+00:00"}}
R1 = {"found": {"rollout": "r1", "since": "2026-12-01T09:00:00+00:00"}}


def test_the_way_back_is_one_rollouts_and_changes_releases_alone(tmp_path: Path) -> None:
    found = stage(tmp_path, n1=R1, n2={**R0, "differs": []}, n3=R1)
    counts, output = found.run("rollback")
    assert all(count["failed"] == 0 for count in counts.values()), output
    back = "claim back r1 000000000000"
    assert found.calls("n1") == [back, back, f"gpu-node-rollout: rollout r1{BAKE}"]
    assert found.calls("n2") == [back]
    assert switched(found) == ["n1", "n3"]


@pytest.mark.full
def test_a_way_back_that_fails_stops(tmp_path: Path) -> None:
    found = stage(tmp_path, n1={**R0, "jobs": {"rollout": "it broke"}}, n2=R1)
    _, output = found.run("rollback", "-e", "{rollout_back_batches: [1]}", "-e", "rollback_of=r0", "-l", "n1,n2")
    assert "rollback of r0 stopped at n1" in output
    assert "run it again: ansible-playbook playbooks/rollback.yml -e rollback_of=r0 -l 'n1,n2'" in output
    assert switched(found) == ["n1"]


def test_a_rollout_that_no_node_has_as_its_latest_is_not_taken_back(tmp_path: Path) -> None:
    found = stage(tmp_path, n1=R0, n2=R1)
    counts, output = found.run("rollback", "-e", "rollback_of=r7")
    assert counts["n1"]["failed"] == 1
    assert "rollback_of: r7 is the latest rollout of no node here. The latest ones are:\\nr1: n2\\nr0: n1" in output
    assert found.calls() == []


def test_a_node_whose_command_gives_no_answer_fails_the_status(tmp_path: Path) -> None:
    """It can be reached, and here nobody installed the command."""
    counts, output = stage(tmp_path, n1={}).run("status")
    assert counts["n1"]["failed"] == 1, output
    assert "no answer" in output and "No answer: n1; the table says why" in output
