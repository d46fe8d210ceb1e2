#!/usr/bin/env python3
"""How long site.yml takes when there is nothing to do, and each role's share of it.

Runs it three times against the demo node (make demo): the first run brings the node to what the inventory says, the
second is the one that counts, and must change nothing; the third does the same without the callback `preload`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = "gpu-node"
GOAL_S = 45.0
LIMIT_S = 1800
CHANGED = re.compile(rf"^{HOST}\s.*\bchanged=(\d+)", re.MULTILINE)
# the callback's lines: a role, or a module outside roles, dashes, seconds
SHARE = re.compile(r"^(\S+) -{3,} +(\d+\.\d+)s$", re.MULTILINE)


class BenchError(Exception):
    """One line for the person who called."""


@dataclass(frozen=True)
class Run:
    seconds: float
    # of ansible-playbook and ssh on this machine: the part that other work here stretches least
    cpu_s: float
    output: str


def children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_site(*, preload: bool = True) -> Run:
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "inventories/demo", "site.yml", "-l", HOST]
    callbacks = ["ansible.posix.profile_roles", *(["serving.gpu_node.preload"] if preload else [])]
    environment = {**os.environ, "ANSIBLE_CALLBACKS_ENABLED": ",".join(callbacks), "ANSIBLE_NOCOLOR": "1"}
    start, before = time.monotonic(), children_s()
    done = subprocess.run(
        argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    elapsed = time.monotonic() - start
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise BenchError(f"site.yml failed with {done.returncode} after {elapsed:.0f} s:\n{tail}")
    return Run(elapsed, children_s() - before, done.stdout)


def shares(output: str) -> dict[str, float]:
    """Seconds per role; the callback prints its total last, in the same form."""
    found = {name: float(seconds) for name, seconds in SHARE.findall(output)}
    found.pop("total", None)
    if not found:
        raise BenchError("no shares per role in the output: is the collection ansible.posix in .venv (make venv)?")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    try:
        print("bench: first run of site.yml ...", file=sys.stderr, flush=True)
        first = run_site()
        print(f"bench: first run took {first.seconds:.0f} s; second run ...", file=sys.stderr, flush=True)
        load_before = os.getloadavg()[0]
        second = run_site()
        roles = shares(second.output)
        print(
            f"bench: second run took {second.seconds:.0f} s; once more without preload ...", file=sys.stderr, flush=True
        )
        without = run_site(preload=False)
    except (BenchError, OSError, subprocess.TimeoutExpired) as err:
        print(f"bench: error: {err}", file=sys.stderr)
        return 1
    changed = CHANGED.search(second.output)
    load = (load_before, os.getloadavg()[0])
    second_s = second.seconds
    named = {name.removeprefix("serving.gpu_node."): seconds for name, seconds in roles.items()}
    named["start, inventory, between tasks"] = second_s - sum(roles.values())
    print("| role, or module outside roles | s | share |\n|:--|--:|--:|")
    for name, seconds in sorted(named.items(), key=lambda item: -item[1]):
        print(f"| {name} | {seconds:.1f} | {100 * seconds / second_s:.0f} % |")
    print(f"| **total** | **{second_s:.1f}** | |\n")
    print(
        f"- second run {second_s:.1f} s (goal {GOAL_S:.0f} s: {'met' if second_s <= GOAL_S else 'MISSED'}),"
        f" changed={changed[1] if changed else '?'}; {second.cpu_s:.1f} s of CPU time on the controller;"
        f" load average of the machine {load[0]:.1f} before and {load[1]:.1f} after\n"
        f"- with preload {second.cpu_s / without.cpu_s:.2f} of the CPU time and {second_s / without.seconds:.2f} of the"
        f" seconds without ({without.cpu_s:.1f} s, {without.seconds:.1f} s)"
    )
    if options.json:
        numbers = {
            "first_s": first.seconds,
            "second_s": second_s,
            "controller_cpu_s": second.cpu_s,
            "without_preload": {"seconds": without.seconds, "controller_cpu_s": without.cpu_s},
            "roles": named,
            "load": load,
        }
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
