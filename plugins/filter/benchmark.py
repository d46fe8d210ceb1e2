# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.benchmark import (
    BenchmarkError,
    benchmark_request,
    benchmark_summary,
)


def request_or_problems(
    name: str,
    plan: dict[str, Any],
    status: list[dict[str, Any]],
    releases: list[dict[str, Any]],
    options: dict[str, Any],
    parts: list[str],
) -> dict[str, Any]:
    """Return ``{"request": request or {}, "problems": [sentences]}``, so that the role can fail without a traceback."""
    try:
        return {"request": benchmark_request(name, plan, status, releases, options, parts), "problems": []}
    except BenchmarkError as error:
        return {"request": {}, "problems": error.problems}


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"benchmark_request": request_or_problems, "benchmark_summary": benchmark_summary}
