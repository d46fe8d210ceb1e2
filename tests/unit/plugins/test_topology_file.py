"""A topology as a file: what is saved, what is taken, and what is refused by name."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.filter import topology as filters
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import TopologyError
from ansible_collections.serving.gpu_node.plugins.module_utils.topology_file import (
    load_topology,
    saved_topology,
    topology_from_matrix,
)
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


def topology() -> dict[str, Any]:
    """A small node with everything in it."""
    return {
        "schema": 1,
        "cpus": [0, 1, 2, 3],
        "memory_bytes": 2**31,
        "numa_nodes": [
            {"id": 0, "cpus": [0, 2], "memory_bytes": 2**30, "socket": 0},
            {"id": 8, "cpus": [1, 3], "memory_bytes": 2**30, "socket": 1},
        ],
        "cores": [[0, 2], [1, 3]],
        "gpus": [
            {
                "pci_address": "0000:38:00.0",
                "device_id": "0x2bb5",
                "numa_node": 0,
                "uuid": UUID,
                "model": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                "memory_mib": 97887,
                "mig": False,
            },
            {
                "pci_address": "10000:01:00.0",
                "device_id": "0x2bb5",
                "numa_node": None,
                "uuid": "",
                "model": "",
                "memory_mib": None,
                "mig": None,
            },
        ],
        "links": [["0000:38:00.0", "10000:01:00.0", "NV18"]],
        "driver": {"version": "590.48.01", "open": True},
        "warnings": ["10000:01:00.0: the driver gives no UUID for this card"],
        "listeners": [{"address": "127.0.0.1", "port": 22, "pid": 1, "command": "sshd", "unit": "ssh.service"}],
        "releases": {"0": {"id": "0123456789ab"}},
    }


def without_state(node: dict[str, Any]) -> dict[str, Any]:
    return {**node, "listeners": [], "releases": {}}


@pytest.mark.parametrize(
    "dump", [yaml.safe_dump, json.dumps, lambda data: "---\n# a comment\n" + yaml.safe_dump(data, sort_keys=False)]
)
def test_what_is_saved_comes_back(dump: Any) -> None:
    saved = saved_topology(topology())
    assert "listeners" not in saved
    assert "releases" not in saved
    assert saved["warnings"] == topology()["warnings"]
    assert load_topology(dump(saved)) == without_state(topology())


def test_the_state_of_a_node_is_not_believed_from_a_file() -> None:
    # someone saved the module's answer as it is
    assert load_topology(json.dumps(topology())) == without_state(topology())


def test_the_text_of_nvidia_smi_is_taken_as_well() -> None:
    text = (FIXTURES / "topo_8x_rtxpro6000d_pix_node_sys.txt").read_text()
    loaded = load_topology(text)
    assert loaded == topology_from_matrix(text)
    assert [gpu["numa_node"] for gpu in loaded["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    # and comes back once it was saved, for completion by hand
    assert load_topology(yaml.safe_dump(saved_topology(loaded))) == loaded


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.glob("topo_*.txt")))
def test_every_published_matrix_is_taken(name: str) -> None:
    text = (FIXTURES / name).read_text()
    assert load_topology(text)["gpus"]
    assert load_topology("$ nvidia-smi topo -m\n" + text) == load_topology(text)


def test_what_is_left_out_is_unknown() -> None:
    text = """
schema: 1
cpus: [3, 2, 1, 0]
numa_nodes: [{id: 1, cpus: [2, 3]}, {id: 0, cpus: [1, 0]}]
gpus:
  - pci_address: 0000:C1:00.0
    numa_node: 1
  - {pci_address: "00000000:38:00.0", uuid: GPU-01234567-89AB-CDEF-0123-456789ABCDEF}
links: [["0000:c1:00.0", "0000:38:00.0", SYS]]
"""
    unknown = {"device_id": "", "numa_node": None, "uuid": "", "model": "", "memory_mib": None, "mig": None}
    assert load_topology(text) == {
        "schema": 1,
        "cpus": [0, 1, 2, 3],
        "memory_bytes": None,
        "numa_nodes": [
            {"id": 0, "cpus": [0, 1], "memory_bytes": None, "socket": None},
            {"id": 1, "cpus": [2, 3], "memory_bytes": None, "socket": None},
        ],
        "cores": [],
        "gpus": [
            {**unknown, "pci_address": "0000:38:00.0", "uuid": UUID},
            {**unknown, "pci_address": "0000:c1:00.0", "numa_node": 1},
        ],
        "links": [["0000:38:00.0", "0000:c1:00.0", "SYS"]],
        "driver": {"version": "", "open": None},
        "warnings": [],
        "listeners": [],
        "releases": {},
    }


def test_two_loads_share_nothing() -> None:
    text = "{schema: 1, cpus: [], gpus: []}"
    load_topology(text)["warnings"].append("changed")
    load_topology(text)["driver"]["version"] = "changed"
    assert load_topology(text)["warnings"] == []
    assert load_topology(text)["driver"]["version"] == ""


def changed(*path: Any, value: Any) -> str:
    """The topology with one value changed, as JSON; without it when the value is `...`."""
    data = saved_topology(copy.deepcopy(topology()))
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], 2, "schema: 2 is not 1, which this collection reads; save the file anew"),
        (["schema"], True, "schema: True is not 1"),
        (["schema"], "1", "schema: '1' is not 1"),
        (["schema"], ..., "schema is missing"),
        (["cpus"], ..., "cpus is missing"),
        (["gpus"], ..., "gpus is missing"),
        (["gpu"], [], "'gpu' is not known; known are schema, cpus, memory_bytes"),
        (["cpus"], "0-3", "cpus: '0-3' is not a list"),
        (["cpus"], None, "cpus: None is not a list; write [] for none"),
        (["cpus", 2], "2", "cpus[2]: '2' is not a CPU's number from 0 to"),
        (["cpus", 2], 2.0, "cpus[2]: 2.0 is not a CPU's number"),
        (["cpus", 2], True, "cpus[2]: True is not a CPU's number"),
        (["cpus", 2], -1, "cpus[2]: -1 is not a CPU's number from 0"),
        (["cpus", 2], 1, "cpus: the CPU 1 is there twice"),
        (["memory_bytes"], "2G", "memory_bytes: '2G' is not a number of bytes from 1 to"),
        (["memory_bytes"], 0, "memory_bytes: 0 is not a number of bytes from 1"),
        (["numa_nodes", 0], [0], "numa_nodes[0]: [0] is not a mapping"),
        (["numa_nodes", 0, "id"], ..., "numa_nodes[0].id is missing"),
        (["numa_nodes", 0, "id"], -1, "numa_nodes[0].id: -1 is not a NUMA node's number"),
        (["numa_nodes", 0, "id"], 8, "numa_nodes: the id 8 is there twice"),
        (["numa_nodes", 0, "name"], "a", "numa_nodes[0].'name' is not known"),
        (["numa_nodes", 0, "cpus"], [0, 9], "numa_nodes: node 0: the CPUs 9 are not in cpus"),
        (["numa_nodes", 0, "cpus"], [0, 1], "numa_nodes: the CPU 1 is there twice"),
        (["numa_nodes", 0, "cpus"], [], "numa_nodes: node 0 has no CPUs"),
        (["numa_nodes", 0, "socket"], "first", "numa_nodes[0].socket: 'first' is not a socket's number"),
        (["cores"], [0, 1], "cores[0]: 0 is not a list"),
        (["cores"], [[0, 9]], "cores[0]: the CPUs 9 are not in cpus"),
        (["cores"], [[0, 1], [1]], "cores: the CPU 1 is there twice"),
        (["gpus", 0, "pci_address"], ..., "gpus[0].pci_address is missing"),
        (
            ["gpus", 0, "pci_address"],
            "38:00.0",
            "gpus[0].pci_address: '38:00.0' is not a PCI address like '0000:38:00.0'",
        ),
        # what YAML makes of 38:00 without quotes
        (["gpus", 0, "pci_address"], 2280, "gpus[0].pci_address: 2280 is not a PCI address"),
        (["gpus", 0, "pci_address"], "10000:01:00.0", "gpus: the pci_address 10000:01:00.0 is there twice"),
        (["gpus", 1, "uuid"], UUID, f"gpus: the uuid {UUID} is there twice"),
        (["gpus", 0, "uuid"], "GPU-1", "gpus[0].uuid: 'GPU-1' is not a UUID"),
        (["gpus", 0, "uuid"], "GPU-00000000-0000-0000-0000-000000000000", "is not a UUID"),
        (["gpus", 0, "uuid"], None, "gpus[0].uuid: None is not a UUID"),
        (["gpus", 0, "device_id"], 11189, "gpus[0].device_id: 11189 is not a PCI device number like '0x2bb5'"),
        (["gpus", 0, "numa_node"], -1, "gpus[0].numa_node: -1 is not a NUMA node's number from 0 to"),
        (["gpus", 0, "memory_mib"], "97887 MiB", "gpus[0].memory_mib: '97887 MiB' is not a number of MiB"),
        (["gpus", 0, "mig"], "Disabled", "gpus[0].mig: 'Disabled' is not true, false or null"),
        (["gpus", 0, "model"], 6000, "gpus[0].model: 6000 is not a text"),
        (["gpus", 0, "model"], "x" * 1001, "is not a text of at most 1000 characters"),
        (
            ["links", 0],
            ["0000:38:00.0", "10000:01:00.0"],
            "links[0]: ['0000:38:00.0', '10000:01:00.0'] is not [GPU, GPU",
        ),
        (["links", 0, 2], "X", "links[0][2]: 'X' is not a link: PIX, PXB, PHB, NODE, SYS or NV and a number"),
        (["links", 0, 2], "NV#", "links[0][2]: 'NV#' is not a link"),
        (["links", 0, 1], "0000:39:00.0", "links[0]: '0000:39:00.0' is no pci_address of gpus"),
        (["links", 0, 1], "0000:38:00.0", "links[0]: '0000:38:00.0' has no link to itself"),
        (
            ["links"],
            [["0000:38:00.0", "10000:01:00.0", "PIX"], ["10000:01:00.0", "0000:38:00.0", "SYS"]],
            "links: the link 0000:38:00.0 to 10000:01:00.0 is there twice",
        ),
        (["driver"], "590.48.01", "driver: '590.48.01' is not a mapping"),
        (["driver", "version"], ..., "driver.version is missing"),
        (["driver", "version"], 590.48, "driver.version: 590.48 is not a text"),
        (["driver", "open"], "yes", "driver.open: 'yes' is not true, false or null"),
        (["warnings"], "none", "warnings: 'none' is not a list"),
        (["warnings", 0], 1, "warnings[0]: 1 is not a text"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_needed(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        load_topology(changed(*path, value=value))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file holds nothing; needed is a topology saved by playbooks/topology.yml"),
        ("[1, 2]", "the file holds [1, 2]"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)\n", "the file is neither YAML"),
        ("No devices were found", "the file holds 'No devices were found'"),
        ("schema: [1\n", "neither YAML"),
        ("a: 1\nb: c: d\n", "in line 2"),
        ("{" * 5000, "neither YAML"),
        ("schema: 1\nschema2: " + "9" * 5000, "neither YAML"),
        (
            "{schema: 1, gpus: [], cpus: [0x" + "f" * 5000 + "]}",
            "cpus[0]: a number of 20000 bits is not a CPU's number",
        ),
        ("cpus: !!python/object:os.system {}", "neither YAML"),
        ("cpus: !!timestamp soon", "neither YAML"),
        ("cpus: !!bool perhaps", "neither YAML"),
        ("cpus: 2026-13-45", "neither YAML"),
        ("? [a]\n: 1\n", "neither YAML"),
        ("GPU0\tGPU1\nGPU0\tX\tPIX\n", "no row for GPU1"),
    ],
)
def test_what_is_no_topology_is_named(text: str, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        load_topology(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_text_that_grows_when_it_is_written_out() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]" for number in range(1, 12)]
    with pytest.raises(TopologyError) as caught:
        load_topology("\n".join([*lines, "schema: 1", "gpus: *a11", "cpus: []"]))
    assert len(str(caught.value)) < 500
    with pytest.raises(TopologyError, match=r"cpus\[0\]"):
        load_topology("schema: 1\ngpus: []\ncpus: &a [*a]\n")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def nearly_right(draw: st.DrawFn) -> str:
    """The topology with one or two places changed to anything."""
    data = saved_topology(copy.deepcopy(topology()))
    for _ in range(draw(st.integers(1, 2))):
        place: Any = data
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or draw(st.booleans()):
                place[key] = draw(ANY)
                break
            place = place[key]
    return str(yaml.safe_dump(data))


@given(nearly_right() | st.text() | st.text(alphabet="{}[]:,-&*!|>#%@`\"' \n\tag01") | ANY.map(yaml.safe_dump))
def test_any_text_is_a_topology_or_the_named_error(text: str) -> None:
    with contextlib.suppress(TopologyError):
        loaded = load_topology(text)
        assert set(loaded) == set(topology())
        assert load_topology(yaml.safe_dump(saved_topology(loaded))) == loaded


def test_the_filters_that_the_role_uses() -> None:
    named = filters.FilterModule().filters()
    assert set(named) == {"load_topology", "saved_topology"}
    text = json.dumps(saved_topology(topology()))
    assert named["load_topology"](text) == {"topology": without_state(topology()), "problem": ""}
    refused = named["load_topology"]("schema: 2")
    assert refused["topology"] == {}
    assert "schema: 2" in refused["problem"]
    assert named["saved_topology"](topology()) == saved_topology(topology())
    with pytest.raises(AnsibleFilterError, match="run the role topology first"):
        named["saved_topology"]({})
