#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Tell what is known of the kernels on a node's GPUs, and what can be checked now."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: qualification
short_description: Tell which reports of the kernels a node has, and on which free GPU a missing one can be made
version_added: "0.2.0"
description:
  - Reads the reports of C(ds41k.qualify) that lie on the node, and changes nothing.
  - A report is of one image, one model of GPU and one version of the driver.
  - A GPU is free when no unit of a replica that uses it is active and no process computes on it.
options:
  path:
    description: Folder that holds the reports.
    type: path
    required: true
  image:
    description: Id of the serving image, 64 hex digits.
    type: str
    required: true
  kernels:
    description: Key of the kernels in it. Empty when it is not known.
    type: str
    default: ""
  driver:
    description: Version of the NVIDIA driver.
    type: str
    required: true
  gpus:
    description: The plan's GPUs, each with C(uuid) and C(model).
    type: list
    elements: dict
    required: true
  allowed:
    description: Whether checks may be made at all.
    type: bool
    default: true
  replicas:
    description: Folder that holds what replicas are made of.
    type: path
    default: /var/lib/gpu-node/replicas
extends_documentation_fragment: [serving.gpu_node.reads_only]
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Look for reports
  serving.gpu_node.qualification:
    path: /var/lib/gpu-node/qualification
    image: "{{ serving_image_result.id }}"
    driver: 580.95.05
    gpus:
      - uuid: GPU-00000000-0000-0000-0000-000000000001
        model: NVIDIA RTX PRO 6000 Blackwell Server Edition
"""

RETURN = r"""
records:
  description: For each model of GPU its report, or why there is none.
  returned: always
  type: list
  elements: dict
  contains:
    gpu:
      description: The model.
      type: str
    driver:
      description: Version of the driver.
      type: str
    report:
      description: What the check found; empty when there is no report.
      type: dict
    why:
      description: Why there is no report.
      type: str
    pending:
      description: Whether the first check can be made now.
      type: bool
    busy:
      description: Whether there is no report because every GPU of the model is in use.
      type: bool
runs:
  description: Checks that can be made now. Each has C(key), C(gpu), C(driver) and C(uuid) of a free GPU.
  returned: always
  type: list
  elements: dict
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.gpu_use import used_gpus
from ansible_collections.serving.gpu_node.plugins.module_utils.qualification import choose_reports

PARTS = {"image": str, "kernels": str, "gpu": str, "driver": str, "report": dict}


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of a folder; a damaged one counts as none, and is made anew."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            one = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(one, dict) and all(isinstance(one.get(name), kind) for name, kind in PARTS.items()):
            found.append(one)
    return found


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "image": {"type": "str", "required": True},
            "kernels": {"type": "str", "default": ""},
            "driver": {"type": "str", "required": True},
            "gpus": {"type": "list", "elements": "dict", "required": True},
            "allowed": {"type": "bool", "default": True},
            "replicas": {"type": "path", "default": "/var/lib/gpu-node/replicas"},
        },
        supports_check_mode=True,
    )
    params = module.params
    wanted: dict[str, list[str]] = {}
    for gpu in params["gpus"]:
        wanted.setdefault(gpu["model"], []).append(gpu["uuid"])
    uuids = [uuid for group in wanted.values() for uuid in group]
    busy = used_gpus(module, Path(params["replicas"]), uuids)
    about = {name: params[name] for name in ("image", "kernels", "driver")}
    records, runs = choose_reports(read_reports(Path(params["path"])), wanted, about, busy, params["allowed"])
    module.exit_json(changed=False, records=records, runs=runs)


if __name__ == "__main__":
    main()
