"""Host settings on a machine with a kernel of its own: parameters through GRUB and a real reboot, values that last.

The virtual machine's BIOS starts GRUB, and GRUB goes by the configuration that the guest's update-grub wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from nodes import free_port
from virtual_machine import VirtualMachine

pytestmark = pytest.mark.full

NAME = "gpu-node-test-settings"
EXTRA = {"host_settings_iommu": "passthrough", "host_settings_reboot_timeout": 900}
BOTH = ("main", "reboot")
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"
SCRIPT = "python3 /usr/local/lib/gpu-node/host_settings.py"
VALUES = "cat /proc/sys/kernel/numa_balancing /proc/sys/vm/swappiness /sys/kernel/mm/transparent_hugepage/enabled"


@pytest.fixture(scope="module")
def machine() -> Iterator[VirtualMachine]:
    one = VirtualMachine(NAME, free_port(), 0)
    one.down()
    one.up()
    yield one
    one.down()


def command_line(machine: VirtualMachine) -> list[str]:
    return machine.ssh("cat /proc/cmdline").split()


def test_a_dry_run_on_the_bare_machine_changes_nothing(machine: VirtualMachine) -> None:
    before = machine.ssh(VALUES).splitlines()
    # The kernel's own choice on two NUMA nodes, or the tests below would prove nothing.
    assert before[:2] == ["1", "60"]
    assert "[madvise]" not in before[2]
    play = machine.role("host_settings", "--check", "--diff", extra=EXTRA, tasks_from=BOTH)
    assert play.rc == 0, play.tail()
    assert "kernel.numa_balancing: found 1, wanted 0" in " ".join(play.output.split())
    assert machine.ssh(VALUES).splitlines() == before
    assert machine.run("ls /etc/default/grub.d/60-gpu-node.cfg /etc/gpu-node").stdout == ""


def test_without_consent_everything_but_the_reboot_is_done(machine: VirtualMachine) -> None:
    boot = machine.ssh(BOOT_ID)
    play = machine.role("host_settings", extra=EXTRA, tasks_from=BOTH)
    assert play.rc == 0, play.tail()
    assert "reboot required: the kernel was started without iommu=pt" in " ".join(play.output.split())
    assert machine.ssh(BOOT_ID) == boot
    assert "iommu=pt" not in command_line(machine)
    starts = machine.ssh(r"grep -E '^\s+linux\s' /boot/grub/grub.cfg").splitlines()
    assert starts
    for line in starts:
        assert {"iommu=pt", "console=ttyS0"} <= set(line.split())
    values = machine.ssh(VALUES).splitlines()
    assert values[:2] == ["0", "1"]
    assert "[madvise]" in values[2]


def test_with_consent_the_kernel_comes_back_with_its_parameters(machine: VirtualMachine) -> None:
    boot, before = machine.ssh(BOOT_ID), command_line(machine)
    play = machine.role("host_settings", extra={**EXTRA, "host_settings_reboot_allowed": True}, tasks_from=BOTH)
    assert play.rc == 0, play.tail()
    # The reboot alone: all else was set before.
    assert play.changed == 1, play.tail()
    assert machine.ssh(BOOT_ID) != boot
    line = command_line(machine)
    assert "iommu=pt" in line
    # Appended: what was there is there.
    assert {word for word in before if not word.startswith(("root=", "BOOT_IMAGE="))} - {"rw", "ro"} <= set(line)
    # Set anew at boot, by nobody's hand.
    machine.ssh("systemctl start gpu-node-host-settings.service", timeout=300)
    values = machine.ssh(VALUES).splitlines()
    assert values[:2] == ["0", "1"]
    assert "[madvise]" in values[2]
    assert machine.ssh("stat -f -c %T /sys/fs/cgroup").strip() == "cgroup2fs"


def test_the_second_run_changes_nothing_and_asks_for_no_reboot(machine: VirtualMachine) -> None:
    boot = machine.ssh(BOOT_ID)
    play = machine.role("host_settings", extra={**EXTRA, "host_settings_reboot_allowed": True}, tasks_from=BOTH)
    assert (play.rc, play.changed) == (0, 0), play.tail()
    assert machine.ssh(BOOT_ID) == boot


def test_drift_is_told_and_mended(machine: VirtualMachine) -> None:
    assert machine.ssh(f"{SCRIPT} --check").strip() == "everything is as wanted"
    machine.ssh("echo always >/sys/kernel/mm/transparent_hugepage/enabled; echo 60 >/proc/sys/vm/swappiness")
    told = machine.run(f"{SCRIPT} --check")
    assert (told.returncode, "always, wanted madvise" in told.stdout) == (1, True)
    play = machine.role("host_settings", extra=EXTRA)
    # One for sysctl, one for the boot unit.
    assert (play.rc, play.changed) == (0, 2), play.tail()
    values = machine.ssh(VALUES).splitlines()
    assert values[1] == "1"
    assert "[madvise]" in values[2]


def test_a_reboot_that_brought_nothing_is_a_failure(machine: VirtualMachine) -> None:
    # Wanted, and by the entry point alone never written: what a machine does that another boot loader starts.
    extra = {**EXTRA, "host_settings_kernel_parameters": ["nosmt"], "host_settings_reboot_allowed": True}
    boot = machine.ssh(BOOT_ID)
    play = machine.role("host_settings", extra=extra, tasks_from=("reboot",))
    assert play.rc == 2, play.tail()
    told = " ".join(play.output.split())
    assert "After the reboot: the kernel was started without nosmt, still" in told
    assert machine.ssh(BOOT_ID) != boot
