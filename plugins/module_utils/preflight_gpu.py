# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The checks that concern GPUs: the cards and their links, the driver, and the way of cards into containers."""

from __future__ import annotations

from collections.abc import Callable

from ansible_collections.serving.gpu_node.plugins.module_utils.host_state import is_driver_module, sort_kernels
from ansible_collections.serving.gpu_node.plugins.module_utils.placement import full_address, gpu_name
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_facts import (
    EMPTY_HOST,
    FAILURE,
    MIB,
    OK,
    WARNING,
    Check,
    Facts,
    complete,
    finding,
    plain_version,
    split_remedy,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.toolkit import toolkit_problem
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import GPU_MODELS

# What a card shows of its memory when the firmware gives it no more (BAR1 without Resizable BAR).
_SMALL_BAR1 = 256 * MIB
# Memory of the cards this collection is made for (nvidia-smi on all three, RTX PRO 6000 Blackwell with 96 GB).
_KNOWN_CARD_MIB = 97887


# --- the cards


def _check_gpus_on_bus(facts: Facts) -> list[Check]:
    there, need = facts.gpus, int(facts.wanted.get("gpus", 0))
    named = [full_address(str(item)) for item in facts.wanted.get("named_gpus", [])]
    gone = [address for address in named if address not in {gpu["pci_address"] for gpu in there}]
    names = ", ".join(gpu_name(gpu) for gpu in there) or "none"
    wanted = f"{need} that the profile is made for" if not named else f"{need}: {', '.join(named)}"
    remedy = (
        "look at lspci -d 10de: and the kernel's log, reseat the card, or plan with fewer (replicas, "
        "tensor_parallel_size, gpus)"
    )
    level = FAILURE if len(there) < need or gone else OK
    seen = f"{len(there)} on PCI: {names}" + (f"; not there: {', '.join(gone)}" if gone else "")
    return [finding("gpus", level, seen, wanted, remedy)]


def _check_gpus_of_driver(facts: Facts) -> list[Check]:
    there = facts.gpus
    if not facts.nvidia["loaded"] or not there:
        return []
    lost = [gpu for gpu in there if not gpu["uuid"]]
    wanted = f"each of the {len(there)} on PCI"
    if not lost:
        return [finding("gpus_of_driver", OK, f"{len(there)}", wanted)]
    seen = f"{len(there) - len(lost)}; without {', '.join(gpu_name(gpu) for gpu in lost)}"
    remedy = "look for Xid and RmInitAdapter in the kernel's log; reset or reseat that card, or leave it out by gpus"
    # A driver that is going to be replaced says nothing of the card: its version or flavour may be why.
    return [finding("gpus_of_driver", WARNING if facts.must_be_built else FAILURE, seen, wanted, remedy)]


def _check_bar1(facts: Facts) -> list[Check]:
    """Cards without NVLink reach each other's memory through BAR1, so all of it must be there."""
    memory = {gpu["pci_address"]: gpu for gpu in facts.gpus}
    alone = int(facts.wanted.get("settings", {}).get("tensor_parallel_size", 1)) < 2
    remedy = "turn Above 4G Decoding and Resizable BAR on in the firmware"
    small, untold, unmapped = [], [], []
    for gpu in facts.host_gpus:
        size, card = gpu["bar1_bytes"], memory[gpu["pci_address"]]
        mib = card.get("memory_mib") or (_KNOWN_CARD_MIB if gpu["device_id"] in GPU_MODELS else None)
        if size is None:
            untold.append(gpu["pci_address"])
        elif size == 0:
            unmapped.append(gpu["pci_address"])
        elif size <= _SMALL_BAR1 or (mib and size < mib * MIB):
            small.append(f"{gpu['pci_address']} {size // MIB:,} MiB")
    wanted = "as much as the card's memory"
    checks = []
    if unmapped:
        seen = f"the firmware gave no room to {', '.join(unmapped)}"
        checks.append(finding("bar1", FAILURE, seen, wanted, remedy))
    if small:
        # One card alone needs no other card's memory.
        checks.append(finding("bar1", WARNING if alone else FAILURE, ", ".join(small), wanted, remedy))
    if untold:
        checks.append(finding("bar1", WARNING, f"{', '.join(untold)}: not told", wanted, "look at lspci -vv -d 10de:"))
    if not checks and facts.host_gpus:
        checks.append(finding("bar1", OK, f"whole on {len(facts.host_gpus)} cards", wanted))
    return checks


def _check_iommu(facts: Facts) -> list[Check]:
    """Translation breaks peer-to-peer traffic at times and not always; a bounded all-reduce decides before serving."""
    mode = facts.host["iommu"]
    level = WARNING if mode == "translated" or (mode is None and not facts.host["container"]) else OK
    remedy = (
        "copies between cards may be slow or hang, also where nvidia-smi topo -p2p says OK: set host_settings_iommu to "
        "passthrough (iommu=pt) or off (amd_iommu=off / intel_iommu=off); a reboot takes it into use"
    )
    return [finding("iommu", level, mode or "not told", "off or passthrough", remedy)]


def _check_acs(facts: Facts) -> list[Check]:
    """The same as for the IOMMU: only traffic between cards suffers, so it is no reason to refuse the node."""
    ports = facts.host["acs_redirect"]
    if ports is None:
        remedy = "look at lspci -vvv as root: ReqRedir and CmpltRedir of the ports above the cards"
        return [finding("acs", OK if facts.host["container"] else WARNING, "not told", "no redirect", remedy)]
    remedy = (
        "copies between cards go up to the root, and may hang there: turn ACS off in the firmware, or set "
        "host_settings_acs_redirect to off, which clears the bits on root ports and on switches' downstream ports"
    )
    return [
        finding(
            "acs",
            WARNING if ports else OK,
            f"redirect on {', '.join(ports)}" if ports else "none",
            "no redirect",
            remedy,
        )
    ]


def _check_link_width(facts: Facts) -> list[Check]:
    links = {gpu["pci_address"]: gpu["link"] for gpu in facts.host_gpus if gpu["link"]}
    narrow = [
        f"{address} x{link['width']} of x{link['max_width']}"
        for address, link in links.items()
        if link["width"] < link["max_width"]
    ]
    remedy = (
        "reseat the card or riser, look at the slot's bifurcation in the firmware; idle cards lower the speed, not the "
        "width"
    )
    if not narrow:
        seen = f"full on {len(links)} cards" if links else "not told"
        return [finding("pcie_width", OK, seen, "the card's full width")] if facts.host_gpus else []
    return [finding("pcie_width", FAILURE, ", ".join(narrow), "the card's full width", remedy)]


def _check_link_speed(facts: Facts) -> list[Check]:
    links = {gpu["pci_address"]: gpu["link"] for gpu in facts.host_gpus if gpu["link"]}
    slow = [
        f"{address} {link['speed_gts']:g} of {link['max_speed_gts']:g} GT/s"
        for address, link in links.items()
        if link["speed_gts"] < link["max_speed_gts"]
    ]
    if not slow:
        seen = f"full on {len(links)} cards" if links else "not told"
        return [finding("pcie_speed", OK, seen, "the card's full speed")] if facts.host_gpus else []
    remedy = (
        "idle cards lower it, so this may be nothing; a slot of an older generation limits it for good; acceptance "
        "measures it under load"
    )
    return [finding("pcie_speed", WARNING, f"idle: {', '.join(slow)}", "the card's full speed, under load", remedy)]


def _check_topology(facts: Facts) -> list[Check]:
    """What the topology's readings disagree on."""
    warnings = facts.topology.get("warnings", [])
    return [
        finding("topology", WARNING, str(text), "readings that agree", "look into it before serving")
        for text in warnings
    ] or [finding("topology", OK, "readings agree", "readings that agree")]


# --- the driver


def _known_bad(facts: Facts, version: str, flavour: str) -> str:
    """Return why a driver version is known to be bad; empty when it is not."""
    for item in facts.driver["known"]:
        if item["verdict"] == "bad" and str(item["version"]) == version and item["flavour"] in ("any", flavour):
            return f"{item['why']} ({item['source']})"
    return ""


def _check_version(facts: Facts) -> list[Check]:
    wanted, loaded, manage = str(facts.driver["version"]), facts.nvidia["loaded"], facts.driver["manage"]
    asked = _known_bad(facts, plain_version(wanted), "open")
    found = _known_bad(facts, loaded, "proprietary" if facts.nvidia["open"] is False else "open")
    checks = []
    if manage and asked:
        remedy = "set nvidia_driver_version to a known good one"
        level = WARNING if facts.driver["bad_allowed"] else FAILURE
        checks.append(finding("driver", level, f"{wanted} is asked for: {asked}", "a version that works", remedy))
    if not loaded:
        level = OK if manage else FAILURE
        remedy = "load it (modprobe nvidia; dmesg says why it fails), or set nvidia_driver_manage: true"
        seen = "none loaded; will be installed" if manage else "none loaded"
        checks.append(finding("driver", level, seen, wanted or "any", remedy))
    elif found:
        replaced = manage and plain_version(wanted) not in ("", loaded)
        remedy = (
            f"the role nvidia_driver replaces it by {wanted}"
            if replaced
            else "install a known good version and hold it"
        )
        seen = f"{loaded} is loaded: {found}"
        checks.append(
            finding("driver", WARNING if replaced else FAILURE, seen, wanted or "a version that works", remedy)
        )
    elif wanted and loaded != plain_version(wanted):
        remedy = (
            f"the role nvidia_driver installs {wanted}" if manage else "set nvidia_driver_version to what is to stay"
        )
        checks.append(finding("driver", WARNING, f"{loaded} is loaded", wanted, remedy))
    else:
        checks.append(finding("driver", OK, f"{loaded} is loaded", wanted or "any"))
    return checks


def _check_flavour(facts: Facts) -> list[Check]:
    """Blackwell cards have no other driver than the open modules: a proprietary one finds no devices."""
    licence, loaded = facts.nvidia["module_license"], facts.nvidia["loaded"]
    wanted = "open kernel modules (Dual MIT/GPL)"
    remedy = "remove the proprietary packages (apt-get purge), install the -open ones and reboot"
    if loaded and facts.nvidia["open"] is False:
        return [finding("driver_flavour", FAILURE, f"{loaded} is loaded as a proprietary module", wanted, remedy)]
    if licence and licence != "Dual MIT/GPL":
        return [finding("driver_flavour", FAILURE, f"the module on disk has the licence {licence}", wanted, remedy)]
    if not loaded and not licence:
        return [finding("driver_flavour", OK, "no module", wanted)]
    known = facts.nvidia["open"] or licence
    remedy = "look at modinfo -F license nvidia and at /proc/driver/nvidia/version"
    return [finding("driver_flavour", OK if known else WARNING, "open" if known else "not told", wanted, remedy)]


def _check_mismatch(facts: Facts) -> list[Check]:
    """Running containers go on after an upgrade of the libraries; the next start fails."""
    loaded, userspace = facts.nvidia["loaded"], facts.nvidia["userspace"]
    if not loaded or not userspace:
        seen = f"module {loaded or 'none'}, libraries {userspace or 'none'}"
        # A module without libraries is half a driver, which only the driver's role completes.
        level = FAILURE if loaded and not facts.driver["manage"] else OK
        return [
            finding(
                "driver_libraries", level, seen, "the same version", "install the driver's libraries of that version"
            )
        ]
    seen = f"module {loaded}, libraries {userspace}"
    if loaded in ("unknown", userspace):
        return [finding("driver_libraries", OK, seen, "the same version")]
    repaired = facts.driver["manage"] and facts.driver["reboot_allowed"]
    remedy = (
        "reboot (or reload the module while nothing uses it): no GPU container can start until then; hold the packages"
    )
    return [finding("driver_libraries", WARNING if repaired else FAILURE, seen, "the same version", remedy)]


def _check_dkms(facts: Facts) -> list[Check]:
    """The module must be there for the kernel that runs and for the one that the next boot starts."""
    kernel = complete(EMPTY_HOST["kernel"], facts.host["kernel"])
    entries = [item for item in facts.nvidia["dkms"] if is_driver_module(item["module"])]
    if not entries:
        # Packages of the distribution may bring a built module; then there is nothing to build.
        return [finding("driver_module", OK, "nothing of DKMS", "installed for each kernel")]
    # Of a driver that was replaced, entries may be left.
    entries = [item for item in entries if item["version"] == facts.nvidia["userspace"]] or entries
    asked = [str(release) for release in facts.driver["kernels"]]
    kernels = {*asked} or {item for item in (kernel["release"], *kernel["installed"][-1:]) if item}
    state = {item["kernel"]: item["state"] for item in entries}
    added = ", ".join(
        sorted({f"{item['module']}/{item['version']} {item['state']}" for item in entries if not item["kernel"]})
    )
    checks = []
    for release in sort_kernels(kernels):
        seen = state.get(release, added or "not built")
        if seen == "installed":
            checks.append(finding("driver_module", OK, f"{release}: installed", "installed"))
            continue
        headers = release in kernel["headers"]
        remedy = (
            f"the role nvidia_driver builds it{'' if headers else ' after installing headers'}"
            if facts.driver["manage"]
            else f"{'' if headers else f'install linux-headers-{release}, then '}run dkms autoinstall -k {release}"
        )
        level = WARNING if facts.driver["manage"] else FAILURE
        told = f"{release}: {seen}{'' if headers else ', no headers'}"
        checks.append(finding("driver_module", level, told, "installed", remedy))
    return checks


def _check_secure_boot(facts: Facts) -> list[Check]:
    cmdline = str(complete(EMPTY_HOST["kernel"], facts.host["kernel"])["cmdline"]).split()
    on = True if {"module.sig_enforce", "module.sig_enforce=1"} & set(cmdline) else facts.host["secure_boot"]
    seen = "not told" if on is None else "on" if on else "off"
    needed = facts.must_be_built and not facts.driver["signed"]
    wanted = "off, or keys to sign the module with" if facts.must_be_built else "any; the driver is loaded"
    remedy = (
        "the kernel refuses a module that nobody signed, and enrolling a key takes a console: enrol one with mokutil "
        "--import and set nvidia_driver_mok_key and nvidia_driver_mok_certificate, or turn it off in the firmware"
    )
    if on and not facts.driver["manage"] and not facts.nvidia["loaded"]:
        # The kernel may be what keeps it out; `modprobe` says "Key was rejected by service".
        remedy = (
            "the kernel may refuse the module for its signature: enrol the key that DKMS signs with (mokutil --import "
            "/var/lib/shim-signed/mok/MOK.der on Ubuntu, /var/lib/dkms/mok.pub on Debian), reboot and confirm at the "
            "console (MOK management), or turn it off in the firmware"
        )
        wanted = "off, or a module that an enrolled key (MOK) signed"
        return [finding("secure_boot", WARNING, "on, and no driver is loaded", wanted, remedy)]
    level = OK if on is False or not needed else WARNING if on is None else FAILURE
    # A container has no firmware variables of its own, and builds no module that is loaded.
    return [finding("secure_boot", OK if on is None and facts.host["container"] else level, seen, wanted, remedy)]


def _check_nouveau(facts: Facts) -> list[Check]:
    """A card that another driver has cannot be taken by ours."""
    others = {
        gpu["pci_address"]: gpu["driver"] for gpu in facts.host_gpus if gpu["driver"] not in ("", "nvidia", "nouveau")
    }
    if others:
        seen = ", ".join(f"{address}: {driver}" for address, driver in others.items())
        remedy = (
            "give the cards back to the host (driverctl unset-override ADDRESS, or remove vfio-pci.ids), and reboot"
        )
        return [finding("card_driver", FAILURE, seen, "nvidia", remedy)]
    if facts.nvidia["nouveau_loaded"]:
        level = WARNING if facts.driver["manage"] else FAILURE
        remedy = (
            "the role nvidia_driver turns it off"
            if level == WARNING
            else "blacklist nouveau, rebuild the initramfs, reboot"
        )
        return [finding("card_driver", level, "nouveau is loaded", "nvidia", remedy)]
    return [finding("card_driver", OK, "no other driver", "nvidia")]


# --- the way into containers


def _check_toolkit(facts: Facts) -> list[Check]:
    wanted, found = str(facts.toolkit["version"]), str(facts.nvidia["toolkit"])
    manage, podman = facts.wanted.get("runtime_manage", True), str(facts.host["podman"])
    asked_problem = toolkit_problem(plain_version(wanted), podman, facts.toolkit["known"])
    found_problem = toolkit_problem(plain_version(found), podman, facts.toolkit["known"])
    checks = []
    if manage and asked_problem:
        seen, known, remedy = split_remedy(asked_problem, "a version that works")
        checks.append(
            finding("toolkit", FAILURE, f"asked for: {seen}", known, f"set container_runtime's version; {remedy}")
        )
    if not found:
        shown = "none; will be installed" if manage else "none"
        remedy = "install nvidia-container-toolkit, or set container_runtime_manage: true"
        checks.append(finding("toolkit", OK if manage else FAILURE, shown, wanted or "any", remedy))
    elif found_problem:
        replaced = manage and plain_version(wanted) not in ("", plain_version(found))
        seen, known, remedy = split_remedy(found_problem, wanted or "a version that works")
        remedy = "the role container_runtime replaces it" if replaced else f"install another one and hold it; {remedy}"
        checks.append(finding("toolkit", WARNING if replaced else FAILURE, seen, known, remedy))
    else:
        checks.append(finding("toolkit", OK, found, wanted or "any"))
    return checks


def _check_cdi(facts: Facts) -> list[Check]:
    """A card without a CDI device cannot be given to a replica; one of a stale file fails when it starts."""
    manage = facts.wanted.get("runtime_manage", True)
    uuids = {gpu["uuid"]: gpu for gpu in facts.gpus if gpu["uuid"]}
    missing = [gpu for uuid, gpu in uuids.items() if uuid not in facts.nvidia["cdi_devices"]]
    problems = [split_remedy(problem, "")[0] for problem in facts.nvidia["cdi_problems"]]
    if facts.nvidia["cdi_devices"]:
        problems += [f"no CDI device {gpu['uuid']} for {gpu_name(gpu)}" for gpu in missing]
    elif missing and not problems:
        problems.append("no CDI device of any GPU")
    remedy = (
        "the role container_runtime writes the file anew"
        if manage
        else "run nvidia-ctk cdi generate with names by UUID"
    )
    level = WARNING if manage else FAILURE
    wanted = "one for each GPU, by UUID"
    return [finding("cdi", level, problem, wanted, remedy) for problem in problems] or [
        finding("cdi", OK, f"{len(facts.nvidia['cdi_devices'])} devices", wanted)
    ]


def _check_hooks(facts: Facts) -> list[Check]:
    """One way to the GPUs a node: a hook acts on images that ask for all of them, beside what CDI gives."""
    hooks = facts.nvidia["hooks"]
    if hooks:
        remedy = "remove the file: engine images ask it for every GPU, whatever their replica is given"
        return [finding("gpu_access", FAILURE, f"container hook {', '.join(hooks)}", "CDI alone", remedy)]
    if facts.host["docker"] and facts.nvidia["runtime_mode"] == "cdi":
        remedy = (
            "in your own Docker use --device nvidia.com/gpu=UUID, --gpus fails in this mode; replicas do not use it"
        )
        return [finding("gpu_access", WARNING, "config.toml: mode = cdi, with Docker", "CDI alone", remedy)]
    return [finding("gpu_access", OK, "CDI alone", "CDI alone")]


def _check_unattended(facts: Facts) -> list[Check]:
    """Unattended upgrades replace the user-space driver under running containers: the next start then fails."""
    if not facts.host["unattended_upgrades"]:
        return [finding("unattended_upgrades", OK, "off", "no driver package that may change")]
    # The toolkit's containers are not restarted by its upgrade, and still the next start is with another version.
    loose = sorted(set(facts.nvidia["packages"]) - set(facts.nvidia["held"]))
    if not loose:
        return [finding("unattended_upgrades", OK, "on, driver packages held", "no driver package that may change")]
    shown = ", ".join(loose[:3]) + (f" and {len(loose) - 3} more" if len(loose) > 3 else "")
    remedy = "hold them (apt-mark hold)" if not facts.driver["manage"] else "the roles hold them"
    seen = f"on, and may change {shown}"
    return [finding("unattended_upgrades", WARNING, seen, "no driver package that may change", remedy)]


# In the order of the report.
GPU_CHECKS: dict[str, Callable[[Facts], list[Check]]] = {
    "gpus": _check_gpus_on_bus,
    "gpus_of_driver": _check_gpus_of_driver,
    "topology": _check_topology,
    "bar1": _check_bar1,
    "iommu": _check_iommu,
    "acs": _check_acs,
    "pcie_width": _check_link_width,
    "pcie_speed": _check_link_speed,
    "card_driver": _check_nouveau,
    "driver": _check_version,
    "driver_flavour": _check_flavour,
    "driver_libraries": _check_mismatch,
    "driver_module": _check_dkms,
    "secure_boot": _check_secure_boot,
    "unattended_upgrades": _check_unattended,
    "toolkit": _check_toolkit,
    "cdi": _check_cdi,
    "gpu_access": _check_hooks,
}
