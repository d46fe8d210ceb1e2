# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Follow a job on the node: a module cannot print while it runs, so this action looks again and again."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_MODULE = "serving.gpu_node.follow"
_KEPT_LINES = 200
# A connection that is lost for a moment loses nothing: the job goes on, so looking again is safe.
_LOST_LOOKS = 30


class ActionModule(ActionBase):  # type: ignore[misc]
    """Start a job, print its lines as they come, and return when it ended."""

    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the task; see the module's documentation for arguments and result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        if self._task.check_mode:
            return {**result, **self._look({}, task_vars)}
        look, kept = self._follow(task_vars)
        attached = look.get("attached", False)
        if attached and not look.get("failed") and not look["same_job"]:
            look, kept = self._follow(task_vars)
        if look.get("failed"):
            return {**result, **look}
        result.update(changed=True, rc=look["rc"], lines=kept, attached=attached)
        if look["rc"] != 0:
            tail, unit = "\n".join(kept[-15:]), self._task.args["unit"]
            result.update(
                failed=True,
                msg=f"{unit} ended with exit code {look['rc']}; its last lines "
                f"(all of them: journalctl -u {unit}):\n{tail}",
            )
        return result

    def _follow(self, task_vars: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
        """Start or join the job and wait for its end; return the last look at it and the last lines it printed."""
        unit = self._task.args["unit"]
        host = (task_vars or {}).get("inventory_hostname", "node")
        try:
            look = self._look({}, task_vars)
        except AnsibleConnectionFailure as error:
            # A failure, as below.
            return {"failed": True, "msg": f"no connection to have {unit} run there; run this again: {error}"}, []
        if look.get("attached"):
            Display().display(f"  [{host}] {unit} is running already; following it")
        first, kept, lost = look, list[str](), 0
        while not look.get("failed"):
            for line in look["lines"]:
                Display().display(f"  [{host}] {line}")
            kept = (kept + look["lines"])[-_KEPT_LINES:]
            if look["ended"]:
                break
            time.sleep(int(self._task.args.get("interval", 2)))
            try:
                look = self._look({"begin": False, "cursor": look["cursor"]}, task_vars)
                lost = 0
            except AnsibleConnectionFailure as error:
                lost += 1
                if lost > _LOST_LOOKS:
                    # A failure, not an unreachable node: the play may have to say what to do about it.
                    text = (
                        f"the connection was lost while {unit} ran, and the job goes on there; run this again: {error}"
                    )
                    return {"failed": True, "msg": text}, kept
                look = {**look, "lines": []}
        return {**look, **{name: first[name] for name in ("attached", "same_job") if name in first}}, kept

    def _look(self, more: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name=_MODULE, module_args={**self._task.args, **more}, task_vars=task_vars
        )
        return answer
