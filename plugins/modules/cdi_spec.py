#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Read a node's CDI specifications and say what is wrong with them."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: cdi_spec
short_description: Check a node's CDI specifications of NVIDIA GPUs
version_added: "0.1.0"
description:
  - Reads every specification in O(folders), changes nothing, and says what is wrong with those of the kind
    C(nvidia.com/gpu). A wanted GPU without a device, device nodes, libraries or hooks that do not exist (stale after a
    change of the driver), another driver's version than the loaded one, nodes or libraries without which CUDA does not
    work (partial), two files that claim one device, a version that Podman does not read, and what is no specification.
  - Specifications that are YAML take the package C(python3-yaml) on the node.
options:
  devices:
    description: The GPUs that containers are to have, by UUID. Empty checks every device that is there.
    type: list
    elements: str
    default: []
  folders:
    description: Where specifications lie; Podman prefers the later ones.
    type: list
    elements: path
    default: [/etc/cdi, /run/cdi]
  podman:
    description: Podman's version, for example C(4.3.1); empty when it is unknown.
    type: str
    default: ""
extends_documentation_fragment: [serving.gpu_node.reads_only]
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Check the specification
  serving.gpu_node.cdi_spec:
    devices: [GPU-01234567-89ab-cdef-0123-456789abcdef]
  register: specification
"""

RETURN = r"""
problems:
  description: A sentence for everything that is wrong.
  returned: always
  type: list
  elements: str
names:
  description: The GPUs for which there is a device, by the name of the device.
  returned: always
  type: list
  elements: str
nodes:
  description: The device nodes that a container with O(devices) gets, each with its path on the node.
  returned: always
  type: dict
cuda:
  description: Whether such a container gets the driver's CUDA library.
  returned: always
  type: bool
driver_version:
  description: The loaded NVIDIA driver's version; empty when none is loaded.
  returned: always
  type: str
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.cdi import (
    cdi_problems,
    expected_nodes,
    has_cuda,
    host_paths,
    parse_specs,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_smi import parse_driver_version
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import TopologyError

ENDINGS = (".yaml", ".yml", ".json")


def read_texts(folders: list[str]) -> tuple[dict[str, str], list[str]]:
    """Read the files that Podman would take for specifications, and say which cannot be read."""
    texts: dict[str, str] = {}
    problems = []
    for folder in folders:
        for path in sorted(Path(folder).glob("*")):
            if not path.name.endswith(ENDINGS) or path.is_dir():
                continue
            try:
                texts[str(path)] = path.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                problems.append(f"{path} could not be read: {error.strerror or error}")
    return texts, problems


def read_driver_version(proc: Path) -> str:
    """Read the loaded driver's version; empty when none is loaded or it does not tell."""
    try:
        text = (proc / "driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        return str(parse_driver_version(text)["version"])
    except (OSError, TopologyError):
        return ""


def check(devices: list[str], folders: list[str], podman: str, proc: Path) -> dict[str, Any]:
    """Return the module's answer."""
    texts, unreadable = read_texts(folders)
    specs, malformed = parse_specs(texts)
    existing = {path for path in host_paths(specs) if os.path.exists(path)}
    driver = read_driver_version(proc)
    names = {name for spec in specs for name in spec.devices}
    asked = devices or sorted(names - {"all"})
    return {
        "problems": unreadable + malformed + cdi_problems(specs, devices, existing, driver, podman),
        "names": sorted(names),
        "nodes": expected_nodes(specs, asked),
        "cuda": has_cuda(specs, asked),
        "driver_version": driver,
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "list", "elements": "str", "default": []},
            "folders": {"type": "list", "elements": "path", "default": ["/etc/cdi", "/run/cdi"]},
            "podman": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    module.exit_json(changed=False, **check(params["devices"], params["folders"], params["podman"], Path("/proc")))


if __name__ == "__main__":
    main()
