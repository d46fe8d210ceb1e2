"""One engine as the checks ask it, against a real server whose engine others may use meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from gpu_node_accept import answers, traffic
from gpu_node_accept.checks import CheckError
from gpu_node_accept.server import Server

KEY = "engine-key-0123456789"


class Engine(ThreadingHTTPServer):
    """Counts as vLLM does; others' part of it and what goes wrong are set by a test."""

    daemon_threads = True
    running = 0
    generated = 0
    hits = 0
    cached: list[int] | None = None
    of_others = 0
    same = True
    lag_s = 0.0
    ended = 0.0
    broken = ""

    def metrics(self) -> str:
        # For a moment after its end a request still counts as running, and its last token does not count yet.
        late = time.monotonic() < self.ended + self.lag_s
        return (
            f'vllm:num_requests_running{{engine="0"}} {self.running + late}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.generated - late}\n'
            f"vllm:prefix_cache_hits_total {self.hits}\n"
        )

    def answered(self, tokens: int) -> None:
        self.generated += tokens + self.of_others
        self.ended = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send(200, self.server.metrics() if self.path == "/metrics" else '{"version": "0.33.0"}')

    def do_POST(self) -> None:
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self.send(401, f"no such key: {self.headers['Authorization']}")
        tokens = body["max_tokens"]
        prompt = len(body.get("prompt", "12345"))
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
        engine.answered(tokens)
        if self.path == "/v1/completions":
            engine.hits += prompt if body["prompt"] == engine.cached else 0
            engine.cached = body["prompt"]
            events = [json.dumps({"choices": [{"text": "a"}]}), json.dumps({"choices": [], "usage": usage}), "[DONE]"]
            return self.send(200, "".join(f"data: {event}\n\n" for event in events))
        text = "2, 3, 5" if engine.same else f"2, 3, {engine.generated}"
        answer = {"choices": [{"message": {"content": text}, "finish_reason": "length"}], "usage": usage}
        return self.send(200, engine.broken or json.dumps(answer))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield made
        made.shutdown()


def client(engine: Engine) -> Server:
    return Server(engine.server_port, KEY, "tiny")


def test_answers_come_with_the_engines_own_counts(engine: Engine) -> None:
    server = client(engine)
    done = server.stream({"prompt": [1, 2, 3], "max_tokens": 7}, 5)
    assert (done.prompt_tokens, done.completion_tokens, done.first_s > 0) == (3, 7, True)
    answer = server.chat({"messages": [], "max_tokens": 9}, 5)
    assert (answer.content, answer.thoughts, answer.completion_tokens) == ("2, 3, 5", "", 9)
    assert (answer.finish_reason, server.version()) == ("length", "0.33.0")


@pytest.mark.parametrize(
    "broken", ['{"choices": [], "usage": {"completion_tokens": 1}}', '{"choices": [{"message": {}}]}', "{half", "[1]"]
)
def test_half_an_answer_is_a_finding(engine: Engine, broken: str) -> None:
    engine.broken = broken
    with pytest.raises(CheckError):
        client(engine).chat({"max_tokens": 1}, 5)


def test_a_refused_key_is_a_finding_without_the_key(engine: Engine) -> None:
    other = Server(engine.server_port, "another-key", "tiny")
    for ask in (other.chat, other.stream):
        with pytest.raises(CheckError, match="HTTP 401") as caught:
            ask({"max_tokens": 1}, 5)
        assert "another-key" not in str(caught.value)
    with pytest.raises(CheckError, match="does not answer"):
        Server(1, KEY, "tiny").metrics()


def test_what_is_counted_late_is_not_taken_for_others(engine: Engine) -> None:
    engine.lag_s, engine.same = 0.3, False
    assert answers.ask_determinism(client(engine), 3, 64).verdict == "fail"
    engine.running = 1
    began = time.monotonic()
    assert traffic.settled(client(engine)).value("vllm:num_requests_running") == 1
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("running", "of_others", "said"),
    # A long stream of somebody else ends no request meanwhile: it runs before and after, and has tokens.
    [(1, 0, "1 requests of others ran"), (0, 40, "120 tokens were generated for others")],
)
def test_answers_that_differ_by_others_batches_are_an_open_question(
    engine: Engine, running: int, of_others: int, said: str
) -> None:
    engine.same, engine.running, engine.of_others = False, running, of_others
    found = answers.ask_determinism(client(engine), 3, 64)
    assert (found.verdict, said in found.why) == ("not run", True), found
    engine.same = True
    assert answers.ask_determinism(client(engine), 3, 64).verdict == "pass"


def test_a_prefix_cache_while_others_ask_is_an_open_question(engine: Engine) -> None:
    assert answers.ask_prefix_cache(client(engine), {}, 512, 1).verdict == "pass"
    engine.of_others = 5
    found = answers.ask_prefix_cache(client(engine), {}, 512, 2)
    assert (found.verdict, "10 tokens were generated for others" in found.why) == ("not run", True), found
