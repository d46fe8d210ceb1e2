"""HTTP client of an OpenAI-compatible server: completions that count their tokens, health, models, metrics."""

import http.client
import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpu_node.errors import EngineError, ParseError

PROMPT = "What is 17 * 19? Answer with the number."
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Metrics:
    """The engine's gauges and counters, summed over their labels. kv_usage: 0 to 1 for each engine."""

    running: float
    waiting: float
    generation_tokens: float
    prompt_tokens: float
    kv_usage: float


@dataclass(frozen=True)
class Completion:
    """One answered chat completion. first_token_s: to the first event of a stream, None when it was not streamed."""

    model: str
    text: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    first_token_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Decode speed of a stream (without the time to the first token), else tokens over the whole time."""
        if self.first_token_s is not None and self.completion_tokens > 1:
            return (self.completion_tokens - 1) / max(self.seconds - self.first_token_s, 1e-6)
        return self.completion_tokens / max(self.seconds, 1e-6)


@dataclass(frozen=True)
class Generation:
    """One streamed answer of a wanted length. arrivals: seconds at which an event with tokens came."""

    text: str
    completion_tokens: int
    arrivals: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: without the time to the first token. An engine with speculation sends several in an event."""
        return (self.completion_tokens - 1) / max(self.arrivals[-1] - self.arrivals[0], 1e-6) if self.arrivals else 0.0


_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?P<labels>\{.*\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*", re.ASCII)


def parse_samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels as they are written, and value of vLLM's samples in a Prometheus text; NaN for what is no number."""
    for line in text.splitlines():
        if not line.startswith("vllm:") or not (match := _SAMPLE.fullmatch(line)):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            value = math.nan
        yield match["name"], match["labels"] or "", value


def parse_metrics(text: str) -> Metrics:
    """Read a Prometheus text. Raises ParseError when a needed metric is missing or no finite number."""
    sums: dict[str, float] = {}
    for name, _, value in parse_samples(text):
        sums[name] = sums.get(name, 0.0) + value

    def need(name: str) -> float:
        value = sums.get(f"vllm:{name}")
        if value is None or not math.isfinite(value):
            raise ParseError(f"/metrics has no number for vllm:{name}: is this server a vLLM?")
        return value

    return Metrics(
        running=need("num_requests_running"),
        waiting=need("num_requests_waiting"),
        generation_tokens=need("generation_tokens_total"),
        prompt_tokens=need("prompt_tokens_total"),
        kv_usage=need("kv_cache_usage_perc"),
    )


_KV_TOKENS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?kv_cache_size_tokens="([0-9]{1,15})"', re.MULTILINE)


def parse_kv_tokens(text: str) -> int | None:
    """The tokens that the engine's KV cache holds, by its own word in a Prometheus text; None when it does not say."""
    match = _KV_TOKENS.search(text)
    return int(match[1]) if match else None


def parse_events(lines: Iterable[bytes]) -> Iterator[Any]:
    """The JSON values of a server-sent event stream until [DONE]. Raises EngineError when it ends before."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        try:
            yield json.loads(data)
        except (ValueError, RecursionError):
            raise EngineError(f"the stream holds an event that is not JSON: {data[:80]!r}") from None
    raise EngineError("the stream ended without [DONE]")


def usage(answer: Any, name: str) -> int:
    """A count of the answer's own. Raises EngineError when there is none."""
    counts = answer.get("usage") if isinstance(answer, dict) else None
    value = counts.get(name) if isinstance(counts, dict) else None
    if type(value) is not int:
        raise EngineError(f"the answer has no usage.{name}")
    return value


def _text(answer: Any, part: str) -> str:
    """The first choice's text, of a chat or a plain completion. It may be empty: thoughts first, or random weights."""
    try:
        choice = answer["choices"][0]
        return choice.get("text") or choice[part].get("content") or ""
    except (KeyError, IndexError, TypeError, AttributeError):
        return ""


def _delta(event: Any) -> str | None:
    """The text that an event adds, thoughts too; None when it is no event of the first choice."""
    try:
        delta = event["choices"][0]["delta"]
        return "".join(str(delta.get(part) or "") for part in ("reasoning_content", "reasoning", "content"))
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def _opens(event: Any) -> bool:
    """Whether the event names the role, as the first one of a stream does."""
    return "role" in event["choices"][0]["delta"]


def _chat(model: str, max_tokens: int) -> dict[str, Any]:
    """The body of a short chat completion."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": False},
    }


class Engine:
    """A server on this node. The key goes into the request's header and nowhere else."""

    def __init__(self, address: str, port: int, key: str | None) -> None:
        self.name = f"{address}:{port}"
        self._address = address
        self._port = port
        self._key = key

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _open(self, method: str, path: str, body: Any, timeout_s: float) -> http.client.HTTPResponse:
        """Send the request; the answer's head is there and its status is 200. Raises EngineError."""
        headers = {"Connection": "close"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        connection = http.client.HTTPConnection(self._address, self._port, timeout=timeout_s)
        connection.request(method, path, body=data, headers=headers)
        # With `Connection: close` the response owns the socket and closes it.
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode(errors="replace").strip()
            response.close()
            raise EngineError(f"{self.name}{path} answered HTTP {response.status}: {self._redacted(text)[:300]}")
        return response

    def request(self, method: str, path: str, body: Any, timeout_s: float) -> str:
        """The answer's text. Raises EngineError."""
        try:
            with self._open(method, path, body, timeout_s) as response:
                return response.read().decode(errors="replace")
        except TimeoutError:
            raise EngineError(f"{self.name}{path} did not answer within {timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name}{path} does not answer: {type(error).__name__}") from None

    def healthy(self, timeout_s: float) -> bool:
        """Whether /health says 200. It does so too when the engine behind it is frozen: generate for a proof."""
        try:
            self.request("GET", "/health", None, timeout_s)
        except EngineError:
            return False
        return True

    def models(self, timeout_s: float) -> list[str]:
        """The names under which the server serves."""
        answer = self.ask("GET", "/v1/models", None, timeout_s)
        data = answer.get("data") if isinstance(answer, dict) else None
        return [str(item.get("id")) for item in data or [] if isinstance(item, dict)]

    def metrics(self, timeout_s: float) -> Metrics:
        return parse_metrics(self.request("GET", "/metrics", None, timeout_s))

    def kv_tokens(self, timeout_s: float) -> int | None:
        return parse_kv_tokens(self.request("GET", "/metrics", None, timeout_s))

    def ask(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        """The answer, which is JSON. Raises EngineError."""
        text = self.request(method, path, body, timeout_s)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise EngineError(f"the answer is not JSON: {text[:80]!r}") from None

    def complete(self, model: str, max_tokens: int, timeout_s: float, stream: bool = False) -> Completion:
        """One chat completion, which generated at least one token. Raises EngineError.

        Thinking is switched off: with it on, a small max_tokens gives an empty text.
        """
        body = _chat(model, max_tokens)
        if stream:
            done = self.stream(CHAT, body, timeout_s)
        else:
            started = time.monotonic()
            answer = self.ask("POST", CHAT, body, timeout_s)
            done = Completion(
                str(answer.get("model")) if isinstance(answer, dict) else "",
                _text(answer, "message"),
                usage(answer, "prompt_tokens"),
                usage(answer, "completion_tokens"),
                time.monotonic() - started,
            )
        if done.completion_tokens < 1:
            raise EngineError(f"{self.name} answered without a generated token")
        return done

    def generate(self, model: str, tokens: int, timeout_s: float) -> Generation:
        """Have exactly that many tokens streamed, and note when they came. Raises EngineError."""
        body = _chat(model, tokens) | {"ignore_eos": True}
        started = time.monotonic()
        texts: list[str] = []
        arrivals: list[float] = []
        count: int | None = None
        try:
            for event in self._events(CHAT, body, started, timeout_s):
                delta = _delta(event)
                # The first event only names the role, and the last one only brings the usage.
                if delta is not None and (delta != "" or not _opens(event)):
                    arrivals.append(time.monotonic() - started)
                    texts.append(delta)
                if event.get("usage"):
                    count = usage(event, "completion_tokens")
        except EngineError as error:
            if arrivals or time.monotonic() - started < timeout_s:
                raise
            raise EngineError(f"{self.name} generates nothing: no token within {timeout_s:.0f} s") from error
        if count is None:
            raise EngineError(f"{self.name} ended its stream without usage.completion_tokens")
        return Generation("".join(texts), count, tuple(arrivals))

    def _events(self, path: str, body: dict[str, Any], started: float, timeout_s: float) -> Iterator[dict[str, Any]]:
        """The events of a streamed completion as they come. Raises EngineError."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._open("POST", path, body, timeout_s) as response:
                for event in parse_events(iter(response.readline, b"")):
                    # The socket's timeout counts from byte to byte; a trickle must not go on for ever.
                    if time.monotonic() - started > timeout_s:
                        raise TimeoutError
                    if not isinstance(event, dict) or "error" in event:
                        raise EngineError(f"{self.name}{path} sent an error: {self._redacted(json.dumps(event))[:300]}")
                    yield event
        except TimeoutError:
            raise EngineError(f"{self.name}{path} did not end its stream within {timeout_s:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.name}{path} broke its stream: {type(error).__name__}") from None

    def stream(self, path: str, body: dict[str, Any], timeout_s: float) -> Completion:
        """A streamed completion, a chat or a plain one as the path says. Raises EngineError."""
        started = time.monotonic()
        first: float | None = None
        texts: list[str] = []
        model, counted = "", None
        for event in self._events(path, body, started, timeout_s):
            if event.get("choices") and first is None:
                first = time.monotonic() - started
            model = str(event.get("model") or model)
            texts.append(_text(event, "delta"))
            counted = event if event.get("usage") else counted
        return Completion(
            model,
            "".join(texts),
            usage(counted, "prompt_tokens"),
            usage(counted, "completion_tokens"),
            time.monotonic() - started,
            first,
        )
