"""Clients of the balancer for the fault tests: single requests, one long stream, and a load that never pauses.

Every outcome is kept with its times and with nginx's request id, which the engine makes the answer's id of: the access
log then says which replica served it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from select import select
from types import TracebackType
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# An answer that takes longer than this is one that never comes.
TIMEOUT_S = 240
# Time for the machine to do what the test is about.
PAUSE_S = 0.25


@dataclass(frozen=True)
class Answer:
    """A whole HTTP answer."""

    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def request_id(self) -> str:
        return request_id(self.json())


@dataclass
class Outcome:
    """How one completion went. events: the time of each event; error: why it is no whole answer, or empty."""

    kind: str
    started: float
    ended: float = 0.0
    status: int = 0
    error: str = ""
    request_id: str = ""
    events: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error


def request_id(answer: Any) -> str:
    """nginx's request id, from the id of the engine's answer (`chatcmpl-<request id>`)."""
    return str(answer.get("id", "")).partition("-")[2]


def completion(tokens: int, stream: bool = False, prompt: str = "Count from one to ten.") -> dict[str, Any]:
    """The body of a chat completion that generates exactly that many tokens."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
    }


class Client:
    """One client of the balancer. keep: use the connection again, else a new one for each request."""

    def __init__(self, port: int, key: str | None, *, keep: bool = False) -> None:
        self._port = port
        self._key = key
        self._keep = keep
        self._connection: http.client.HTTPConnection | None = None

    def _open(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> http.client.HTTPResponse:
        sent = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        if body is not None:
            sent["Content-Type"] = "application/json"
        if not self._keep:
            sent["Connection"] = "close"
        if self._connection is not None and self._connection.sock and select([self._connection.sock], [], [], 0)[0]:
            # The server has closed it, as nginx does with idle ones at a reload. Every client library looks for that.
            self.forget_connection()
        connection = self._connection
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        self._connection = connection if self._keep else None
        # A server may answer a body that it does not want before it was sent: that answer is there.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body=body, headers={**sent, **headers})
        return connection.getresponse()

    def forget_connection(self) -> None:
        """After a fault: the connection is in an unknown state."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """One request and its whole answer; a body that is not bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        response = self._open(method or ("GET" if body is None else "POST"), path, data, headers or {}, timeout_s)
        with response:
            answer = Answer(response.status, response.read(), {k.lower(): v for k, v in response.getheaders()})
        return answer

    def complete(self, tokens: int, *, session: str | None = None, timeout_s: float = TIMEOUT_S) -> Answer:
        headers = {"X-Session-ID": session} if session else {}
        return self.ask(CHAT, completion(tokens), headers=headers, timeout_s=timeout_s)

    def stream(self, outcome: Outcome, tokens: int, session: str | None = None) -> None:
        """A streamed completion, noted in the outcome event by event."""
        headers = {"X-Session-ID": session} if session else {}
        response = self._open("POST", CHAT, json.dumps(completion(tokens, stream=True)).encode(), headers, TIMEOUT_S)
        with response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
                return
            for event in events(response):
                if event == "[DONE]":
                    # The connection can be used again only when the answer was read to its end.
                    response.read()
                    return
                outcome.events.append(time.time())
                value = json.loads(event)
                outcome.request_id = outcome.request_id or request_id(value)
                if "error" in value:
                    outcome.error = f"error event: {event[:300]}"
                    return
            outcome.error = f"the stream ended without [DONE] after {len(outcome.events)} events"


def events(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in iter(response.readline, b""):
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()


def run(client: Client, kind: str, tokens: int, session: str | None = None, outcome: Outcome | None = None) -> Outcome:
    """One completion of that kind (`stream` or `plain`); every end of it is an outcome."""
    outcome = outcome or Outcome(kind, time.time())
    try:
        if kind == "stream":
            client.stream(outcome, tokens, session)
        else:
            answer = client.complete(tokens, session=session)
            outcome.status = answer.status
            if answer.status == 200:
                outcome.request_id = answer.request_id
            else:
                outcome.error = f"HTTP {answer.status}: {answer.body[:300].decode(errors='replace')}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.error:
        client.forget_connection()
    outcome.ended = time.time()
    return outcome


class Background:
    """A completion that runs while the test goes on; `end()` waits for its outcome."""

    def __init__(self, client: Client, kind: str, tokens: int, session: str | None = None) -> None:
        self.outcome = Outcome(kind, time.time())
        self._thread = threading.Thread(target=run, args=(client, kind, tokens, session, self.outcome), daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait_for_events(self, count: int, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.outcome.events) < count:
            assert self.running, f"the stream ended before {count} events: {self.outcome}"
            assert time.monotonic() < deadline, f"no {count} events within {timeout_s:.0f} s"
            time.sleep(0.02)

    def end(self, timeout_s: float = TIMEOUT_S) -> Outcome:
        self._thread.join(timeout_s)
        assert not self.running, f"still running after {timeout_s:.0f} s: {self.outcome}"
        return self.outcome


class Load:
    """Clients that ask without a pause while the block runs: streams and plain answers, new and kept connections."""

    KINDS = (("stream", False), ("stream", True), ("plain", False), ("plain", True))

    def __init__(self, port: int, key: str, tokens: int = 24) -> None:
        self.outcomes: list[Outcome] = []
        self._tokens = tokens
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._loop, args=(Client(port, key, keep=keep), kind), daemon=True)
            for kind, keep in self.KINDS
        ]

    def _loop(self, client: Client, kind: str) -> None:
        while not self._ended.wait(PAUSE_S):
            self.outcomes.append(run(client, kind, self._tokens))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.wait_for_answers(2 * len(self._threads))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            # After a failure the test does not wait for answers that may never come.
            thread.join(TIMEOUT_S if error is None else 5)
        if error is None:
            assert not any(thread.is_alive() for thread in self._threads), "a request of the load never ended"

    def wait_for_answers(self, count: int, timeout_s: float = 90) -> list[Outcome]:
        """Wait for that many more good answers to requests that begin from now on; they are returned."""
        since = time.time()
        deadline = time.monotonic() + timeout_s
        while len(good := [o for o in list(self.outcomes) if o.ok and o.started >= since]) < count:
            late = [o for o in list(self.outcomes) if o.started >= since]
            assert time.monotonic() < deadline, (
                f"{len(good)} of {count} answers within {timeout_s:.0f} s; others: {[o for o in late if not o.ok][:3]}"
            )
            time.sleep(0.05)
        return good

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.ok]
