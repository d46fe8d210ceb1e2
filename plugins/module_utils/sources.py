# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Where artifacts come from, as the operator writes it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

_REVISION = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Paths reach the node in lists with one path a line, and in mounts.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
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
            if source.get("type") == "generated" and not same:
                # Only the demo's model can be made up; weights of a real one cannot.
                problems.append(f"serving_plan_sources: {key}: type 'generated' is not one of {', '.join(CHOICES)}")
                continue
            laid[key] = {**artifacts[key], "source": {**own, **source} if same else dict(source)}
    return laid, problems


def check_source(key: str, source: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Check one source.

    :returns: problems (what is wrong), and what the operator still has to fill in before anything can be fetched.
    """
    where = f"serving_plan_sources: {key}"
    kind = source.get("type")
    if kind is None:
        return [f"{where}: type is missing; write type: {' or type: '.join(CHOICES)}"], []
    # Whatever YAML holds may stand here, also what is no key of a mapping.
    if not isinstance(kind, str) or kind not in _FIELDS:
        return [f"{where}: type {kind!r} is not one of {', '.join(CHOICES)}"], []
    needed, optional = _FIELDS[kind]
    problems = [
        f"{where}: unknown field '{name}' of a source of type {kind}; it has {', '.join(needed + optional)}"
        for name in source
        if name not in ("type", *needed, *optional)
    ]
    # YAML's empty value is one that nobody has filled in yet.
    given = {name: source[name] for name in (*needed, *optional) if source.get(name) not in (None, "")}
    missing = [f"{where}: {name} of the source of type {kind}" for name in needed if name not in given]
    for name, value in given.items():
        problem = _FIELD_PROBLEMS[name](value) if name == "seed" or isinstance(value, str) else _no_text(value)
        if problem:
            problems.append(f"{where}: {name}{problem}")
    return problems, missing


def _no_text(value: Any) -> str:
    return f": {value!r} is no text; put it in quotes"


def _seed_problem(value: Any) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole else f": {value!r} is no whole number; write seed: 0"


def _repository_problem(value: str) -> str:
    return "" if _REPOSITORY.fullmatch(value) else f" {value!r} is no name like owner/model"


def _revision_problem(value: str) -> str:
    if _REVISION.fullmatch(value):
        return ""
    return f" {value!r} is no commit; branches and tags move, so give a commit's 40 hex digits (0-9, a-f)"


def _folder_problem(value: str) -> str:
    parts = value.rstrip("/").split("/")
    if _CONTROL.search(value) or any(part in ("", ".", "..") for part in parts):
        return f" {value!r} is not inside the repository; write it like drafter-code-k7"
    return ""


def _path_problem(value: str) -> str:
    if not value.startswith("/"):
        return f" {value!r} is not absolute; write the folder on the node from / on"
    if ".." in value.split("/") or _CONTROL.search(value):
        return f" {value!r} has '..' or a control character in it; write the folder on the node as it is, from / on"
    return ""


_FIELD_PROBLEMS: dict[str, Callable[[Any], str]] = {
    "folder": _folder_problem,
    "path": _path_problem,
    "repository": _repository_problem,
    "revision": _revision_problem,
    "seed": _seed_problem,
}
