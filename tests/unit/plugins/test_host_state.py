"""The module `host_state`: its parsers on the texts that systems and commands print, and on this machine."""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils import host_state as parse
from ansible_collections.serving.gpu_node.plugins.modules import host_state
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins import host_fixtures
from tests.unit.plugins.module_runner import run_module

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)


def test_os_release_with_and_without_quotes() -> None:
    debian = 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nVERSION_ID="13"\nVERSION_CODENAME=trixie\nID=debian\n# ID=x\n'
    assert parse.parse_os_release(debian) == {
        "id": "debian",
        "version_id": "13",
        "codename": "trixie",
        "name": "Debian GNU/Linux 13 (trixie)",
    }
    # a testing release has no number
    assert parse.parse_os_release("ID='debian'\n")["version_id"] == ""


def test_kernels_are_sorted_by_age_and_not_by_letter() -> None:
    releases = {"6.1.0-9-amd64", "6.1.0-28-amd64", "5.10.0-33-amd64", "6.12.9+deb13-amd64"}
    assert parse.sort_kernels(releases) == ["5.10.0-33-amd64", "6.1.0-9-amd64", "6.1.0-28-amd64", "6.12.9+deb13-amd64"]
    assert parse.sort_kernels({"6.8.0-45-generic", "6.8.0-101-generic"})[-1] == "6.8.0-101-generic"


SB = ["SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"]


@pytest.mark.parametrize(
    ("firmware", "names", "flag", "shim", "state"),
    [
        (False, [], b"", b"", False),
        (True, SB, bytes([6, 0, 0, 0, 1]), b"", True),
        (True, SB, bytes([6, 0, 0, 0, 0]), b"", False),
        # shim was told to check nothing
        (True, SB, bytes([6, 0, 0, 0, 1]), bytes([6, 0, 0, 0, 1]), False),
        (True, SB, bytes([6, 0, 0, 0, 1]), bytes([6, 0, 0, 0, 0]), True),
        # not mounted; not readable; firmware that cannot do it
        (True, [], b"", b"", None),
        (True, SB, b"", b"", None),
        (True, ["BootCurrent-x"], b"", b"", False),
    ],
)
def test_secure_boot(firmware: bool, names: list[str], flag: bytes, shim: bytes, state: bool | None) -> None:
    assert parse.secure_boot_state(firmware, names, flag, shim) is state


def test_locks_that_are_held_and_not_those_that_are_waited_for() -> None:
    text = (
        "1: POSIX  ADVISORY  WRITE 1234 fe:00:5678 0 EOF\n"
        "1: -> POSIX  ADVISORY  WRITE 4321 fe:00:5678 0 EOF\n"
        "2: OFDLCK ADVISORY  READ -1 00:05:1 0 EOF\n"
        "3: FLOCK  ADVISORY  WRITE 99 103:02:42 0 EOF\n"
    )
    assert parse.parse_locks(text) == {5678: [1234], 42: [99]}


@pytest.mark.parametrize(
    ("texts", "on"),
    [
        (['APT::Periodic::Unattended-Upgrade "1";\n'], True),
        (['APT::Periodic::Unattended-Upgrade "0";\n'], False),
        (['APT::Periodic::Unattended-Upgrade "1";\n', 'APT::Periodic::Unattended-Upgrade "0";'], False),
        (['// APT::Periodic::Unattended-Upgrade "1";\n'], False),
        (["apt::periodic::unattended-upgrade always;\n"], True),
        (['APT::Periodic::Unattended-Upgrade "1d";'], True),
        ([], False),
    ],
)
def test_unattended_upgrades(texts: list[str], on: bool) -> None:
    assert parse.parse_apt_periodic(texts) is on


def test_files_that_apt_passes_over() -> None:
    names = [
        "20auto-upgrades",
        "50unattended-upgrades.conf",
        "20auto-upgrades.dpkg-old",
        "20auto-upgrades~",
        ".x",
        "a.b",
    ]
    assert [name for name in names if parse.is_apt_configuration(name)] == names[:2]


def test_kernels_that_were_set_aside() -> None:
    names = ["vmlinuz-6.1.0-50-amd64", "vmlinuz-6.8.0-45-generic.old", "vmlinuz-6.1.0-57-amd64.dpkg-new", "vmlinuz.old"]
    names += ["vmlinuz-6.1.0-57-amd64.dpkg-bak", "vmlinuz-6.1.0-28-amd64~", "vmlinuz-", "initrd.img-6.1.0-50-amd64"]
    assert [parse.kernel_of_image(name) for name in names] == ["6.1.0-50-amd64", *[""] * 7]


def test_packages_that_are_there_held_or_half_there() -> None:
    text = """Package: nvidia-open
Status: hold ok installed
Priority: optional
Version: 590.48.01-1
Description: driver
 Package: in the middle of a description

Package: libc6
Status: install ok installed
Version: 2.36-9+deb12u9

Package: gone
Status: deinstall ok config-files
Version: 1

Package: torn
Status: install reinstreq half-installed
Version: 2
"""
    found = parse.parse_dpkg_status(text)
    assert [(item["name"], item["version"], item["held"], item["whole"]) for item in found] == [
        ("nvidia-open", "590.48.01-1", True, True),
        ("libc6", "2.36-9+deb12u9", False, True),
        ("torn", "2", False, False),
    ]


def test_which_packages_are_the_drivers() -> None:
    ours = ["nvidia-open", "libnvidia-compute-590", "linux-modules-nvidia-580-open-6.8.0-45-generic", "cuda-drivers"]
    ours += ["nvidia-container-toolkit", "libnvidia-container1", "xserver-xorg-video-nvidia-580", "libcuda1"]
    assert [name for name in ours if not parse.is_nvidia_package(name)] == []
    assert [
        name for name in ["libc6", "podman", "linux-image-amd64", "cuda-toolkit-13"] if parse.is_nvidia_package(name)
    ] == []


@pytest.mark.parametrize(
    ("line", "module", "version", "kernel", "state"),
    [
        ("nvidia/595.58.03: added", "nvidia", "595.58.03", "", "added"),
        (
            "nvidia/595.58.03, 6.8.0-31-generic, x86_64: installed",
            "nvidia",
            "595.58.03",
            "6.8.0-31-generic",
            "installed",
        ),
        (
            "nvidia, 470.82.01, 5.4.0-91-generic, x86_64: installed",
            "nvidia",
            "470.82.01",
            "5.4.0-91-generic",
            "installed",
        ),
        ("nvidia, 470.82.01: added", "nvidia", "470.82.01", "", "added"),
        ("nvidia-srv/580.95.05, 6.8.0-45-generic: built", "nvidia-srv", "580.95.05", "6.8.0-45-generic", "built"),
        ("nvidia, 470.82.01, 5.4.0-91-generic: installed", "nvidia", "470.82.01", "5.4.0-91-generic", "installed"),
        (
            "nvidia-current-open/550.163.01, 6.1.0-28-amd64, x86_64: installed (WARNING! Diff between both)",
            "nvidia-current-open",
            "550.163.01",
            "6.1.0-28-amd64",
            "installed",
        ),
        ("nvidia/590.48.01, 6.12.9+deb13-amd64, x86_64: built", "nvidia", "590.48.01", "6.12.9+deb13-amd64", "built"),
    ],
)
def test_dkms_of_both_formats(line: str, module: str, version: str, kernel: str, state: str) -> None:
    assert parse.parse_dkms_status(f"a line of something else\n{line}\n") == [
        {"module": module, "version": version, "kernel": kernel, "state": state}
    ]


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("nvidia", True),
        ("nvidia-open", True),
        ("nvidia-srv", True),
        ("nvidia-srv-open", True),
        ("nvidia-current", True),
        ("nvidia-current-open", True),
        ("nvidia-fs", False),
        ("nvidia_fs", False),
        ("nvidia-peermem", False),
        ("zfs", False),
    ],
)
def test_the_drivers_names_for_dkms(name: str, driver: bool) -> None:
    assert parse.is_driver_module(name) is driver


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("podman version 4.3.1", "4.3.1"),
        ("podman version 5.4.0-rc1", "5.4.0-rc1"),
        ("NVIDIA Container Toolkit CLI version 1.18.2\ncommit: 10.20", "1.18.2"),
        ("no version here", ""),
        ("", ""),
    ],
)
def test_versions_of_commands(text: str, version: str) -> None:
    assert parse.find_version(text) == version


def test_versions_of_the_drivers_libraries() -> None:
    names = ["libnvidia-ml.so", "libnvidia-ml.so.1", "libnvidia-ml.so.580.173", "libnvidia-ml.so.580.95.05"]
    assert parse.library_version(names) == "580.173"
    assert parse.library_version(names[:2]) == ""
    mismatch = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"
    assert parse.nvidia_smi_version(mismatch) == "580.173"
    table = "| NVIDIA-SMI 590.48.01              Driver Version: 590.48.01      CUDA Version: 13.1     |"
    assert parse.nvidia_smi_version(table) == "590.48.01"


@pytest.mark.parametrize(
    ("speeds", "widths", "link"),
    [
        (("2.5 GT/s PCIe", "32.0 GT/s PCIe"), ("16", "16"), (2.5, 16, 32.0, 16)),
        (("16.0 GT/s PCIe\n", "32.0 GT/s PCIe\n"), ("8\n", "16\n"), (16.0, 8, 32.0, 16)),
        # virtual machines
        (("Unknown", "32.0 GT/s PCIe"), ("0", "16"), None),
        (("Unknown speed", "Unknown speed"), ("255", "255"), None),
        (("", ""), ("", ""), None),
    ],
)
def test_links(speeds: tuple[str, str], widths: tuple[str, str], link: tuple[float, int, float, int] | None) -> None:
    found = parse.parse_link(speeds, widths)
    assert (tuple(found.values()) if found else None) == link


def region(start: int, size: int, flags: int = 0x14220C) -> str:
    return f"0x{start:016x} 0x{start + size - 1 if size else 0:016x} 0x{flags:016x}\n"


def test_bar1_is_the_largest_region_wherever_it_is() -> None:
    mib, gib = 2**20, 2**30
    none = region(0, 0, 0)
    workstation = region(0x84000000, 64 * mib, 0x40200) + region(0x4000000000, 128 * gib) + none
    workstation += region(0x6000000000, 32 * mib) + none * 9
    assert parse.parse_bar1(workstation) == 128 * gib
    # a first region that is 64 bits wide takes two lines
    server = region(0x2000000000, 16 * mib) + none + region(0x4000000000, 256 * gib) + none
    assert parse.parse_bar1(server + region(0x8000000000, 32 * mib) + none * 8) == 256 * gib
    # regions of virtual functions follow after the sixth line
    assert (
        parse.parse_bar1(region(0x84000000, 16 * mib) + region(0, 256 * mib) + none * 4 + region(0, 512 * gib))
        == 256 * mib
    )
    assert parse.parse_bar1(region(0x84000000, 16 * mib) + region(0, 128 * gib, 0x2014220C) + none * 4) == 0
    assert parse.parse_bar1(none * 13) is None
    assert parse.parse_bar1("") is None
    assert parse.parse_bar1("nonsense\n") is None


@pytest.mark.parametrize(
    ("bits", "redirects"),
    [
        ("SrcValid", False),
        ("SrcValid,UpstreamFwd", False),
        ("SrcValid,ReqRedir,CmpltRedir,UpstreamFwd", True),
        ("ReqRedir", True),
        ("CmpltRedir", True),
        ("cut", None),
    ],
)
def test_acs(bits: str, redirects: bool | None) -> None:
    assert parse.parse_acs_redirect(host_fixtures.acs_config(bits)) is redirects


def test_a_port_without_the_capability_redirects_nothing() -> None:
    assert parse.parse_acs_redirect(bytes(4096)) is False
    # conventional PCI has no extended space
    assert parse.parse_acs_redirect(bytes(256)) is False
    # a capability that points at itself
    loop = bytearray(4096)
    struct.pack_into("<I", loop, 0x100, 0x0001 | 0x100 << 20)
    assert parse.parse_acs_redirect(bytes(loop)) is False
    # cut in the middle of the capability
    assert parse.parse_acs_redirect(host_fixtures.acs_config("ReqRedir")[:0x14C]) is None


@given(st.binary(max_size=4096))
def test_any_configuration_space(config: bytes) -> None:
    assert parse.parse_acs_redirect(config) in (True, False, None)


def test_ports_above_a_card() -> None:
    path = "/sys/devices/pci0000:30/0000:30:01.0/0000:31:00.0/0000:32:04.0/0000:38:00.0"
    assert parse.ports_above(path) == ["0000:30:01.0", "0000:31:00.0", "0000:32:04.0"]
    assert parse.ports_above("/sys/devices/pci0000:00/0000:00:06.0") == []


@pytest.mark.parametrize(
    ("devices", "types", "cmdline", "mode"),
    [
        ([], [], "quiet", "off"),
        (["dmar0"], ["DMA\n", "DMA\n"], "", "translated"),
        (["ivhd0"], ["DMA-FQ\n"], "", "translated"),
        (["ivhd0"], ["identity\n", "identity\n"], "iommu=pt", "passthrough"),
        # one translated card among others
        (["ivhd0"], ["identity\n", "DMA-FQ\n"], "iommu=pt", "translated"),
        # a kernel that does not show the type
        (["dmar0"], ["", ""], "intel_iommu=on iommu=pt", "passthrough"),
        (["dmar0"], [], "intel_iommu=on", "translated"),
        (["dmar0"], [], "", None),
        (["ivhd0"], ["blocked\n"], "", None),
    ],
)
def test_iommu(devices: list[str], types: list[str], cmdline: str, mode: str | None) -> None:
    assert parse.iommu_mode(devices, types, cmdline) == mode


def test_the_runtimes_mode_is_that_of_its_own_section() -> None:
    text = '[nvidia-container-cli]\nmode = "wrong"\n\n[nvidia-container-runtime]\n#mode = "auto"\nmode = "legacy"\n'
    text += '[nvidia-container-runtime.modes.csv]\nmode = "other"\n'
    assert parse.parse_runtime_mode(text) == "legacy"
    assert parse.parse_runtime_mode("") == ""
    assert parse.parse_runtime_mode("[nvidia-container-runtime]\nmode = 'cdi'\n") == "cdi"


def test_switches() -> None:
    assert [parse.parse_switch(text) for text in ("0\n", "1\n", "2\n", "", "on")] == [False, True, True, None, None]
    assert [parse.parse_yes(text) for text in ("yes\n", "no\n", "")] == [True, False, None]


@given(TEXT)
def test_any_text_is_read_without_a_traceback(text: str) -> None:
    for function in (
        parse.parse_os_release,
        parse.kernel_order,
        parse.parse_switch,
        parse.parse_yes,
        parse.parse_locks,
        parse.parse_dpkg_status,
        parse.is_nvidia_package,
        parse.parse_dkms_status,
        parse.parse_modules,
        parse.find_version,
        parse.nvidia_smi_version,
        parse.parse_bar1,
        parse.ports_above,
        parse.parse_runtime_mode,
        parse.is_apt_configuration,
        parse.kernel_of_image,
    ):
        function(text)
    parse.parse_apt_periodic([text])
    parse.library_version([text])
    parse.parse_link((text, text), (text, text))
    parse.iommu_mode([text], [text], text)
    parse.parse_efi_flag(text.encode())
    assert parse.sort_kernels({text, "6.1.0-28-amd64"})


DKMS_LIKE = st.lists(
    st.sampled_from(["nvidia", "/", ", ", ":", " ", "added", "installed", "6.8.0-45-generic", "x86_64"]), max_size=12
)


@given(DKMS_LIKE.map("".join))
def test_whatever_looks_like_dkms(text: str) -> None:
    for item in parse.parse_dkms_status(text):
        assert item["state"] in ("added", "built", "installed", "broken")
        assert item["module"] and item["version"]


# --- the module


def test_reading_the_recorded_good_machine(tmp_path: Path) -> None:
    host = host_fixtures.read_host(host_fixtures.lay_out("good-8x", tmp_path))
    assert host["kernel"]["release"] == "6.8.0-45-generic"
    assert host["kernel"]["installed"] == host["kernel"]["headers"] == ["6.8.0-45-generic"]
    assert (host["secure_boot"], host["iommu"], host["acs_redirect"]) == (False, "passthrough", [])
    assert len(host["gpus"]) == 8
    assert host["gpus"][2] == {
        "pci_address": "0000:41:00.0",
        "device_id": "0x2bb5",
        "bar1_bytes": 128 * 2**30,
        "link": {"speed_gts": 32.0, "width": 16, "max_speed_gts": 32.0, "max_width": 16},
        "driver": "nvidia",
    }
    assert (host["nvidia"]["loaded"], host["nvidia"]["userspace"]) == ("590.48.01", "590.48.01")
    assert host["nvidia"]["held"] == ["libnvidia-compute", "nvidia-container-toolkit", "nvidia-dkms-open"]
    assert (host["broken_packages"], host["unattended_upgrades"]) == ([], True)


def test_headers_alone_are_no_kernel(tmp_path: Path) -> None:
    for path in ("lib/modules/6.1.0-28-amd64/build/Makefile", "lib/modules/6.1.0-25-amd64/modules.builtin"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("")
    (tmp_path / "boot").mkdir()
    (tmp_path / "boot/vmlinuz-6.1.0-31-amd64").write_text("")
    kernel = host_state.read_kernel(tmp_path)
    assert kernel["installed"] == ["6.1.0-25-amd64", "6.1.0-31-amd64"]
    assert kernel["headers"] == ["6.1.0-28-amd64"]


def test_libraries_that_are_on_disk_and_not_in_use(tmp_path: Path) -> None:
    """An upgrade that was interrupted leaves both; the link says which one programs get."""
    libraries = tmp_path / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    for version in ("580.95.05", "590.48.01"):
        (libraries / f"libnvidia-ml.so.{version}").write_text("")
    (libraries / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.95.05")
    assert host_state.read_nvidia(tmp_path, lambda _: "", [], "")["userspace"] == "580.95.05"
    (libraries / "libnvidia-ml.so.1").unlink()
    assert host_state.read_nvidia(tmp_path, lambda _: "", [], "")["userspace"] == "590.48.01"


def test_apt_itself_is_asked_for_unattended_upgrades(tmp_path: Path) -> None:
    """Nested blocks, and a setting that a later file clears, are what only apt knows."""
    parts = tmp_path / "etc/apt/apt.conf.d"
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(
        "Package: unattended-upgrades\nStatus: install ok installed\nVersion: 2.9\n"
    )
    parts.mkdir(parents=True)
    (parts / "20auto-upgrades").write_text('APT { Periodic { Unattended-Upgrade "1"; }; };\n')
    key = "APT::Periodic::Unattended-Upgrade"
    dump = {"set": f'APT::Architecture "amd64";\n{key} "1";\n', "cleared": 'APT::Architecture "amd64";\n'}

    def asked(answer: str) -> bool:
        def ask(argv: list[str]) -> str:
            return answer if argv == ["apt-config", "dump", "APT::Architecture", key] else ""

        return bool(host_state.read_host(tmp_path, ask, {})["unattended_upgrades"])

    assert asked(dump["set"])
    assert not asked(dump["cleared"])
    # Without the command its files are read, but for those that it would pass over.
    (parts / "20auto-upgrades").write_text(f'{key} "1";\n')
    (parts / "20auto-upgrades.dpkg-old").write_text(f'{key} "0";\n')
    assert asked("")


def test_a_lock_is_found_where_var_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "data/var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var").symlink_to("data/var")
    file = tmp_path / "data/var/lib/dpkg/lock-frontend"
    file.write_text("")
    host_fixtures.lock(tmp_path, "/var/lib/dpkg/lock-frontend", 4711, "apt-get install")
    (tmp_path / "proc/4711/fd/4").unlink()
    (tmp_path / "proc/4711/fd/4").symlink_to(file)
    assert host_state.read_apt_lock(tmp_path) == {"pid": 4711, "command": "apt-get install"}


def test_the_module_of_debians_packages_has_another_name(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.1.0-50-amd64\n")
    found = {"nvidia-current": "NVIDIA\n"}

    def ask(argv: list[str]) -> str:
        return found.get(argv[-1], "") if argv[:3] == ["modinfo", "-k", "6.1.0-50-amd64"] else ""

    assert host_state.read_nvidia(tmp_path, ask, [], "")["module_license"] == "NVIDIA"
    # The one that would be loaded comes first; a module of two files is told once.
    found["nvidia"] = "Dual MIT/GPL\nDual MIT/GPL\n"
    assert host_state.read_nvidia(tmp_path, ask, [], "")["module_license"] == "Dual MIT/GPL"


def test_an_empty_machine_is_no_traceback(tmp_path: Path) -> None:
    host = host_state.read_host(tmp_path, lambda _: "", {})
    assert host["secure_boot"] is False
    assert (host["gpus"], host["iommu"], host["apt_lock"], host["podman"]) == ([], "off", None, "")
    assert host["nvidia"]["loaded"] == ""


@given(
    content=st.binary(max_size=200),
    path=st.sampled_from(["proc/locks", "proc/cmdline", "etc/os-release", "var/lib/dpkg/status"]),
)
def test_a_file_of_any_bytes_is_no_traceback(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, path: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes(content)
    assert host_state.read_host(root, lambda _: "", {})["boot_id"] == ""


def test_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    told = host_state.read_space(str(tmp_path / "a" / "b"), True)
    there = host_state.read_space(str(tmp_path), False)
    assert told and there
    assert told["total_bytes"] == there["total_bytes"]
    assert told["device"] == there["device"] == tmp_path.stat().st_dev
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(12345))
    used = host_state.read_space(str(tmp_path / "a"), True)
    assert used and used["used_bytes"] == 12345


def test_space_of_a_link_to_another_disk_whose_folder_is_not_there_yet(tmp_path: Path) -> None:
    other = Path("/proc")
    (tmp_path / "link").symlink_to(other / "no-such-folder")
    told = host_state.read_space(str(tmp_path / "link" / "storage"), True)
    assert told
    assert told["device"] == other.stat().st_dev != tmp_path.stat().st_dev


def test_a_file_that_goes_away_while_it_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stays").write_bytes(bytes(100))
    (tmp_path / "goes").write_bytes(bytes(7))
    lstat = os.lstat

    def vanish(path: str) -> os.stat_result:
        if path.endswith("goes"):
            raise FileNotFoundError
        return lstat(path)

    monkeypatch.setattr(os, "lstat", vanish)
    told = host_state.read_space(str(tmp_path), True)
    assert told and told["used_bytes"] == 100


def test_commands_that_are_not_there_fail_or_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert host_state.ask_command(["no-such-command-here"]) == ""
    assert host_state.ask_command([sys.executable, "-c", "print('words'); raise SystemExit(3)"]) == "words\n"
    monkeypatch.setattr(host_state, "COMMAND_SECONDS", 0.2)
    assert host_state.ask_command([sys.executable, "-c", "import time; time.sleep(60)"]) == ""


@pytest.mark.parametrize("check", [False, True])
def test_on_this_machine(check: bool, tmp_path: Path) -> None:
    answer: dict[str, Any] = run_module(host_state.main, {"paths": [str(tmp_path), "/no/such/folder"]}, check)
    assert answer["changed"] is False
    host = answer["host"]
    assert host["kernel"]["release"] == os.uname().release
    assert re.fullmatch(r"[0-9a-f-]{36}", host["boot_id"])
    assert set(host["space"]) == {str(tmp_path), "/no/such/folder"}
    assert 0 < host["space"][str(tmp_path)]["free_bytes"] <= host["space"][str(tmp_path)]["total_bytes"]
    assert host["os"]["id"]


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("MemTotal: 9 kB\nMemFree: 2 kB\nMemAvailable:   7 kB\n", 7 * 1024),
        ("Node 1 MemFree: 2 kB\nNode 1 FilePages: 10 kB\nNode 1 Shmem: 4 kB\nNode 1 SReclaimable: 1 kB\n", 9 * 1024),
        # an offload in /dev/shm is no cache that makes way
        ("Node 1 MemFree: 2 kB\nNode 1 FilePages: 3 kB\nNode 1 Shmem: 4 kB\n", 2 * 1024),
        ("Node 1 MemTotal: 9 kB\n", None),
        ("", None),
    ],
)
def test_free_memory(text: str, free: int | None) -> None:
    assert parse.parse_free_memory(text) == free
