"""What a new release has to do: each check once in a state in which it fails."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from gpu_node import config, gate, kernel_log
from gpu_node.engine import Generation
from gpu_node.errors import ConfigError, GateError
from gpu_node.live import LiveNode
from gpu_node.switch import Journal, parse_journal, switch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node_tool.fakes import World, node_value

TOKENS = 64


def generation(**changes: Any) -> Generation:
    arrivals = tuple(place / 10 for place in range(TOKENS))
    return dataclasses.replace(Generation("word " * TOKENS, TOKENS, arrivals), **changes)


def do(world: World, name: str = "B") -> Journal:
    journal = switch(LiveNode(world.tool()), 0, world.releases[0, name])
    assert journal is not None
    return journal


def spoil_when_started(world: World, **fields: Any) -> None:
    """Release B's engine does this; the one before is as it was."""

    def start(index: int) -> None:
        bad = world.units[index].running == world.releases[index, "B"]
        for name, value in fields.items():
            setattr(world.engines[0], name, value if bad else getattr(type(world.engines[0])(8000), name))

    world.on_start = start


# -- the generation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"completion_tokens": 0}, "is healthy and generates nothing"),
        ({"arrivals": ()}, "is healthy and generates nothing"),
        ({"completion_tokens": 3}, "generated 3 tokens where 64 were asked for"),
        ({"text": " \n"}, "is healthy and generates nothing: its 64 tokens are an empty text"),
        ({"arrivals": (1.0,)}, "all 64 came in one event"),
    ],
)
def test_what_is_no_generation(changes: dict[str, Any], says: str) -> None:
    gate.check(generation(), TOKENS)
    with pytest.raises(GateError, match=says):
        gate.check(generation(**changes), TOKENS)


def test_speculation_brings_several_tokens_in_an_event() -> None:
    some = generation(arrivals=(1.0, 1.5, 2.0))
    gate.check(some, TOKENS)
    assert some.tokens_per_s == 63.0
    # Few tokens may all come in one.
    gate.check(generation(completion_tokens=8, arrivals=(1.0,)), 8)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cut_at": 0}, "is healthy and generates nothing"),
        ({"cut_at": 3}, "generated 3 tokens"),
        ({"text": ""}, "empty text"),
        ({"one_event": True}, "in one event"),
        ({"tokens_per_s": 40.0}, "generates 40.0 tokens/s, the one before 100.0: less than 0.5 of it (gate_speed_fact"),
        ({"frozen": True}, "did not answer within"),
    ],
)
def test_the_release_before_comes_back(world: World, fields: dict[str, Any], says: str) -> None:
    spoil_when_started(world, **fields)
    journal = do(world)
    assert journal.outcome == "rolled_back" and says in journal.error
    assert "the engine's last line: boom" in journal.error and "replica 0: engine: loading weights" in world.said
    assert world.units[0].running == world.releases[0, "A"] and world.inside(0)


# -- the speed --------------------------------------------------------------------------------------------------------


def test_best_of_a_few_tries() -> None:
    speeds = iter((10.0, 20.0, 60.0, 500.0))
    tries = (generation(arrivals=(0.0, *([63 / speed] * 63))) for speed in speeds)
    assert gate.measure(lambda: next(tries), TOKENS, 100.0, 0.5) == pytest.approx(60.0)


@pytest.mark.parametrize(("factor", "passes"), [(0.5, True), (0.51, False), (0.0, True)])
def test_share_of_the_speed_before(factor: float, passes: bool) -> None:
    slow = generation(arrivals=(0.0, 63 / 50.0))
    if passes:
        assert gate.measure(lambda: slow, TOKENS, 100.0, factor) == pytest.approx(50.0)
    else:
        with pytest.raises(GateError, match=r"50\.0 tokens/s, the one before 100\.0"):
            gate.measure(lambda: slow, TOKENS, 100.0, factor)


def test_speed_is_noted(world: World) -> None:
    journal = do(world)
    assert (journal.before, journal.after) == (100.0, 100.0)
    assert "replica 0: release " + world.releases[0, "A"] + " generates 100.0 tokens/s" in world.said


def test_the_speed_before_takes_one_try(world: World) -> None:
    """The replica is out meanwhile."""
    world.engines[0].speeds = [50.0]
    assert do(world).before == pytest.approx(50.0)


def test_the_way_back_may_be_slower(world: World) -> None:
    do(world)

    def slow_down(_: int) -> None:
        world.engines[0].tokens_per_s = 1.0

    world.on_start = slow_down
    journal = do(world, "A")
    assert journal.outcome == "new" and journal.before is None and journal.after == pytest.approx(1.0)


def test_speed_before_that_cannot_be_measured_is_not_compared(world: World) -> None:
    world.engines[0].frozen = True

    def thaw(_: int) -> None:
        world.engines[0].frozen, world.engines[0].tokens_per_s = False, 1.0

    world.on_start = thaw
    journal = do(world)
    assert journal.outcome == "new" and journal.before is None and journal.after == pytest.approx(1.0)
    assert any("its speed is not measured, so the next release's is not compared" in line for line in world.said)


def test_speed_of_a_replica_that_does_not_run_is_not_compared(world: World) -> None:
    world.stop_unit(0)
    assert do(world).before is None
    assert any("is not compared: it does not run" in line for line in world.said)


def test_speed_is_not_looked_at(world: World) -> None:
    world.write_node(node_value() | {"gate": {"tokens": 16, "speed_factor": 0}})
    spoil_when_started(world, tokens_per_s=0.5)
    journal = do(world)
    assert journal.outcome == "new" and journal.before is None


def test_speed_of_the_way_back_is_not_compared(world: World) -> None:
    """The machine became slow for both: what served before serves again."""
    world.on_start = lambda _: setattr(world.engines[0], "tokens_per_s", 10.0)
    assert do(world).outcome == "rolled_back"


# -- the kernel's log -------------------------------------------------------------------------------------------------

UNIT = "vllm-replica@0.service"
SLICE = "/system.slice/system-vllm\\x2dreplica.slice/"
XID = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
# From the kernel of a node of ours, and the sizes from a report (vllm#57469).
OOM = [
    "VLLM::Worker_TP invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=libpod-payload-1,mems_allowed=0,"
    f"oom_memcg={SLICE}{UNIT}/libpod-payload-1,task_memcg={SLICE}{UNIT}/libpod-payload-1,task=VLLM::Worker_TP,pid=7,uid=0",
    "Memory cgroup out of memory: Killed process 7 (VLLM::Worker_TP) total-vm:824088588kB, anon-rss:3131928kB,"
    " file-rss:74760kB, shmem-rss:150143716kB, UID:0",
]


@pytest.mark.parametrize(
    ("line", "number", "remedy"),
    [
        (XID, 79, "fell off the bus"),
        ("NVRM: Xid (PCI:0000:01:00): 8, pid=12, name=python3, Ch 00000008", 8, "the card hangs"),
        ("NVRM: Xid (PCI:0000:01:00.0): 119, pid=7, Timeout after 6s of waiting for RPC", 119, "the card hangs"),
        ("NVRM: Xid (PCI:00000000:01:00): 48, DBE", 48, "its memory has errors"),
        ("NVRM: Xid (PCI:0000:01:00): 31, pid=7, MMU Fault", 31, "a kernel of the engine failed"),
        ("NVRM: Xid (PCI:0000:01:00): 999, new", 999, "look this Xid up"),
    ],
)
def test_xid_of_its_gpu(line: str, number: int, remedy: str) -> None:
    (found,) = kernel_log.faults(["usb 1-1: new device", line], UNIT, ["0000:01:00.0"])
    assert found.startswith(f"Xid {number} of its GPU: ") and remedy in found and "PCI:0000" in found


def test_xid_of_another_gpu_is_not_its_fault() -> None:
    assert kernel_log.faults([XID], UNIT, ["0000:02:00.0", "0001:01:00.0"]) == []
    assert kernel_log.faults([XID], UNIT, []) == []
    assert kernel_log.faults(["NVRM: GPU at PCI:0000:01:00: GPU-1"], UNIT, ["0000:01:00.0"]) == []


def test_killed_for_its_memory_cap() -> None:
    (found,) = kernel_log.faults(OOM, UNIT, [])
    assert "the kernel killed VLLM::Worker_TP" in found and "shmem-rss:150143716kB" in found
    assert "raise container_memory" in found


def test_killed_for_the_machines_memory() -> None:
    line = OOM[1].replace("CONSTRAINT_MEMCG", "CONSTRAINT_NONE").replace(f"oom_memcg={SLICE}{UNIT}", "global_oom")
    (found,) = kernel_log.faults([line, "Out of memory: Killed process 7 (VLLM::Worker_TP)"], UNIT, [])
    assert "the machine itself has no memory left" in found


@pytest.mark.parametrize("unit", ["vllm-replica@1.service", "vllm-replica@00.service", "replica@0.service"])
def test_kill_in_another_unit(unit: str) -> None:
    assert kernel_log.faults(OOM, unit, []) == []


def test_a_kill_that_names_no_unit_is_nobodys() -> None:
    """A report as people post it: which replica it was cannot be told from it."""
    sample = Path(__file__).parents[3].parent / "shared/cases/samples/dmesg_memcg_oom_dsv41.txt"
    lines = (
        sample.read_text().splitlines() if sample.exists() else ["Memory cgroup out of memory: Killed process 7 (V)"]
    )
    assert kernel_log.faults(lines, UNIT, []) == []


@given(st.text())
def test_any_text_of_the_log(text: str) -> None:
    messages = kernel_log.parse_messages(text)
    kernel_log.faults([*messages, text], UNIT, ["0000:01:00.0"])


def test_bytes_in_the_log() -> None:
    assert kernel_log.parse_messages(json.dumps({"MESSAGE": list(b"Xid")}) + "\n[]\n{}\nnonsense") == ["Xid"]


@pytest.mark.parametrize("lines", [[XID.replace("01:00", "41:00")], OOM], ids=["xid", "oom"])
def test_a_fault_since_the_start_fails_the_gate(world: World, lines: list[str]) -> None:
    gpu = {"pci_address": "0000:41:00.0", "uuid": "GPU-1"}
    world.gpus = ["GPU-1"]
    world.releases[0, "B"] = world.make_release(0, "B", gpus=[gpu])
    world.kernel = [(world.now - 5, XID), *((world.now - 5, line) for line in OOM)]
    assert do(world, "C").outcome == "new"
    world.now += 10
    # The faulty start is the new release's; the way back is looked at from its own start on.
    world.on_start = lambda index: (
        world.kernel.extend((world.now, line) for line in lines)
        if world.units[index].running == world.releases[0, "B"]
        else setattr(world, "now", world.now + 2)
    )
    journal = do(world)
    assert journal.outcome == "rolled_back" and ("Xid 79" in journal.error or "the kernel killed" in journal.error)


# -- what was written before ------------------------------------------------------------------------------------------


def test_a_journal_of_an_earlier_version_goes_on(world: World) -> None:
    old = {
        "from": world.releases[0, "A"], "to": world.releases[0, "B"], "step": "stop", "force_drain": False,
        "error": "", "outcome": None,
    }  # fmt: skip
    journal = parse_journal(json.dumps(old), "switch.json")
    assert (journal.before, journal.started, dict(journal.seconds)) == (None, 0.0, {})
    world.tool().reasons.add(0, "rollout", "test")
    world.tool().membership.apply()
    LiveNode(world.tool()).save(0, journal)
    assert do(world).outcome == "new"


def test_what_a_journal_notes_survives_a_kill() -> None:
    journal = Journal("a" * 12, "b" * 12, "gate", began=5.0, started=7.5, before=100.25, seconds={"stop": 3.0})
    assert parse_journal(journal.dump(), "switch.json") == journal


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"announce_s": -1}, "announce_s"),
        ({"gate": {"tokens": 3, "speed_factor": 0.5}}, "a count from 4 to 512"),
        ({"gate": {"tokens": 64, "speed_factor": 1.5}}, "a share from 0 to 1"),
        ({"gate": {"tokens": 64, "speed_factor": True}}, "a share from 0 to 1"),
        ({"gate": {"tokens": 64}}, "'speed_factor' is missing"),
        ({"gate": 1}, "expected an object"),
    ],
)
def test_settings_of_the_gate_are_checked(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.parse_node(node_value() | changes, "node.json")


def test_node_json_of_an_earlier_version() -> None:
    node = config.parse_node(node_value(), "node.json")
    assert (node.announce_s, node.gate.tokens, node.gate.speed_factor) == (10, 64, 0.5)
    node = config.parse_node(node_value() | {"announce_s": 0, "gate": {"tokens": 8, "speed_factor": 1}}, "node.json")
    assert (node.announce_s, node.gate.tokens, node.gate.speed_factor) == (0, 8, 1.0)
