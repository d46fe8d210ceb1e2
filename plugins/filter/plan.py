# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.module_utils.acceptance import compare_kv_tokens
from ansible_collections.serving.gpu_node.plugins.module_utils.describe import describe_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import PlanError, build_plan, node_config
from ansible_collections.serving.gpu_node.plugins.module_utils.release import ResolveError, resolve_plan


def intent_plan(
    profile: dict[str, Any],
    overrides: dict[str, Any],
    topology: dict[str, Any],
    client_auth: bool,
    sources: dict[str, Any],
) -> dict[str, Any]:
    """Return ``{"plan": intent plan or {}, "problems": [sentences]}``.

    The problems come back as data, so that the role can fail once with all of them and without a traceback.
    """
    try:
        return {"plan": build_plan(profile, overrides, topology, client_auth, sources), "problems": []}
    except PlanError as error:
        return {"plan": {}, "problems": error.problems}


def resolved_plan(
    plan: dict[str, Any],
    digests: dict[str, str],
    image: dict[str, str],
    gpus: list[dict[str, Any]],
    qualification: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return ``{"plan": resolved plan or {}, "problems": [sentences]}``; see ``release.resolve_plan``."""
    if plan.get("state") not in ("intent", "resolved"):
        raise AnsibleFilterError("resolved_plan needs a plan; run the role serving_plan first")
    try:
        return {"plan": resolve_plan(plan, digests, image, gpus, qualification), "problems": []}
    except ResolveError as error:
        return {"plan": {}, "problems": error.problems}


def differing_replicas(replicas: list[dict[str, Any]], status: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replicas of a resolved plan that do not run their release.

    :param status: what ``gpu-node status --json`` says; empty on a node that has no replicas yet.
    """
    running = {
        item["index"]: item["release"] for item in status if item["state"] == "active" and "rollout" not in item["out"]
    }
    return [replica for replica in replicas if running.get(replica["index"]) != replica["release"]]


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "intent_plan": intent_plan,
            "resolved_plan": resolved_plan,
            "compare_kv_tokens": compare_kv_tokens,
            "describe_plan": describe_plan,
            "differing_replicas": differing_replicas,
            "node_config": node_config,
        }
