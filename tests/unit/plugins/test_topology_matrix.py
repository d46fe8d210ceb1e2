"""The matrix of `nvidia-smi topo -m`: what was published, every way it comes in, and what is no such matrix."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_smi import has_topo_matrix, parse_topo_matrix
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import TopologyError, format_cpu_list
from ansible_collections.serving.gpu_node.plugins.module_utils.topology_file import topology_from_matrix
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
PUBLISHED = sorted(path.stem for path in FIXTURES.glob("topo_*.txt"))
UNDERLINED, PLAIN = "\x1b[4m", "\x1b[0m"


def published(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def link_of(matrix: dict[str, Any], one: int, other: int) -> str | None:
    kinds = [kind for first, second, kind in matrix["links"] if (first, second) == (f"GPU{one}", f"GPU{other}")]
    return kinds[0] if kinds else None


def cpus_of(matrix: dict[str, Any]) -> list[str]:
    """The CPU list of each GPU, as text; empty when unknown."""
    return [format_cpu_list(matrix["cpus"][name] or []) for name in matrix["gpus"]]


def nodes_of(matrix: dict[str, Any]) -> list[list[int] | None]:
    return [matrix["numa_nodes"][name] for name in matrix["gpus"]]


def matrix_text(
    links: list[list[str]],
    columns: tuple[str, ...] = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"),
    values: Sequence[tuple[str, ...]] | None = None,
    names: list[str] | None = None,
    tabs: bool = True,
) -> str:
    """A matrix as the driver prints it: links with a space on both sides for X, an empty field before the last one."""
    names = names or [f"GPU{number}" for number in range(len(links))]
    values = values or [("0-15", "0", "N/A")[: len(columns)]] * len(links)
    rows = [["", *names, *columns]]
    for name, fields, rest in zip(names, links, values, strict=True):
        rows.append([name, *(f" {field} " if field == "X" else field for field in fields), *rest])
    text = "".join("\t".join(row) + "\n" for row in rows)
    return text if tabs else text.expandtabs(8)


PAIR = [["X", "PIX"], ["PIX", "X"]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_matrix_is_read(name: str) -> None:
    matrix = parse_topo_matrix(published(name))
    count = len(matrix["gpus"])
    assert matrix["gpus"] == [f"GPU{number}" for number in range(count)]
    assert len(matrix["links"]) == count * (count - 1) // 2
    assert matrix["warnings"] == []
    assert all(nodes is not None and len(nodes) == 1 for nodes in nodes_of(matrix))
    assert all(cpus_of(matrix))


def test_two_sockets_with_two_close_pairs_each() -> None:
    matrix = parse_topo_matrix(published("topo_8x_rtxpro6000d_pix_node_sys"))
    assert cpus_of(matrix) == ["0-31,64-95"] * 4 + ["32-63,96-127"] * 4
    assert nodes_of(matrix) == [[0]] * 4 + [[1]] * 4
    assert [link_of(matrix, *pair) for pair in ((0, 1), (2, 3), (4, 5), (6, 7))] == ["PIX"] * 4
    assert [link_of(matrix, *pair) for pair in ((0, 2), (1, 3), (5, 6))] == ["NODE"] * 3
    assert [link_of(matrix, *pair) for pair in ((0, 4), (3, 4), (3, 7))] == ["SYS"] * 3


def test_six_gpus_on_one_node_and_two_on_the_other() -> None:
    matrix = parse_topo_matrix(published("topo_8gpu_split_6_2"))
    assert nodes_of(matrix) == [[0]] * 6 + [[1]] * 2
    assert cpus_of(matrix) == ["0-15,32-47"] * 6 + ["16-31,48-63"] * 2
    assert link_of(matrix, 1, 2) == link_of(matrix, 3, 4) == link_of(matrix, 6, 7) == "PHB"


def test_the_first_gpu_may_be_on_the_last_node() -> None:
    matrix = parse_topo_matrix(published("topo_5gpu_gpu0_on_numa1"))
    assert nodes_of(matrix) == [[1], [0], [0], [0], [0]]
    assert cpus_of(matrix) == ["8-15,24-31"] + ["0-7,16-23"] * 4
    assert [link_of(matrix, 0, other) for other in range(1, 5)] == ["SYS"] * 4


def test_a_header_without_the_gpus_own_memory_node() -> None:
    # counted from the end, the field before the last one would be the CPU list
    matrix = parse_topo_matrix(published("topo_8x_4090_no_gpu_numa_id_column"))
    assert nodes_of(matrix) == [[0]] * 4 + [[1]] * 4
    assert cpus_of(matrix) == ["0-63,128-191"] * 4 + ["64-127,192-255"] * 4


def test_nvlink_under_an_underlined_header() -> None:
    text = published("topo_2x_h200_vm")
    assert UNDERLINED in text
    matrix = parse_topo_matrix(text)
    assert matrix["links"] == [["GPU0", "GPU1", "NV18"]]
    assert cpus_of(matrix) == ["0-31", "0-31"]


def test_384_cpus_in_two_ranges() -> None:
    matrix = parse_topo_matrix(published("topo_8gpu_vm_0-191_192-383"))
    assert cpus_of(matrix) == ["0-191"] * 4 + ["192-383"] * 4
    assert [link_of(matrix, *pair) for pair in ((1, 2), (5, 6), (0, 1))] == ["PIX", "PIX", "NODE"]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.expandtabs(8),
        lambda text: re.sub(r"(?m)(?<=\S) {2,}", "\t", text),
        lambda text: UNDERLINED + text.replace("\n", PLAIN + "\n", 1),
        # the escape character got lost, or was written out
        lambda text: "[4m" + text.replace("\n", "[0m\n", 1),
        lambda text: r"\x1b[4m" + text.replace("\n", r"\x1b[0m" + "\n", 1),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n", "   \n"),
        lambda text: text.replace("\n", "\n\n"),
        lambda text: "$ nvidia-smi topo -m\n" + text + "\n$ \n",
        lambda text: "### nvidia-smi topo -m\n\n" + text + "### lscpu\nCPU(s):  8\n",
        lambda text: "node7:~ # nvidia-smi topo -m\n" + text.rstrip() + "\nnode7:~ #\n",
        lambda text: textwrap.indent(text, "    "),
        lambda text: text.partition("\n\nLegend")[0],
    ],
)
def test_a_matrix_reads_the_same_however_it_was_copied(name: str, change: Any) -> None:
    assert parse_topo_matrix(change(published(name))) == parse_topo_matrix(published(name))


def wrap_at(text: str, width: int, strip: bool = True) -> str:
    """What a terminal of this width shows, copied with or without the spaces at the end of a line."""
    lines = []
    for line in text.replace(UNDERLINED, "").replace(PLAIN, "").expandtabs(8).splitlines():
        pieces = [line[start : start + width] for start in range(0, len(line), width)] or [""]
        lines += [piece.rstrip() if strip else piece for piece in pieces]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("strip", [True, False])
@pytest.mark.parametrize("width", [80, 72, 76, 100, 120])
def test_rows_wrapped_by_a_terminal(name: str, strip: bool, width: int) -> None:
    matrix = published(name).partition("Legend")[0]
    assert parse_topo_matrix(wrap_at(matrix, width, strip)) == parse_topo_matrix(published(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_wrapped_between_words(name: str) -> None:
    lines = published(name).partition("Legend")[0].expandtabs(8).splitlines()
    wrapped = [piece for line in lines for piece in textwrap.wrap(line, 80, drop_whitespace=True) or [""]]
    assert parse_topo_matrix("\n".join(wrapped)) == parse_topo_matrix(published(name))


def test_a_cpu_list_cut_in_two() -> None:
    text = wrap_at(published("topo_8x_rtxpro6000d_pix_node_sys").partition("Legend")[0], 80)
    # the terminal's edge is within the header's words and within the CPU list
    assert "CPU Affi\nnity" in text
    assert "0-31,64-\n95" in text
    assert cpus_of(parse_topo_matrix(text)) == ["0-31,64-95"] * 4 + ["32-63,96-127"] * 4


@pytest.mark.parametrize("count", range(1, 17))
@pytest.mark.parametrize("width", [0, 80])
def test_one_to_sixteen_gpus(count: int, width: int) -> None:
    links = [["X" if a == b else "PIX" if a // 2 == b // 2 else "SYS" for b in range(count)] for a in range(count)]
    values = [(f"{number}", f"{number}", "N/A") for number in range(count)]
    text = matrix_text(links, values=values)
    matrix = parse_topo_matrix(wrap_at(text, width) if width else text)
    assert matrix["gpus"] == [f"GPU{number}" for number in range(count)]
    assert nodes_of(matrix) == [[number] for number in range(count)]
    assert [kind for _, _, kind in matrix["links"]].count("PIX") == count // 2
    assert len(matrix["links"]) == count * (count - 1) // 2


NICS = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNODE\tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU1\tNODE\t X \tNODE\tSYS\t0-47,96-143\t0\t\tN/A
NIC0\tPIX\tNODE\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
"""


@pytest.mark.parametrize(
    "text",
    [
        NICS,
        NICS.expandtabs(8),
        # older drivers name the network cards themselves
        NICS.replace("NIC0", "mlx5_0").replace("NIC1", "mlx5_bond_0"),
        # the rows of the network cards cut off
        "\n".join(NICS.splitlines()[:3]),
        # rows in another order
        "\n".join([NICS.splitlines()[number] for number in (0, 3, 2, 1, 4)]),
    ],
)
def test_network_cards_are_passed_over(text: str) -> None:
    matrix = parse_topo_matrix(text)
    assert matrix["gpus"] == ["GPU0", "GPU1"]
    assert matrix["links"] == [["GPU0", "GPU1", "NODE"]]
    assert cpus_of(matrix) == ["0-47,96-143"] * 2
    assert nodes_of(matrix) == [[0], [0]]


@pytest.mark.parametrize(
    ("columns", "values", "cpus", "node"),
    [
        ((), (), "", None),
        (("CPU Affinity",), ("0-15",), "0-15", None),
        (("NUMA Affinity",), ("1",), "", [1]),
        (("NUMA Affinity", "CPU Affinity"), ("1", "0-15"), "0-15", [1]),
        (("CPU Affinity", "NUMA Affinity"), ("0,8,16", "3"), "0,8,16", [3]),
        (("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"), ("N/A", "N/A", "N/A"), "", None),
        # near to two nodes
        (("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"), ("0-31", "0-1", "N/A"), "0-31", [0, 1]),
        # the node of the card's own memory is not where the card is
        (("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"), ("0-71", "0", "2"), "0-71", [0]),
        # a column that a later driver may have
        (("CPU Affinity", "NUMA Affinity", "GPU NUMA ID", "Fabric ID"), ("0-7", "1", "N/A", "4"), "0-7", [1]),
        # an empty field between tabs
        (("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"), ("", "1", "N/A"), "", [1]),
        (("CPU Affinity", "NUMA Affinity", "GPU NUMA ID"), ("0-7", "", "N/A"), "0-7", None),
    ],
)
def test_columns_by_name(columns: tuple[str, ...], values: tuple[str, ...], cpus: str, node: list[int] | None) -> None:
    matrix = parse_topo_matrix(matrix_text(PAIR, columns, [values] * 2))
    assert matrix["links"] == [["GPU0", "GPU1", "PIX"]]
    assert cpus_of(matrix) == [cpus] * 2
    assert nodes_of(matrix) == [node] * 2


def test_an_empty_field_without_tabs_is_not_guessed() -> None:
    text = matrix_text(PAIR, values=[("", "1", "N/A")] * 2, tabs=False)
    matrix = parse_topo_matrix(text)
    assert cpus_of(matrix) == ["", ""]
    assert nodes_of(matrix) == [None, None]
    assert matrix["warnings"] == ["the affinity of GPU0, GPU1 is unknown: its row has fewer fields than the header"]


def test_what_older_drivers_call_soc_is_sys() -> None:
    assert link_of(parse_topo_matrix(matrix_text([["X", "SOC"], ["SOC", "X"]])), 0, 1) == "SYS"


def test_a_link_that_is_not_available_is_left_out() -> None:
    assert parse_topo_matrix(matrix_text([["X", "N/A"], ["N/A", "X"]]))["links"] == []


def test_gpus_are_in_the_order_of_their_numbers() -> None:
    links = [["X", "PIX", "SYS"], ["PIX", "X", "NODE"], ["SYS", "NODE", "X"]]
    matrix = parse_topo_matrix(matrix_text(links, names=["GPU10", "GPU2", "GPU9"]))
    assert matrix["gpus"] == ["GPU2", "GPU9", "GPU10"]
    assert matrix["links"] == [["GPU2", "GPU9", "NODE"], ["GPU2", "GPU10", "PIX"], ["GPU9", "GPU10", "SYS"]]


def test_512_cpus_one_by_one() -> None:
    values = [(",".join(str(cpu) for cpu in range(start, 512, 2)), str(start), "N/A") for start in range(2)]
    matrix = parse_topo_matrix(matrix_text(PAIR, values=values))
    assert matrix["cpus"]["GPU1"] == list(range(1, 512, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header line"),
        ("No devices were found\n", "no header line"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-00000000-0000-0000-0000-000000000001)\n", "no header line"),
        (published("lscpu_dell_interleaved_8_nodes"), "no header line"),
        # the other matrix of nvidia-smi: which cards reach each other
        (published("p2p_2x_h200_vm"), "'OK' is none"),
        ("GPU0 and GPU1 are broken\n", "no row for GPU0, GPU1"),
        (matrix_text(PAIR).splitlines()[0], "no row for GPU0, GPU1"),
        ("\n".join(matrix_text(PAIR).splitlines()[:2]), "no row for GPU1"),
        ("\n".join([*matrix_text(PAIR).splitlines(), "GPU1\tPIX\t X \t0-15\t0\t\tN/A"]), "GPU1 has two rows"),
        ("\n".join([*matrix_text(PAIR).splitlines(), "GPU2\tPIX\tPIX\t0-15\t0\t\tN/A"]), "GPU2 has no column"),
        (matrix_text(PAIR, names=["GPU0", "GPU0"]), "'GPU0' is twice in the header"),
        (matrix_text([["X"], ["PIX", "X"]], values=[("0-15", "0", "N/A")] * 2), "row GPU0 of the matrix has 1 link"),
        (matrix_text([["X", "PIX"], ["PIX"]]), "row GPU1 of the matrix has 1 link fields and needs 2"),
        (matrix_text([["X", "PIX"], ["PIX", "X", "SYS"]]), "row GPU1 of the matrix has 4 fields after its links"),
        (matrix_text([["X", "FAR"], ["FAR", "X"]]), "'FAR' is none"),
        (matrix_text([["X", "NV"], ["NV", "X"]]), "'NV' is none"),
        (matrix_text([["PIX", "X"], ["X", "PIX"]]), "'PIX' in the column GPU0; X stands for the device itself"),
        (matrix_text([["X", "X"], ["X", "X"]]), "'X' in the column GPU1"),
        # edited or cut: nobody can tell which one is right
        (matrix_text([["X", "PIX"], ["SYS", "X"]]), "GPU0 to GPU1 is PIX in one row and SYS in the other"),
        (matrix_text(PAIR, values=[("0-15", "0", "N/A"), ("0-x", "0", "N/A")]), "CPU Affinity of GPU1: '0-x'"),
        (matrix_text(PAIR, values=[("15-0", "0", "N/A")] * 2), "ends before it begins"),
        (matrix_text(PAIR, values=[("0-15", "zero", "N/A")] * 2), "NUMA Affinity of GPU0: 'zero'"),
        (matrix_text(PAIR, columns=("CPU Affinity", "CPU Affinity")), "'CPU Affinity' is twice"),
    ],
)
def test_what_is_no_such_matrix_is_named(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topo_matrix(text)
    assert message in str(caught.value)
    assert "copy the whole output of nvidia-smi topo -m" in str(caught.value)


def test_text_before_the_matrix_may_look_like_its_header() -> None:
    text = "GPU0 and GPU1 are fine\n\n" + published("p2p_2x_h200_vm") + published("topo_2x_h200_vm")
    assert parse_topo_matrix(text)["links"] == [["GPU0", "GPU1", "NV18"]]


KIND = st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS", "NV1", "NV18"])


@st.composite
def matrices(draw: st.DrawFn) -> tuple[str, dict[tuple[int, int], str], list[list[int]], list[int]]:
    """The text of a matrix of up to 16 GPUs on sparse nodes, and what is in it."""
    count = draw(st.integers(1, 16))
    kinds = {(a, b): draw(KIND) for a in range(count) for b in range(a + 1, count)}
    numbers = draw(st.lists(st.integers(0, 64), min_size=count, max_size=count))
    cpus = [
        sorted(draw(st.sets(st.integers(0, 511), min_size=1, max_size=4)) if wild else range(node * 8, node * 8 + 8))
        for node, wild in zip(numbers, draw(st.lists(st.booleans(), min_size=count, max_size=count)), strict=True)
    ]
    links = [["X" if a == b else kinds[min(a, b), max(a, b)] for b in range(count)] for a in range(count)]
    values = [(format_cpu_list(cpus[number]), str(numbers[number]), "N/A") for number in range(count)]
    text = matrix_text(links, values=values, tabs=draw(st.booleans()))
    if draw(st.booleans()):
        text = UNDERLINED + text.replace("\n", PLAIN + "\n", 1)
    return text, kinds, cpus, numbers


@given(matrices())
def test_a_matrix_comes_back_from_its_text(
    made: tuple[str, dict[tuple[int, int], str], list[list[int]], list[int]],
) -> None:
    text, kinds, cpus, numbers = made
    matrix = parse_topo_matrix(text)
    assert {(int(one[3:]), int(other[3:])): kind for one, other, kind in matrix["links"]} == kinds
    assert [matrix["cpus"][name] for name in matrix["gpus"]] == cpus
    assert nodes_of(matrix) == [[number] for number in numbers]


@given(matrices(), st.integers(40, 200), st.booleans())
def test_a_wrapped_matrix_comes_back_or_is_refused(
    made: tuple[str, dict[tuple[int, int], str], list[list[int]], list[int]], width: int, strip: bool
) -> None:
    text, kinds, cpus, numbers = made
    try:
        matrix = parse_topo_matrix(wrap_at(text, width, strip))
    except TopologyError:
        # Cut so that a row cannot be told from the rest of another: refused, and not misread.
        assert width < 64
        return
    assert {(int(one[3:]), int(other[3:])): kind for one, other, kind in matrix["links"]} == kinds
    assert [matrix["cpus"][name] for name in matrix["gpus"]] == cpus
    assert nodes_of(matrix) == [[number] for number in numbers]


WORDS = st.sampled_from(
    ["GPU0", "GPU1", "NIC0", "X", " X ", "PIX", "SYS", "NV4", "N/A", "0-3", "0", "1", "-1", "CPU Affinity", "\t", "\n"]
) | st.sampled_from(["NUMA Affinity", "GPU NUMA ID", "\x1b[4m", "[0m", "Legend:", "9" * 5000, "²", "GPU" + "9" * 5000])
NEAR = st.lists(WORDS, max_size=40).map(" ".join) | st.lists(WORDS, max_size=40).map("\t".join) | st.text()


@given(NEAR)
def test_any_text_is_a_matrix_or_the_named_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        matrix = parse_topo_matrix(text)
        assert has_topo_matrix(text)
        assert matrix["gpus"]


@given(NEAR | matrices().map(lambda made: made[0]))
def test_any_text_is_a_topology_or_the_named_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        topology = topology_from_matrix(text)
        on_nodes = [cpu for node in topology["numa_nodes"] for cpu in node["cpus"]]
        assert len(on_nodes) == len(set(on_nodes))
        assert set(on_nodes) <= set(topology["cpus"])


def test_a_topology_to_plan_with_from_the_text_alone() -> None:
    topology = topology_from_matrix(published("topo_8x_rtxpro6000d_pix_node_sys"))
    assert [(node["id"], format_cpu_list(node["cpus"])) for node in topology["numa_nodes"]] == [
        (0, "0-31,64-95"),
        (1, "32-63,96-127"),
    ]
    assert {(node["memory_bytes"], node["socket"]) for node in topology["numa_nodes"]} == {(None, None)}
    assert topology["cpus"] == list(range(128))
    assert [gpu["numa_node"] for gpu in topology["gpus"]] == [0] * 4 + [1] * 4
    assert topology["gpus"][7] == {
        "pci_address": "GPU7",
        "device_id": "",
        "numa_node": 1,
        "uuid": "",
        "model": "",
        "memory_mib": None,
        "mig": None,
    }
    assert len(topology["links"]) == 28
    assert topology["links"][0] == ["GPU0", "GPU1", "PIX"]
    assert (topology["memory_bytes"], topology["cores"], topology["driver"]) == (
        None,
        [],
        {"version": "", "open": None},
    )
    assert (topology["listeners"], topology["releases"]) == ([], {})


def test_gpus_are_grouped_by_the_node_they_report() -> None:
    topology = topology_from_matrix(published("topo_5gpu_gpu0_on_numa1"))
    assert {gpu["pci_address"]: gpu["numa_node"] for gpu in topology["gpus"]} == {
        "GPU0": 1,
        "GPU1": 0,
        "GPU2": 0,
        "GPU3": 0,
        "GPU4": 0,
    }


def test_a_node_that_sysfs_does_not_tell_is_unknown_whatever_the_matrix_says() -> None:
    text = published("topo_vm_1gpu_sysfs_numa_minus1")
    assert nodes_of(parse_topo_matrix(text)) == [[0]]
    topology = topology_from_matrix(text)
    assert topology["gpus"][0]["numa_node"] is None
    assert any("-1" in warning and "sysfs" in warning for warning in topology["warnings"])
    assert "the NUMA node of GPU0 is unknown" in topology["warnings"]
    # the matrix alone is believed
    assert topology_from_matrix(text.partition("### PCI")[0])["gpus"][0]["numa_node"] == 0


def test_a_card_near_to_two_nodes_is_on_none_of_them() -> None:
    topology = topology_from_matrix(matrix_text(PAIR, values=[("0-31", "0-1", "N/A"), ("0-15", "0", "N/A")]))
    assert [gpu["numa_node"] for gpu in topology["gpus"]] == [None, 0]
    assert [(node["id"], node["cpus"]) for node in topology["numa_nodes"]] == [(0, list(range(16)))]
    assert topology["cpus"] == list(range(32))


def test_sparse_and_interleaved_nodes() -> None:
    values = [("0,8,16,24", "4", "N/A"), ("1,9,17,25", "60", "N/A")]
    topology = topology_from_matrix(matrix_text(PAIR, values=values))
    assert [(node["id"], node["cpus"]) for node in topology["numa_nodes"]] == [
        (4, [0, 8, 16, 24]),
        (60, [1, 9, 17, 25]),
    ]


def test_a_cpu_on_two_nodes_is_refused() -> None:
    with pytest.raises(TopologyError, match="CPU 8 is near to GPUs of the NUMA nodes 0 and 1"):
        topology_from_matrix(matrix_text(PAIR, values=[("0-15", "0", "N/A"), ("8-23", "1", "N/A")]))
