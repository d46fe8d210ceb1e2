"""Placement: which GPUs make a replica, in which order, and on which CPUs and NUMA nodes; and what is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.placement import (
    MOST_GROUPS,
    Place,
    PlacementError,
    check_gpus,
    count_remedy,
    full_address,
    place_on_cpus,
    place_on_gpus,
    rank_order,
    select_gpus,
    share_cores,
    socket_domains,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import PlanError
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import format_cpu_list, parse_cpu_list
from ansible_collections.serving.gpu_node.plugins.module_utils.topology_file import topology_from_matrix
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.samples import gpu, intent, numa_node, profile, resolved, topology, two_cards, two_sockets

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
CARDS: dict[str, str] = profile("8x")["cards"]
WORKSTATION, MAX_Q, SERVER, T4 = "0x2bb1", "0x2bb4", "0x2bb5", "0x1eb8"


def published(name: str) -> dict[str, Any]:
    return topology_from_matrix((FIXTURES / f"{name}.txt").read_text())


def place(node: dict[str, Any], size: int = 4, **settings: Any) -> list[Place]:
    usual = {"cpus_per_replica": 0, "span_sockets": False, "mixed_gpus": False}
    return place_on_gpus(node, node["gpus"], {**usual, "tensor_parallel_size": size, **settings})


def refusal(node: dict[str, Any], size: int = 4, **settings: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        place(node, size, **settings)
    (problem,) = caught.value.problems
    return problem


def plan_problems(overrides: dict[str, Any], node: dict[str, Any], name: str = "8x") -> list[str]:
    with pytest.raises(PlanError) as caught:
        intent(overrides, node, name=name)
    return caught.value.problems


def names(found: Place | dict[str, Any]) -> list[str]:
    """The addresses of a replica's GPUs by rank."""
    return [card["pci_address"] for card in (found["gpus"] if isinstance(found, dict) else found.gpus)]


def numbers(found: Place | dict[str, Any]) -> list[int]:
    """As :func:`names`, of the cards that the helper ``gpu`` made: the numbers they were made with."""
    return [int(name[5:7], 16) for name in names(found)]


def spots(places: list[Place]) -> list[tuple[str, tuple[int, ...]]]:
    return [(format_cpu_list(found.cpus), found.domain.nodes) for found in places]


def address(number: int) -> str:
    return f"0000:{number:02x}:00.0"


def links(kinds: dict[tuple[int, int], str], count: int, other: str = "NODE") -> list[list[str]]:
    pairs = itertools.combinations(range(count), 2)
    return [[address(one), address(two), kinds.get((one, two), other)] for one, two in pairs]


def machine(nodes: list[dict[str, Any]], where: Sequence[int | None], **more: Any) -> dict[str, Any]:
    return topology(nodes, gpus=[gpu(number, node) for number, node in enumerate(where)], **more)


def halves(gib: float = 700) -> list[dict[str, Any]]:
    return [numa_node(number, [*range(number * 32, number * 32 + 32)], gib, socket=number) for number in range(2)]


# The published machines


def test_the_reference_machine() -> None:
    plan = intent({}, published("topo_8x_rtxpro6000d_pix_node_sys"), name="8x")
    placed = [(replica["cpus"], replica["memory_nodes"], names(replica)) for replica in plan["replicas"]]
    assert placed == [
        ("0-31,64-95", "0", ["GPU0", "GPU1", "GPU2", "GPU3"]),
        ("32-63,96-127", "1", ["GPU4", "GPU5", "GPU6", "GPU7"]),
    ]


def test_six_cards_on_one_node_and_two_on_the_other() -> None:
    node = published("topo_8gpu_split_6_2")
    (problem,) = plan_problems({}, node)
    # the pairs behind one host bridge (1 and 2, 3 and 4) make the one replica that is possible
    assert problem == (
        "a replica of 4 GPUs would span sockets: GPU0 on NUMA node 0, GPU5 on NUMA node 0, GPU6 on NUMA node 1, "
        "GPU7 on NUMA node 1 are left over; move cards so that each socket has a multiple of 4, or set replicas: 1 "
        "and gpus: ['GPU1', 'GPU2', 'GPU3', 'GPU4'], or set span_sockets: true"
    )
    # both remedies work
    (alone,) = intent({"replicas": 1, "gpus": ["GPU1", "GPU2", "GPU3", "GPU4"]}, node, name="8x")["replicas"]
    assert (sorted(names(alone)), alone["memory_nodes"]) == (["GPU1", "GPU2", "GPU3", "GPU4"], "0")
    inside, across = intent({"span_sockets": True}, node, name="8x")["replicas"]
    assert (sorted(names(inside)), inside["memory_nodes"]) == (["GPU1", "GPU2", "GPU3", "GPU4"], "0")
    assert (sorted(names(across)), across["memory_nodes"]) == (["GPU0", "GPU5", "GPU6", "GPU7"], "0,1")
    assert across["cpus"] == "0-63"


def test_five_cards_the_first_of_them_on_the_second_node() -> None:
    node = published("topo_5gpu_gpu0_on_numa1")
    (problem,) = plan_problems({}, node)
    assert "needs 8 GPUs, and there are 5: GPU0, GPU1, GPU2, GPU3, GPU4" in problem
    # one replica of four: by node, not the first four
    chosen = {"replicas": 1, "gpus": ["GPU1", "GPU2", "GPU3", "GPU4"]}
    (replica,) = intent(chosen, node, name="8x")["replicas"]
    assert (replica["cpus"], replica["memory_nodes"]) == ("0-7,16-23", "0")
    (problem,) = plan_problems({"replicas": 1, "gpus": ["GPU0", "GPU1", "GPU2", "GPU3"]}, node)
    assert "GPU0 on NUMA node 1, GPU1 on NUMA node 0" in problem and "set replicas" not in problem
    # two replicas of two are on one node each, though cards of both are next to each other in the list
    pairs = place({**node, "gpus": node["gpus"][1:]}, size=2)
    assert [sorted(names(found)) for found in pairs] == [["GPU1", "GPU2"], ["GPU3", "GPU4"]]


def test_a_virtual_machine_whose_sysfs_says_minus_one() -> None:
    node = published("topo_vm_1gpu_sysfs_numa_minus1")
    assert [item["id"] for item in node["numa_nodes"]] == [0]
    assert spots(place(node, size=1)) == [("", ())]


def test_a_virtual_machine_where_only_one_pair_of_four_is_behind_a_switch() -> None:
    placed = place(published("topo_8gpu_vm_0-191_192-383"))
    assert [names(found) for found in placed] == [["GPU0", "GPU3", "GPU1", "GPU2"], ["GPU4", "GPU7", "GPU5", "GPU6"]]
    assert spots(placed) == [("0-191", (0,)), ("192-383", (1,))]


@pytest.mark.parametrize("sockets", [True, False])
def test_cpus_that_are_numbered_round_robin_over_eight_nodes(sockets: bool) -> None:
    text = (FIXTURES / "lscpu_dell_interleaved_8_nodes.txt").read_text()
    lists = dict(re.findall(r"NUMA node([0-9]+) CPU\(s\): +(\S+)", text))
    nodes = [
        numa_node(int(number), parse_cpu_list(cpus), 200, socket=int(number) // 4 if sockets else None)
        for number, cpus in lists.items()
    ]
    first, second = place(machine(nodes, [0, 0, 0, 0, 4, 4, 4, 4]))
    if sockets:
        assert (first.cpus, first.domain.nodes) == ([*range(0, 64, 2)], (0, 1, 2, 3))
        assert (second.cpus, second.domain.nodes) == ([*range(1, 64, 2)], (4, 5, 6, 7))
    else:
        assert (first.cpus, first.domain.nodes) == ([0, 8, 16, 24, 32, 40, 48, 56], (0,))
        assert (second.cpus, second.domain.nodes) == ([1, 9, 17, 25, 33, 41, 49, 57], (4,))


# Which cards


def test_a_card_that_is_gone_from_the_bus() -> None:
    node = two_sockets()
    lost = node["gpus"].pop(5)
    node["links"] = [link for link in node["links"] if lost["pci_address"] not in link]
    (problem,) = plan_problems({}, node)
    assert "needs 8 GPUs, and there are 7" in problem and "0000:05:00.0" not in problem
    before = resolved({}, two_sockets(), name="8x")
    node["releases"] = {str(item["index"]): json.loads(item["files"]["release.json"]) for item in before["replicas"]}
    (problem,) = plan_problems({}, node)
    assert "gone from the bus since the running release: 0000:05:00.0 of replica 1" in problem
    # the complete four serve
    (replica,) = intent({"replicas": 1, "gpus": [address(n) for n in range(4)]}, node, name="8x")["replicas"]
    assert (numbers(replica), replica["memory_nodes"]) == ([0, 1, 2, 3], "0")
    # and the other four do not
    (problem,) = plan_problems({"replicas": 1, "gpus": [address(n) for n in range(4, 8)]}, node)
    assert problem.startswith("gpus: '0000:05:00.0' is no GPU of this node; PCI shows 0000:00:00.0 (")


def test_a_card_that_pci_shows_and_the_driver_does_not() -> None:
    node = two_sockets()
    node["gpus"][5] |= {"uuid": "", "memory_mib": None, "mig": None}
    (problem,) = plan_problems({}, node)
    assert problem.startswith("PCI shows 0000:05:00.0 and the driver (590.48.01) does not: ")
    assert "'Xid'" in problem
    remedy = {"replicas": 1, "gpus": [address(n) for n in range(4)]}
    assert intent(remedy, node, name="8x")["replicas"][0]["gpus"][3]["uuid"].endswith("3")
    # without any driver no card is missed
    assert check_gpus(node["gpus"], "") == []


def test_one_more_card_of_another_kind_is_left_alone() -> None:
    node = two_sockets()
    node["gpus"].append(gpu(0xC1, 0, T4, model="Tesla T4"))
    plan = resolved({}, node, name="8x")
    assert [numbers(replica) for replica in plan["replicas"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "left alone, not a card of this profile: 0000:c1:00.0 (Tesla T4)" in plan["warnings"]
    release = json.loads(plan["replicas"][1]["files"]["release.json"])
    uuids = [f"GPU-00000000-0000-0000-0000-00000000000{number}" for number in (4, 5, 6, 7)]
    assert release["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert release["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(uuids)
    devices = [value for option, value in itertools.pairwise(release["podman_args"]) if option == "--device"]
    assert devices == [f"nvidia.com/gpu={uuid}" for uuid in uuids]


def mixed() -> dict[str, Any]:
    """Three cards without a driver: two Max-Q and one Workstation card."""
    node = two_cards()
    cards = [(0x41, MAX_Q), (0x42, MAX_Q), (0x81, WORKSTATION)]
    node["gpus"] = [gpu(number, 0, device, uuid="", model="", memory_mib=None, mig=None) for number, device in cards]
    node["driver"] = {"version": "", "open": None}
    return node


def test_mixed_models_are_told_by_pci_number_without_a_driver() -> None:
    wanted = ["0000:42:00.0", "0000:81:00.0"]
    (problem,) = plan_problems({"gpus": wanted}, mixed(), "2x")
    assert problem.startswith("replica 0 would mix GPU models: 0000:42:00.0 (0x2bb4), 0000:81:00.0 (0x2bb1); ")
    assert "mixed_gpus: true" in problem
    allowed = intent({"gpus": wanted, "mixed_gpus": True}, mixed(), name="2x")
    assert names(allowed["replicas"][0]) == wanted
    pure = intent({"gpus": ["0000:41:00.0", "0000:42:00.0"]}, mixed(), name="2x")
    assert names(pure["replicas"][0]) == ["0000:41:00.0", "0000:42:00.0"]


def test_three_cards_where_two_are_needed() -> None:
    (problem,) = plan_problems({}, mixed(), "2x")
    assert "needs 2 GPUs, and there are 3: 0000:41:00.0 (0x2bb4), 0000:42:00.0 (0x2bb4), 0000:81:00.0" in problem


def test_replicas_of_one_model_each_are_found_among_mixed_cards() -> None:
    devices = [SERVER, MAX_Q] * 4
    node = two_sockets()
    for card, device in zip(node["gpus"], devices, strict=True):
        card |= {"numa_node": 0, "device_id": device}
    # links say otherwise: pairs behind one switch are of two models
    assert [numbers(found) for found in place(node)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_card_in_mig_mode() -> None:
    text = (FIXTURES / "nvidia_smi_L_mig_on_gpu4.txt").read_text()
    partitioned = set()
    for line in text.splitlines():
        if line.startswith("GPU "):
            current = int(line[4 : line.index(":")])
        else:
            partitioned.add(current)
    node = two_sockets()
    for number, card in enumerate(node["gpus"]):
        card["mig"] = number in partitioned
    (problem,) = plan_problems({}, node)
    assert problem == (
        "0000:04:00.0 (NVIDIA RTX PRO 6000 Blackwell Server Edition) is in MIG mode, and a replica needs whole GPUs; "
        "switch it off (nvidia-smi -i 0000:04:00.0 -mig 0), or name other GPUs in gpus and set replicas to what they "
        "make"
    )
    remedy = {"replicas": 1, "gpus": [address(n) for n in range(4)]}
    assert numbers(intent(remedy, node, name="8x")["replicas"][0]) == [0, 1, 2, 3]


def test_a_node_without_gpus() -> None:
    (problem,) = plan_problems({}, topology())
    assert problem == ("PCI shows no NVIDIA GPU on this node; look at 'lspci -d 10de:', or plan with another profile")


def test_only_cards_of_another_kind() -> None:
    node = topology(halves(), gpus=[gpu(number, 0, "0x2335", model="NVIDIA H200") for number in range(2)])
    (problem,) = plan_problems({}, node, "2x")
    assert problem.startswith("no GPU of this node is one that the profile is made for (RTX PRO 6000")
    assert "0000:01:00.0 (NVIDIA H200)" in problem
    # the remedy, which is said to be on the operator's own account
    plan = intent({"gpus": [address(0), address(1)]}, node, name="2x")
    assert numbers(plan["replicas"][0]) == [0, 1]
    assert len([text for text in plan["warnings"] if "not a card that this profile was measured on" in text]) == 2


@pytest.mark.parametrize("count", [*range(1, 8), *range(9, 17)])
def test_any_other_number_of_cards_is_refused_with_both_numbers(count: int) -> None:
    node = topology(halves(), gpus=[gpu(number, number % 2) for number in range(count)])
    (problem,) = plan_problems({}, node)
    assert f"needs 8 GPUs, and there are {count}: 0000:00:00.0 (" in problem
    assert address(count - 1) in problem


@pytest.mark.parametrize(
    ("where", "replicas", "remedy"),
    [
        # seven of eight: the complete four
        ([0, 0, 0, 0, 1, 1, 1], 2, f"set replicas: 1 and gpus: {[address(n) for n in range(4)]}"),
        ([1, 1, 1, 0, 0, 0, 0], 2, f"set replicas: 1 and gpus: {[address(n) for n in range(3, 7)]}"),
        # eight cards and one replica
        ([0] * 4 + [1] * 4, 1, f"set replicas: 2, or set gpus: {[address(n) for n in range(4)]}"),
        # nine cards
        ([0] * 4 + [1] * 5, 2, f"set gpus: {[address(n) for n in range(8)]}"),
        ([0, 0, 0, 0], 2, "set replicas: 1"),
        ([0, 0, 0, 1, 1, 1, 1], 1, f"set gpus: {[address(n) for n in range(3, 7)]}"),
        ([0, 0, 1, 1, 1, 0], 2, "no 4 of them are on one socket and of one model, so add or move cards"),
        ([0], 1, "no 4 of them are on one socket and of one model, so add or move cards"),
    ],
)
def test_another_number_of_cards_has_a_remedy_that_works(where: list[int], replicas: int, remedy: str) -> None:
    node = machine(halves(), where)
    assert count_remedy(node, node["gpus"], replicas, 4) == remedy
    for settings in remedy.split(", or ") if "set " in remedy else []:
        given_settings = yaml.safe_load("{" + settings.replace("set ", "").replace(" and ", ", ") + "}")
        plan = intent({"replicas": replicas, **given_settings}, node, name="8x")
        assert len(plan["replicas"]) == given_settings.get("replicas", replicas)


def test_no_remedy_mixes_models() -> None:
    node = machine(halves(), [0] * 6)
    for number in (0, 2, 5):
        node["gpus"][number]["device_id"] = MAX_Q
    assert count_remedy(node, node["gpus"], 1, 4).startswith("no 4 of them are on one socket and of one model")
    node["gpus"][5]["device_id"] = SERVER
    assert count_remedy(node, node["gpus"], 1, 4) == f"set gpus: {[address(n) for n in (1, 3, 4, 5)]}"


@pytest.mark.parametrize(
    "written", ["0000:c1:00.0", "C1:00.0", "00000000:C1:00.0", "  0000:C1:00.0 ", "0000:c1:00.0\n"]
)
def test_every_way_to_write_a_pci_address(written: str) -> None:
    node = topology(halves(), gpus=[gpu(0x31, 0), gpu(0xC1, 0)])
    chosen, _, problems = select_gpus(node, [written], CARDS)
    assert ([card["pci_address"] for card in chosen], problems) == (["0000:c1:00.0"], [])


def test_an_address_of_a_large_pci_domain() -> None:
    assert full_address("10000:E1:00.0") == "10000:e1:00.0"


def test_one_card_by_two_names() -> None:
    _, _, problems = select_gpus(two_sockets(), ["0000:03:00.0", "03:00.0"], CARDS)
    assert problems == ["gpus: 0000:03:00.0 is named more than once"]


@given(st.lists(st.text(min_size=1), max_size=4))
def test_any_wanted_card_is_there_or_is_named(wanted: list[str]) -> None:
    chosen, _, problems = select_gpus(two_sockets(), wanted, CARDS)
    if not wanted:
        assert (len(chosen), problems) == (8, [])
    for item in wanted:
        assert any(full_address(item) == card["pci_address"] for card in chosen) or any(
            item in text for text in problems
        )


# Domains


def nps(per_socket: int, where: list[int | None]) -> dict[str, Any]:
    count = 2 * per_socket
    each = 64 // count
    nodes = [
        numa_node(number, [*range(number * each, number * each + each)], 1400 / count, socket=number // per_socket)
        for number in range(count)
    ]
    return machine(nodes, where)


@pytest.mark.parametrize(
    ("per_socket", "where"),
    [(2, [0, 0, 1, 1, 2, 2, 3, 3]), (4, [0, 1, 2, 3, 4, 5, 6, 7]), (4, [3, 3, 3, 0, 4, 7, 7, 7])],
)
def test_all_nodes_of_the_socket_are_pinned(per_socket: int, where: list[int | None]) -> None:
    plan = intent({}, nps(per_socket, where), name="8x")
    mine = [",".join(str(number) for number in range(start, start + per_socket)) for start in (0, per_socket)]
    placed = [(numbers(item), item["cpus"], item["memory_nodes"]) for item in plan["replicas"]]
    assert placed == [([0, 1, 2, 3], "0-31", mine[0]), ([4, 5, 6, 7], "32-63", mine[1])]


def test_nodes_of_unknown_sockets_are_each_their_own() -> None:
    node = nps(2, [0, 0, 1, 1, 2, 2, 3, 3])
    for item in node["numa_nodes"]:
        item["socket"] = None
    assert "0000:00:00.0 on NUMA node 0" in refusal(node)
    # two cards each do not span
    assert [found.domain.nodes for found in place(node, size=2)] == [(0,), (1,), (2,), (3,)]


def test_one_socket_with_eight_cards() -> None:
    node = two_sockets()
    cores = node["cores"]
    node["numa_nodes"] = [numa_node(0, [*range(128)], 1400, socket=0)]
    for card in node["gpus"]:
        card["numa_node"] = 0
    first, second = intent({}, node, name="8x")["replicas"]
    assert (numbers(first), numbers(second)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert (first["memory_nodes"], second["memory_nodes"]) == ("0", "0")
    mine, other = set(parse_cpu_list(first["cpus"])), set(parse_cpu_list(second["cpus"]))
    assert len(mine) == len(other) == 64 and not mine & other
    assert all(len(mine & set(core)) in (0, 2) for core in cores)


def test_node_numbers_with_gaps() -> None:
    nodes = [numa_node(2, [*range(8)], 700, socket=0), numa_node(9, [*range(8, 16)], 700, socket=4)]
    assert spots(place(machine(nodes, [9] * 4 + [2] * 4))) == [("0-7", (2,)), ("8-15", (9,))]


def test_a_node_that_nothing_can_be_pinned_to() -> None:
    # node 1 has CPUs and no memory, or memory and no CPUs: the topology leaves it out
    node = machine([halves(1400)[0]], [0, 0, 0, 0, 1, 1, 1, 1])
    assert spots(place(node)) == [("0-31", (0,)), ("", ())]
    plan = resolved({}, node, name="8x")
    pinned, loose = (json.loads(replica["files"]["release.json"])["podman_args"] for replica in plan["replicas"])
    assert pinned[pinned.index("--cpuset-mems") + 1] == "0"
    assert "--cpuset-mems" not in loose and "--cpuset-cpus" not in loose


def test_such_a_node_is_no_unknown_place() -> None:
    # its cards are on another node than the others, so they complete no replica of those
    node = machine([halves()[0]], [0] * 6 + [1] * 2)
    assert refusal(node) == (
        "a replica of 4 GPUs would span sockets: 0000:04:00.0 on NUMA node 0, 0000:05:00.0 on NUMA node 0, "
        "0000:06:00.0 on NUMA node 1 (no usable CPUs or memory there), 0000:07:00.0 on NUMA node 1 (no usable CPUs or "
        "memory there) are left over; move cards so that each socket has a multiple of 4, or set replicas: 1 and "
        "gpus: ['0000:00:00.0', '0000:01:00.0', '0000:02:00.0', '0000:03:00.0'], or set span_sockets: true"
    )
    # nor do those of two such nodes make one together
    assert "on NUMA node 3 (no usable" in refusal(machine([halves()[0]], [2, 2, 3, 3]))
    assert spots(place(node, span_sockets=True)) == [("0-31", (0,)), ("", ())]


def test_512_cpus() -> None:
    nodes = [
        numa_node(
            number, [*range(number * 128, number * 128 + 128), *range(256 + number * 128, 384 + number * 128)], 700
        )
        for number in range(2)
    ]
    node = machine(nodes, [0] * 4 + [1] * 4, cores=[[core, core + 256] for core in range(256)])
    assert spots(place(node)) == [("0-127,256-383", (0,)), ("128-255,384-511", (1,))]
    four = place(node, size=2)
    assert [format_cpu_list(found.cpus) for found in four] == [
        "0-63,256-319",
        "64-127,320-383",
        "128-191,384-447",
        "192-255,448-511",
    ]


@pytest.mark.parametrize("unknown", [None, -1])
def test_no_card_tells_its_node(unknown: int | None) -> None:
    plan = resolved({}, machine(halves(), [unknown] * 8), name="8x")
    assert [numbers(replica) for replica in plan["replicas"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [(replica["cpus"], replica["memory_nodes"]) for replica in plan["replicas"]] == [("", ""), ("", "")]
    for replica in plan["replicas"]:
        assert not [part for part in json.loads(replica["files"]["release.json"])["podman_args"] if "cpuset" in part]
    # said once for both
    assert len([text for text in plan["warnings"] if "NUMA node of GPUs of replica 0, 1" in text]) == 1


@pytest.mark.parametrize("unknown", [None, -1])
def test_cards_of_unknown_place_complete_what_is_left_over(unknown: int | None) -> None:
    # four on node 0, two on node 1, two that do not tell
    placed = place(machine(halves(), [0, 0, 0, 0, 1, 1, unknown, unknown]))
    assert [numbers(found) for found in placed] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert spots(placed) == [("0-31", (0,)), ("", ())]


def test_the_closest_cards_of_unknown_place_complete_it() -> None:
    near = {(0, 1): "PIX", (0, 5): "PHB", (1, 5): "PHB", (0, 4): "PHB", (1, 4): "PHB", (4, 5): "PIX", (2, 3): "PIX"}
    node = machine(halves(), [0, 0, None, None, None, None, 1, 1], links=links(near, 8, "SYS"))
    assert [sorted(numbers(found)) for found in place(node)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_cards_of_one_model_complete_it() -> None:
    node = machine(halves(), [0, 0, None, None, None, None, 1, 1])
    for number in (2, 3, 6, 7):
        node["gpus"][number]["device_id"] = MAX_Q
    assert [sorted(numbers(found)) for found in place(node)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_too_few_cards_of_unknown_place() -> None:
    assert "0000:07:00.0 on an unknown NUMA node" in refusal(machine(halves(), [0, 0, 0, 0, 0, 1, 1, None]))


def test_leave_to_span_sockets() -> None:
    node = machine(halves(), [0, 0, 1, 1])
    text = refusal(node)
    # nothing fits one socket, so fewer replicas are no remedy
    assert "span_sockets: true" in text and "replicas:" not in text
    (found,) = place(node, span_sockets=True)
    assert (found.domain.nodes, found.cpus, found.domain.memory_bytes) == ((0, 1), [*range(64)], 1400 * 2**30)


def test_replicas_that_need_not_span_do_not() -> None:
    placed = place(machine(halves(), [0, 1, 0, 1, 0, 1, 0, 1]), span_sockets=True)
    assert [(numbers(found), found.domain.nodes) for found in placed] == [([0, 2, 4, 6], (0,)), ([1, 3, 5, 7], (1,))]


def test_the_domain_of_a_socket_has_its_memory() -> None:
    domains = socket_domains(nps(2, []))
    assert [domains[number].memory_bytes for number in range(4)] == [700 * 2**30] * 4
    node = nps(2, [])
    node["numa_nodes"][1]["memory_bytes"] = None
    assert [domain.memory_bytes for domain in socket_domains(node).values()][:2] == [None, None]


# Order


def test_ranks_are_paired_on_the_closest_links() -> None:
    near = {(0, 2): "PIX", (1, 3): "PIX"}
    (found,) = place(machine([halves()[0]], [0] * 4, links=links(near, 4)))
    assert numbers(found) == [0, 2, 1, 3]


def test_the_second_exchange_decides_between_equal_pairs() -> None:
    # all pairs alike by the first exchange {0,1} and {2,3}; by the second ({0,2} and {1,3}) 0-3 and 1-2 are closer
    near = {(0, 1): "PIX", (2, 3): "PIX", (0, 3): "PHB", (1, 2): "PHB"}
    (found,) = place(machine([halves()[0]], [0] * 4, links=links(near, 4)))
    order = numbers(found)
    assert order == [0, 1, 3, 2]
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset((0, 1)), frozenset((2, 3))}
    assert {frozenset(order[::2]), frozenset(order[1::2])} == {frozenset((0, 3)), frozenset((1, 2))}


KINDS = ["NV4", "PIX", "PXB", "PHB", "NODE", "SYS", ""]


@given(st.lists(st.sampled_from(KINDS), min_size=6, max_size=6))
def test_no_other_order_has_closer_pairs(kinds: list[str]) -> None:
    table = dict(zip(itertools.combinations(range(4), 2), kinds, strict=True))
    cards = [gpu(number, 0) for number in range(4)]
    ways = [[address(one), address(two), kind] for (one, two), kind in table.items() if kind]

    def far(*pairs: tuple[int, int]) -> int:
        return sum(KINDS.index(table[min(pair), max(pair)]) for pair in pairs)

    best = min((far((a, b), (c, d)), far((a, c), (b, d))) for a, b, c, d in itertools.permutations(range(4)))
    for given_order in (cards, cards[::-1]):
        a, b, c, d = (int(card["pci_address"][5:7]) for card in rank_order(given_order, ways))
        assert (far((a, b), (c, d)), far((a, c), (b, d))) == best
        # what nothing else decides, the first place on the bus does
        assert a == 0


def test_the_closest_four_of_eight_on_one_socket_are_a_replica() -> None:
    near = {pair: "PIX" for group in ((0, 3, 5, 6), (1, 2, 4, 7)) for pair in itertools.combinations(group, 2)}
    placed = place(machine([halves()[0]], [0] * 8, links=links(near, 8)))
    assert [numbers(found) for found in placed] == [[0, 3, 5, 6], [1, 2, 4, 7]]


def test_numbers_of_two_digits_sort_as_numbers() -> None:
    rows = [f"GPU{n}\t" + "\t".join(" X " if m == n else "NODE" for m in range(16)) + "\t0-63\t0" for n in range(16)]
    text = "\t" + "\t".join(f"GPU{n}" for n in range(16)) + "\tCPU Affinity\tNUMA Affinity\n" + "\n".join(rows) + "\n"
    placed = place(topology_from_matrix(text))
    assert [names(found) for found in placed] == [
        [f"GPU{n}" for n in range(first, first + 4)] for first in range(0, 16, 4)
    ]


def test_so_many_cards_that_not_every_group_can_be_tried() -> None:
    # 30,045,015 groups of 10 of 30
    cards = [gpu(number, 0, MAX_Q if number % 3 else SERVER) for number in range(30)]
    placed = place(topology([halves()[0]], gpus=cards), size=10)
    assert [len({card["device_id"] for card in found.gpus}) for found in placed] == [1, 1, 1]
    assert MOST_GROUPS < 30_045_015


# CPUs


def test_as_many_cpus_as_asked_for_in_whole_cores() -> None:
    node = two_sockets()
    placed = place(node, cpus_per_replica=8)
    assert spots(placed) == [("0-3,64-67", (0,)), ("32-35,96-99", (1,))]
    assert spots(place(node, size=2, cpus_per_replica=3))[:2] == [("0-1,64", (0,)), ("2-3,66", (0,))]


def test_more_cpus_than_a_node_has() -> None:
    assert refusal(two_sockets(), cpus_per_replica=65) == (
        "cpus_per_replica: 65 for 1 replicas on NUMA node 0 needs 65 CPUs, and it has 64; lower cpus_per_replica or "
        "replicas"
    )


def test_fewer_cpus_than_replicas() -> None:
    text = refusal(machine([numa_node(0, [5], 700)], [0] * 8))
    assert text == "replicas: 2 on NUMA node 0 need as many CPUs, and it has 1; lower replicas"


def test_cpus_asked_for_where_no_node_is_known() -> None:
    node = machine(halves(), [None] * 8)
    assert spots(place(node, cpus_per_replica=16)) == [("0-15", ()), ("16-31", ())]
    # those that others have are not given away
    node = machine(halves(), [0] * 4 + [None] * 4)
    assert spots(place(node, cpus_per_replica=20)) == [("0-19", (0,)), ("20-39", ())]
    node = machine(halves(), [0] * 5 + [1] * 3)
    assert spots(place(node, cpus_per_replica=20, span_sockets=True)) == [("0-19", (0,)), ("20-39", (0, 1))]


def test_a_machine_that_tells_no_cpus() -> None:
    node = machine([], [None] * 4)
    assert spots(place(node)) == [("", ())]
    assert "needs 4 CPUs, and it has 0; lower cpus_per_replica" in refusal(node, cpus_per_replica=4)


@pytest.mark.parametrize(
    ("cores", "shares", "per_share", "expected"),
    [
        # a core too many for both stays whole, and nobody's
        ([[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]], 2, 0, ["0-1,5-6", "2-3,7-8"]),
        # a core that has lost a sibling completes an odd number
        ([[0, 1], [2, 3], [4], [5]], 2, 3, ["0-1,4", "2-3,5"]),
        ([[0], [1, 2], [3, 4], [5, 6], [7]], 2, 4, ["1-4", "0,5-7"]),
        # two replicas on one core
        ([[0, 1]], 2, 0, ["0", "1"]),
    ],
)
def test_whole_cores(cores: list[list[int]], shares: int, per_share: int, expected: list[str]) -> None:
    cpus = [cpu for core in cores for cpu in core]
    assert [format_cpu_list(share) for share in share_cores(cpus, cores, shares, per_share)] == expected


CORES = st.lists(st.integers(1, 2), min_size=1, max_size=10).flatmap(
    lambda sizes: st.permutations(range(sum(sizes))).map(
        lambda cpus: [sorted(cpus[sum(sizes[:n]) : sum(sizes[: n + 1])]) for n in range(len(sizes))]
    )
)


@given(CORES, st.integers(1, 4), st.integers(0, 6))
def test_siblings_stay_together_where_that_is_possible(cores: list[list[int]], shares: int, per_share: int) -> None:
    cpus = sorted(cpu for core in cores for cpu in core)
    if max(per_share, 1) * shares > len(cpus):
        return
    taken = share_cores(cpus, cores, shares, per_share)
    used = [cpu for share in taken for cpu in share]
    assert len(taken) == shares and len(used) == len(set(used)) and set(used) <= set(cpus)
    assert all(len(share) == per_share if per_share else share for share in taken)
    split = [core for core in cores if sum(bool(set(core) & set(share)) for share in taken) > 1]
    # with cores of one and two threads: p pairs and s singles give each share its CPUs
    pairs, singles = sum(len(core) == 2 for core in cores), sum(len(core) == 1 for core in cores)
    if per_share:
        possible = any(
            sum(deal) <= pairs and sum(max(0, per_share - 2 * count) for count in deal) <= singles
            for deal in itertools.product(range(per_share // 2 + per_share % 2 + 1), repeat=shares)
        )
    else:
        possible = len(cores) >= shares
    assert bool(split) == (not possible)
    if not per_share and possible:
        # evenly: within one core of the fair part
        assert min(map(len, taken)) >= len(cpus) // shares - 1


@given(st.sets(st.integers(0, 40), min_size=4), st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=12))
def test_cores_that_contradict_each_other_give_no_cpu_away_twice(cpus: set[int], cores: list[list[int]]) -> None:
    for per_share in (0, 1, 2):
        taken = share_cores(cpus, cores, 2, per_share)
        used = [cpu for share in taken for cpu in share]
        assert len(used) == len(set(used)) and set(used) <= cpus and all(taken)


def test_replicas_without_gpus_do_not_share_a_core() -> None:
    node = topology([numa_node(0, [*range(8)])], cores=[[0, 4], [1, 5], [2, 6], [3, 7]])
    assert spots(place_on_cpus(node, 2, 0)) == [("0-1,4-5", (0,)), ("2-3,6-7", (0,))]
    assert spots(place_on_cpus(node, 3, 0)) == [("0,4", (0,)), ("1,5", (0,)), ("2,6", (0,))]
    # the first of two equal nodes
    two = topology([numa_node(3, [0, 1]), numa_node(5, [2, 3])])
    assert spots(place_on_cpus(two, 1, 0)) == [("0-1", (3,))]
    # five on four cores: now some have to
    assert [len(found.cpus) for found in place_on_cpus(node, 5, 0)] == [1] * 5
