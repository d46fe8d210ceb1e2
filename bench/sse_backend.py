#!/usr/bin/env python3
"""A chat endpoint that costs nothing: streams a fixed number of SSE chunks at fixed times.

Runs on the node, standard library alone. Like the engine, it sends the response's head at once and every chunk in a
write of its own. One thread around epoll: asyncio rounds its timers to whole milliseconds, which is the size of
what is measured.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import select
import socket
import time
from dataclasses import dataclass

HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: bench\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def http_chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


EVENT = http_chunk(
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"bench","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)


@dataclass(slots=True)
class Connection:
    sock: socket.socket
    received: bytes = b""
    left: int = 0
    due: float = 0.0


class Backend:
    def __init__(self, port: int, first_s: float, interval_s: float) -> None:
        self.first_s = first_s
        self.interval_s = interval_s
        self.epoll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.timers: list[tuple[float, int]] = []
        self.listener = socket.create_server(("127.0.0.1", port), backlog=256)
        self.listener.setblocking(False)
        self.epoll.register(self.listener, select.EPOLLIN)

    def serve(self) -> None:
        while True:
            wait = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
            # select waits with microseconds, epoll only with milliseconds
            if select.select([self.epoll], [], [], wait)[0]:
                for fileno, _ in self.epoll.poll(0):
                    if fileno == self.listener.fileno():
                        self.accept()
                    elif fileno in self.connections:
                        self.read(self.connections[fileno])
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                due, fileno = heapq.heappop(self.timers)
                connection = self.connections.get(fileno)
                # the number may belong to a later connection by now
                if connection and connection.left and connection.due == due:
                    self.emit(connection)

    def accept(self) -> None:
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections[sock.fileno()] = Connection(sock)
        self.epoll.register(sock, select.EPOLLIN)

    def close(self, connection: Connection) -> None:
        self.epoll.unregister(connection.sock)
        del self.connections[connection.sock.fileno()]
        connection.sock.close()

    def read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close(connection)
            return
        connection.received += data
        head, found, body = connection.received.partition(b"\r\n\r\n")
        if not found:
            return
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(fields[b"content-length"]):
            return
        connection.received = b""
        connection.left = json.loads(body)["max_tokens"]
        self.send(connection, HEAD)
        self.schedule(connection, time.monotonic() + self.first_s)

    def schedule(self, connection: Connection, due: float) -> None:
        connection.due = due
        heapq.heappush(self.timers, (due, connection.sock.fileno()))

    def emit(self, connection: Connection) -> None:
        connection.left -= 1
        if not self.send(connection, EVENT):
            return
        if connection.left:
            # from when it was due, not from now: being late once does not slow the stream
            self.schedule(connection, connection.due + self.interval_s)
        else:
            self.send(connection, END)

    def send(self, connection: Connection, data: bytes) -> bool:
        """False when the client is gone, or does not read 200 bytes: neither happens in a valid run."""
        try:
            if connection.sock.send(data) == len(data):
                return True
        except OSError:
            pass
        if connection.sock.fileno() in self.connections:
            self.close(connection)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("port", type=int)
    parser.add_argument("first_ms", type=float)
    parser.add_argument("interval_ms", type=float)
    options = parser.parse_args()
    gc.disable()
    Backend(options.port, options.first_ms / 1000, options.interval_ms / 1000).serve()


if __name__ == "__main__":
    main()
