"""The module `releases`: whole or not there, what was lost or edited is put back, and who made it stays with it."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.modules import releases

from tests.unit.plugins.module_runner import run_module

FILES = {"engine.yaml": '"port": 8000\n', "engine.env": "A=é\n", "release.json": "{}\n"}
WANTED = {"0123456789ab": FILES, "111111111111": {**FILES, "engine.env": "A=2\n"}}


def run(
    root: Path, wanted: dict[str, dict[str, str]] | None = None, check: bool = False, **more: Any
) -> dict[str, Any]:
    return run_module(releases.main, {"path": str(root / "releases"), "releases": wanted or WANTED, **more}, check)


def found(root: Path) -> dict[str, dict[str, str]]:
    """What looks like releases."""
    folders = [path for path in (root / "releases").glob("*") if not path.name.startswith(".")]
    return {
        path.name: {file.name: file.read_text() for file in path.iterdir() if file.name != "manifest.json"}
        for path in folders
    }


def test_they_are_written_once(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first["changed"] is True
    assert sorted(first["written"]) == sorted(f"{number}/{name}" for number in WANTED for name in FILES)
    assert found(tmp_path) == WANTED
    second = run(tmp_path)
    assert (second["changed"], second["written"], second["diff"]) == (False, [], [])


def test_they_are_read_only_and_everyone_may_read_them(tmp_path: Path) -> None:
    run(tmp_path)
    folder = tmp_path / "releases" / "0123456789ab"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o444}


@pytest.mark.parametrize("damage", ["lost", "edited", "no text"])
def test_what_was_lost_or_edited_is_put_back(tmp_path: Path, damage: str) -> None:
    run(tmp_path)
    path = tmp_path / "releases" / "0123456789ab" / "engine.env"
    path.unlink()
    if damage != "lost":
        path.write_bytes(b"edited\n" if damage == "edited" else b"\xff\xfe")
    answer = run(tmp_path, check=True)
    assert answer["written"] == ["0123456789ab/engine.env"]
    assert answer["diff"][0]["before"] == ("edited\n" if damage == "edited" else "")
    assert run(tmp_path)["written"] == ["0123456789ab/engine.env"]
    assert found(tmp_path) == WANTED


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, check=True)["changed"] is True
    assert list(tmp_path.iterdir()) == []


def test_older_releases_stay(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, {"222222222222": FILES})
    assert set(found(tmp_path)) == {*WANTED, "222222222222"}


@pytest.mark.parametrize("after", range(3))
def test_an_interrupted_run_leaves_no_half_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    steps = 0

    def stop(_: int) -> None:
        nonlocal steps
        steps += 1
        if steps > after:
            raise KeyboardInterrupt

    one = {"0123456789ab": FILES}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, one)
    assert found(tmp_path) == {}
    assert run(tmp_path, one)["changed"] is True
    assert found(tmp_path) == one
    assert [path.name for path in (tmp_path / "releases").iterdir()] == ["0123456789ab"]


@pytest.mark.parametrize("place", ["releases", "releases/0123456789ab/engine.env"])
def test_a_path_that_cannot_be_is_an_error_with_its_name(tmp_path: Path, place: str) -> None:
    if place == "releases":
        (tmp_path / place).write_text("a file")
    else:
        (tmp_path / place).mkdir(parents=True)
    answer = run(tmp_path)
    assert answer["failed"] is True
    assert f"a release could not be written below {tmp_path / 'releases'}" in answer["msg"]


def manifest(root: Path, release: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((root / "releases" / release / "manifest.json").read_text())
    return value


def test_who_made_a_release_when_is_with_it(tmp_path: Path) -> None:
    run(tmp_path, manifest={"0123456789ab": {"by": "alice@ctl", "image": {"recipe": "own"}}})
    made = manifest(tmp_path, "0123456789ab")
    assert (made["by"], made["image"]) == ("alice@ctl", {"recipe": "own"})
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(made["created"])
    assert age < datetime.timedelta(minutes=1)
    assert set(manifest(tmp_path, "111111111111")) == {"created"}


def test_who_made_it_first_stays(tmp_path: Path) -> None:
    run(tmp_path, manifest={"0123456789ab": {"by": "alice@ctl"}})
    first = manifest(tmp_path, "0123456789ab")
    (tmp_path / "releases/0123456789ab/engine.env").unlink()
    for changed in (True, False):
        assert run(tmp_path, manifest={"0123456789ab": {"by": "bob@ctl"}})["changed"] is changed
    assert manifest(tmp_path, "0123456789ab") == first


def test_a_release_of_before_there_were_manifests_is_left_alone(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "releases/0123456789ab/manifest.json"
    path.unlink()
    assert run(tmp_path, manifest={"0123456789ab": {"by": "bob@ctl"}})["changed"] is False
    assert not path.exists()
