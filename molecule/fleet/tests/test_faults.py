"""Rollouts in which something goes wrong: asked each time is who serves what, who was lost, and what was said."""

from __future__ import annotations

import json
import time

import pytest
from fleet_view import PLAY_TIMEOUT_S, Fleet, kill, wait_for, words

pytestmark = pytest.mark.full

JOURNAL = "cat /var/lib/gpu-node/replicas/{index}/switch.json"
# Kills the job at a step of replica 0's switch, before it can do the next one.
KILL_AT = r"""
import glob, json, os, sys, time
end = time.monotonic() + 900
def job():
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"gpu_node" in words and b"rollout" in words:
            return int(path.split("/")[2])
    return 0
pid = 0
while time.monotonic() < end:
    pid = pid or job()
    try:
        with open("/var/lib/gpu-node/replicas/0/switch.json") as file:
            journal = json.load(file)
    except (OSError, ValueError):
        continue
    if pid and journal["outcome"] is None and journal["step"] == sys.argv[1]:
        os.kill(pid, 9)
        print(journal["step"])
        break
    time.sleep(0.001)
"""
# An engine's fault, and what has to be said of it.
FAULTS = {
    "generates nothing": ("tokens_per_s=40 silent_after=1", "generates nothing"),
    "is slow": ("tokens_per_s=4", "gate_speed_factor"),
    "says that it is another model": ("tokens_per_s=40 name=other", "the engine serves other, not tiny"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that(fleet: Fleet, fault: str) -> None:
    told, said = FAULTS[fault]
    before = fleet.releases()
    with fleet.load() as load:
        play = fleet.run(changes={"engine_env": {"STAND_IN": told}})
    assert load.failed() == []
    assert play.rc != 0 and said in words(play) and "serves again" in words(play), play.tail(60)
    assert fleet.releases() == before
    row = fleet.history(1)["fleet-1"][-1]
    assert (row["replica"], row["outcome"]) == (0, "rolled_back")
    fleet.wait_for_front()


def test_a_job_that_is_killed_at_any_step_goes_on(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    before = fleet.releases()["fleet-1"]
    wish = fleet.another()
    with fleet.load() as load:
        for step in ("drain", "stop", "point", "start", "gate"):
            playbook = fleet.start("playbooks/rollout.yml", "-l", "fleet-1", changes=wish)
            killed = node.ssh(f"python3 - {step}", stdin=KILL_AT, timeout=900)
            assert killed.strip() == step
            play = playbook.finish(PLAY_TIMEOUT_S)
            assert play.rc != 0, f"killed at {step}, and nobody says so: {play.tail(40)}"
            journal = json.loads(node.ssh(JOURNAL.format(index=0)))
            assert journal["outcome"] is None
        fleet.rollout("-l", "fleet-1", changes=wish)
    assert load.failed() == []
    after = fleet.releases()["fleet-1"]
    assert all(old != new for old, new in zip(before, after, strict=True))
    rows = fleet.history(2)["fleet-1"]
    assert [(row["replica"], row["from"], row["to"]) for row in rows] == [
        (0, before[0], after[0]),
        (1, before[1], after[1]),
    ]
    fleet.rollout(changes=wish)
    fleet.wait_for_front()


def test_a_node_that_cannot_be_reached_ends_a_rollout_before_it_begins(fleet: Fleet) -> None:
    before, history = fleet.releases(), fleet.history()
    fleet.unreachable(fleet.nodes[2])
    try:
        with fleet.load() as load:
            play = fleet.run(changes=fleet.another())
    finally:
        fleet.reachable(fleet.nodes[2])
    assert load.failed() == []
    assert play.rc != 0
    assert "No replica was touched" in words(play) and "!fleet-3" in words(play)
    assert (fleet.releases(), fleet.history()) == (before, history)


def test_a_node_that_goes_away_in_the_middle_ends_the_rollout_there_and_is_gone_on_from(fleet: Fleet) -> None:
    before = fleet.releases()
    wish = fleet.another()
    with fleet.load() as load:
        playbook = fleet.start(changes=wish)
        wait_for("the canary is being switched", lambda: fleet.wanted()["fleet-1"]["state"] == "running", 900)
        fleet.unreachable(fleet.nodes[2])
        try:
            play = playbook.finish(PLAY_TIMEOUT_S)
        finally:
            fleet.reachable(fleet.nodes[2])
        assert play.rc != 0
        assert "fleet-3" in words(play) and "rollback.yml" in words(play), play.tail(40)
        now = fleet.releases()
        assert now["fleet-3"] == before["fleet-3"]
        assert now["fleet-1"] != before["fleet-1"] and now["fleet-2"] != before["fleet-2"]
        fleet.rollout(changes=wish)
    assert load.failed() == []
    assert fleet.sequences() == set(wish.values())
    fleet.wait_for_front()


def test_a_node_that_reboots_in_its_turn_comes_back_and_is_gone_on_from(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    wish = {**fleet.another(), "balancer_announce": 8}
    # Its own balancer goes down with it, so only clients of the one in front are spared.
    with fleet.load(direct=False) as load:
        playbook = fleet.start(changes=wish)
        wait_for("replica 0 is being started", lambda: "start" in fleet.step(node, 0), 900, 0.1)
        node.reboot()
        playbook.finish(PLAY_TIMEOUT_S)
        fleet.rollout(changes=wish)
    assert load.failed() == []
    assert fleet.sequences() == {wish["max_num_seqs"]}
    fleet.releases()
    fleet.wait_for_front()


def test_a_drain_that_never_ends_is_refused_or_cut_as_the_operator_chose(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    before = fleet.releases()["fleet-1"]
    wish = {"drain_timeout": 5, "shutdown_timeout": 3}
    # One for each replica.
    endless = [fleet.long_request(node, 100_000) for _ in range(2)]
    time.sleep(1)
    with fleet.load() as load:
        refused = fleet.run("playbooks/rollout.yml", "-l", "fleet-1", changes=wish)
        assert refused.rc != 0
        assert "is not drained" in words(refused) and "nothing changed" in words(refused), refused.tail(40)
        assert all(one.running for one in endless)
        assert fleet.releases()["fleet-1"] == before
        fleet.rollout("-l", "fleet-1", changes=wish, rollout_on_drain_timeout="cut")
        assert all(one.end().error for one in endless)
    assert load.failed() == []
    assert fleet.releases()["fleet-1"] != before
    for name in wish:
        del fleet.changes[name]
    fleet.rollout()
    fleet.wait_for_front()


def test_a_replica_whose_way_back_is_broken_too_stays_out_and_all_else_serves(fleet: Fleet) -> None:
    node = fleet.nodes[0]
    before = fleet.releases()
    broken = f"/var/lib/gpu-node/releases/{before['fleet-1'][0]}/engine.env"
    content = node.ssh(f"cat {broken}")
    with fleet.load() as load:
        playbook = fleet.start(changes={"engine_env": {"STAND_IN": "exit=3"}})
        wait_for("replica 0 is stopped", lambda: fleet.step(node, 0) in ("stop", "point", "start"), 900, 0.1)
        node.ssh(f"echo MORE=1 >>{broken}")
        try:
            play = playbook.finish(PLAY_TIMEOUT_S)
        finally:
            node.ssh(f"cat >{broken}", stdin=content)
        rows = fleet.status()
        assert play.rc != 0
        assert "stays out" in words(play) and "engine.env" in words(play), play.tail(60)
        assert "rollout" in rows["fleet-1"][0]["out"]
        assert [row["out"] for name in rows for row in rows[name]][1:] == [[]] * 5
        fleet.wait_for_front()
    assert load.failed() == []
    fleet.rollout()
    assert fleet.releases() == before


def test_too_many_errors_in_the_bake_end_the_rollout_and_rollback_takes_it_back(fleet: Fleet) -> None:
    before = fleet.releases()
    wish = {"engine_env": {"STAND_IN": "tokens_per_s=40 errors_after=12"}}
    with fleet.load(direct=False):
        for attempt in ("first", "again"):
            play = fleet.run(changes=wish, rollout_bake=40)
            assert play.rc != 0, f"{attempt}: {play.tail(60)}"
            identity = fleet.wanted()["fleet-1"]["rollout"]
            assert "bake" in words(play) and f"rollback.yml -e rollback_of={identity}" in words(play), play.tail(60)
            now = fleet.releases()
            assert now["fleet-1"] != before["fleet-1"]
            assert (now["fleet-2"], now["fleet-3"]) == (before["fleet-2"], before["fleet-3"])
    back = fleet.run("playbooks/rollback.yml")
    assert back.rc == 0, back.tail(60)
    assert fleet.releases() == before
    with fleet.load() as load:
        time.sleep(5)
    assert load.failed() == []


def test_the_way_back_of_a_rollout_on_one_node_leaves_the_others_alone(fleet: Fleet) -> None:
    fleet.rollout(changes=fleet.another())
    before, history = fleet.releases(), fleet.history()
    with fleet.load() as load:
        fleet.run("playbooks/rollout.yml", "-l", "fleet-1", changes=fleet.another())
        assert fleet.releases()["fleet-1"] != before["fleet-1"]
        back = fleet.run("playbooks/rollback.yml")
    assert back.rc == 0, back.tail(60)
    assert load.failed() == []
    assert fleet.releases() == before
    after = fleet.history()
    assert all(after[name] == history[name] for name in ("fleet-2", "fleet-3"))
    fleet.wait_for_front()


def test_what_an_operator_kills_in_the_middle_can_be_taken_back(fleet: Fleet) -> None:
    before = fleet.releases()
    with fleet.load() as load:
        playbook = fleet.start(changes=fleet.another())
        wait_for("the second node's turn", lambda: fleet.wanted()["fleet-2"]["state"] == "running", 1200)
        kill(playbook)
        wait_for("its job has ended", lambda: fleet.wanted()["fleet-2"]["state"] == "done", 900)
        back = fleet.run("playbooks/rollback.yml")
    assert back.rc == 0, back.tail(60)
    assert load.failed() == []
    assert fleet.releases() == before
    fleet.wait_for_front()
