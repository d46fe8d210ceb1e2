# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""A node's topology as a file on the controller: saved by ``playbooks/topology.yml``, or what nvidia-smi printed.

Pure functions. They run on the controller only: the node needs no YAML library.
"""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Callable
from typing import Any

import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_smi import (
    has_topo_matrix,
    parse_topo_matrix,
    parse_uuid,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import (
    PCIE_LINKS,
    TopologyError,
    format_cpu_list,
    pci_address,
    pci_order,
)

SCHEMA = 1
# What tells of the node's present state and not of its hardware: not saved.
STATE_FIELDS = ("listeners", "releases")

# A text that was saved beside the matrix and says that sysfs does not know the card's NUMA node.
_NO_NUMA_NODE = re.compile(r"\bnuma_node\b[\s:=]+-1\b")
_NVLINK = re.compile(r"NV[0-9]{1,3}")
_MATRIX_NAME = re.compile(r"GPU[0-9]{1,4}")
# Linux counts CPUs and NUMA nodes far below this.
_MAX_NUMBER = 2**20
_MAX_BYTES = 2**60

# what PyYAML raises for a text that it cannot read: its own error, and for some scalars whatever Python says of them
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

_FromValue = Callable[[str, Any], Any]


class _Short(reprlib.Repr):
    """Shows a value shortly: it may be as large as the file, and YAML's aliases make it larger."""

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out a number of thousands of digits.
        return str(x) if x.bit_length() < 128 else f"a number of {x.bit_length()} bits"


_short = _Short().repr


def _refuse(field: str, value: Any, needed: str) -> TopologyError:
    return TopologyError(f"{field}: {_short(value)} is not {needed}")


def _schema(field: str, value: Any) -> int:
    if value is True or value != SCHEMA:
        raise _refuse(
            field, value, f"{SCHEMA}, which this collection reads; save the file anew with playbooks/topology.yml"
        )
    return SCHEMA


def _integer(minimum: int, maximum: int, what: str, unknown: bool = False) -> _FromValue:
    needed = f"{what} from {minimum} to {maximum}" + (" or null for unknown" if unknown else "")

    def check(field: str, value: Any) -> int | None:
        if value is None and unknown:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise _refuse(field, value, needed)
        return int(value)

    return check


def _boolean(field: str, value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise _refuse(field, value, "true, false or null for unknown")


def _text(field: str, value: Any) -> str:
    if isinstance(value, str) and len(value) <= 1000:
        return str(value)
    raise _refuse(field, value, "a text of at most 1000 characters; put it in quotes")


def _list(item: _FromValue) -> _FromValue:
    def check(field: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _refuse(field, value, "a list; write [] for none")
        return [item(f"{field}[{number}]", entry) for number, entry in enumerate(value)]

    return check


def _mapping(fields: dict[str, tuple[_FromValue, Any]], required: tuple[str, ...] = ()) -> _FromValue:
    """Return a check of a mapping: by field its check and its default."""

    def check(field: str, value: Any) -> dict[str, Any]:
        prefix = f"{field}." if field else ""
        if not isinstance(value, dict):
            raise _refuse(field or "the file", value, "a mapping of names to values")
        for name in value:
            if name not in fields:
                raise TopologyError(f"{prefix}{_short(name)} is not known; known are {', '.join(fields)}")
        for name in required:
            if name not in value:
                raise TopologyError(f"{prefix}{name} is missing; it is needed")
        return {
            name: check_value(f"{prefix}{name}", value[name]) if name in value else copy.deepcopy(default)
            for name, (check_value, default) in fields.items()
        }

    return check


def _address(field: str, value: Any) -> str:
    if isinstance(value, str) and (pci_address(value) or _MATRIX_NAME.fullmatch(value)):
        return pci_address(value) or str(value)
    raise _refuse(field, value, "a PCI address like '0000:38:00.0' or a name like GPU0; put it in quotes")


def _device_id(field: str, value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"(?:0x[0-9a-f]{4})?", value):
        return str(value)
    raise _refuse(field, value, "a PCI device number like '0x2bb5', or '' for unknown; put it in quotes")


def _uuid(field: str, value: Any) -> str:
    if value == "" or (isinstance(value, str) and parse_uuid(value)):
        return parse_uuid(value)
    raise _refuse(field, value, "a UUID like GPU-01234567-89ab-cdef-0123-456789abcdef, or '' for unknown")


def _link(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) != 3:
        raise _refuse(field, value, "[GPU, GPU, kind]")
    kind = value[2]
    if not isinstance(kind, str) or not (kind in PCIE_LINKS or _NVLINK.fullmatch(kind)):
        raise _refuse(f"{field}[2]", kind, f"a link: {', '.join(PCIE_LINKS)} or NV and a number")
    return [_address(f"{field}[0]", value[0]), _address(f"{field}[1]", value[1]), str(kind)]


def _anything(field: str, value: Any) -> None:
    """Take a field whose value is not used."""


_cpu = _integer(0, _MAX_NUMBER, "a CPU's number")
_bytes = _integer(1, _MAX_BYTES, "a number of bytes", unknown=True)
_numa_node = _integer(0, _MAX_NUMBER, "a NUMA node's number", unknown=True)

_TOPOLOGY = _mapping(
    {
        "schema": (_schema, SCHEMA),
        "cpus": (_list(_cpu), []),
        "memory_bytes": (_bytes, None),
        "numa_nodes": (
            _list(
                _mapping(
                    {
                        "id": (_integer(0, _MAX_NUMBER, "a NUMA node's number"), 0),
                        "cpus": (_list(_cpu), []),
                        "memory_bytes": (_bytes, None),
                        "socket": (_integer(0, _MAX_NUMBER, "a socket's number", unknown=True), None),
                    },
                    required=("id", "cpus"),
                )
            ),
            [],
        ),
        "cores": (_list(_list(_cpu)), []),
        "gpus": (
            _list(
                _mapping(
                    {
                        "pci_address": (_address, ""),
                        "device_id": (_device_id, ""),
                        "numa_node": (_numa_node, None),
                        "uuid": (_uuid, ""),
                        "model": (_text, ""),
                        "memory_mib": (_integer(1, _MAX_BYTES, "a number of MiB", unknown=True), None),
                        "mig": (_boolean, None),
                    },
                    required=("pci_address",),
                )
            ),
            [],
        ),
        "links": (_list(_link), []),
        "driver": (
            _mapping({"version": (_text, ""), "open": (_boolean, None)}, required=("version",)),
            {"version": "", "open": None},
        ),
        "warnings": (_list(_text), []),
        # saved as it came from the module: taken, and not believed
        **{name: (_anything, None) for name in STATE_FIELDS},
    },
    required=("schema", "cpus", "gpus"),
)


def load_topology(text: str) -> dict[str, Any]:
    """Return the topology that a file holds.

    :param text: YAML or JSON as ``playbooks/topology.yml`` saves it, or what ``nvidia-smi topo -m`` printed.
    :returns: what ``gpu_topology`` returns, with no listeners and no releases.
    :raises TopologyError: naming field, value and what is needed.
    """
    if has_topo_matrix(text):
        return topology_from_matrix(text)
    try:
        data = yaml.safe_load(text)
    except _YAML_ERRORS as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark is not None else ""
        raise TopologyError(
            f"the file is neither YAML ({first[:200]}{place}) nor what 'nvidia-smi topo -m' prints"
        ) from error
    if not isinstance(data, dict):
        raise TopologyError(
            f"the file holds {'nothing' if data is None else _short(data)}; needed is a topology saved by "
            "playbooks/topology.yml, or what 'nvidia-smi topo -m' prints"
        )
    if "schema" in data:
        # Before anything else: another version has other fields.
        _schema("schema", data["schema"])
    topology: dict[str, Any] = _TOPOLOGY("", data)
    topology["cpus"] = _unique("cpus", topology["cpus"], "CPU")
    topology["numa_nodes"] = _checked_nodes(topology)
    topology["cores"] = sorted(
        _within(f"cores[{number}]", core, topology["cpus"]) for number, core in enumerate(topology["cores"])
    )
    _unique("cores", [cpu for core in topology["cores"] for cpu in core], "CPU")
    topology["gpus"].sort(key=lambda gpu: _gpu_order(gpu["pci_address"]))
    _unique("gpus", [gpu["pci_address"] for gpu in topology["gpus"]], "pci_address")
    _unique("gpus", [gpu["uuid"] for gpu in topology["gpus"] if gpu["uuid"]], "uuid")
    topology["links"] = _checked_links(topology)
    return {**topology, "listeners": [], "releases": {}}


def saved_topology(topology: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved of a topology: its hardware, and not what runs on it now."""
    return {name: value for name, value in topology.items() if name not in STATE_FIELDS}


def _gpu_order(address: str) -> tuple[int, int, str]:
    return (0, int(address[3:]), "") if _MATRIX_NAME.fullmatch(address) else (1, *pci_order(address))


def _unique(field: str, values: list[Any], what: str) -> list[Any]:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise TopologyError(f"{field}: the {what} {value} is there twice; it can be there once")
        seen.add(value)
    return sorted(seen)


def _within(field: str, cpus: list[int], known: list[int]) -> list[int]:
    strange = set(cpus) - set(known)
    if strange:
        raise TopologyError(f"{field}: the CPUs {format_cpu_list(sorted(strange))} are not in cpus; add them there")
    return sorted(cpus)


def _checked_nodes(topology: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = sorted(topology["numa_nodes"], key=lambda node: int(node["id"]))
    _unique("numa_nodes", [node["id"] for node in nodes], "id")
    for node in nodes:
        if not node["cpus"]:
            raise TopologyError(
                f"numa_nodes: node {node['id']} has no CPUs; leave out a node that nothing can be pinned to"
            )
        node["cpus"] = _within(f"numa_nodes: node {node['id']}", node["cpus"], topology["cpus"])
    _unique("numa_nodes", [cpu for node in nodes for cpu in node["cpus"]], "CPU")
    return nodes


def _checked_links(topology: dict[str, Any]) -> list[list[str]]:
    place = {gpu["pci_address"]: number for number, gpu in enumerate(topology["gpus"])}
    links = []
    for number, (one, other, kind) in enumerate(topology["links"]):
        for address in (one, other):
            if address not in place:
                raise TopologyError(f"links[{number}]: '{address}' is no pci_address of gpus; use one of those")
        if one == other:
            raise TopologyError(f"links[{number}]: '{one}' has no link to itself; leave it out")
        links.append([*sorted((one, other), key=lambda address: place[address]), kind])
    _unique("links", [f"{one} to {other}" for one, other, _ in links], "link")
    return sorted(links, key=lambda link: (place[link[0]], place[link[1]]))


def topology_from_matrix(text: str) -> dict[str, Any]:
    """Make a topology that can be planned with from the text of ``nvidia-smi topo -m`` alone.

    The text has no PCI addresses, so a GPU is named as there (``GPU0``). Memory, sockets, cores, UUIDs and models are
    unknown, and so are CPUs and NUMA nodes that no GPU is near.

    :raises TopologyError: when the text has no matrix, or one that contradicts itself.
    """
    matrix = parse_topo_matrix(text)
    warnings = [
        "made from the text of nvidia-smi topo -m: memory, sockets, cores, PCI addresses, UUIDs, models and NUMA nodes "
        "without a GPU are unknown",
        *matrix["warnings"],
    ]
    nodes: dict[int, set[int]] = {}
    numa_node: dict[str, int | None] = {}
    for name in matrix["gpus"]:
        near = matrix["numa_nodes"][name] or []
        # A card that is near to several nodes is on none of them as far as this text tells.
        numa_node[name] = near[0] if len(near) == 1 else None
        if len(near) == 1 and matrix["cpus"][name]:
            nodes.setdefault(near[0], set()).update(matrix["cpus"][name])
    holders: dict[int, int] = {}
    for node, cpus in sorted(nodes.items()):
        for cpu in sorted(cpus):
            if holders.setdefault(cpu, node) != node:
                raise TopologyError(
                    f"CPU {cpu} is near to GPUs of the NUMA nodes {holders[cpu]} and {node}, and a CPU is on one node; "
                    "correct CPU Affinity or NUMA Affinity"
                )
    unknown = [name for name in matrix["gpus"] if numa_node[name] is None]
    if _NO_NUMA_NODE.search(text):
        unknown = list(matrix["gpus"])
        warnings.append(
            "the text says that sysfs does not tell the NUMA node of a GPU (-1); the matrix is not believed"
        )
    if unknown:
        warnings.append(f"the NUMA node of {', '.join(unknown)} is unknown")
    return {
        "schema": SCHEMA,
        "cpus": sorted({cpu for cpus in matrix["cpus"].values() for cpu in cpus or []}),
        "memory_bytes": None,
        "numa_nodes": [
            {"id": node, "cpus": sorted(cpus), "memory_bytes": None, "socket": None}
            for node, cpus in sorted(nodes.items())
        ],
        "cores": [],
        "gpus": [
            {
                "pci_address": name,
                "device_id": "",
                "numa_node": None if name in unknown else numa_node[name],
                "uuid": "",
                "model": "",
                "memory_mib": None,
                "mig": None,
            }
            for name in matrix["gpus"]
        ],
        "links": matrix["links"],
        "driver": {"version": "", "open": None},
        "warnings": warnings,
        "listeners": [],
        "releases": {},
    }
