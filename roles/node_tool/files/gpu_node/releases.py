"""The releases that lie on this node."""

import json
from typing import Any

from gpu_node import files
from gpu_node.config import RELEASE_ID, linked_release
from gpu_node.tool import Tool

# The keys of a row and their headings.
COLUMNS = {
    "id": "release", "replica": "replica", "created": "created", "by": "by", "model": "model", "image": "image",
    "used_by": "used by",
}  # fmt: skip


def _object(text: str | None) -> dict[str, Any]:
    """The JSON object of a text; {} when there is none: a list of what lies around must not fail at one of them."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _named(value: Any, name: str, digest: str) -> str | None:
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        return None
    return f"{value[name]} {str(value.get(digest, '')).removeprefix('sha256:')[:12]}".strip()


def rows(tool: Tool) -> list[dict[str, Any]]:
    """One dict for each release, with the columns as keys, the oldest first. None: not noted in its folder."""
    used: dict[str, list[str]] = {}
    for replica in tool.node.replicas:
        for link in ("current", "previous"):
            if release := linked_release(tool.paths, replica.index, link):
                used.setdefault(release, []).append(f"{link} of {replica.index}")
    folder = tool.paths.releases
    found = []
    for identity in (entry.name for entry in folder.iterdir()) if folder.is_dir() else ():
        if not RELEASE_ID.fullmatch(identity):
            continue
        content = _object(files.read_text(folder / identity / "release.json"))
        manifest = _object(files.read_text(folder / identity / "manifest.json"))
        found.append(
            {
                "id": identity,
                "replica": content.get("replica"),
                "created": manifest.get("created"),
                "by": manifest.get("by"),
                "model": _named(content.get("model"), "name", "digest"),
                "image": _named(content.get("image"), "ref", "id"),
                "used_by": used.get(identity, []),
            }
        )
    return sorted(found, key=lambda row: (str(row["created"] or ""), str(row["replica"]), row["id"]))
