# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What an operator reads of a rollout and of a fleet: what is ahead, where it stopped and why, what runs where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.claim import latest_rollout

_HEADINGS = ("node", "replica", "release", "model", "state", "out", "rollout", "drift")
_NO_RELEASE = "none"
_SHOWN_NODES = 12


def names(found: Sequence[str]) -> str:
    """Return names in one line; of very many only the first."""
    more = len(found) - _SHOWN_NODES
    return ", ".join(found[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")


def describe_ahead(nodes: Mapping[str, Mapping[str, Any]], batches: Sequence[int | str]) -> list[str]:
    """Say what a rollout is about to do.

    :param nodes: by name what ``claim`` answered, and ``due``: whether the node has its turn.
    """
    due = [name for name, node in nodes.items() if node.get("due")]
    if not due:
        return [f"no replica differs on {len(nodes)} node{'s' * (len(nodes) != 1)}: none is switched"]
    lines = []
    for name in due:
        record, differs = nodes[name]["record"], nodes[name]["differs"]
        if not differs:
            what = "its replicas are started anew" if record.get("drained") else "its bake is left"
            lines.append(f"{name}: no release differs; {what}")
        for index in differs:
            current, target = nodes[name]["current"].get(index) or _NO_RELEASE, record["targets"][index]
            change = f"{current} -> {target}" if current != target else f"{target}, which does not serve"
            lines.append(f"{name}: replica {index}: {change}")
    sizes = batch_sizes(len(due), batches)
    return [
        f"{len(due)} of {len(nodes)} node{'s' * (len(nodes) != 1)} to be changed, "
        f"in batches of {', '.join(map(str, sizes))}",
        *lines,
    ]


def batch_sizes(count: int, batches: Sequence[int | str]) -> list[int]:
    """Return how many nodes each batch has, as Ansible's ``serial`` cuts them."""
    sizes: list[int] = []
    while (left := count - sum(sizes)) > 0:
        size = batches[min(len(sizes), len(batches) - 1)] if batches else count
        wanted = int(count * int(size.rstrip("%")) / 100) or 1 if isinstance(size, str) and "%" in size else int(size)
        sizes.append(min(wanted, left) if wanted > 0 else left)
    return sizes


def failure_text(failure: Mapping[str, Any]) -> str:
    """Return why a task failed, from its result."""
    if failure.get("results"):
        failed = [item for item in failure["results"] if item.get("failed")]
        return failure_text(failed[0]) if failed else str(failure.get("msg", ""))
    texts = (failure.get(name) for name in ("msg", "reason", "stderr", "exception"))
    return next((str(text).strip() for text in texts if text), "no reason was given")


def describe_stop(
    nodes: Mapping[str, Mapping[str, Any]], batch: Sequence[str], back: bool = False, limit: str = ""
) -> list[str]:
    """Say where a rollout stopped, why, and what to do.

    :param nodes: by name what ``claim`` answered, ``due``, ``finished`` and, where it failed, ``failure`` (``task`` and
        ``result``).
    :param batch: the nodes whose turn it was.
    :param back: whether it takes a rollout back.
    :param limit: what the playbook was limited to.
    """
    due = [name for name, node in nodes.items() if node.get("due")]
    stopped = [name for name in batch if not nodes[name].get("finished")]
    done = [name for name in due if nodes[name].get("finished")]
    untouched = [name for name in due if name not in done and name not in stopped]
    touched = [nodes[name] for name in (*stopped, *done)]
    # Nodes may go on with a rollout that others were not part of, or with a way back that the inventory wants by now.
    ids = list(dict.fromkeys(latest_rollout(node["record"]) for node in touched))
    lines = [f"{'rollback of' if back else 'rollout'} {ids[0]} stopped at {names(stopped)}"]
    for name in stopped:
        failure = nodes[name].get("failure") or {}
        if failure:
            lines.append(f"- {name}, {failure['task']}: {failure_text(failure['result'])}")
        else:
            lines.append(f"- {name}: the connection was lost; what its job does goes on there")
    lines.append(f"done: {names(done) or 'none'}")
    lines.append(f"not touched: {names(untouched) or 'none'}")
    only = f" -l '{limit}'" if limit else ""
    ways = [f"ansible-playbook playbooks/rollback.yml -e rollback_of={one}{only}" for one in ids]
    if back:
        return [*lines, f"Go on: mend the cause and run it again: {ways[0]}"]
    lines.append("Go on: mend the cause and run rollout.yml again as before; it continues where it stopped")
    return [*lines, *(f"Go back: {way}" for way in ways)]


def nodes_to_hold(
    nodes: Mapping[str, Mapping[str, Any]], batch: Sequence[str], lease: float, now: float
) -> tuple[list[str], bool]:
    """Return the nodes that need a word after a batch, and whether it is the last one, because the rollout ends here.

    A sign of life is for those that wait and had none for a quarter of the lease: no fleet is asked after each batch.
    """
    ends = any(not nodes[name].get("finished") for name in batch)
    left = [name for name, node in nodes.items() if node.get("due") and not node.get("finished")]
    if ends:
        return left, True
    return [name for name in left if now - nodes[name]["record"]["renewed"] > lease / 4], False


def fleet_rows(answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each replica of each node; one that cannot be asked is a row too.

    :param answers: by node ``{"rows": what gpu-node status --json says}`` or ``{"error": why not}``.
    """
    rows: list[dict[str, Any]] = []
    for node, answer in answers.items():
        if "rows" not in answer:
            rows.append({"node": node, "error": answer["error"], "reachable": not answer.get("unreachable", False)})
            continue
        rows += [{"node": node, "reachable": True, **row} for row in answer["rows"]]
    return rows


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name == "replica":
        return str(row.get("index", "-"))
    if name == "rollout":
        rollout = row.get("rollout")
        return f"{rollout['rollout']} {rollout['state']}" if rollout else "-"
    if name == "out":
        return ",".join(row.get("out") or []) or "-"
    if name == "drift":
        said = list(row.get("drift") or [])
        target = (row.get("rollout") or {}).get("target")
        if row.get("differs") and target:
            said.append(f"has to run {target}")
        return row.get("error") or "; ".join(said) or "-"
    if name == "state" and "error" in row:
        return "no answer" if row["reachable"] else "unreachable"
    return str(row.get(name) or "-")


def _mixed_models(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each name under which clients get different weights, depending on the replica."""
    served: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        # An older command says neither.
        if row.get("served_model_name") and row.get("model_digest"):
            nodes = served.setdefault(row["served_model_name"], {}).setdefault(row["model_digest"], [])
            nodes += [row["node"]] if row["node"] not in nodes else []
    return [
        f"'{name}' is served with {len(digests)} different models: "
        + "; ".join(f"{digest} on {names(nodes)}" for digest, nodes in sorted(digests.items()))
        + ": set one revision for all of these nodes and roll it out"
        for name, digests in sorted(served.items())
        if len(digests) > 1
    ]


def describe_fleet(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of a fleet as lines, and below it the names that stand for more than one model."""
    table = [list(_HEADINGS), *([_cell(row, name) for name in _HEADINGS] for row in rows)]
    widths = [max(len(line[place]) for line in table) for place in range(len(_HEADINGS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return lines + _mixed_models(rows)
