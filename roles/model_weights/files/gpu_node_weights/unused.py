"""Which artifacts nothing needs any more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import (
    Store,
    complete_folders,
    files_below,
    read_json,
    stores,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import SHORT

from gpu_node_weights.errors import WeightsError
from gpu_node_weights.local import remove_tree


@dataclass(frozen=True)
class Unused:
    """A folder that nothing needs; ``size`` is what removing it frees, in bytes."""

    folder: Path
    size: int
    why: str


def needed_releases(releases: Path, replicas: Path) -> set[str]:
    """Return the releases that a replica points at, and those that a rollout or a switch leads to or came from.

    The latter go by the records of the node's command: wanted.json beside ``replicas``, and each replica's switch.json.
    One of theirs that is not on the node any more needs nothing: nobody can serve it.

    :raises WeightsError: when a record cannot be read: what it needs is not known, so nothing may be removed.
    """
    links = [link for index in replicas.glob("*") for link in (index / "current", index / "previous")]
    records = [replicas.parent / "wanted.json", *replicas.glob("*/switch.json")]
    recorded = {name for file in records if file.exists() for name in _recorded(file)}
    return {link.readlink().name for link in links if link.is_symlink()} | {
        name for name in recorded if (releases / name).is_dir()
    }


def _recorded(file: Path) -> list[str]:
    """Return the releases that a record names."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if file.name == "wanted.json":
            names = [*record["targets"].values(), *record.get("before", {}).values()]
        else:
            names = [record["from"], record["to"]]
        # Nothing served there before.
        return [str(name) for name in names if name is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{file} cannot be read ({error}), so which releases it names is not known; "
            "look at `gpu-node status`, and remove the file when every replica serves what it should"
        ) from error


def used_artifacts(releases: Path, replicas: Path) -> set[tuple[str, str]]:
    """Return name and short digest of every artifact that a needed release uses.

    :raises WeightsError: when a release cannot be read: what it uses is not known, so nothing may be removed.
    """
    used = set()
    for name in sorted(needed_releases(releases, replicas)):
        file = releases / name / "release.json"
        try:
            release = json.loads(file.read_text(encoding="utf-8"))
            parts = [release["model"], *([release["drafter"]] if release.get("drafter") else [])]
            used |= {(part["name"], part["digest"][:SHORT]) for part in parts}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsError(
                f"{file} cannot be read ({error}), so what this release uses is not known; "
                "run site.yml, which writes it again, and then this"
            ) from error
    return used


def find_unused(root: Path, releases: Path, replicas: Path) -> list[Unused]:
    """Return what could be removed: artifacts out of use, and what was moved aside.

    What is being fetched stays: it is what the next run goes on with.
    """
    used = used_artifacts(releases, replicas)
    found = []
    for store in stores(root):
        for folder in complete_folders(store):
            if (store.name, folder.name) not in used:
                found.append(Unused(folder, _frees(folder), "no release that is served, wanted or a way back uses it"))
        for folder in sorted(store.base.glob("*.bad-*")):
            found.append(Unused(folder, _frees(folder), "its bytes were wrong"))
    return found


def _frees(folder: Path) -> int:
    """Return the bytes that only this folder holds: a file with another link stays on the disk."""
    if folder.is_symlink():
        return 0
    return sum(file.stat().st_size for file in files_below(folder).values() if file.stat().st_nlink == 1)


def remove(root: Path, unused: Unused) -> None:
    """Remove one folder and what is kept about it."""
    store = Store(root, unused.folder.parent.name)
    name = unused.folder.name
    for record in _records(store, name):
        record.unlink(missing_ok=True)
    if unused.folder.is_symlink():
        # The operator's own folder stays as it is.
        unused.folder.unlink()
    else:
        # Out of sight first: half a folder must not look complete.
        gone = unused.folder.with_name(f".removed-{name}")
        unused.folder.rename(gone)
        remove_tree(gone)


def _records(store: Store, name: str) -> Iterator[Path]:
    yield store.base / ".verified" / f"{name}.json"
    yield store.base / ".adopted" / f"{name}.json"
    for source in (store.base / ".sources").glob("*.json"):
        if str(read_json(source).get("digest", ""))[:SHORT] == name:
            yield source
            yield store.base / ".served" / source.stem
