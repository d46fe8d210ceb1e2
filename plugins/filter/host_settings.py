# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the role host_settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.module_utils import host_settings

_PREFIX = "host_settings_"


def _without_prefix(variables: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(_PREFIX): value for name, value in variables.items()}


def host_settings_paths(variables: dict[str, Any]) -> list[str]:
    """Return the files to read; see ``host_settings.paths_to_read``.

    :param variables: the role's variables, by their whole names.
    """
    return host_settings.paths_to_read(_without_prefix(variables))


def host_settings_decision(variables: dict[str, Any], host: dict[str, Any], output: str) -> dict[str, Any]:
    """Return what to write and to set, and what differs; see ``host_settings.decide_settings``.

    :param variables: the role's variables, by their whole names.
    :param host: what ``host_state`` says.
    :param output: what ``grep -H`` printed.
    """
    if "boot_id" not in host:
        raise AnsibleFilterError("host_settings_decision needs what the module host_state returns as 'host'")
    return host_settings.decide_settings(_without_prefix(variables), host, host_settings.parse_readings(output))


def host_settings_lines(decision: dict[str, Any], manage: bool) -> list[str]:
    """Return the lines to show; see ``host_settings.describe_settings``."""
    return host_settings.describe_settings(decision, manage)


def reboot_problems(before: dict[str, Any], after: dict[str, Any], decision: dict[str, Any]) -> list[str]:
    """Return what a reboot did not achieve; see ``host_settings.reboot_problems``."""
    return host_settings.reboot_problems(before, after, decision)


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "host_settings_decision": host_settings_decision,
            "host_settings_lines": host_settings_lines,
            "host_settings_paths": host_settings_paths,
            "reboot_problems": reboot_problems,
        }
