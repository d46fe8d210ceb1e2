"""Preflight and driver facts against real cards: what our readings say, and what nvidia-smi says. Reads only.

PYTHONPATH=collections pytest tests/gpu      # as root, on a machine with a loaded NVIDIA driver
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_driver import (
    choose_loading,
    compare_versions,
    plan_unloading,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight import check_host, describe_report, make_report
from ansible_collections.serving.gpu_node.plugins.modules import gpu_topology, host_state

ROOT = Path(__file__).resolve().parents[2]
FIELDS = "pci.bus_id,driver_version,pcie.link.gen.current,pcie.link.width.current,pcie.link.width.max"
GENERATIONS = {"1": 2.5, "2": 5.0, "3": 8.0, "4": 16.0, "5": 32.0, "6": 64.0}


def nvidia_smi(*arguments: str) -> str:
    return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def host() -> dict[str, Any]:
    space = {path: told for path in ("/usr", "/var") if (told := host_state.read_space(path, False))}
    return host_state.read_host(Path("/"), host_state.ask_command, space)


@pytest.fixture(scope="module")
def topology() -> dict[str, Any]:
    return gpu_topology.read_hardware(Path("/sys"), Path("/proc"), "nvidia-smi")


@pytest.fixture(scope="module")
def cards() -> dict[str, list[str]]:
    """What nvidia-smi says of each card, by its PCI address as sysfs has it."""
    rows = [line.split(", ") for line in nvidia_smi(f"--query-gpu={FIELDS}", "--format=csv,noheader").splitlines()]
    return {row[0].lower()[-12:]: row[1:] for row in rows}


def test_every_card_is_found_with_its_driver(host: dict[str, Any], cards: dict[str, list[str]]) -> None:
    ours = {gpu["pci_address"]: gpu["driver"] for gpu in host["gpus"]}
    # A container may be given some of the cards, and sysfs shows all of them.
    assert cards.keys() <= ours.keys()
    assert {ours[address] for address in cards} == {"nvidia"}


def test_versions_are_those_of_nvidia_smi(host: dict[str, Any], cards: dict[str, list[str]]) -> None:
    (version,) = {row[0] for row in cards.values()}
    assert host["nvidia"]["loaded"] == version
    assert host["nvidia"]["userspace"] == version
    assert host["nvidia"]["open"] is ("Open Kernel Module" in Path("/proc/driver/nvidia/version").read_text())
    assert compare_versions(host, "", [version]) == []
    assert choose_loading({**host, "container": False}, version, [host["kernel"]["release"]])["action"] == "none"


def test_links_are_those_of_nvidia_smi_or_unknown(host: dict[str, Any], cards: dict[str, list[str]]) -> None:
    links = {gpu["pci_address"]: gpu["link"] for gpu in host["gpus"]}
    for address, (_, generation, width, widest) in cards.items():
        link = links[address]
        # Virtual machines show no link, or one of their own making.
        assert link is None or (link["max_width"] >= link["width"] > 0)
        if link is not None and widest.isdecimal() and not host["container"]:
            assert link["width"] == int(width)
            assert link["speed_gts"] == GENERATIONS[generation]


def test_bar1_is_that_of_nvidia_smi(host: dict[str, Any], cards: dict[str, list[str]]) -> None:
    sizes = {gpu["pci_address"]: gpu["bar1_bytes"] for gpu in host["gpus"]}
    for address in cards:
        text = nvidia_smi("-i", address, "-q", "-d", "MEMORY")
        total = text.partition("BAR1 Memory Usage")[2].partition("Total")[2].split()[1]
        assert sizes[address] == int(total) * 2**20


def test_the_modules_come_out_users_first() -> None:
    text = Path("/proc/modules").read_text()
    told = plan_unloading(text)
    loaded = {line.split()[0]: line.split()[2] for line in text.splitlines()}
    # Our own nvidia-smi calls are over, so what holds a module is somebody else, or the kernel that cannot unload.
    assert loaded["nvidia"] != "-" or told["held"]
    assert told["modules"][-1] == "nvidia"
    assert set(told["modules"]) <= loaded.keys()
    assert "nvidia_uvm" not in loaded or told["modules"].index("nvidia_uvm") < told["modules"].index("nvidia")


def test_power_limits_are_compared_and_none_is_set(tmp_path: Path) -> None:
    before = nvidia_smi("--query-gpu=power.limit,persistence_mode", "--format=csv,noheader")
    config = tmp_path / "limits.json"
    config.write_text(json.dumps({"power_limit_w": 0, "power_limits_w": {}, "graphics_clock_mhz": []}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "roles/nvidia_driver/files/gpu-node-limits"), "check"],
        env={**os.environ, "GPU_NODE_LIMITS_CONFIG": str(config)},
        capture_output=True,
        text=True,
        check=False,
    )
    off = "Disabled" in before
    assert (done.returncode, "persistence mode is off" in done.stdout) == ((3, True) if off else (0, False)), done
    assert nvidia_smi("--query-gpu=power.limit,persistence_mode", "--format=csv,noheader") == before


def test_preflight_has_something_to_say_of_every_check(host: dict[str, Any], topology: dict[str, Any]) -> None:
    known = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/main.yml").read_text())["_nvidia_driver_known"]
    toolkits = yaml.safe_load((ROOT / "roles/container_runtime/vars/main.yml").read_text())
    driver = {"manage": False, "version": host["nvidia"]["loaded"], "kernels": [], "signed": False, "known": known}
    wanted = {
        "os": {host["os"]["id"]: [host["os"]["version_id"]]},
        "podman": "4.3",
        "runtime_manage": True,
        "toolkit": {"version": "1.18.2", "known": toolkits["_container_runtime_toolkit_known"]},
        "driver": {**driver, "reboot_allowed": False, "bad_allowed": False},
        "device": "cuda",
        "gpus": len(topology["gpus"]),
        # This machine's, whatever they are.
        "cards": [],
    }
    checks = check_host(host, topology, {}, wanted)
    print("\n".join(describe_report(make_report(checks))))
    levels = {check["check"]: check["level"] for check in checks}
    for name in ("gpus", "gpus_of_driver", "bar1", "card_driver", "driver", "driver_libraries"):
        assert levels[name] == "ok", name
    assert all(check["remedy"] for check in checks if check["level"] != "ok")
