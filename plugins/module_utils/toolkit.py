# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Versions of nvidia-container-toolkit: which are refused, and which a repository has."""

from __future__ import annotations

import re
from typing import Any


def parse_version(text: str) -> str:
    """Return the version in what ``nvidia-ctk --version`` printed, or in a package's; empty when there is none."""
    match = re.search(r"[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}", text)
    return match[0] if match else ""


def numbers(version: str) -> tuple[int, ...]:
    """Return what versions are compared by; empty for a text that begins with none."""
    match = re.match(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?", version)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def toolkit_problem(version: str, podman: str, known: list[dict[str, Any]]) -> str:
    """Return why this version of nvidia-container-toolkit is refused; empty when it is not.

    :param version: for example ``1.18.2``; empty when none is there or asked for.
    :param podman: Podman's version; empty when unknown.
    :param known: what is known of versions, each ``{"version", "good": bool, "why", "source", "podman_below"}``. A
        version may end in ``and older`` or ``and newer``; with ``podman_below`` it is said of older Podmans alone.
    """
    own, engine = numbers(version), numbers(podman)
    good = ", ".join(str(entry["version"]) for entry in known if entry["good"])
    for entry in known:
        stated, limit = str(entry["version"]), numbers(str(entry.get("podman_below", "")))
        if not own or entry["good"] or (limit and not (engine and engine < limit)):
            continue
        base = numbers(stated)
        if own == base or (own < base and stated.endswith("older")) or (own > base and stated.endswith("newer")):
            return (
                f"nvidia-container-toolkit {version} is known to be bad: {entry['why']} ({entry['source']});"
                f" known to be good: {good}"
            )
    return ""


def parse_madison(text: str) -> list[str]:
    """Return the versions of a package in what ``apt-cache madison`` printed, in its order: newest first."""
    rows = [line.split("|") for line in text.splitlines()]
    return list(dict.fromkeys(row[1].strip() for row in rows if len(row) == 3 and row[1].strip()))


def select_version(text: str, wanted: str) -> dict[str, Any]:
    """Choose a package's version.

    :param text: what ``apt-cache madison`` printed.
    :param wanted: a version without the packager's part, ``1.18.2``; empty takes the newest.
    :returns: ``{"version": str, "available": [str]}``; the version is empty when there is none.
    """
    available = parse_madison(text)
    chosen = [item for item in available if not wanted or item == wanted or item.startswith(f"{wanted}-")]
    return {"version": chosen[0] if chosen else "", "available": available}
