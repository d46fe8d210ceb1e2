# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""A pack's settings file (``serve/profile-8x.env``), read without a shell and compared with the plan's environment."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.settings import SETTINGS, recipe_environment

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(rf"({_NAME.pattern})=")
# `: "${X:=default}"` is the shell's way to set what is not set yet.
_COLON = re.compile(rf""":\s+("?)\$\{{({_NAME.pattern}):?=([^{{}}$`]*)\}}\1\s*(?:#.*)?""")
# What is between these happens only sometimes, so nobody can tell what it sets.
_BEGINS = re.compile(r"(?:if|case|for|while|until|function)\b|.*[({]\s*$")
_ENDS = re.compile(r"(?:fi|esac|done)\b|[)}]\s*$")
_IN_QUOTES = '$`"\\'
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass
class PackEnvironment:
    """What the file sets, in its order, and the lines (``number: text``) that were not understood."""

    values: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


class _NotUnderstoodError(ValueError):
    """A line that only a shell could tell the meaning of."""


def parse_environment(text: str) -> PackEnvironment:
    """Read assignments as a shell would: quotes, comments, ``export``, ``$X``, ``${X}`` and ``${X:-default}``.

    A name that the file has not set counts as not set, so its default holds. Nothing is ever run.
    """
    found = PackEnvironment()
    depth = 0
    for number, line in _lines(text):
        if _BEGINS.match(line) or _ENDS.match(line) or depth:
            depth = max(0, depth + bool(_BEGINS.match(line)) - bool(_ENDS.match(line)))
            found.unread.append(f"{number}: {line}")
            continue
        try:
            found.values.update(_read_line(line, found.values))
        except _NotUnderstoodError:
            found.unread.append(f"{number}: {line}")
    return found


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the lines that say something, with their numbers; one that ends with a backslash goes on in the next."""
    lines: list[tuple[int, str]] = []
    begun, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        start = start if begun else number
        if raw.endswith("\\") and not raw.lstrip().startswith("#"):
            begun += raw[:-1]
            continue
        line = (begun + raw).strip()
        begun = ""
        if line and not line.startswith("#"):
            lines.append((start, line))
    return [*lines, (start, begun.strip())] if begun.strip() else lines


def _read_line(line: str, known: dict[str, str]) -> dict[str, str]:
    default = _COLON.fullmatch(line)
    if default:
        return {default[2]: known.get(default[2]) or default[3]}
    rest = re.sub(r"^(?:export|declare -x|readonly)\s+", "", line)
    found: dict[str, str] = {}
    while rest and not rest.startswith("#"):
        assignment = _ASSIGNMENT.match(rest)
        if not assignment:
            raise _NotUnderstoodError
        value, rest = _word(rest[assignment.end() :], {**known, **found})
        found[assignment[1]] = value
    return found


def _word(text: str, known: dict[str, str]) -> tuple[str, str]:
    """Return the value at the start of a text, and what comes after it and the space behind it."""
    value, place, quoted = "", 0, False
    while place < len(text):
        sign = text[place]
        if not quoted and sign.isspace():
            break
        if not quoted and sign == "'":
            end = text.find("'", place + 1)
            if end < 0:
                raise _NotUnderstoodError
            value, place = value + text[place + 1 : end], end + 1
        elif sign == '"':
            quoted, place = not quoted, place + 1
        elif sign == "\\" and place + 1 < len(text):
            following = text[place + 1]
            value += following if not quoted or following in _IN_QUOTES else sign + following
            place += 2
        elif sign == "$":
            inner, place = _expand(text, place, known)
            value += inner
        elif sign == "`" or (not quoted and sign in ";&|<>()"):
            raise _NotUnderstoodError
        else:
            value, place = value + sign, place + 1
    if quoted:
        raise _NotUnderstoodError
    return value, text[place:].lstrip()


def _expand(text: str, place: int, known: dict[str, str]) -> tuple[str, int]:
    """Return the value of the ``$`` at a place of a text, and the place behind it."""
    if not text.startswith("${", place):
        name = _NAME.match(text, place + 1)
        if not name or name[0] not in known:
            raise _NotUnderstoodError
        return known[name[0]], name.end()
    end = _closing(text, place + 1)
    name = _NAME.match(text, place + 2)
    if not name or name.end() > end:
        raise _NotUnderstoodError
    form = text[name.end() : end]
    own = known.get(name[0])
    if not form and own is not None:
        return own, end + 1
    operator = next((one for one in (":-", ":=", "-", "=") if form.startswith(one)), "")
    if not operator:
        raise _NotUnderstoodError
    if own is None or (operator.startswith(":") and not own):
        # In double quotes: what a default holds is one value, spaces and all.
        default = form[len(operator) :]
        own, _ = _word(default if default[:1] in ("'", '"') else f'"{default}"', known)
    return own, end + 1


def _closing(text: str, place: int) -> int:
    depth = 0
    for at in range(place, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise _NotUnderstoodError


def compare_environment(pack: dict[str, str], ours: dict[str, str], settings: dict[str, Any]) -> dict[str, Any]:
    """Compare a pack's settings with those that a replica gets.

    :param pack: what the pack's file sets.
    :param ours: a replica's environment.
    :param settings: the plan's; those that the recipe has a name for are looked for in the pack.
    :returns: ``different`` (each with ``name``, ``pack`` and ``ours``), ``only_pack`` (values by name) and
        ``only_ours`` (names of the recipe that the pack does not set). Other spellings of a value do not differ.
    """
    kinds = {setting.environment: setting.kind for setting in SETTINGS.values() if setting.environment}
    recipe = ["PROFILE", *recipe_environment(settings)]
    return {
        "different": [
            {"name": name, "pack": value, "ours": ours[name]}
            for name, value in pack.items()
            if name in ours and not _same(kinds.get(name, "text"), value, ours[name])
        ],
        "only_pack": {name: value for name, value in pack.items() if name not in ours},
        "only_ours": [name for name in recipe if name in ours and name not in pack],
    }


def _same(kind: str, one: str, other: str) -> bool:
    return one == other or (_meaning(kind, one) is not None and _meaning(kind, one) == _meaning(kind, other))


def _meaning(kind: str, text: str) -> Any:
    """Return what a value of a kind stands for, or None when it is none of that kind."""
    if kind == "flag":
        return _SWITCH.get(text.lower())
    if kind in ("int", "number"):
        return float(text) if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text) else None
    if kind in ("vllm_size", "podman_size"):
        size = _SIZE.fullmatch(text.strip())
        if not size:
            return None
        number, unit, suffix = size.groups()
        # vLLM's small letters are decimal; podman's letters, and those with an i, never are.
        decimal = kind == "vllm_size" and unit.islower() and not suffix
        return float(number) * (1000 if decimal else 1024) ** _POWERS[unit.lower()]
    return None


def describe_comparison(compared: dict[str, Any], unread: list[str], file: str) -> list[str]:
    """Return the comparison as lines; nothing of it is applied."""
    lines = [f"{file} of the pack, compared with the plan (nothing of it is applied)"]
    different = compared["different"]
    width = max((len(one["name"]) for one in different), default=0)
    lines += [
        f"  differs: {one['name']:<{width}}  pack {one['pack'] or '(empty)'}, ours {one['ours']}" for one in different
    ]
    lines += [] if different else ["  no setting that both have differs"]
    lines += [f"  only in the pack: {name}={value}" for name, value in compared["only_pack"].items()]
    if compared["only_ours"]:
        lines.append(f"  only in the plan: {', '.join(compared['only_ours'])}")
    return lines + [f"  not understood, line {line}" for line in unread]
