# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""CDI specifications of NVIDIA GPUs: what ``--device nvidia.com/gpu=UUID`` gives a container, and what is wrong there.

Pure functions only: the module ``cdi_spec`` reads files and looks whether paths exist. The form is that of the
Container Device Interface (``cdiVersion``, ``kind``, ``devices``, ``containerEdits``), as nvidia-ctk writes it.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

try:
    import yaml
except ImportError:  # a bare node has none; the role installs python3-yaml before it makes a specification
    yaml = None  # type: ignore[assignment]

from ansible_collections.serving.gpu_node.plugins.module_utils.settings import AUTO
from ansible_collections.serving.gpu_node.plugins.module_utils.toolkit import numbers
from ansible_collections.serving.gpu_node.plugins.module_utils.toolkit import toolkit_problem as toolkit_problem

GPU_KIND = "nvidia.com/gpu"
REMEDY = "make it anew with `systemctl start gpu-node-cdi.service`"
# Without them CUDA finds no GPU, although the card's own node is there.
CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")

_CARD_NODE = re.compile(r"/dev/nvidia[0-9]+")
_LIBRARY = re.compile(r"/lib(?:cuda|nvidia-ml)\.so\.([0-9]+(?:\.[0-9]+)+)$")
_CUDA = re.compile(r"/libcuda\.so\.[0-9.]+$")
_SHOWN = 3
# Podman reads a specification strictly: one of a version that it does not know yet counts as if it were not there.
# By Podman's version the newest one read; what is not listed here was not seen. Sources: 4.3.1 was tried (Debian 12);
# 4.9.3 (Ubuntu 24.04) knows no additionalGids of 0.7.0: github.com/NVIDIA/nvidia-container-toolkit/issues/1860.
_READ_BY_PODMAN = (((4, 4), (0, 5)), ((5, 0), (0, 6)))


class CdiError(ValueError):
    """A text that is no CDI specification."""


@dataclass(frozen=True)
class Edits:
    """What a device, or every device of a file, brings into a container.

    ``nodes`` is the path in the container and that on the host of each device node; ``mounts`` and ``hooks`` are paths
    on the host.
    """

    nodes: dict[str, str] = field(default_factory=dict)
    mounts: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CdiSpec:
    """One file: its path, version, kind, the edits of each device by name, and those that all of them bring."""

    path: str
    version: str
    kind: str
    devices: dict[str, Edits]
    common: Edits

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    def edits(self, device: str) -> tuple[Edits, Edits]:
        return (self.devices[device], self.common)


def _load(text: str) -> Any:
    """Return the value that a JSON or YAML text stands for."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if yaml is None:
        raise CdiError("reading YAML takes the package python3-yaml on the node")
    try:
        return yaml.safe_load(text)
    # a date that does not exist is a ValueError, and so is a number that is too long
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CdiError(f"it is neither JSON nor YAML: {' '.join(str(error).split())[:200]}") from None


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CdiError(f"{what} is no mapping")
    return value


def _items(value: Any, what: str) -> list[dict[Any, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise CdiError(f"{what} is no list of mappings")
    return value


def _text(item: dict[Any, Any], key: str, what: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise CdiError(f"{what} has no {key}")
    return value


def _edits(value: Any, what: str) -> Edits:
    edits = _mapping(value, f"containerEdits of {what}")
    nodes = {}
    for item in _items(edits.get("deviceNodes"), f"deviceNodes of {what}"):
        path = _text(item, "path", f"a device node of {what}")
        nodes[path] = str(item.get("hostPath") or path)
    return Edits(
        nodes,
        tuple(
            _text(item, "hostPath", f"a mount of {what}")
            for item in _items(edits.get("mounts"), f"mounts of {what}")
            # a tmpfs has no place on the host
            if str(item.get("hostPath") or "").startswith("/")
        ),
        tuple(_text(item, "path", f"a hook of {what}") for item in _items(edits.get("hooks"), f"hooks of {what}")),
    )


def parse_spec(path: str, text: str) -> CdiSpec:
    """Read one specification.

    :param path: where it lies, ``/etc/cdi/nvidia.yaml`` for example.
    :param text: JSON or YAML.
    :raises CdiError: when it is none, with what is wrong.
    """
    value = _mapping(_load(text), "the file")
    if not value:
        raise CdiError("it is empty")
    version, kind = value.get("cdiVersion"), value.get("kind")
    if not isinstance(version, str) or not numbers(version):
        raise CdiError("it has no cdiVersion such as 0.5.0")
    if not isinstance(kind, str) or "/" not in kind:
        raise CdiError("it has no kind such as nvidia.com/gpu")
    devices: dict[str, Edits] = {}
    for item in _items(value.get("devices"), "devices"):
        name = _text(item, "name", "a device")
        if name in devices:
            raise CdiError(f"it has the device {name} twice")
        devices[name] = _edits(item.get("containerEdits"), f"the device {name}")
    return CdiSpec(path, version, kind, devices, _edits(value.get("containerEdits"), "the file"))


def parse_specs(texts: dict[str, str]) -> tuple[list[CdiSpec], list[str]]:
    """Read the specifications of NVIDIA GPUs among files.

    :param texts: by path. A later folder (``/run/cdi`` after ``/etc/cdi``) comes first for Podman.
    :returns: them, in that order, and a sentence for each file that cannot be read.
    """
    specs, problems = [], []
    for path, text in texts.items():
        try:
            spec = parse_spec(path, text)
        except CdiError as error:
            # Podman passes over what it cannot read; that it was to be a GPU's can only be guessed by its text.
            if "nvidia" in path or GPU_KIND in text:
                problems.append(f"{path} is no CDI specification: {error}; {REMEDY}")
            continue
        if spec.kind == GPU_KIND:
            specs.append(spec)
    return specs, problems


def specs_of(specs: list[CdiSpec], device: str) -> list[CdiSpec]:
    """Return the specifications that have a device, the one that Podman takes last."""
    return [spec for spec in specs if device in spec.devices]


def host_paths(specs: list[CdiSpec]) -> set[str]:
    """Return every path on the host that the specifications name."""
    found: set[str] = set()
    for spec in specs:
        for edits in (*spec.devices.values(), spec.common):
            found |= {*edits.nodes.values(), *edits.mounts, *edits.hooks}
    return found


def expected_nodes(specs: list[CdiSpec], devices: Iterable[str]) -> dict[str, str]:
    """Return the device nodes that a container with these devices has, each with its path on the host."""
    nodes: dict[str, str] = {}
    for device in devices:
        for spec in specs_of(specs, device)[-1:]:
            for edits in spec.edits(device):
                nodes |= edits.nodes
    return nodes


def has_cuda(specs: list[CdiSpec], devices: Iterable[str]) -> bool:
    """Tell whether a container with these devices gets the driver's CUDA library."""
    used = [edits for device in devices for spec in specs_of(specs, device)[-1:] for edits in spec.edits(device)]
    return any(_CUDA.search(mount) for edits in used for mount in edits.mounts)


def driver_versions(spec: CdiSpec) -> list[str]:
    """Return the driver versions whose libraries a specification mounts; one, or it is of no driver."""
    mounts = [mount for edits in (*spec.devices.values(), spec.common) for mount in edits.mounts]
    return sorted({match[1] for match in map(_LIBRARY.search, mounts) if match})


def unreadable_by(podman: str, version: str) -> bool:
    """Tell whether this Podman passes over specifications of this version, as far as that is known."""
    own = numbers(podman)
    for below, newest in _READ_BY_PODMAN:
        if own and own < below:
            return numbers(version)[:2] > newest
    return False


def _some(names: Iterable[str]) -> str:
    """Return the first names of a list and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - _SHOWN
    return ", ".join(ordered[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _duplicates(specs: list[CdiSpec], devices: Collection[str]) -> list[str]:
    """Say which files claim the same of these devices: in one folder neither counts, else the later folder's does."""
    problems = []
    for number, one in enumerate(specs):
        for other in specs[number + 1 :]:
            shared = sorted(one.devices.keys() & other.devices.keys() & set(devices))
            if not shared:
                continue
            outcome = (
                "Podman takes neither"
                if one.folder == other.folder
                else f"Podman takes that of {other.path}, whatever {one.path} says"
            )
            problems.append(
                f"{one.path} and {other.path} both have {_some(shared)}: {outcome}; remove the one that is not"
                " /etc/cdi/nvidia.yaml"
            )
    return problems


def _paths_problems(spec: CdiSpec, edits: list[Edits], existing: Collection[str]) -> list[str]:
    """Say which paths of the edits in use are not there."""
    problems = []
    nodes = {host for part in edits for host in part.nodes.values()} - set(existing)
    mounts = {path for part in edits for path in part.mounts} - set(existing)
    hooks = {path for part in edits for path in part.hooks} - set(existing)
    if nodes:
        problems.append(
            f"{spec.path} gives device nodes that do not exist: {_some(nodes)};"
            " the driver is not loaded, or a card is gone"
        )
    if mounts:
        problems.append(
            f"{spec.path} is stale: it mounts {_some(mounts)}, which {'does' if len(mounts) == 1 else 'do'} not exist"
            f" (any more), as after a change of the driver; {REMEDY}"
        )
    if hooks:
        problems.append(
            f"{spec.path} runs {_some(hooks)}, which {'does' if len(hooks) == 1 else 'do'} not exist; install"
            " nvidia-container-toolkit-base again"
        )
    return problems


def _partial_problems(spec: CdiSpec, devices: list[str]) -> list[str]:
    """Say what a specification lacks without which CUDA does not work in the container."""
    problems = []
    for device in devices:
        own, common = spec.edits(device)
        nodes = own.nodes.keys() | common.nodes.keys()
        missing = [node for node in CONTROL_NODES if node not in nodes]
        if not any(_CARD_NODE.fullmatch(node) for node in own.nodes):
            missing = ["the card's own /dev/nvidiaN", *missing]
        if not any(_CUDA.search(mount) for mount in (*own.mounts, *common.mounts)):
            missing.append("the library libcuda.so")
        if missing:
            problems.append(
                f"{spec.path} is partial: {GPU_KIND}={device} comes without {', '.join(missing)}; load nvidia-uvm"
                f" (`nvidia-modprobe -u -c0`), then {REMEDY}"
            )
    cards: dict[str, list[str]] = {}
    for device in devices:
        for node in spec.devices[device].nodes:
            if _CARD_NODE.fullmatch(node):
                cards.setdefault(node, []).append(device)
    problems += [
        f"{spec.path} gives {node} for {' and '.join(names)}: two GPUs cannot be one node; {REMEDY}"
        for node, names in sorted(cards.items())
        if len(names) > 1
    ]
    return problems


def _driver_problems(spec: CdiSpec, driver: str) -> list[str]:
    """Say where a specification's libraries are of another driver than the loaded one."""
    found = driver_versions(spec)
    if len(found) > 1:
        return [f"{spec.path} mounts libraries of the drivers {' and '.join(found)}: it is a mixture; {REMEDY}"]
    if driver and found and found[0] != driver:
        return [
            f"{spec.path} is stale: it mounts the libraries of driver {found[0]}, and {driver} is loaded;"
            f" reboot when the driver was upgraded, else {REMEDY}"
        ]
    return []


def cdi_problems(
    specs: list[CdiSpec], devices: list[str], existing: Collection[str], driver: str = "", podman: str = ""
) -> list[str]:
    """Return what is wrong with the specifications, a sentence each.

    :param specs: in the order of their folders, see :func:`parse_specs`.
    :param devices: the GPUs that containers are to have, by UUID; empty asks for every one that is there by its UUID.
        Further names of the same cards (0, all), and parts of cards (MIG), give replicas nothing.
    :param existing: which of :func:`host_paths` exist.
    :param driver: the loaded driver's version; empty when unknown.
    :param podman: Podman's version; empty when unknown.
    """
    if not any(spec.devices for spec in specs):
        where = f"{_some(spec.path for spec in specs)} has" if specs else "/etc/cdi and /run/cdi have"
        return [f"{where} no device of the kind {GPU_KIND}; {REMEDY}"]
    known = sorted({name for spec in specs for name in spec.devices})
    asked = devices or [name for name in known if name.startswith("GPU-")]
    problems = _duplicates(specs, asked)
    for device in asked:
        if not specs_of(specs, device):
            problems.append(
                f"there is no {GPU_KIND}={device} in {_some(spec.path for spec in specs)}, which"
                f" {'has' if len(specs) == 1 else 'have'} {_some(known)}: the driver did not see that card when it was"
                f" made, or its devices are not named by UUID; look for the card in `nvidia-smi -L`, then {REMEDY}"
            )
    for spec in specs:
        used = [device for device in asked if spec in specs_of(specs, device)[-1:]]
        if not used:
            continue
        if unreadable_by(podman, spec.version):
            problems.append(
                f"{spec.path} is of CDI version {spec.version}, which Podman {podman} does not read and passes over;"
                " take nvidia-container-toolkit 1.18.2, or a newer Podman"
            )
        edits = [*(spec.devices[device] for device in used), spec.common]
        problems += _paths_problems(spec, edits, existing)
        problems += _driver_problems(spec, driver)
        problems += _partial_problems(spec, used)
    return problems


def wanted_gpus(plan: dict[str, Any], gpus: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the UUIDs of the plan's GPUs, and the PCI addresses of those that have none yet.

    :param plan: an intent or resolved plan; its UUIDs are ``auto`` until a driver has told them.
    :param gpus: what ``gpu_topology`` says of the GPUs now: a swapped card has another UUID.
    :returns: ``{"uuids": [...], "waiting": [PCI addresses]}`` in the plan's order.
    """
    now = {gpu["pci_address"]: gpu["uuid"] for gpu in gpus}
    planned = {gpu["pci_address"]: gpu["uuid"] for replica in plan["replicas"] for gpu in replica["gpus"]}
    found = {address: now.get(address) or uuid for address, uuid in planned.items()}
    return {
        "uuids": [uuid for uuid in found.values() if uuid != AUTO],
        "waiting": [address for address, uuid in found.items() if uuid == AUTO],
    }
