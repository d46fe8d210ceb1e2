# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What is the same in the documentation of every module that only looks."""

from __future__ import annotations


class ModuleDocFragment:
    """What Ansible loads."""

    DOCUMENTATION = r"""
options: {}
attributes:
  check_mode:
    description: Reads only, so check mode makes no difference.
    support: full
  diff_mode:
    description: There is nothing to show a difference of.
    support: none
"""
