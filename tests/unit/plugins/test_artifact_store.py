"""What a node's disk says of its artifacts: complete, damaged, begun, and what a fetch can take from it."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils import artifact_store
from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import (
    Store,
    begun,
    complete_folders,
    free_bytes,
    hash_file,
    needed_bytes,
    reusable,
    seen_at_source,
    stamp,
    stores,
    write_json,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import MANIFEST, build_manifest

FILES = {"config.json": b"{}\n", "sub/weights.bin": bytes(range(256)) * 64, "empty": b""}


def entry(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def make(root: Path, files: dict[str, bytes] | None = None, name: str = "tiny") -> Path:
    """An artifact as a fetch leaves it."""
    files = FILES if files is None else files
    manifest = build_manifest(name, {"type": "path"}, {path: entry(data) for path, data in files.items()})
    store = Store(root, name)
    folder = store.folder(manifest["digest"])
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    write_json(folder / MANIFEST, manifest)
    store.write_stamps(manifest["digest"], "now", {path: stamp(folder / path) for path in files})
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed from here on."""
    names: list[str] = []

    def note(path: Path, git: bool = False, tick: object = None) -> artifact_store.Sums:
        names.append(path.name)
        return hash_file(path, git)

    monkeypatch.setattr(artifact_store, "hash_file", note)
    return names


def flip(path: Path) -> None:
    """Change a byte so that size, time and inode stay: only hashing can tell."""
    seen = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


@pytest.mark.parametrize("size", [0, 1, 1000, artifact_store.BLOCK, 2 * artifact_store.BLOCK + 7])
def test_hashes_are_those_of_the_usual_tools(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(size))
    sums = hash_file(file, git=True)
    sha256 = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout.split()[0]
    git = subprocess.run(["git", "hash-object", file], capture_output=True, text=True, check=True).stdout.strip()
    assert (sums.size, sums.sha256, sums.git_sha1) == (size, sha256, git)
    assert hash_file(file).git_sha1 == ""


def test_what_was_hashed_is_not_hashed_again(tmp_path: Path, hashed: list[str]) -> None:
    folder = make(tmp_path)
    problems, stamps, manifest = Store(tmp_path, "tiny").check(folder)
    assert (problems, set(stamps), hashed) == ([], set(FILES), [])
    assert manifest["digest"].startswith(folder.name)
    problems, _, _ = Store(tmp_path, "tiny").check(folder, again=True)
    assert (problems, sorted(hashed)) == ([], ["config.json", "empty", "weights.bin"])


def test_only_a_file_that_was_touched_is_hashed(tmp_path: Path, hashed: list[str]) -> None:
    folder = make(tmp_path)
    os.utime(folder / "config.json", (1, 1))
    assert Store(tmp_path, "tiny").check(folder)[0] == []
    assert hashed == ["config.json"]


def test_rot_that_no_stamp_shows_is_found_by_hashing_again(tmp_path: Path) -> None:
    folder = make(tmp_path)
    flip(folder / "sub/weights.bin")
    store = Store(tmp_path, "tiny")
    assert store.check(folder)[0] == []
    problems, stamps, manifest = store.check(folder, again=True)
    assert len(problems) == 1 and problems[0].startswith("sub/weights.bin has SHA-256 ")
    # who writes the stamps of the sound files only makes the next quick look find it too
    store.write_stamps(manifest["digest"], "now", stamps)
    assert store.check(folder)[0] == problems


def test_missing_surplus_and_cut_files(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "config.json").unlink()
    (folder / "extra").write_text("x")
    (folder / "sub/weights.bin").write_bytes(b"x")
    assert Store(tmp_path, "tiny").check(folder)[0] == [
        "config.json is missing",
        "extra does not belong to it",
        "sub/weights.bin has 1 bytes, not 16384",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {}, "digest": "x"}'])
def test_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    folder = make(tmp_path)
    (folder / MANIFEST).chmod(0o644)
    (folder / MANIFEST).write_text(text)
    problems, stamps, _ = Store(tmp_path, "tiny").check(folder)
    assert len(problems) == 1 and MANIFEST in problems[0] and stamps == {}


def test_another_artifact_under_its_name(tmp_path: Path) -> None:
    good, other = make(tmp_path), make(tmp_path, {"a": b"1"})
    good.rename(tmp_path / "good")
    other.rename(good)
    assert "holds the artifact with digest" in Store(tmp_path, "tiny").check(good)[0][0]


def test_an_adopted_folder_may_have_more_in_it(tmp_path: Path) -> None:
    made = make(tmp_path / "elsewhere")
    store = Store(tmp_path / "root", "tiny")
    store.base.mkdir(parents=True)
    folder = store.base / made.name
    folder.symlink_to(made)
    write_json(store.base / ".adopted" / f"{made.name}.json", store.manifest(made))
    (made / "README").write_text("more")
    assert store.check(folder)[0] == []
    aside = store.move_aside(folder)
    assert not folder.is_symlink() and made.is_dir() and aside == folder


def test_aside_is_never_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path, "tiny")
    names = [store.move_aside(make(tmp_path)).name for _ in range(3)]
    assert [name.rsplit("-", 1)[1] for name in names] == ["1", "2", "3"]
    assert complete_folders(store) == []


def test_only_folders_named_like_artifacts_are_complete(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder.parent / ".incoming/0123456789ab").mkdir(parents=True)
    (folder.parent / "0123456789a").mkdir()
    (folder.parent / "0123456789ab").write_text("a file")
    assert complete_folders(Store(tmp_path, "tiny")) == [folder]
    assert [store.name for store in stores(tmp_path)] == ["tiny"]
    assert list(stores(tmp_path / "none")) == []


def test_files_of_other_artifacts_are_used_again(tmp_path: Path) -> None:
    folder = make(tmp_path, name="other")
    weights = entry(FILES["sub/weights.bin"])
    wanted: dict[str, dict[str, Any]] = {"renamed.bin": weights, "new": entry(b"new"), "unknown": {"size": 3}}
    assert reusable(tmp_path, wanted) == {"renamed.bin": folder / "sub/weights.bin"}
    # a file that has changed since it was hashed is not believed
    os.utime(folder / "sub/weights.bin", (1, 1))
    assert reusable(tmp_path, wanted) == {}


def test_what_a_fetch_takes(tmp_path: Path) -> None:
    make(tmp_path, name="other")
    incoming = tmp_path / "tiny/.incoming/0123456789ab"
    (incoming / "parts/sub").mkdir(parents=True)
    (incoming / "files").mkdir()
    (incoming / "parts/sub/b.bin.part").write_bytes(b"x" * 40)
    (incoming / "parts/sub/c.bin.part.xet").write_bytes(b"x" * 40)
    (incoming / "files/a.bin").write_bytes(b"x" * 100)
    assert begun(incoming) == {"sub/b.bin": 40, "a.bin": 100}
    sizes = {path: {"size": 100, "sha256": "0" * 64} for path in ("a.bin", "sub/b.bin", "sub/c.bin")}
    listing = {**sizes, "linked": entry(FILES["sub/weights.bin"])}
    assert needed_bytes(tmp_path, incoming, listing) == (60 + 100, 16384, ["sub/b.bin", "sub/c.bin"])
    assert needed_bytes(tmp_path / "none", tmp_path / "none", sizes) == (300, 0, list(sizes))


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a/b/c") == pytest.approx(free_bytes(tmp_path), rel=0.1)


def test_a_source_on_this_node_shows_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    source = {"type": "path", "path": str(tmp_path)}
    before = seen_at_source(source)
    assert set(before) == {"a"}
    os.utime(tmp_path / "a", (1, 1))
    assert seen_at_source(source) != before
    assert seen_at_source({"type": "path", "path": str(tmp_path / "gone")}) == {}
    assert set(seen_at_source({"type": "archive", "path": str(tmp_path / "a")})) == {""}
    assert seen_at_source({"type": "generated", "seed": 0}) == {}


@pytest.mark.parametrize("text", ["", "[]", "nonsense"])
def test_damaged_records_only_cost_hashing_again(tmp_path: Path, hashed: list[str], text: str) -> None:
    folder = make(tmp_path)
    record = folder.parent / ".verified" / f"{folder.name}.json"
    record.chmod(0o644)
    record.write_text(text)
    assert Store(tmp_path, "tiny").check(folder)[0] == []
    assert len(hashed) == 3
