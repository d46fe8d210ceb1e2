# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the report of an acceptance run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.acceptance_report import (
    failures,
    report_lines,
    report_page,
    requested_replicas,
)


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "acceptance_failures": failures,
            "acceptance_lines": report_lines,
            "acceptance_page": report_page,
            "acceptance_replicas": requested_replicas,
        }
