# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Manifests: what an artifact consists of, byte for byte, and digests of plans and releases."""

from __future__ import annotations

import hashlib
import json
from typing import Any

SHORT = 12
MANIFEST = "gpu-node-manifest.json"
# How far an unfinished artifact is, for peers.
STATE_FILE = ".gpu-node-state.json"


class ManifestError(ValueError):
    """A manifest that is not one."""


def canonical(value: Any) -> str:
    """Return the one JSON text of a value, so that equal values have equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """Return the SHA-256 (64 hex digits) of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def build_manifest(name: str, source: dict[str, Any], files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the manifest of an artifact.

    :param name: the artifact's name.
    :param source: where it came from: ``type``, and what tells one revision from another.
    :param files: relative path to ``{"size": bytes, "sha256": 64 hex digits}``.

    The digest covers the files alone: the same bytes from another source are the same artifact.
    """
    ordered = {path: files[path] for path in sorted(files)}
    return {"schema": 1, "name": name, "source": source, "files": ordered, "digest": digest(ordered)}


def parse_manifest(text: str) -> dict[str, Any]:
    """Read a manifest's text.

    :raises ManifestError: when it is not JSON, lacks a part, or its digest is not that of its files.
    """
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise ManifestError(f"the manifest is not JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ManifestError("the manifest has no mapping 'files'")
    try:
        matches = manifest.get("digest") == digest(manifest["files"])
    except UnicodeEncodeError as error:
        raise ManifestError(f"the manifest holds text that is no Unicode: {error}") from error
    if not matches:
        raise ManifestError("the manifest's digest is not that of its list of files")
    for path, entry in manifest["files"].items():
        problem = path_problem(path)
        if problem:
            raise ManifestError(f"the manifest lists {problem}")
        sound = isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and len(entry["sha256"]) == 64
        if not sound or not isinstance(entry.get("size"), int) or isinstance(entry["size"], bool) or entry["size"] < 0:
            raise ManifestError(f"the manifest's entry of {path} has no size and SHA-256")
    return manifest


def path_problem(path: Any) -> str:
    """Return why a listed file's path cannot be one inside an artifact, or an empty string.

    Listings come from elsewhere, and what they name is written to this node's disk.
    """
    if not isinstance(path, str) or not path:
        return f"{path!r} is no file name"
    # The first part: what an artifact's folder has of its own.
    if path.startswith("/") or path.split("/")[0] in (MANIFEST, STATE_FILE):
        return f"{path!r} cannot be a file of an artifact"
    if any(part in ("", ".", "..") for part in path.split("/")) or not path.isprintable() or len(path) > 1024:
        return f"{path!r} is not a plain path inside an artifact"
    if any(len(part.encode(errors="surrogatepass")) > 200 for part in path.split("/")):
        return f"{path!r} has a name of more than 200 bytes in it"
    return ""


def compare_files(wanted: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for every file that is missing, surplus, or of another size or content."""
    problems = [f"{path} is missing" for path in sorted(set(wanted) - set(found))]
    problems += [f"{path} does not belong to it" for path in sorted(set(found) - set(wanted))]
    for path in sorted(set(wanted) & set(found)):
        want, have = wanted[path], found[path]
        if want["size"] != have["size"]:
            problems.append(f"{path} has {have['size']} bytes, not {want['size']}")
        elif want["sha256"] != have["sha256"]:
            problems.append(f"{path} has SHA-256 {have['sha256']}, not {want['sha256']}")
    return problems
