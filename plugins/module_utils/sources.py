# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Where artifacts come from, as the operator writes it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import SHORT, digest
from ansible_collections.serving.gpu_node.plugins.module_utils.tiny_model import GENERATOR_VERSION

_REVISION = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Paths reach the node in lists with one path a line, and in mounts.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# What each type of source is told by: the fields that it needs, and those that it may have.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "archive": (("path",), ("folder", "include", "exclude", "digest")),
    "generated": (("seed",), ()),
    "hub": (("repository", "revision"), ("folder", "include", "exclude", "endpoint")),
    "mirror": (("url", "digest"), ()),
    "path": (("path",), ("include", "exclude", "adopt", "digest")),
    "peer": (("node",), ("digest",)),
}
# What an operator may choose; `generated` is the demo model's own.
CHOICES = ("hub", "mirror", "peer", "path", "archive")
# Where an artifact comes from on the way; they change nothing of what it is.
_WAYS = ("adopt", "endpoint")
# What a pack's recipe lies in: below `recipe/`, or at the top of a repository that is the recipe.
_RECIPE = ("recipe/", "docker/", "kernels/", "serve/", "patches/", "hooks/")
_WEIGHTS = ("*.safetensors",)


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
        return [f"{where}: type is missing; write type: {', '.join(CHOICES[:-1])} or {CHOICES[-1]}"], []
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
        problem = _FIELD_PROBLEMS[name](value) if name in _NO_TEXT or isinstance(value, str) else _no_text(value)
        if problem:
            problems.append(f"{where}: {name}{problem}")
    return problems, missing


def recipe_source(source: dict[str, Any]) -> dict[str, Any]:
    """Return a pack's source, narrowed to its recipe: the weights beside it may be hundreds of gigabytes.

    What the operator included or excluded stays so, and a digest already names just what is wanted.
    """
    # A recipe is small, and the build works on a copy of all that lies in its folder.
    own = {name: value for name, value in source.items() if name != "adopt"}
    if own.get("type") not in ("hub", "path", "archive") or own.get("digest"):
        return own
    return {"include": list(_RECIPE), "exclude": list(_WEIGHTS), **own}


def recipe_problems(recipe: str, has_pack: bool) -> list[str]:
    """Return why an image cannot be made in the way that the operator chose.

    :param recipe: ``auto``, ``own`` or ``pack``.
    """
    if recipe != "pack" or has_pack:
        return []
    return [
        "serving_image_recipe: pack needs a pack, and none is configured; set serving_plan_sources.pack to its "
        "repository and commit (profile 8x), or set serving_image_recipe: own"
    ]


def folder_source(source: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the source of one folder of a pack.

    :returns: an empty mapping where the pack's source does not tell it: a mirror and a digest name one artifact.
    """
    kind = source.get("type")
    own = {name: value for name, value in source.items() if name not in ("include", "exclude", "digest")}
    if kind == "peer":
        # A node keeps artifacts by their names.
        return own
    if kind == "path" and isinstance(source.get("path"), str) and not source.get("digest"):
        return {**own, "path": f"{source['path'].rstrip('/')}/{folder}"}
    if kind == "hub" or (kind == "archive" and not source.get("digest")):
        above = source.get("folder")
        return {**own, "folder": f"{above.rstrip('/')}/{folder}" if isinstance(above, str) and above else folder}
    return {}


def source_identity(source: dict[str, Any]) -> dict[str, Any]:
    """Return what tells one source from another: its fields without empty ones and without the way bytes take."""
    own = {name: value for name, value in source.items() if name not in _WAYS and value not in (None, "", [])}
    if own.get("folder"):
        own["folder"] = own["folder"].rstrip("/")
    if own["type"] == "generated":
        own |= {"generator": "tiny-deepseek-v3", "version": GENERATOR_VERSION}
    return own


def source_key(source: dict[str, Any]) -> str:
    """Return the short name of a source on a node: equal sources have equal keys on every node."""
    return digest(source_identity(source))[:SHORT]


def source_words(source: dict[str, Any]) -> str:
    """Return where an artifact comes from, for people; what is not filled in yet is shown as ``?``."""
    kind = source.get("type")
    if kind == "hub":
        folder = f", folder {source['folder']}" if source.get("folder") else ""
        through = f" through {source['endpoint']}" if source.get("endpoint") else ""
        commit = str(source.get("revision") or "?")[:SHORT]
        return f"{source.get('repository') or '?'}{folder} at {commit}{through}"
    if kind == "mirror":
        return f"{source.get('url') or '?'}"
    if kind == "peer":
        return f"node {source.get('node') or '?'}"
    if kind in ("path", "archive"):
        folder = f", folder {source['folder']}" if source.get("folder") else ""
        return f"{source.get('path') or '?'}{folder}{' as it lies there' if source.get('adopt') else ''}"
    return "nowhere: generated on the node"


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


def _digest_problem(value: str) -> str:
    return "" if _DIGEST.fullmatch(value) else f" {value!r} is no digest; give the 64 hex digits of the manifest's"


def _patterns_problem(value: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(item, str) and item.isprintable() and item for item in value):
        return f": {value!r} is no list of patterns; write it like ['*.safetensors', '*.json']"
    return ""


def _adopt_problem(value: Any) -> str:
    return "" if isinstance(value, bool) else f": {value!r} is not true or false; write adopt: true"


def _url_problem(value: str) -> str:
    try:
        parts = urlsplit(value)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return f" {value!r} is no URL; write it like https://mirror.example/models/name"
    if not whole or not value.isprintable() or " " in value:
        return f" {value!r} is no URL; write it like https://mirror.example/models/name"
    if parts.username or parts.password:
        # It would be printed with the plan.
        return ": the URL holds a user or a password, which would be shown; leave them out"
    if parts.query or parts.fragment:
        return f" {value!r} has a query; give the folder's address, to which file names are added"
    return ""


def _node_problem(value: str) -> str:
    return "" if value.isprintable() and " " not in value else f" {value!r} is no name of a host in the inventory"


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
    "adopt": _adopt_problem,
    "digest": _digest_problem,
    "endpoint": _url_problem,
    "exclude": _patterns_problem,
    "folder": _folder_problem,
    "include": _patterns_problem,
    "node": _node_problem,
    "path": _path_problem,
    "repository": _repository_problem,
    "revision": _revision_problem,
    "seed": _seed_problem,
    "url": _url_problem,
}
# Fields whose value is no text; their own checks say what it is.
_NO_TEXT = ("adopt", "exclude", "include", "seed")
