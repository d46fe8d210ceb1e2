"""Listings of hubs and mirrors: what is taken, and what could not be verified is refused."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.listing import (
    ListingError,
    hub_listing,
    manifest_listing,
    select,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import build_manifest, path_problem
from hypothesis import given
from hypothesis import strategies as st

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = {"type": "hub", "repository": "example/model", "revision": COMMIT}
SHARD = {"rfilename": "model-1.safetensors", "size": 130, "blobId": "a" * 40}
SHARD |= {"lfs": {"sha256": "b" * 64, "size": 5000, "pointerSize": 130}}
PLAIN = {"rfilename": "config.json", "size": 900, "blobId": "d" * 40}
HEAD = {"rfilename": "heads/code/model.safetensors", "size": 130, "lfs": {"sha256": "e" * 64, "size": 70}}


def answer(*items: dict[str, Any], sha: str = COMMIT) -> dict[str, Any]:
    return {"sha": sha, "siblings": list(items)}


def test_sizes_and_hashes_are_those_of_the_files_and_not_of_their_pointers() -> None:
    assert hub_listing(answer(SHARD, PLAIN), SOURCE) == {
        "model-1.safetensors": {"size": 5000, "sha256": "b" * 64, "git_sha1": None, "xet": True},
        "config.json": {"size": 900, "sha256": None, "git_sha1": "d" * 40, "xet": False},
    }


def test_a_folder_is_taken_without_its_name() -> None:
    listing = hub_listing(answer(SHARD, HEAD), {**SOURCE, "folder": "heads/code/"})
    assert list(listing) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("include", "exclude", "taken"),
    [
        ([], [], ["a.json", "b.bin", "sub/c.bin", "sub/d.json"]),
        (["*.json"], [], ["a.json", "sub/d.json"]),
        ([], ["*.bin"], ["a.json", "sub/d.json"]),
        (["sub/"], [], ["sub/c.bin", "sub/d.json"]),
        (["sub/"], ["*.json"], ["sub/c.bin"]),
        (["nothing"], [], []),
    ],
)
def test_patterns(include: list[str], exclude: list[str], taken: list[str]) -> None:
    paths = ["a.json", "b.bin", "sub/c.bin", "sub/d.json"]
    assert list(select(paths, "", include, exclude)) == taken


def test_patterns_are_for_names_inside_the_folder() -> None:
    assert select(["x/a.bin", "x/b.json", "xy/c.bin"], "x", ["*.bin"], []) == {"x/a.bin": "a.bin"}


@pytest.mark.parametrize(
    ("value", "source", "words"),
    [
        ([], SOURCE, "is the endpoint a hub"),
        ({"siblings": []}, SOURCE, "is the endpoint a hub"),
        (answer(SHARD, sha="f" * 40), SOURCE, f"commit {'f' * 40}, not {COMMIT}"),
        (answer(), SOURCE, "has 0 files"),
        (answer(SHARD, PLAIN), {**SOURCE, "include": ["*.gguf"]}, "has 2 files, and folder, include and exclude"),
        (answer({**PLAIN, "rfilename": "../x"}), SOURCE, "'../x' is not a plain path"),
        (answer({**PLAIN, "rfilename": "/etc/passwd"}), SOURCE, "'/etc/passwd' cannot be a file"),
        (answer({"rfilename": "config.json", "size": 5}), SOURCE, "no size and no hash of config.json"),
        (answer({**PLAIN, "size": None}), SOURCE, "no size and no hash of config.json"),
        (answer({**PLAIN, "blobId": "short"}), SOURCE, "no size and no hash of config.json"),
    ],
)
def test_what_could_not_be_verified_is_refused(value: Any, source: dict[str, Any], words: str) -> None:
    with pytest.raises(ListingError) as caught:
        hub_listing(value, source)
    assert words in str(caught.value)


def test_a_manifest_as_a_listing() -> None:
    manifest = build_manifest("a", {}, {"x": {"size": 1, "sha256": "a" * 64}})
    assert manifest_listing(manifest) == {"x": {"size": 1, "sha256": "a" * 64, "git_sha1": None, "xet": False}}


@given(st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "", "a", "b.json"]), max_size=4).map("/".join))
def test_no_path_leaves_the_artifact(path: str) -> None:
    if not path_problem(path):
        parts = path.split("/")
        assert path and not path.startswith("/") and not {"", ".", ".."} & set(parts)


@pytest.mark.parametrize(
    "path", ["gpu-node-manifest.json", ".gpu-node-state.json", "x" * 201, "a/" * 600 + "b", "a\nb", 5]
)
def test_paths_that_cannot_be(path: Any) -> None:
    assert path_problem(path)


@pytest.mark.parametrize("path", ["manifest.json", "sub/gpu-node-manifest.json", ".gitattributes", "a b/ü.json"])
def test_paths_that_can_be(path: str) -> None:
    assert path_problem(path) == ""
