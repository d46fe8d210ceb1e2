"""The module `artifact`: whole or not there, and verified byte for byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import parse_manifest
from ansible_collections.serving.gpu_node.plugins.module_utils.tiny_model import model_files
from ansible_collections.serving.gpu_node.plugins.modules import artifact

from tests.unit.plugins.module_runner import run_module

FILES = {"config.json": b"{}\n", "weights.bin": bytes(range(256)) * 8, "tokenizer.json": b"[]"}


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is made in no time; its seed is one of its bytes."""
    monkeypatch.setattr(artifact, "model_files", lambda seed: {**FILES, "seed": bytes([seed])})


def run(root: Path, check: bool = False, seed: int = 0, **options: Any) -> dict[str, Any]:
    source = {"type": "generated", "seed": seed}
    return run_module(artifact.main, {"path": str(root), "name": "tiny", "source": source, **options}, check)


def visible(root: Path) -> list[str]:
    """What looks like an artifact to whoever lists the folder."""
    folder = root / "tiny"
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if folder.exists() else []


def test_it_is_made_once(tmp_path: Path) -> None:
    first = run(tmp_path)
    folder = Path(first["folder"])
    assert first["changed"] is True
    assert first["problems"] == [f"{folder} is missing"]
    assert folder == tmp_path / "tiny" / first["digest"][:12]
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"} == {
        **FILES,
        "seed": b"\0",
    }
    second = run(tmp_path)
    assert (second["changed"], second["problems"], second["digest"]) == (False, [], first["digest"])
    assert list((tmp_path / "tiny").iterdir()) == [folder]


def test_its_manifest_lists_every_file_and_where_it_came_from(tmp_path: Path) -> None:
    answer = run(tmp_path, seed=3)
    manifest = parse_manifest((Path(answer["folder"]) / "manifest.json").read_text())
    assert manifest["digest"] == answer["digest"]
    assert set(manifest["files"]) == {*FILES, "seed"}
    assert (manifest["source"]["type"], manifest["source"]["seed"]) == ("generated", 3)


def test_it_is_read_only(tmp_path: Path) -> None:
    folder = Path(run(tmp_path)["folder"])
    assert folder.stat().st_mode & 0o777 == 0o555
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o444}


def test_another_seed_is_another_artifact_beside_it(tmp_path: Path) -> None:
    names = {run(tmp_path, seed=seed)["digest"][:12] for seed in (0, 1)}
    assert set(visible(tmp_path)) == names
    assert len(names) == 2


def test_check_mode_makes_nothing_and_says_so(tmp_path: Path) -> None:
    answer = run(tmp_path, check=True)
    assert answer["changed"] is True
    assert list(tmp_path.iterdir()) == []
    made = run(tmp_path)
    assert answer["digest"] == made["digest"]
    assert run(tmp_path, check=True)["changed"] is False


def flip(path: Path, place: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x80
    path.chmod(0o644)
    path.write_bytes(data)


def test_check_mode_verifies_and_leaves_what_is_wrong(tmp_path: Path) -> None:
    folder = Path(run(tmp_path)["folder"])
    flip(folder / "weights.bin")
    answer = run(tmp_path, check=True)
    assert answer["changed"] is True
    assert "weights.bin has SHA-256" in answer["problems"][0]
    assert visible(tmp_path) == [folder.name]


def test_a_flipped_byte_is_found_and_the_folder_kept_aside(tmp_path: Path) -> None:
    folder = Path(run(tmp_path)["folder"])
    flip(folder / "weights.bin", 1000)
    answer = run(tmp_path)
    assert answer["changed"] is True
    assert [text.split(",")[0].split(" has ")[0] for text in answer["problems"]] == ["weights.bin"]
    assert visible(tmp_path) == [folder.name, f"{folder.name}.bad-1"]
    assert (folder / "weights.bin").read_bytes() == FILES["weights.bin"]
    assert run(tmp_path)["changed"] is False
    # and once more: the first bad one is kept
    flip(folder / "config.json")
    run(tmp_path)
    assert visible(tmp_path) == [folder.name, f"{folder.name}.bad-1", f"{folder.name}.bad-2"]
    assert run(tmp_path)["changed"] is False


@pytest.mark.parametrize("place", [0, 30, -5])
def test_a_flipped_byte_in_the_manifest_is_found(tmp_path: Path, place: int) -> None:
    folder = Path(run(tmp_path)["folder"])
    flip(folder / "manifest.json", place)
    assert len(run(tmp_path)["problems"]) == 1
    assert run(tmp_path)["changed"] is False


def test_missing_and_surplus_files_are_found(tmp_path: Path) -> None:
    folder = Path(run(tmp_path)["folder"])
    (folder / "config.json").unlink()
    (folder / "extra").write_text("x")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "file").write_text("x")
    answer = run(tmp_path)
    assert answer["problems"] == [
        "config.json is missing",
        "deeper/file does not belong to it",
        "extra does not belong to it",
    ]
    assert run(tmp_path)["changed"] is False


def test_an_artifact_under_anothers_name_is_found(tmp_path: Path) -> None:
    good, other = (Path(run(tmp_path, seed=seed)["folder"]) for seed in (0, 1))
    good.rename(tmp_path / "good")
    other.rename(good)
    answer = run(tmp_path)
    assert answer["problems"] == [f"{good} holds the artifact with digest {other.name}"]
    assert run(tmp_path)["changed"] is False


@pytest.mark.parametrize("after", range(11))
def test_an_interrupted_run_leaves_nothing_visible_and_the_next_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Killed at each file, before and after it is on the disk."""
    steps = 0

    def stop(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        chmod = Path.chmod

        def stop_or_chmod(path: Path, mode: int) -> None:
            stop()
            chmod(path, mode)

        patch.setattr(os, "fsync", stop)
        patch.setattr(Path, "chmod", stop_or_chmod)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert visible(tmp_path) == []
    answer = run(tmp_path)
    assert answer["changed"] is True
    assert visible(tmp_path) == [answer["digest"][:12]]
    assert run(tmp_path)["changed"] is False
    # nothing of the interrupted one is left
    assert len(list((tmp_path / "tiny").iterdir())) == 1


def test_killed_right_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def killed(self: Path, target: Path) -> None:
            raise KeyboardInterrupt

        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert visible(tmp_path) == []
    assert run(tmp_path)["changed"] is True
    assert len(list((tmp_path / "tiny").iterdir())) == 1


def test_what_does_not_read_back_never_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "hash_folder", lambda folder: {})
    answer = run(tmp_path)
    assert answer["failed"] is True
    assert "does not read back as it was written" in answer["msg"]
    assert f"Check the disk under {tmp_path / 'tiny'}" in answer["msg"]
    assert visible(tmp_path) == []


def test_verify_only_takes_what_is_complete(tmp_path: Path) -> None:
    digest = run(tmp_path)["digest"]
    answer = run(tmp_path, manage=False)
    assert (answer["changed"], answer["digest"]) == (False, digest)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_verify_only_refuses_what_is_not(tmp_path: Path, there: bool, check: bool) -> None:
    if there:
        flip(Path(run(tmp_path)["folder"]) / "config.json")
    before = visible(tmp_path)
    answer = run(tmp_path, check=check, manage=False)
    assert answer["failed"] is True
    assert "artifact 'tiny' is not complete and this run may only verify" in answer["msg"]
    assert "Put it there, or let this run make it (manage: true)" in answer["msg"]
    assert ("config.json has SHA-256" if there else "is missing") in answer["msg"]
    assert visible(tmp_path) == before


def test_a_path_that_cannot_be_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text("a file")
    answer = run(tmp_path)
    assert answer["failed"] is True
    assert f"artifact 'tiny' in {tmp_path / 'tiny'}/" in answer["msg"]


def test_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "model_files", model_files)
    folder = Path(run(tmp_path)["folder"])
    assert json.loads((folder / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert artifact.verify(folder) == []
