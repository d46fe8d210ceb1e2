# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What the role nvidia_driver decides: which packages, kernels and keys, and what cannot work.

Pure functions only. ``host`` is what the module ``host_state`` returns; the role does the rest of the reading.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.host_state import is_driver_module, sort_kernels
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import GPU_MODELS

# One line of a build log can hold a compiler call of several kilobytes.
_LINE_CHARACTERS = 200
_SHOWN = 5
# The driver's own modules; what else uses them (nvidia_fs, gdrdrv) is somebody else's, and nobody would load it again.
_MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")
# What Debian's packages call the proprietary module.
_PROPRIETARY = ("nvidia-current",)
# From this branch on NVIDIA's packages for Ubuntu have names without it: libnvidia-compute-580, then libnvidia-compute
# (NVIDIA's driver installation guide, "Ubuntu 590 and later packages").
_NAMES_WITHOUT_BRANCH = 590
_UPSTREAM = re.compile(r"(?:[0-9]+:)?([0-9]{2,4}\.[0-9]{1,4}(?:\.[0-9]{1,4})?)(?:[-+~].*)?")
_PACKAGES_OF_KERNEL = re.compile(r"linux-(?:image|headers|modules)-.*|linux-(?:generic|virtual)(?:-hwe-.*)?")
_PACKAGES_OF_DRIVER = re.compile(
    r"(?:lib)?nvidia-(?!container|ctk).*|libcuda1|libcudadebugger1|firmware-nvidia-gsp|cuda-drivers.*"
)


def upstream_version(version: str) -> str:
    """Return the driver's version in a package's version: ``590.48.01`` of ``590.48.01-0ubuntu1``; empty when none."""
    match = _UPSTREAM.fullmatch(version.strip())
    return match[1] if match else ""


def version_order(version: str) -> list[int]:
    """Return what sorts driver versions by age."""
    return [int(part) for part in re.findall(r"[0-9]{1,9}", version)]


def parse_madison(text: str) -> dict[str, list[str]]:
    """Return the versions that apt offers, by package and newest first, from ``apt-cache madison``."""
    offers: dict[str, list[str]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[0] and fields[1]:
            versions = offers.setdefault(fields[0], [])
            if fields[1] not in versions:
                versions.append(fields[1])
    return offers


def choose_version(offered: list[str], wanted: str) -> str:
    """Return the package version to install; empty when it is not offered.

    :param offered: package versions, newest first.
    :param wanted: a driver version, with or without the package's revision; empty takes the newest.
    """
    if not wanted:
        return offered[0] if offered else ""
    return next((version for version in offered if wanted in (version, upstream_version(version))), "")


def choose_kernels(asked: list[str], running: str, installed: list[str]) -> list[str]:
    """Return the kernels that the module is built for: those asked for, else the running one and the newest installed.

    The newest is what the next reboot starts; a module for the running one alone would be gone then.
    """
    if asked:
        return sort_kernels(set(asked))
    return sort_kernels({kernel for kernel in (running, *sort_kernels(set(installed))[-1:]) if kernel})


def name_headers(kernels: list[str]) -> list[str]:
    """Return the packages with the headers of kernels; Debian and Ubuntu name them alike."""
    return [f"linux-headers-{kernel}" for kernel in kernels]


def driver_builds(dkms: list[dict[str, str]], version: str) -> list[dict[str, str]]:
    """Return what DKMS has of the driver in one version.

    :param dkms: each ``{"module", "version", "kernel", "state"}``, as ``host_state`` returns it.
    """
    ours = [build for build in dkms if is_driver_module(build["module"]) and build["module"] not in _PROPRIETARY]
    return [build for build in ours if build["version"] == version]


def find_missing_builds(dkms: list[dict[str, str]], version: str, kernels: list[str]) -> list[dict[str, str]]:
    """Return the kernels for which DKMS does not have the driver ``installed``, the only state that can be loaded.

    :returns: each ``{"kernel", "module", "state"}``; module is empty when DKMS does not know the driver at all.
    """
    builds = driver_builds(dkms, version)
    module = builds[0]["module"] if builds else ""
    states = {build["kernel"]: build["state"] for build in builds}
    # A module that is built for no kernel is listed once, without one.
    other = "added" if builds else "unknown"
    return [
        {"kernel": kernel, "module": module, "state": states.get(kernel, other)}
        for kernel in kernels
        if states.get(kernel) != "installed"
    ]


def find_log_paths(text: str) -> list[str]:
    """Return the build logs that DKMS, or apt in its place, pointed to."""
    return list(dict.fromkeys(re.findall(r"(/[^\s'\"]+/make\.log)\b", text)))


def shorten_log(text: str, lines: int = 12) -> list[str]:
    """Return the lines of a build log that say why it failed: each error with what follows it, then the end.

    Compiler calls are left out: one of them fills a screen and says nothing.
    """
    told = [line.rstrip() for line in text.splitlines() if line.strip()]
    told = [line for line in told if not re.match(r"\s*(?:\S*gcc(?:-[0-9]+)?|if nm|make -f|set -e;|\{ echo)\s", line)]
    errors = [number for number, line in enumerate(told) if re.search(r"\berror:|\bfatal:|Error!|\*\*\* ", line)]
    chosen = [number for error in errors[:_SHOWN] for number in range(error, min(error + 3, len(told)))]
    chosen += range(max(0, len(told) - lines), len(told))
    kept = sorted(set(chosen))
    kept = kept if len(kept) <= lines else kept[: lines // 2] + kept[-(lines - lines // 2) :]
    return [told[number][:_LINE_CHARACTERS] for number in kept]


def explain_build(missing: list[dict[str, str]], version: str, log: str, packages: str) -> str:
    """Return the error for a module that was not built.

    :param missing: of :func:`find_missing_builds`; empty when the build failed for a kernel that nobody asked for.
    :param log: text of DKMS' build log, empty when it left none.
    :param packages: what apt or DKMS printed.
    """
    failed = re.findall(r"(?:on kernel|module build for kernel|kernel headers for kernel):?\s+(\S+)", packages)
    kernels = [f"{item['kernel']} (state `{item['state']}`)" for item in missing] or sorted(set(failed))
    lines = shorten_log(log or packages)
    shown = "\n  ".join(lines) if lines else "(no output)"
    other = sorted(set(failed) - {item["kernel"] for item in missing})
    unwanted = (
        f" The kernel that failed, {', '.join(other)}, is not among those asked for: where it is not needed, removing "
        "its headers lets the package be configured."
        if missing and other
        else ""
    )
    return (
        f"DKMS did not install the NVIDIA module {version} for {', '.join(kernels) or 'the wanted kernels'}; "
        "`installed` is "
        f"needed. The last lines of the build:\n  {shown}\nA compiler error means that this driver does not know this "
        "kernel: choose another nvidia_driver_version or kernel; missing headers: reinstall linux-headers of that "
        f"kernel. Then run this again, it continues where it stopped.{unwanted}"
    )


def explain_packages(said: str, lock: dict[str, Any] | None) -> str:
    """Return the error for packages that were not installed.

    :param said: what apt and dpkg printed.
    :param lock: who holds apt's lock, ``{"pid", "command"}``; None when it is free.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    worst = [number for number, line in enumerate(lines) if line.startswith(("E:", "Err:", "dpkg: "))]
    # dpkg says why in the line after the package.
    worst += [number + 1 for number in worst if lines[number].endswith(":") and number + 1 < len(lines)]
    shown = [lines[number][:_LINE_CHARACTERS] for number in sorted(set(worst))] or [
        line[: 2 * _LINE_CHARACTERS] for line in lines
    ]
    told = "\n  ".join(dict.fromkeys(shown[-_SHOWN:])) or "(no output)"
    holder = lock["command"] or "unknown" if lock else ""
    holder = f"Process {lock['pid']} ({holder}) holds apt's lock: let it end, or stop it." if lock else ""
    full = "Free space on that disk." if re.search("No space left on device|enough free space", said) else ""
    remedy = " ".join(filter(None, [holder, full, "Run this again, it continues where it stopped."]))
    return f"The packages were not installed:\n  {told}\n{remedy}"


def certificate_sha1(pem: str) -> str:
    """Return a certificate's SHA-1 fingerprint as mokutil writes it (``aa:bb:...``); empty when it is no PEM."""
    block = re.search(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", pem, re.S)
    try:
        data = base64.b64decode("".join(block[1].split()), validate=True) if block else b""
    except (binascii.Error, ValueError):
        data = b""
    digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    return ":".join(digest[place : place + 2] for place in range(0, 40, 2)) if data else ""


def is_enrolled(pem: str, enrolled: str) -> bool:
    """Tell whether the firmware trusts a certificate, from what ``mokutil --list-enrolled`` printed."""
    wanted = certificate_sha1(pem)
    return bool(wanted) and wanted in re.findall(r"\b(?:[0-9a-f]{2}:){19}[0-9a-f]{2}\b", enrolled.lower())


def find_mirror(sources: list[str], codename: str, components: list[str]) -> dict[str, Any]:
    """Find where the node has its distribution from, and which components are not enabled there.

    :param sources: texts of apt's source files, one-line and deb822.
    :returns: ``{"uri": str, "missing": [component]}``; the uri is empty when no source has the release's ``main``.
    """
    entries: list[tuple[list[str], list[str], list[str]]] = []
    for text in sources:
        for line in text.splitlines():
            match = re.match(r"deb[ \t]+(?:\[[^\]]*\][ \t]+)?(\S+)[ \t]+(\S+)[ \t]+([^#]*)", line)
            if match:
                entries.append(([match[1]], [match[2]], match[3].split()))
        for block in re.split(r"\n[ \t]*\n", text):
            lines = re.sub(r"\n[ \t]+", " ", block)
            fields = {name.lower(): value.split() for name, value in re.findall(r"^([\w-]+):(.*)$", lines, re.M)}
            if "deb" in fields.get("types", []) and "no" not in fields.get("enabled", []):
                entries.append((fields.get("uris", []), fields.get("suites", []), fields.get("components", [])))
    uri, enabled = "", set[str]()
    for uris, suites, has in entries:
        if codename in suites:
            enabled |= set(has)
            uri = uri or next((one for one in uris if "main" in has), "")
    return {"uri": uri, "missing": [component for component in components if component not in enabled]}


def choose_packages(names: dict[str, list[str]], system: str, version: str) -> list[str]:
    """Return the names of the packages for a driver version: ``{branch}`` in a name becomes ``580``.

    :param names: by distribution; what a source calls older drivers is under ``ubuntu before 590``.
    """
    branch = version.partition(".")[0]
    older = branch.isdecimal() and int(branch) < _NAMES_WITHOUT_BRANCH
    chosen = (names.get(f"{system} before {_NAMES_WITHOUT_BRANCH}") if older else None) or names.get(system, [])
    return [name.replace("{branch}", branch) for name in chosen]


def packages_to_hold(installed: list[str]) -> list[str]:
    """Return which of the installed packages an upgrade must leave alone: the driver's and the kernels'."""
    held = (name for name in installed if _PACKAGES_OF_DRIVER.fullmatch(name) or _PACKAGES_OF_KERNEL.fullmatch(name))
    return sorted(set(held))


def parse_installed(text: str) -> dict[str, str]:
    """Return version by name of the packages that are there, from lines of ``name status version``."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: row[2] for row in rows if len(row) == 3 and row[1] not in ("not-installed", "config-files")}


def installed_version(packages: dict[str, str], names: list[str]) -> str:
    """Return the driver version that all the named packages have; empty when one is missing or differs."""
    versions = {upstream_version(packages.get(name, "")) for name in names}
    return versions.pop() if len(versions) == 1 else ""


def find_proprietary(host: dict[str, Any]) -> list[str]:
    """Return the packages that bring the proprietary kernel module."""
    pattern = re.compile(r"nvidia-(?:kernel-dkms|dkms(?:-[0-9]+(?:-server)?)?|kernel-source)|cuda-drivers(?:-[0-9]+)?")
    return sorted(name for name in host["nvidia"]["packages"] if pattern.fullmatch(name))


def judge_version(version: str, flavour: str, known: list[dict[str, str]]) -> dict[str, str] | None:
    """Return the entry of the table of known versions; None when nothing is known.

    :param flavour: ``open`` or ``proprietary``; an entry whose flavour is ``any`` fits both.
    :param known: each ``{"version", "flavour", "verdict", "why", "source"}``.
    """
    return next(
        (entry for entry in known if entry["version"] == version and entry["flavour"] in ("any", flavour)), None
    )


def find_host_problems(host: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return what of the node and of the variables cannot work, before any package source is asked.

    :param wanted: ``{"version", "source", "allow_bad": bool, "known": table, "supported": ["debian 12"], "blackwell":
        oldest branch for these cards, "mok": bool, "enrolled": bool | None, "space_gib": what an installation takes, by
        folder}``; enrolled None: mokutil is not there.
    """
    problems = []
    system = f"{host['os']['id']} {host['os']['version_id']}"
    version = wanted["version"]
    if system not in wanted["supported"]:
        problems.append(
            f"{host['os']['name'] or system} is not supported; the role knows {', '.join(wanted['supported'])}. "
            "Install the "
            "driver by hand and set nvidia_driver_manage: false"
        )
    if version and upstream_version(version) == "":
        problems.append(f"nvidia_driver_version '{version}' is no driver version like 590.48.01")
    if not version and (wanted["source"] != "distribution" or host["os"]["id"] == "ubuntu"):
        problems.append(
            "nvidia_driver_version is empty: only Debian's own packages (nvidia_driver_source: distribution) have "
            "one version; "
            f"with the source {wanted['source']} on {host['os']['id']} say which"
        )
    entry = judge_version(upstream_version(version), "open", wanted["known"])
    if entry and entry["verdict"] == "bad" and not wanted["allow_bad"]:
        problems.append(
            f"nvidia_driver_version {version} is known to be bad: {entry['why']} ({entry['source']}). Choose another, "
            "or set "
            "nvidia_driver_bad_version_allowed: true"
        )
    cards = sorted({gpu["device_id"] for gpu in host["gpus"]} & set(GPU_MODELS))
    if cards and version and version_order(version) < version_order(wanted["blackwell"]):
        problems.append(
            f"nvidia_driver_version {version} does not know {GPU_MODELS[cards[0]]}: branch {wanted['blackwell']} is "
            "the first "
            "for Blackwell; choose 590.48.01"
        )
    if host["secure_boot"] and not wanted["mok"]:
        problems.append(
            "Secure Boot is on, and no key to sign the module with is given: the kernel would refuse it. Give "
            "nvidia_driver_mok_key "
            "and nvidia_driver_mok_certificate, or turn Secure Boot off in the firmware"
        )
    if host["secure_boot"] and wanted["mok"] and not wanted["enrolled"]:
        why = "mokutil is not installed" if wanted["enrolled"] is None else "mokutil --list-enrolled does not show it"
        problems.append(
            f"Secure Boot is on and the certificate of nvidia_driver_mok_certificate is not enrolled ({why}): the "
            "kernel would "
            "refuse the module. Enrol it (mokutil --import, reboot, confirm at the machine's console)"
        )
    problems += _find_proprietary_problems(host)
    problems += _find_space_problems(host, wanted["space_gib"])
    return problems


def _find_space_problems(host: dict[str, Any], needs: dict[str, int]) -> list[str]:
    """Say where the packages and the build would fill a disk; folders may share one."""
    by_device: dict[Any, list[str]] = {}
    for folder in needs:
        if told := host["space"].get(folder):
            by_device.setdefault(told["device"], []).append(folder)
    problems = []
    for folders in by_device.values():
        need, free = sum(needs[folder] for folder in folders), host["space"][folders[0]]["free_bytes"] / 2**30
        if free < need:
            problems.append(
                f"there is no room for the driver: {' and '.join(folders)} have {free:.1f} GiB free, and its packages "
                f"and the build of its module take up to {need} GiB: free {need - free:.1f} GiB (apt-get clean, old "
                "kernels)"
            )
    return problems


def _find_proprietary_problems(host: dict[str, Any]) -> list[str]:
    nvidia = host["nvidia"]
    packages = find_proprietary(host)
    if not packages and nvidia["open"] is not False:
        return []
    found = f"version {nvidia['loaded']} of it is loaded" if nvidia["open"] is False else "its packages are installed"
    remedy = (
        f"Remove its packages ({', '.join(packages)}) and reboot"
        if packages
        else "It is not from packages: run nvidia-uninstall and reboot"
    )
    return [
        f"the proprietary NVIDIA kernel module is here ({found}), and Blackwell cards work with the open one only. "
        f"{remedy}, "
        "then run this again"
    ]


def find_source_problems(
    trial: dict[str, Any], names: list[str], headers: list[str], wanted: str, present: dict[str, str]
) -> list[str]:
    """Return why the packages cannot be had, from a trial of the package source that changed nothing.

    :param trial: ``{"update": {"rc", "text"}, "madison": text, "simulate": {"rc", "text"}}``, of ``try_packages.py``.
    :param names: the driver's packages; those that name a branch are already filled in.
    :param headers: packages with the kernels' headers.
    :param wanted: the driver version; empty takes the newest.
    :param present: version by name of what is installed.
    """
    if trial["update"]["rc"] != 0:
        return [
            f"the package source cannot be read: {'; '.join(_last_lines(trial['update']['text']))}. Check address, "
            "proxy and key"
        ]
    broken = [line for line in trial["madison"].splitlines() if line.startswith("E:")]
    if broken:
        # For example another source of the same address with another key.
        return [
            f"apt does not take the package source beside the node's own: {'; '.join(_last_lines(trial['madison']))}"
        ]
    offers = parse_madison(trial["madison"])
    problems = []
    for name in headers:
        if name not in offers and name not in present:
            kernel = name.removeprefix("linux-headers-")
            problems.append(
                f"the headers of kernel {kernel} are needed to build the module, and no package source has {name}: "
                "install that "
                "kernel anew from a source that has it, or name other kernels in nvidia_driver_kernels"
            )
    absent = [name for name in names if not choose_version(offers.get(name, []), wanted)]
    if absent and wanted:
        offered = {upstream_version(version) for name in absent for version in offers.get(name, [])} - {""}
        has = ", ".join(sorted(offered, key=version_order, reverse=True)[:_SHOWN]) or "none of it"
        problems.append(
            f"nvidia_driver_version {wanted} is not in the package source: {', '.join(absent)} is offered as {has}. "
            "Choose one of "
            "these, or a source that has it"
        )
    elif absent:
        problems.append(f"the package source has no {', '.join(absent)}")
    if not problems and trial["simulate"]["rc"] != 0:
        problems.append(f"the packages cannot be installed: {'; '.join(_last_lines(trial['simulate']['text']))}")
    return problems


def _last_lines(text: str) -> list[str]:
    told = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("Reading", "Building"))]
    worst = [line for line in told if line.startswith(("E:", "Err:", "W:"))]
    return [line[:_LINE_CHARACTERS] for line in (worst or told)[-_SHOWN:]] or ["no output"]


def chosen_versions(trial: dict[str, Any], names: list[str], wanted: str) -> dict[str, str]:
    """Return the package version to install by name, for the names that a package source offers."""
    offers = parse_madison(trial.get("madison", ""))
    versions = {name: choose_version(offers.get(name, []), wanted) for name in names}
    return {name: version for name, version in versions.items() if version}


def compare_versions(host: dict[str, Any], installed: str, firmware: list[str]) -> list[str]:
    """Return what does not fit together: the loaded module, the libraries, the packages, the GPUs' firmware.

    :param installed: driver version of the packages; empty when they are not there or differ.
    :param firmware: the driver versions for which there is firmware.
    """
    nvidia = host["nvidia"]
    loaded, userspace = nvidia["loaded"], nvidia["userspace"]
    problems = []
    if loaded and userspace and loaded != userspace:
        problems.append(
            f"the loaded module is {loaded} and the libraries are {userspace}: new processes fail until the module of "
            "the libraries "
            "is loaded (a reload, or a reboot)"
        )
    if installed and userspace and installed != userspace:
        problems.append(
            f"the packages are {installed} and the libraries in use are {userspace}: another installation lies over "
            "them"
        )
    need = loaded or installed
    if need and need not in firmware:
        has = ", ".join(sorted(firmware, key=version_order)) or "none"
        problems.append(
            f"there is no firmware for driver {need} below /lib/firmware/nvidia (found: {has}); reinstall its package"
        )
    if nvidia["open"] is False:
        problems.append(
            f"the loaded module {loaded} is the proprietary one, and Blackwell cards work with the open one only"
        )
    if host["gpus"] and nvidia["nouveau_loaded"]:
        problems.append("nouveau has the GPUs; it gives them back with a reboot")
    return problems


def choose_loading(host: dict[str, Any], version: str, kernels: list[str]) -> dict[str, Any]:
    """Return how the installed module gets into the running kernel.

    :returns: ``{"action": "none" | "load" | "reload" | "reboot", "why": sentence}``. ``none`` with a reason: it cannot
        be loaded here at all.
    """
    loaded = host["nvidia"]["loaded"]
    if host["container"]:
        return {"action": "none", "why": "this is a container: its kernel is the host's"}
    if not host["gpus"]:
        return {"action": "none", "why": "there is no NVIDIA GPU on the PCI bus"}
    if loaded == version and host["nvidia"]["open"] is not False:
        return {"action": "none", "why": ""}
    running = host["kernel"]["release"]
    if running not in kernels:
        return {"action": "reboot", "why": f"the module is built for {', '.join(kernels)}, and {running} runs"}
    if host["nvidia"]["nouveau_loaded"]:
        return {"action": "reboot", "why": "nouveau has the GPUs until then"}
    if loaded:
        return {"action": "reload", "why": f"{loaded} is loaded, {version} is installed"}
    return {"action": "load", "why": "no driver is loaded"}


def find_lost_cards(gpus: list[dict[str, Any]], plan: dict[str, Any]) -> list[str]:
    """Return the PCI addresses of the plan's cards that the loaded driver does not tell, without a plan of all cards.

    A card that shows a screen, or that a virtual machine has, is nobody's of the plan.

    :param gpus: what ``gpu_topology`` says of the GPUs now.
    """
    told = {gpu["pci_address"]: bool(gpu["uuid"]) for gpu in gpus}
    planned = [gpu["pci_address"] for replica in plan.get("replicas", []) for gpu in replica["gpus"]]
    return [address for address in dict.fromkeys(planned or told) if not told.get(address)]


def plan_unloading(modules: str) -> dict[str, list[str]]:
    """Return how the loaded driver gets out of the kernel, so that nothing is taken out where something has to stay.

    :param modules: text of ``/proc/modules``.
    :returns: ``{"modules": [name], "held": [sentence]}``: the driver's loaded modules, each after those that use it,
        and what holds them.
    """
    users, counts, held = dict[str, list[str]](), dict[str, int](), list[str]()
    for line in modules.splitlines():
        # "nvidia 9715712 22 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000"; "-" where nothing uses it.
        fields = line.split()
        if len(fields) >= 4 and fields[0] in _MODULES:
            users[fields[0]] = [name for name in fields[3].split(",") if name not in ("", "-")]
            counts[fields[0]] = int(fields[2]) if re.fullmatch("[0-9]{1,9}", fields[2]) else 0
            if fields[2] == "-":
                held.append(f"{fields[0]}, which this kernel cannot unload")
    for module, names in users.items():
        others = [name for name in names if name not in users]
        open_files = counts[module] - len(names)
        if others:
            held.append(f"{module} by the modules {', '.join(others)}")
        if open_files > 0:
            held.append(f"{module} by {open_files} open devices")
    order: list[str] = []
    while left := [module for module in users if module not in order]:
        free = [module for module in left if not set(users[module]) & set(left) - {module}]
        # A circle is not possible in a kernel; a damaged text must not hang this.
        order += free or left
    return {"modules": order, "held": held}


def merge_options(
    names: dict[str, str], uvm_disable_hmm: bool, force_p2p: bool, extra: dict[str, dict[str, Any]]
) -> dict[str, dict[str, str]]:
    """Return the options of each kernel module, under the names that the package source gives them.

    :param names: ``{"nvidia": ..., "nvidia_uvm": ...}``.
    :param extra: options by module, laid over the others.
    """
    options: dict[str, dict[str, str]] = {}
    if uvm_disable_hmm:
        options.setdefault("nvidia_uvm", {})["uvm_disable_hmm"] = "1"
    if force_p2p:
        # The keys that field reports of these cards agree on.
        keys = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1"
        options.setdefault("nvidia", {})["NVreg_RegistryDwords"] = keys
    for module, values in extra.items():
        options.setdefault(module, {}).update({name: _option_text(value) for name, value in values.items()})
    return {names.get(module, module): values for module, values in options.items() if values}


def options_differ(former: str, wanted: str) -> bool:
    """Tell whether the options of NVIDIA's modules are others in two texts of ``/etc/modprobe.d``."""
    return _option_lines(former) != _option_lines(wanted)


def _option_lines(text: str) -> set[str]:
    lines = {" ".join(line.split()) for line in text.splitlines() if line.startswith("options ")}
    return {line for line in lines if not line.startswith("options nouveau ")}


def _option_text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def find_limit_problems(limits: dict[str, Any], clocks: list[int], common: int = 0) -> list[str]:
    """Return what is wrong with power limits (by UUID or PCI address, in watts) and a range of clocks (MHz).

    :param common: the limit of every card; 0 leaves the cards' own.
    """
    problems = []
    if not 0 <= common <= 2000:
        problems.append(
            f"nvidia_driver_power_limit_w: '{common}' is no number of watts between 1 and 2000; 0 leaves the cards' own"
        )
    for card, watts in limits.items():
        if not re.fullmatch(r"GPU-[0-9a-f-]{36}|(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", str(card)):
            problems.append(
                f"nvidia_driver_power_limits_w: '{card}' is neither a GPU's UUID nor its PCI address like 0000:38:00.0"
            )
        if isinstance(watts, bool) or not isinstance(watts, int) or not 1 <= watts <= 2000:
            problems.append(
                f"nvidia_driver_power_limits_w: '{watts}' for {card} is no whole number of watts between 1 and 2000"
            )
    if clocks and (len(clocks) != 2 or not 0 < clocks[0] <= clocks[1]):
        problems.append(
            f"nvidia_driver_graphics_clock_mhz: {clocks} is not a lowest and a highest clock in MHz, for example "
            "[1500, 2400]"
        )
    return problems
