#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Check a node's variables against the roles' documentation, without a connection."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: check_variables
short_description: Check a node's variables against the roles' documentation, without a connection
version_added: "0.2.0"
description:
  - Evaluates each variable that a role documents and the inventory sets, and checks its type. One that refers to a
    variable that is not there (a vault that was not handed over), or that is required and not set, is a failure.
  - Never fails itself, so that one run names everything. What a secret variable holds is not shown.
  - This is an action, which runs on the controller. The module of the same name is its documentation.
options:
  roles_path:
    description: Folder of the roles on the controller.
    type: path
    required: true
extends_documentation_fragment: [serving.gpu_node.reads_only]
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Check the inventory's variables
  serving.gpu_node.check_variables:
    roles_path: "{{ role_path }}/.."
  register: variables
"""

RETURN = r"""
checks:
  description:
    - A finding for each wrong variable, with C(check), C(level) (C(ok) or C(failure)), C(seen), C(wanted) and
      C(remedy); one good finding when none is wrong.
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    """Say that the action was not found: the module itself never runs."""
    module = AnsibleModule(
        argument_spec={"roles_path": {"type": "path", "required": True}},
        supports_check_mode=True,
    )
    module.fail_json(msg="check_variables runs on the controller: its action plugin was not found")


if __name__ == "__main__":
    main()
