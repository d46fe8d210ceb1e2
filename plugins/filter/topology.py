# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around a topology as a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.module_utils import topology_file
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import TopologyError


def load_topology(text: str) -> dict[str, Any]:
    """Return ``{"topology": topology or {}, "problem": sentence or ""}``.

    The problem comes back as data, so that the role can name the file and fail without a traceback.
    """
    try:
        return {"topology": topology_file.load_topology(text), "problem": ""}
    except TopologyError as error:
        return {"topology": {}, "problem": str(error)}


def saved_topology(topology: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved of a topology; see ``topology_file.saved_topology``."""
    if "schema" not in topology:
        raise AnsibleFilterError("saved_topology needs a topology; run the role topology first")
    return topology_file.saved_topology(topology)


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"load_topology": load_topology, "saved_topology": saved_topology}
