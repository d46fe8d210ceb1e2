#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Start a long job as a systemd unit, or tell how far it is."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: follow
short_description: Run a long job as a systemd unit on the node and show its progress while the play waits
version_added: "0.1.0"
description:
  - The job is a transient systemd unit, so it goes on when the connection or the controller is lost, and its output is
    in the node's journal. The next run finds it running and follows it on.
  - Another job of the same unit (the same task of an earlier run, with other arguments or inputs) is followed to its
    end first, and then this one is started.
  - Lines that the job prints are shown as they come. The task ends when the job ends, and fails with its last lines
    when it failed.
  - This is an action with a module of the same name; the action calls the module again and again.
options:
  unit:
    description: Name of the transient unit, without C(.service).
    type: str
    required: true
  argv:
    description: The job's command, as a list. No shell is between.
    type: list
    elements: str
    required: true
  environment_files:
    description: Files with environment variables for the job; one that does not exist is passed over.
    type: list
    elements: str
    default: []
  inputs:
    description: Files that say what the job does, such as its request. With another content of them it is another job.
    type: list
    elements: str
    default: []
  interval:
    description: Seconds between two looks.
    type: int
    default: 2
  cursor:
    description: Journal position after which lines are new. Set by the action.
    type: str
    default: ""
  begin:
    description: Whether to start the job when it is not running. Set by the action.
    type: bool
    default: true
attributes:
  check_mode:
    description: Nothing is started; the task says that it would change something.
    support: full
  diff_mode:
    description: A job has no difference to show.
    support: none
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Build the image
  serving.gpu_node.follow:
    unit: gpu-node-image-build
    argv: [/bin/sh, /var/lib/gpu-node/build/build_image.sh]

- name: Measure
  serving.gpu_node.follow:
    unit: gpu-node-benchmark
    argv: [/usr/bin/python3, -m, gpu_node_bench, run, --request, /var/lib/gpu-node/benchmark/request.json]
    inputs: [/var/lib/gpu-node/benchmark/request.json]
"""

RETURN = r"""
rc:
  description: The job's exit code.
  returned: when it ended
  type: int
lines:
  description: What the job printed, the last 200 lines.
  returned: always
  type: list
  elements: str
attached:
  description: Whether a job of this unit was running already when this task began.
  returned: always
  type: bool
"""

import hashlib
import json
import shlex
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def show(module: AnsibleModule, unit: str) -> dict[str, str]:
    """Return what systemd knows of a unit."""
    wanted = "LoadState,ActiveState,SubState,Result,ExecMainStatus,ExecMainCode,InvocationID,Description"
    out = module.run_command(["systemctl", "show", f"--property={wanted}", unit], check_rc=True)[1]
    return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)


def new_lines(module: AnsibleModule, invocation: str, cursor: str) -> tuple[list[str], str]:
    """Return what one run of a job printed after ``cursor``, and the new cursor."""
    # --all: without it, a line of more than 4,096 bytes comes as null.
    command = ["journalctl", "--all", "--output=json", "--no-pager", "--quiet", f"_SYSTEMD_INVOCATION_ID={invocation}"]
    if cursor:
        command.append(f"--after-cursor={cursor}")
    out = module.run_command(command, check_rc=True)[1]
    lines = []
    for text in out.splitlines():
        entry = json.loads(text)
        cursor = entry["__CURSOR"]
        message = entry.get("MESSAGE")
        # The journal gives bytes that are no UTF-8 as a list of numbers.
        if isinstance(message, list):
            message = bytes(message).decode(errors="replace")
        if message:
            lines.append(message)
    return lines, cursor


def running(state: dict[str, str]) -> bool:
    """Tell whether the job itself still runs (a finished one stays loaded until it is collected)."""
    return state["ActiveState"] in ("activating", "active", "deactivating") and state["SubState"] != "exited"


def identity(module: AnsibleModule) -> str:
    """Return what the unit's description says of this job, and of no job that does something else."""
    argv = shlex.join(module.params["argv"])
    if not module.params["inputs"]:
        return argv
    found = hashlib.sha256()
    for path in module.params["inputs"]:
        try:
            found.update(hashlib.sha256(Path(path).read_bytes()).digest())
        except OSError as error:
            module.fail_json(msg=f"{path}, an input of {module.params['unit']}: {error.strerror}")
    return f"{argv} (inputs {found.hexdigest()})"


def begin(module: AnsibleModule, unit: str, job: str) -> bool:
    """Start the job unless it runs; return whether it ran already."""
    state = show(module, unit)
    if running(state):
        return True
    if state["LoadState"] == "loaded":
        # What is left of an earlier, finished run.
        module.run_command(["systemctl", "stop", unit], check_rc=True)
        module.run_command(["systemctl", "reset-failed", unit])
    files = [f"--property=EnvironmentFile=-{path}" for path in module.params["environment_files"]]
    module.run_command(
        [
            *("systemd-run", "--quiet", f"--unit={unit}", "--remain-after-exit", "--no-ask-password"),
            # The next run tells by it whether this is its own job.
            f"--description={job}",
            *files,
            "--",
            *module.params["argv"],
        ],
        check_rc=True,
    )
    return False


def main() -> None:
    """Run the module: one look at the job."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "argv": {"type": "list", "elements": "str", "required": True},
            "environment_files": {"type": "list", "elements": "str", "default": []},
            "inputs": {"type": "list", "elements": "str", "default": []},
            "interval": {"type": "int", "default": 2},
            "cursor": {"type": "str", "default": ""},
            "begin": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=True, lines=[], attached=False, ended=True)
    unit = module.params["unit"] + ".service"
    job = identity(module) if module.params["begin"] else ""
    attached = begin(module, unit, job) if module.params["begin"] else False
    state = show(module, unit)
    if not state["InvocationID"]:
        # systemd knows such a unit no more, and would report it as a success.
        module.fail_json(
            msg=f"{unit} is gone before it ended: the node was restarted, or the unit was stopped. Run this again"
        )
    lines, cursor = new_lines(module, state["InvocationID"], module.params["cursor"])
    answer = {"changed": True, "lines": lines, "cursor": cursor, "attached": attached, "ended": not running(state)}
    # Told by the first look: what the inputs hold later says nothing of the job that runs.
    answer["same_job"] = state["Description"] == job
    if answer["ended"]:
        # The journal may lag behind the end of the process: have it write what it holds, then read the rest.
        module.run_command(["journalctl", "--sync"])
        rest, answer["cursor"] = new_lines(module, state["InvocationID"], cursor)
        answer["lines"] = lines + rest
        # ExecMainCode 1 is an ordinary exit; 2 and 3 are a signal, whose number is in the status.
        status = int(state["ExecMainStatus"] or 0)
        answer["rc"] = status if state["ExecMainCode"] in ("0", "1") else 128 + status
        if answer["rc"] == 0 and state["Result"] not in ("success", ""):
            answer["rc"] = 1
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
