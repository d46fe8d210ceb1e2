"""Clients of a fleet that ask all the time, streamed and plain, and keep every outcome."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

CHAT = "/v1/chat/completions"
# An answer that takes longer than this is one that never comes.
TIMEOUT_S = 60.0
MODEL = "tiny"


@dataclass
class Outcome:
    """How one completion went; error says why it is no whole answer."""

    target: str
    kind: str
    started: float
    first: float = 0.0
    ended: float = 0.0
    status: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        return self.first - self.started


@dataclass(frozen=True)
class Target:
    """Whom to ask, by how many clients of each kind, and their pause between two requests."""

    name: str
    host: str
    port: int
    clients: int = 1
    pause_s: float = 0.2


def body(tokens: int, stream: bool) -> bytes:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    return json.dumps(fields).encode()


def ask(target: Target, key: str, kind: str, tokens: int, timeout_s: float = TIMEOUT_S) -> Outcome:
    """One completion; whatever becomes of it is in the outcome."""
    outcome = Outcome(target.name, kind, time.time())
    connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Connection": "close"}
    try:
        connection.request("POST", CHAT, body(tokens, kind == "stream"), headers)
        with connection.getresponse() as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
            elif kind == "stream":
                read_stream(response, outcome)
            else:
                outcome.tokens = json.loads(response.read())["usage"]["completion_tokens"]
                outcome.first = time.time()
        if not outcome.error and outcome.tokens != tokens:
            outcome.error = f"{outcome.tokens} tokens of {tokens}"
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    outcome.ended = time.time()
    return outcome


def read_stream(response: http.client.HTTPResponse, outcome: Outcome) -> None:
    for line in iter(response.readline, b""):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        outcome.first = outcome.first or time.time()
        event = json.loads(data)
        if "error" in event:
            outcome.error = f"error event: {data[:300].decode(errors='replace')}"
            return
        if event.get("usage"):
            outcome.tokens = event["usage"]["completion_tokens"]
    outcome.error = "the stream ended without [DONE]"


class Load:
    """Clients that ask while the block runs. A failed one waits a moment, as clients do, and asks on."""

    def __init__(self, targets: Sequence[Target], key: str, tokens: int = 16) -> None:
        self.outcomes: list[Outcome] = []
        self._key = key
        self._tokens = tokens
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, args=(target, kind), daemon=True)
            for target in targets
            for _ in range(target.clients)
            for kind in ("stream", "plain")
        ]

    def _loop(self, target: Target, kind: str) -> None:
        while not self._ended.wait(target.pause_s):
            self.outcomes.append(ask(target, self._key, kind, self._tokens))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.outcomes) < len(self._threads):
            assert time.monotonic() < deadline, f"no answers: {self.outcomes[:3]}"
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            # After a failure the test does not wait for answers that may never come.
            thread.join(TIMEOUT_S if error is None else 1)
        if error is None:
            assert not any(thread.is_alive() for thread in self._threads), "a request of the load never ended"

    def failed(self, *, target: str = "") -> list[Outcome]:
        return [one for one in list(self.outcomes) if one.error and target in ("", one.target)]

    def answered(self) -> int:
        return sum(not one.error for one in list(self.outcomes))
