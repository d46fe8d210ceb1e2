"""What the driver says: the texts of /proc/driver/nvidia and of nvidia-smi, laid over what sysfs tells."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_smi import (
    compare_with_matrix,
    complete_gpus,
    parse_driver_version,
    parse_gpu_information,
    parse_gpu_query,
    parse_topo_matrix,
    parse_uuid,
    without_driver,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import TopologyError
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
SERVER = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
UNKNOWN_UUID = "GPU-????????-????-????-????-????????????"


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012x}"


def information(fields: dict[str, str] | None = None) -> str:
    """`information` of a card, as driver 580 writes it."""
    lines = {
        "Model": "NVIDIA H200",
        "IRQ": "41",
        "GPU UUID": uuid(1),
        "Video BIOS": "96.00.a5.00.1a",
        "Bus Type": "PCIe",
        "DMA Mask": "0xfffffffffffff",
        "Bus Location": "0000:00:06.0",
        "Device Minor": "1",
        "GPU Firmware": "580.159.04",
        "GPU Excluded": "No",
        **(fields or {}),
    }
    return "".join(f"{name}: \t {value}\n" for name, value in lines.items())


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder)  \n"
            "GCC version:  gcc version 15.3.0 (GCC) \n",
            "580.159.04",
            True,
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC: 12\n",
            "535.54.03",
            False,
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  590.48  Release Build\n", "590.48", True),
    ],
)
def test_the_loaded_driver(text: str, version: str, is_open: bool) -> None:
    assert parse_driver_version(text) == {"version": version, "open": is_open}


@given(st.text() | st.text().map(lambda text: f"NVRM version: {text}"))
def test_any_version_text_is_a_version_or_the_named_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        assert parse_driver_version(text)["version"]


def test_a_version_text_without_a_version_is_named() -> None:
    with pytest.raises(TopologyError, match="NVRM version"):
        parse_driver_version("GCC version: gcc version 15.3.0\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (uuid(7), uuid(7)),
        (f" {uuid(0xAB).upper()}\n", uuid(0xAB)),
        # until the card was opened once, and in a text made anonymous
        (UNKNOWN_UUID, ""),
        (uuid(0), ""),
        ("[Unknown Error]", ""),
        ("[N/A]", ""),
        ("MIG-00000000-0000-0000-0000-000000000001", ""),
        (uuid(7)[:-1], ""),
        ("", ""),
    ],
)
def test_a_uuid_or_none(text: str, expected: str) -> None:
    assert parse_uuid(text) == expected


def test_the_drivers_page_of_a_card() -> None:
    assert parse_gpu_information(information()) == {
        "uuid": uuid(1),
        "model": "NVIDIA H200",
        "minor": 1,
        "excluded": False,
    }
    assert parse_gpu_information(information({"GPU Excluded": "Yes"}))["excluded"] is True
    assert parse_gpu_information(information({"Model": "Unknown", "GPU UUID": UNKNOWN_UUID}))["model"] == ""
    assert parse_gpu_information("") == {"uuid": "", "model": "", "minor": None, "excluded": False}


@given(st.text() | st.text().map(lambda text: f"Device Minor: {text}\nGPU UUID: {text}\n"))
def test_any_page_is_read(text: str) -> None:
    assert set(parse_gpu_information(text)) == {"uuid", "model", "minor", "excluded"}


def row(number: int, memory: str = "97887", mig: str = "Disabled", **fields: str) -> str:
    """One line of the query; the card's PCI bus is its number + 0x10."""
    bus = fields.get("bus", f"00000000:{0x10 + number:02X}:00.0")
    return f"{bus}, {fields.get('uuid', uuid(number))}, {fields.get('name', SERVER)}, {memory}, {mig}\n"


def test_a_healthy_answer() -> None:
    cards, others = parse_gpu_query(row(1) + row(2, bus="00000000:C1:00.0"))
    assert others == []
    assert list(cards) == ["0000:11:00.0", "0000:c1:00.0"]
    assert cards["0000:c1:00.0"] == {
        "uuid": uuid(2),
        "model": SERVER,
        "memory_mib": 97887,
        "mig": False,
        "state": "",
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # MIG is on and the memory is therefore not told
        (row(1, "[Insufficient Permissions]", "Enabled"), {"memory_mib": None, "mig": True, "state": ""}),
        # a card that has no MIG
        (row(1, mig="[N/A]"), {"memory_mib": 97887, "mig": False}),
        (row(1, mig="[Not Supported]"), {"mig": False}),
        (row(1, mig="[Unknown Error]"), {"mig": None}),
        (row(1, "[N/A]", "[Insufficient Permissions]"), {"memory_mib": None, "mig": None}),
        (row(1, "97887 MiB"), {"memory_mib": 97887}),
        (row(1, "9" * 5000), {"memory_mib": None}),
        (row(1, "[GPU requires reset]"), {"memory_mib": None, "state": "GPU requires reset", "uuid": uuid(1)}),
        (row(1, "[GPU is lost]", uuid="[GPU is lost]"), {"state": "GPU is lost", "uuid": ""}),
        (row(1, name="[Unknown Error]"), {"model": ""}),
        (row(1, name="A card, with a comma"), {"model": "A card, with a comma", "memory_mib": 97887}),
        (row(1, uuid=UNKNOWN_UUID), {"uuid": ""}),
    ],
)
def test_fields_that_are_not_told(line: str, expected: dict[str, Any]) -> None:
    cards, others = parse_gpu_query(line)
    assert others == []
    assert {name: cards["0000:11:00.0"][name] for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "No devices were found\n",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n",
        'Field "mig.mode.current" is not a valid field to query.\n',
        "Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error\n",
    ],
)
def test_complaints_are_no_cards(text: str) -> None:
    cards, others = parse_gpu_query(text)
    assert cards == {}
    assert others == text.splitlines()


@given(
    st.text()
    | st.lists(st.text(alphabet="0:1.,[] GPUE"), max_size=9).map(", ".join)
    | st.text().map(lambda text: row(1, text, text))
)
def test_any_answer_is_cards_and_complaints(text: str) -> None:
    cards, _ = parse_gpu_query(text)
    assert all(set(card) == {"uuid", "model", "memory_mib", "mig", "state"} for card in cards.values())


def gpu(bus: int, numa_node: int | None = 0, device_id: str = "0x2bb5") -> dict[str, Any]:
    address = f"0000:{0x10 + bus:02x}:00.0"
    return without_driver({"pci_address": address, "device_id": device_id, "numa_node": numa_node})


def known(*numbers: int, **fields: Any) -> dict[str, dict[str, Any]]:
    page = {"model": SERVER, "excluded": False, "mig": False}
    return {
        f"0000:{0x10 + number:02x}:00.0": {**page, "uuid": uuid(number), "minor": number, **fields}
        for number in numbers
    }


def listed(text: str) -> dict[str, dict[str, Any]]:
    return parse_gpu_query(text)[0]


def test_models_are_told_apart_without_a_driver() -> None:
    # and while the driver cannot be asked: Max-Q and Workstation cards differ in power
    gpus = [gpu(1, device_id="0x2bb4"), gpu(2, device_id="0x2bb4"), gpu(3, device_id="0x2bb1")]
    assert [card["model"] for card in gpus] == [
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    ]
    completed, _ = complete_gpus(gpus, known(1, 2, 3, model=""), {}, [])
    assert [card["model"] for card in completed] == [card["model"] for card in gpus]
    assert gpu(4, device_id="0x1eb8")["model"] == ""


def test_a_driver_completes_the_cards() -> None:
    completed, warnings = complete_gpus([gpu(1, 0)], known(1), listed(row(1)), [])
    assert warnings == []
    assert completed == [
        {
            "pci_address": "0000:11:00.0",
            "device_id": "0x2bb5",
            "numa_node": 0,
            "uuid": uuid(1),
            "model": SERVER,
            "memory_mib": 97887,
            "mig": False,
        }
    ]


def test_uuids_come_without_nvidia_smi_and_the_rest_stays_unknown() -> None:
    completed, warnings = complete_gpus([gpu(1)], known(1), {}, [])
    assert warnings == []
    assert (completed[0]["uuid"], completed[0]["memory_mib"], completed[0]["mig"]) == (uuid(1), None, None)


def test_mig_by_its_instances_when_nvidia_smi_says_nothing() -> None:
    completed, _ = complete_gpus([gpu(1)], known(1, mig=True), {}, [])
    assert completed[0]["mig"] is True
    # an instance is there, whatever else is said
    completed, _ = complete_gpus([gpu(1)], known(1, mig=True), listed(row(1, mig="[Unknown Error]")), [])
    assert completed[0]["mig"] is True


def test_a_card_opened_for_the_first_time_by_nvidia_smi() -> None:
    completed, warnings = complete_gpus([gpu(1)], known(1, uuid=""), listed(row(1)), [])
    assert (completed[0]["uuid"], warnings) == (uuid(1), [])


@pytest.mark.parametrize(
    ("pages", "answer", "complaints", "word"),
    [
        # no UUID anywhere
        (known(1, 2, uuid=""), "", [], "gives no UUID"),
        # bound to another driver: unknown to this one
        (known(1), row(1), [], "the driver does not have it"),
        # fallen off the bus, in the two ways nvidia-smi tells it, and left out without a word
        (
            known(1, 2),
            row(1),
            ["Unable to determine the device handle for GPU0000:12:00.0: Unknown Error"],
            "fallen off the bus",
        ),
        (known(1, 2), row(1) + row(2, "[GPU is lost]", uuid="[GPU is lost]"), [], "'GPU is lost'"),
        (known(1, 2), row(1), [], "nvidia-smi does not list it"),
        (known(1, 2), row(1) + row(2, "[GPU requires reset]"), [], "'GPU requires reset'; reset the card"),
        (known(1) | known(2, excluded=True), row(1), [], "NVreg_ExcludedGpus"),
    ],
)
def test_a_card_that_cannot_be_used_is_named_and_has_no_uuid(
    pages: dict[str, dict[str, Any]], answer: str, complaints: list[str], word: str
) -> None:
    completed, warnings = complete_gpus([gpu(1), gpu(2)], pages, listed(answer), complaints)
    assert completed[1]["uuid"] == ""
    assert completed[1]["pci_address"] == "0000:12:00.0"
    named = [warning for warning in warnings if warning.startswith("0000:12:00.0: ")]
    assert len(named) == 1
    assert word in named[0]
    if answer:
        assert completed[0]["uuid"] == uuid(1)


def test_a_card_that_only_the_driver_still_has_is_named() -> None:
    completed, warnings = complete_gpus([gpu(1)], known(1, 2), listed(row(1)), [])
    assert [card["uuid"] for card in completed] == [uuid(1)]
    assert [warning for warning in warnings if warning.startswith("0000:12:00.0: ")] != []


def test_a_uuid_that_two_cards_have_addresses_neither() -> None:
    completed, warnings = complete_gpus([gpu(1), gpu(2)], known(1) | known(2, uuid=uuid(1)), {}, [])
    assert [card["uuid"] for card in completed] == ["", ""]
    assert warnings == [f"0000:11:00.0, 0000:12:00.0: these cards have the same UUID {uuid(1)}"]


def test_two_sources_with_two_uuids() -> None:
    completed, warnings = complete_gpus([gpu(1)], known(1), listed(row(1, uuid=uuid(9))), [])
    assert completed[0]["uuid"] == uuid(9)
    assert uuid(9) in warnings[0]
    assert uuid(1) in warnings[0]


def test_mig_on_one_of_eight_cards() -> None:
    # nvidia-smi -L lists four MIG devices below that card: they are no GPUs
    published = (FIXTURES / "nvidia_smi_L_mig_on_gpu4.txt").read_text()
    assert len(published.splitlines()) == 12
    answer = "".join(
        row(number, "[Insufficient Permissions]" if number == 4 else "97887", "Enabled" if number == 4 else "Disabled")
        for number in range(1, 9)
    )
    completed, _ = complete_gpus([gpu(number) for number in range(1, 9)], known(*range(1, 9)), listed(answer), [])
    assert len(completed) == 8
    assert [card["pci_address"] for card in completed if card["mig"]] == ["0000:14:00.0"]
    assert completed[3]["memory_mib"] is None


def matrix(name: str) -> dict[str, Any]:
    return parse_topo_matrix((FIXTURES / f"{name}.txt").read_text())


def test_agreement_says_nothing() -> None:
    gpus = [gpu(number, 0 if number <= 4 else 1) for number in range(1, 9)]
    table = matrix("topo_8x_rtxpro6000d_pix_node_sys")
    addresses = [card["pci_address"] for card in gpus]
    kinds = {(int(one[3:]), int(other[3:])): kind for one, other, kind in table["links"]}
    links = [[addresses[one], addresses[other], kind] for (one, other), kind in sorted(kinds.items())]
    assert compare_with_matrix(gpus, links, table, addresses) == (links, [])


def test_nvlink_comes_from_the_driver_and_an_untold_node_stays_untold() -> None:
    gpus = [gpu(1, None), gpu(2, None)]
    addresses = ["0000:11:00.0", "0000:12:00.0"]
    links, warnings = compare_with_matrix(gpus, [[*addresses, "PHB"]], matrix("topo_2x_h200_vm"), addresses)
    assert links == [[*addresses, "NV18"]]
    assert warnings == [
        "0000:11:00.0, 0000:12:00.0: sysfs does not tell the NUMA node and nvidia-smi says 0; sysfs is followed, "
        "the node is unknown"
    ]


def test_sysfs_wins_over_the_driver_and_the_difference_is_told() -> None:
    gpus = [gpu(1, 0), gpu(2, 1)]
    addresses = ["0000:11:00.0", "0000:12:00.0"]
    links, warnings = compare_with_matrix(
        gpus, [[*addresses, "SYS"]], matrix("topo_2x_rtxpro6000_phb_desktop"), addresses
    )
    assert links == [[*addresses, "SYS"]]
    assert warnings == [
        "0000:12:00.0: sysfs says NUMA node 1 and nvidia-smi says 0; sysfs is followed",
        "0000:11:00.0 to 0000:12:00.0: the link is SYS by sysfs and PHB by nvidia-smi; sysfs is followed",
    ]


def test_a_link_that_sysfs_does_not_tell_comes_from_the_driver() -> None:
    addresses = ["0000:11:00.0", "0000:12:00.0"]
    links, _ = compare_with_matrix(
        [gpu(1, None), gpu(2, None)], [], matrix("topo_2x_rtxpro6000_phb_desktop"), addresses
    )
    assert links == [[*addresses, "PHB"]]


def test_the_drivers_order_may_be_another_than_that_of_the_bus() -> None:
    gpus = [gpu(number, 1 if number == 5 else 0) for number in range(1, 6)]
    # GPU0 of the driver is the last one on the bus
    addresses = ["0000:15:00.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0", "0000:14:00.0"]
    links, warnings = compare_with_matrix(gpus, [], matrix("topo_5gpu_gpu0_on_numa1"), addresses)
    assert warnings == []
    assert ["0000:11:00.0", "0000:12:00.0", "PHB"] in links
    assert [kind for one, other, kind in links if other == "0000:15:00.0"] == ["SYS"] * 4
    assert all(one < other for one, other, _ in links)


def test_a_matrix_of_another_number_of_cards_is_left_aside() -> None:
    links, warnings = compare_with_matrix([gpu(1)], [], matrix("topo_2x_h200_vm"), ["0000:11:00.0"])
    assert links == []
    assert "1 GPUs and its matrix has 2" in warnings[0]
