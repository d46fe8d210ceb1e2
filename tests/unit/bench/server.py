"""A server with the shape of vLLM's: it streams at an exact pace, counts as vLLM does, and can be told to misbehave."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-engine-key-of-the-test"
MODEL = "the-model"


@dataclass
class Behaviour:
    """How it answers. Times are seconds. Faults: see the handler."""

    token_s: float = 0.002
    # Before the first token: fixed, and for each token of the prompt that is not cached.
    first_s: float = 0.02
    prompt_token_s: float = 0.0
    per_event: int = 1
    template_tokens: int = 5
    word_tokens: int = 1
    window: int | None = 4096
    fault: str = ""
    fault_after: int = 0
    # Prompts without this text are answered well.
    fault_prompt: str = ""
    # How long a "pause" lasts, and how many further answers have one.
    pause_s: float = 0.0
    pauses: int = 0
    # Whether each answer closes its connection, as the balancer's do.
    closes: bool = False
    caching: bool = True
    has_metrics: bool = True
    # A draft of that many tokens; accepted: by position, of each 100 drafts.
    draft: int = 0
    accepted: tuple[int, ...] = ()


@dataclass
class Counts:
    running: int = 0
    requests: int = 0
    prompt: int = 0
    generated: int = 0
    cached: int = 0
    preempted: int = 0
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    started: float = 1000.0
    # Requests of somebody else, added at the next metrics page.
    strangers: int = 0


class Server:
    """`url`, `behaviour` and `counts` may be changed while it runs. `seen`: the bodies of the requests."""

    def __init__(self) -> None:
        self.behaviour = Behaviour()
        self.counts = Counts()
        self.seen: list[dict[str, Any]] = []
        # Called at the begin of each answer.
        self.before: Callable[[], object] = lambda: None
        self._cache: set[str] = set()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.get(self)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with contextlib.suppress(OSError):
                    outer.post(self, body)

        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._httpd.server_port}"

    def start(self) -> None:
        threading.Thread(target=self._httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()

    # pages

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/metrics" and self.behaviour.has_metrics:
            return self._text(handler, self._metrics())
        if handler.path == "/v1/models":
            if handler.headers.get("Authorization") != f"Bearer {KEY}":
                return self._text(handler, "no", 401)
            model = {"id": MODEL} | ({"max_model_len": self.behaviour.window} if self.behaviour.window else {})
            return self._text(handler, json.dumps({"data": [model]}))
        if handler.path == "/version":
            return self._text(handler, json.dumps({"version": "0.0.test"}))
        self._text(handler, "not here", 404)

    @staticmethod
    def _text(handler: BaseHTTPRequestHandler, text: str, status: int = 200) -> None:
        data = text.encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _metrics(self) -> str:
        with self._lock:
            counts = self.counts
            if counts.strangers:
                counts.requests += counts.strangers
                counts.generated += 16 * counts.strangers
                counts.strangers = 0
            label = 'engine="0",model_name="the-model"'
            lines = [
                "# HELP vllm:num_requests_running Number of requests",
                f"process_start_time_seconds {counts.started}",
                f"vllm:num_requests_running{{{label}}} {counts.running}.0",
                f"vllm:num_requests_waiting{{{label}}} 0.0",
                f'vllm:request_success_total{{{label},finished_reason="stop"}} 0.0',
                f'vllm:request_success_total{{{label},finished_reason="length"}} {counts.requests}.0',
                f"vllm:prompt_tokens_total{{{label}}} {counts.prompt}.0",
                f"vllm:generation_tokens_total{{{label}}} {counts.generated}.0",
                f"vllm:prefix_cache_hits_total{{{label}}} {counts.cached}.0",
                f"vllm:num_preemptions_total{{{label}}} {counts.preempted}.0",
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1600"} 1.0',
            ]
            if self.behaviour.draft:
                lines += [
                    f"vllm:spec_decode_num_drafts_total{{{label}}} {counts.drafts}.0",
                    f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {counts.drafts * self.behaviour.draft}.0",
                    f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {sum(counts.accepted)}.0",
                ]
                lines += [
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{at}"}} {count}.0'
                    for at, count in enumerate(counts.accepted)
                ]
            return "\n".join(lines) + "\n"

    # answers

    def tokens_of(self, text: str) -> int:
        fillers = text.count(" a") - sum(text.count(f" a{letter}") for letter in "bcdefghijklmnopqrstuvwxyz")
        words = len(text.split()) - fillers
        return self.behaviour.template_tokens + words * self.behaviour.word_tokens + fillers

    def post(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.seen.append(body)
        self.before()
        how = self.behaviour
        if handler.headers.get("Authorization") != f"Bearer {KEY}":
            return self._text(handler, '{"error": "Unauthorized"}', 401)
        if how.fault == "http 500":
            return self._text(handler, f"engine died, key {KEY}", 500)
        prompt = body["messages"][0]["content"]
        prompt_tokens = self.tokens_of(prompt)
        hit = how.caching and prompt in self._cache
        wanted = body["max_tokens"]
        early = how.fault == "early" and how.fault_prompt in prompt
        made = min(wanted, how.fault_after) if early else wanted
        with self._lock:
            self.counts.running += 1
            self._cache.add(prompt)
        try:
            self._stream(handler, prompt_tokens, hit, made, wanted)
        finally:
            with self._lock:
                self.counts.running -= 1
                self.counts.requests += 1
                self.counts.prompt += prompt_tokens
                self.counts.generated += made
                self.counts.cached += prompt_tokens - 1 if hit else 0
                if how.draft:
                    self.counts.drafts += 100
                    self.counts.accepted = [
                        old + new
                        for old, new in zip(self.counts.accepted or [0] * how.draft, how.accepted, strict=True)
                    ]

    def _stream(self, handler: BaseHTTPRequestHandler, prompt: int, hit: bool, made: int, wanted: int) -> None:
        how = self.behaviour
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        if how.closes:
            handler.send_header("Connection", "close")
        handler.end_headers()
        model = "another-model" if how.fault == "wrong model" else MODEL

        def send(data: str) -> None:
            raw = f"data: {data}\n\n".encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
            handler.wfile.flush()

        def event(delta: dict[str, Any] | None, **more: Any) -> None:
            choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": more.pop("finish", None)}]
            send(json.dumps({"model": model, "choices": choices, **more}))

        begin = time.monotonic()
        event({"role": "assistant", "content": ""})
        first = begin + how.first_s + (0 if hit else prompt * how.prompt_token_s)
        sent, pause = 0, how.pauses > 0
        how.pauses -= pause
        while sent < made:
            if how.fault == "stall" and sent >= how.fault_after:
                # A connection that is kept alive is no progress.
                for _ in range(40):
                    handler.wfile.write(b"3\r\n:\n\n\r\n")
                    handler.wfile.flush()
                    time.sleep(0.1)
            if pause and sent >= how.fault_after:
                pause = False
                time.sleep(how.pause_s)
                first += how.pause_s
            if how.fault == "silence" and sent >= how.fault_after:
                time.sleep(4)
            if how.fault == "cut" and sent >= how.fault_after:
                handler.close_connection = True
                return
            if how.fault == "error" and sent >= how.fault_after:
                send(json.dumps({"error": {"message": "engine died"}}))
                return
            step = min(how.per_event, made - sent)
            # The deadline counts from the begin: a late wake-up does not add up.
            time.sleep(max(0.0, first + (sent + step - 1) * how.token_s - time.monotonic()))
            sent += step
            finish = ("length" if made == wanted else "stop") if sent == made else None
            event({"content": "x" * step}, finish=finish)
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        if how.fault == "usage without completion_tokens":
            del usage["completion_tokens"]
        if how.fault != "no usage":
            event(None, usage=usage)
        send("[DONE]")
        handler.wfile.write(b"0\r\n\r\n")
