# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a DSpark head's own configuration says of it."""

from __future__ import annotations

from typing import Any


def draft_tokens(config: dict[str, Any]) -> int:
    """Return how many tokens a head drafts in one block, 0 when its ``config.json`` does not say.

    vLLM 0.33.0 reads ``block_size``, then ``dspark_block_size`` (config/speculative.py), of a V4.1 model also below
    ``text_config``; the first place of a block is no draft where the head does not sample from it. The engine takes
    them only where nobody says how many to draft, and drafts more without a word.
    """
    below = config.get("text_config")
    told = {**(below if isinstance(below, dict) else {}), **config}
    sizes = [told.get(name) for name in ("block_size", "dspark_block_size")]
    size = next((one for one in sizes if isinstance(one, int) and not isinstance(one, bool) and one > 0), 0)
    return size - 1 if size and told.get("sample_from_anchor") is False else size
