# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of containers with GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.cdi import toolkit_problem, wanted_gpus
from ansible_collections.serving.gpu_node.plugins.module_utils.openpgp import key_problem


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"key_problem": key_problem, "toolkit_problem": toolkit_problem, "wanted_gpus": wanted_gpus}
