# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Parameters of the kernel's command line: which are wanted, which cannot work, and which the running kernel has.

Pure functions only. Source of the meanings: the kernel's ``admin-guide/kernel-parameters``.
"""

from __future__ import annotations

import re

# amd_iommu=off takes x2APIC away, and the mode that is left reaches the APIC IDs below 255: on a machine with 448 CPUs
# 224 came up (source: linux-kernel list, "iommu/amd: Keep x2apic enabled when appending amd_iommu=off", March 2026).
# intel_iommu=off leaves x2APIC alone.
LARGEST_FLAT_APIC_ID = 254

VENDORS = {"AuthenticAMD": "amd", "HygonGenuine": "amd", "GenuineIntel": "intel"}

# What one parameter and GRUB's shell can carry without quotes. GRUB would end the line at a semicolon.
_PARAMETER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:=[A-Za-z0-9_.,:/@%+=-]*)?")
# Options of these add up over all their occurrences; of any other parameter the last one counts.
_ADDING = frozenset({"amd_iommu", "console", "earlycon", "intel_iommu", "iommu", "pci"})
# What takes the effect from a parameter, beside another value of the same name.
_AGAINST = {
    "iommu=pt": (
        *("iommu=off", "iommu=nopt", "iommu=soft", "iommu.passthrough=0", "iommu.passthrough=off"),
        *("amd_iommu=off", "intel_iommu=off"),
    ),
    "amd_iommu=off": ("amd_iommu=on", "amd_iommu=force_enable", "iommu=force", "iommu=pt", "iommu.passthrough=1"),
    "intel_iommu=off": ("intel_iommu=on", "iommu=force", "iommu=pt", "iommu.passthrough=1"),
    "pcie_aspm.policy=performance": ("pcie_aspm=off", "pcie_aspm=force"),
    "pcie_aspm=off": ("pcie_aspm=force", "pcie_aspm.policy=powersave", "pcie_aspm.policy=powersupersave"),
}
_ASPM = {"off": "pcie_aspm=off", "performance": "pcie_aspm.policy=performance"}


class KernelParameterError(ValueError):
    """One or more parameters cannot work; ``problems`` holds a sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def cpu_vendor(cpuinfo: str) -> str:
    """Return ``amd``, ``intel`` or, when ``/proc/cpuinfo`` tells neither, an empty text."""
    match = re.search(r"^vendor_id\s*:\s*(\S+)", cpuinfo, re.MULTILINE)
    return VENDORS.get(match[1], "") if match else ""


def largest_apic_id(cpuinfo: str) -> int | None:
    """Return the largest APIC ID in ``/proc/cpuinfo``; None when it shows none."""
    return max((int(number) for number in re.findall(r"^apicid\s*:\s*([0-9]{1,9})\s*$", cpuinfo, re.M)), default=None)


def split_command_line(text: str) -> list[str]:
    """Return the kernel's own parameters of a command line, quotes taken away and dashes in names as underscores.

    Double quotes keep blanks together, and what follows ``--`` belongs to init.
    """
    parameters = []
    for word in re.findall(r'(?:[^\s"]|"[^"]*"?)+', text):
        if word == "--":
            break
        name, equals, value = word.replace('"', "").partition("=")
        parameters.append(name.replace("-", "_") + equals + value)
    return parameters


def _spelled(parameter: str) -> tuple[str, str | None]:
    name, equals, value = parameter.partition("=")
    return name.replace("-", "_"), value if equals else None


def _has(parameters: list[str], wanted: str) -> bool:
    """Return whether a parameter is among others in effect."""
    name, value = _spelled(wanted)
    values = [other for other_name, other in map(_spelled, parameters) if other_name == name]
    if name in _ADDING and value is not None:
        options = {option for other in values for option in (other or "").split(",")}
        return set(value.split(",")) <= options
    return bool(values) and values[-1] == value


def missing_parameters(command_line: str, wanted: list[str]) -> list[str]:
    """Return the wanted parameters that are not in effect on a command line, in their order."""
    present = split_command_line(command_line)
    return [parameter for parameter in wanted if not _has(present, parameter)]


def find_contradictions(command_line: str, wanted: list[str]) -> list[tuple[str, str]]:
    """Return pairs of a wanted parameter and one on the command line that takes its effect away."""
    present = split_command_line(command_line)
    found = []
    for parameter in wanted:
        name, value = _spelled(parameter)
        against = [other for other in _AGAINST.get(parameter, ()) if _has(present, other)]
        if name not in _ADDING:
            against += [one for one in present if _spelled(one)[0] == name and _spelled(one)[1] != value]
        found += [(parameter, other) for other in dict.fromkeys(against)]
    return found


def _parameter_problem(parameter: str) -> str:
    name = _spelled(parameter)[0]
    if name == "pcie_acs_override":
        return (
            f"host_settings_kernel_parameters: '{parameter}' has no effect without a patched kernel; set "
            "host_settings_acs_redirect to 'off', which clears the bits on root ports and switch ports at every boot"
        )
    if not _PARAMETER.fullmatch(parameter):
        return (
            f"host_settings_kernel_parameters: '{parameter}' is no single parameter of letters, digits and _.,:/@%+=-; "
            "give each an entry of its own, without blanks, quotes, '$' and ';', which mean something to GRUB's shell"
        )
    return ""


def _iommu_parameters(iommu: str, vendor: str, apic_id: int | None) -> tuple[list[str], str]:
    """Return the parameters for the IOMMU, and a sentence when they cannot work."""
    if iommu == "passthrough":
        return ["iommu=pt"], ""
    if iommu != "off":
        return [], ""
    if not vendor:
        return [], (
            "host_settings_iommu: 'off' is another parameter for each CPU vendor, and /proc/cpuinfo names neither AMD "
            "nor Intel; set it to 'keep', and give the parameter in host_settings_kernel_parameters"
        )
    if vendor == "amd" and apic_id is not None and apic_id > LARGEST_FLAT_APIC_ID:
        return [], (
            f"host_settings_iommu: 'off' would lose CPUs: amd_iommu=off turns x2APIC off as well, so that CPUs "
            f"with APIC IDs above {LARGEST_FLAT_APIC_ID} do not start, and this machine's go up to {apic_id}; set "
            "it to 'passthrough', and host_settings_acs_redirect to 'off'"
        )
    return [f"{vendor}_iommu=off"], ""


def wanted_parameters(iommu: str, pcie_aspm: str, extra: list[str], vendor: str, apic_id: int | None) -> list[str]:
    """Return the parameters to append to the command line.

    :param iommu: ``keep``, ``off`` or ``passthrough``.
    :param pcie_aspm: ``keep``, ``performance`` (the kernel turns ASPM off) or ``off`` (the firmware's state stays).
    :param extra: further parameters, one an entry.
    :param vendor: see :func:`cpu_vendor`.
    :param apic_id: see :func:`largest_apic_id`.
    :raises KernelParameterError: with a sentence for every parameter that cannot work.
    """
    parameters, problem = _iommu_parameters(iommu, vendor, apic_id)
    problems = [problem, *map(_parameter_problem, extra)]
    if pcie_aspm in _ASPM:
        parameters.append(_ASPM[pcie_aspm])
    parameters = list(dict.fromkeys([*parameters, *extra]))
    problems = list(dict.fromkeys(filter(None, problems)))
    if not problems:
        problems = [
            f"host_settings_kernel_parameters: '{other}' takes the effect from '{parameter}'; drop one of them"
            for parameter, other in find_contradictions(" ".join(parameters), parameters)
        ]
    if problems:
        raise KernelParameterError(problems)
    return parameters


def in_grub_configuration(grub_cfg: str, parameters: list[str]) -> bool:
    """Return whether every entry that starts a kernel on this root carries the parameters.

    :param grub_cfg: ``/boot/grub/grub.cfg``, or its lines that begin with ``linux``.
    """
    starts = [
        match[1] for match in re.finditer(r"^[ \t]*linux(?:efi)?[ \t]+(\S.*)$", grub_cfg, re.M) if " root=" in match[1]
    ]
    return bool(starts) and not any(missing_parameters(start, parameters) for start in starts)
