# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of rollouts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.claim import has_steps_left, latest_rollout
from ansible_collections.serving.gpu_node.plugins.module_utils.rollout_report import (
    describe_ahead,
    describe_fleet,
    describe_stop,
    failure_text,
    fleet_rows,
    nodes_to_hold,
)


def rollout_facts(names: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what is known of each node's part in a rollout, by its name."""
    found = {}
    for name in names:
        facts = hostvars[name]
        found[name] = {
            **(facts.get("rollout_result") or {}),
            "finished": bool(facts.get("rollout_finished", False)),
            "failure": facts.get("rollout_failure") or {},
        }
    return found


def status_answers(names: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by node what ``gpu-node status --json`` said there, or why it said nothing."""
    answers: dict[str, dict[str, Any]] = {}
    for name in names:
        read = hostvars[name].get("rollout_status") or {"unreachable": True, "msg": "it failed before in this run"}
        try:
            answers[name] = {"rows": json.loads(read.get("stdout") or "")}
        except ValueError:
            # What the command says is more than that it failed.
            error = (str(read.get("stderr") or "").strip() or failure_text(read)).splitlines()[-1]
            answers[name] = {"error": error, "unreachable": bool(read.get("unreachable", False))}
    return answers


def holds(
    facts: Mapping[str, Mapping[str, Any]], batch: Sequence[str], lease: float, node: str, among: Sequence[str]
) -> list[dict[str, str]]:
    """Return what one node's task says to others after a batch: its share of them, and ``renew`` or ``release``."""
    found, ends = nodes_to_hold(facts, batch, lease, time.time())
    return [{"node": name, "hold": "release" if ends else "renew"} for name in found[among.index(node) :: len(among)]]


def nodes_without(names: Sequence[str], hostvars: Mapping[str, Any], fact: str) -> list[str]:
    """Return the nodes that never came to where a fact is set: they failed, or cannot be reached."""
    return [name for name in names if fact not in hostvars[name]]


def nodes_taken(names: Sequence[str], hostvars: Mapping[str, Any]) -> list[str]:
    """Return the nodes of which a look said that another rollout has them."""
    return [name for name in names if hostvars[name].get("__rollout_look", {}).get("conflict")]


def _found(names: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the records that a look found on the nodes, before any of them was claimed."""
    looks = {name: hostvars[name].get("__rollout_look", {}).get("found") for name in names}
    return {name: dict(found) for name, found in looks.items() if found}


def latest_rollouts(names: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return by rollout the nodes of which it is the latest one; the newest first."""
    rollouts: dict[str, list[str]] = {}
    # In one form and one zone, so that their order is that of time.
    for name, record in sorted(_found(names, hostvars).items(), key=lambda one: str(one[1]["since"]), reverse=True):
        rollouts.setdefault(latest_rollout(record), []).append(name)
    return rollouts


def unfinished_rollouts(names: Sequence[str], hostvars: Mapping[str, Any], steps: str) -> list[str]:
    """Return the rollouts with these drained steps that a node still has to finish."""
    found = _found(names, hostvars).values() if steps else ()
    return sorted({str(record["rollout"]) for record in found if has_steps_left(record, steps)})


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "rollout_holds": holds,
            "nodes_taken": nodes_taken,
            "nodes_without": nodes_without,
            "failure_text": failure_text,
            "rollout_facts": rollout_facts,
            "rollout_ahead": describe_ahead,
            "rollout_stopped": describe_stop,
            "latest_rollouts": latest_rollouts,
            "unfinished_rollouts": unfinished_rollouts,
            "status_answers": status_answers,
            "fleet_rows": fleet_rows,
            "fleet_table": describe_fleet,
        }
