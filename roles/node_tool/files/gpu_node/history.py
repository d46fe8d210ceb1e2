"""The finished switches of this node: history.jsonl, a line for each."""

import json
from typing import Any

from gpu_node import files
from gpu_node.config import linked_release
from gpu_node.paths import Paths
from gpu_node.switch import Journal

LONGEST_VALUE = 160
# These follow from the rest of a release.
_DERIVED = ("id", "files", "schema")


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a value by their dotted path; a list is a leaf."""
    if not isinstance(value, dict):
        return {path: value}
    return {
        place: leaf
        for name, item in value.items()
        if path or name not in _DERIVED
        for place, leaf in _flat(item, f"{path}.{name}" if path else str(name)).items()
    }


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def _without(items: list[Any], others: list[Any]) -> list[Any]:
    rest, left = list(others), []
    for item in items:
        if item in rest:
            rest.remove(item)
        else:
            left.append(item)
    return left


def changes(old: Any, new: Any) -> list[str]:
    """What two releases differ in, as `engine_args.max-num-seqs: 4 -> 8`; of a list, the items that are not in both."""
    before, after = _flat(old), _flat(new)
    found = []
    for path in sorted(before.keys() | after.keys()):
        if path in before and path in after and before[path] == after[path]:
            continue
        left, right = before.get(path, "(not there)"), after.get(path, "(not there)")
        if isinstance(left, list) and isinstance(right, list):
            gone, come = _without(left, right), _without(right, left)
            left, right = gone or "(nothing)", come or "(nothing)"
            if not gone and not come:
                left, right = "(another order)", "(another order)"
        found.append(f"{path}: {_shown(left)} -> {_shown(right)}")
    return found


def _release(paths: Paths, release: str | None) -> Any:
    """The content of a release as it is there; {} when it is gone or damaged: the history only informs."""
    text = files.read_text(paths.release(release) / "release.json") if release else None
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def entry(paths: Paths, index: int, journal: Journal, at: str, rollout: str | None, by: str) -> dict[str, Any]:
    """The line of a finished switch."""
    old, new = _release(paths, journal.source), _release(paths, journal.target)
    return {
        "at": at,
        "replica": index,
        "rollout": rollout,
        "by": by,
        "from": journal.source,
        "to": journal.target,
        "outcome": journal.outcome,
        "error": journal.error,
        "seconds": dict(journal.seconds),
        "tokens_per_s": {
            name: None if value is None else round(value, 1)
            for name, value in (("before", journal.before), ("after", journal.after))
        },
        "changed": changes(old, new) if old and new else [],
        "current": linked_release(paths, index, "current"),
        "began": journal.began,
    }


def read(paths: Paths) -> list[dict[str, Any]]:
    """The lines, oldest first; what a kill cut off is left out."""
    found = []
    for line in (files.read_text(paths.history) or "").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def add(paths: Paths, line: dict[str, Any]) -> None:
    """Add the line, once: a switch that was killed after it wrote its line writes it again."""
    last = next((old for old in reversed(read(paths)) if old.get("replica") == line["replica"]), None)
    if line["began"] and last is not None and (last.get("began"), last.get("to")) == (line["began"], line["to"]):
        return
    files.append_line(paths.history, json.dumps(line, ensure_ascii=False))


def as_text(lines: list[dict[str, Any]]) -> str:
    """Each switch as a line, with what changed below it."""
    texts = []
    for line in lines:
        speeds = line.get("tokens_per_s") or {}
        speed = "".join(f", {speeds[name]} tokens/s {name}" for name in ("before", "after") if speeds.get(name))
        seconds = sum((line.get("seconds") or {}).values())
        texts.append(
            f"{line.get('at')}  replica {line.get('replica')}: {line.get('from') or '-'} -> {line.get('to')}:"
            f" {str(line.get('outcome')).replace('_', ' ')} after {seconds:.0f} s{speed}"
            f" ({line.get('rollout') or 'by hand'}, {line.get('by')})"
        )
        texts += [f"    {change}" for change in line.get("changed") or []]
        texts += [f"    {line['error']}"] if line.get("error") else []
    return "\n".join(texts) or "no switch so far"
