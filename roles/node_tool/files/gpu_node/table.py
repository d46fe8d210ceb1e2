"""Rows as aligned text."""

from collections.abc import Mapping
from typing import Any


def as_table(columns: Mapping[str, str], table: list[dict[str, Any]]) -> str:
    """The columns (key to heading) of the rows. `-`: not known, or none."""

    def cell(value: Any) -> str:
        return (",".join(value) if isinstance(value, list) else "" if value is None else str(value)) or "-"

    lines = [list(columns.values())]
    lines += [[cell(row[column]) for column in columns] for row in table]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
