# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.kernel_key import kernels_key


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"kernels_key": kernels_key}
