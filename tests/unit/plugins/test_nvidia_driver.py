"""What the role nvidia_driver decides: versions, kernels, builds and their logs, sources, limits; its two scripts."""

from __future__ import annotations

import base64
import importlib.machinery
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.host_state import parse_dkms_status
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_driver import (
    certificate_sha1,
    choose_kernels,
    choose_loading,
    choose_packages,
    choose_version,
    chosen_versions,
    compare_versions,
    driver_builds,
    explain_build,
    explain_packages,
    find_host_problems,
    find_limit_problems,
    find_log_paths,
    find_lost_cards,
    find_mirror,
    find_missing_builds,
    find_proprietary,
    find_source_problems,
    installed_version,
    is_enrolled,
    judge_version,
    merge_options,
    name_headers,
    options_differ,
    packages_to_hold,
    parse_installed,
    parse_madison,
    plan_unloading,
    shorten_log,
    upstream_version,
    version_order,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins import host_fixtures

ROLE = Path(__file__).parents[3] / "roles/nvidia_driver"
VARS = yaml.safe_load((ROLE / "vars/main.yml").read_text())
KNOWN = VARS["_nvidia_driver_known"]
KERNEL = "6.1.0-50-amd64"
# As apt-cache prints it on Debian 12 with NVIDIA's repository for it.
MADISON = """\
nvidia-driver-cuda | 595.71.05-1 | https://mirror.example.com/cuda/repos/debian12/x86_64  Packages
nvidia-driver-cuda | 590.48.01-1 | https://mirror.example.com/cuda/repos/debian12/x86_64  Packages
nvidia-kernel-open-dkms | 595.71.05-1 | https://mirror.example.com/cuda/repos/debian12/x86_64  Packages
nvidia-kernel-open-dkms | 590.48.01-1 | https://mirror.example.com/cuda/repos/debian12/x86_64  Packages
linux-headers-6.1.0-50-amd64 |  6.1.176-1 | http://mirror.example.com/debian bookworm/main amd64 Packages
"""
NAMES = ["nvidia-kernel-open-dkms", "nvidia-driver-cuda"]
# The end of the log of Debian's 535.261.03 on its kernel 6.1.0-57, compiler calls cut.
MAKE_LOG = """\
#define NV_DRM_ALPHA_BLENDING_AVAILABLE
// Kernel version:             "6.1.0-57-amd64"
   gcc-12 -Wp,-MMD,/var/lib/dkms/nvidia-current-open/535.261.03/build/nvidia/.nv-pci.o.d -Werror=date-time -c nv-pci.c
/var/lib/dkms/nvidia-current-open/535.261.03/build/nvidia/nv-pci.c: In function 'nv_resize_pcie_bars':
/var/lib/dkms/nvidia-current-open/535.261.03/build/nvidia/nv-pci.c:223:9: error: too few arguments to function \
'pci_resize_resource'
  223 |     r = pci_resize_resource(pci_dev, NV_GPU_BAR1, requested_size);
      |         ^~~~~~~~~~~~~~~~~~~
make[3]: *** [/usr/src/linux-headers-6.1.0-57-common/scripts/Makefile.build:255: nv-pci.o] Error 1
make[3]: *** Waiting for unfinished jobs....
   { echo ; echo 'nv.o: $(wildcard ./tools/objtool/objtool)' ; } >> /var/lib/dkms/nvidia/.nv.o.cmd
  if nm nv.o 2>/dev/null | grep -q __ksymtab; then  gcc-12 -E -D__GENKSYMS__ -Werror=date-time nv.c; fi
make[2]: *** [/usr/src/linux-headers-6.1.0-57-common/Makefile:2065: build] Error 2
make: *** [Makefile:137: modules] Error 2
"""
DKMS_FAILED = """\
Building initial module for 6.1.0-57-amd64
Error! Bad return status for module build on kernel: 6.1.0-57-amd64 (x86_64)
Consult /var/lib/dkms/nvidia-current-open/535.261.03/build/make.log for more information.
dpkg: error processing package nvidia-open-kernel-dkms (--configure):
"""
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBkjCCATegAwIBAgIULQSquZF6pa+DV53xSfl0Ma3eT6wwCgYIKoZIzj0EAwIw
HjEcMBoGA1UEAwwTVGVzdCBtb2R1bGUgc2lnbmluZzAeFw0yNjExMzAxNzIwMzRa
Fw0zNjExMjcxNzIwMzRaMB4xHDAaBgNVBAMME1Rlc3QgbW9kdWxlIHNpZ25pbmcw
WTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARs/nkmgoDp8l4wbTO7S3c03GDOCc8P
nubvcmnaZzBN63QL+t8ZGNj6LNti5D4pONcOy5XlOAftgAAANr+eW7W2o1MwUTAd
BgNVHQ4EFgQUQTSM90fWUnv2FL9CPCYxpyhsN30wHwYDVR0jBBgwFoAUQTSM90fW
Unv2FL9CPCYxpyhsN30wDwYDVR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNJADBG
AiEA+gJTavJweaRKaSUigimFMlbddVAM+46D1I9uOv3l2o0CIQC40Oe8mhYPUBI1
kBKw3S+kUkrV1FED+FLg4uJKxblgaA==
-----END CERTIFICATE-----
"""
# What openssl x509 -fingerprint -sha1 says of it.
CERTIFICATE_SHA1 = "2f:59:28:36:ed:80:af:03:08:e0:7e:df:8c:bb:64:7a:8d:9e:30:82"


def host(**changes: Any) -> dict[str, Any]:
    """A bare Debian 12 server with one card; dotted names change a field below."""
    state: dict[str, Any] = {
        "os": {"id": "debian", "version_id": "12", "codename": "bookworm", "name": "Debian GNU/Linux 12 (bookworm)"},
        "kernel": {"release": KERNEL, "installed": [KERNEL], "headers": []},
        "container": False,
        "secure_boot": False,
        "space": {folder: {"free_bytes": 9 * 2**30, "device": 1} for folder in ("/usr", "/var")},
        "gpus": [{"pci_address": "0000:38:00.0", "device_id": "0x2bb5", "driver": ""}],
        "nvidia": {
            "loaded": "",
            "open": None,
            "userspace": "",
            "packages": {},
            "nouveau_loaded": False,
            "dkms": [],
        },
    }
    for path, value in changes.items():
        target = state
        *folders, name = path.split("__")
        for folder in folders:
            target = target[folder]
        target[name] = value
    return state


def wanted(**changes: Any) -> dict[str, Any]:
    return {
        "version": "590.48.01",
        "source": "cuda_repository",
        "known": KNOWN,
        "allow_bad": False,
        "supported": VARS["_nvidia_driver_supported"],
        "blackwell": VARS["_nvidia_driver_blackwell"],
        "mok": False,
        "enrolled": None,
        "space_gib": {"/usr": 2, "/var": 2},
        **changes,
    }


def trial(**changes: Any) -> dict[str, Any]:
    fine = {"rc": 0, "text": ""}
    return {"update": fine, "madison": MADISON, "simulate": fine, **changes}


# --- versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "driver"),
    [
        ("590.48.01-1", "590.48.01"),
        ("590.48.01-0ubuntu0.24.04.5", "590.48.01"),
        ("535.171.04-1~deb12u1", "535.171.04"),
        ("1:550.54.14-2", "550.54.14"),
        ("575.57.08", "575.57.08"),
        ("20220217+3~deb12u1", ""),
        ("", ""),
        ("latest", ""),
    ],
)
def test_a_package_version_tells_the_driver_version(package: str, driver: str) -> None:
    assert upstream_version(package) == driver


def test_versions_are_sorted_as_numbers() -> None:
    versions = ["590.48.01", "595.71.05", "580.126.09", "580.95.05"]
    assert sorted(versions, key=version_order) == ["580.95.05", "580.126.09", "590.48.01", "595.71.05"]


def test_what_apt_offers() -> None:
    offers = parse_madison(MADISON)
    assert offers["nvidia-driver-cuda"] == ["595.71.05-1", "590.48.01-1"]
    assert offers["linux-headers-6.1.0-50-amd64"] == ["6.1.176-1"]


def test_the_exact_version_is_chosen_and_no_neighbour() -> None:
    offered = ["595.71.05-1", "590.48.01-1", "590.44.01-1"]
    assert choose_version(offered, "590.48.01") == "590.48.01-1"
    assert choose_version(offered, "590.48.01-1") == "590.48.01-1"
    assert choose_version(offered, "590.48") == ""
    assert choose_version(offered, "") == "595.71.05-1"
    assert choose_version([], "") == ""


def test_packages_get_the_version_that_is_offered() -> None:
    assert chosen_versions(trial(), NAMES, "590.48.01") == dict.fromkeys(NAMES, "590.48.01-1")


@given(st.text())
def test_any_text_in_place_of_a_version_is_taken(text: str) -> None:
    upstream_version(text)
    version_order(text)
    for versions in parse_madison(text).values():
        assert all(versions)


# --- kernels and headers -------------------------------------------------------------------------------------


def test_the_running_and_the_newest_kernel_get_the_module() -> None:
    # DRV-02: after the next reboot a module for the running kernel alone would be gone
    installed = ["6.1.0-9-amd64", "6.1.0-28-amd64", "6.1.0-50-amd64"]
    assert choose_kernels([], "6.1.0-28-amd64", installed) == ["6.1.0-28-amd64", "6.1.0-50-amd64"]
    assert choose_kernels([], "6.1.0-50-amd64", installed) == ["6.1.0-50-amd64"]
    assert choose_kernels([], "6.1.0-28-amd64", []) == ["6.1.0-28-amd64"]


def test_kernels_that_are_asked_for_are_all() -> None:
    assert choose_kernels(["6.1.0-50-amd64", "6.1.0-9-amd64"], "6.8.0-31-generic", ["6.8.0-31-generic"]) == [
        "6.1.0-9-amd64",
        "6.1.0-50-amd64",
    ]


def test_headers_are_named_after_the_kernel() -> None:
    assert name_headers(["6.8.0-31-generic"]) == ["linux-headers-6.8.0-31-generic"]


def test_missing_headers_name_kernel_and_package() -> None:
    problems = find_source_problems(trial(), NAMES, ["linux-headers-6.18.44-custom"], "590.48.01", {})
    assert len(problems) == 1
    assert "6.18.44-custom" in problems[0]
    assert "linux-headers-6.18.44-custom" in problems[0]
    assert "nvidia_driver_kernels" in problems[0]


def test_headers_that_are_installed_need_no_source() -> None:
    headers = ["linux-headers-6.18.44-custom"]
    assert find_source_problems(trial(), NAMES, headers, "590.48.01", {headers[0]: "1"}) == []


# --- DKMS ----------------------------------------------------------------------------------------------------


def test_added_is_not_installed() -> None:
    # DRV-02: the package is there, and no module
    dkms = parse_dkms_status("nvidia/595.58.03: added\n")
    assert find_missing_builds(dkms, "595.58.03", [KERNEL]) == [
        {"kernel": KERNEL, "module": "nvidia", "state": "added"}
    ]


def test_installed_for_another_kernel_is_not_enough() -> None:
    dkms = parse_dkms_status("nvidia/595.58.03, 6.8.0-31-generic, x86_64: installed\n")
    kernels = ["6.8.0-31-generic", "6.8.0-40-generic"]
    assert [item["kernel"] for item in find_missing_builds(dkms, "595.58.03", kernels)] == ["6.8.0-40-generic"]
    assert find_missing_builds(dkms, "595.58.03", kernels[:1]) == []


def test_another_version_is_not_enough() -> None:
    dkms = parse_dkms_status(f"nvidia/580.95.05, {KERNEL}, x86_64: installed\n")
    assert find_missing_builds(dkms, "590.48.01", [KERNEL]) == [{"kernel": KERNEL, "module": "", "state": "unknown"}]


def test_debians_name_of_the_module_is_known() -> None:
    dkms = parse_dkms_status(
        f"nvidia-current-open/535.261.03, {KERNEL}, x86_64: installed\nzfs/2.1, {KERNEL}: installed"
    )
    assert find_missing_builds(dkms, "535.261.03", [KERNEL]) == []
    assert [build["kernel"] for build in driver_builds(dkms, "535.261.03")] == [KERNEL]


def test_the_log_is_told_by_its_errors_without_compiler_calls() -> None:
    lines = shorten_log(MAKE_LOG)
    text = "\n".join(lines)
    assert "too few arguments to function 'pci_resize_resource'" in text
    assert lines[-1] == "make: *** [Makefile:137: modules] Error 2"
    assert "-Werror=date-time" not in text
    assert "objtool" not in text


def test_a_long_log_is_short() -> None:
    log = "\n".join(f"x.c:{number}:1: error: {'long ' * 300}" for number in range(500))
    lines = shorten_log(log, 12)
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 200


def test_the_failure_names_kernel_state_log_and_remedy() -> None:
    missing = [{"kernel": "6.1.0-57-amd64", "module": "nvidia-current-open", "state": "added"}]
    text = explain_build(missing, "535.261.03", MAKE_LOG, DKMS_FAILED)
    for part in (
        "535.261.03",
        "6.1.0-57-amd64",
        "`added`",
        "`installed`",
        "too few arguments",
        "nvidia_driver_version",
    ):
        assert part in text
    assert "not among those asked for" not in text


def test_a_kernel_that_nobody_asked_for_is_told_as_such() -> None:
    missing = [{"kernel": KERNEL, "module": "nvidia-current-open", "state": "added"}]
    text = explain_build(missing, "535.261.03", MAKE_LOG, DKMS_FAILED)
    assert "6.1.0-57-amd64, is not among those asked for" in text


def test_a_failure_without_a_log_shows_what_dkms_printed() -> None:
    # as DKMS 3 says it
    said = (
        "Error! Your kernel headers for kernel 6.1.0-57-amd64 cannot be found at /lib/modules/6.1.0-57-amd64/build or "
        "/lib/modules/6.1.0-57-amd64/source.\nPlease install the linux-headers-6.1.0-57-amd64 package.\n"
    )
    missing = [{"kernel": "6.1.0-57-amd64", "module": "nvidia", "state": "added"}]
    assert "Your kernel headers for kernel 6.1.0-57-amd64 cannot be found" in explain_build(missing, "535.1", "", said)


def test_log_paths_are_found_once() -> None:
    assert find_log_paths(DKMS_FAILED * 2) == ["/var/lib/dkms/nvidia-current-open/535.261.03/build/make.log"]


@given(st.text(), st.integers(min_value=1, max_value=40))
def test_any_log_is_shortened(text: str, lines: int) -> None:
    assert len(shorten_log(text, lines)) <= lines
    explain_build([], "590.48.01", text, text)
    find_log_paths(text)


# What apt and dpkg print where a disk is full.
DISK_FULL = """\
Unpacking nvidia-smi (535.261.03-1) ...
dpkg: error processing archive /var/cache/apt/archives/nvidia-smi_535.261.03-1_amd64.deb (--unpack):
 cannot copy extracted data for './usr/bin/nvidia-smi' to '/usr/bin/nvidia-smi.dpkg-new': failed to write (No space \
left on device)
Errors were encountered while processing:
 /var/cache/apt/archives/nvidia-smi_535.261.03-1_amd64.deb
E: Sub-process /usr/bin/dpkg returned an error code (1)
"""


def test_packages_that_were_not_installed_are_told_in_a_few_lines() -> None:
    lines = explain_packages(DISK_FULL, None).splitlines()
    assert lines[0] == "The packages were not installed:"
    assert "failed to write (No space left on device)" in lines[2]
    assert lines[3] == "  E: Sub-process /usr/bin/dpkg returned an error code (1)"
    assert lines[4] == "Free space on that disk. Run this again, it continues where it stopped."
    assert len(lines) == 5


def test_who_holds_apts_lock_is_told() -> None:
    said = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 4711 (unattended-upgr)\n"
    text = explain_packages(said, {"pid": 4711, "command": "/usr/bin/python3 /usr/bin/unattended-upgrade"})
    assert "\nProcess 4711 (/usr/bin/python3 /usr/bin/unattended-upgrade) holds apt's lock" in text
    assert "(unknown)" in explain_packages(said, {"pid": 4711, "command": ""})
    assert "holds apt's lock" not in explain_packages(said, None)
    assert "(no output)" in explain_packages("", None)


@given(st.text())
def test_any_output_of_apt_is_told(said: str) -> None:
    assert len(explain_packages(said, None).splitlines()) <= 8 or any(mark in said for mark in "\x1c\x1d\x1e\x85\u2028")


# --- what is refused -----------------------------------------------------------------------------------------


def test_the_default_on_a_bare_server_is_not_refused() -> None:
    assert find_host_problems(host(), wanted()) == []


@pytest.mark.parametrize("system", [("debian", "11"), ("ubuntu", "22.04"), ("rocky", "9.4")])
def test_another_distribution_is_refused(system: tuple[str, str]) -> None:
    problems = find_host_problems(host(os={"id": system[0], "version_id": system[1], "name": "Other 1"}), wanted())
    assert len(problems) == 1
    assert "Other 1" in problems[0]
    assert "debian 12, debian 13, ubuntu 24.04" in problems[0]


def test_a_known_bad_version_is_refused_with_its_source() -> None:
    problems = find_host_problems(host(), wanted(version="595.71.05"))
    assert len(problems) == 1
    assert "Xid 8" in problems[0]
    assert "open-gpu-kernel-modules/issues/1159" in problems[0]
    assert find_host_problems(host(), wanted(version="595.71.05", allow_bad=True)) == []


def test_what_is_bad_as_proprietary_module_only_is_not_refused_as_open_one() -> None:
    entry = judge_version("580.126.09", "proprietary", KNOWN)
    assert entry is not None
    assert entry["verdict"] == "bad"
    assert find_host_problems(host(), wanted(version="580.126.09")) == []


def test_the_default_version_is_known_to_be_good() -> None:
    default = yaml.safe_load((ROLE / "defaults/main.yml").read_text())["nvidia_driver_version"]
    entry = judge_version(default, "open", KNOWN)
    assert default == "590.48.01"
    assert entry is not None
    assert entry["verdict"] == "good"


def test_a_driver_before_blackwell_is_refused_where_there_is_such_a_card() -> None:
    problems = find_host_problems(host(), wanted(version="550.163.01"))
    assert len(problems) == 1
    assert "RTX PRO 6000 Blackwell Server Edition" in problems[0]
    assert find_host_problems(host(gpus=[]), wanted(version="550.163.01")) == []


def test_a_full_disk_is_refused_before_a_package_is_unpacked() -> None:
    full = {"/usr": {"free_bytes": 3 * 2**30, "device": 1}, "/var": {"free_bytes": 3 * 2**30, "device": 1}}
    (problem,) = find_host_problems(host(space=full), wanted())
    assert "/usr and /var have 3.0 GiB free" in problem
    assert "free 1.0 GiB" in problem
    # On disks of their own each has enough, and what nobody can tell is no problem.
    full["/var"]["device"] = 2
    assert find_host_problems(host(space=full), wanted()) == []
    assert find_host_problems(host(space={}), wanted()) == []
    # A driver that is there takes no more room.
    assert find_host_problems(host(space={"/usr": {"free_bytes": 0, "device": 1}}), wanted(space_gib={})) == []


def test_secure_boot_without_keys_is_refused() -> None:
    # DRV-16
    problems = find_host_problems(host(secure_boot=True), wanted())
    assert len(problems) == 1
    assert "nvidia_driver_mok_key" in problems[0]


def test_secure_boot_with_a_certificate_that_is_not_enrolled_is_refused() -> None:
    problems = find_host_problems(host(secure_boot=True), wanted(mok=True, enrolled=False))
    assert len(problems) == 1
    assert "mokutil --import" in problems[0]
    assert "mokutil is not installed" in find_host_problems(host(secure_boot=True), wanted(mok=True))[0]
    assert find_host_problems(host(secure_boot=True), wanted(mok=True, enrolled=True)) == []


def test_a_proprietary_module_is_refused_with_the_packages_to_remove() -> None:
    # DRV-01
    state = host(
        nvidia__loaded="580.126.09",
        nvidia__open=False,
        nvidia__packages={"nvidia-kernel-dkms": "580.126.09-1", "cuda-drivers": "580.126.09-1", "nvidia-smi": "1"},
    )
    problems = find_host_problems(state, wanted())
    assert len(problems) == 1
    assert "580.126.09" in problems[0]
    assert "cuda-drivers, nvidia-kernel-dkms" in problems[0]


def test_a_proprietary_module_from_the_installer_is_refused() -> None:
    problems = find_host_problems(host(nvidia__loaded="580.126.09", nvidia__open=False), wanted())
    assert len(problems) == 1
    assert "nvidia-uninstall" in problems[0]


@pytest.mark.parametrize(
    "name", ["nvidia-kernel-open-dkms", "nvidia-open-kernel-dkms", "nvidia-dkms-590-open", "nvidia-dkms-open"]
)
def test_open_packages_are_not_taken_for_proprietary_ones(name: str) -> None:
    assert find_proprietary(host(nvidia__packages={name: "590.48.01-1"})) == []


@pytest.mark.parametrize(
    "name", ["nvidia-kernel-dkms", "nvidia-dkms-590", "nvidia-dkms-590-server", "cuda-drivers-580"]
)
def test_proprietary_packages_are_found(name: str) -> None:
    assert find_proprietary(host(nvidia__packages={name: "590.48.01-1"})) == [name]


def test_an_empty_version_is_for_debians_own_packages_alone() -> None:
    assert find_host_problems(host(), wanted(version="", source="distribution")) == []
    assert len(find_host_problems(host(), wanted(version=""))) == 1
    ubuntu = host(os={"id": "ubuntu", "version_id": "24.04", "codename": "noble", "name": "Ubuntu 24.04 LTS"})
    assert len(find_host_problems(ubuntu, wanted(version="", source="distribution"))) == 1


def test_a_version_that_is_none_is_refused() -> None:
    assert "is no driver version" in find_host_problems(host(gpus=[]), wanted(version="newest"))[0]


def test_everything_that_is_wrong_is_told_at_once() -> None:
    state = host(os={"id": "debian", "version_id": "11", "name": "Debian 11"}, secure_boot=True, nvidia__open=False)
    assert len(find_host_problems(state, wanted(version="595.71.05"))) == 4


def test_a_version_that_is_not_offered_names_those_that_are() -> None:
    problems = find_source_problems(trial(), NAMES, [], "590.44.01", {})
    assert len(problems) == 1
    assert "590.44.01 is not in the package source" in problems[0]
    assert "595.71.05, 590.48.01" in problems[0]


def test_a_source_that_has_nothing_of_it_says_so() -> None:
    problems = find_source_problems(trial(madison=""), NAMES, [], "590.48.01", {})
    assert "none of it" in problems[0]
    assert find_source_problems(trial(madison=""), NAMES, [], "", {}) == [
        "the package source has no nvidia-kernel-open-dkms, nvidia-driver-cuda"
    ]


def test_a_source_that_cannot_be_read_shows_apts_words() -> None:
    said = (
        "Get:1 https://mirror.example.com/cuda  InRelease [1581 B]\nReading package lists...\nW: GPG error: "
        "https://mirror.example.com/cuda  InRelease: The following signatures couldn't be verified because the public "
        "key is not "
        "available: NO_PUBKEY A4B469963BF863CC\nE: The repository 'https://mirror.example.com/cuda  InRelease' is not "
        "signed.\n"
    )
    problems = find_source_problems(trial(update={"rc": 100, "text": said}), NAMES, [], "590.48.01", {})
    assert len(problems) == 1
    assert "NO_PUBKEY A4B469963BF863CC" in problems[0]
    assert "is not signed" in problems[0]


def test_a_source_that_contradicts_the_nodes_own_shows_apts_words() -> None:
    said = (
        "E: Conflicting values set for option Signed-By regarding source https://mirror.example.com/cuda/ /: a != b\n"
    )
    problems = find_source_problems(trial(madison=said), NAMES, [], "590.48.01", {})
    assert len(problems) == 1
    assert "Conflicting values set for option Signed-By" in problems[0]


def test_packages_that_do_not_fit_are_refused_before_they_are_installed() -> None:
    said = "The following packages have unmet dependencies:\n nvidia-smi : Depends: x\nE: Unable to correct problems\n"
    problems = find_source_problems(trial(simulate={"rc": 100, "text": said}), NAMES, [], "590.48.01", {})
    assert problems == ["the packages cannot be installed: E: Unable to correct problems"]


# --- sources and packages ------------------------------------------------------------------------------------


def test_the_distributions_mirror_is_found_in_both_formats() -> None:
    line = "# comment\ndeb [arch=amd64 signed-by=/k.gpg] http://mirror.example.com/debian bookworm main # here\n"
    assert find_mirror([line], "bookworm", ["contrib", "non-free"]) == {
        "uri": "http://mirror.example.com/debian",
        "missing": ["contrib", "non-free"],
    }
    deb822 = (
        "Types: deb\nURIs: http://mirror.example.com/debian\nSuites: trixie trixie-updates\nComponents: main\n "
        "contrib\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\nTypes: deb\nURIs: http://sec.example.com\n"
        "Suites: trixie-security\nComponents: main non-free\n"
    )
    assert find_mirror([deb822], "trixie", ["contrib", "non-free"]) == {
        "uri": "http://mirror.example.com/debian",
        "missing": ["non-free"],
    }


def test_a_source_that_is_off_or_of_another_release_does_not_count() -> None:
    off = "Types: deb\nEnabled: no\nURIs: http://a\nSuites: bookworm\nComponents: main contrib\n"
    assert find_mirror([off, "deb http://b trixie main contrib"], "bookworm", ["contrib"]) == {
        "uri": "",
        "missing": ["contrib"],
    }


@given(st.lists(st.text(), max_size=3), st.text(max_size=20))
def test_any_source_file_is_taken(texts: list[str], codename: str) -> None:
    assert find_mirror(texts, codename, ["contrib"])["missing"] in ([], ["contrib"])


def test_ubuntus_packages_carry_the_branch() -> None:
    names = VARS["_nvidia_driver_names"]["distribution"]
    assert "nvidia-dkms-590-open" in choose_packages(names, "ubuntu", "590.48.01")


@pytest.mark.parametrize("source", ["cuda_repository", "mirror"])
@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (
            "580.95.05",
            ["nvidia-dkms-580-open", "libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580"],
        ),
        ("590.48.01", ["nvidia-dkms-open", "libnvidia-compute", "nvidia-modprobe", "nvidia-persistenced"]),
    ],
)
def test_nvidias_packages_for_ubuntu_carry_the_branch_before_590(
    source: str, version: str, expected: list[str]
) -> None:
    assert choose_packages(VARS["_nvidia_driver_names"][source], "ubuntu", version) == expected
    assert "nvidia-driver-cuda" in choose_packages(VARS["_nvidia_driver_names"][source], "debian", version)


def test_an_unknown_distribution_has_no_packages() -> None:
    assert choose_packages(VARS["_nvidia_driver_names"]["mirror"], "fedora", "590.48.01") == []


@pytest.mark.parametrize("source", ["cuda_repository", "mirror", "distribution"])
@pytest.mark.parametrize("system", ["debian", "ubuntu"])
def test_only_packages_of_the_open_module_are_installed(source: str, system: str) -> None:
    # DRV-01
    names = choose_packages(VARS["_nvidia_driver_names"][source], system, "590.48.01")
    assert find_proprietary(host(nvidia__packages=dict.fromkeys(names, "1"))) == []
    assert sum("dkms" in name and "open" in name for name in names) == 1


def test_each_supported_system_has_a_repository_with_a_pinned_key() -> None:
    repositories = VARS["_nvidia_driver_repositories"]
    assert sorted(repositories) == sorted(VARS["_nvidia_driver_supported"])
    for repository in repositories.values():
        # a fingerprint ends in the key's id, and NVIDIA names the file by the last eight digits of it
        assert re.fullmatch("[0-9A-F]{40}", repository["fingerprint"])
        assert repository["fingerprint"].endswith(repository["key"].removesuffix(".pub").upper())


def test_what_is_installed() -> None:
    text = (
        "nvidia-smi installed 535.261.03-1\nnvidia-modprobe config-files 535.1-1\n"
        "libcuda1 half-configured 535.261.03-1\n"
    )
    packages = parse_installed(text)
    assert packages == {"nvidia-smi": "535.261.03-1", "libcuda1": "535.261.03-1"}
    assert installed_version(packages, ["nvidia-smi", "libcuda1"]) == "535.261.03"
    assert installed_version(packages, ["nvidia-smi", "nvidia-modprobe"]) == ""
    assert installed_version({**packages, "libcuda1": "550.163.01-2"}, ["nvidia-smi", "libcuda1"]) == ""


def test_driver_and_kernel_are_held_and_the_container_toolkit_is_not() -> None:
    installed = [
        "bash",
        "libnvidia-ml1",
        "libnvidia-container1",
        "linux-base",
        "linux-headers-6.1.0-50-amd64",
        "linux-image-amd64",
        "linux-libc-dev",
        "nvidia-container-toolkit",
        "nvidia-kernel-open-dkms",
        "libcuda1",
    ]
    assert packages_to_hold(installed) == [
        "libcuda1",
        "libnvidia-ml1",
        "linux-headers-6.1.0-50-amd64",
        "linux-image-amd64",
        "nvidia-kernel-open-dkms",
    ]


def test_the_one_list_for_unattended_upgrades_has_all_that_is_held() -> None:
    defaults = yaml.safe_load((ROLE.parent / "host_settings/defaults/main.yml").read_text())
    patterns = defaults["host_settings_upgrade_blacklist"]
    names = {name for source in VARS["_nvidia_driver_names"].values() for names in source.values() for name in names}
    names = {name.replace("{branch}", "590") for name in names} | {
        *("libcuda1", "libcudadebugger1", "firmware-nvidia-gsp", "cuda-drivers", "cuda-drivers-590", "linux-generic"),
        *("linux-image-amd64", "linux-headers-6.8.0-45-generic", "linux-modules-extra-6.8.0-45-generic"),
        *("linux-generic-hwe-24.04", "linux-virtual"),
    }
    assert packages_to_hold(sorted(names)) == sorted(names)
    assert [name for name in sorted(names) if not any(re.match(pattern, name) for pattern in patterns)] == []
    # No role writes a second one.
    written = [path for path in ROLE.parent.rglob("*.j2") if "Package-Blacklist" in path.read_text()]
    assert written == []


# --- Secure Boot ---------------------------------------------------------------------------------------------


def test_a_certificate_has_the_fingerprint_that_openssl_says() -> None:
    assert certificate_sha1(CERTIFICATE) == CERTIFICATE_SHA1


def test_an_enrolled_certificate_is_found() -> None:
    listing = f"[key 1]\nSHA1 Fingerprint: {CERTIFICATE_SHA1}\nCertificate:\n    Data:\n        Version: 3 (0x2)\n"
    assert is_enrolled(CERTIFICATE, listing)
    assert not is_enrolled(CERTIFICATE, listing.replace("2f:59", "2f:58"))
    assert not is_enrolled(CERTIFICATE, "MokListRT is empty")


@given(st.text(), st.text())
def test_any_certificate_is_taken(pem: str, listing: str) -> None:
    assert not is_enrolled(pem, listing)
    wrapped = certificate_sha1(f"-----BEGIN CERTIFICATE-----{pem}-----END CERTIFICATE-----")
    assert re.fullmatch("(?:(?:[0-9a-f]{2}:){19}[0-9a-f]{2})?", wrapped)


# --- loading and comparing -----------------------------------------------------------------------------------


def test_a_bare_node_loads_without_a_reboot() -> None:
    assert choose_loading(host(), "590.48.01", [KERNEL])["action"] == "load"


def test_the_loaded_version_stays() -> None:
    state = host(nvidia__loaded="590.48.01", nvidia__open=True)
    assert choose_loading(state, "590.48.01", [KERNEL]) == {"action": "none", "why": ""}


def test_another_version_is_reloaded() -> None:
    state = host(nvidia__loaded="580.95.05", nvidia__open=True)
    assert choose_loading(state, "590.48.01", [KERNEL])["action"] == "reload"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nvidia__nouveau_loaded": True}, "nouveau"),
        ({"kernel": {"release": "6.1.0-28-amd64", "installed": []}}, "6.1.0-28-amd64 runs"),
    ],
)
def test_what_only_a_reboot_mends(changes: dict[str, Any], why: str) -> None:
    loading = choose_loading(host(**changes), "590.48.01", [KERNEL])
    assert loading["action"] == "reboot"
    assert why in loading["why"]


def test_where_it_cannot_be_loaded_the_reason_is_told_and_no_success() -> None:
    for state, why in ((host(container=True), "container"), (host(gpus=[]), "no NVIDIA GPU")):
        loading = choose_loading(state, "590.48.01", [KERNEL])
        assert loading["action"] == "none"
        assert why in loading["why"]


def test_libraries_newer_than_the_module_are_told() -> None:
    # DRV-04
    state = host(nvidia__loaded="580.159.03", nvidia__userspace="580.173", nvidia__open=True)
    problems = compare_versions(state, "", ["580.159.03"])
    assert len(problems) == 1
    assert "580.159.03" in problems[0]
    assert "580.173" in problems[0]


def test_missing_firmware_is_told() -> None:
    state = host(nvidia__loaded="590.48.01", nvidia__userspace="590.48.01", nvidia__open=True)
    assert compare_versions(state, "590.48.01", ["590.48.01"]) == []
    assert "firmware for driver 590.48.01" in compare_versions(state, "590.48.01", ["580.95.05"])[0]


def test_libraries_of_another_installation_are_told() -> None:
    state = host(nvidia__userspace="580.95.05")
    assert len(compare_versions(state, "590.48.01", ["590.48.01"])) == 1


def test_nothing_installed_is_no_mismatch() -> None:
    assert compare_versions(host(gpus=[]), "", []) == []


# As on a server with eight cards, the persistence daemon stopped.
MODULES = """\
nvidia_uvm 4816896 0 - Live 0x0000000000000000 (O)
nvidia_drm 135168 0 - Live 0x0000000000000000 (O)
nvidia_modeset 1605632 1 nvidia_drm, Live 0x0000000000000000 (O)
nvidia 60620800 2 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (O)
video 77824 1 nvidia_modeset, Live 0x0000000000000000
ecc 45056 1 ecdh_generic, Live 0x0000000000000000
"""


def test_only_loaded_modules_are_unloaded_and_users_come_first() -> None:
    # There is no nvidia_peermem here, and naming it would fail.
    assert plan_unloading(MODULES) == {
        "modules": ["nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia"],
        "held": [],
    }
    alone = plan_unloading("nvidia 60620800 0 - Live 0x0000000000000000 (O)\n")
    assert alone == {"modules": ["nvidia"], "held": []}
    assert plan_unloading("") == plan_unloading("video 77824 0 - Live 0x0\n") == {"modules": [], "held": []}


def test_a_module_in_use_is_told_before_any_is_taken_out() -> None:
    opened = MODULES.replace("nvidia_uvm 4816896 0 -", "nvidia_uvm 4816896 4 -").replace("60620800 2", "60620800 10")
    assert plan_unloading(opened)["held"] == ["nvidia_uvm by 4 open devices", "nvidia by 8 open devices"]
    # Somebody else's module, which nobody would load again.
    other = MODULES.replace("60620800 2 nvidia_uvm,", "60620800 3 gdrdrv,nvidia_uvm,")
    assert plan_unloading(other)["held"] == ["nvidia by the modules gdrdrv"]


def test_a_kernel_that_unloads_nothing_is_told() -> None:
    # Read on a virtual machine with an H200.
    text = "nvidia_uvm 1875968 - - Live 0xffffffffc080c000 (O)\nnvidia 14299136 - - Live 0xffffffffc0400000 (O)\n"
    assert plan_unloading(text)["held"] == [
        "nvidia_uvm, which this kernel cannot unload",
        "nvidia, which this kernel cannot unload",
    ]


MODULE_LINES = st.lists(
    st.tuples(
        st.sampled_from(["nvidia", "nvidia_uvm", "nvidia_drm", "video"]),
        st.sampled_from(["0", "1", "7", "x", "-1", "-"]),
        st.sampled_from(["-", "nvidia_uvm,", "nvidia,nvidia_drm,", "gdrdrv,", ""]),
    ).map(lambda row: f"{row[0]} 4096 {row[1]} {row[2]} Live 0x0")
).map("\n".join)


@given(MODULE_LINES | st.text())
def test_any_list_of_modules_gives_an_order(text: str) -> None:
    order = plan_unloading(text)["modules"]
    assert len(order) == len(set(order))


# What the role finds on the made-up machines: words of its problems, kernels without the module, and how it gets in.
# A machine that is not here has nothing that concerns the driver.
MACHINES: dict[str, tuple[list[str], list[str], str]] = {
    "bare-8x": ([], ["6.8.0-45-generic"], "load"),
    "drv-01-proprietary": (
        [
            "version 580.126.09 of it is loaded",
            "the loaded module is 580.126.09 and the libraries are 590.48.01",
            "no firmware for driver 580.126.09",
            "580.126.09 is the proprietary one",
        ],
        [],
        "reload",
    ),
    "drv-02-next-kernel": ([], ["6.8.0-101-generic"], "none"),
    "drv-02-only-added": ([], ["6.8.0-45-generic"], "load"),
    "drv-02-server": ([], ["6.8.0-45-generic"], "load"),
    "drv-04-mismatch": (
        [
            "the loaded module is 580.159.03 and the libraries are 580.173",
            "the packages are 590.48.01 and the libraries in use are 580.173",
            "no firmware for driver 580.159.03",
        ],
        [],
        "reload",
    ),
    "drv-07-known-bad": (
        ["the libraries in use are 595.71.05", "no firmware for driver 595.71.05"],
        ["6.8.0-45-generic"],
        "reload",
    ),
    "drv-16-secure-boot": (["Secure Boot is on, and no key"], ["6.8.0-45-generic"], "load"),
    "nouveau": (["nouveau has the GPUs"], ["6.8.0-45-generic"], "reboot"),
    "several": (["Rocky Linux 9.4 is not supported"], [], "none"),
    "unsupported-os": (["Ubuntu 22.04.5 LTS is not supported"], [], "none"),
}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in host_fixtures.HOSTS.glob("*/files.txt")))
def test_the_facts_of_a_made_up_machine(name: str, tmp_path: Path) -> None:
    words, kernels, action = MACHINES.get(name, ([], [], "none"))
    state = host_fixtures.read_host(host_fixtures.lay_out(name, tmp_path))
    # Of the package whose version is the driver's; firmware comes with it.
    version = installed_version(state["nvidia"]["packages"], ["nvidia-dkms-open"])
    running, installed = state["kernel"]["release"], state["kernel"]["installed"]
    problems = find_host_problems(state, wanted()) + compare_versions(state, version, [version])
    assert len(problems) == len(words), problems
    for problem, word in zip(problems, words, strict=True):
        assert word in problem
    built_for = choose_kernels([], running, installed)
    assert [item["kernel"] for item in find_missing_builds(state["nvidia"]["dkms"], version, built_for)] == kernels
    assert choose_loading(state, "590.48.01", built_for)["action"] == action


def test_every_machine_with_something_to_find_is_there() -> None:
    assert [name for name in MACHINES if not (host_fixtures.HOSTS / name / "files.txt").exists()] == []


# --- options and limits --------------------------------------------------------------------------------------


def test_options_are_empty_unless_asked_for() -> None:
    assert merge_options({}, False, False, {}) == {}


def test_options_get_the_names_of_the_source() -> None:
    names = {"nvidia": "nvidia-current-open", "nvidia_uvm": "nvidia-current-open-uvm"}
    options = merge_options(names, True, True, {"nvidia": {"NVreg_EnableMSI": True}, "nvidia_drm": {"modeset": 0}})
    assert options["nvidia-current-open-uvm"] == {"uvm_disable_hmm": "1"}
    assert options["nvidia-current-open"]["NVreg_EnableMSI"] == "1"
    assert "ForceP2P" in options["nvidia-current-open"]["NVreg_RegistryDwords"]
    assert options["nvidia_drm"] == {"modeset": "0"}


def test_further_options_win() -> None:
    options = merge_options({}, False, True, {"nvidia": {"NVreg_RegistryDwords": "ForceP2P=0"}})
    assert options == {"nvidia": {"NVreg_RegistryDwords": "ForceP2P=0"}}


@pytest.mark.parametrize(
    ("limits", "clocks", "count"),
    [
        ({}, [], 0),
        ({"0000:38:00.0": 400, "GPU-00000000-0000-0000-0000-000000000001": 300}, [1500, 2400], 0),
        ({"gpu 0": 400}, [], 1),
        ({"0000:38:00.0": "400"}, [], 1),
        ({"0000:38:00.0": 0}, [], 1),
        ({}, [2400, 1500], 1),
        ({}, [1500], 1),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], clocks: list[int], count: int) -> None:
    assert len(find_limit_problems(limits, clocks)) == count


@pytest.mark.parametrize(("watts", "count"), [(0, 0), (450, 0), (-1, 1), (45000, 1)])
def test_the_common_limit_is_checked(watts: int, count: int) -> None:
    assert len(find_limit_problems({}, [], watts)) == count


# --- gpu-node-limits -----------------------------------------------------------------------------------------

FAKE_SMI = """\
#!{python}
import json, pathlib, sys
state = pathlib.Path(__file__).with_name("cards.json")
cards = json.loads(state.read_text())
args = sys.argv[1:]
with state.with_name("calls").open("a") as calls:
    calls.write(" ".join(args) + "\\n")
if args[0].startswith("--query-gpu"):
    for card in cards:
        print(", ".join(card[key] for key in ("uuid", "bus", "pm", "limit", "min", "max")))
else:
    card = next(card for card in cards if card["uuid"] == args[1])
    if card.get("broken"):
        sys.exit("Unable to set: GPU is lost")
    if card.get("locked") and args[2] in ("-lgc", "-rgc"):
        sys.exit("Setting locked GPU clocks is not supported")
    if args[2] == "-pm":
        card["pm"] = "Enabled"
    if args[2] == "-pl":
        card["limit"] = args[3] + ".00"
    state.write_text(json.dumps(cards))
"""


def smi_card(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "uuid": f"GPU-00000000-0000-0000-0000-{number:012d}",
        "bus": f"00000000:{38 + number}:00.0",
        "pm": "Disabled",
        "limit": "600.00",
        "min": "150.00",
        "max": "600.00",
        **changes,
    }


class Limits:
    def __init__(self, folder: Path, cards: list[dict[str, Any]], config: dict[str, Any]) -> None:
        self.folder = folder
        smi = folder / "nvidia-smi"
        smi.write_text(FAKE_SMI.replace("{python}", sys.executable))
        smi.chmod(0o755)
        (folder / "cards.json").write_text(json.dumps(cards))
        whole = {"power_limit_w": 0, "power_limits_w": {}, "graphics_clock_mhz": [], **config}
        (folder / "limits.json").write_text(json.dumps(whole))

    def run(self, verb: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder), "GPU_NODE_LIMITS_CONFIG": str(self.folder / "limits.json")}
        return subprocess.run(
            [sys.executable, str(ROLE / "files/gpu-node-limits"), verb],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def cards(self) -> list[dict[str, Any]]:
        return list(json.loads((self.folder / "cards.json").read_text()))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def test_limits_are_set_found_again_and_not_set_twice(tmp_path: Path) -> None:
    # DRV-17: 275 W on every card, 600 after a reboot
    limits = Limits(tmp_path, [smi_card(number) for number in range(8)], {"power_limit_w": 275})
    before = limits.run("check")
    assert before.returncode == 3
    assert "wanted 275 W" in before.stdout
    assert limits.run("apply").returncode == 0
    assert [card["limit"] for card in limits.cards()] == ["275.00"] * 8
    assert [card["pm"] for card in limits.cards()] == ["Enabled"] * 8
    assert limits.run("check").returncode == 0
    assert limits.run("apply").returncode == 0
    assert sum("-pl" in call for call in limits.calls()) == 8


def test_a_cards_own_limit_wins_by_uuid_and_by_address(tmp_path: Path) -> None:
    own = {"0000:38:00.0": 400, smi_card(1)["uuid"]: 500}
    limits = Limits(tmp_path, [smi_card(0), smi_card(1), smi_card(2)], {"power_limit_w": 300, "power_limits_w": own})
    assert limits.run("apply").returncode == 0
    assert [card["limit"] for card in limits.cards()] == ["400.00", "500.00", "300.00"]


def test_a_limit_beyond_the_card_names_card_and_range(tmp_path: Path) -> None:
    done = Limits(tmp_path, [smi_card(0)], {"power_limit_w": 700}).run("apply")
    assert done.returncode == 1
    assert "700 W is not between 150 and 600 W" in done.stderr
    assert "0000:38:00.0" in done.stderr


def test_one_broken_card_does_not_keep_the_others_from_theirs(tmp_path: Path) -> None:
    limits = Limits(tmp_path, [smi_card(0, broken=True), smi_card(1)], {"power_limit_w": 300})
    done = limits.run("apply")
    assert done.returncode == 1
    assert "GPU is lost" in done.stderr
    assert [card["limit"] for card in limits.cards()] == ["600.00", "300.00"]


def test_a_limit_for_a_card_that_is_not_there_is_told(tmp_path: Path) -> None:
    limits = Limits(tmp_path, [smi_card(0, pm="Enabled")], {"power_limits_w": {"0000:99:00.0": 300}})
    assert limits.run("check").returncode == 3
    assert "there is no card 0000:99:00.0" in limits.run("apply").stderr


def test_clocks_are_locked_and_released(tmp_path: Path) -> None:
    limits = Limits(tmp_path, [smi_card(0)], {"graphics_clock_mhz": [1500, 2400]})
    limits.run("apply")
    assert any("-lgc 1500,2400" in call for call in limits.calls())
    released = Limits(tmp_path, [smi_card(0)], {})
    released.run("apply")
    assert any(call.endswith("-rgc") for call in released.calls())


def test_clocks_that_nobody_asked_for_and_that_cannot_be_released_are_no_failure(tmp_path: Path) -> None:
    # As on a virtual machine whose host keeps them.
    limits = Limits(tmp_path, [smi_card(0, locked=True)], {"power_limit_w": 300})
    done = limits.run("apply")
    assert done.returncode == 0
    assert "0000:38:00.0 keeps its clocks" in done.stderr
    assert limits.cards()[0]["limit"] == "300.00"
    refused = Limits(tmp_path, [smi_card(0, locked=True)], {"graphics_clock_mhz": [1500, 2400]})
    assert refused.run("apply").returncode == 1


def test_without_nvidia_smi_it_says_so(tmp_path: Path) -> None:
    limits = Limits(tmp_path, [], {})
    (tmp_path / "nvidia-smi").unlink()
    done = limits.run("apply")
    assert done.returncode == 1
    assert "nvidia-smi is not installed" in done.stderr


@pytest.mark.parametrize(("module", "missing"), [("nvidia-srv", 0), ("nvidia-current", 1), ("nvidia-fs", 1)])
def test_ubuntus_module_for_servers_is_a_build_of_the_driver(module: str, missing: int) -> None:
    # DRV-02
    dkms = parse_dkms_status(f"{module}/580.95.05, {KERNEL}, x86_64: installed\n")
    assert len(find_missing_builds(dkms, "580.95.05", [KERNEL])) == missing


# --- cards and options ---------------------------------------------------------------------------------------

GPUS = [{"pci_address": "0000:38:00.0", "uuid": "GPU-1"}, {"pci_address": "0000:41:00.0", "uuid": ""}]


def cards_of(*addresses: str) -> dict[str, Any]:
    return {"replicas": [{"gpus": [{"pci_address": address, "uuid": "auto"}]} for address in addresses]}


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        (cards_of("0000:38:00.0", "0000:41:00.0"), ["0000:41:00.0"]),
        # TOPO-15: a card for a screen, or of a virtual machine, is none of the plan's.
        (cards_of("0000:38:00.0"), []),
        (cards_of("0000:38:00.0", "0000:99:00.0"), ["0000:99:00.0"]),
        ({}, ["0000:41:00.0"]),
    ],
)
def test_cards_that_did_not_come_up_are_named(plan: dict[str, Any], lost: list[str]) -> None:
    assert find_lost_cards(GPUS, plan) == lost


@pytest.mark.parametrize(
    ("former", "wanted", "differ"),
    [
        ("", "blacklist nouveau\noptions nouveau modeset=0\n", False),
        (
            "options nvidia a=1\noptions nvidia_uvm b=1\n",
            "# new words\noptions nvidia_uvm  b=1\noptions nvidia a=1",
            False,
        ),
        ("options nvidia a=1\n", "options nvidia a=2\n", True),
        ("options nvidia a=1\n", "options nouveau modeset=0\n", True),
        ("", "options nvidia_uvm uvm_disable_hmm=1\n", True),
    ],
)
def test_only_other_options_have_the_module_loaded_anew(former: str, wanted: str, differ: bool) -> None:
    assert options_differ(former, wanted) is differ


# --- try_packages.py -----------------------------------------------------------------------------------------


def load_trial() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("try_packages", str(ROLE / "files/try_packages.py"))
    spec = importlib.util.spec_from_loader("try_packages", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_trial_touches_its_own_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_trial()
    etc, lists = tmp_path / "etc", tmp_path / "lists"
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / "preferences.d").mkdir()
    lists.mkdir()
    (lists / "mirror_dists_Packages").write_text("old")
    (etc / "sources.list.d/ours.sources").write_text("replaced")
    (etc / "sources.list.d/other.list").write_text("kept")
    monkeypatch.setattr(module, "ETC", etc)
    monkeypatch.setattr(module, "LISTS", lists)
    calls: list[list[str]] = []

    def run(argv: list[str], seconds: int = 0) -> dict[str, Any]:
        calls.append(argv)
        return {"rc": 0, "text": "W: Failed to fetch https://mirror.example.com/InRelease" if len(calls) == 2 else ""}

    monkeypatch.setattr(module, "run", run)
    folder = tmp_path / "trial"
    folder.mkdir()
    asked = {
        "sources": "Types: deb\nSigned-By: @KEY@\n",
        "key": "KEY",
        "preferences": "",
        "names": ["nvidia-driver-cuda"],
        "headers": ["linux-headers-x"],
        "ours": [str(etc / "sources.list.d/ours.sources")],
    }
    answer = module.attempt(folder, asked)
    # apt ends with 0 where it could not reach a source
    assert answer["update"]["rc"] == 100
    assert sorted(path.name for path in (folder / "sources.d").iterdir()) == ["other.list", "trial.sources"]
    assert f"Signed-By: {folder}/trial.asc" in (folder / "sources.d/trial.sources").read_text()
    assert (folder / "lists/mirror_dists_Packages").read_text() == "old"
    for argv in calls:
        assert f"Dir::State::lists={folder}/lists" in argv
        assert f"Dir::Cache={folder}/cache" in argv
    assert "-s" in calls[-1]
    assert calls[-1][-2:] == ["nvidia-driver-cuda", "linux-headers-x"]
    assert (etc / "sources.list.d/ours.sources").read_text() == "replaced"


def test_the_proxy_and_what_is_tried_come_by_the_input_and_not_by_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load_trial()
    monkeypatch.setattr(module.sys, "argv", ["-c"])
    proxy = "http://site:secret@proxy.example.com:3128"
    wanted = base64.b64encode(json.dumps({"proxy": proxy}).encode()).decode()
    monkeypatch.setattr(module.sys, "stdin", io.StringIO(wanted))
    monkeypatch.setattr(module.os, "environ", {})
    monkeypatch.setattr(module, "attempt", lambda folder, wanted: dict(module.os.environ))
    module.main()
    assert json.loads(capsys.readouterr().out) == {"http_proxy": proxy, "https_proxy": proxy}
