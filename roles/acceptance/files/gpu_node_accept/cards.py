"""What nvidia-smi and the kernel say of the cards, and what is wrong with it. Pure: text in, verdict out."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_node_accept.checks import CheckError, Outcome, failed, not_run, passed, warned, worst

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d+)")
# What slows a card down in an error. The power cap is none: at full load a healthy card runs into it.
_FAULTY_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_FAULTY_COUNTERS = ("hw_therm_slowdown", "hw_power_brake", "sw_therm_slowdown")


@dataclass(frozen=True)
class Card:
    """One card of `nvidia-smi -q -x`. None: the card or driver does not tell."""

    uuid: str
    pci: str
    device_id: str
    name: str
    ecc_volatile: int | None
    ecc_aggregate: int | None
    sram_threshold: bool
    remap_pending: bool
    remap_failure: bool
    remapped_uncorrectable: int | None
    recovery: str
    gen: int | None
    max_gen: int | None
    width: int | None
    max_width: int | None
    replays: int | None
    reasons: tuple[str, ...]
    slow_us: dict[str, int]
    temperature: int | None
    margin: int | None
    power_w: float | None
    power_limit_w: float | None
    power_default_w: float | None
    used_mib: int | None
    processes: int

    @property
    def data(self) -> dict[str, Any]:
        """The thresholds of its model."""
        found: dict[str, Any] = DATA["cards"].get(self.device_id, DATA["generic"])
        return found


def _number(text: str | None) -> float | None:
    match = re.match(r"-?\d+(?:\.\d+)?", (text or "").strip())
    return float(match[0]) if match else None


def _whole(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def short_pci(address: str) -> str:
    """`00000000:C1:00.0` and `0000:c1:00.0` as `0000:c1:00.0`."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def _uncorrectable(card: ElementTree.Element, which: str) -> int | None:
    """The sum over memories: their names changed over the years, and each holds `uncorrectable` or `double_bit`."""
    parent = card.find(f"ecc_errors/{which}")
    counts = [
        _whole(item.text)
        for item in (parent.iter() if parent is not None else ())
        if item.tag.startswith(("sram_uncorrectable", "dram_uncorrectable"))
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _card(card: ElementTree.Element) -> Card:
    def text(path: str) -> str:
        return (card.findtext(path) or "").strip()

    reasons = card.find("clocks_event_reasons")
    reasons = card.find("clocks_throttle_reasons") if reasons is None else reasons
    counters = card.find("clocks_event_reasons_counters")
    power = next((tag for tag in ("gpu_power_readings", "power_readings") if card.find(tag) is not None), "none")
    device = text("pci/pci_device_id")
    draw = _number(text(f"{power}/power_draw"))
    if draw is None:
        draw = _number(text(f"{power}/instant_power_draw"))
    return Card(
        uuid=text("uuid"),
        pci=short_pci(card.get("id") or text("pci/pci_bus_id")),
        device_id=f"0x{device[:4].lower()}" if re.fullmatch("[0-9A-Fa-f]{8}", device) else "",
        name=text("product_name"),
        ecc_volatile=_uncorrectable(card, "volatile"),
        ecc_aggregate=_uncorrectable(card, "aggregate"),
        sram_threshold=any(item.text == "Yes" for item in card.iter("sram_threshold_exceeded")),
        remap_pending=text("remapped_rows/remapped_row_pending") == "Yes",
        remap_failure=text("remapped_rows/remapped_row_failure") == "Yes",
        remapped_uncorrectable=_whole(text("remapped_rows/remapped_row_unc")),
        recovery=text("gpu_recovery_action"),
        gen=_whole(text("pci/pci_gpu_link_info/pcie_gen/current_link_gen")),
        max_gen=_whole(text("pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        width=_whole(text("pci/pci_gpu_link_info/link_widths/current_link_width")),
        max_width=_whole(text("pci/pci_gpu_link_info/link_widths/max_link_width")),
        replays=_whole(text("pci/replay_counter")),
        reasons=tuple(
            re.sub("^clocks_(?:event|throttle)_reason_", "", item.tag)
            for item in (reasons if reasons is not None else ())
            if (item.text or "").strip() == "Active"
        ),
        slow_us={
            item.tag.removeprefix("clocks_event_reasons_counters_"): count
            for item in (counters if counters is not None else ())
            if (count := _whole(item.text)) is not None
        },
        temperature=_whole(text("temperature/gpu_temp")),
        margin=_whole(text("temperature/gpu_temp_tlimit")),
        power_w=draw,
        power_limit_w=_number(text(f"{power}/current_power_limit")),
        power_default_w=_number(text(f"{power}/default_power_limit")),
        used_mib=_whole(text("fb_memory_usage/used")),
        processes=len(list(card.iter("process_info"))),
    )


def parse_cards(text: str) -> list[Card]:
    """The cards of `nvidia-smi -q -x`. Raises CheckError when it is none."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise CheckError(f"nvidia-smi -q -x is no XML: {error}", remedy="run nvidia-smi on the node") from None
    return [_card(card) for card in root.iter("gpu")]


def presence(cards: Sequence[Card], planned: Sequence[dict[str, Any]]) -> Outcome:
    """The plan's cards are there, each with its UUID at its address."""
    there = {card.pci: card.uuid for card in cards}
    problems = []
    for gpu in planned:
        address, uuid = short_pci(gpu["pci_address"]), gpu["uuid"]
        if address not in there:
            problems.append(f"{address} is not there")
        elif uuid not in ("", "auto") and there[address] != uuid:
            problems.append(f"{address} has {there[address]}, planned {uuid}")
    wanted = f"the plan's {len(planned)} cards by address and UUID"
    if problems:
        return failed("; ".join(problems), wanted, "a card that was swapped: run site.yml; one that is gone: reseat it")
    return passed(f"{len(planned)} of {len(cards)} cards of the node, UUIDs as planned", wanted)


def ecc(card: Card) -> Outcome:
    """Uncorrectable errors of memory, and rows that wait for a reset or could not be replaced."""
    wanted = "no uncorrectable error, no row that waits or failed"
    if card.ecc_volatile is None and card.ecc_aggregate is None:
        return not_run(f"{card.pci} does not tell (ECC off?)", "nvidia-smi -e 1, and a reboot", wanted)
    seen = f"{card.pci}: {card.ecc_volatile} since boot, {card.ecc_aggregate} ever"
    if card.remap_failure or card.sram_threshold:
        what = "a row could not be replaced" if card.remap_failure else "too many errors in SRAM"
        return failed(f"{seen}, {what}", wanted, "have the card replaced")
    if card.remap_pending:
        return failed(
            f"{seen}, a row waits to be replaced", wanted, "reset the card (nvidia-smi --gpu-reset) or reboot"
        )
    if card.ecc_volatile:
        return failed(seen, wanted, "reset the card or reboot; replace it when the errors come back")
    if card.recovery not in ("", "None", "N/A"):
        return failed(f"{seen}, the driver asks for: {card.recovery}", wanted, "do what the driver asks for")
    if card.ecc_aggregate:
        rows = card.remapped_uncorrectable
        return warned(f"{seen}, {rows} rows replaced", wanted, "keep an eye on it: replace the card when it grows")
    return passed(seen, wanted)


def xids(messages: Iterable[str], planned: Sequence[dict[str, Any]]) -> Outcome:
    """The driver's error lines in the kernel's log of this boot."""
    cards = {short_pci(gpu["pci_address"]).rsplit(".", 1)[0] for gpu in planned}
    hits = [(short_pci(match[1]), int(match[2])) for text in messages if (match := _XID.search(text))]
    wanted = "no Xid line of the plan's cards since boot"
    mine = [(address, number) for address, number in hits if address in cards]
    if not mine:
        others = f"none of the plan's cards, {len(hits)} of others" if hits else "none"
        return passed(others, wanted)
    seen = ", ".join(f"{address} Xid {number}" for address, number in dict.fromkeys(mine)) + f" ({len(mine)} lines)"
    if all(number in DATA["xid"]["harmless"] for _, number in mine):
        return warned(seen, wanted, "a program failed, or a row was replaced in time: see journalctl -k -g Xid")
    return failed(seen, wanted, "journalctl -k -g Xid has the lines; look the number up in NVIDIA's list of Xid errors")


def link(samples: Sequence[Card]) -> Outcome:
    """PCIe speed and width of one card under load: the best speed and the least width that were seen.

    An idle card lowers its speed, so only a look under load counts; the width never changes by itself.
    """
    card = samples[0]
    gens = [one.gen for one in samples if one.gen is not None]
    widths = [one.width for one in samples if one.width is not None]
    if not gens or not widths or card.max_gen is None or card.max_width is None:
        return not_run(f"{card.pci} does not tell its link", "nvidia-smi -q -d PCIE; virtual machines may hide it")
    gen, width = max(gens), min(widths)
    model = card.data
    wanted = f"PCIe {card.max_gen}.0 x{card.max_width}"
    seen = f"{card.pci} PCIe {gen}.0 x{width}"
    if gen < card.max_gen or width < card.max_width:
        return failed(seen, wanted, "reseat card or riser, look at the slot's bifurcation and speed in the firmware")
    if (model["pcie_gen"] or 0) > gen or (model["pcie_width"] or 0) > width:
        wanted = f"PCIe {model['pcie_gen']}.0 x{model['pcie_width']}, which a {model['name']} can"
        return warned(seen, wanted, "the slot gives less than the card can: another slot, or the firmware's settings")
    grown = (samples[-1].replays or 0) - (card.replays or 0)
    if grown > 0:
        return warned(f"{seen}, {grown} packets sent again", wanted, "reseat card, riser or cable: the signal is poor")
    return passed(seen, wanted)


def throttling(samples: Sequence[Card], loaded: bool) -> Outcome:
    """What slows the card down: now (under load), and since the driver was loaded."""
    card = samples[-1]
    wanted = "no slowdown by heat or by the power supply"
    now = sorted({reason for one in samples for reason in one.reasons if reason in _FAULTY_REASONS})
    if now:
        return failed(f"{card.pci}: {', '.join(now)}", wanted, "look at fans, air flow and power cables of this card")
    before = {name: card.slow_us.get(name, 0) for name in _FAULTY_COUNTERS if card.slow_us.get(name, 0) > 0}
    if before:
        seen = ", ".join(f"{name} {us / 1e6:.1f} s" for name, us in before.items())
        return warned(f"{card.pci}: since the driver was loaded {seen}", wanted, "look at cooling and power supply")
    capped = any("sw_power_cap" in one.reasons for one in samples)
    return passed(f"{card.pci}: none{' (at its power limit)' if capped else ''}{'' if loaded else ', idle'}", wanted)


def temperature(samples: Sequence[Card]) -> Outcome:
    """The distance to the slowdown that the card itself tells."""
    warmest = max(samples, key=lambda one: one.temperature if one.temperature is not None else -1)
    limit = DATA["temperature"]["margin_warn_c"]
    wanted = f"more than {limit} degrees below the card's slowdown"
    if warmest.temperature is None:
        return not_run(f"{warmest.pci} does not tell its temperature", "nvidia-smi -q -d TEMPERATURE", wanted)
    margins = [one.margin for one in samples if one.margin is not None]
    seen = f"{warmest.pci} {warmest.temperature} C"
    if not margins:
        return not_run(f"{seen}; it does not tell the distance to its slowdown", "nvidia-smi -q -d TEMPERATURE", wanted)
    margin = min(margins)
    seen += f", {margin} below slowdown"
    if margin <= 0:
        return failed(seen, wanted, "look at fans and air flow")
    return warned(seen, wanted, "look at fans and air flow") if margin <= limit else passed(seen, wanted)


def power(samples: Sequence[Card]) -> Outcome:
    """The power limit against the card's own default, and what it drew."""
    card = samples[-1]
    draws = [one.power_w for one in samples if one.power_w is not None]
    wanted = "the limit that the card comes with"
    if card.power_limit_w is None or not draws:
        return not_run(f"{card.pci} does not tell its power", "nvidia-smi -q -d POWER; some machines hide it", wanted)
    seen = f"{card.pci} up to {max(draws):.0f} W of {card.power_limit_w:.0f} W"
    normal = card.power_default_w or card.data["power_w"]
    if normal and card.power_limit_w < normal - 1:
        return warned(seen, f"{normal:.0f} W", "somebody lowered it: nvidia-smi -pl, or a unit that sets it at boot")
    return passed(seen, wanted)


def each(cards: Iterable[Sequence[Card]], look: Any) -> Outcome:
    """One verdict over the cards: the worst, with the cards that have it."""
    return worst([look(samples) for samples in cards])


# --- what the load program tells


def named_ways(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the load program that tell of a way, with the names of its cards in place of their numbers."""
    found = []
    for row in rows:
        if "item" in row:
            source, target = row["item"]
            told = {key: value for key, value in row.items() if key != "item"}
            found.append({"from": names[source], "to": names[target], **told})
    return found


def pairs(rows: Sequence[dict[str, Any]], groups: Sequence[Sequence[str]], floor: float) -> Outcome:
    """Copies from card to card, each way of each pair.

    :param rows: ``from``, ``to`` (names of cards), and ``gb_s`` with ``peer`` and ``correct``, or ``error``.
    :param groups: the cards of each replica; between two replicas nothing is copied while serving.
    """
    if not rows:
        return not_run("there is one card only")
    inside = {(a, b) for group in groups for a in group for b in group}
    outcomes = []
    wanted = f"the right data, {floor:g} GB/s at least inside a replica"
    remedy = "IOMMU off or passthrough, ACS off (host_settings_iommu, host_settings_acs_redirect)"
    for row in rows:
        name = f"{row['from']} to {row['to']}"
        mine = (row["from"], row["to"]) in inside
        if row.get("error"):
            outcomes.append(failed(f"{name}: {row['error']}", wanted, remedy))
        elif not row["correct"]:
            outcomes.append(failed(f"{name}: other data arrived than was sent", wanted, remedy))
        elif mine and (row["gb_s"] < floor or not row["peer"]):
            how = "" if row["peer"] else ", not from card to card (no peer access)"
            outcomes.append(warned(f"{name}: {row['gb_s']:.1f} GB/s{how}", wanted, remedy))
        else:
            outcomes.append(passed(f"{row['gb_s']:.1f}", wanted))
    whole = worst(outcomes)
    if whole.verdict == "pass":
        speeds = [row["gb_s"] for row in rows]
        return passed(f"{len(rows)} ways, {min(speeds):.1f} to {max(speeds):.1f} GB/s", wanted)
    return whole


def read_sums(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the load program's rows tell of sums, as :func:`all_reduce` takes it."""
    return {
        "sizes": [row for row in rows if "bus_gb_s" in row],
        "error": next((str(row["error"]) for row in rows if row.get("error")), ""),
        "nccl": next((row.get("nccl") for row in rows if "cards" in row), None),
    }


def all_reduce(found: dict[str, Any], floor: float) -> Outcome:
    """A sum over a replica's cards, at several sizes.

    :param found: ``sizes`` (each ``bytes``, ``bus_gb_s``, ``correct``), or ``error``; ``nccl`` the version.
    """
    wanted = f"the right sum at every size, {floor:g} GB/s at least at the largest"
    remedy = "look at IOMMU and ACS; NCCL 2.26.2 fails on these cards from 512 KiB on (nccl issue 2418)"
    sizes = found.get("sizes") or []
    last = f" after {sizes[-1]['bytes']:,} bytes were right" if sizes else ""
    if found.get("error"):
        return failed(f"{found['error']}{last}", wanted, remedy)
    wrong = [one["bytes"] for one in sizes if not one["correct"]]
    if wrong or not sizes:
        return failed(f"wrong sums at {', '.join(map(str, wrong)) or 'no size'} bytes", wanted, remedy)
    best = max(sizes, key=lambda one: one["bytes"])
    seen = (
        f"{len(sizes)} sizes right, {best['bus_gb_s']:.1f} GB/s at {best['bytes'] >> 20} MiB, NCCL {found.get('nccl')}"
    )
    return passed(seen, wanted) if best["bus_gb_s"] >= floor else warned(seen, wanted, remedy)


def dcgm(code: int, text: str, level: int) -> Outcome:
    """`dcgmi diag -r LEVEL`: its exit code, and the lines that say Fail."""
    wanted = f"dcgmi diag -r {level} without a failure"
    bad = [re.sub(r"\s+", " ", line).strip(" |") for line in text.splitlines() if re.search(r"\bfail\b", line, re.I)]
    if bad or code not in (0,):
        last = text.strip().splitlines()[-1:] or ["no output"]
        return failed("; ".join(bad)[:400] or f"exit {code}: {last[0][:200]}", wanted, "dcgmi diag -r 3 tells more")
    return passed("no failure", wanted)
