"""HTTP client of one engine: JSON, streams with their times, metrics. The key goes into the header and nowhere else."""

from __future__ import annotations

import http.client
import json
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_node_accept.checks import CheckError

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*", re.ASCII)
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)


@dataclass(frozen=True)
class Streamed:
    """A streamed completion. first_s: to the first event that carries a choice; the tokens are the engine's count."""

    text: str
    first_s: float
    seconds: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Metrics:
    """The samples of a Prometheus text: sums by name, and the labels of each series."""

    sums: dict[str, float]
    series: dict[str, list[dict[str, str]]]

    def value(self, name: str) -> float | None:
        """A counter by its name in the engine's sources: the Python client adds `_total` to it."""
        return self.sums.get(f"{name}_total", self.sums.get(name))

    def label(self, name: str, label: str) -> str | None:
        """A label of the first series of that name that has it."""
        return next((one[label] for one in self.series.get(name, []) if one.get(label)), None)


def parse_metrics(text: str) -> Metrics:
    """Read a Prometheus text. A value that is no finite number is left out."""
    sums: dict[str, float] = {}
    series: dict[str, list[dict[str, str]]] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None or line.startswith("#"):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            sums[match[1]] = sums.get(match[1], 0.0) + value
            series.setdefault(match[1], []).append(dict(_LABEL.findall(match[2] or "")))
    return Metrics(sums, series)


def parse_stream(lines: Iterable[bytes], started: float, clock: Any, timeout_s: float) -> Streamed:
    """Read a server-sent event stream to its [DONE]. Raises CheckError on anything that is no whole answer."""
    first: float | None = None
    texts: list[str] = []
    usage: dict[str, Any] | None = None
    for line in lines:
        if clock() - started > timeout_s:
            raise CheckError(f"the stream did not end within {timeout_s:.0f} s")
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            break
        try:
            event = json.loads(data)
        except ValueError:
            raise CheckError(f"the stream holds an event that is not JSON: {data[:80]!r}") from None
        if not isinstance(event, dict) or "error" in event:
            raise CheckError(f"the stream brought an error: {data[:200]!r}")
        for choice in (event.get("choices") or [])[:1]:
            first = clock() - started if first is None else first
            delta = choice.get("delta") or {}
            texts.append(str(choice.get("text") or delta.get("content") or ""))
        usage = event.get("usage") or usage
    else:
        raise CheckError("the stream ended without [DONE]")
    if first is None or usage is None or type(usage.get("completion_tokens")) is not int:
        raise CheckError("the stream brought no token or no usage")
    return Streamed(
        "".join(texts), first, clock() - started, int(usage.get("prompt_tokens") or 0), usage["completion_tokens"]
    )


def read_key(path: Path) -> str:
    """The engine's own key. Raises CheckError that does not carry it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckError(f"{path}: {error.strerror}", remedy="run site.yml, it writes this file") from None
    keys = [line.removeprefix("VLLM_API_KEY=") for line in text.splitlines() if line.startswith("VLLM_API_KEY=")]
    if len(keys) != 1:
        raise CheckError(f"{path} holds no line VLLM_API_KEY=...", remedy="run site.yml, it writes this file")
    return keys[0]


class Server:
    """One engine, on this node."""

    def __init__(self, port: int, key: str | None, model: str, address: str = "127.0.0.1") -> None:
        self.model = model
        self._address, self._port, self._key = address, port, key

    def _open(self, method: str, path: str, body: Any, timeout_s: float) -> http.client.HTTPResponse:
        headers = {"Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        connection = http.client.HTTPConnection(self._address, self._port, timeout=timeout_s)
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode(errors="replace").strip()
            response.close()
            raise CheckError(f"{path} answered HTTP {response.status}: {self._redacted(text)[:300]}")
        return response

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def get(self, path: str, timeout_s: float = 30) -> str:
        return self._text("GET", path, None, timeout_s)

    def _text(self, method: str, path: str, body: Any, timeout_s: float) -> str:
        try:
            with self._open(method, path, body, timeout_s) as response:
                return response.read().decode(errors="replace")
        except TimeoutError:
            raise CheckError(f"{path} did not answer within {timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise CheckError(f"{path} does not answer: {type(error).__name__}") from None

    def metrics(self) -> Metrics:
        return parse_metrics(self.get("/metrics"))

    def version(self) -> str:
        return str(json.loads(self.get("/version")).get("version", ""))

    def chat(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The first choice of a chat completion: message and finish_reason. Greedy unless the body says otherwise."""
        whole = {"model": self.model, "temperature": 0, **body}
        try:
            answer = json.loads(self._text("POST", "/v1/chat/completions", whole, timeout_s))
            choice: dict[str, Any] = answer["choices"][0]
            if not isinstance(choice["message"], dict):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError):
            raise CheckError("the answer has no choice with a message") from None
        return choice

    def stream(self, body: dict[str, Any], timeout_s: float, path: str = "/v1/completions") -> Streamed:
        """A streamed completion, greedy unless the body says otherwise."""
        whole = {"model": self.model, "temperature": 0, **body}
        whole |= {"stream": True, "stream_options": {"include_usage": True}}
        started = time.monotonic()
        try:
            with self._open("POST", path, whole, timeout_s) as response:
                return parse_stream(iter(response.readline, b""), started, time.monotonic, timeout_s)
        except TimeoutError:
            raise CheckError(f"{path} did not answer within {timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise CheckError(f"{path} broke its stream: {type(error).__name__}") from None
