#!/usr/bin/env python3
"""The load and the clock, on the node: reads a job from stdin, writes one JSON line per round and path to stdout.

Standard library alone. Starts what the job names (backends, proxies), sends closed-loop streams down every path in
turn, and ends by itself, its children with it. It talks to 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
# after the window, for the requests that still run
LINGER_S = 60.0


class LoadError(Exception):
    """One line for the person who called."""


class Reply:
    """One chunked response, decoded: a proxy may cut the chunks anew."""

    __slots__ = ("buffer", "closes", "done", "events", "head", "tail")

    def __init__(self) -> None:
        self.buffer = b""
        self.closes = False
        self.head = False
        self.tail = b""
        self.events = 0
        self.done = False

    def feed(self, data: bytes) -> None:
        buffer = self.buffer + data if self.buffer else data
        if not self.head:
            head, found, rest = buffer.partition(b"\r\n\r\n")
            if not found:
                self.buffer = buffer
                return
            if not head.startswith(b"HTTP/1.1 200 ") or b"transfer-encoding: chunked" not in head.lower():
                raise LoadError(f"no streamed answer: {buffer[:600].decode(errors='replace')!r}")
            self.head = True
            self.closes = b"connection: close" in head.lower()
            buffer = rest
        while True:
            size, found, rest = buffer.partition(b"\r\n")
            if not found:
                break
            length = int(size, 16)
            if len(rest) < length + 2:
                break
            if not length:
                self.done = True
                break
            # an event's first bytes may be the end of one chunk and the start of the next
            text = self.tail + rest[:length]
            self.events += text.count(b"data: {")
            self.tail = text[-6:]
            buffer = rest[length + 2 :]
        self.buffer = buffer


def connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


class Stream:
    """One client: a request after the other, in turn when there are several ports.

    A connection is used again unless the answer says that it closes; then a new one is in the next request's time.
    """

    __slots__ = ("chosen", "ports", "reply", "request", "sent", "socks")

    def __init__(self, ports: list[int], first: int, request: bytes) -> None:
        self.ports = ports
        self.request = request
        self.chosen = first
        self.sent = 0.0
        self.reply: Reply | None = None
        self.socks = [connect(port) for port in ports]

    def send(self, epoll: select.epoll, owners: dict[int, Stream]) -> None:
        self.chosen = (self.chosen + 1) % len(self.socks)
        self.reply = Reply()
        self.sent = time.perf_counter()
        if self.socks[self.chosen].fileno() < 0:
            fresh = self.socks[self.chosen] = connect(self.ports[self.chosen])
            owners[fresh.fileno()] = self
            epoll.register(fresh.fileno(), select.EPOLLIN)
        if self.socks[self.chosen].send(self.request) != len(self.request):
            raise LoadError("a request of a few kB did not fit the socket's buffer")


def request_bytes(path: dict[str, Any], job: dict[str, Any]) -> bytes:
    body = json.dumps(
        {
            "model": job["model"],
            "messages": [{"role": "user", "content": job["prompt"]}],
            "max_tokens": job["tokens"],
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (path["key"].encode(), len(body))
    ) + body


def process_seconds(roots: set[int]) -> float:
    """CPU time of these processes and their children so far."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS
    total = 0.0
    for pid, seconds in spent.items():
        ancestor = pid
        while ancestor and ancestor not in roots:
            ancestor = parents.get(ancestor, 0)
        total += seconds if ancestor else 0.0
    return total


def machine_seconds() -> float:
    """CPU time of everything on the machine so far."""
    fields = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


def measure(
    path: dict[str, Any], cell: dict[str, Any], job: dict[str, Any], roots: dict[str, set[int]]
) -> dict[str, Any]:
    """One path for one window."""
    streams: list[Stream] = []
    try:
        for index in range(cell["streams"]):
            streams.append(Stream(path["ports"], index, request_bytes(path, job)))
        return drive(streams, cell, job, roots)
    finally:
        for stream in streams:
            for sock in stream.socks:
                sock.close()


def drive(
    streams: list[Stream], cell: dict[str, Any], job: dict[str, Any], roots: dict[str, set[int]]
) -> dict[str, Any]:
    epoll = select.epoll()
    owners = {sock.fileno(): stream for stream in streams for sock in stream.socks}
    for fileno in owners:
        epoll.register(fileno, select.EPOLLIN)
    begin = time.perf_counter()
    # the golden ratio spreads the starts evenly, whatever the number: streams in step would queue behind each other
    starts = [(begin + index * 0.6180339887 % 1 * cell["request_s"], index) for index in range(len(streams))]
    heapq.heapify(starts)
    opens = begin + cell["request_s"] + job["warm_s"]
    closes = opens + cell["window_s"]
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    first_s: list[float] = []
    cycles = 0
    cycle_s = 0.0
    events = 0
    active = 0
    while True:
        now = time.perf_counter()
        while starts and starts[0][0] <= now:
            streams[heapq.heappop(starts)[1]].send(epoll, owners)
            active += 1
        if not before and now >= opens:
            before = counters(roots)
            opens = time.perf_counter()
            closes = opens + cell["window_s"]
        if not after and now >= closes:
            closes = now
            after = counters(roots)
        if after and not active:
            break
        if now > closes + LINGER_S:
            raise LoadError(f"{active} requests did not end within {LINGER_S:.0f} s after the window")
        limit = starts[0][0] if starts else opens if not before else closes if not after else now + 1
        for fileno, _ in epoll.poll(max(0.0, limit - now)):
            stream = owners[fileno]
            reply = stream.reply
            data = stream.socks[stream.chosen].recv(65536) if fileno == stream.socks[stream.chosen].fileno() else b""
            now = time.perf_counter()
            if not data or reply is None:
                raise LoadError("the other side closed a connection")
            had = reply.events
            reply.feed(data)
            counts = bool(before) and stream.sent >= opens and not after
            if bool(before) and not after:
                events += reply.events - had
            # reading the counters at the window's end stalls the client for a moment: no first token is due then
            if not had and reply.events and bool(before) and opens <= stream.sent < closes - cell["request_s"]:
                first_s.append(now - stream.sent)
            if reply.done:
                if reply.events < job["chunks"]:
                    raise LoadError(f"a stream ended after {reply.events} of {job['chunks']} chunks")
                if counts:
                    cycles += 1
                    cycle_s += now - stream.sent
                if reply.closes:
                    epoll.unregister(fileno)
                    del owners[fileno]
                    stream.socks[stream.chosen].close()
                if after:
                    stream.reply = None
                    active -= 1
                else:
                    stream.send(epoll, owners)
    window = closes - opens
    return {
        "streams": len(streams),
        "window_s": window,
        "first_s": first_s,
        "events": events,
        "events_per_s": events / window,
        # from whole requests, not from how many ended in the window: the edges would weigh more than the balancer
        "requests_per_s": len(streams) * cycles / cycle_s if cycle_s else 0.0,
        "cpu_s": {name: after[name] - before[name] for name in after},
        "load": os.getloadavg()[0],
    }


def counters(roots: dict[str, set[int]]) -> dict[str, float]:
    return {
        "client": time.process_time(),
        "machine": machine_seconds(),
        **{name: process_seconds(pids) for name, pids in roots.items()},
    }


@contextlib.contextmanager
def services(job: dict[str, Any]) -> Iterator[dict[str, set[int]]]:
    """The job's processes, up and listening; name -> process ids."""
    running: list[subprocess.Popen[bytes]] = []
    roots: dict[str, set[int]] = {}
    try:
        for name, pidfile in job["watch"].items():
            roots[name] = {int(Path(pidfile).read_text())}
        for service in job["services"]:
            with open(service["log"], "ab") as log:
                process = subprocess.Popen(
                    service["argv"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **service["env"]},
                )
            running.append(process)
            roots.setdefault(service["name"], set()).add(process.pid)
            wait_for_port(service, process)
        yield roots
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for_port(service: dict[str, Any], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", service["port"]), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            lines = Path(service["log"]).read_text(errors="replace").strip().splitlines() or ["no output"]
            raise LoadError(f"{service['name']} does not listen on port {service['port']}: {lines[-1]}")
        time.sleep(0.05)


def orders(count: int, rounds: int) -> Iterator[list[int]]:
    """The paths' order per round: each comes first, and after each other, equally often."""
    for number in range(rounds):
        order = [(number + index) % count for index in range(count)]
        yield order if number // count % 2 == 0 else order[::-1]


def give_up(*_: object) -> None:
    raise LoadError("the run took longer than its limit")


def main() -> int:
    job = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGTERM, give_up)
    signal.alarm(job["limit_s"])
    gc.disable()
    try:
        with services(job) as roots:
            for cell in job["cells"]:
                for number, order in enumerate(orders(len(job["paths"]), cell["rounds"])):
                    for index in order:
                        path = job["paths"][index]
                        result = measure(path, cell, job, roots)
                        print(json.dumps({"path": path["name"], "round": number, **result}), flush=True)
    except (LoadError, OSError, ValueError) as err:
        print(f"load: error: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
