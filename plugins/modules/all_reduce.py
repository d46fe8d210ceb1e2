#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Tell which replicas' GPUs have to show an all-reduce before something starts on them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: all_reduce
short_description: Tell which replicas' GPUs have no report of an all-reduce yet, and which of them are free to make one
version_added: "0.2.0"
description:
  - Reads which reports lie on the node and what uses its GPUs, and changes nothing.
  - A report is of one image, one version of the driver, the GPUs of one replica and its variables of NCCL. There are
    only reports of GPUs that added up.
  - GPUs are free when no unit of a replica that uses one of them is active and no process computes on them.
options:
  path:
    description: Folder that holds the reports.
    type: path
    required: true
  image:
    description: Id of the serving image.
    type: str
    required: true
  driver:
    description: Version of the NVIDIA driver.
    type: str
    required: true
  planned:
    description: The plan's replicas, each with C(index), C(gpus) and C(env).
    type: list
    elements: dict
    required: true
  gpus:
    description: The node's GPUs, each with C(pci_address) and C(uuid).
    type: list
    elements: dict
    required: true
  replicas:
    description: Folder that holds what replicas are made of.
    type: path
    default: /var/lib/gpu-node/replicas
extends_documentation_fragment: [serving.gpu_node.reads_only]
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: See whose GPUs have to add up first
  serving.gpu_node.all_reduce:
    path: /var/lib/gpu-node/acceptance/all_reduce
    image: "{{ serving_image_result.id }}"
    driver: "{{ topology_result.topology.driver.version }}"
    planned: "{{ serving_plan_result.replicas }}"
    gpus: "{{ topology_result.topology.gpus }}"
"""

RETURN = r"""
runs:
  description:
    - Replicas whose GPUs are free and have no report. Each has C(key), C(replica), C(uuids) and C(environment).
  returned: always
  type: list
  elements: dict
waiting:
  description: A sentence for each replica without a report whose GPUs are in use.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.all_reduce import choose_runs, groups_of
from ansible_collections.serving.gpu_node.plugins.module_utils.gpu_use import used_gpus


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "image": {"type": "str", "required": True},
            "driver": {"type": "str", "required": True},
            "planned": {"type": "list", "elements": "dict", "required": True},
            "gpus": {"type": "list", "elements": "dict", "required": True},
            "replicas": {"type": "path", "default": "/var/lib/gpu-node/replicas"},
        },
        supports_check_mode=True,
    )
    params = module.params
    groups = groups_of(params["planned"], params["gpus"])
    stored = {file.stem for file in Path(params["path"]).glob("*.json")}
    # Without anything to ask, nobody has to look what runs.
    missing = choose_runs(groups, params["image"], params["driver"], stored, {})[0]
    uuids = [uuid for group in missing for uuid in group["uuids"]]
    busy = used_gpus(module, Path(params["replicas"]), uuids) if missing else {}
    runs, waiting = choose_runs(missing, params["image"], params["driver"], stored, busy)
    module.exit_json(changed=False, runs=runs, waiting=waiting)


if __name__ == "__main__":
    main()
