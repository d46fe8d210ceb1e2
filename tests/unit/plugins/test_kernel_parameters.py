"""Kernel parameters: which are wanted, refused, in effect or contradicted."""

from __future__ import annotations

import contextlib
import shlex

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.kernel_parameters import (
    KernelParameterError,
    cpu_vendor,
    find_contradictions,
    in_grub_configuration,
    largest_apic_id,
    missing_parameters,
    split_command_line,
    wanted_parameters,
)
from hypothesis import given
from hypothesis import strategies as st

EPYC = "".join(f"processor\t: {cpu}\nvendor_id\t: AuthenticAMD\napicid\t\t: {cpu * 258}\n\n" for cpu in range(2))
DEBIAN = "BOOT_IMAGE=/boot/vmlinuz-6.1.0-28-amd64 root=UUID=0a1b ro quiet"
WORDS = st.lists(st.text(alphabet='abciom_=-.,"', min_size=1, max_size=12)).map(" ".join)


def refusals(
    iommu: str = "keep",
    aspm: str = "keep",
    extra: tuple[str, ...] = (),
    vendor: str = "amd",
    apic_id: int | None = 127,
) -> list[str]:
    with pytest.raises(KernelParameterError) as caught:
        wanted_parameters(iommu, aspm, list(extra), vendor, apic_id)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("vendor_id\t: AuthenticAMD\n", "amd"),
        ("vendor_id\t: HygonGenuine\n", "amd"),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", "intel"),
        ("vendor_id\t: CentaurHauls\n", ""),
        ("CPU implementer\t: 0x41\n", ""),
        ("", ""),
    ],
)
def test_the_vendor_is_read(text: str, vendor: str) -> None:
    assert cpu_vendor(text) == vendor


def test_the_largest_apic_id_counts_not_the_number_of_cpus() -> None:
    assert largest_apic_id(EPYC) == 258
    assert largest_apic_id("initial apicid\t: 300\n") is None


@pytest.mark.parametrize(
    ("iommu", "vendor", "wanted"),
    [
        ("keep", "amd", []),
        ("off", "amd", ["amd_iommu=off"]),
        ("off", "intel", ["intel_iommu=off"]),
        ("passthrough", "amd", ["iommu=pt"]),
        ("passthrough", "", ["iommu=pt"]),
    ],
)
def test_the_iommu_switch_by_vendor(iommu: str, vendor: str, wanted: list[str]) -> None:
    assert wanted_parameters(iommu, "keep", [], vendor, 127) == wanted


def test_aspm_off_and_performance_are_two_things() -> None:
    assert wanted_parameters("keep", "off", [], "amd", 1) == ["pcie_aspm=off"]
    assert wanted_parameters("keep", "performance", [], "amd", 1) == ["pcie_aspm.policy=performance"]


def test_extra_parameters_come_last_and_once() -> None:
    extra = ["pci=realloc", "iommu=pt", "quiet", "hugepagesz=1G"]
    assert wanted_parameters("passthrough", "keep", extra, "amd", 1) == [
        "iommu=pt",
        "pci=realloc",
        "quiet",
        "hugepagesz=1G",
    ]


@pytest.mark.parametrize("parameter", ["pcie_acs_override=downstream,multifunction", "pcie-acs-override=id:10de:2bb5"])
def test_a_parameter_of_a_patched_kernel_is_refused_with_what_works(parameter: str) -> None:
    (problem,) = refusals(extra=(parameter,))
    assert parameter in problem
    assert "patched kernel" in problem
    assert "host_settings_acs_redirect" in problem
    assert "root ports and switch ports" in problem


@pytest.mark.parametrize(
    "parameter",
    [
        "",
        " ",
        "a b",
        "$(reboot)",
        "pci=disable_acs_redir=0000:30:01.0;0000:31:00.0",
        'x="y"',
        "a=`b`",
        "a\nb",
        "=1",
        "--",
    ],
)
def test_what_grubs_shell_would_read_otherwise_is_refused(parameter: str) -> None:
    (problem,) = refusals(extra=(parameter,))
    assert f"'{parameter}'" in problem


def test_iommu_off_is_refused_where_it_would_lose_cpus() -> None:
    (problem,) = refusals("off", apic_id=255)
    assert "255" in problem
    assert "254" in problem
    assert "'passthrough'" in problem
    # The last APIC ID that the mode without x2APIC reaches, and a vendor that keeps x2APIC.
    assert wanted_parameters("off", "keep", [], "amd", 254) == ["amd_iommu=off"]
    assert wanted_parameters("off", "keep", [], "intel", 1023) == ["intel_iommu=off"]


def test_iommu_off_needs_a_known_vendor() -> None:
    (problem,) = refusals("off", vendor="")
    assert "host_settings_iommu" in problem


def test_every_problem_is_told_at_once() -> None:
    assert len(refusals("off", extra=("pcie_acs_override=downstream", "a b"), vendor="")) == 3


@pytest.mark.parametrize(
    ("iommu", "aspm", "extra", "both"),
    [
        ("passthrough", "keep", "amd_iommu=off", ("amd_iommu=off", "iommu=pt")),
        ("off", "keep", "iommu=pt", ("iommu=pt", "amd_iommu=off")),
        ("keep", "performance", "pcie_aspm=off", ("pcie_aspm=off", "pcie_aspm.policy=performance")),
        ("keep", "off", "pcie_aspm=force", ("pcie_aspm=force", "pcie_aspm=off")),
    ],
)
def test_parameters_that_take_each_others_effect_are_refused(
    iommu: str, aspm: str, extra: str, both: tuple[str, str]
) -> None:
    told = " ".join(refusals(iommu, aspm, (extra,)))
    assert all(f"'{one}'" in told for one in both)


@pytest.mark.parametrize(
    ("line", "wanted", "missing"),
    [
        (DEBIAN, ["iommu=pt"], ["iommu=pt"]),
        (f"{DEBIAN} iommu=pt", ["iommu=pt"], []),
        (f"{DEBIAN} iommu=pt,force", ["iommu=pt"], []),
        (f"{DEBIAN} iommu=force iommu=pt", ["iommu=pt"], []),
        (f"{DEBIAN} iommu=ptx", ["iommu=pt"], ["iommu=pt"]),
        (f"{DEBIAN} pci=noaer pci=realloc", ["pci=noaer", "pci=realloc"], []),
        # Of these the last one counts.
        (f"{DEBIAN} pcie_aspm=off pcie_aspm=force", ["pcie_aspm=off"], ["pcie_aspm=off"]),
        (f"{DEBIAN} pcie_aspm=force pcie_aspm=off", ["pcie_aspm=off"], []),
        # The kernel takes dashes and underscores of a name for the same.
        (f"{DEBIAN} transparent-hugepage=madvise", ["transparent_hugepage=madvise"], []),
        (f"{DEBIAN} -- iommu=pt", ["iommu=pt"], ["iommu=pt"]),
        (f'{DEBIAN} dyndbg="file a.c +p; iommu=pt"', ["iommu=pt"], ["iommu=pt"]),
        (DEBIAN, ["quiet", "nosmt"], ["nosmt"]),
        (f"{DEBIAN} quiet=1", ["quiet"], ["quiet"]),
    ],
)
def test_what_the_running_kernel_lacks(line: str, wanted: list[str], missing: list[str]) -> None:
    assert missing_parameters(line, wanted) == missing


@pytest.mark.parametrize(
    ("line", "wanted", "against"),
    [
        (f"{DEBIAN} amd_iommu=on", ["amd_iommu=off"], [("amd_iommu=off", "amd_iommu=on")]),
        (f"{DEBIAN} intel_iommu=on iommu=pt", ["iommu=pt"], []),
        (f"{DEBIAN} iommu=soft,nopt", ["iommu=pt"], [("iommu=pt", "iommu=nopt"), ("iommu=pt", "iommu=soft")]),
        (
            f"{DEBIAN} pcie_aspm=off",
            ["pcie_aspm.policy=performance"],
            [("pcie_aspm.policy=performance", "pcie_aspm=off")],
        ),
        (f"{DEBIAN} isolcpus=1-3", ["isolcpus=4-7"], [("isolcpus=4-7", "isolcpus=1-3")]),
        (f"{DEBIAN} pci=noaer", ["pci=realloc"], []),
        (DEBIAN, ["iommu=pt", "pcie_aspm=off"], []),
    ],
)
def test_what_the_command_line_has_against_it(line: str, wanted: list[str], against: list[tuple[str, str]]) -> None:
    assert find_contradictions(line, wanted) == against


GRUB = """\
menuentry 'Debian GNU/Linux' {
\tlinux\t/boot/vmlinuz-6.1.0-28-amd64 root=UUID=0a1b ro iommu=pt quiet
\tinitrd\t/boot/initrd.img-6.1.0-28-amd64
}
menuentry 'Debian GNU/Linux (recovery mode)' {
\tlinux\t/boot/vmlinuz-6.1.0-28-amd64 root=UUID=0a1b ro single iommu=pt
}
menuentry 'Memory test' {
\tlinux /boot/memtest86+x64.bin
}
"""


def test_every_entry_of_grub_carries_the_parameters() -> None:
    assert in_grub_configuration(GRUB, ["iommu=pt"])
    assert not in_grub_configuration(GRUB, ["iommu=pt", "nosmt"])
    assert not in_grub_configuration(GRUB.replace("single iommu=pt", "single"), ["iommu=pt"])
    # Without entries nothing is known to start with them.
    assert not in_grub_configuration("", ["iommu=pt"])


@given(st.text() | WORDS, st.lists(st.text(max_size=20), max_size=4))
def test_any_command_line_is_read(line: str, wanted: list[str]) -> None:
    missing = missing_parameters(line, wanted)
    assert [one for one in wanted if one in missing] == missing
    assert {parameter for parameter, _ in find_contradictions(line, wanted)} <= set(wanted)
    in_grub_configuration(line, wanted)
    cpu_vendor(line)
    largest_apic_id(line)


@given(st.lists(st.text(max_size=30) | st.from_regex(r"[a-z_]{1,8}(=[a-z0-9]{0,8})?", fullmatch=True), max_size=4))
def test_what_is_accepted_survives_grubs_shell_and_the_kernel(extra: list[str]) -> None:
    with contextlib.suppress(KernelParameterError):
        wanted = wanted_parameters("keep", "keep", extra, "amd", 1)
        line = " ".join(wanted)
        assert shlex.split(line) == wanted
        assert len(split_command_line(line)) == len(wanted)
        assert not set(line) & set("\"'`$;&|\\\n")
