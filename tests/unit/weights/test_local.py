"""Folders on the node as sources: what is taken, and what is refused by name."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from gpu_node_weights.errors import WeightsError
from gpu_node_weights.local import archive_members, copy_file, leaves_folder, source_folder


def folder(path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "path", "path": str(path), **more}


def test_only_what_is_included_is_taken(tmp_path: Path) -> None:
    for name in ("recipe/docker/build.sh", "recipe/w.safetensors", "model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    files = source_folder(folder(tmp_path, include=["recipe/"], exclude=["*.safetensors"]))
    assert list(files) == ["recipe/docker/build.sh"]
    with pytest.raises(WeightsError, match="holds no file that its include and exclude take"):
        source_folder(folder(tmp_path, include=["other/"]))


def test_only_one_folder_of_an_archive_is_taken_and_its_files_are_named_from_there(tmp_path: Path) -> None:
    (tmp_path / "pack/drafter").mkdir(parents=True)
    (tmp_path / "pack/drafter/config.json").write_text("{}")
    (tmp_path / "pack/other").write_text("1")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "pack", "pack")
    source = {"type": "archive", "path": str(tmp_path / "a.tar"), "folder": "pack/drafter"}
    assert [(name, size) for name, size, _ in archive_members(source, lambda name, size: False)] == [("config.json", 2)]


def test_a_hubs_cache_is_taken_through_its_links(tmp_path: Path) -> None:
    """As the hub's own client lays it: links from a snapshot to blobs outside of it."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/abc").write_text("bytes")
    snapshot = tmp_path / "snapshots/rev"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / ".cache/huggingface").mkdir(parents=True)
    (snapshot / ".cache/huggingface/x.lock").write_text("")
    files = source_folder(folder(snapshot))
    assert list(files) == ["config.json"]
    # a container that has only the snapshot could not follow it
    assert leaves_folder(str(snapshot), files) == ["config.json"]
    assert leaves_folder(str(tmp_path), source_folder(folder(tmp_path))) == []


def test_a_link_to_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine/sub").mkdir(parents=True)
    (tmp_path / "mine/a").write_text("1")
    (tmp_path / "mine/sub/b").write_text("1")
    (tmp_path / "mine/more").symlink_to("sub")
    with pytest.raises(WeightsError) as caught:
        source_folder(folder(tmp_path / "mine"))
    assert str(caught.value).startswith(f"{tmp_path / 'mine/more'} is a link to a folder, whose files would be missed")


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "is no folder on this node"), (tmp_path, "holds no file")):
        with pytest.raises(WeightsError) as caught:
            source_folder(folder(path))
        assert words in str(caught.value)


@pytest.mark.parametrize("there", [0, 1, 5000, 9999, 10000, 20000])
def test_a_copy_goes_on_from_what_is_there(tmp_path: Path, there: int) -> None:
    data = bytes(range(250)) * 40
    (tmp_path / "a").write_bytes(data)
    part = tmp_path / "parts/a.part"
    part.parent.mkdir()
    part.write_bytes((data * 2)[:there])
    counted: list[int] = []
    copy_file(tmp_path / "a", part, counted.append)
    assert part.read_bytes() == data
    assert sum(counted) == 10000
