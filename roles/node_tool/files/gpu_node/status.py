"""The table of replicas: what each one is, what it should be, and where the two part."""

from typing import Any

from gpu_node.config import linked_release, load_release
from gpu_node.errors import ConfigError
from gpu_node.rollout import held_by
from gpu_node.table import as_table
from gpu_node.tool import Tool, UnitState
from gpu_node.unit import UnitSteps
from gpu_node.wanted import Record, Wanted

# The keys of a row that the table shows, and their headings.
COLUMNS = {
    "index": "replica", "unit": "unit", "port": "port", "cpus": "cpus", "memory_node": "memory-node", "model": "model",
    "release": "release", "previous": "previous", "state": "state", "out": "out-reasons",
}  # fmt: skip
# What a row has beyond that.
MORE = ("model_digest", "served_model_name", "running", "drift", "rollout", "differs")


def wanted_of(tool: Tool) -> Wanted | None:
    """The record of what is wanted; None, and a warning when it cannot be read."""
    try:
        return Record(tool.paths, tool.host, tool.by).read()
    except ConfigError as error:
        tool.host.warn(str(error))
        return None


def differs(wanted: Wanted | None, index: int, current: str | None, running: str | None, out: list[str]) -> bool:
    """Whether the replica does not serve its target. One that only the operator or the prober keeps out does."""
    target = wanted.targets.get(index) if wanted else None
    return target is not None and (not target == current == running or "rollout" in out)


def drift(
    index: int, wanted: Wanted | None, current: str | None, running: str | None, state: UnitState, damage: str
) -> list[str]:
    """Where the replica is not what it should be, a sentence each."""
    found = []
    if running is not None and running != current:
        found.append(
            f"release {running} runs, but `current` is {current}: `gpu-node switch {index} {current or running}`"
        )
    target = wanted.targets.get(index) if wanted else None
    if wanted and target is not None and wanted.state == "done" and target != current:
        found.append(
            f"`current` is {current}, but rollout {wanted.rollout} by {wanted.by} wanted {target}:"
            " somebody switched by hand; roll out again, or change the inventory"
        )
    if damage:
        found.append(damage)
    if state.enabled not in ("", "enabled"):
        found.append(f"its unit is {state.enabled}, so it does not start at boot: `systemctl enable`, or run site.yml")
    return found


def rows(tool: Tool) -> list[dict[str, Any]]:
    """One dict for each replica. None: not known, as on a node without a release."""
    wanted = wanted_of(tool)
    table = []
    for replica in tool.node.replicas:
        index = replica.index
        current = linked_release(tool.paths, index, "current")
        damage = ""
        try:
            release = load_release(tool.paths, current) if current else None
        except ConfigError as error:
            tool.host.warn(str(error))
            release, damage = None, str(error)
        state = tool.unit_state(index)
        out = tool.reasons.of(index)
        running = UnitSteps(tool, index).running()
        table.append(
            {
                "index": index,
                "unit": replica.unit,
                "port": tool.served(index).port,
                "cpus": release.cpus if release else None,
                "memory_node": release.memory_nodes if release else None,
                "model": release.model if release else None,
                "release": current,
                "previous": linked_release(tool.paths, index, "previous"),
                "state": state.word,
                "out": out,
                "model_digest": release.model_digest if release else None,
                "served_model_name": release.served_model_name if release else None,
                "running": running,
                "drift": drift(index, wanted, current, running, state, damage),
                "rollout": wanted.public(index) if wanted else None,
                "differs": differs(wanted, index, current, running if state.active == "active" else None, out),
            }
        )
    return table


def as_text(tool: Tool, table: list[dict[str, Any]]) -> str:
    """The table, and below it what is not as it should be."""
    lines = [as_table(COLUMNS, table)]
    record = next((row["rollout"] for row in table if row["rollout"]), None)
    if record:
        step = record.get("step")
        more = f", {step}" if step and record["state"] != "done" else ""
        lines.append(f"rollout {record['rollout']} by {record['by']}: {record['state']}{more}")
        lines += [f"  {record['error']}"] if record.get("error") else []
    lines += [f"replica {row['index']}: {sentence}" for row in table for sentence in row["drift"]]
    lines += [
        f"replica {row['index']}: does not serve {row['rollout']['target']}, which is wanted"
        for row in table
        if row["differs"] and not row["drift"]
    ]
    if held := held_by(tool.paths):
        lines.append(
            f"this node is stopped as a whole since {held.get('since')}: `gpu-node rollout {held.get('rollout')}`"
        )
    return "\n".join(lines)
