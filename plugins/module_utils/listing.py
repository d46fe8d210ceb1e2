# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Listings: what a source holds, read from what a hub or a mirror answers."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import path_problem

Listing = dict[str, dict[str, Any]]
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ListingError(ValueError):
    """The answer is no listing of files that can be fetched; the text says why."""


def matches(path: str, patterns: list[str]) -> bool:
    """Tell whether a path matches a pattern; as on the hub, one that ends with ``/`` is a folder with all in it."""
    return any(fnmatch.fnmatch(path, pattern + "*" if pattern.endswith("/") else pattern) for pattern in patterns)


def select(paths: list[str], folder: str, include: list[str], exclude: list[str]) -> dict[str, str]:
    """Return the paths that a source takes, each with its name inside the artifact.

    Patterns are for the names inside the folder that the source takes.
    """
    prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
    inner = {path: path.removeprefix(prefix) for path in paths if path.startswith(prefix)}
    return {
        path: name
        for path, name in inner.items()
        if (not include or matches(name, include)) and not matches(name, exclude)
    }


def take(source: dict[str, Any], paths: list[str]) -> dict[str, str]:
    """Return the paths that a source takes by its ``folder``, ``include`` and ``exclude``; see ``select``."""
    return select(paths, source.get("folder") or "", source.get("include") or [], source.get("exclude") or [])


def hub_listing(answer: Any, source: dict[str, Any]) -> Listing:
    """Read the hub's answer for one revision of a repository, asked for with the details of its files.

    :param answer: the JSON value.
    :param source: a source of type ``hub``.
    :returns: by path inside the artifact ``size`` (bytes), ``sha256`` (of files in large file storage),
        ``git_sha1`` (of the others) and ``xet`` (whether Xet may have it).
    :raises ListingError: when it is another commit's, lacks what verification needs, or names no file.
    """
    try:
        commit, siblings = answer["sha"], {item["rfilename"]: item for item in answer["siblings"]}
    except (TypeError, KeyError) as error:
        raise ListingError(f"the hub's answer has no {error}; is the endpoint a hub?") from error
    if commit != source["revision"]:
        raise ListingError(f"the hub answered with commit {commit}, not {source['revision']}")
    taken = take(source, list(siblings))
    files = {}
    for path, name in taken.items():
        problem = path_problem(name)
        if problem:
            raise ListingError(f"{source['repository']}: {problem}")
        files[name] = _hub_file(path, siblings[path])
    if not files:
        raise ListingError(
            f"{source['repository']} at {source['revision']} has {len(siblings)} files, and folder, include and "
            "exclude leave none of them"
        )
    return files


def _hub_file(path: str, item: dict[str, Any]) -> dict[str, Any]:
    stored = item.get("lfs")
    sha256 = stored.get("sha256") if isinstance(stored, dict) else None
    size = stored.get("size") if isinstance(stored, dict) else item.get("size")
    git_sha1 = None if sha256 else item.get("blobId")
    verifiable = _SHA256.fullmatch(sha256 or "") or _SHA1.fullmatch(git_sha1 or "")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not verifiable:
        raise ListingError(f"the hub tells no size and no hash of {path}, so it could not be verified")
    # This answer does not say which large files Xet has; the hub tells when each of them is asked for.
    return {"size": size, "sha256": sha256, "git_sha1": git_sha1, "xet": bool(sha256)}


def manifest_listing(manifest: dict[str, Any]) -> Listing:
    """Return what an artifact's manifest lists, in the form of ``hub_listing``."""
    return {
        path: {"size": entry["size"], "sha256": entry["sha256"], "git_sha1": None, "xet": False}
        for path, entry in manifest["files"].items()
    }
