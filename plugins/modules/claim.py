#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Say what a node has to run, unless another rollout has the node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: claim
short_description: Say what a node has to run, unless another rollout has it
version_added: "0.2.0"
description:
  - Writes C(wanted.json) on the node, the one record of which releases it has to run, and who said so since when.
  - A rollout that is under way keeps others away from the node. One whose controller runs no more is taken over.
  - Changes nothing else. C(gpu-node rollout) brings the replicas there.
  - This is an action with a module of the same name; the action tells who it is, and whether another controller runs.
options:
  targets:
    description: By replica's index the release that it has to run. Left out where O(back) is true.
    type: dict
    default: {}
  back:
    description: Whether to go back to what was there before the latest rollout. Twice is once.
    type: bool
    default: false
  back_of:
    description: The rollout to take back. A node whose latest one is another is left alone. Empty takes back any.
    type: str
    default: ""
  drained:
    description: The steps for which the node is touched although no release differs, a new driver for example.
    type: str
    default: ""
  drained_done:
    description: Whether the node has done them.
    type: bool
    default: false
  unfinished:
    description:
      - The rollouts with these steps that other nodes still have to finish. A node that has finished one of them is
        left alone.
    type: list
    elements: str
    default: []
  hold:
    description:
      - V(take) claims the node.
      - V(renew) is a sign of life on a node that waits for its turn, V(release) lets go of it because the rollout has
        ended. Both change nothing on a node that is not this rollout's, and V(release) nothing where a job runs. They
        never fail; why one was not heard is a warning.
    type: str
    choices: [take, renew, release]
    default: take
  lease:
    description: Seconds without a sign of this rollout, after which another controller takes the node over.
    type: int
    default: 21600
  take_over:
    description: Id of a rollout of another controller that is known to run no more.
    type: str
    default: ""
  state_dir:
    description: Folder of the node's state.
    type: path
    default: /var/lib/gpu-node
  lock:
    description: The file whose lock is held while the record changes.
    type: path
    default: /run/lock/gpu-node-wanted.lock
  rollout:
    description: Id of the rollout. Set by the action.
    type: str
    default: ""
  by:
    description: Who it is. Set by the action.
    type: str
    default: ""
  controller:
    description: The controller's machine, and the process there. Set by the action.
    type: dict
    default: {}
  seen_rollout:
    description: The rollout whose controller was looked up. Set by the action.
    type: str
    default: ""
  seen_alive:
    description: Whether it runs. Set by the action.
    type: bool
    default: false
attributes:
  check_mode:
    description: Says what would be written. That another rollout has the node is a warning then.
    support: full
  diff_mode:
    description: The record has nothing that an operator would compare.
    support: none
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Say what this node has to run
  serving.gpu_node.claim:
    targets: {"0": 0123456789ab, "1": ba9876543210}
"""

RETURN = r"""
id:
  description: Id of the rollout that the node's job has to carry out; empty when there is nothing to take back.
  returned: always
  type: str
record:
  description: What C(wanted.json) holds.
  returned: always
  type: dict
found:
  description: What it held before; empty when there was none.
  returned: always
  type: dict
differs:
  description: The replicas that do not serve what they have to run.
  returned: always
  type: list
  elements: str
current:
  description: By replica the release that it points at.
  returned: always
  type: dict
conflict:
  description: Who has the node, and what to do; empty when nobody else has.
  returned: always
  type: str
note:
  description: What else to know, as that a rollout was taken over.
  returned: always
  type: str
"""

import contextlib
import datetime
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.claim import (
    HOLDS,
    RecordError,
    Seen,
    Wish,
    check_record,
    decide,
)

_LOCK_WAIT_S = 30
_JOB = "gpu-node-rollout.service"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the record's lock; whoever has it only writes a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + _LOCK_WAIT_S
    with path.open("a", encoding="utf-8") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{path} is held for more than {_LOCK_WAIT_S} s: see `fuser -v {path}`"
                    ) from None
                time.sleep(0.05)
        yield


def read_json(path: Path) -> Any:
    """Return a file's value, or None when there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the record, or None when there is none."""
    value = read_json(path)
    return None if value is None else check_record(value, str(path))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the record in one step, so that it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(record, indent=1) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    fresh.chmod(0o644)
    fresh.replace(path)


def state_of(module: AnsibleModule, unit: str) -> tuple[str, str]:
    """Return a unit's two states."""
    systemctl = module.get_bin_path("systemctl")
    if systemctl is None:
        return "inactive", "dead"
    out = module.run_command([systemctl, "show", "--property=ActiveState,SubState", unit])[1]
    found = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    return found.get("ActiveState", "inactive"), found.get("SubState", "dead")


def look(module: AnsibleModule, state: Path, indexes: list[str], alive: bool | None) -> Seen:
    """Return what the node shows of these replicas."""
    journals = {index: read_json(state / "replicas" / index / "switch.json") for index in indexes}
    links = {index: state / "replicas" / index / "current" for index in indexes}
    current = {index: link.readlink().name if link.is_symlink() else None for index, link in links.items()}
    held = (state / "held").exists()
    unsettled = {
        index
        for index in indexes
        if held
        or (state / "replicas" / index / "out" / "rollout").exists()
        or _half_switched(journals[index])
        or state_of(module, f"vllm-replica@{index}.service")[0] != "active"
    }
    active, sub = state_of(module, _JOB)
    job = active in ("activating", "active", "deactivating") and sub != "exited"
    served = {index: journals[index].get("from") for index in unsettled if _unproven(journals[index])}
    return Seen(current, frozenset(unsettled), job, alive, served)


def _half_switched(journal: Any) -> bool:
    return isinstance(journal, dict) and "outcome" in journal and journal["outcome"] is None


def _unproven(journal: Any) -> bool:
    """Tell whether what a replica points at never passed its gates: a switch was cut short, or failed both ways."""
    if not isinstance(journal, dict):
        return False
    return (_half_switched(journal) and journal.get("step") != "in") or journal.get("outcome") == "failed"


def answer(module: AnsibleModule) -> dict[str, Any]:
    """Decide and write under the record's lock."""
    options = module.params
    state = Path(options["state_dir"])
    path = state / "wanted.json"
    now = datetime.datetime.now(datetime.UTC)
    wish = Wish(
        rollout=options["rollout"],
        by=options["by"],
        controller=options["controller"],
        now=now.timestamp(),
        since=now.isoformat(timespec="seconds"),
        targets={str(index): str(release) for index, release in options["targets"].items()},
        back=options["back"],
        back_of=options["back_of"],
        drained=options["drained"],
        drained_done=options["drained_done"],
        unfinished=frozenset(options["unfinished"]),
        hold=options["hold"],
        lease=options["lease"],
        take_over=options["take_over"],
    )
    record = read_record(path)
    indexes = sorted({*wish.targets, *(record["targets"] if record else ())})
    alive = options["seen_alive"] if record and options["seen_rollout"] == record["rollout"] else None
    seen = look(module, state, indexes, alive)
    verdict = decide(record, wish, seen)
    if (verdict.changed or verdict.renewed) and verdict.record is not None and not module.check_mode:
        write_record(path, verdict.record)
    shown = verdict.record or {}
    nothing = wish.back and not verdict.changed and not verdict.renewed and not verdict.conflict
    return {
        "changed": verdict.changed,
        "id": "" if nothing else shown.get("rollout", ""),
        "record": shown,
        "found": record or {},
        "differs": list(verdict.differs),
        "current": dict(seen.current),
        "conflict": verdict.conflict,
        "note": verdict.note,
        "ask": verdict.ask,
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "dict", "default": {}},
            "back": {"type": "bool", "default": False},
            "back_of": {"type": "str", "default": ""},
            "drained": {"type": "str", "default": ""},
            "drained_done": {"type": "bool", "default": False},
            "unfinished": {"type": "list", "elements": "str", "default": []},
            "hold": {"type": "str", "choices": list(HOLDS), "default": "take"},
            "lease": {"type": "int", "default": 21600},
            "take_over": {"type": "str", "default": ""},
            "state_dir": {"type": "path", "default": "/var/lib/gpu-node"},
            "lock": {"type": "path", "default": "/run/lock/gpu-node-wanted.lock"},
            "rollout": {"type": "str", "default": ""},
            "by": {"type": "str", "default": ""},
            "controller": {"type": "dict", "default": {}},
            "seen_rollout": {"type": "str", "default": ""},
            "seen_alive": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        # A dry run makes no file, and reads what is replaced in one step.
        with contextlib.nullcontext() if module.check_mode else locked(Path(module.params["lock"])):
            result = answer(module)
    except RecordError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"what this node has to run could not be written: {error}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
