"""The supervisor's own bookkeeping, with workers that say what a test wants."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_node_weights import remote
from gpu_node_weights.errors import WeightsError
from gpu_node_weights.remote import Done, Remote
from gpu_node_weights.request import Request, Wanted

Answer = Callable[[dict[str, Any]], dict[str, Any]]
GOOD = {"ok": True, "sha256": "a" * 64, "stamp": [1, 2, 3], "transport": "http"}


def bad(kind: str) -> dict[str, Any]:
    return {"ok": False, "kind": kind, "message": "no", "retry_after": 0}


class FakeWorker:
    """Answers once all its streams have an order, all in one go."""

    script: Answer
    made: list[FakeWorker]

    def __init__(self, request: Request, transport: str, streams: int, home: Path) -> None:
        self.streams, self.transport = streams, transport
        self.tasks: dict[int, Any] = {}
        self.began, self.ready, self.ended = 0.0, True, False
        read, self._write = os.pipe()
        self.answers = os.fdopen(read, "rb", buffering=0)
        FakeWorker.made.append(self)

    def give(self, number: int, order: dict[str, Any], task: Any) -> None:
        self.tasks[number] = task
        answer = {"id": number, **type(self).script({**order, "transport": self.transport})}
        os.write(self._write, (json.dumps(answer) + "\n").encode())

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        assert not self.ended
        data = os.read(self.answers.fileno(), 1 << 16)
        return [json.loads(line) for line in data.splitlines()], bool(data)

    def kill(self) -> None:
        self.ended = True
        os.close(self._write)
        self.answers.close()


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run a fetch of some files; returns those that were reported verified, in their order."""
    monkeypatch.setattr(remote, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "made", [], raising=False)

    def run(script: Answer, files: int = 6, **more: Any) -> list[str]:
        monkeypatch.setattr(FakeWorker, "script", staticmethod(script), raising=False)
        wanted = [Wanted(f"f{number}", 10, "a" * 64, xet=True) for number in range(files)]
        source = {"type": "hub", "repository": "a/b", "revision": "0" * 40}
        request = Request(
            **{
                **{"root": tmp_path, "name": "m", "key": "0" * 12, "source": source, "digest": "", "upstreams": ()},
                **{"files": {item.path: item for item in wanted}, "endpoint": "http://hub", "token_file": ""},
                **{"python": "", "transports": ("xet", "http"), "streams": 4, "processes": 2, "stall_s": 1.0},
                **{"tries": 2, "minimum_rate": 0, "report_s": 1.0, **more},
            }
        )
        done: list[Done] = []
        Remote(request, tmp_path, wanted, done.append, lambda count: None).run()
        return [item.path for item in done]

    return run


def test_every_file_once(fetch: Callable[..., list[str]]) -> None:
    assert sorted(fetch(lambda order: GOOD)) == [f"f{number}" for number in range(6)]


@pytest.mark.parametrize("kind", ["network", "wrong"])
def test_when_one_file_ends_a_way_the_others_are_neither_lost_nor_counted_twice(
    fetch: Callable[..., list[str]], kind: str
) -> None:
    """Answers of workers that were ended meanwhile count for nothing."""

    def script(order: dict[str, Any]) -> dict[str, Any]:
        broken = order["transport"] == "xet" and order["url"].endswith("f1")
        return bad(kind) if broken else GOOD

    assert sorted(fetch(script)) == [f"f{number}" for number in range(6)]
    assert {worker.transport for worker in FakeWorker.made} == {"xet", "http"}
    assert all(worker.ended for worker in FakeWorker.made)


@pytest.mark.parametrize("kind", ["denied", "gone", "disk_full", "disk", "defect"])
def test_what_no_other_way_mends_ends_it_at_once(fetch: Callable[..., list[str]], kind: str) -> None:
    with pytest.raises(WeightsError) as caught:
        fetch(lambda order: bad(kind))
    assert "and run again: what is here is kept" in str(caught.value)
    assert {worker.transport for worker in FakeWorker.made} == {"xet"}
    assert all(worker.ended for worker in FakeWorker.made)


def test_after_the_last_way_there_is_none(fetch: Callable[..., list[str]]) -> None:
    with pytest.raises(WeightsError) as caught:
        fetch(lambda order: bad("wrong"))
    assert "m does not come over plain HTTP: f" in str(caught.value)
    assert str(caught.value).endswith("run again to go on from here")


def test_a_server_that_is_busy_is_asked_again(fetch: Callable[..., list[str]]) -> None:
    asked: dict[str, int] = {}

    def script(order: dict[str, Any]) -> dict[str, Any]:
        asked[order["url"]] = asked.get(order["url"], 0) + 1
        return GOOD if asked[order["url"]] > 2 else {**bad("busy"), "retry_after": 0.05}

    assert len(fetch(script)) == 6
    assert set(asked.values()) == {3}


def test_a_peer_that_fails_leaves_it_to_the_next_one(fetch: Callable[..., list[str]]) -> None:
    def script(order: dict[str, Any]) -> dict[str, Any]:
        near = "//near" in order["url"]
        if order["kind"] == "state":
            return {"ok": True, "state": {"state": "failed", "message": "its disk is full"} if near else {}}
        return bad("absent") if near else GOOD

    assert len(fetch(script, upstreams=("http://near:1/m/k", "http://seed:1/m/k"))) == 6
