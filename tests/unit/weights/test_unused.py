"""What may be removed: never what a release uses that is served, wanted or a way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_node_weights import cli
from gpu_node_weights.errors import WeightsError
from gpu_node_weights.unused import find_unused

from tests.unit.plugins.test_artifact_store import make


class Node:
    """The folders of a node."""

    def __init__(self, base: Path) -> None:
        self.root, self.releases, self.replicas = base / "artifacts", base / "releases", base / "replicas"
        for folder in (self.releases, self.replicas):
            folder.mkdir(parents=True)

    def release(self, name: str, model: Path, drafter: Path | None = None) -> None:
        def part(folder: Path | None) -> dict[str, str] | None:
            return {"name": folder.parent.name, "digest": folder.name + "0" * 52} if folder else None

        (self.releases / name).mkdir()
        (self.releases / name / "release.json").write_text(json.dumps({"model": part(model), "drafter": part(drafter)}))

    def link(self, replica: int, what: str, release: str) -> None:
        (self.replicas / str(replica)).mkdir(exist_ok=True)
        (self.replicas / str(replica) / what).symlink_to(self.releases / release)

    def wanted(self, targets: dict[str, str], before: dict[str, str | None]) -> None:
        """What a rollout has said."""
        record = {"rollout": "x", "state": "failed", "targets": targets, "before": before}
        (self.replicas.parent / "wanted.json").write_text(json.dumps(record))

    def switched(self, replica: int, source: str | None, target: str) -> None:
        """The journal of a switch."""
        (self.replicas / str(replica)).mkdir(exist_ok=True)
        journal = {"from": source, "to": target, "step": "start", "outcome": None}
        (self.replicas / str(replica) / "switch.json").write_text(json.dumps(journal))

    def unused(self) -> list[str]:
        return [item.folder.name for item in find_unused(self.root, self.releases, self.replicas)]

    def command(self, *more: str) -> int:
        folders = ["--releases", str(self.releases), "--replicas", str(self.replicas)]
        return cli.main(["unused", str(self.root), *folders, *more])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_current_previous_and_drafter_stay(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    old, new, head, lost = (make(node.root, {"a": name.encode()}, name=name) for name in ("m", "n", "head", "lost"))
    node.release("one", old)
    node.release("two", new, head)
    node.release("three", lost)
    node.link(0, "previous", "one")
    node.link(0, "current", "two")
    assert node.unused() == [lost.name]
    assert node.command() == 0
    assert capsys.readouterr().out == f"{lost}: 4 bytes, no release that is served, wanted or a way back uses it\n"
    assert lost.is_dir()
    assert node.command("--remove", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {"folder": str(lost), "bytes": 4, "why": "no release that is served, wanted or a way back uses it"}
    ]
    assert not lost.exists() and old.is_dir() and new.is_dir() and head.is_dir()
    # nothing that would be taken for a record of it is left
    assert [path for path in lost.parent.rglob("*") if path.is_file()] == []
    assert node.unused() == []


def test_what_a_rollout_leads_to_and_came_from_stays(node: Node) -> None:
    """Staged, half-switched, or stopped at its canary: it goes on with this, or back to it."""
    names = ("served", "target", "before", "from", "to", "lost")
    folders = {name: make(node.root, {"a": name.encode()}, name=name) for name in names}
    for name in names:
        node.release(name, folders[name])
    node.link(0, "current", "served")
    node.wanted({"0": "target", "1": "gone"}, {"0": "before", "1": None})
    node.switched(0, "from", "to")
    node.switched(1, None, "served")
    assert node.unused() == [folders["lost"].name]


@pytest.mark.parametrize("name", ["wanted.json", "replicas/0/switch.json"])
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"targets": [], "from": "x"}'])
def test_a_record_that_cannot_be_read_stops_it(
    node: Node, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(node.root)
    path = node.replicas.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert node.command("--remove") == 1
    assert f"{path} cannot be read" in capsys.readouterr().err and folder.is_dir()


def test_what_is_being_fetched_stays_and_what_was_wrong_goes(node: Node) -> None:
    folder = make(node.root)
    folder.rename(folder.with_name(f"{folder.name}.bad-1"))
    part = folder.parent / ".incoming/0123456789ab/parts/a.part"
    part.parent.mkdir(parents=True)
    part.write_text("x")
    assert node.unused() == [f"{folder.name}.bad-1"]
    assert node.command("--remove") == 0
    assert part.exists() and node.unused() == []


def test_a_file_with_another_link_frees_nothing(node: Node) -> None:
    folder = make(node.root, {"a": b"12345", "b": b"123"})
    (node.root / "kept").hardlink_to(folder / "a")
    assert [item.size for item in find_unused(node.root, node.releases, node.replicas)] == [3]


def test_the_operators_own_folder_is_only_forgotten(node: Node, tmp_path: Path) -> None:
    mine = make(tmp_path / "mine")
    link = node.root / "tiny" / mine.name
    link.parent.mkdir(parents=True)
    link.symlink_to(mine)
    assert node.command("--remove") == 0
    assert not link.is_symlink() and (mine / "config.json").exists()


@pytest.mark.parametrize("text", [None, "", "{}", '{"model": {"name": "m"}}'])
def test_a_release_that_cannot_be_read_stops_it(
    node: Node, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What such a release uses is not known."""
    folder = make(node.root)
    (node.releases / "one").mkdir()
    if text is not None:
        (node.releases / "one/release.json").write_text(text)
    node.link(0, "current", "one")
    with pytest.raises(WeightsError):
        node.unused()
    assert node.command("--remove") == 1
    assert "run site.yml, which writes it again" in capsys.readouterr().err
    assert folder.is_dir()


def test_an_empty_node(node: Node) -> None:
    assert node.unused() == []
