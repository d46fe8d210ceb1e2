# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Claim a node for this rollout: only the controller knows who it is, and whether another process of it still runs."""

from __future__ import annotations

import datetime
import getpass
import json
import os
import platform
import re
import subprocess
import uuid
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_MODULE = "serving.gpu_node.claim"
_LSTART = "%a %b %d %H:%M:%S %Y"
# `ps` works a start out from the time of boot, which the kernel corrects by a second now and then.
_START_TOLERANCE_S = 2
_LOOKS = 5
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def process_start(pid: int) -> str:
    """Return when a process started, as ``ps -o lstart=`` says it in UTC, or "" when it does not run."""
    try:
        done = subprocess.run(
            ["ps", "-p", str(pid), "-o", "lstart="],
            env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        # A slim container has no ps, but Linux.
        try:
            words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return ""
        return f"{words[19]} ticks after boot"
    return " ".join(done.stdout.split())


def _moment(text: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.strptime(text, _LSTART).replace(tzinfo=datetime.UTC)
    except ValueError:
        return None


def same_start(one: str, other: str) -> bool:
    """Tell whether two starts are one."""
    first, second = _moment(one), _moment(other)
    if first is None or second is None:
        return one == other
    return abs((first - second).total_seconds()) <= _START_TOLERANCE_S


def still_runs(controller: dict[str, Any]) -> bool:
    """Tell whether a process of this machine that a record names still runs."""
    pid = controller.get("pid")
    found = process_start(pid) if isinstance(pid, int) else ""
    return bool(found) and same_start(found, str(controller.get("started", "")))


def machine() -> str:
    """Return what tells this machine from another one of the same name, cloned from the same image for example."""
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:
        # Not Linux. Without an address it is another number in every run, so that nobody is taken for this machine.
        return f"{uuid.getnode():012x}"


def _make_identity(pid: int) -> dict[str, Any]:
    started, host, user = process_start(pid), platform.node(), getpass.getuser()
    moment = _moment(started) or datetime.datetime.now(datetime.UTC)
    space = Path("/proc/self/ns/pid")
    return {
        "rollout": f"{moment:%Y%m%dT%H%M%SZ}-{re.sub(r'[^A-Za-z0-9_.]+', '_', user)}-{pid}",
        "by": f"{user}@{host}",
        "controller": {
            "host": host,
            "pid": pid,
            "started": started,
            "machine": machine(),
            # Of the first one on every Linux the same.
            "space": os.readlink(space) if space.is_symlink() else "",
        },
    }


def identity(folder: Path, pid: int) -> dict[str, Any]:
    """Return who this run of ansible-playbook is, the same for all its workers.

    :param folder: the run's own temporary folder, which its workers share.
    """
    path = folder / "gpu-node-rollout.json"
    if not path.exists():
        mine = folder / f"gpu-node-rollout.{os.getpid()}"
        mine.write_text(json.dumps(_make_identity(pid)), encoding="utf-8")
        try:
            # The first one counts.
            os.link(mine, path)
        except FileExistsError:
            pass
        finally:
            mine.unlink()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


class ActionModule(ActionBase):  # type: ignore[misc]
    """Have the node's record say what this rollout wants, or say who has the node."""

    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the task; see the module's documentation for arguments and result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        host = (task_vars or {}).get("inventory_hostname", "node")
        # Tasks run in workers; their parent is ansible-playbook itself.
        who = identity(Path(constants.DEFAULT_LOCAL_TMP), os.getppid())
        if self._task.args.get("hold", "take") != "take":
            return {**result, **self._hold_on(self._task.delegate_to or host, who, task_vars)}
        answer = self._claim(who, task_vars)
        for _ in range(_LOOKS):
            if answer.get("failed") or not answer["ask"]:
                break
            # Another one may have come meanwhile: the module compares, and asks again.
            record = answer["record"]
            seen = {"seen_rollout": record["rollout"], "seen_alive": still_runs(record["controller"])}
            answer = self._claim({**who, **seen}, task_vars)
        if not answer.get("failed"):
            if answer["ask"]:
                answer["conflict"] = "other rollouts come and go on this node; run this again"
            if answer["note"]:
                Display().display(f"  [{host}] {answer['note']}")
            if answer["conflict"]:
                answer = self._refuse(host, answer)
        return {**result, **answer}

    def _hold_on(self, node: str, who: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        """Say it to a node that has no task now; that it does not hear it is no reason to stop."""
        try:
            answer = self._claim(who, task_vars)
        except AnsibleConnectionFailure as error:
            answer = {"failed": True, "msg": str(error)}
        if not answer.get("failed"):
            return answer
        Display().warning(f"{node}: {answer['msg']}")
        return {"changed": False, "msg": answer["msg"]}

    def _refuse(self, host: str, answer: dict[str, Any]) -> dict[str, Any]:
        text = f"{host}: {answer['conflict']}"
        if self._task.check_mode:
            Display().warning(text)
            return answer
        return {**answer, "failed": True, "msg": text}

    def _claim(self, more: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name=_MODULE, module_args={**self._task.args, **more}, task_vars=task_vars
        )
        return answer
