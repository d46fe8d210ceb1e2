"""One engine as the checks ask it: the node tool's client, with more of its metrics, and its errors as findings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_node.engine import CHAT, Engine, parse_samples, usage
from gpu_node.errors import EngineError

from gpu_node_accept.checks import CheckError

_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)
# Where a model's thoughts are, by the engine's version.
_THOUGHTS = ("reasoning", "reasoning_content")


@dataclass(frozen=True)
class Answer:
    """The first choice of a chat completion; completion_tokens is the engine's count, thoughts included."""

    message: dict[str, Any]
    finish_reason: str
    completion_tokens: int

    @property
    def thoughts(self) -> str:
        return next((str(self.message[name]) for name in _THOUGHTS if self.message.get(name)), "")

    @property
    def content(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def text(self) -> str:
        """All that the model wrote: thoughts that use up the tokens leave no content."""
        return self.thoughts + self.content


@dataclass(frozen=True)
class Streamed:
    """A streamed completion. first_s: to the first event that carries a choice; the tokens are the engine's count."""

    first_s: float
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
    for name, labels, value in parse_samples(text):
        if math.isfinite(value):
            sums[name] = sums.get(name, 0.0) + value
            series.setdefault(name, []).append(dict(_LABEL.findall(labels)))
    return Metrics(sums, series)


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


@contextmanager
def _finding() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise CheckError(str(error)) from None


class Server:
    """One engine, on this node. Greedy unless a body says otherwise. Raises CheckError."""

    def __init__(self, port: int, key: str, model: str) -> None:
        self.model = model
        self._engine = Engine("127.0.0.1", port, key)

    def metrics(self) -> Metrics:
        with _finding():
            return parse_metrics(self._engine.request("GET", "/metrics", None, 30))

    def version(self) -> str:
        with _finding():
            answer = self._engine.ask("GET", "/version", None, 30)
        return str(answer.get("version") or "") if isinstance(answer, dict) else ""

    def chat(self, body: dict[str, Any], timeout_s: float) -> Answer:
        """A chat completion."""
        with _finding():
            answer = self._engine.ask("POST", CHAT, {"model": self.model, "temperature": 0, **body}, timeout_s)
            tokens = usage(answer, "completion_tokens")
        try:
            choice = answer["choices"][0]
            return Answer(dict(choice["message"]), str(choice.get("finish_reason")), tokens)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise CheckError("the answer has no choice with a message") from None

    def stream(self, body: dict[str, Any], timeout_s: float) -> Streamed:
        """A streamed completion of a prompt as it is."""
        with _finding():
            whole = {"model": self.model, "temperature": 0, **body}
            done = self._engine.stream("/v1/completions", whole, timeout_s)
        if done.first_token_s is None:
            raise CheckError("the stream brought no token")
        return Streamed(done.first_token_s, done.prompt_tokens, done.completion_tokens)
