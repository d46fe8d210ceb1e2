# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the checks before any change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.preflight import (
    accept,
    check_host,
    check_inventory,
    check_plan,
    describe_report,
    failure_lines,
    make_report,
    wanted_of,
)


def preflight_report(
    inventory: list[dict[str, str]],
    host: dict[str, Any],
    topology: dict[str, Any],
    intent: dict[str, Any],
    wanted: dict[str, Any],
    accepted: list[str],
) -> dict[str, Any]:
    """Return the whole report of a node; see ``preflight.make_report``.

    :param inventory: what was found before any connection.
    :param host: what ``host_state`` returned; empty where the topology is of a file, and no node is looked at.
    :param intent: ``{"plan", "problems"}``, as the filter ``intent_plan`` returns it.
    """
    checks = check_host(host, topology, intent["plan"], wanted) if host else []
    plan = check_plan(intent["problems"], inventory + checks)
    return make_report(accept(inventory + plan + checks, accepted))


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "preflight_inventory": check_inventory,
            "preflight_wanted": wanted_of,
            "preflight_report": preflight_report,
            "describe_preflight": describe_report,
            "preflight_failures": failure_lines,
        }
