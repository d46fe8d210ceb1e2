# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Where artifacts come from, as the operator writes it."""

from __future__ import annotations

import difflib
import re
from typing import Any

_REVISION = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What each type of source is told by: the fields that it needs, and those that it may have.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "generated": (("seed",), ()),
    "hub": (("repository", "revision"), ("folder",)),
    "path": (("path",), ()),
}
# What an operator may choose; `generated` is the demo model's own.
CHOICES = ("hub", "path")


def lay_sources(artifacts: dict[str, Any], given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Lay the operator's sources over those of a profile.

    :param artifacts: by key (``model``, ``drafter``), each with ``name`` and ``source``.
    :param given: sources by the same keys; one of the same type needs only the fields that differ.
    :returns: the artifacts with their sources, and a sentence for every key that is none of the profile's.
    """
    problems = []
    laid = dict(artifacts)
    for key, source in given.items():
        if key not in artifacts:
            near = difflib.get_close_matches(str(key), artifacts, n=1, cutoff=0.0)[0]
            problems.append(f"serving_plan_sources: unknown artifact '{key}'; the nearest known one is '{near}'")
        elif not isinstance(source, dict):
            problems.append(
                f"serving_plan_sources: {key}: {source!r} is no mapping; write {{type: path, path: /srv/...}}"
            )
        else:
            own = artifacts[key]["source"]
            same = source.get("type", own.get("type")) == own.get("type")
            laid[key] = {**artifacts[key], "source": {**own, **source} if same else dict(source)}
    return laid, problems


def check_source(key: str, source: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Check one source.

    :returns: problems (what is wrong), and what the operator still has to fill in before anything can be fetched.
    """
    where = f"serving_plan_sources: {key}"
    kind = source.get("type")
    if kind not in _FIELDS:
        return [f"{where}: type {kind!r} is not one of {', '.join(CHOICES)}"], []
    needed, optional = _FIELDS[kind]
    problems = [
        f"{where}: unknown field '{name}' of a source of type {kind}; it has {', '.join(needed + optional)}"
        for name in source
        if name not in ("type", *needed, *optional)
    ]
    wrong = [name for name in (*needed, *optional) if not isinstance(source.get(name, ""), str) and name != "seed"]
    problems += [f"{where}: {name}: {source[name]!r} is no text; put it in quotes" for name in wrong]
    missing = [f"{where}: {name} of the source of type {kind}" for name in needed if source.get(name, "") == ""]
    if wrong:
        return problems, missing
    if kind == "hub":
        repository, revision = source.get("repository", ""), source.get("revision", "")
        if repository and not _REPOSITORY.fullmatch(repository):
            problems.append(f"{where}: repository '{repository}' is no name like owner/model")
        if revision and not _REVISION.fullmatch(revision):
            problems.append(
                f"{where}: revision '{revision}' is no commit; branches and tags move, so give a commit's 40 hex digits"
            )
        folder = source.get("folder", "")
        if folder.startswith("/") or ".." in folder.split("/"):
            problems.append(f"{where}: folder '{folder}' is not inside the repository; write it like drafter-code-k7")
    if kind == "path" and source.get("path") and not source["path"].startswith("/"):
        problems.append(f"{where}: path '{source['path']}' is not absolute; write the folder on the node from / on")
    return problems, missing
