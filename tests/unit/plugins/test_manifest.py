"""Manifests and digests."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import (
    ManifestError,
    build_manifest,
    canonical,
    compare_files,
    digest,
    parse_manifest,
)
from hypothesis import given
from hypothesis import strategies as st

FILES: dict[str, dict[str, Any]] = {
    "b/weights": {"size": 3, "sha256": "1" * 64},
    "a": {"size": 1, "sha256": "2" * 64},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_keys_makes_no_difference(value: dict[str, Any], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert digest(dict(items)) == digest(value)
    assert json.loads(canonical(value)) == value


def test_a_manifest_comes_back_from_its_text() -> None:
    manifest = build_manifest("tiny", {"type": "generated", "seed": 0}, FILES)
    assert parse_manifest(json.dumps(manifest, indent=1)) == manifest
    assert list(manifest["files"]) == ["a", "b/weights"]


def test_the_digest_is_of_the_files_alone() -> None:
    one = build_manifest("tiny", {"seed": 0}, FILES)
    other = build_manifest("large", {"url": "elsewhere"}, dict(reversed(FILES.items())))
    assert one["digest"] == other["digest"]
    changed = {**FILES, "a": {"size": 1, "sha256": "3" * 64}}
    assert build_manifest("tiny", {"seed": 0}, changed)["digest"] != one["digest"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"files": {}', "not JSON"),
        ("[]", "no mapping 'files'"),
        ('{"digest": "x"}', "no mapping 'files'"),
        ('{"files": []}', "no mapping 'files'"),
        ('{"files": {}}', "digest is not that"),
        ('{"files": {"\\ud800": {}}}', "no Unicode"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text)
    assert message in str(caught.value)


@given(st.text() | st.dictionaries(st.sampled_from(["files", "digest", "name"]), JSON).map(json.dumps))
def test_any_text_is_a_manifest_or_the_named_error(text: str) -> None:
    with contextlib.suppress(ManifestError):
        assert isinstance(parse_manifest(text)["files"], dict)


def test_every_difference_is_named() -> None:
    found = {
        "a": {"size": 1, "sha256": "9" * 64},
        "extra": {"size": 0, "sha256": "4" * 64},
    }
    assert compare_files(FILES, found) == [
        "b/weights is missing",
        "extra does not belong to it",
        f"a has SHA-256 {'9' * 64}, not {'2' * 64}",
    ]
    assert compare_files({"a": FILES["a"]}, {"a": {"size": 2, "sha256": "2" * 64}}) == ["a has 2 bytes, not 1"]
    assert compare_files(FILES, dict(FILES)) == []
