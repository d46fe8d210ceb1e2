"""The load program's parent, with workers that hang, die or tell: only torch is missing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_load import parent
from gpu_node_accept import node

WORKER = """\
import json, os, sys, time
say = lambda row: print(json.dumps(row), flush=True)
what, *rest = sys.argv[1:]
if what == "cards":
    print("a library says hello")
    if os.environ.get("NO_CARDS"):
        sys.exit("torch.cuda.device_count() is 0")
    say({"cards": ["GPU-a", "GPU-b", "GPU-c"], "nccl": "2.31.2"})
elif what == "pairs":
    for one, other in json.loads(rest[1]):
        say({"begin": [one, other]})
        if [one, other] == json.loads(os.environ.get("HANGS", "[]")):
            time.sleep(600)
        if [one, other] == json.loads(os.environ.get("DIES", "[]")):
            sys.exit("CUDA error: an illegal memory access was encountered")
        say({"gb_s": 50.0, "correct": True, "peer": True})
elif what == "rank":
    for size in json.loads(rest[2]):
        if rest[0] == "0":
            say({"begin": size})
        if str(size) == os.environ.get("HANGS_AT"):
            time.sleep(600)
        if str(size) == os.environ.get("DIES_AT") and rest[0] == "1":
            sys.exit("NCCL error")
        if str(size) == os.environ.get("DIES_AT"):
            time.sleep(1)
            sys.exit("connection closed by peer")
        if rest[0] == "0":
            say({"bytes": size, "bus_gb_s": 20.0, "correct": True})
elif what == "load":
    say({"begin": "load"})
    sys.exit("CUDA error: device-side assert" if os.environ.get("LOAD_DIES") else 0)
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(parent, "WORKER", (sys.executable, str(tmp_path / "worker.py")))
    monkeypatch.setattr(parent, "START_S", 20.0)
    return monkeypatch


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    parent.main(arguments)
    return node.read_rows(capsys.readouterr().out)


def test_every_way_of_every_pair(worker: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cards, *found = rows(capsys, "pairs")
    assert cards == {"cards": ["GPU-a", "GPU-b", "GPU-c"], "nccl": "2.31.2"}
    assert [row["item"] for row in found] == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]
    assert all(row["gb_s"] == 50 for row in found)


@pytest.mark.parametrize(
    ("variable", "word"), [("HANGS", "hung: nothing within 1 s"), ("DIES", "illegal memory access")]
)
def test_a_bad_way_is_named_and_the_others_are_looked_at(
    worker: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, word: str
) -> None:
    worker.setenv(variable, json.dumps([0, 2]))
    began = time.monotonic()
    _, *found = rows(capsys, "pairs", "--limit", "1")
    assert time.monotonic() - began < 30
    bad = [row for row in found if "error" in row]
    assert [row["item"] for row in bad] == [[0, 2]]
    assert word in bad[0]["error"]
    assert len(found) == 6


def test_an_all_reduce(worker: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, *found = rows(capsys, "allreduce", "--sizes", "8", "4096")
    assert [row["bytes"] for row in found] == [8, 4096]


@pytest.mark.parametrize(
    ("variable", "word"),
    [
        ("HANGS_AT", "hung in an all-reduce of 4,096 bytes: nothing within 2 s"),
        ("DIES_AT", "a rank ended in an all-reduce of 4,096 bytes"),
    ],
)
def test_an_all_reduce_that_does_not_end_is_named(
    worker: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, word: str
) -> None:
    worker.setenv(variable, "4096")
    _, *found = rows(capsys, "allreduce", "--sizes", "8", "4096", "--limit", "2")
    assert found[0]["bytes"] == 8
    assert word in found[-1]["error"]


def test_without_cards_it_says_so(worker: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    worker.setenv("NO_CARDS", "1")
    (row,) = rows(capsys, "load")
    assert "device_count() is 0" in row["error"]


def test_a_load_that_breaks_is_an_error(worker: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    worker.setenv("LOAD_DIES", "1")
    assert "device-side assert" in rows(capsys, "load")[-1]["error"]


def test_the_container_is_confined() -> None:
    command = node.load_command("localhost/image:key", ["GPU-a"], Path("/p"), ["pairs"])
    assert command[-5:] == ["--entrypoint=python3", "localhost/image:key", "-m", "gpu_load", "pairs"]
    for option in ("--network=none", "--read-only", "--cap-drop=all", "--pull=never", "--volume=/p:/program:ro"):
        assert option in command
    assert command[command.index("--device") + 1] == "nvidia.com/gpu=GPU-a"


def test_a_command_that_hangs_is_ended() -> None:
    began = time.monotonic()
    code, text = node.run(["sh", "-c", "echo begun; sleep 60 & wait"], 0.5)
    assert (code, "not done within" in text) == (124, True)
    assert time.monotonic() - began < 15
    assert node.run(["no-such-command"], 5)[0] == 127
