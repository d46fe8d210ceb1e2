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
        args = dict(self._task.args)
        host = (task_vars or {}).get("inventory_hostname", "node")
        look = self._execute_module(module_name=_MODULE, module_args=args, task_vars=task_vars)
        if look.get("failed") or self._task.check_mode:
            return {**result, **look}
        attached = look["attached"]
        if attached:
            self._show(args, host, [f"{args['unit']} is running already; following it"])
        kept: list[str] = []
        lost = 0
        while True:
            self._show(args, host, look["lines"])
            kept = (kept + look["lines"])[-_KEPT_LINES:]
            if look["ended"]:
                break
            args["cursor"] = look["cursor"]
            time.sleep(int(args.get("interval", 2)))
            try:
                look = self._execute_module(
                    module_name=_MODULE, module_args={**args, "begin": False}, task_vars=task_vars
                )
                lost = 0
            except AnsibleConnectionFailure:
                lost += 1
                if lost > _LOST_LOOKS:
                    raise
                look = {**look, "lines": []}
            if look.get("failed"):
                return {**result, **look}
        result.update(changed=True, rc=look["rc"], lines=kept, attached=attached)
        if look["rc"] not in args.get("ok_codes", [0]):
            tail = "\n".join(kept[-15:])
            result.update(
                failed=True,
                msg=f"{args['unit']} ended with exit code {look['rc']}; its last lines "
                f"(all of them: journalctl -u {args['unit']}):\n{tail}",
            )
        return result

    @staticmethod
    def _show(args: dict[str, Any], host: str, lines: list[str]) -> None:
        if not args.get("quiet", False):
            for line in lines:
                Display().display(f"  [{host}] {line}")
