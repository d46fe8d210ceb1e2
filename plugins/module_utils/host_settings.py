# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What the role host_settings changes on a node: the files it writes, what the kernel is to run with, what differs.

Pure functions only. A *reading* is a file's text by its path, as :func:`parse_readings` returns them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.kernel_parameters import (
    KernelParameterError,
    cpu_vendor,
    find_contradictions,
    in_grub_configuration,
    largest_apic_id,
    missing_parameters,
    wanted_parameters,
)

GRUB_FILE = "/etc/default/grub.d/60-gpu-node.cfg"
# After the distribution's files, before an operator's 99-*.conf.
SYSCTL_FILE = "/etc/sysctl.d/98-gpu-node.conf"
JOURNAL_FILE = "/etc/systemd/journald.conf.d/60-gpu-node.conf"
UPGRADES_FILE = "/etc/apt/apt.conf.d/60gpu-node-unattended-upgrades"
RESTARTS_FILE = "/etc/needrestart/conf.d/60-gpu-node.conf"
BOOT_FILE = "/etc/gpu-node/host-settings.json"
BOOT_SCRIPT = "/usr/local/lib/gpu-node/host_settings.py"
BOOT_UNIT = "/etc/systemd/system/gpu-node-host-settings.service"

GRUB_CONFIGURATION = "/boot/grub/grub.cfg"
UPDATE_GRUB = "/usr/sbin/update-grub"
CPUINFO = "/proc/cpuinfo"
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
CPUFREQ = "/sys/devices/system/cpu/cpufreq"

KEEP = "keep"
_HEADER = "# Written by serving.gpu_node.host_settings\n"


def parse_readings(output: str) -> dict[str, str]:
    """Return texts by path from what ``grep -H`` printed: each line with its file's path and a colon before it.

    Lines that are not of that form are left out.
    """
    lines: dict[str, list[str]] = {}
    for line in output.split("\n"):
        path, colon, text = line.partition(":")
        if colon and path.startswith("/"):
            lines.setdefault(path, []).append(text)
    return {path: "".join(f"{line}\n" for line in found) for path, found in lines.items()}


def switch(value: Any) -> str:
    """Return a switch's value as text: YAML reads an unquoted ``off`` as false."""
    return "off" if value is False else str(value)


def sysctl_path(key: str) -> str:
    """Return the file of a key below ``/proc/sys``: its first separator, dot or slash, is the one between folders."""
    first = re.search(r"[./]", key)
    if first and first[0] == ".":
        key = key.translate(str.maketrans("./", "/."))
    return f"/proc/sys/{key}"


def chosen_word(text: str) -> str:
    """Return the word in brackets: how sysfs shows the chosen one of several (``always [madvise] never``)."""
    match = re.search(r"\[([^\[\]\s]+)\]", text)
    return match[1] if match else text.strip()


def wanted_sysctl(wanted: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return by key the value and whether a larger one will do as well.

    :param wanted: the role's variables without their prefix.
    """
    found: dict[str, tuple[str, bool]] = {}
    if switch(wanted["numa_balancing"]) == "off":
        found["kernel.numa_balancing"] = ("0", False)
    if wanted["swappiness"] >= 0:
        found["vm.swappiness"] = (str(wanted["swappiness"]), False)
    if wanted["max_map_count"] > 0:
        found["vm.max_map_count"] = (str(wanted["max_map_count"]), True)
    if wanted["somaxconn"] > 0:
        found["net.core.somaxconn"] = (str(wanted["somaxconn"]), True)
    found.update({key: (" ".join(str(value).split()), False) for key, value in wanted["sysctl"].items()})
    return found


def _sysctl(wanted: dict[str, Any], readings: dict[str, str]) -> tuple[dict[str, str], list[dict[str, str]], list[str]]:
    """Return the values of our file, what the kernel has otherwise, and what it does not know."""
    values: dict[str, str] = {}
    differences, unknown = [], []
    for key, (value, larger_will_do) in wanted_sysctl(wanted).items():
        if sysctl_path(key) not in readings:
            unknown.append(f"{key}: this kernel has no such setting")
            continue
        found = " ".join(readings[sysctl_path(key)].split())
        if larger_will_do and found.isdecimal() and int(found) > int(value):
            # Somebody set more, and our file must not take it back at the next boot.
            continue
        values[key] = value
        if found != value:
            differences.append({"setting": key, "found": found, "wanted": value})
    return values, differences, unknown


def _governor(wanted: str, readings: dict[str, str]) -> tuple[list[dict[str, str]], list[str]]:
    """Return what differs from the wanted governor, and why it cannot be set."""
    governors = {
        path: text.strip()
        for path, text in readings.items()
        if path.startswith(f"{CPUFREQ}/") and path.endswith("/scaling_governor")
    }
    if not governors:
        return [], ["CPU governor: there is no cpufreq here, firmware or hypervisor set the clock"]
    lacking = [
        path
        for path in governors
        if wanted not in readings.get(path.replace("scaling_governor", "scaling_available_governors"), "").split()
    ]
    if lacking:
        return [], [f"CPU governor: the kernel's driver has no governor '{wanted}' ({lacking[0]} and others)"]
    other = [text for text in governors.values() if text != wanted]
    if not other:
        return [], []
    found = f"{', '.join(sorted(set(other)))} on {len(other)} of {len(governors)} policies"
    return [{"setting": "CPU governor", "found": found, "wanted": wanted}], []


def _boot(
    wanted: dict[str, Any], host: dict[str, Any], readings: dict[str, str]
) -> tuple[dict[str, str], list[dict[str, str]], list[str]]:
    """Return what the boot unit sets, what the kernel has otherwise, and what cannot be set."""
    boot = {name: switch(wanted[name]) for name in ("transparent_hugepages", "cpu_governor", "acs_redirect")}
    boot = {name: value for name, value in boot.items() if value != KEEP}
    differences, unknown = [], []
    if "transparent_hugepages" in boot:
        if HUGE_PAGES not in readings:
            unknown.append("transparent huge pages: this kernel has none")
        elif (found := chosen_word(readings[HUGE_PAGES])) != boot["transparent_hugepages"]:
            pages = {"setting": "transparent huge pages", "found": found, "wanted": boot["transparent_hugepages"]}
            differences.append(pages)
    if "cpu_governor" in boot:
        governors, why_not = _governor(boot["cpu_governor"], readings)
        differences += governors
        unknown += why_not
    if "acs_redirect" in boot:
        ports = host["acs_redirect"]
        if ports is None:
            unknown.append("ACS redirect: the ports' bits cannot be read")
        elif ports:
            differences.append({"setting": "ACS redirect", "found": f"on at {', '.join(ports)}", "wanted": "off"})
    return boot, differences, unknown


def grub_text(parameters: list[str]) -> str:
    """Return our file for GRUB: it appends, so that what is there stays."""
    # Not GRUB_CMDLINE_LINUX_DEFAULT: a system that is started for repair has its GPUs too.
    return f'{_HEADER}GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {" ".join(parameters)}"\n' if parameters else ""


def sysctl_text(values: dict[str, str]) -> str:
    """Return our file for systemd-sysctl."""
    return _HEADER + "".join(f"{key} = {value}\n" for key, value in values.items()) if values else ""


def journal_text(max_mib: int, keep_free_mib: int) -> str:
    """Return our file for journald; 0 leaves systemd's default."""
    if max_mib <= 0 and keep_free_mib <= 0:
        return ""
    lines = [f"SystemMaxUse={max_mib}M\n"] if max_mib > 0 else []
    lines += [f"SystemKeepFree={keep_free_mib}M\n"] if keep_free_mib > 0 else []
    return f"{_HEADER}[Journal]\nStorage=persistent\n{''.join(lines)}"


def upgrades_text(packages: list[str]) -> str:
    """Return our file for unattended-upgrades: its list grows by ours, and it never reboots.

    :param packages: regular expressions that match from a package name's beginning.
    """
    if not packages:
        return ""
    listed = "".join(f'    "{package}";\n' for package in packages)
    return (
        f"{_HEADER.replace('#', '//')}Unattended-Upgrade::Package-Blacklist {{\n{listed}}};\n"
        'Unattended-Upgrade::Automatic-Reboot "false";\n'
    )


def restarts_text(protect: bool) -> str:
    """Return our file for needrestart: after an upgrade of a library it would restart what serves, all at once."""
    return f"{_HEADER}$nrconf{{override_rc}}{{qr(^(vllm-replica@|gpu-node-|nginx))}} = 0;\n1;\n" if protect else ""


def _pattern_problem(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return (
            f"host_settings_upgrade_blacklist: '{pattern}' is no regular expression; write a package name's beginning"
        )
    if re.search(r'["\\\x00-\x1f]', pattern):
        return (
            f"host_settings_upgrade_blacklist: {pattern!r} holds a quote, a backslash or a line end, which apt's "
            "configuration cannot carry; write a package name's beginning, '.' stands for any character"
        )
    return ""


def _key_problem(key: str, value: Any) -> str:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./*-]*", key) and "\n" not in str(value) and not isinstance(value, bool):
        return ""
    return (
        f"host_settings_sysctl: {key!r}: {value!r} is no key like vm.dirty_ratio with a number or a text of one line; "
        "correct it, and write 0 or 1 for a switch"
    )


def _parameters(
    wanted: dict[str, Any], host: dict[str, Any], readings: dict[str, str]
) -> tuple[list[str], list[str], list[str]]:
    """Return the kernel parameters, why they cannot be set, and what takes their effect away."""
    cpuinfo = readings.get(CPUINFO, "")
    # In a container only the operator's own words can be wrong: the machine is another.
    machine = {"iommu": KEEP, "pcie_aspm": KEEP} if host["container"] else wanted
    try:
        parameters = wanted_parameters(
            switch(machine["iommu"]),
            switch(machine["pcie_aspm"]),
            [str(parameter) for parameter in wanted["kernel_parameters"]],
            cpu_vendor(cpuinfo),
            largest_apic_id(cpuinfo),
        )
    except KernelParameterError as error:
        return [], error.problems, []
    if host["container"]:
        return [], [], []
    command_line = host["kernel"]["cmdline"]
    warnings = [
        f"kernel parameters: '{other}' on the present command line takes the effect from '{parameter}'; remove it from "
        "/etc/default/grub, or from whatever sets it"
        for parameter, other in find_contradictions(command_line, parameters)
    ]
    missing = missing_parameters(command_line, parameters)
    if not missing or UPDATE_GRUB in readings:
        return parameters, [], warnings
    no_loader = (
        f"kernel parameters: {' '.join(missing)} cannot be set, there is no {UPDATE_GRUB}; set them in this machine's "
        "own boot loader and start it anew, or leave them out of the variables of host_settings"
    )
    return (parameters, [no_loader], warnings) if wanted["manage"] else (parameters, [], [*warnings, no_loader])


def _file_differences(files: dict[str, str], readings: dict[str, str]) -> list[dict[str, str]]:
    differences = []
    for path, text in files.items():
        found = readings.get(path, "")
        if found != text:
            differences.append(
                {
                    "setting": path,
                    "found": "another text" if found and text else "a file" if found else "no file",
                    "wanted": "ours" if text else "no file",
                }
            )
    return differences


def decide_settings(wanted: dict[str, Any], host: dict[str, Any], readings: dict[str, str]) -> dict[str, Any]:
    """Return what to write and to set, and what differs now.

    :param wanted: the role's variables without their prefix, ``script`` and ``unit`` (texts for the boot).
    :param host: what ``host_state`` says.
    :param readings: the files named by :func:`paths_to_read`, vendor and APIC IDs of ``/proc/cpuinfo``, the lines of
        GRUB's configuration that start kernels, and the governors of every cpufreq policy.
    :returns: ``problems``, ``warnings`` and ``not_applicable`` (sentences); ``kernel_parameters``; ``files`` (text by
        path, empty = no file) and which of them are ``differing_files``; ``boot`` (what the boot unit sets);
        ``differences`` (each ``setting``, ``found``, ``wanted``); ``sysctl_differs``, ``boot_differs`` and
        ``grub_stale``; ``reboot_reasons`` (sentences).
    """
    parameters, problems, warnings = _parameters(wanted, host, readings)
    blacklist = wanted["upgrade_blacklist"] if wanted["protect_upgrades"] else []
    problems = [
        *problems,
        *map(_pattern_problem, blacklist),
        *(_key_problem(*pair) for pair in wanted["sysctl"].items()),
    ]
    files = {
        JOURNAL_FILE: journal_text(wanted["journal_max_mib"], wanted["journal_keep_free_mib"]),
        UPGRADES_FILE: upgrades_text(blacklist),
        RESTARTS_FILE: restarts_text(wanted["protect_upgrades"]),
    }
    values: dict[str, str] = {}
    boot: dict[str, str] = {}
    of_sysctl, of_boot = list[dict[str, str]](), list[dict[str, str]]()
    if host["container"]:
        cannot = ["kernel parameters, sysctl, huge pages, governor, ACS: this is a container, the kernel is its host's"]
    else:
        values, of_sysctl, unknown = _sysctl(wanted, readings)
        boot, of_boot, cannot = _boot(wanted, host, readings)
        cannot = [*unknown, *cannot]
        files[GRUB_FILE] = grub_text(parameters) if UPDATE_GRUB in readings else ""
        files[SYSCTL_FILE] = sysctl_text(values)
        files[BOOT_FILE] = json.dumps(boot, indent=4, sort_keys=True) + "\n" if boot else ""
        files[BOOT_SCRIPT] = wanted["script"] if boot else ""
        files[BOOT_UNIT] = wanted["unit"] if boot else ""
    missing = missing_parameters(host["kernel"]["cmdline"], parameters)
    of_kernel = [{"setting": "kernel parameters", "found": f"no {one}", "wanted": one} for one in missing]
    in_grub = in_grub_configuration(readings.get(GRUB_CONFIGURATION, ""), parameters)
    return {
        "problems": list(filter(None, problems)),
        "warnings": warnings,
        "not_applicable": cannot,
        "kernel_parameters": parameters,
        "files": files,
        "boot": boot,
        "differing_files": [path for path, text in files.items() if readings.get(path, "") != text],
        "differences": [*of_kernel, *of_sysctl, *of_boot, *_file_differences(files, readings)],
        "sysctl_differs": bool(of_sysctl),
        "boot_differs": bool(of_boot),
        "grub_stale": bool(parameters) and UPDATE_GRUB in readings and not in_grub,
        "reboot_reasons": [f"the kernel was started without {one}" for one in missing],
    }


def paths_to_read(wanted: dict[str, Any]) -> list[str]:
    """Return the files whose whole text :func:`decide_settings` needs."""
    ours = [GRUB_FILE, SYSCTL_FILE, JOURNAL_FILE, UPGRADES_FILE, RESTARTS_FILE, BOOT_FILE]
    ours += [BOOT_SCRIPT, BOOT_UNIT]
    return [*ours, UPDATE_GRUB, HUGE_PAGES, *map(sysctl_path, wanted_sysctl(wanted))]


def describe_settings(decided: dict[str, Any], manage: bool) -> list[str]:
    """Return the lines that the role shows: what was found, what is wanted, and what would have been done."""
    lines = [
        f"{item['setting']}: found {item['found']}, wanted {item['wanted']}"
        + ("" if manage else "; would have been set, but host_settings_manage is false")
        for item in decided["differences"]
    ]
    lines += [f"not here: {line}" for line in decided["not_applicable"]]
    lines += [f"warning: {line}" for line in decided["warnings"]]
    lines += [f"reboot required: {line}" for line in decided["reboot_reasons"]]
    return lines


def reboot_problems(before: dict[str, Any], after: dict[str, Any], decided: dict[str, Any]) -> list[str]:
    """Return what a reboot did not achieve.

    :param before: what ``host_state`` said before the reboot.
    :param after: what it says now.
    :param decided: what :func:`decide_settings` says now.
    """
    problems = []
    if before["boot_id"] and before["boot_id"] == after["boot_id"]:
        problems.append(f"the boot id is still {after['boot_id']}: the machine was not started anew")
    present = {gpu["pci_address"] for gpu in after["gpus"]}
    lost = [gpu["pci_address"] for gpu in before["gpus"] if gpu["pci_address"] not in present]
    if lost:
        problems.append(
            f"GPUs gone from the PCI bus: {', '.join(lost)} ({len(present)} are there, {len(before['gpus'])} were); "
            "turn the machine's power off and on, then look at slot, riser and power cables of the missing ones"
        )
    problems += [
        f"{reason}, still: another entry or boot loader started it; compare {GRUB_CONFIGURATION} with /proc/cmdline"
        for reason in decided["reboot_reasons"]
    ]
    return problems
