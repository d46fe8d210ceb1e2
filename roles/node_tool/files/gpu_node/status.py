"""The table of replicas."""

from typing import Any

from gpu_node.config import linked_release, load_release
from gpu_node.errors import ConfigError
from gpu_node.tool import Tool

# The keys of a row and their headings.
COLUMNS = {
    "index": "replica", "unit": "unit", "port": "port", "cpus": "cpus", "memory_node": "memory-node", "model": "model",
    "release": "release", "previous": "previous", "state": "state", "out": "out-reasons",
}  # fmt: skip


def rows(tool: Tool) -> list[dict[str, Any]]:
    """One dict for each replica, with the columns as keys. None: not known, as on a node without a release."""
    table = []
    for replica in tool.node.replicas:
        current = linked_release(tool.paths, replica.index, "current")
        try:
            release = load_release(tool.paths, current) if current else None
        except ConfigError as error:
            tool.host.warn(str(error))
            release = None
        values = (
            replica.index,
            replica.unit,
            replica.port,
            release.cpus if release else None,
            release.memory_nodes if release else None,
            release.model if release else None,
            current,
            linked_release(tool.paths, replica.index, "previous"),
            tool.unit_state(replica.index).word,
            tool.reasons.of(replica.index),
        )
        table.append(dict(zip(COLUMNS, values, strict=True)))
    return table


def as_table(table: list[dict[str, Any]]) -> str:
    """The rows as aligned text. `-`: not known, or none."""

    def cell(value: Any) -> str:
        return (",".join(value) if isinstance(value, list) else "" if value is None else str(value)) or "-"

    lines = [list(COLUMNS.values())]
    lines += [[cell(row[column]) for column in COLUMNS] for row in table]
    widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
