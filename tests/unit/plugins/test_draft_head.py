"""A DSpark head's own configuration, in the forms that vLLM 0.33.0 reads."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.draft_head import draft_tokens
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"dspark_block_size": 5, "dspark_markov_rank": 256}, 5),
        ({"block_size": 7}, 7),
        # the engine's own order
        ({"block_size": 7, "dspark_block_size": 5}, 7),
        # a V4.1 model nests what it says of its text
        ({"text_config": {"dspark_block_size": 5}}, 5),
        ({"text_config": {"dspark_block_size": 5}, "dspark_block_size": 7}, 7),
        ({"dspark_block_size": 5, "sample_from_anchor": True}, 5),
        ({"block_size": 8, "sample_from_anchor": False}, 7),
        ({"quantization_config": {"weight_block_size": [128, 128]}}, 0),
        ({"dspark_block_size": None}, 0),
        ({"dspark_block_size": "5"}, 0),
        ({"dspark_block_size": True}, 0),
        ({}, 0),
    ],
)
def test_what_a_head_drafts_in_one_block(config: dict[str, Any], tokens: int) -> None:
    assert draft_tokens(config) == tokens


VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.dictionaries(st.text(), st.integers(), max_size=2)


@given(
    st.dictionaries(st.sampled_from(["block_size", "dspark_block_size", "text_config", "sample_from_anchor"]), VALUES)
)
def test_any_configuration_has_an_answer(config: dict[str, Any]) -> None:
    assert draft_tokens(config) >= 0
