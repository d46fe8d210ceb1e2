# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What the engines report against what the plan expects."""

from __future__ import annotations

from typing import Any

# An estimate may be off by this share. The engine counts in whole blocks, and a profile's figure is of one machine.
TOLERANCE = 0.1


def compare_kv_tokens(expected: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the tokens that each replica's KV cache holds with the plan's.

    :param expected: the plan's ``expected``; without ``kv_tokens`` there is nothing to compare.
    :param rows: what ``gpu-node smoke --json`` says.
    :returns: for each replica that reports it ``target``, ``planned``, ``reported`` (tokens) and ``ok``.
    """
    planned = expected.get("kv_tokens")
    if planned is None:
        return []
    return [
        {
            "target": row["target"],
            "planned": planned,
            "reported": row["kv_tokens"],
            "ok": row["kv_tokens"] >= planned * (1 - TOLERANCE),
        }
        for row in rows
        if row.get("kv_tokens") is not None
    ]
