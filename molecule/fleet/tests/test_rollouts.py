"""Rollouts over three nodes while clients ask all the time; none of them may notice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fleet_view import PLAY_TIMEOUT_S, Fleet, kill, wait_for, words


def turns(history: dict[str, list[dict[str, Any]]], rollout: str) -> list[tuple[str, int]]:
    """Nodes and replicas in the order in which a rollout brought them to their releases."""
    rows = [(row["began"], name, row) for name, rows in history.items() for row in rows if row["rollout"] == rollout]
    return [(name, row["replica"]) for _, name, row in sorted(rows, key=lambda one: one[0]) if row["outcome"] == "new"]


def identity(fleet: Fleet) -> str:
    """The rollout that all nodes know as their latest."""
    (only,) = {record["rollout"] for record in fleet.wanted().values()}
    return str(only)


def test_a_token_passes_the_balancer_in_front_when_it_is_there(fleet: Fleet) -> None:
    with fleet.load(direct=False) as load:
        wait_for("ten answers", lambda: load.answered() >= 10, 60)
    # The first of 40 in a second: one that HAProxy holds back takes 200 ms.
    assert min(one.first_s for one in load.outcomes if one.kind == "stream") < 0.15


def test_a_setting_is_changed_on_three_nodes_and_nobody_notices(fleet: Fleet) -> None:
    before, old = fleet.releases(), fleet.changes["max_num_seqs"]
    wish = fleet.another()
    with fleet.load() as load:
        play = fleet.rollout(changes=wish)
    assert load.failed() == [] and load.answered() > 100
    after = fleet.releases()
    assert not {one for each in before.values() for one in each} & {one for each in after.values() for one in each}
    # One canary, then the others, and never two replicas of a node at once.
    order = turns(fleet.history(), identity(fleet))
    assert sorted(order) == [(one.name, index) for one in fleet.nodes for index in (0, 1)]
    assert order[:2] == [("fleet-1", 0), ("fleet-1", 1)]
    line = f"engine_args.max-num-seqs: {old} -> {wish['max_num_seqs']}"
    assert all(line in row["changed"] for rows in fleet.history(2).values() for row in rows)
    # A line for each replica's progress reaches the terminal.
    said = words(play)
    assert all(f"release {release} serves" in said for releases in after.values() for release in releases)
    fleet.wait_for_front()


@pytest.mark.full
def test_the_same_again_changes_nothing(fleet: Fleet) -> None:
    before, history = fleet.releases(), fleet.history()
    play = fleet.rollout()
    assert play.changed == 0, play.tail(60)
    assert (fleet.releases(), fleet.history()) == (before, history)


def test_a_release_whose_engine_does_not_start_is_taken_back_and_ends_the_rollout(fleet: Fleet) -> None:
    before, history = fleet.releases(), fleet.history()
    with fleet.load() as load:
        play = fleet.run(changes={"engine_env": {"STAND_IN": "exit=3"}})
    assert load.failed() == []
    assert play.rc != 0
    said = words(play)
    assert "this engine cannot start" in said and "serves again" in said and "rollback.yml" in said
    assert "fleet-2" in said and "fleet-3" in said
    assert fleet.releases() == before
    canary, *others = [(name, rows[len(history[name]) :]) for name, rows in fleet.history().items()]
    assert [(row["replica"], row["outcome"]) for row in canary[1]] == [(0, "rolled_back")]
    assert [rows for _, rows in others] == [[], []]
    fleet.wait_for_front()


def test_a_killed_controller_is_gone_on_from_and_another_rollout_waits_its_turn(fleet: Fleet) -> None:
    before = fleet.releases()
    wish = fleet.another()
    with fleet.load() as load:
        lost = fleet.start(changes=wish)
        journal = "cat /var/lib/gpu-node/replicas/0/switch.json"
        wait_for(
            "the second node is in the middle of a switch",
            lambda: json.loads(fleet.nodes[1].run(journal).stdout or "{}").get("outcome", "") is None,
        )
        kill(lost)
        first = fleet.start(changes=wish, rollout_bake=20)
        # Both do the same until they say what they want, and the second one does it later.
        first.wait_for("TASK [serving.gpu_node.serving_image : Verify the image]", PLAY_TIMEOUT_S)
        second = fleet.run(changes=fleet.another())
        assert first.process.poll() is None, "the first rollout ended before the second one: it proves nothing"
        mine = fleet.claimed("fleet-3", first)
        play = first.finish(PLAY_TIMEOUT_S)
    assert load.failed() == []
    assert play.rc == 0, play.tail(80)
    assert second.rc != 0 and mine and mine in words(second), second.tail(60)
    fleet.changes |= wish
    after = fleet.releases()
    assert not {one for each in before.values() for one in each} & {one for each in after.values() for one in each}
    assert fleet.sequences() == set(wish.values())
    # What the refused one wanted is nowhere.
    assert {name: list(record["targets"].values()) for name, record in fleet.wanted().items()} == after
    # The replica that was being switched when its controller was killed was switched once.
    assert sorted(row["replica"] for row in fleet.history(2)["fleet-2"]) == [0, 1]
    fleet.wait_for_front()


def test_the_fleet_is_shown_and_taken_back(fleet: Fleet) -> None:
    now = fleet.releases()
    file = fleet.folder / "status.json"
    play = fleet.run("playbooks/status.yml", status_file=str(file))
    assert play.rc == 0, play.tail(60)
    assert all(f"fleet-{number}" in play.output for number in (1, 2, 3))
    rows = json.loads(file.read_text())
    assert sorted((row["node"], row["index"], row["release"]) for row in rows) == [
        (name, index, release) for name, releases in now.items() for index, release in enumerate(releases)
    ]
    previous = {name: [row["previous"] for row in rows] for name, rows in fleet.status().items()}
    with fleet.load() as load:
        play = fleet.run("playbooks/rollback.yml")
    assert load.failed() == []
    assert play.rc == 0, play.tail(80)
    assert fleet.releases() == previous
    fleet.take_over()
    again = fleet.run("playbooks/rollback.yml")
    assert (again.rc, again.changed) == (0, 0), again.tail(60)
    fleet.wait_for_front()
