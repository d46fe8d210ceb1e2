"""CPU lists, NUMA nodes and memory: any text in, a result or the named error out."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import (
    GPU_MODELS,
    PCIE_LINKS,
    TopologyError,
    format_cpu_list,
    group_cores,
    is_nvidia_gpu,
    parse_allowed_cpus,
    parse_cpu_list,
    parse_meminfo_total,
    parse_numa_node,
    parse_socket,
    pci_address,
    pci_addresses_in,
    pci_order,
    pcie_link,
    pcie_links,
    usable_numa_nodes,
)
from hypothesis import given
from hypothesis import strategies as st

# texts that are near what the kernel writes, and any others
NEAR = st.text(alphabet="0123456789,- \n") | st.text() | st.from_regex(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9-]{1,8}){0,4}")
HUGE = "9" * 5000


def numa_node(number: int, cpus: list[int], gib: int = 64) -> dict[str, Any]:
    return {"id": number, "cpus": cpus, "memory_bytes": gib * 2**30}


@given(st.sets(st.integers(0, 4096)))
def test_a_cpu_list_comes_back_from_its_text(numbers: set[int]) -> None:
    text = format_cpu_list(list(numbers))
    assert parse_cpu_list(text) == sorted(numbers)
    assert parse_cpu_list(text + "\n") == sorted(numbers)


@given(NEAR)
def test_any_cpu_list_is_numbers_or_the_named_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        numbers = parse_cpu_list(text)
        assert numbers == sorted(set(numbers))
        assert parse_cpu_list(format_cpu_list(numbers)) == numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("\n", []),
        ("0\n", [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0-2,32-34", [0, 1, 2, 32, 33, 34]),
        # the second thread of every core comes after all the first ones
        ("4,5,36,37", [4, 5, 36, 37]),
        # numbers dealt to the nodes in turn
        ("3,19,35,51", [3, 19, 35, 51]),
        ("7,0-1", [0, 1, 7]),
    ],
)
def test_cpu_lists_of_real_machines(text: str, numbers: list[int]) -> None:
    assert parse_cpu_list(text) == numbers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-3,x", "'x' in the CPU list '0-3,x'"),
        ("-1", "'-1'"),
        ("3-0", "ends before it begins"),
        ("0-7:2/4", "neither a number nor a range"),
        ("0-9999999", "more than 65536"),
        (HUGE, "neither a number nor a range"),
        ("²", "neither a number nor a range"),
    ],
)
def test_what_is_no_cpu_list_is_named(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_cpu_list(text)
    assert message in str(caught.value)


def test_neighbours_are_written_as_a_range() -> None:
    assert format_cpu_list([9, 1, 0, 2, 8, 4]) == "0-2,4,8-9"


@given(st.text() | st.from_regex(r"(Node [0-9] )?MemTotal: +[0-9]{1,20} kB"))
def test_any_meminfo_is_bytes_or_the_named_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        assert parse_meminfo_total(text) >= 0


def test_meminfo_of_the_machine_and_of_a_node() -> None:
    assert parse_meminfo_total("MemTotal:        4096 kB\nMemFree: 1 kB\n") == 4 * 2**20
    assert parse_meminfo_total("\nNode 1 MemTotal:       2048 kB\nNode 1 MemFree: 9 kB\n") == 2 * 2**20
    for text in ("", "MemTotal: many kB", f"MemTotal: {HUGE} kB"):
        with pytest.raises(TopologyError, match="MemTotal"):
            parse_meminfo_total(text)


@given(st.text() | NEAR.map(lambda text: f"Name:\tsystemd\nCpus_allowed_list:\t{text}\nMems_allowed_list:\t0\n"))
def test_any_process_status_is_cpus_or_the_named_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        assert parse_allowed_cpus(text) == sorted(parse_allowed_cpus(text))


def test_allowed_cpus_of_a_confined_process() -> None:
    assert parse_allowed_cpus("Cpus_allowed:\t000f\nCpus_allowed_list:\t2-3,10\n") == [2, 3, 10]
    # a list that is blank is not that of the next line
    with pytest.raises(TopologyError, match="Cpus_allowed_list"):
        parse_allowed_cpus("Cpus_allowed_list:\n3\n")


def test_only_nodes_with_usable_cpus_and_memory_are_used() -> None:
    nodes = [
        numa_node(3, [6, 7], gib=0),
        numa_node(2, []),
        numa_node(1, [4, 5]),
        numa_node(0, [0, 1, 2, 3]),
        numa_node(4, [8, 9]),
    ]
    assert [(node["id"], node["cpus"]) for node in usable_numa_nodes(nodes, [1, 2, 4, 6])] == [(0, [1, 2]), (1, [4])]


def test_eight_nodes_with_interleaved_numbers_stay_apart() -> None:
    nodes = [numa_node(number, list(range(number, 48, 8))) for number in range(8)]
    usable = usable_numa_nodes(nodes, list(range(48)))
    assert [format_cpu_list(node["cpus"]) for node in usable][:2] == ["0,8,16,24,32,40", "1,9,17,25,33,41"]
    assert sorted(cpu for node in usable for cpu in node["cpus"]) == list(range(48))


@pytest.mark.parametrize(
    ("text", "node"), [("0\n", 0), ("1", 1), ("-1\n", None), ("", None), ("N/A", None), (HUGE, None)]
)
def test_a_node_that_the_platform_does_not_tell_is_unknown(text: str, node: int | None) -> None:
    assert parse_numa_node(text) == node


@given(st.text())
def test_any_numa_node_is_a_number_or_unknown(text: str) -> None:
    node = parse_numa_node(text)
    assert node is None or node >= 0


@pytest.mark.parametrize(
    ("vendor", "device_class", "expected"),
    [
        ("0x10de\n", "0x030000\n", True),
        ("0x10de\n", "0x030200\n", True),
        ("0x10de\n", "0x040300\n", False),
        ("0x1002\n", "0x030000\n", False),
        ("", "", False),
    ],
)
def test_a_gpu_is_told_from_its_audio_function(vendor: str, device_class: str, expected: bool) -> None:
    assert is_nvidia_gpu(vendor, device_class) is expected


@pytest.mark.parametrize(
    ("packages", "socket"),
    [
        (["0\n", "0\n"], 0),
        (["1"], 1),
        # a virtual machine that gives every CPU a socket of its own, one that tells nothing, and files that are missing
        (["0", "1"], None),
        (["-1", "-1"], None),
        (["", ""], None),
        (["0", ""], None),
        ([], None),
    ],
)
def test_the_socket_of_a_node_is_that_of_its_cpus(packages: list[str], socket: int | None) -> None:
    assert parse_socket(packages) == socket


def test_threads_of_a_core_stay_together() -> None:
    # the second thread comes 64 later, or right after the first
    far = {cpu: f"{cpu % 64},{cpu % 64 + 64}\n" for cpu in range(128)}
    assert group_cores(far, list(range(128))) == [[cpu, cpu + 64] for cpu in range(64)]
    assert group_cores({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert group_cores({0: "0", 1: "1"}, [0, 1]) == [[0], [1]]


def test_512_cpus_are_256_cores() -> None:
    cores = group_cores({cpu: f"{cpu % 256},{cpu % 256 + 256}" for cpu in range(512)}, list(range(512)))
    assert len(cores) == 256
    assert cores[255] == [255, 511]


def test_cores_keep_only_usable_cpus() -> None:
    assert group_cores({0: "0,4", 1: "1,5", 4: "0,4"}, [0, 1, 4]) == [[0, 4], [1]]


def test_cores_are_unknown_when_a_cpu_does_not_tell_or_the_texts_contradict() -> None:
    assert group_cores({0: "0-1"}, [0, 1]) == []
    assert group_cores({0: "0-1", 1: "1"}, [0, 1]) == []
    assert group_cores({}, []) == []


@given(st.dictionaries(st.integers(0, 20), NEAR, max_size=8))
def test_any_siblings_are_cores_or_unknown_or_the_named_error(siblings: dict[int, str]) -> None:
    with contextlib.suppress(TopologyError):
        cores = group_cores(siblings, sorted(siblings))
        assert cores == [] or sorted(cpu for core in cores for cpu in core) == sorted(siblings)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0000:38:00.0", "0000:38:00.0"),
        ("00000000:38:00.0", "0000:38:00.0"),
        ("0000:C1:00.0\n", "0000:c1:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("38:00.0", ""),
        ("0000:38:00.8", ""),
        ("GPU0", ""),
        ("", ""),
    ],
)
def test_pci_addresses_are_written_as_sysfs_writes_them(text: str, address: str) -> None:
    assert pci_address(text) == address


def test_pci_addresses_are_found_in_messages() -> None:
    assert pci_addresses_in("handle for GPU0000:CB:00.0: Unknown Error") == {"0000:cb:00.0"}
    assert pci_addresses_in("handle for GPU1: 00000000:34:00.0 and 0000:49:00.0") == {"0000:34:00.0", "0000:49:00.0"}
    assert pci_addresses_in("No devices were found") == set()


def test_pci_order_knows_domains_with_more_than_four_digits() -> None:
    addresses = ["10000:01:00.0", "0002:00:00.0", "0000:c1:00.0", "0000:05:00.0"]
    assert sorted(addresses, key=pci_order) == list(reversed(addresses))


@given(st.text())
def test_any_address_has_an_order(text: str) -> None:
    assert pci_order(text) == pci_order(text)
    assert pci_address(text) == "" or pci_address(pci_address(text)) == pci_address(text)


ROOT_30 = "/sys/devices/pci0000:30"
# a switch: its upstream port 31:00.0 below the root port 30:01.0, and downstream ports 32:00.0 and 32:01.0
SWITCH = f"{ROOT_30}/0000:30:01.0/0000:31:00.0"


@pytest.mark.parametrize(
    ("one", "other", "nodes", "kind"),
    [
        # one switch, though sysfs shows three bridges on the way
        (f"{SWITCH}/0000:32:00.0/0000:33:00.0", f"{SWITCH}/0000:32:01.0/0000:34:00.0", (0, 0), "PIX"),
        # two functions of a board, and two devices on the bus behind one bridge
        (f"{ROOT_30}/0000:30:01.0/0000:31:00.0", f"{ROOT_30}/0000:30:01.0/0000:31:00.1", (0, 0), "PIX"),
        # a second switch below the first one, for one of the two or for both
        (
            f"{SWITCH}/0000:32:00.0/0000:33:00.0",
            f"{SWITCH}/0000:32:01.0/0000:35:00.0/0000:36:00.0/0000:37:00.0",
            (0, 0),
            "PXB",
        ),
        (
            f"{SWITCH}/0000:32:00.0/0000:33:00.0/0000:34:00.0/0000:35:00.0",
            f"{SWITCH}/0000:32:01.0/0000:36:00.0/0000:37:00.0/0000:38:00.0",
            (0, 0),
            "PXB",
        ),
        # ports of one host bridge, and the bus of a virtual machine that does not tell its nodes
        (f"{ROOT_30}/0000:30:01.0/0000:31:00.0", f"{ROOT_30}/0000:30:02.0/0000:38:00.0", (0, 0), "PHB"),
        (
            "/sys/devices/pci0000:00/0000:00:06.0",
            "/sys/devices/pci0000:00/0000:00:07.0",
            (None, None),
            "PHB",
        ),
        # other host bridges
        (f"{ROOT_30}/0000:30:01.0/0000:31:00.0", "/sys/devices/pci0000:40/0000:40:01.0/0000:41:00.0", (0, 0), "NODE"),
        (f"{ROOT_30}/0000:30:01.0/0000:31:00.0", "/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0", (0, 1), "SYS"),
        (f"{ROOT_30}/0000:30:01.0/0000:31:00.0", "/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0", (0, None), None),
        # the same bus number in another domain is another host bridge
        ("/sys/devices/pci0000:00/0000:00:01.0", "/sys/devices/pci0001:00/0001:00:01.0", (None, None), None),
        # a guest whose every card has a domain of its own
        (
            "/sys/devices/LNXSYSTM:00/VMBUS:01/a-b/pcia1b2:00/a1b2:00:00.0",
            "/sys/devices/LNXSYSTM:00/VMBUS:01/c-d/pcic3d4:00/c3d4:00:00.0",
            (1, 1),
            "NODE",
        ),
        # a domain that hangs below another one's device
        (
            "/sys/devices/pci0000:64/0000:64:00.5/pci10000:00/10000:00:02.0/10000:01:00.0",
            "/sys/devices/pci0000:64/0000:64:00.5/pci10000:00/10000:00:03.0/10000:02:00.0",
            (0, 0),
            "PHB",
        ),
        # no path
        ("", "", (0, 0), "NODE"),
        ("", "", (None, None), None),
    ],
)
def test_links_from_paths(one: str, other: str, nodes: tuple[int | None, int | None], kind: str | None) -> None:
    assert pcie_link((one, other), nodes) == kind
    assert pcie_link((other, one), (nodes[1], nodes[0])) == kind


@given(
    st.lists(st.tuples(st.text(alphabet="pci0:/1.") | st.text(), st.none() | st.integers(0, 3)), max_size=16),
)
def test_any_paths_give_each_pair_one_known_link_at_most(cards: list[tuple[str, int | None]]) -> None:
    addresses = [f"0000:{number:02x}:00.0" for number in range(len(cards))]
    gpus = [{"pci_address": name, "numa_node": node} for name, (_, node) in zip(addresses, cards, strict=True)]
    links = pcie_links(gpus, {name: path for name, (path, _) in zip(addresses, cards, strict=True)})
    assert {kind for _, _, kind in links} <= set(PCIE_LINKS)
    pairs = [(one, other) for one, other, _ in links]
    assert pairs == sorted(set(pairs))
    assert all(one < other for one, other in pairs)


def test_cards_have_names_before_a_driver_has() -> None:
    assert GPU_MODELS["0x2bb5"] == "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    # the two that fit the same workstations differ in power: 600 W and 300 W
    assert "Max-Q" in GPU_MODELS["0x2bb4"]
    assert "Max-Q" not in GPU_MODELS["0x2bb1"]
