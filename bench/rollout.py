#!/usr/bin/env python3
"""What a rollout costs: requests, time to first token, seconds for each replica; and how a run without a change grows.

    bench/rollout.py load     a setting changes on 3 nodes with 2 replicas each while clients ask through HAProxy
    bench/rollout.py grow     nothing to do, on 1, 4 and 16 nodes

Nodes are containers on this machine and their engines stand-ins (tests/host/fleet.py, tests/doubles/engine): what is
measured is this project and not an engine. They are made when they are not there, and stay: `tests/host/fleet.py down`
removes them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "host"))

import fleet as machines  # noqa: E402
from fleet_load import Load, Outcome, Target  # noqa: E402
from fleet_view import Fleet  # noqa: E402
from nodes import NodeError, Play  # noqa: E402
from testhost import HostError  # noqa: E402

CONVERGE = "molecule/fleet/converge.yml"
ROLLOUT = "playbooks/rollout.yml"
# The stand-in says by itself what its start took; it ends at once when it is told to, so all of a stop is ours.
OWN_START = re.compile(r"stand-in: .*, after ([0-9.]+) s of CPU$", re.MULTILINE)
GOAL_REQUESTS, GOAL_STEP_S = 2000, 5.0
BEFORE_S = 40.0
LIMIT_S = 3600.0


class BenchError(Exception):
    """One line for the person who called."""


def note(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def play(playbook: str, *args: str, limit: Sequence[str] = (), **extra: Any) -> tuple[Play, float]:
    """A playbook that must succeed, and its seconds."""
    started = time.monotonic()
    arguments = [*args, *(["-l", ":".join(limit)] if limit else [])]
    done = machines.start_playbook(playbook, *arguments, extra=extra).finish(LIMIT_S)
    if done.rc:
        raise BenchError(f"{playbook} failed with {done.rc}:\n{done.tail(30)}")
    return done, time.monotonic() - started


def inventory(count: int) -> list[str]:
    """Arguments that add the nodes which the scenario's inventory has not."""
    hosts = {machines.node(n).name: {"ansible_host": machines.address(n)} for n in range(1, count + 1)}
    file = machines.FOLDER / "bench-hosts.yml"
    file.write_text(json.dumps({"gpu_nodes": {"hosts": hosts}}))
    return ["-i", str(file)]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def first_token(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Milliseconds to the first token of the streams."""
    times = [1000 * one.first_s for one in outcomes if one.kind == "stream" and not one.error]
    return {"count": len(times), "p50": statistics.median(times), "p99": percentile(times, 0.99)}


def own_start(journal: str) -> float:
    """Seconds that the engine's latest start took of itself, from its unit's journal.

    CPU time, which on a busy machine is less than the start took: the rest counts as ours.
    """
    found = OWN_START.findall(journal)
    if not found:
        raise BenchError(
            "a replica's journal does not say what its engine's start took: is it the stand-in of this tree?"
        )
    return float(found[-1])


def beyond(row: dict[str, Any], own_s: float) -> float:
    """Seconds of a switch that were not its engine's: all of its steps, but for the engine's own start."""
    return float(sum(row["seconds"].values())) - own_s


def bench_load(clients: int) -> dict[str, Any]:
    machines.up(range(1, 4))
    note("bringing 3 nodes to the inventory's settings ...")
    play(CONVERGE)
    fleet = Fleet()
    machines.configure_front(fleet.front_backend())
    fleet.wait_for_front()
    front = Target("front", machines.front_address(), machines.FRONT_PORT, clients=clients, pause_s=0.05)
    with Load([front], fleet.key) as load:
        note(f"{2 * clients} clients ask for {BEFORE_S:.0f} s, then the rollout begins")
        time.sleep(BEFORE_S)
        began = time.time()
        _, seconds = play(ROLLOUT, fleet_changes=fleet.another())
        ended = time.time()
        while len(load.outcomes) < GOAL_REQUESTS:
            time.sleep(1)
    history = fleet.history(2)
    journals = [fleet.each(f"journalctl -q -o cat -u vllm-replica@{index} -n 200") for index in (0, 1)]
    rows = [row for rows in history.values() for row in rows]
    own = [own_start(journals[row["replica"]][name]) for name, rows in history.items() for row in rows]
    first, last = time_span(rows, began, ended)
    before = [one for one in load.outcomes if one.started < began]
    during = [one for one in load.outcomes if first <= one.started <= last]
    return {
        "requests": len(load.outcomes),
        "failed": [one.error for one in load.failed()],
        "rollout_s": seconds,
        "switching_s": last - first,
        "before": first_token(before),
        "during": first_token(during),
        "beyond_s": [beyond(row, own_s) for row, own_s in zip(rows, own, strict=True)],
        "engine_s": own,
        "steps": [row["seconds"] for row in rows],
        "load": os.getloadavg()[0],
    }


def time_span(rows: Sequence[dict[str, Any]], began: float, ended: float) -> tuple[float, float]:
    """From the first replica's drain to the last one's return, as near as the history's whole seconds tell."""
    ends = [(datetime.fromisoformat(row["at"]).timestamp(), sum(row["seconds"].values())) for row in rows]
    return max(began, min(end - took for end, took in ends)), min(ended, max(end for end, _ in ends) + 1)


def show_load(found: dict[str, Any]) -> None:
    before, during = found["before"], found["during"]
    lost, requests = len(found["failed"]), found["requests"]
    added = during["p99"] - before["p99"]
    met = "met" if lost == 0 and requests >= GOAL_REQUESTS else "MISSED"
    print("| what | value | goal | |\n|:--|:--|:--|:--|")
    print(f"| requests lost | {lost} of {requests} | 0 of {GOAL_REQUESTS} or more | {met} |")
    print(
        f"| TTFT p99 while replicas were switched ({during['count']} streams) | {during['p99']:.0f} ms;"
        f" {before['p99']:.0f} ms before ({before['count']}), so {added:+.0f} ms | | |"
    )
    print(f"| TTFT p50 | {during['p50']:.0f} ms; {before['p50']:.0f} ms before | | |")
    typical, worst, engine = statistics.median(found["beyond_s"]), max(found["beyond_s"]), max(found["engine_s"])
    met = "met" if worst <= GOAL_STEP_S else "MISSED"
    print(
        f"| a replica beyond the engine's stop and start | median {typical:.1f} s, longest {worst:.1f} s"
        f" | {GOAL_STEP_S:.0f} s | {met} |"
    )
    print(f"| the engine's own start, at most; its stop takes no time | {engine:.2f} s | | |")
    print(f"| the playbook | {found['rollout_s']:.0f} s, {found['switching_s']:.0f} s of them switching | | |")
    print(f"\nLoad average of the machine at the end: {found['load']:.1f}.")
    for step in ("drain", "measure", "stop", "point", "start", "gate", "in"):
        times = [row[step] for row in found["steps"] if step in row]
        if times:
            print(f"- {step}: median {statistics.median(times):.1f} s, longest {max(times):.1f} s")


def bench_grow(counts: Sequence[int]) -> dict[str, Any]:
    machines.up(range(1, max(counts) + 1))
    args = inventory(max(counts))
    note(f"bringing {max(counts)} nodes to the inventory's settings ...")
    play(CONVERGE, *args)
    found: dict[str, Any] = {"load": [], "rows": []}
    for count in counts:
        names = [machines.node(number).name for number in range(1, count + 1)]
        row: dict[str, Any] = {"nodes": count}
        for name, playbook in (("site", CONVERGE), ("rollout", ROLLOUT)):
            done, seconds = play(playbook, *args, limit=names)
            if done.changed:
                raise BenchError(
                    f"{playbook} changed {done.changed} things on {count} nodes, and was to change nothing"
                )
            row[name] = seconds
            note(f"{count} nodes, {playbook}: {seconds:.0f} s")
        found["rows"].append(row)
        found["load"].append(os.getloadavg()[0])
    return found


def show_grow(found: dict[str, Any]) -> None:
    first = found["rows"][0]
    print(
        "| nodes | site.yml from the plan on, s | of one node | rollout.yml, s | of one node |\n|--:|--:|--:|--:|--:|"
    )
    for row in found["rows"]:
        shares = [f"{row[name]:.0f} | {row[name] / first[name]:.1f}" for name in ("site", "rollout")]
        print(f"| {row['nodes']} | {' | '.join(shares)} |")
    print(f"\nLoad average of the machine after each: {', '.join(f'{one:.1f}' for one in found['load'])}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("load").add_argument("--clients", type=int, default=5, help="of each kind, streamed and plain")
    verbs.add_parser("grow").add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    try:
        if options.verb == "load":
            show_load(found := bench_load(options.clients))
        else:
            show_grow(found := bench_grow(options.nodes))
    except (BenchError, NodeError, HostError, OSError) as err:
        print(f"bench: error: {err}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
