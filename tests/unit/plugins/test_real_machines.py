"""Plans for machines that `gpu_topology` was run on: virtual machines with one and two H200, driver 580.159.04.

What was read there is kept as it came, but for listening sockets and the cards' UUIDs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import PlanError
from ansible_collections.serving.gpu_node.plugins.module_utils.topology_file import load_topology

from tests.unit.plugins.samples import intent, resolved

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
CARDS = ["0000:00:06.0", "0000:00:07.0"]


def machine(name: str) -> dict[str, Any]:
    return load_topology((FIXTURES / name).read_text())


def test_two_cards_of_another_model_are_not_taken_by_themselves() -> None:
    with pytest.raises(PlanError) as caught:
        intent(node=machine("read_2x_h200_vm.json"), name="2x")
    (problem,) = caught.value.problems
    assert problem.startswith("no GPU of this node is one that the profile is made for (RTX PRO 6000")
    assert "PCI shows 0000:00:06.0 (NVIDIA H200), 0000:00:07.0 (NVIDIA H200)" in problem


def test_two_cards_that_are_named_serve_without_pins() -> None:
    plan = resolved({"gpus": CARDS}, machine("read_2x_h200_vm.json"), name="2x")
    (replica,) = plan["replicas"]
    assert [gpu["pci_address"] for gpu in replica["gpus"]] == CARDS
    assert (replica["cpus"], replica["memory_nodes"]) == ("", "")
    release = replica["files"]["release.json"]
    assert "--cpuset" not in release
    assert "nvidia.com/gpu=GPU-11111111-2222-3333-4444-000000000002" in release
    # the kernel's and the driver's word on the NUMA node differ; the cards are not those of the document; no pins
    assert [text for text in plan["warnings"] if "sysfs is followed" in text]
    assert [text for text in plan["warnings"] if "not a card that this profile was measured on" in text]
    assert len([text for text in plan["warnings"] if "no memory is pinned" in text]) == 1


def test_memory_that_was_plugged_in_counts() -> None:
    """The NUMA node's own figure was 4.6 GiB there, the machine's 252 GiB."""
    plan = intent({"gpus": CARDS, "container_memory": "200g"}, machine("read_2x_h200_vm.json"), name="2x")
    assert plan["budgets"]
    with pytest.raises(PlanError, match=r"container_memory|host memory"):
        intent({"gpus": CARDS, "container_memory": "40g"}, machine("read_2x_h200_vm.json"), name="2x")


def test_one_card_is_too_few() -> None:
    with pytest.raises(
        PlanError, match="replicas: 1 with tensor_parallel_size 2 needs 2 GPUs, and there are 1: 0000:00"
    ):
        intent({"gpus": CARDS[:1]}, machine("read_1x_h200_vm.json"), name="2x")
