"""Runs a module's own main(), as Ansible does, in this process."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from ansible.module_utils import basic


@contextlib.contextmanager
def _arguments(args: dict[str, Any]) -> Iterator[None]:
    try:
        from ansible.module_utils.testing import patch_module_args
    except ImportError:  # ansible-core 2.18
        former = basic._ANSIBLE_ARGS
        basic._ANSIBLE_ARGS = json.dumps({"ANSIBLE_MODULE_ARGS": args}).encode()
        try:
            yield
        finally:
            basic._ANSIBLE_ARGS = former
    else:
        with patch_module_args(args):
            yield


def run_module(main: Callable[[], None], args: dict[str, Any], check: bool = False) -> dict[str, Any]:
    """Return the module's answer; `failed` is in it when it failed."""
    output = io.StringIO()
    with _arguments({**args, "_ansible_check_mode": check}), contextlib.redirect_stdout(output):
        try:
            main()
        except SystemExit:
            pass
        else:
            raise AssertionError("the module returned without an answer")
    answer: dict[str, Any] = json.loads(output.getvalue())
    return answer
