# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The state of a node's operating system, from the texts of sysfs, /proc, /etc and of commands.

Pure functions only: the module ``host_state`` does the reading. Whatever a text does not tell comes back as None or
empty, because on a node that is half set up most texts are missing or cut, and one of them must not hide the others.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.topology import pci_address

# PCI Express: extended capabilities begin here, and this one is Access Control Services (PCI Express Base, 7.7.11).
_EXTENDED_CAPABILITIES = 0x100
_ACS_CAPABILITY = 0x000D
_ACS_REQUEST_REDIRECT = 1 << 2
_ACS_COMPLETION_REDIRECT = 1 << 3
# Without root the kernel shows only the header.
_HEADER_BYTES = 64
# Flags of a region in the `resource` file (include/linux/ioport.h): it has a size and no place in the address space.
_REGION_UNSET = 0x20000000
_REGION_DISABLED = 0x10000000

_VERSION = r"[0-9]{2,4}\.[0-9]{1,4}(?:\.[0-9]{1,4})?"
# "nvidia/595.58.03, 6.8.0-31-generic, x86_64: installed" since version 3, "nvidia, 595.58.03, 6.8.0-..." before; some
# print no architecture.
_DKMS = re.compile(
    r"(?P<module>[^\s/,]+)(?:/|, )(?P<version>[^\s/,:]+)(?:, (?P<kernel>[^\s,:]+)(?:, [^\s,:]+)?)?"
    r": (?P<state>added|built|installed|broken)\b"
)
# What of the package archive belongs to the driver, the container toolkit and their firmware.
_NVIDIA_PACKAGE = re.compile(r"(?:lib)?nvidia-.*|.*-nvidia-.*|cuda-drivers.*|xserver-xorg-video-nvidia.*|libcuda1")


def parse_free_memory(text: str) -> int | None:
    """Return the bytes that nothing uses, of ``/proc/meminfo`` or a NUMA node's ``meminfo``; None when it has none.

    A node does not tell what is available: what is free, and caches of files, which make way.
    """
    told = {name: int(number) * 1024 for name, number in re.findall(r"\b(\w+):\s+([0-9]{1,15}) kB", text)}
    if "MemAvailable" in told:
        return told["MemAvailable"]
    if "MemFree" not in told:
        return None
    files = told.get("FilePages", 0) - told.get("Shmem", 0)
    return told["MemFree"] + max(0, files) + told.get("SReclaimable", 0)


def parse_os_release(text: str) -> dict[str, str]:
    """Return ``{"id", "version_id", "codename", "name"}`` of an ``/etc/os-release``; empty texts where it has none."""
    fields = {}
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith("#"):
            fields[name] = value.strip().strip("\"'")
    keys = {"id": "ID", "version_id": "VERSION_ID", "codename": "VERSION_CODENAME", "name": "PRETTY_NAME"}
    return {ours: fields.get(theirs, "") for ours, theirs in keys.items()}


def kernel_order(release: str) -> list[tuple[int, int, str]]:
    """Return what sorts kernel releases by age: ``6.1.0-9-amd64`` comes before ``6.1.0-28-amd64``."""
    pieces = re.findall(r"[0-9]{1,18}|[^0-9]+", release)
    return [(1, int(piece), "") if piece.isascii() and piece.isdecimal() else (0, 0, piece) for piece in pieces]


def sort_kernels(releases: set[str]) -> list[str]:
    """Return kernel releases, oldest first."""
    return sorted(releases, key=kernel_order)


def parse_efi_flag(content: bytes) -> bool | None:
    """Return the value of a one-byte EFI variable as efivarfs shows it: four bytes of attributes, then the byte."""
    return bool(content[-1]) if len(content) >= 5 else None


def secure_boot_state(firmware: bool, names: list[str], secure_boot: bytes, validation_off: bytes) -> bool | None:
    """Return whether the kernel accepts signed modules only.

    :param firmware: whether there is ``/sys/firmware/efi``; without it the machine was booted by a BIOS.
    :param names: the variables there are; none when efivarfs is not mounted.
    :param secure_boot: content of ``SecureBoot-...``; empty when there is none or it cannot be read.
    :param validation_off: content of shim's ``MokSBStateRT-...``: with 1 in it, shim and kernel check no signature.
    """
    if not firmware:
        return False
    if not names:
        return None
    if not any(name.startswith("SecureBoot-") for name in names):
        # Firmware that cannot do it has no such variable.
        return False
    enabled = parse_efi_flag(secure_boot)
    return enabled and not parse_efi_flag(validation_off)


def parse_switch(text: str) -> bool | None:
    """Return a number of ``/proc/sys`` as a switch: ``0`` is off, any other number on."""
    return int(text) != 0 if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) else None


def parse_yes(text: str) -> bool | None:
    """Return systemd's ``yes`` or ``no``."""
    return {"yes": True, "no": False}.get(text.strip())


def parse_locks(text: str) -> dict[int, list[int]]:
    """Return by inode the processes that hold a lock on it, from ``/proc/locks``; waiting ones are left out."""
    holders: dict[int, list[int]] = {}
    for line in text.splitlines():
        fields = line.split()
        # "1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"; a waiting process has "->" after the number.
        if len(fields) < 6 or fields[1] == "->":
            continue
        match = re.fullmatch(r"[0-9a-f]{2,8}:[0-9a-f]{2,8}:([0-9]{1,20})", fields[5])
        if match and re.fullmatch("[0-9]{1,10}", fields[4]):
            holders.setdefault(int(match[1]), []).append(int(fields[4]))
    return holders


def is_apt_configuration(name: str) -> bool:
    """Tell the files of ``/etc/apt/apt.conf.d`` that apt reads from others (``.dpkg-old``, ``~``)."""
    return re.fullmatch(r"[A-Za-z0-9_-]+(?:\.conf)?", name) is not None


def kernel_of_image(name: str) -> str:
    """Return the release of a kernel in ``/boot``; empty for another file, and for one that was set aside."""
    match = re.fullmatch(r"vmlinuz-(.+)", name)
    aside = re.search(r"(?:\.old|\.bak|\.dpkg-[a-z]+|~)$", name)
    return match[1] if match and not aside else ""


def parse_apt_periodic(texts: list[str]) -> bool:
    """Return whether apt's configuration asks for unattended upgrades.

    :param texts: what ``apt-config dump`` printed, or the files of ``/etc/apt/apt.conf.d`` in the order of their names;
        the last word counts.
    """
    asked = False
    for text in texts:
        for line in text.splitlines():
            match = re.match(r"\s*APT::Periodic::Unattended-Upgrade\s+\"?([^\";\s]*)\"?\s*;", line, re.IGNORECASE)
            if match:
                # Days between two runs, with a unit ("1d") or "always"; 0 is never.
                asked = match[1].lower() not in ("", "0", "false", "no", "off")
    return asked


def parse_dpkg_status(text: str) -> list[dict[str, Any]]:
    """Return the packages of ``/var/lib/dpkg/status`` that are there at all.

    :returns: each ``{"name", "version", "held": bool, "whole": bool}``; one that is not whole was left half installed.
    """
    packages = []
    for block in re.split(r"\n[ \t]*\n", text):
        fields = dict(re.findall(r"^(Package|Status|Version):[ \t]*(.*?)[ \t]*$", block, re.MULTILINE))
        status = fields.get("Status", "").split()
        if not fields.get("Package") or len(status) != 3 or status[2] in ("not-installed", "config-files"):
            continue
        packages.append(
            {
                "name": fields["Package"],
                "version": fields.get("Version", ""),
                "held": status[0] == "hold",
                "whole": status[1:] == ["ok", "installed"],
            }
        )
    return packages


def is_nvidia_package(name: str) -> bool:
    """Tell the packages of the driver and of the container toolkit from all others."""
    return _NVIDIA_PACKAGE.fullmatch(name) is not None


def parse_dkms_status(text: str) -> list[dict[str, str]]:
    """Return what ``dkms status`` says of each module, in its formats of before and since version 3.

    :returns: each ``{"module", "version", "kernel", "state"}``. ``kernel`` is empty for a module that is built for
        none; ``state`` is ``added``, ``built``, ``installed`` or ``broken``. Only ``installed`` can be loaded.
    """
    found = []
    for line in text.splitlines():
        match = _DKMS.match(line.strip())
        if match:
            found.append({name: value or "" for name, value in match.groupdict().items()})
    return found


def is_driver_module(name: str) -> bool:
    """Tell the driver's names for DKMS from NVIDIA's other modules (nvidia-fs, which has files read into cards).

    They are nvidia and nvidia-open of NVIDIA's packages and Ubuntu's, nvidia-srv of Ubuntu's for servers, and
    nvidia-current-open of Debian's, which keep several versions apart.
    """
    return re.fullmatch(r"nvidia(?![-_](?:fs|gds|peermem)\b)(?:[-_].*)?", name) is not None


def parse_modules(text: str) -> set[str]:
    """Return the loaded modules of ``/proc/modules``."""
    return {line.split()[0] for line in text.splitlines() if line.split()}


def find_version(text: str) -> str:
    """Return the first version number in a text (``podman version 4.3.1``); empty when there is none."""
    match = re.search(r"(?<![\w.])v?([0-9]{1,5}\.[0-9]{1,5}(?:\.[0-9]{1,5})?(?:[~-][0-9A-Za-z.~]+)?)", text, re.ASCII)
    return match[1] if match else ""


def library_version(names: list[str]) -> str:
    """Return the driver's version that a library's file names end in; the highest, empty when none does.

    :param names: for example ``["libnvidia-ml.so.1", "libnvidia-ml.so.590.48.01"]``.
    """
    versions = [match[1] for name in names if (match := re.fullmatch(rf"libnvidia-ml\.so\.({_VERSION})", name))]
    return max(versions, key=lambda version: [int(part) for part in version.split(".")], default="")


def nvidia_smi_version(text: str) -> str:
    """Return the user-space version from what nvidia-smi prints, also from its words about a mismatch."""
    match = re.search(rf"(?:NVML library version|NVIDIA-SMI version|NVIDIA-SMI)\s*:?\s+({_VERSION})\b", text)
    return match[1] if match else ""


def parse_link(speeds: tuple[str, str], widths: tuple[str, str]) -> dict[str, Any] | None:
    """Return a PCIe link as ``{"speed_gts", "width", "max_speed_gts", "max_width"}``; None when one is unknown.

    :param speeds: texts of ``current_link_speed`` and ``max_link_speed``, for example ``32.0 GT/s PCIe``.
    :param widths: texts of ``current_link_width`` and ``max_link_width``; 0 and 255 are what a virtual machine shows.
    """
    rates = [re.match(r"\s*([0-9]{1,3}(?:\.[0-9]{1,3})?) GT/s", text) for text in speeds]
    lanes = [re.fullmatch(r"\s*([1-9][0-9]?)\s*", text) for text in widths]
    if None in rates or None in lanes:
        return None
    speed, max_speed = (float(match[1]) for match in rates if match)
    width, max_width = (int(match[1]) for match in lanes if match)
    return {"speed_gts": speed, "width": width, "max_speed_gts": max_speed, "max_width": max_width}


def parse_bar1(text: str) -> int | None:
    """Return the bytes of the GPU's memory that the CPU and other cards can address (BAR1), from its ``resource`` file.

    It is the largest of the device's six regions, whatever its number: where the first one is 64 bits wide as well, it
    is region 2. 0 when the firmware found no room for it, None when the text does not tell.
    """
    largest, placed = 0, True
    for line in text.splitlines()[:6]:
        match = re.fullmatch(r"\s*0x([0-9a-f]{1,16})\s+0x([0-9a-f]{1,16})\s+0x([0-9a-f]{1,16})\s*", line)
        if match is None:
            return None
        start, end, flags = (int(number, 16) for number in match.groups())
        size = end - start + 1 if end > start else 0
        if size > largest:
            largest, placed = size, not flags & (_REGION_UNSET | _REGION_DISABLED)
    return None if not largest else largest if placed else 0


def parse_acs_redirect(config: bytes) -> bool | None:
    """Return whether a port sends peer-to-peer requests or completions up to the root, from its configuration space.

    None when the space is cut (only root reads beyond the header). A port without the capability redirects nothing.
    """
    if len(config) <= _HEADER_BYTES:
        return None
    offset = _EXTENDED_CAPABILITIES
    seen = set()
    while offset >= _EXTENDED_CAPABILITIES and offset not in seen and offset + 4 <= len(config):
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):
            return False
        if header & 0xFFFF == _ACS_CAPABILITY:
            if offset + 8 > len(config):
                return None
            (control,) = struct.unpack_from("<H", config, offset + 6)
            return bool(control & (_ACS_REQUEST_REDIRECT | _ACS_COMPLETION_REDIRECT))
        offset = (header >> 20) & 0xFFC
    return False


def ports_above(path: str) -> list[str]:
    """Return the PCI addresses of the bridges above a device, from its resolved path in sysfs, outermost first."""
    return [address for part in path.split("/")[:-1] if (address := pci_address(part))]


def iommu_mode(devices: list[str], group_types: list[str], cmdline: str) -> str | None:
    """Return ``off``, ``passthrough`` or ``translated``; None when it cannot be told.

    :param devices: the entries of ``/sys/class/iommu``; none when there is no IOMMU or it is off.
    :param group_types: texts of ``/sys/kernel/iommu_groups/*/type``, of the GPUs' groups where there are GPUs.
    :param cmdline: the kernel's command line, for kernels that do not show the type.
    """
    types = {text.strip() for text in group_types if text.strip()}
    if types & {"DMA", "DMA-FQ"}:
        # One translated card is enough to slow or break the whole group's traffic.
        return "translated"
    if types == {"identity"}:
        return "passthrough"
    if types:
        return None
    if not devices:
        return "off"
    words = cmdline.split()
    if {"iommu=pt", "iommu.passthrough=1"} & set(words):
        return "passthrough"
    return "translated" if {"intel_iommu=on", "amd_iommu=on", "iommu=force"} & set(words) else None


def parse_runtime_mode(text: str) -> str:
    """Return the ``mode`` of ``/etc/nvidia-container-runtime/config.toml``; empty when it is not set."""
    section = ""
    for line in text.splitlines():
        header = re.fullmatch(r"\s*\[+([^\[\]]+)\]+\s*(?:#.*)?", line)
        if header:
            section = header[1].strip()
        match = re.match(r"\s*mode\s*=\s*(?:\"([^\"]*)\"|'([^']*)')", line)
        if match and section == "nvidia-container-runtime":
            return match[1] or match[2] or ""
    return ""
