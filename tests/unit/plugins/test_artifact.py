"""The module `artifact`: what of an artifact is there, and what a fetch would take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import Store, seen_at_source
from ansible_collections.serving.gpu_node.plugins.module_utils.sources import source_key
from ansible_collections.serving.gpu_node.plugins.modules import artifact

from tests.unit.plugins.module_runner import run_module
from tests.unit.plugins.test_artifact_store import FILES, entry, flip, make

SOURCE = {"type": "hub", "repository": "example/a", "revision": "0123456789abcdef0123456789abcdef01234567"}
KEY = source_key(SOURCE)


def run(root: Path, check: bool = False, source: dict[str, Any] = SOURCE, **options: Any) -> dict[str, Any]:
    return run_module(artifact.main, {"path": str(root), "name": "tiny", "source": source, **options}, check)


def given(root: Path, source: dict[str, Any] = SOURCE) -> Path:
    """An artifact that a source gave."""
    folder = make(root)
    store = Store(root, "tiny")
    digest = store.manifest(folder)["digest"]
    store.record(source_key(source), {"digest": digest, "source": source, "seen": seen_at_source(source)})
    return folder


@pytest.mark.parametrize("check", [False, True])
def test_nothing_is_there(tmp_path: Path, check: bool) -> None:
    answer = run(tmp_path / "none", check)
    assert (answer["changed"], answer["state"], answer["key"]) == (False, "missing", KEY)
    assert (answer["digest"], answer["folder"], answer["begun_bytes"]) == ("", "", 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", [False, True])
def test_it_is_complete(tmp_path: Path, check: bool) -> None:
    folder = given(tmp_path)
    answer = run(tmp_path, check)
    assert (answer["state"], answer["folder"], answer["problems"]) == ("complete", str(folder), [])
    assert answer["digest"][:12] == folder.name and len(answer["digest"]) == 64


@pytest.mark.parametrize(("config", "tokens"), [('{"dspark_block_size": 5}', 5), ("{}", 0), ("no JSON", 0), (None, 0)])
def test_what_its_head_drafts(tmp_path: Path, config: str | None, tokens: int) -> None:
    folder = make(tmp_path, FILES if config is None else {**FILES, "config.json": config.encode()})
    source = {**SOURCE, "digest": Store(tmp_path, "tiny").manifest(folder)["digest"]}
    answer = run(tmp_path, source=source)
    assert (answer["state"], answer["draft_tokens"]) == ("complete", tokens)
    # what is not whole says nothing
    flip(folder / "sub/weights.bin")
    os.utime(folder / "sub/weights.bin")
    assert run(tmp_path, source=source)["draft_tokens"] == 0


def test_it_came_from_another_source(tmp_path: Path) -> None:
    given(tmp_path)
    assert run(tmp_path, source={**SOURCE, "revision": "1" * 40})["state"] == "missing"


def test_a_source_with_a_digest_needs_no_record(tmp_path: Path) -> None:
    digest = Store(tmp_path, "tiny").manifest(make(tmp_path))["digest"]
    source = {"type": "mirror", "url": "https://mirror.example/a", "digest": digest}
    assert run(tmp_path, source=source)["state"] == "complete"


def test_it_is_damaged(tmp_path: Path) -> None:
    folder = given(tmp_path)
    flip(folder / "sub/weights.bin")
    os.utime(folder / "sub/weights.bin")
    answer = run(tmp_path)
    assert answer["state"] == "damaged"
    assert answer["problems"][0].startswith("sub/weights.bin has SHA-256")
    # a look changes nothing
    assert folder.is_dir() and run(tmp_path)["state"] == "damaged"


def test_a_folder_that_changed_since_it_was_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a").write_text("1")
    source = {"type": "path", "path": str(tmp_path / "mine")}
    given(tmp_path / "root", source)
    assert run(tmp_path / "root", source=source)["state"] == "complete"
    os.utime(tmp_path / "mine/a", (1, 1))
    answer = run(tmp_path / "root", source=source)
    assert (answer["state"], answer["problems"]) == ("missing", [f"{tmp_path / 'mine'} has changed since it was taken"])
    # what was taken stays good when its source is gone
    (tmp_path / "mine/a").unlink()
    (tmp_path / "mine").rmdir()
    assert run(tmp_path / "root", source=source)["state"] == "complete"


def test_what_a_fetch_would_take(tmp_path: Path) -> None:
    make(tmp_path)
    files = {"again": entry(FILES["sub/weights.bin"]), "new": {"size": 1000, "sha256": "0" * 64}}
    answer = run(tmp_path, source={**SOURCE, "revision": "1" * 40}, files=files)
    assert (answer["needed_bytes"], answer["reused_bytes"], answer["missing_files"]) == (1000, 16384, ["new"])
    assert answer["free_bytes"] > 0


def test_a_file_where_the_folder_should_be_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    assert run(tmp_path / "root")["state"] == "missing"
