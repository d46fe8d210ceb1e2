"""CPU lists, NUMA nodes and memory: any text in, a result or the named error out."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import (
    TopologyError,
    format_cpu_list,
    is_nvidia_gpu,
    parse_allowed_cpus,
    parse_cpu_list,
    parse_meminfo_total,
    parse_numa_node,
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
