#!/usr/bin/python3
"""Set at every boot what the kernel keeps in no file: huge pages, CPU governors, ACS redirect above the GPUs.

    host_settings.py [--check] [--root /]

Says what it changes and changes nothing that is right. With --check it only says what differs. Ends with 1 when
something is not as wanted afterwards. What is wanted stands in /etc/gpu-node/host-settings.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

CONFIG = "etc/gpu-node/host-settings.json"
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
CPUFREQ = "sys/devices/system/cpu/cpufreq"
PCI = "sys/bus/pci/devices"
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# PCI Express: extended capabilities begin at 0x100; 0x000d is Access Control Services, its control register 6 bytes on.
EXTENDED = 0x100
ACS = 0x000D
ACS_CONTROL = 6
REDIRECT = 1 << 2 | 1 << 3


def read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def write(path: Path, value: str) -> str:
    """Why it could not be written; empty when it was."""
    try:
        path.write_text(value)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def chosen(path: Path) -> str:
    text = read(path)
    match = re.search(r"\[([^\[\]\s]+)\]", text)
    return match[1] if match else text


def word_files(root: Path, wanted: dict[str, str]) -> Iterator[tuple[Path, str]]:
    """Files of one word, and the word they are to have; only those that this kernel has."""
    pages = root / HUGE_PAGES
    if "transparent_hugepages" in wanted and pages.exists():
        yield pages, wanted["transparent_hugepages"]
    for file in sorted((root / CPUFREQ).glob("policy*/scaling_governor")):
        available = read(file.with_name("scaling_available_governors")).split()
        if wanted.get("cpu_governor") in available:
            yield file, wanted["cpu_governor"]


def ports_above_gpus(root: Path) -> list[str]:
    """Root ports and switch ports on the way to an NVIDIA GPU."""
    ports: list[str] = []
    for device in sorted((root / PCI).glob("*")):
        if read(device / "vendor") == "0x10de" and read(device / "class")[:6] in ("0x0300", "0x0302"):
            above = [part for part in Path(os.path.realpath(device)).parts[:-1] if PCI_ADDRESS.fullmatch(part)]
            ports += [port for port in above if port not in ports]
    return ports


def acs_control(config: bytes) -> tuple[int, int] | None:
    """Place and value of the ACS control register in a configuration space; None when the port has none."""
    offset, seen = EXTENDED, set[int]()
    while offset >= EXTENDED and offset not in seen and offset + 4 <= len(config):
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == ACS and offset + ACS_CONTROL + 2 <= len(config):
            (value,) = struct.unpack_from("<H", config, offset + ACS_CONTROL)
            return offset + ACS_CONTROL, int(value)
        offset = (header >> 20) & 0xFFC
    return None


def clear_redirect(port: Path, check: bool) -> tuple[str, str]:
    """What was done at a port, and why not; both empty when nothing redirects there."""
    config = port / "config"
    try:
        found = acs_control(config.read_bytes())
        if found is None or not found[1] & REDIRECT:
            return "", ""
        place, value = found
        said = f"ACS at {port.name}: redirect was on (control {value:#06x})"
        if check:
            return said, ""
        file = os.open(config, os.O_RDWR)
        try:
            os.pwrite(file, struct.pack("<H", value & ~REDIRECT), place)
        finally:
            os.close(file)
        after = acs_control(config.read_bytes())
    except OSError as error:
        # A kernel in lockdown (Secure Boot) lets nobody write there.
        return "", f"ACS at {port.name}: {error.strerror}; a kernel in lockdown (Secure Boot) forbids it"
    if after is None or after[1] & REDIRECT:
        return "", f"ACS at {port.name}: redirect stays on; this port does not let it be cleared"
    return f"{said}, now off", ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, say what differs")
    parser.add_argument("--root", type=Path, default=Path("/"), help="the folder that sys and etc are in")
    options = parser.parse_args(argv)
    root: Path = options.root
    try:
        wanted = dict(json.loads((root / CONFIG).read_text()))
    except (OSError, ValueError) as error:
        print(f"{root / CONFIG}: {error}", file=sys.stderr)
        return 1
    changes, failures = list[str](), list[str]()
    for file, word in word_files(root, wanted):
        found = chosen(file)
        if found == word:
            continue
        failure = "" if options.check else write(file, word)
        if not options.check and not failure and chosen(file) != word:
            failure = f"{file}: {word} was written, and it says {chosen(file)}"
        change = f"{file}: {found}, wanted {word}" if options.check else f"{file}: {found}, now {word}"
        (failures if failure else changes).append(failure or change)
    for name in ports_above_gpus(root) if wanted.get("acs_redirect") == "off" else []:
        change, failure = clear_redirect(root / PCI / name, options.check)
        changes += [change] if change else []
        failures += [failure] if failure else []
    for line in changes or ([] if failures else ["everything is as wanted"]):
        print(line)
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures or (options.check and changes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
