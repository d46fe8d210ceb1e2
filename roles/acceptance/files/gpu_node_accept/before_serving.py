"""`python3 -m gpu_node_accept.before_serving REQUEST`: do a replica's cards add up? Asked before it starts on them.

Where traffic between cards is broken, an engine hangs in its first all-reduce until its start times out, and says
nothing. nvidia-smi topo -p2p says OK on such a machine, so only a sum that is watched tells.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_node_accept import cards, node
from gpu_node_accept.checks import FAIL, PASS, Outcome, not_run

PROGRAM = Path(__file__).resolve().parents[1]
# For one sum. The load program's own limits for torch and NCCL to start come on top.
LIMIT_S = 30
WHOLE_S = 400 + 6 * LIMIT_S
REMEDY = (
    "Traffic between these cards is broken, also where nvidia-smi topo -p2p says OK. Set host_settings_iommu to "
    "passthrough or off and host_settings_acs_redirect to off, and run playbooks/prepare.yml, with a reboot. Or go "
    "around it, which is slower: engine_env: {NCCL_P2P_DISABLE: '1'} in serving_plan_overrides. Then run this again"
)


def parts(uuids: Sequence[str]) -> list[list[str]]:
    """The first two cards, and all of them: a path that is broken for two is named as that."""
    return [list(uuids[:2])] + ([list(uuids)] if len(uuids) > 2 else [])


def judge(count: int, code: int, text: str) -> Outcome:
    """The verdict over an all-reduce of so many cards. `not run`: it told nothing about the cards.

    :param code: of the container; 124 when it did not end in time.
    :param text: what it printed.
    """
    rows = node.read_rows(text)
    start = next((row for row in rows if "cards" in row), None)
    if start is None:
        return not_run(f"the load program did not start: {node.last_words(rows, text) or f'exit {code}'}")
    if len(start["cards"]) != count:
        return not_run(f"the container saw {len(start['cards'])} of {count} cards")
    if not start.get("nccl"):
        return not_run("the image's torch has no NCCL")
    found = cards.read_sums(rows)
    if code == 124 and not found["error"]:
        found["error"] = f"hung: the container did not end within {WHOLE_S} s"
    if code not in (0, 124):
        return not_run(f"the load program was ended: exit {code}")
    # How fast it is, acceptance asks.
    outcome = cards.all_reduce(found, 0)
    return replace(outcome, remedy=REMEDY) if outcome.verdict == FAIL else outcome


def prove(image: str, group: dict[str, Any], say: Callable[[str], None]) -> Outcome:
    """The verdict over a replica's cards: the first one that is no pass, or the last."""
    outcome = not_run("there are no cards")
    for uuids in parts(group["uuids"]):
        arguments = ["allreduce", "--limit", str(LIMIT_S)]
        code, text = node.run_load(image, uuids, PROGRAM, arguments, WHOLE_S, group["environment"])
        outcome = judge(len(uuids), code, text)
        target = f"replica {group['replica']}: all-reduce over {len(uuids)} cards ({', '.join(uuids)})"
        if outcome.verdict == PASS:
            say(f"{target}: {outcome.seen}")
        elif outcome.verdict == FAIL:
            say(f"error: {target}: {outcome.seen}. Nothing is started on them. {outcome.remedy}")
            break
        else:
            say(f"warning: {target}: not run, so nothing was found out: {outcome.why}")
            break
    return outcome


def main(arguments: Sequence[str]) -> int:
    """Ask all groups of the request and keep a report of each that adds up; 1 when one of them does not."""
    if len(arguments) != 1:
        print("usage: python3 -m gpu_node_accept.before_serving REQUEST", file=sys.stderr)
        return 2
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    broken = False
    for group in request["runs"]:
        outcome = prove(request["ref"], group, lambda text: print(text, flush=True))
        broken = broken or outcome.verdict == FAIL
        # Only what adds up is kept: after a mend, the others are asked again.
        if outcome.verdict == PASS:
            file = folder / f"{group['key']}.json"
            fresh = file.with_suffix(".new")
            report = {**group, "image": request["image"], "driver": request["driver"], "seen": outcome.seen}
            fresh.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(fresh, file)
            print(f"stored {file}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
