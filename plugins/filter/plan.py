# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the plan."""

from __future__ import annotations

import getpass
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.module_utils.describe import describe_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import PlanError, build_plan, node_config
from ansible_collections.serving.gpu_node.plugins.module_utils.release import (
    ResolveError,
    release_manifest,
    resolve_plan,
)


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
    draft_tokens: dict[str, int],
) -> dict[str, Any]:
    """Return ``{"plan": resolved plan or {}, "problems": [sentences], "waits": bool}``.

    See ``release.resolve_plan`` and ``release.ResolveError``.
    """
    if plan.get("state") not in ("intent", "resolved"):
        raise AnsibleFilterError("resolved_plan needs a plan; run the role serving_plan first")
    try:
        resolved = resolve_plan(plan, digests, image, gpus, qualification, draft_tokens)
        return {"plan": resolved, "problems": [], "waits": False}
    except ResolveError as error:
        return {"plan": {}, "problems": error.problems, "waits": error.waits}


def project_version(root: Path) -> str:
    """Return this collection's version: a checkout and an installed collection have it in different files."""
    try:
        return str(yaml.safe_load((root / "galaxy.yml").read_text(encoding="utf-8"))["version"])
    except FileNotFoundError:
        manifest = json.loads((root / "MANIFEST.json").read_text(encoding="utf-8"))
        return str(manifest["collection_info"]["version"])


def release_manifests(plan: dict[str, Any], image: dict[str, Any], driver: str) -> dict[str, dict[str, Any]]:
    """Return by release id what ``manifest.json`` says of it: who makes it, and of what.

    :param image: what the role ``serving_image`` left.
    :param driver: the version of the driver now; the plan's may be of before an upgrade.
    """
    who = f"{getpass.getuser()}@{platform.node()}"
    project = {"name": "serving.gpu_node", "version": project_version(Path(__file__).resolve().parents[2])}
    return {
        replica["release"]: {
            **release_manifest(plan, replica, image),
            "driver": driver,
            "by": who,
            "project": project,
        }
        for replica in plan["replicas"]
    }


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "intent_plan": intent_plan,
            "resolved_plan": resolved_plan,
            "describe_plan": describe_plan,
            "node_config": node_config,
            "release_manifests": release_manifests,
        }
