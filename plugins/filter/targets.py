# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the targets of a router or balancer in front of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.module_utils import targets
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import SettingsError


def balancer_endpoint(profile: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return where a node's own balancer listens; see ``targets.balancer_endpoint``."""
    try:
        return targets.balancer_endpoint(profile, overrides)
    except SettingsError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"balancer_endpoint": balancer_endpoint, "target_files": targets.target_files}
