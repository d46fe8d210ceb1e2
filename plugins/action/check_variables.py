# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Check a node's variables on the controller: only an action can evaluate them one by one, and makes no connection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_facts import FAILURE, OK, Check, finding

# What these hold is shown to nobody, also where it is of the wrong type.
_SECRET = re.compile(r"key|secret|passw|token|proxy|certificate|pip_config", re.IGNORECASE)


def _whole(value: Any) -> Any:
    """Evaluate every part of a value: parts may be templates, or locked in a vault, that were not looked at yet."""
    if isinstance(value, Mapping):
        return {name: _whole(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(part) for part in value]
    return str(value) if isinstance(value, str) else value


def check_option(role: str, name: str, option: dict[str, Any], value: Any) -> list[Check]:
    """Check one variable against its documentation."""
    messages = ArgumentSpecValidator({name: option}).validate({name: value}).error_messages
    wanted = str(option.get("type", "str"))
    remedy = f"see ansible-doc -t role serving.gpu_node.{role}"
    if messages and (_SECRET.search(name) or option.get("no_log")):
        # What is missing are names of ours; anything else may repeat a value.
        messages = [
            text
            if text.startswith("missing required arguments:")
            else "not of the right form (its content is not shown)"
            for text in messages
        ]
    return [finding("variables", FAILURE, f"{name}: {message}", wanted, remedy) for message in messages]


class ActionModule(ActionBase):  # type: ignore[misc]
    """Check every variable of the roles that is set."""

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the task; see the module's documentation for arguments and result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        checks: list[Check] = []
        for file in sorted(Path(str(self._task.args["roles_path"])).glob("*/meta/argument_specs.yml")):
            entry_points = yaml.safe_load(file.read_text(encoding="utf-8"))["argument_specs"]
            role = file.parents[1].name
            for name, option in entry_points.get("main", {}).get("options", {}).items():
                if name in variables:
                    checks += self._check(role, name, option, variables[name])
                elif option.get("required"):
                    remedy = f"set it in group_vars or host_vars; see ansible-doc -t role serving.gpu_node.{role}"
                    checks.append(finding("variables", FAILURE, f"{name} is not set", str(option.get("type")), remedy))
        text = "defined and of the right type"
        return {**result, "changed": False, "checks": checks or [finding("variables", OK, text, text)]}

    def _check(self, role: str, name: str, option: dict[str, Any], raw: Any) -> list[Check]:
        try:
            value = _whole(self._templar.template(raw))
        except AnsibleError as error:
            # Of a vault or of a template; neither says what is in it.
            why = re.sub(r"\s+", " ", str(getattr(error, "message", error))).strip()[:300]
            remedy = "define it, or hand over the vault that it is in (--vault-password-file, --ask-vault-pass)"
            return [finding("variables", FAILURE, f"{name} cannot be evaluated: {why}", "defined", remedy)]
        return check_option(role, name, option, value)
