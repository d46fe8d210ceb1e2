"""What nvidia-smi, the kernel and the load program say of cards, and the verdict of each gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_node_accept import cards
from gpu_node_accept.cards import Card
from gpu_node_accept.checks import CheckError

XML = (Path(__file__).parent / "fixtures" / "smi_q_2x_h200.xml").read_text()
ONE, TWO = cards.parse_cards(XML.replace("GPU-0000", "GPU-1111", 1))
PLANNED = [{"pci_address": ONE.pci, "uuid": ONE.uuid}]


def server_card(**more: Any) -> Card:
    """A healthy RTX PRO 6000 at work."""
    card = replace(ONE, pci="0000:01:00.0", device_id="0x2bb5", power_limit_w=600.0, power_default_w=600.0, reasons=())
    return replace(card, **more)


def test_a_real_machine_is_read() -> None:
    assert (ONE.pci, ONE.device_id, ONE.name) == ("0000:00:06.0", "0x2335", "NVIDIA H200")
    assert (ONE.gen, ONE.max_gen, ONE.width, ONE.max_width, ONE.replays) == (5, 5, 16, 16, 0)
    assert (ONE.ecc_volatile, ONE.ecc_aggregate, ONE.remap_pending, ONE.remap_failure) == (0, 0, False, False)
    assert (ONE.temperature, ONE.margin, ONE.used_mib, ONE.recovery) == (35, 52, 0, "None")
    assert ONE.reasons == ("gpu_idle",)
    assert ONE.power_limit_w == 700
    assert ONE.data["name"] == "H200 SXM"
    for outcome in (
        cards.ecc(ONE),
        cards.link([ONE]),
        cards.throttling([ONE], True),
        cards.temperature([ONE]),
        cards.power([ONE]),
    ):
        assert outcome.verdict == "pass", outcome


def test_no_xml_is_no_pass() -> None:
    with pytest.raises(CheckError, match="no XML"):
        cards.parse_cards("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_the_plans_cards_are_there() -> None:
    assert cards.presence([ONE, TWO], PLANNED).verdict == "pass"
    gone = cards.presence([TWO], PLANNED)
    assert (gone.verdict, gone.seen) == ("fail", f"{ONE.pci} is not there")
    swapped = cards.presence([replace(ONE, uuid="GPU-other")], PLANNED)
    assert swapped.verdict == "fail" and "GPU-other" in swapped.seen
    unresolved = cards.presence([ONE], [{"pci_address": ONE.pci, "uuid": "auto"}])
    assert unresolved.verdict == "pass"


@pytest.mark.parametrize(
    ("more", "verdict", "word"),
    [
        ({}, "pass", ""),
        ({"ecc_volatile": 1}, "fail", "1 since boot"),
        ({"ecc_aggregate": 2, "remapped_uncorrectable": 1}, "warn", "1 rows replaced"),
        ({"remap_pending": True}, "fail", "waits"),
        ({"remap_failure": True}, "fail", "could not be replaced"),
        ({"sram_threshold": True}, "fail", "SRAM"),
        ({"recovery": "Drain and Reset"}, "fail", "Drain and Reset"),
        ({"ecc_volatile": None, "ecc_aggregate": None}, "not run", ""),
    ],
)
def test_memory_errors(more: dict[str, Any], verdict: str, word: str) -> None:
    found = cards.ecc(server_card(**more))
    assert found.verdict == verdict
    assert word in found.seen
    assert verdict == "pass" or found.remedy


@pytest.mark.parametrize(
    ("lines", "verdict", "seen"),
    [
        (["eth0: up"], "pass", "none"),
        (["NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."], "fail", "0000:01:00 Xid 79 (1 lines)"),
        (["NVRM: Xid (PCI:0000:01:00): 13, Graphics Exception"], "warn", "0000:01:00 Xid 13 (1 lines)"),
        (["NVRM: Xid (PCI:0000:01:00): 13, x"] * 2 + ["NVRM: Xid (PCI:0000:01:00): 48, x"], "fail", "(3 lines)"),
        (["NVRM: Xid (PCI:0000:82:00): 79, another card's"], "pass", "none of the plan's cards, 1 of others"),
    ],
)
def test_xid_lines(lines: list[str], verdict: str, seen: str) -> None:
    found = cards.xids(lines, [{"pci_address": "0000:01:00.0", "uuid": ""}])
    assert found.verdict == verdict
    assert seen in found.seen


def test_the_link_counts_at_its_best_under_load() -> None:
    idle, busy = server_card(gen=1), server_card(gen=5)
    assert cards.link([idle, busy, idle]).verdict == "pass"
    slow = cards.link([idle, server_card(gen=4)])
    assert (slow.verdict, slow.seen) == ("fail", "0000:01:00.0 PCIe 4.0 x16")
    assert cards.link([busy, server_card(width=8)]).verdict == "fail"
    # Slot and firmware give less than the card can, so the card's own maximum is lower too.
    assert cards.link([server_card(gen=4, max_gen=4)]).verdict == "warn"
    assert cards.link([busy, server_card(replays=7)]).verdict == "warn"
    assert cards.link([server_card(gen=None)]).verdict == "not run"
    # What nobody made thresholds for is held against its own maximum.
    assert cards.link([server_card(device_id="0xffff", gen=4, max_gen=4)]).verdict == "pass"


def test_slowdown() -> None:
    assert cards.throttling([server_card()], True).verdict == "pass"
    capped = cards.throttling([server_card(reasons=("sw_power_cap",))], True)
    assert capped.verdict == "pass" and "power limit" in capped.seen
    hot = cards.throttling([server_card(), server_card(reasons=("hw_thermal_slowdown",)), server_card()], True)
    assert hot.verdict == "fail" and "hw_thermal_slowdown" in hot.seen
    before = cards.throttling([server_card(slow_us={"hw_power_brake": 2_500_000})], True)
    assert before.verdict == "warn" and "2.5 s" in before.seen


def test_temperature_is_the_distance_to_slowdown() -> None:
    assert cards.temperature([server_card(margin=20)]).verdict == "pass"
    assert cards.temperature([server_card(margin=20), server_card(margin=5), server_card(margin=20)]).verdict == "warn"
    assert cards.temperature([server_card(margin=0)]).verdict == "fail"
    assert cards.temperature([server_card(margin=None)]).verdict == "not run"
    assert cards.temperature([server_card(temperature=None)]).verdict == "not run"


def test_a_lowered_power_limit_is_told() -> None:
    assert cards.power([server_card()]).verdict == "pass"
    assert cards.power([server_card(power_limit_w=450.0)]).verdict == "warn"
    assert cards.power([server_card(power_limit_w=450.0, power_default_w=None)]).verdict == "warn"
    assert cards.power([server_card(power_limit_w=None)]).verdict == "not run"


def test_every_threshold_has_its_source() -> None:
    for one in [*cards.DATA["cards"].values(), cards.DATA["generic"], cards.DATA["temperature"], cards.DATA["xid"]]:
        assert len(one["source"]) > 20


def way(one: str, other: str, **more: Any) -> dict[str, Any]:
    return {"from": one, "to": other, "gb_s": 52.0, "correct": True, "peer": True, **more}


@pytest.mark.parametrize(
    ("rows", "verdict", "word"),
    [
        ([way("a", "b"), way("b", "a", gb_s=55.5)], "pass", "2 ways, 52.0 to 55.5 GB/s"),
        ([way("a", "b"), way("b", "a", gb_s=6.0)], "warn", "b to a: 6.0 GB/s"),
        ([way("a", "b", peer=False)], "warn", "no peer access"),
        ([way("a", "b", correct=False), way("b", "a", gb_s=1.0)], "fail", "other data"),
        ([way("a", "b"), {"from": "b", "to": "a", "error": "hung: nothing within 30 s"}], "fail", "b to a: hung"),
        # Between two replicas nothing is copied while serving, so only right data matters.
        ([way("a", "c", gb_s=1.0)], "pass", "1 ways"),
        ([], "not run", ""),
    ],
)
def test_copies_from_card_to_card(rows: list[dict[str, Any]], verdict: str, word: str) -> None:
    found = cards.pairs(rows, [["a", "b"], ["c"]], 25)
    assert (found.verdict, word in found.seen) == (verdict, True), found


def size(count: int, **more: Any) -> dict[str, Any]:
    return {"bytes": count, "bus_gb_s": 20.0, "correct": True, **more}


@pytest.mark.parametrize(
    ("found", "verdict", "word"),
    [
        (
            {"sizes": [size(8), size(1 << 26)], "nccl": "2.31.2"},
            "pass",
            "2 sizes right, 20.0 GB/s at 64 MiB, NCCL 2.31.2",
        ),
        ({"sizes": [size(8), size(1 << 26, bus_gb_s=2.0)]}, "warn", "2.0 GB/s"),
        ({"sizes": [size(8), size(1 << 26, correct=False)]}, "fail", "wrong sums at 67108864"),
        ({"sizes": [size(8)], "error": "hung in an all-reduce of 4,096 bytes"}, "fail", "after 8 bytes were right"),
        ({"sizes": []}, "fail", "no size"),
    ],
)
def test_all_reduce(found: dict[str, Any], verdict: str, word: str) -> None:
    outcome = cards.all_reduce(found, 8)
    assert (outcome.verdict, word in outcome.seen) == (verdict, True), outcome


@pytest.mark.parametrize(
    ("code", "text", "verdict"),
    [
        (0, "| Deployment                | Pass |\n| PCIe | Pass - All |", "pass"),
        (0, "| Memory | Fail - All |", "fail"),
        (226, "| Memory | Pass |", "fail"),
        (124, "not done within 2700 s", "fail"),
    ],
)
def test_dcgm(code: int, text: str, verdict: str) -> None:
    assert cards.dcgm(code, text, 1).verdict == verdict
