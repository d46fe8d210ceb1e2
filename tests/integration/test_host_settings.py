"""Host settings on a node: verified without a change, refused before one, and a reboot that a container cannot have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from nodes import Node

OURS = "ls /etc/systemd/journald.conf.d/60-gpu-node.conf /etc/apt/apt.conf.d/60gpu-node-unattended-upgrades"


@pytest.fixture(scope="module")
def bare(node: Callable[[str], Node]) -> Node:
    return node("access")


def test_verifying_says_found_and_wanted_and_changes_nothing(bare: Node) -> None:
    play = bare.role("host_settings", extra={"host_settings_manage": False})
    assert (play.rc, play.changed) == (0, 0), play.tail()
    told = " ".join(play.output.split())
    assert "60-gpu-node.conf: found no file, wanted ours; would have been set" in told
    assert bare.run(OURS).stdout == ""


def test_a_parameter_that_stock_kernels_do_not_know_is_refused_before_a_change(bare: Node) -> None:
    play = bare.role(
        "host_settings", extra={"host_settings_kernel_parameters": ["pcie_acs_override=downstream,multifunction"]}
    )
    assert (play.rc, play.changed) == (2, 0), play.tail()
    told = " ".join(play.output.split())
    assert "pcie_acs_override=downstream,multifunction" in told
    assert "host_settings_acs_redirect" in told
    assert bare.run(OURS).stdout == ""


def test_a_reboot_is_asked_for_and_a_container_is_told_apart(bare: Node) -> None:
    before = bare.ssh("stat -c %Y /proc/1").strip()
    extra = {"host_settings_reboot_reasons": ["a new driver is not loaded yet"], "host_settings_reboot_allowed": True}
    play = bare.role("host_settings", extra=extra, tasks_from=("main", "reboot"))
    assert play.rc == 0, play.tail()
    told = " ".join(play.output.split())
    assert "reboot required: a new driver is not loaded yet" in told
    assert "This is a container" in told
    assert "the kernel is its host" in told
    assert bare.ssh("stat -c %Y /proc/1").strip() == before
    assert bare.ssh(OURS).count("\n") == 2
