"""Published figures, each with its source."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_node_bench.errors import BenchError

SHIPPED = Path(__file__).with_name("references.json")


@dataclass(frozen=True)
class Reference:
    """A published figure. source: key of its source."""

    measure: str
    value: float
    unit: str
    label: str
    source: str


@dataclass(frozen=True)
class References:
    """The figures of one profile. sources: title, place and conditions by key."""

    figures: tuple[Reference, ...]
    sources: dict[str, dict[str, str]]

    def of(self, measure: str) -> list[Reference]:
        """Those of one measure; a card's memory is compared with the fuller card's."""
        wanted = "memory" if measure.startswith("memory/") else measure
        return [one for one in self.figures if one.measure == wanted]


def parse(value: Any, profile: str, where: str) -> References:
    """The references of a profile. Raises BenchError when one lacks its source."""
    try:
        sources = {
            str(key): {str(name): str(text) for name, text in item.items()} for key, item in value["sources"].items()
        }
        figures = tuple(
            Reference(str(one["measure"]), float(one["value"]), str(one["unit"]), str(one["label"]), str(one["source"]))
            for one in value["references"]
            if one["profile"] == profile
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BenchError(f"{where} is no file of references: {type(error).__name__}: {error}") from None
    for one in figures:
        if not {"title", "place", "conditions"} <= sources.get(one.source, {}).keys():
            raise BenchError(
                f"{where}: {one.measure} = {one.value:g}: source {one.source!r} lacks title, place or conditions"
            )
    return References(figures, {key: sources[key] for key in dict.fromkeys(one.source for one in figures)})


def load(profile: str, path: Path = SHIPPED) -> References:
    """The references in a file. Raises BenchError."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")), profile, str(path))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from None
