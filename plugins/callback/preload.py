# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Load filters and tests before there are workers."""

from __future__ import annotations

DOCUMENTATION = r"""
name: preload
type: aggregate
short_description: Load filters and tests once, not in every task
version_added: 0.1.0
description:
  - Ansible runs each task of each host in a process of its own, forked from one that has loaded no filter. So every
    task that uses one compiles all filters of this collection, and those of Ansible, anew. Loaded before the first task
    they are in every process.
  - It prints nothing and changes no result.
requirements:
  - enabled with C(callbacks_enabled = serving.gpu_node.preload) in F(ansible.cfg)
author:
  - The gpu_node authors
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

FILTERS = Path(__file__).resolve().parents[1] / "filter"


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """What Ansible loads."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "serving.gpu_node.preload"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_start(self, playbook: Any) -> None:
        """Load them all; the name of one of Ansible's own brings all of those."""
        filter_loader.get("default")
        test_loader.get("defined")
        for file in sorted(FILTERS.glob("[a-z]*.py")):
            import_module(f"ansible_collections.serving.gpu_node.plugins.filter.{file.stem}")
