"""An OpenAI-compatible endpoint: streamed answers with the times at which their tokens came."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gpu_node_bench.arithmetic import median
from gpu_node_bench.errors import BenchError, NoFigureError

_QUICK_S = 10.0
_LONGEST_ERROR = 300


@dataclass(frozen=True)
class Limits:
    """Seconds: until the first token, and between two events after it."""

    first_s: float
    stall_s: float


@dataclass(frozen=True)
class Answer:
    """One streamed answer of the wanted length. Seconds since the request was sent, by the monotonic clock."""

    prompt_tokens: int
    tokens: int
    cached_tokens: int | None
    first_s: float
    last_s: float
    events: int
    # Between two events with tokens; 0 when there are no two.
    gap_median_s: float
    gap_longest_s: float
    text: str
    # How much further the wall clock went meanwhile than the monotonic one.
    clock_step_s: float


def count(value: Any, name: str) -> int:
    """A token count out of a usage. Raises NoFigureError: a figure without it would be a guess."""
    found = value.get(name) if isinstance(value, dict) else None
    if type(found) is not int or found < 0:
        raise NoFigureError(f"the answer has no usage.{name}: without it tokens cannot be counted")
    return found


def _choice(event: dict[str, Any]) -> dict[str, Any] | None:
    choices = event.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _text(choice: dict[str, Any]) -> tuple[str, bool]:
    """What the event adds, thoughts too, and whether it carries a token at all: the first one only names the role."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "", False
    text = "".join(str(delta.get(part) or "") for part in ("reasoning_content", "reasoning", "content"))
    return text, bool(text) or "role" not in delta


class Endpoint:
    """One base URL. The key goes into the request's header and nowhere else."""

    def __init__(self, url: str, key: str | None, model: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise BenchError(f"{url}: a base URL reads http://HOST:PORT or https://HOST[:PORT], with or without /v1")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    @contextlib.contextmanager
    def _connection(self, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        try:
            yield connection
        except TimeoutError:
            raise NoFigureError(f"{self.url} stalled: nothing came for {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoFigureError(f"{self.url} does not answer: {type(error).__name__}: {error}") from None
        finally:
            connection.close()

    def _headers(self, body: bool) -> dict[str, str]:
        headers = {"Content-Type": "application/json"} if body else {}
        return headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {})

    def _refuse_status(self, response: http.client.HTTPResponse, path: str) -> None:
        if response.status != 200:
            text = self._redacted(response.read(2000).decode(errors="replace").strip())
            raise NoFigureError(f"{path} answered HTTP {response.status}: {text[:_LONGEST_ERROR]}")

    def get(self, path: str) -> str:
        """The text of a small page. Raises NoFigureError."""
        with self._connection(_QUICK_S) as connection:
            connection.request("GET", self._path + path, headers=self._headers(body=False))
            with connection.getresponse() as response:
                self._refuse_status(response, path)
                return response.read().decode(errors="replace")

    def window(self) -> int | None:
        """The model's window in tokens, None when the server does not say. Raises NoFigureError on another model."""
        try:
            answer = json.loads(self.get("/v1/models"))
            models = {str(item.get("id")): item for item in answer["data"]}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise NoFigureError(f"{self.url}/v1/models is no list of models") from None
        if self.model not in models:
            raise NoFigureError(
                f"wrong model: {self.url} serves {', '.join(sorted(models)) or 'nothing'}, not {self.model}"
            )
        found = models[self.model].get("max_model_len")
        return found if type(found) is int and found > 0 else None

    def stream(self, prompt: str, tokens: int, limits: Limits, more: dict[str, Any]) -> Answer:
        """Have exactly that many tokens streamed, greedily. Raises NoFigureError on anything else.

        :param more: further fields of the request.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        data = json.dumps(body).encode()
        with self._connection(limits.first_s) as connection:
            connection.connect()
            # The connection forgets it as soon as an answer says that it is the last one.
            sock = connection.sock
            started, wall = time.monotonic(), time.time()
            connection.request("POST", self._path + "/v1/chat/completions", body=data, headers=self._headers(body=True))
            with connection.getresponse() as response:
                self._refuse_status(response, "/v1/chat/completions")
                reader = _Reader(response, sock, started, limits, self.model)
                try:
                    reader.read()
                except TimeoutError:
                    raise NoFigureError(reader.stalled()) from None
            step = (time.time() - wall) - (time.monotonic() - started)
        return reader.answer(tokens, step)


class _Reader:
    """Reads one stream of events, and notes when those with tokens came."""

    def __init__(
        self,
        response: http.client.HTTPResponse,
        sock: socket.socket,
        started: float,
        limits: Limits,
        model: str,
    ) -> None:
        self._response = response
        self._sock = sock
        self._started = started
        self._limits = limits
        self._model = model
        self._latest = started
        self._arrivals: list[float] = []
        self._texts: list[str] = []
        self._usage: Any = None
        self._finish = ""
        self._done = False

    def stalled(self) -> str:
        if not self._arrivals:
            return f"stalled: no token within {self._limits.first_s:g} s"
        return f"stalled: no event for {self._limits.stall_s:g} s after {len(self._arrivals)} events"

    def read(self) -> None:
        rest = b""
        while not self._done:
            data = self._response.read1(65536)
            now = time.monotonic()
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._line(line.strip(), now)
            # What keeps a connection alive (comments, single bytes) is no progress.
            if not self._done:
                self._refuse_gap(now)

    def _refuse_gap(self, now: float) -> None:
        limit = self._limits.stall_s if self._arrivals else self._limits.first_s
        if now - self._latest > limit:
            raise TimeoutError

    def _line(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):
            return
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise NoFigureError(f"the stream holds an event that is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise NoFigureError(f"the stream carried an error: {data[:_LONGEST_ERROR].decode(errors='replace')}")
        if event.get("model") not in (None, self._model):
            raise NoFigureError(f"wrong model: {event['model']} answered, not {self._model}")
        self._usage = event.get("usage") or self._usage
        choice = _choice(event)
        if choice is None:
            return
        self._finish = str(choice.get("finish_reason") or self._finish)
        text, token = _text(choice)
        if token:
            # A token that ends a gap does not make it shorter.
            self._refuse_gap(now)
            if not self._arrivals:
                self._sock.settimeout(self._limits.stall_s)
            self._arrivals.append(now)
            self._texts.append(text)
            self._latest = now

    def answer(self, tokens: int, step: float) -> Answer:
        if not self._done:
            raise NoFigureError(f"the stream ended without [DONE] after {len(self._arrivals)} events")
        if self._usage is None:
            raise NoFigureError("the stream has no usage: without it tokens cannot be counted")
        prompt, made = count(self._usage, "prompt_tokens"), count(self._usage, "completion_tokens")
        if made != tokens:
            why = f" (finish_reason {self._finish})" if self._finish else ""
            raise NoFigureError(
                f"ended early: {made} of {tokens} tokens{why}"
                if made < tokens
                else f"{made} tokens came, {tokens} were asked for"
            )
        if not self._arrivals:
            raise NoFigureError("no event of the stream carried a token")
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        gaps = [later - sooner for sooner, later in itertools.pairwise(self._arrivals)] or [0.0]
        return Answer(
            prompt_tokens=prompt,
            tokens=made,
            cached_tokens=cached if type(cached) is int else None,
            first_s=self._arrivals[0] - self._started,
            last_s=self._arrivals[-1] - self._started,
            events=len(self._arrivals),
            gap_median_s=median(gaps),
            gap_longest_s=max(gaps),
            text="".join(self._texts),
            clock_step_s=step,
        )
