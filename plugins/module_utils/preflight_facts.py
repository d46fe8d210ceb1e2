# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What the checks before any change look at, and what a finding is made of.

Pure functions only, as in all of ``preflight``. What a check finds is a failure when the roles that follow cannot
repair it, or may not because they only verify (``<role>_manage: false``), and the node would not serve. It is a
warning when they repair it, when it only costs speed, or when nobody can tell. So a first run can repair a node, and
the report still says what it was like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.placement import full_address

GIB = 1024**3
MIB = 1024**2

Check = dict[str, str]

OK, WARNING, FAILURE = "ok", "warning", "failure"
EMPTY_HOST: dict[str, Any] = {
    "os": {"id": "", "version_id": "", "codename": "", "name": ""},
    "kernel": {"release": "", "cmdline": "", "installed": [], "headers": []},
    "boot_id": "",
    "container": False,
    "secure_boot": None,
    "space": {},
    "free_memory": {"machine": None, "nodes": {}},
    "numa_balancing": None,
    "time_synchronized": None,
    "apt_lock": None,
    "reboot_required": [],
    "unattended_upgrades": False,
    "broken_packages": [],
    "podman": "",
    "docker": False,
    "docker_packages": [],
    "iommu": None,
    "gpus": [],
    "acs_redirect": None,
}
EMPTY_NVIDIA: dict[str, Any] = {
    "loaded": "",
    "open": None,
    "userspace": "",
    "packages": {},
    "held": [],
    "nouveau_loaded": False,
    "module_license": "",
    "dkms": [],
    "toolkit": "",
    "cdi_devices": [],
    "cdi_problems": [],
    "hooks": [],
    "runtime_mode": "",
}
EMPTY_DRIVER: dict[str, Any] = {
    "manage": True,
    "version": "",
    "kernels": [],
    "signed": False,
    "reboot_allowed": False,
    "bad_allowed": False,
    "known": [],
}


@dataclass(frozen=True)
class Facts:
    """What the checks look at; every part is whole, with None or empty for what nobody could tell."""

    host: dict[str, Any]
    nvidia: dict[str, Any]
    topology: dict[str, Any]
    plan: dict[str, Any]
    wanted: dict[str, Any]
    driver: dict[str, Any]
    toolkit: dict[str, Any]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs to serve with: the plan's, or without one those that are named or that the profile is made for."""
        planned = {gpu["pci_address"] for replica in self.plan.get("replicas", []) for gpu in replica["gpus"]}
        named = {full_address(str(item)) for item in self.wanted.get("named_gpus", [])}
        cards = self.wanted.get("cards", [])
        there = self.topology.get("gpus", [])
        if planned or named:
            return [gpu for gpu in there if gpu["pci_address"] in (planned or named)]
        return [gpu for gpu in there if not cards or not gpu["device_id"] or gpu["device_id"] in cards]

    @property
    def host_gpus(self) -> list[dict[str, Any]]:
        """The same, as the host's state has them."""
        wanted = {gpu["pci_address"] for gpu in self.gpus}
        return [gpu for gpu in self.host["gpus"] if gpu["pci_address"] in wanted]

    @property
    def must_be_built(self) -> bool:
        """Whether the role nvidia_driver will install another driver than the one that runs."""
        same = self.nvidia["loaded"] and plain_version(str(self.driver["version"])) in ("", self.nvidia["loaded"])
        return bool(self.driver["manage"] and not (same and self.nvidia["open"] is not False))


def finding(name: str, level: str, seen: str, wanted: str, remedy: str = "") -> Check:
    """Return one line of the report."""
    return {"check": name, "level": level, "seen": seen, "wanted": wanted, "remedy": "" if level == OK else remedy}


def complete(empty: dict[str, Any], given: Any) -> dict[str, Any]:
    """Lay what was read over what nobody could tell, so that a missing part is an unknown one."""
    told = given if isinstance(given, dict) else {}
    return {**empty, **{name: value for name, value in told.items() if value is not None or empty.get(name) is None}}


def split_remedy(sentence: str, wanted: str) -> tuple[str, str, str]:
    """Cut a problem's sentence before its remedy, which stands after the last semicolon."""
    seen, semicolon, remedy = sentence.rpartition("; ")
    return (seen, wanted, remedy) if semicolon else (sentence, wanted, "")


def plain_version(version: str) -> str:
    """Return a package's version without epoch and revision: ``1.19.1-1`` is version 1.19.1."""
    return version.rpartition(":")[2].partition("-")[0]
