# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of containers with GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.cdi import wanted_gpus
from ansible_collections.serving.gpu_node.plugins.module_utils.openpgp import key_problem
from ansible_collections.serving.gpu_node.plugins.module_utils.toolkit import (
    parse_version,
    select_version,
    toolkit_problem,
)


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "key_problem": key_problem,
            "select_version": select_version,
            "toolkit_problem": toolkit_problem,
            "toolkit_version": parse_version,
            "wanted_gpus": wanted_gpus,
        }
