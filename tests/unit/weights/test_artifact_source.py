"""The module `artifact_source` against a real HTTP server: a listing, or one error that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import MANIFEST, build_manifest
from ansible_collections.serving.gpu_node.plugins.modules import artifact_source

from tests.doubles.hub.server import Hub, Repository, make_repository
from tests.unit.plugins.module_runner import run_module

FILES = {"model-1.safetensors": 5000, "config.json": 300, "head/model.safetensors": 700}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No waiting; what would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


@pytest.fixture
def repository(hub: Hub) -> Repository:
    return make_repository(hub.root / "owner/name", FILES, seed=1)


def source_of(repository: Repository, **more: Any) -> dict[str, Any]:
    return {"type": "hub", "repository": repository.name, "revision": repository.revision, **more}


def ask(source: dict[str, Any], **options: Any) -> dict[str, Any]:
    answer = run_module(artifact_source.main, {"source": source, **options}, check=True)
    assert answer.get("changed", False) is False
    return answer


def listing(repository: Repository) -> dict[str, dict[str, Any]]:
    """What the hub tells: of a large file, that Xet may have it."""
    return {path: {**item, "xet": bool(item["sha256"])} for path, item in repository.wanted().items()}


def test_a_repository(hub: Hub, repository: Repository) -> None:
    answer = ask(source_of(repository), endpoint=hub.url)
    assert answer["files"] == listing(repository)
    assert answer["bytes"] == 6000
    # no file was asked for (what is counted after the answer is counted by the time of the next one)
    ask(source_of(repository), endpoint=hub.url)
    assert hub.requests <= 2 and hub.file_bytes == 0


def test_its_own_endpoint_comes_first(hub: Hub, repository: Repository) -> None:
    source = source_of(repository, endpoint=f"{hub.url}/", folder="head")
    assert list(ask(source, endpoint="http://127.0.0.1:1")["files"]) == ["model.safetensors"]


def test_the_token_is_for_who_needs_it(hub: Hub) -> None:
    repository = make_repository(hub.root / "owner/private", FILES, access="private", token="hf_secret")
    refused = ask(source_of(repository), endpoint=hub.url)
    assert refused["failed"] and "(model_weights_hub_token)" in refused["msg"] and " answered 401" in refused["msg"]
    answer = ask(source_of(repository), endpoint=hub.url, token="hf_secret")
    assert answer["files"] == listing(repository)
    assert "hf_secret" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"revision": "f" * 40}, "the repository has no such commit; correct the source's revision"),
        ({"repository": "owner/none"}, "answered 40"),
        ({"include": ["*.gguf"]}, "leave none of them"),
    ],
)
def test_a_source_that_is_wrong(hub: Hub, repository: Repository, change: dict[str, Any], words: str) -> None:
    answer = ask({**source_of(repository), **change}, endpoint=hub.url)
    assert answer["failed"] and words in answer["msg"]


def test_a_busy_hub_is_asked_again_when_it_says(hub: Hub, repository: Repository, short_pauses: list[float]) -> None:
    hub.fault("rate_limit", "*", times=1, seconds=7)
    hub.fault("status", "*", times=1, amount=503)
    assert ask(source_of(repository), endpoint=hub.url)["bytes"] == 6000
    assert len(short_pauses) == 2 and 7 in short_pauses


def test_a_hub_that_stays_busy(hub: Hub, repository: Repository, short_pauses: list[float]) -> None:
    hub.fault("status", "*", times=-1, amount=503)
    answer = ask(source_of(repository), endpoint=hub.url)
    assert answer["failed"] and "answered 503; try again later, or use another source" in answer["msg"]
    assert len(short_pauses) == 3


def test_nobody_there(short_pauses: list[float], repository: Repository) -> None:
    answer = ask(source_of(repository), endpoint="http://127.0.0.1:1")
    assert answer["failed"] and "cannot be reached" in answer["msg"] and "proxy" in answer["msg"]


def test_something_else_than_a_hub(hub: Hub, repository: Repository) -> None:
    answer = ask(source_of(repository), endpoint=f"{hub.url}/static")
    assert answer["failed"]


def mirror(hub: Hub, repository: Repository) -> dict[str, Any]:
    """The repository as a static folder with a manifest."""
    assert hub.static is not None
    folder = hub.static / "mirrored"
    shutil.copytree(repository.folder / repository.revision, folder)
    files = {path: {"size": entry.size, "sha256": entry.sha256} for path, entry in repository.entries.items()}
    manifest = build_manifest("mirrored", {"type": "path"}, files)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return {"type": "mirror", "url": f"{hub.url}/static/mirrored", "digest": manifest["digest"]}


def test_a_mirror(hub: Hub, repository: Repository) -> None:
    answer = ask(mirror(hub, repository))
    assert {path: entry["sha256"] for path, entry in answer["files"].items()} == {
        path: entry.sha256 for path, entry in repository.entries.items()
    }


def test_a_mirror_of_something_else(hub: Hub, repository: Repository) -> None:
    source = mirror(hub, repository)
    answer = ask({**source, "digest": "0" * 64})
    assert answer["failed"] and f"has the digest {source['digest']}, not {'0' * 64}" in answer["msg"]
    missing = ask({**source, "url": f"{hub.url}/static/none"})
    assert missing["failed"]


def test_a_folder_and_an_archive_on_the_node(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 70)
    answer = ask({"type": "path", "path": str(tmp_path)})
    assert (answer["files"]["a"]["size"], answer["bytes"]) == (70, 70)
    answer = ask({"type": "archive", "path": str(tmp_path / "a")})
    assert (answer["files"], answer["bytes"]) == ({}, 70)
    for kind in ("path", "archive"):
        gone = ask({"type": kind, "path": str(tmp_path / "gone")})
        assert gone["failed"] and f"{tmp_path / 'gone'} is no " in gone["msg"]
