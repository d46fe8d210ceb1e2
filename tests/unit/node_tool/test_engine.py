"""The HTTP client against a real server on a socket."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from gpu_node.engine import Engine, parse_kv_tokens
from gpu_node.errors import EngineError
from gpu_node.host import Host

KEY = "engine-key-0123456789"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}


class Server(ThreadingHTTPServer):
    """Answers what `answer` does with the handler and the request's body."""

    daemon_threads = True
    answer: Callable[["Handler", Any], None]
    bodies: list[Any]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, *events: Any, done: bool = True, every_s: float = 0) -> None:
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            time.sleep(every_s)
        if done:
            self.wfile.write(b"data: [DONE]\n\n")

    def do_GET(self) -> None:
        self.server.answer(self, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.answer(self, body)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.bodies = []
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield made
        made.shutdown()


def engine(server: Server) -> Engine:
    return Engine("127.0.0.1", server.server_port, KEY)


def test_plain(server: Server) -> None:
    seen = []

    def answer(handler: Handler, body: Any) -> None:
        seen.append(handler.headers["Authorization"])
        handler.send(200, {"model": "tiny", "choices": [{"message": {"content": "hi"}}], "usage": USAGE})

    server.answer = answer
    done = engine(server).complete("tiny", 2, 5)
    assert (done.model, done.text, done.prompt_tokens, done.completion_tokens) == ("tiny", "hi", 5, 2)
    assert seen == [f"Bearer {KEY}"] and done.tokens_per_s > 0 and done.first_token_s is None
    assert server.bodies[0]["chat_template_kwargs"] == {"thinking": False} and server.bodies[0]["max_tokens"] == 2


def test_streamed(server: Server) -> None:
    chunks = [{"model": "tiny", "choices": [{"delta": {"content": text}}]} for text in ("h", "i")]
    server.answer = lambda handler, _: handler.stream(*chunks, {"choices": [], "usage": USAGE})
    done = engine(server).complete("tiny", 2, 5, stream=True)
    assert (done.model, done.text, done.completion_tokens) == ("tiny", "hi", 2)
    assert done.first_token_s is not None and server.bodies[0]["stream_options"] == {"include_usage": True}


def chunk(text: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": more | ({} if text is None else {"content": text})}]}


def test_generation_of_a_wanted_length(server: Server) -> None:
    chunks = [chunk("", role="assistant"), chunk("h"), chunk("", reasoning_content="i"), chunk("")]
    server.answer = lambda handler, _: handler.stream(*chunks, {"choices": [], "usage": USAGE}, every_s=0.1)
    done = engine(server).generate("tiny", 2, 5)
    assert (done.text, done.completion_tokens, len(done.arrivals)) == ("hi", 2, 3)
    assert done.arrivals[0] >= 0.1 and done.tokens_per_s == pytest.approx(1 / 0.2, rel=0.3)
    asked = server.bodies[0]
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == (2, True, 0)
    assert asked["stream_options"] == {"include_usage": True}


def test_first_event_may_have_a_token_already(server: Server) -> None:
    server.answer = lambda handler, _: handler.stream(chunk("h", role="assistant"), {"choices": [], "usage": USAGE})
    assert len(engine(server).generate("tiny", 2, 5).arrivals) == 1


def test_nothing_generated(server: Server) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 0}
    server.answer = lambda handler, _: handler.stream(chunk("", role="assistant"), {"choices": [], "usage": usage})
    done = engine(server).generate("tiny", 2, 5)
    assert (done.text, done.completion_tokens, done.arrivals, done.tokens_per_s) == ("", 0, (), 0.0)
    server.answer = lambda handler, _: handler.stream(chunk("h"))
    with pytest.raises(EngineError, match=r"without usage\.completion_tokens"):
        engine(server).generate("tiny", 2, 5)
    server.answer = lambda handler, _: handler.stream(*[chunk("h")] * 9, every_s=0.3)
    with pytest.raises(EngineError, match="did not end its stream within 1 s"):
        engine(server).generate("tiny", 2, 1)


@pytest.mark.parametrize("event", [{"choices": [1]}, {"choices": [{"delta": None}]}, {"choices": {}}, {}])
def test_events_of_no_known_form(server: Server, event: Any) -> None:
    server.answer = lambda handler, _: handler.stream(event, {"usage": USAGE})
    assert engine(server).generate("tiny", 2, 5).arrivals == ()


def test_empty_text_with_tokens_is_a_generation(server: Server) -> None:
    server.answer = lambda handler, _: handler.send(200, {"choices": [{"message": {"content": None}}], "usage": USAGE})
    assert engine(server).complete("tiny", 2, 5).text == ""


def _refuse(handler: Handler, _: Any) -> None:
    handler.send(401, {"error": f"Unauthorized: {handler.headers['Authorization']}"})


@pytest.mark.parametrize(
    ("answer", "says", "stream"),
    [
        (_refuse, "HTTP 401: .*Unauthorized", False),
        (_refuse, "HTTP 401: .*Unauthorized", True),
        (lambda handler, _: handler.send(200, {"choices": []}), "no usage.prompt_tokens", False),
        (lambda handler, _: handler.send(200, [1]), "no usage", False),
        (lambda handler, _: handler.send(200, {"usage": USAGE | {"completion_tokens": 0}}), "without a gen", False),
        (lambda handler, _: handler.wfile.write(b"nonsense\r\n\r\n"), "does not answer: BadStatusLine", False),
        (lambda handler, _: time.sleep(3), "did not answer within 1 s", False),
        (lambda handler, _: handler.stream({"choices": []}, done=False), r"ended without \[DONE\]", True),
        (lambda handler, _: handler.stream({"error": {"message": "died"}}), "sent an error: .*died", True),
        (lambda handler, _: handler.stream({"choices": [{}]}), "no usage", True),
        (lambda handler, _: handler.stream(*[{"choices": [{}]}] * 9, every_s=0.3), "did not end its stream", True),
        (lambda handler, _: time.sleep(3), "did not end its stream within 1 s", True),
    ],
)  # fmt: skip
def test_what_is_no_generation(server: Server, answer: Callable[[Handler, Any], None], says: str, stream: bool) -> None:
    server.answer = answer
    with pytest.raises(EngineError, match=says) as caught:
        engine(server).complete("tiny", 2, 1, stream)
    assert KEY not in str(caught.value)


def test_nobody_there() -> None:
    nobody = Engine("127.0.0.1", 1, KEY)
    assert not nobody.healthy(1)
    with pytest.raises(EngineError, match="does not answer: ConnectionRefusedError"):
        nobody.models(1)
    with pytest.raises(OSError):
        Host().get(1, "/members", 1)


def test_models_and_health(server: Server) -> None:
    server.answer = lambda handler, _: handler.send(200, {"data": [{"id": "tiny"}]})
    assert engine(server).models(5) == ["tiny"] and engine(server).healthy(5)
    assert Host().get(server.server_port, "/members", 5)[0] == 200
    server.answer = lambda handler, _: handler.send(503, {})
    assert not engine(server).healthy(5)


CACHE = 'vllm:cache_config_info{_block_size_resolved="True",kv_cache_size_tokens="19328",num_gpu_blocks="151"} 1.0'


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (f"# TYPE vllm:cache_config_info gauge\n{CACHE}\n", 19328),
        ('vllm:cache_config_info{kv_cache_size_tokens="7"} 1.0', 7),
        ('vllm:cache_config_info{kv_cache_size_tokens="None"} 1.0', None),
        ('vllm:cache_config_info{other_kv_cache_size_tokens="7"} 1.0', None),
        ("", None),
    ],
)
def test_tokens_of_the_kv_cache(text: str, tokens: int | None) -> None:
    assert parse_kv_tokens(text) == tokens
