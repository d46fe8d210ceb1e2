"""What the engines report against what the plan expects."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.acceptance import compare_kv_tokens

from tests.unit.plugins.samples import intent


def rows(*tokens: int | None) -> list[dict[str, Any]]:
    """As ``gpu-node smoke --json`` says: two rows a replica, the first with the tokens, and the balancer's."""
    found: list[dict[str, Any]] = []
    for index, count in enumerate(tokens):
        found += [{"target": f"replica {index}", "kv_tokens": kv_tokens} for kv_tokens in (count, None)]
    return [*found, {"target": "balancer", "kv_tokens": None}]


@pytest.mark.parametrize(
    ("reported", "ok"), [(4_538_321, True), (4_600_000, True), (4_084_489, True), (4_084_488, False), (0, False)]
)
def test_a_tenth_less_than_planned_is_too_little(reported: int, ok: bool) -> None:
    found = compare_kv_tokens(intent(name="8x")["expected"], rows(4_538_321, reported))
    assert [item["ok"] for item in found] == [True, ok]
    assert found[1] == {"target": "replica 1", "planned": 4_538_321, "reported": reported, "ok": ok}


def test_without_a_figure_there_is_nothing_to_compare() -> None:
    assert compare_kv_tokens({}, rows(1, 2)) == []
    assert compare_kv_tokens({"kv_tokens": 5}, rows(None)) == []
