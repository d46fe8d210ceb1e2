"""Host settings: what is written, what differs, what cannot be set, and what a reboot must have achieved."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.host_settings import (
    GRUB_FILE,
    JOURNAL_FILE,
    RESTARTS_FILE,
    SYSCTL_FILE,
    UPGRADES_FILE,
    chosen_word,
    decide_settings,
    describe_settings,
    parse_readings,
    paths_to_read,
    reboot_problems,
    sysctl_path,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.conftest import ROOT

DEFAULTS = {
    name.removeprefix("host_settings_"): value
    for name, value in yaml.safe_load((ROOT / "roles/host_settings/defaults/main.yml").read_text()).items()
}
DEFAULTS |= {"script": "#!/usr/bin/python3\n", "unit": "[Service]\n"}
POLICY = "/sys/devices/system/cpu/cpufreq/policy"


def host(**changes: Any) -> dict[str, Any]:
    state = {
        "kernel": {"cmdline": "BOOT_IMAGE=/boot/vmlinuz root=UUID=0a1b ro quiet"},
        "boot_id": "11111111-1111-1111-1111-111111111111",
        "container": False,
        "gpus": [{"pci_address": f"0000:{bus}:00.0"} for bus in ("38", "49")],
        "acs_redirect": [],
    }
    return {**state, **changes}


def fresh(**changes: str) -> dict[str, str]:
    """What a Debian 12 on an EPYC says before anything was set."""
    readings = {
        "/proc/cpuinfo": "vendor_id\t: AuthenticAMD\napicid\t\t: 127\n",
        "/usr/sbin/update-grub": "#!/bin/sh\n",
        "/boot/grub/grub.cfg": "\tlinux /boot/vmlinuz root=UUID=0a1b ro quiet\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
        "/proc/sys/kernel/numa_balancing": "1\n",
        "/proc/sys/vm/swappiness": "60\n",
        "/proc/sys/vm/max_map_count": "65530\n",
        "/proc/sys/net/core/somaxconn": "4096\n",
    }
    for policy in ("0", "1"):
        readings[f"{POLICY}{policy}/scaling_governor"] = "schedutil\n"
        readings[f"{POLICY}{policy}/scaling_available_governors"] = "performance schedutil \n"
    return {**readings, **changes}


def decide(wanted: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    return decide_settings({**DEFAULTS, **(wanted or {})}, rest.get("state", host()), rest.get("readings", fresh()))


def settled(wanted: dict[str, Any], state: dict[str, Any], readings: dict[str, str]) -> dict[str, str]:
    """The readings after everything was written and set."""
    decision = decide(wanted, state=state, readings=readings)
    after = {**readings, **{path: text for path, text in decision["files"].items() if text}}
    for line in decision["files"][SYSCTL_FILE].splitlines()[1:]:
        key, _, value = line.partition(" = ")
        after[sysctl_path(key)] = f"{value}\n"
    after["/sys/kernel/mm/transparent_hugepage/enabled"] = "always [madvise] never\n"
    for policy in ("0", "1"):
        after[f"{POLICY}{policy}/scaling_governor"] = "performance\n"
    if decision["kernel_parameters"]:
        line = " ".join(decision["kernel_parameters"])
        after["/boot/grub/grub.cfg"] = f"\tlinux /boot/vmlinuz root=UUID=0a1b ro {line} quiet\n"
    return after


def differing(decision: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["setting"]: (item["found"], item["wanted"]) for item in decision["differences"]}


def test_what_a_fresh_machine_lacks() -> None:
    decision = decide()
    assert decision["problems"] == decision["warnings"] == decision["not_applicable"] == []
    found = differing(decision)
    assert found["kernel.numa_balancing"] == ("1", "0")
    assert found["vm.swappiness"] == ("60", "1")
    assert found["vm.max_map_count"] == ("65530", "1048576")
    assert found["transparent huge pages"] == ("always", "madvise")
    assert found["CPU governor"] == ("schedutil on 2 of 2 policies", "performance")
    assert found[JOURNAL_FILE] == ("no file", "ours")
    # The kernel's own value is the wanted one, and no parameter of the kernel is wanted by default.
    assert not {"net.core.somaxconn", "kernel parameters", GRUB_FILE} & set(found)
    assert decision["sysctl_differs"]
    assert decision["boot_differs"]
    assert not decision["grub_stale"]
    assert decision["reboot_reasons"] == []


def test_nothing_differs_once_it_is_set() -> None:
    wanted = {"iommu": "passthrough", "acs_redirect": "off"}
    state = host(kernel={"cmdline": "root=UUID=0a1b ro iommu=pt quiet"})
    decision = decide(wanted, state=state, readings=settled(wanted, state, fresh()))
    assert decision["differences"] == decision["differing_files"] == []
    assert not decision["sysctl_differs"]
    assert not decision["boot_differs"]
    assert not decision["grub_stale"]


@pytest.mark.parametrize(("found", "kept"), [("65530", True), ("1048576", True), ("2097152", False)])
def test_a_larger_value_is_never_taken_back(found: str, kept: bool) -> None:
    decision = decide(readings=fresh(**{"/proc/sys/vm/max_map_count": f"{found}\n"}))
    assert ("vm.max_map_count = 1048576" in decision["files"][SYSCTL_FILE]) == kept


def test_parameters_are_appended_and_wait_for_a_reboot() -> None:
    decision = decide({"iommu": "off", "kernel_parameters": ["pci=realloc"]})
    assert decision["files"][GRUB_FILE].splitlines()[-1] == (
        'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX amd_iommu=off pci=realloc"'
    )
    assert decision["grub_stale"]
    assert [reason.rpartition(" ")[2] for reason in decision["reboot_reasons"]] == ["amd_iommu=off", "pci=realloc"]


def test_written_and_not_yet_booted_is_a_reason_and_no_stale_grub() -> None:
    wanted = {"iommu": "off"}
    decision = decide(wanted, readings=settled(wanted, host(), fresh()))
    assert differing(decision) == {"kernel parameters": ("no amd_iommu=off", "amd_iommu=off")}
    assert decision["reboot_reasons"] == ["the kernel was started without amd_iommu=off"]
    assert not decision["grub_stale"]


def test_unquoted_off_is_off() -> None:
    wanted = {"iommu": False, "pcie_aspm": False, "numa_balancing": False, "acs_redirect": False}
    decision = decide(wanted)
    assert decision["kernel_parameters"] == ["amd_iommu=off", "pcie_aspm=off"]
    assert "kernel.numa_balancing = 0" in decision["files"][SYSCTL_FILE]
    assert decision["boot"]["acs_redirect"] == "off"


def test_a_contradicting_command_line_is_told() -> None:
    state = host(kernel={"cmdline": "root=/dev/sda1 amd_iommu=on"})
    (warning,) = decide({"iommu": "off"}, state=state)["warnings"]
    assert "'amd_iommu=on'" in warning
    assert "'amd_iommu=off'" in warning
    assert "/etc/default/grub" in warning


def test_a_machine_without_grub_is_refused_unless_it_has_the_parameters() -> None:
    readings = fresh()
    del readings["/usr/sbin/update-grub"]
    (problem,) = decide({"iommu": "passthrough"}, readings=readings)["problems"]
    assert "iommu=pt" in problem
    assert "update-grub" in problem
    state = host(kernel={"cmdline": "root=/dev/sda1 iommu=pt"})
    decision = decide({"iommu": "passthrough"}, state=state, readings=readings)
    assert decision["problems"] == []
    assert decision["files"][GRUB_FILE] == ""
    # Verifying alone reports it.
    decision = decide({"iommu": "passthrough", "manage": False}, readings=readings)
    assert decision["problems"] == []
    assert "update-grub" in decision["warnings"][0]


def test_keep_writes_nothing() -> None:
    keep = {
        **{name: "keep" for name in ("numa_balancing", "transparent_hugepages", "cpu_governor")},
        **{"swappiness": -1, "max_map_count": 0, "somaxconn": 0, "journal_max_mib": 0, "journal_keep_free_mib": 0},
        "protect_upgrades": False,
    }
    decision = decide(keep)
    assert set(decision["files"].values()) == {""}
    assert decision["differences"] == []
    assert decision["boot"] == {}


def test_a_file_that_is_no_longer_wanted_goes() -> None:
    decision = decide({"protect_upgrades": False}, readings=fresh(**{UPGRADES_FILE: "// old\n"}))
    assert decision["files"][UPGRADES_FILE] == ""
    assert UPGRADES_FILE in decision["differing_files"]
    assert differing(decision)[UPGRADES_FILE] == ("a file", "no file")


def test_redirecting_ports_are_named() -> None:
    state = host(acs_redirect=["0000:30:01.0", "0000:31:00.0"])
    decision = decide({"acs_redirect": "off"}, state=state)
    assert differing(decision)["ACS redirect"] == ("on at 0000:30:01.0, 0000:31:00.0", "off")
    assert decision["boot_differs"]
    # Default: nobody asked.
    assert "ACS redirect" not in differing(decide(state=state))
    (line,) = decide({"acs_redirect": "off"}, state=host(acs_redirect=None))["not_applicable"]
    assert "ACS" in line


@pytest.mark.parametrize(
    ("gone", "line"),
    [
        ("/proc/sys/kernel/numa_balancing", "kernel.numa_balancing"),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "huge pages"),
        (POLICY, "cpufreq"),
    ],
)
def test_what_a_kernel_does_not_have_is_told_and_left_out(gone: str, line: str) -> None:
    readings = {path: text for path, text in fresh().items() if not path.startswith(gone)}
    decision = decide(readings=readings)
    (told,) = decision["not_applicable"]
    assert line in told
    assert "kernel.numa_balancing" not in decision["files"][SYSCTL_FILE] or gone != "/proc/sys/kernel/numa_balancing"


def test_a_governor_that_the_driver_lacks_is_told() -> None:
    decision = decide({"cpu_governor": "ondemand"})
    (told,) = decision["not_applicable"]
    assert "'ondemand'" in told
    assert "CPU governor" not in differing(decision)


def test_a_container_gets_only_what_is_its_own() -> None:
    wanted = {"iommu": "off", "acs_redirect": "off", "sysctl": {"vm.dirty_ratio": 5}}
    decision = decide(wanted, state=host(container=True, acs_redirect=None))
    assert set(decision["files"]) == {JOURNAL_FILE, UPGRADES_FILE, RESTARTS_FILE}
    (told,) = decision["not_applicable"]
    assert "container" in told
    assert decision["problems"] == decision["reboot_reasons"] == decision["kernel_parameters"] == []
    assert decision["boot"] == {}
    assert not decision["sysctl_differs"]
    # A parameter that works nowhere is refused here too.
    assert decide({"kernel_parameters": ["pcie_acs_override=downstream"]}, state=host(container=True))["problems"]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({"upgrade_blacklist": ["("]}, "host_settings_upgrade_blacklist"),
        ({"upgrade_blacklist": ['a"; };']}, "host_settings_upgrade_blacklist"),
        ({"upgrade_blacklist": ["a\n"]}, "host_settings_upgrade_blacklist"),
        ({"sysctl": {"vm.dirty ratio": 1}}, "host_settings_sysctl"),
        ({"sysctl": {"vm.dirty_ratio": "1\nkernel.x = 2"}}, "host_settings_sysctl"),
        ({"sysctl": {"kernel.sysrq": True}}, "host_settings_sysctl"),
    ],
)
def test_what_a_file_cannot_carry_is_refused(wanted: dict[str, Any], names: str) -> None:
    (problem,) = decide(wanted)["problems"]
    assert problem.startswith(names)


def test_the_operators_own_sysctl_wins() -> None:
    readings = fresh(**{"/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n"})
    decision = decide(
        {"sysctl": {"vm.swappiness": 10, "net.ipv4.ip_local_port_range": "32768 60999"}}, readings=readings
    )
    assert "vm.swappiness = 10" in decision["files"][SYSCTL_FILE]
    assert "net.ipv4.ip_local_port_range" not in differing(decision)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("vm.swappiness", "/proc/sys/vm/swappiness"),
        ("net.ipv4.conf.eth0/100.rp_filter", "/proc/sys/net/ipv4/conf/eth0.100/rp_filter"),
        ("net/ipv4/conf/eth0.100/rp_filter", "/proc/sys/net/ipv4/conf/eth0.100/rp_filter"),
    ],
)
def test_the_file_of_a_sysctl_key(key: str, path: str) -> None:
    assert sysctl_path(key) == path


def test_the_files_of_the_system_say_what_they_should() -> None:
    files = decide()["files"]
    assert files[JOURNAL_FILE].splitlines()[1:] == [
        "[Journal]",
        "Storage=persistent",
        "SystemMaxUse=4096M",
        "SystemKeepFree=2048M",
    ]
    assert '    "linux-image-";\n' in files[UPGRADES_FILE]
    assert 'Unattended-Upgrade::Automatic-Reboot "false";' in files[UPGRADES_FILE]
    assert "$nrconf{override_rc}{qr(^(vllm-replica@" in files[RESTARTS_FILE]


def test_verifying_says_found_wanted_and_would() -> None:
    lines = describe_settings(decide(), manage=False)
    line = next(line for line in lines if line.startswith("vm.swappiness"))
    assert "found 60" in line
    assert "wanted 1" in line
    assert "would have been set" in line
    assert not any("would have" in line for line in describe_settings(decide(), manage=True))


def test_a_reboot_that_did_what_it_should() -> None:
    after = host(boot_id="22222222-2222-2222-2222-222222222222", kernel={"cmdline": "root=/dev/sda1 iommu=pt"})
    assert reboot_problems(host(), after, decide({"iommu": "passthrough"}, state=after)) == []


def test_a_reboot_that_was_none() -> None:
    (problem,) = reboot_problems(host(), host(), decide())
    assert "11111111-1111-1111-1111-111111111111" in problem


def test_a_card_that_did_not_come_back_is_named() -> None:
    after = host(boot_id="2", gpus=[{"pci_address": "0000:49:00.0"}])
    (problem,) = reboot_problems(host(), after, decide(state=after))
    assert "0000:38:00.0" in problem
    assert "0000:49:00.0" not in problem
    # One more is no fault.
    assert reboot_problems(after, host(boot_id="3"), decide()) == []


def test_a_kernel_that_came_back_without_its_parameters() -> None:
    (problem,) = reboot_problems(host(), host(boot_id="2"), decide({"iommu": "passthrough"}))
    assert "iommu=pt" in problem
    assert "/proc/cmdline" in problem


def test_readings_are_split_by_file() -> None:
    assert parse_readings("/a:1\n/a:2:3\ngrep: trouble\n/b/c:\n") == {"/a": "1\n2:3\n", "/b/c": "\n"}
    assert chosen_word("always [madvise] never\n") == "madvise"


def test_a_file_in_another_encoding_is_read_line_by_line(tmp_path: Path) -> None:
    """In a locale of UTF-8, grep would say `binary file matches` for a comment in Latin-1."""
    file = tmp_path / "60-gpu-node.cfg"
    file.write_bytes("# Paramètres\nGRUB_CMDLINE_LINUX=x\n".encode("latin-1"))
    script = yaml.safe_load((ROOT / "roles/host_settings/vars/main.yml").read_text())["_host_settings_read"]
    done = subprocess.run(
        ["sh", "-c", script, "sh", str(file), "/no/such/file"],
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=True,
    )
    readings = parse_readings(done.stdout.decode(errors="replace"))
    assert readings[str(file)].splitlines()[1] == "GRUB_CMDLINE_LINUX=x"
    assert "/no/such/file" not in readings


@given(st.dictionaries(st.sampled_from(sorted(fresh())) | st.text(), st.text(), max_size=12), st.text())
def test_any_readings_give_a_decision(readings: dict[str, str], cmdline: str) -> None:
    wanted = {"iommu": "passthrough", "acs_redirect": "off", "pcie_aspm": "performance"}
    decision = decide(wanted, state=host(kernel={"cmdline": cmdline}), readings=readings)
    assert all(isinstance(line, str) and line for line in describe_settings(decision, manage=False))
    assert set(decision["files"]) <= set(paths_to_read(DEFAULTS))


@given(st.text() | st.from_regex(r"(/[a-z]{1,3}:?.{0,4}\n){0,5}"))
def test_any_output_is_split(output: str) -> None:
    assert all(path.startswith("/") and text.endswith("\n") for path, text in parse_readings(output).items())
