#!/usr/bin/env python3
"""A hub of models for tests: the HTTP API of huggingface.co as huggingface_hub uses it, with faults on demand.

    python server.py --root DIR --port N --log FILE

Two servers: the hub, and the content host to which it redirects for LFS files. DIR has OWNER/NAME/REVISION/... and
beside each revision REVISION.json, the listing (make_repository writes both). See README.md for faults and counters.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import gzip
import hashlib
import hmac
import json
import os
import random
import re
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

BLOCK = 1 << 20
# What the hub keeps in LFS: these kinds of file (as a repository's .gitattributes says there).
LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".gz", ".zst")
SERVICE = "gpu-node test hub"


# -- repositories -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One file of a revision, as the hub describes it."""

    path: str
    size: int
    sha256: str
    # git's name of the blob: of the content, or of the pointer when the content is in LFS
    git_sha1: str
    lfs: bool = False
    pointer_size: int = 0
    xet_hash: str = ""

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_sha1

    def sibling(self) -> dict[str, Any]:
        """The file in /api/models/REPO?blobs=true, which does not say whether Xet has it."""
        answer: dict[str, Any] = {"rfilename": self.path, "size": self.size, "blobId": self.git_sha1}
        if self.lfs:
            answer["lfs"] = {"sha256": self.sha256, "size": self.size, "pointerSize": self.pointer_size}
        return answer

    def tree_item(self) -> dict[str, Any]:
        """The file in /api/models/REPO/tree/REVISION."""
        answer: dict[str, Any] = {"type": "file", "oid": self.git_sha1, "size": self.size, "path": self.path}
        if self.lfs:
            answer["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": self.pointer_size}
        if self.xet_hash:
            answer["xetHash"] = self.xet_hash
        return answer


@dataclass(frozen=True)
class Repository:
    """What make_repository made."""

    name: str
    revision: str
    folder: Path
    entries: dict[str, Entry]

    @property
    def total(self) -> int:
        return sum(entry.size for entry in self.entries.values())

    def content(self, path: str) -> bytes:
        return (self.folder / self.revision / path).read_bytes()

    def wanted(self) -> dict[str, dict[str, Any]]:
        """The listing as the node's program gets it."""
        return {
            path: {
                "size": entry.size,
                "sha256": entry.sha256 if entry.lfs else None,
                "git_sha1": None if entry.lfs else entry.git_sha1,
                "xet": bool(entry.xet_hash),
            }
            for path, entry in self.entries.items()
        }


def safetensors_header(size: int) -> bytes:
    """The header of a safetensors file of ``size`` bytes that holds one tensor of bytes."""
    for length in range(64, 256, 8):
        data = size - 8 - length
        header = json.dumps({"weight": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}}).encode()
        if data >= 0 and len(header) <= length:
            return struct.pack("<Q", length) + header.ljust(length)
    raise ValueError(f"{size} bytes are too few for a safetensors file; the least is 80")


def _blocks(path: str, size: int, seed: int) -> Iterator[bytes]:
    """Content that depends on path, size and seed alone, and is well-formed for its kind."""
    source = random.Random(f"{seed} {path} {size}")
    if path.endswith(".json") and size >= 12:
        yield b'{"text": "'
        left = size - 12
        while left:
            yield source.randbytes(min(BLOCK, left)).hex()[: min(BLOCK, left)].encode()
            left -= min(BLOCK, left)
        yield b'"}'
        return
    if path.endswith(".safetensors"):
        header = safetensors_header(size)
        yield header
        size -= len(header)
    for start in range(0, size, BLOCK):
        yield source.randbytes(min(BLOCK, size - start))


def describe(path: str, file: Path, *, lfs: bool | None = None, xet: bool = False) -> Entry:
    """Describe a file on disk as the hub would."""
    size = file.stat().st_size
    large = path.endswith(LFS_SUFFIXES) if lfs is None else lfs
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            sha256.update(block)
            if not large:
                git.update(block)
    if not large:
        return Entry(path, size, sha256.hexdigest(), git.hexdigest())
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256.hexdigest()}\nsize {size}\n".encode()
    return Entry(
        path,
        size,
        sha256.hexdigest(),
        hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest(),
        lfs=True,
        pointer_size=len(pointer),
        xet_hash=hashlib.sha256(b"xet " + sha256.digest()).hexdigest() if xet else "",
    )


def make_repository(
    folder: Path,
    files: Mapping[str, int | bytes],
    seed: int = 0,
    *,
    seeds: Mapping[str, int] | None = None,
    access: str = "open",
    token: str = "",
    xet: bool = False,
) -> Repository:
    """Make a revision of a repository of random files.

    :param folder: ROOT/OWNER/NAME; called again it adds a revision, and the branch main moves to it.
    :param files: path to size, or to the bytes themselves.
    :param seeds: another seed for single files, so that two revisions differ in these alone.
    :param access: ``open``, ``gated`` (files need ``token``) or ``private`` (the listing too).
    :param xet: LFS files are in Xet storage as well (served so by a server with ``xet`` on).
    """
    making = folder / f".making-{seed}-{os.getpid()}"
    entries = {}
    for path, content in sorted(files.items()):
        file = making / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            stream.writelines(
                [content] if isinstance(content, bytes) else _blocks(path, content, (seeds or {}).get(path, seed))
            )
        entries[path] = describe(path, file, xet=xet)
    listing = [asdict(entry) for entry in entries.values()]
    revision = hashlib.sha1(json.dumps(listing, sort_keys=True).encode()).hexdigest()
    if not (folder / revision).exists():
        making.rename(folder / revision)
    (folder / f"{revision}.json").write_text(json.dumps(listing, indent=1), encoding="utf-8")
    about = {"access": access, "token": token, "branches": {"main": revision}}
    (folder / "repository.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
    return Repository(f"{folder.parent.name}/{folder.name}", revision, folder, entries)


# -- faults, counters, rate -------------------------------------------------------------------------------------------

BODY_FAULTS = ("cut", "stall", "short", "long", "wrong_bytes", "trickle", "gzip", "ignore_range")
ANSWER_FAULTS = ("silent", "rate_limit", "status", "unauthorized", "no_revision", "redirect_loop")


@dataclass
class Fault:
    """What goes wrong, where, and how often.

    In the answers that carry a file's bytes: ``cut`` (the connection ends), ``stall`` (it stays open, nothing more
    comes), ``short`` and ``long`` (a length that is wrong by ``amount`` bytes, in header and body alike),
    ``wrong_bytes`` (one byte differs), ``trickle`` (``amount`` bytes a second), ``gzip`` (when the client takes it),
    ``ignore_range`` (all of the file, status 200).
    Instead of any answer: ``silent`` (none at all), ``rate_limit`` (429), ``status`` (``amount``: 500, 503),
    ``unauthorized`` (401, gated), ``no_revision`` (404), ``redirect_loop``.
    """

    kind: str
    # OWNER/NAME/PATH of a file, or the path of another request, as fnmatch reads it (* takes / too)
    pattern: str = "*"
    # how often; -1 is always
    times: int = 1
    # bytes of the body before it happens; -1 is a random number of them
    after: int = -1
    amount: int = 0
    # Retry-After and the limit's reset; how long a stall lasts (0: until the client goes)
    seconds: float = 0
    # hub, content; empty is both
    server: str = ""
    # cut: with a reset instead of an orderly end; gzip: also for clients that do not take it
    hard: bool = False
    methods: tuple[str, ...] = ("GET",)

    def __post_init__(self) -> None:
        if self.kind not in BODY_FAULTS + ANSWER_FAULTS:
            raise ValueError(f"unknown fault {self.kind!r}; known: {', '.join(BODY_FAULTS + ANSWER_FAULTS)}")
        self.methods = tuple(self.methods)


@dataclass
class Count:
    """What was asked and sent for one path. Bytes are those of bodies."""

    head: int = 0
    get: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Seen:
    """One request."""

    server: str
    method: str
    path: str
    status: int
    headers: dict[str, str]


class TokenBucket:
    """All connections together send no more than ``rate`` bytes a second; 0 is no limit."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._next = 0.0

    @property
    def block(self) -> int:
        # about 20 ms each, so that connections share the rate evenly
        return max(1024, min(BLOCK, self.rate // 50)) if self.rate else BLOCK

    def take(self, amount: int) -> None:
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            # what was not used while nobody asked is lost, but for 50 ms
            start = max(self._next, now - 0.05)
            self._next = start + amount / self.rate
        if start > now:
            time.sleep(start - now)


@dataclass
class _State:
    """What the handlers share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    faults: list[Fault] = field(default_factory=list)
    injected: collections.Counter[str] = field(default_factory=collections.Counter)
    paths: dict[str, Count] = field(default_factory=lambda: collections.defaultdict(Count))
    files: dict[str, Count] = field(default_factory=lambda: collections.defaultdict(Count))
    seen: collections.deque[Seen] = field(default_factory=lambda: collections.deque(maxlen=20_000))
    connections: set[socket.socket] = field(default_factory=set)
    stopping: threading.Event = field(default_factory=threading.Event)


class _GoneError(Exception):
    """The client went away, or a fault ended the connection."""


# -- the servers ------------------------------------------------------------------------------------------------------


class Hub:
    """The hub, its content host and its Xet storage, in threads of this process."""

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        content_port: int = 0,
        log: Path | None = None,
        xet: bool = False,
        rate: int = 0,
        resolve_cache: bool = False,
        expires_s: float = 3600,
        static: Path | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare; start() begins to serve.

        :param xet: say that LFS files are in Xet storage, which takes connections and never answers.
        :param rate: bytes a second that all connections together get; 0 is no limit.
        :param resolve_cache: small files are redirected once on the hub itself, as the real one does.
        :param expires_s: how long the address of a file on the content host is good.
        :param static: a folder served below /static/ (with ranges); 503 for what is not there yet.
        """
        self.root = Path(root)
        self.xet = xet
        self.resolve_cache = resolve_cache
        self.expires_s = expires_s
        self.static = static
        self.bucket = TokenBucket(rate)
        self.random = random.Random(seed)
        self.key = os.urandom(16)
        self.state = _State()
        self._log = log.open("a", encoding="utf-8", buffering=1) if log else None
        self._listings: dict[tuple[str, str], tuple[int, dict[str, Entry]]] = {}
        self._hub = _Server((host, port), self, "hub")
        self._content = _Server((host, content_port), self, "content")
        self._cas = socket.create_server((host, 0), backlog=128)
        self.cas_connections = 0
        self._threads: list[threading.Thread] = []
        shown = "127.0.0.1" if host in ("", "0.0.0.0") else host
        self.url = f"http://{shown}:{self._hub.server_address[1]}"
        self.content_url = f"http://{shown}:{self._content.server_address[1]}"

    @property
    def content_port(self) -> int:
        return int(self._content.server_address[1])

    @property
    def cas_port(self) -> int:
        return int(self._cas.getsockname()[1])

    def start(self) -> Self:
        for run in (self._hub.serve, self._content.serve, self._accept_and_never_answer):
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def stop(self) -> None:
        self.state.stopping.set()
        self._hub.shutdown()
        self._content.shutdown()
        with contextlib.suppress(OSError):
            self._cas.shutdown(socket.SHUT_RDWR)
        self._cas.close()
        with self.state.lock:
            connections = list(self.state.connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        self._hub.server_close()
        self._content.server_close()
        if self._log:
            self._log.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _accept_and_never_answer(self) -> None:
        """The Xet storage of HF-02: connections are taken, no byte ever comes back."""
        held = []
        while not self.state.stopping.is_set():
            try:
                connection, _ = self._cas.accept()
            except OSError:
                break
            held.append(connection)
            self.cas_connections += 1
        for connection in held:
            connection.close()

    # -- faults and counters

    def fault(self, kind: str, pattern: str = "*", times: int = 1, **options: Any) -> Fault:
        """Let something go wrong (see Fault)."""
        made = Fault(kind, pattern, times, **options)
        with self.state.lock:
            self.state.faults.append(made)
        return made

    def clear_faults(self) -> None:
        with self.state.lock:
            self.state.faults.clear()

    def take_fault(self, server: str, method: str, name: str, kinds: tuple[str, ...]) -> Fault | None:
        if not self.state.faults:
            return None
        with self.state.lock:
            for fault in self.state.faults:
                if (
                    fault.kind in kinds
                    and fault.times != 0
                    and method in fault.methods
                    and fault.server in ("", server)
                    and fnmatch.fnmatchcase(name, fault.pattern)
                ):
                    fault.times -= fault.times > 0
                    self.state.injected[fault.kind] += 1
                    return fault
        return None

    def stats(self) -> dict[str, Any]:
        """All counters; ``files`` by OWNER/NAME/PATH, whatever server sent them, ``paths`` by server and path."""
        with self.state.lock:
            paths = {name: asdict(count) for name, count in self.state.paths.items()}
            files = {name: asdict(count) for name, count in self.state.files.items()}
            return {
                "requests": sum(count["head"] + count["get"] for count in paths.values()),
                "bytes": sum(count["bytes"] for count in paths.values()),
                "file_bytes": sum(count["bytes"] for count in files.values()),
                "xet_connections": self.cas_connections,
                "injected": dict(self.state.injected),
                "paths": paths,
                "files": files,
            }

    def reset_stats(self) -> None:
        with self.state.lock:
            self.state.paths.clear()
            self.state.files.clear()
            self.state.seen.clear()
            self.state.injected.clear()

    @property
    def seen(self) -> list[Seen]:
        with self.state.lock:
            return list(self.state.seen)

    @property
    def requests(self) -> int:
        return int(self.stats()["requests"])

    @property
    def file_bytes(self) -> int:
        return int(self.stats()["file_bytes"])

    def note(self, text: str) -> None:
        if self._log:
            self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    # -- repositories

    def about(self, repository: str) -> dict[str, Any] | None:
        try:
            about: dict[str, Any] = json.loads((self.root / repository / "repository.json").read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return about

    def listing(self, repository: str, revision: str) -> dict[str, Entry] | None:
        file = self.root / repository / f"{revision}.json"
        try:
            changed = file.stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None
        known = self._listings.get((repository, revision))
        if known is None or known[0] != changed:
            entries = [Entry(**values) for values in json.loads(file.read_text("utf-8"))]
            known = self._listings[(repository, revision)] = (changed, {entry.path: entry for entry in entries})
        return known[1]

    def signature(self, path: str, query: Mapping[str, str]) -> str:
        text = path + "?" + urlencode(sorted(query.items()))
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()

    def signed(self, host: str, repository: str, revision: str, entry: Entry) -> str:
        """The address of an LFS file on the content host, good for a while, needing no other secret."""
        path = f"/repos/{repository}/{revision}/{entry.sha256}"
        name = entry.path.rsplit("/", 1)[-1]
        query = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Date": f"{time.time():.3f}",
            "X-Amz-Expires": f"{self.expires_s:g}",
            "X-Amz-SignedHeaders": "host",
            "response-content-disposition": f"inline; filename*=UTF-8''{quote(name)}; filename=\"{name}\";",
            "x-id": "GetObject",
            "x-path": entry.path,
        }
        query["X-Amz-Signature"] = self.signature(path, query)
        return f"http://{host}:{self.content_port}{quote(path)}?{urlencode(query)}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], hub: Hub, role: str) -> None:
        super().__init__(address, _HubHandler if role == "hub" else _ContentHandler)
        self.hub = hub
        self.role = role

    def serve(self) -> None:
        self.serve_forever(poll_interval=0.05)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.hub.state.lock:
            self.hub.state.connections.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: Any) -> None:
        with self.hub.state.lock:
            self.hub.state.connections.discard(request)
        super().close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        # clients that go away in the middle are what this server is for
        if not isinstance(error, OSError):
            self.hub.note(f"error: {error!r}")
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.hub = self.server.hub
        split = urlsplit(self.path)
        self.url_path, self.query = unquote(split.path), dict(parse_qs(split.query, keep_blank_values=True))
        self.status, self.sent, self.fault = 0, 0, ""
        # the file whose counters this request adds to, and whether what goes out are bytes of that file
        self.count_as, self.in_file, self.counted = "", False, self.url_path.startswith("/_")
        try:
            self.route()
        except (_GoneError, ConnectionError):
            self.close_connection = True
        finally:
            self._count()
            if not self.url_path.startswith("/_"):
                self.hub.note(
                    f"{self.server.role} {self.command} {self.url_path} {self.status} {self.sent} {self.fault}".rstrip()
                )

    def route(self) -> None:
        raise NotImplementedError

    def _count(self) -> None:
        """Count the request, once, before anything is answered: who has the answer finds it counted."""
        if self.counted:
            return
        self.counted = True
        state, role = self.hub.state, self.server.role
        with state.lock:
            for table, name in ((state.paths, f"{role} {self.url_path}"), (state.files, self.count_as)):
                if name:
                    count = table[name]
                    count.head += self.command == "HEAD"
                    count.get += self.command == "GET"
            state.seen.append(Seen(role, self.command, self.path, self.status, dict(self.headers.items())))

    def _sent(self, amount: int) -> None:
        """Count bytes as they go out, just before: what was sent to a client that died is known too.

        Who sends fewer in the end counts the rest back.
        """
        self.sent += amount
        state = self.hub.state
        with state.lock:
            state.paths[f"{self.server.role} {self.url_path}"].bytes += amount
            if self.in_file:
                state.files[self.count_as].bytes += amount

    def log_message(self, format: str, *args: Any) -> None:
        pass

    # -- answers

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self._count()
        self.send_response_only(status)
        self.send_header("Date", formatdate(usegmt=True))
        self.send_header("Server", SERVICE)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        headers = {"Content-Type": "text/plain; charset=utf-8", **(headers or {}), "Content-Length": str(len(body))}
        self.begin(status, headers)
        if self.command != "HEAD":
            self._sent(len(body))
            self.wfile.write(body)

    def answer_json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """An error as the hub words it."""
        extra = {"X-Error-Message": message, "X-Request-Id": f"Root=1-{os.urandom(4).hex()}", **(headers or {})}
        if code:
            extra["X-Error-Code"] = code
        self.answer_json({"error": message}, status, extra)

    def instead(self, name: str) -> bool:
        """Answer with a fault in place of the real answer."""
        fault = self.hub.take_fault(self.server.role, self.command, name, ANSWER_FAULTS)
        if fault is None:
            return False
        self.fault = fault.kind
        if fault.kind == "silent":
            self._wait_for_the_end(fault.seconds)
            raise _GoneError
        if fault.kind == "rate_limit":
            wait = max(0, round(fault.seconds))
            limits = {
                "Retry-After": str(wait),
                "ratelimit": f'"resolvers";r=0;t={wait}',
                "ratelimit-policy": '"fixed window";"resolvers";q=5000;w=300',
            }
            self.refuse(429, "", "We had to rate limit your IP. To continue using our service, sign in", limits)
        elif fault.kind == "status":
            # parts of a second are nothing that a real server asks for, but tests are in a hurry
            retry = {"Retry-After": f"{fault.seconds:g}"} if fault.seconds else None
            self.refuse(fault.amount or 503, "", "Service Unavailable", retry)
        elif fault.kind == "unauthorized":
            self.refuse(401, "GatedRepo", "Access to this model is restricted. Please log in.")
        elif fault.kind == "no_revision":
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        else:
            query = {name: values[0] for name, values in self.query.items()}
            query["again"] = str(int(query.get("again", "0")) + 1)
            self.answer(302, b"Found", {"Location": f"{quote(self.url_path)}?{urlencode(query)}"})
        return True

    def _wait_for_the_end(self, seconds: float) -> None:
        """Do nothing until the client goes, the server stops, or the time is over."""
        until = time.monotonic() + seconds if seconds else float("inf")
        while not self.hub.state.stopping.wait(0.05) and time.monotonic() < until:
            if select.select([self.connection], [], [], 0)[0]:
                with contextlib.suppress(BlockingIOError):
                    if not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                        raise _GoneError

    # -- the bytes of a file

    def _range(self, size: int, etag: str) -> tuple[int, int] | None:
        """The part asked for: None is all, and one that begins at the end or behind it cannot be had."""
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "").strip())
        if match is None or match.groups() == ("", ""):
            return None
        if (condition := self.headers.get("If-Range")) is not None and condition.strip() != etag:
            return None
        first, last = match.groups()
        if not first:
            return max(0, size - int(last)), size
        return int(first), min(size, int(last) + 1) if last else size

    def send_file(self, name: str, file: Path, size: int, etag: str, headers: Mapping[str, str]) -> None:
        """Send a file, or the part of it that was asked for, with the fault that is due."""
        self.count_as, self.in_file = name, True
        fault = self.hub.take_fault(self.server.role, self.command, name, BODY_FAULTS)
        kind = self.fault = fault.kind if fault else ""
        part = None if kind == "ignore_range" else self._range(size, etag)
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
        if fault and kind == "gzip" and (fault.hard or "gzip" in self.headers.get("Accept-Encoding", "")):
            self._send_gzip(file, headers)
            return
        if part is not None and (part[0] >= size or part[0] >= part[1]):
            self.in_file = False
            self.answer(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        start, end = part or (0, size)
        length = end - start
        if fault and kind in ("short", "long"):
            amount = fault.amount or 1 + length // 10
            length = max(0, length - amount) if kind == "short" else length + amount
        if part is not None:
            # a length that lies does so in every header
            total = size + length - (end - start)
            headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{total}"
        self.begin(200 if part is None else 206, {**headers, "Content-Length": str(length)})
        if self.command != "HEAD":
            with file.open("rb") as stream:
                self._send_body(stream.fileno(), start, length, end - start, fault)

    def _send_gzip(self, file: Path, headers: Mapping[str, str]) -> None:
        body = gzip.compress(file.read_bytes(), 1)
        self.begin(200, {**headers, "Content-Encoding": "gzip", "Transfer-Encoding": "chunked"})
        for start in range(0, len(body), BLOCK):
            block = body[start : start + BLOCK]
            self._sent(len(block))
            self.wfile.write(b"%x\r\n" % len(block) + block + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send_body(self, file: int, start: int, length: int, real: int, fault: Fault | None) -> None:
        if fault is None:
            self._send_part(file, start, length)
            return
        at = min(fault.after, length) if fault.after >= 0 else self.hub.random.randrange(max(1, length))
        if fault.kind == "cut":
            self._send_part(file, start, at)
            if fault.hard:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raise _GoneError
        if fault.kind == "stall":
            self._send_part(file, start, at)
            self._wait_for_the_end(fault.seconds)
            self._send_part(file, start + at, length - at)
        elif fault.kind == "wrong_bytes":
            at = min(at, length - 1)
            self._send_part(file, start, at)
            self._send_bytes(bytes([os.pread(file, 1, start + at)[0] ^ 0x20]))
            self._send_part(file, start + at + 1, length - at - 1)
        elif fault.kind == "trickle":
            step = max(1, (fault.amount or 1024) // 10)
            for offset in range(0, length, step):
                self._send_part(file, start + offset, min(step, length - offset))
                self._wait_for_the_end(0.1)
        else:
            self._send_part(file, start, min(length, real))
            self._send_bytes(bytes(max(0, length - real)))

    def _send_bytes(self, data: bytes) -> None:
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            self._sent(len(block))
            self.connection.sendall(block)

    def _send_part(self, file: int, start: int, length: int) -> None:
        """The kernel copies file to socket: no byte passes through Python."""
        bucket, out = self.hub.bucket, self.connection.fileno()
        end = start + length
        while start < end and not self.hub.state.stopping.is_set():
            amount = min(bucket.block, end - start)
            bucket.take(amount)
            self._sent(amount)
            sent = 0
            try:
                sent = os.sendfile(out, file, start, amount)
            finally:
                self._sent(sent - amount)
            if not sent:
                raise _GoneError
            start += sent


class _HubHandler(_Handler):
    def do_POST(self) -> None:
        self._control()

    def do_DELETE(self) -> None:
        self._control()

    def _control(self) -> None:
        """POST /_faults (a fault or a list of them), DELETE /_faults, DELETE /_stats."""
        self.hub = self.server.hub
        self.url_path, self.sent, self.count_as, self.in_file, self.counted = self.path, 0, "", False, True
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if (self.command, self.path) == ("POST", "/_faults"):
            known = {item.name for item in fields(Fault)}
            try:
                given = json.loads(body)
                made = [Fault(**item) for item in (given if isinstance(given, list) else [given])]
            except (TypeError, ValueError) as error:
                self.answer_json({"error": f"{error}; a fault has {', '.join(sorted(known))}"}, 400)
                return
            with self.hub.state.lock:
                self.hub.state.faults.extend(made)
            self.answer_json({"faults": len(made)})
        elif (self.command, self.path) == ("DELETE", "/_faults"):
            self.hub.clear_faults()
            self.answer_json({})
        elif (self.command, self.path) == ("DELETE", "/_stats"):
            self.hub.reset_stats()
            self.answer_json({})
        else:
            self.answer_json({"error": f"no {self.command} of {self.path}"}, 404)

    def route(self) -> None:
        path = self.url_path
        if path == "/_stats":
            self.answer_json(self.hub.stats())
        elif path == "/_seen":
            self.answer_json([asdict(seen) for seen in self.hub.seen])
        elif path.startswith("/static/"):
            self._static(path.removeprefix("/static/"))
        elif match := re.fullmatch(
            r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree|xet-read-token)/([^/]+)(/.*)?)?", path
        ):
            self._api(*match.groups())
        elif match := re.fullmatch(r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            self._resolve(*match.groups(), cached=True)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups(), cached=False)
        elif not self.instead(path.lstrip("/")):
            self.refuse(404, "", f"Cannot {self.command} {path}")

    def _static(self, path: str) -> None:
        if self.instead(f"static/{path}"):
            return
        if self.hub.static is None or ".." in path.split("/"):
            self.refuse(404, "", f"no {path}")
            return
        file = self.hub.static / path
        if not file.is_file():
            self.refuse(503, "", f"{path} is not there yet", {"Retry-After": "1"})
            return
        size = file.stat().st_size
        self.send_file(f"static/{path}", file, size, f'"{size:x}-{file.stat().st_mtime_ns:x}"', {})

    def _find(self, repository: str, revision: str, *, api: bool) -> tuple[str, dict[str, Entry]] | None:
        """The commit and its listing, when there is one and the sender may see it."""
        about = self.hub.about(repository)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        access = about["access"] if about else "open"
        allowed = access == "open" or (about is not None and given == about["token"])
        if about is None or (access == "private" and not allowed):
            # to strangers a repository that is not there and a private one look the same
            if given and about is None:
                self.refuse(404, "RepoNotFound", "Repository not found")
            else:
                self.refuse(401, "RepoNotFound", "Invalid username or password.")
            return None
        revision = about["branches"].get(revision, revision)
        listing = self.hub.listing(repository, revision) if re.fullmatch(r"[0-9a-f]{40}", revision) else None
        if listing is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif access == "gated" and not allowed and not api:
            message = f"Access to model {repository} is restricted. You must have access to it and be authenticated"
            self.refuse(403 if given else 401, "GatedRepo", f"{message} to access it. Please log in.")
        else:
            return revision, listing
        return None

    def _api(self, repository: str, kind: str | None, revision: str | None, rest: str | None) -> None:
        if self.instead(self.url_path.lstrip("/")):
            return
        found = self._find(repository, revision or "main", api=kind != "xet-read-token")
        if found is None:
            return
        commit, listing = found
        if kind == "tree":
            self._tree(commit, listing, (rest or "").strip("/"))
        elif kind == "xet-read-token":
            self._xet_token()
        else:
            blobs = self.query.get("blobs", [""])[0].lower() in ("true", "1")
            siblings = [
                self._visible(entry).sibling() if blobs else {"rfilename": entry.path} for entry in listing.values()
            ]
            about = self.hub.about(repository) or {}
            self.answer_json(
                {
                    "_id": hashlib.sha1(repository.encode()).hexdigest()[:24],
                    "id": repository,
                    "modelId": repository,
                    "author": repository.split("/")[0],
                    "sha": commit,
                    "private": about.get("access") == "private",
                    "gated": "manual" if about.get("access") == "gated" else False,
                    "disabled": False,
                    "lastModified": "2026-01-01T00:00:00.000Z",
                    "createdAt": "2026-01-01T00:00:00.000Z",
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "siblings": siblings,
                }
            )

    def _visible(self, entry: Entry) -> Entry:
        return entry if self.hub.xet or not entry.xet_hash else Entry(**{**asdict(entry), "xet_hash": ""})

    def _tree(self, commit: str, listing: dict[str, Entry], folder: str) -> None:
        prefix = folder + "/" if folder else ""
        below = {path: entry for path, entry in listing.items() if path.startswith(prefix)}
        folders = sorted(
            {"/".join(path.split("/")[:depth]) for path in below for depth in range(1, path.count("/") + 1)}
        )
        items: list[dict[str, Any]] = [
            {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}
            for name in folders
            if name.startswith(prefix)
        ]
        items += [self._visible(entry).tree_item() for entry in below.values()]
        if self.query.get("recursive", [""])[0].lower() not in ("true", "1"):
            items = [item for item in items if "/" not in item["path"].removeprefix(prefix)]
        if folder and not below:
            self.refuse(404, "EntryNotFound", f"{folder} does not exist on {commit}")
            return
        # one page holds 1000, the next is named in Link
        start = int(self.query.get("cursor", ["0"])[0])
        more = {}
        if start + 1000 < len(items):
            query = {**{name: values[0] for name, values in self.query.items()}, "cursor": str(start + 1000)}
            more = {"Link": f'<{self._here()}{quote(self.url_path)}?{urlencode(query)}>; rel="next"'}
        self.answer_json(items[start : start + 1000], headers={"X-Repo-Commit": commit, **more})

    def _here(self) -> str:
        return f"http://{self.headers.get('Host', '127.0.0.1')}"

    def _host_name(self) -> str:
        return self.headers.get("Host", "127.0.0.1").rsplit(":", 1)[0]

    def _xet_token(self) -> None:
        expires = int(time.time()) + 3600
        storage = f"http://{self._host_name()}:{self.hub.cas_port}"
        headers = {"X-Xet-Cas-Url": storage, "X-Xet-Access-Token": "xet-access", "X-Xet-Token-Expiration": str(expires)}
        self.answer_json({"casUrl": storage, "accessToken": "xet-access", "exp": expires}, headers=headers)

    def _resolve(self, repository: str, revision: str, path: str, *, cached: bool) -> None:
        name = f"{repository}/{path}"
        self.count_as = name
        if self.instead(name):
            return
        found = self._find(repository, revision, api=False)
        if found is None:
            return
        commit, listing = found
        entry = listing.get(path)
        if entry is None:
            self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
            return
        short = path.rsplit("/", 1)[-1]
        headers = {
            "X-Repo-Commit": commit,
            "X-Request-Id": f"Root=1-{os.urandom(4).hex()}",
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(short)}; filename=\"{short}\";",
        }
        if not entry.lfs and self.hub.resolve_cache and not cached:
            target = f"/api/resolve-cache/models/{repository}/{commit}/{path}"
            mark = urlencode({self.url_path: "", "etag": f'"{entry.etag}"'})
            self.answer(307, b"Temporary Redirect", {**headers, "Location": f"{quote(target)}?{mark}"})
        elif not entry.lfs:
            file = self.hub.root / repository / commit / path
            self.send_file(name, file, entry.size, f'"{entry.etag}"', headers)
        else:
            location = self.hub.signed(self._host_name(), repository, commit, entry)
            headers |= {
                "Location": location,
                "ETag": f'"{entry.git_sha1}"',
                "X-Linked-ETag": f'"{entry.etag}"',
                "X-Linked-Size": str(entry.size),
                "Accept-Ranges": "bytes",
            }
            if self.hub.xet and entry.xet_hash:
                token = f"{self._here()}/api/models/{repository}/xet-read-token/{commit}"
                storage = f"http://{self._host_name()}:{self.hub.cas_port}/v1/reconstructions/{entry.xet_hash}"
                headers["X-Xet-Hash"] = entry.xet_hash
                headers["Link"] = f'<{token}>; rel="xet-auth", <{storage}>; rel="xet-reconstruction-info"'
            self.answer(302, f"Found. Redirecting to {location}".encode(), headers)


class _ContentHandler(_Handler):
    """The content host: knows signed addresses and nothing else, in the words of S3."""

    def route(self) -> None:
        query = {name: values[0] for name, values in self.query.items()}
        match = re.fullmatch(r"/repos/([^/]+/[^/]+)/([0-9a-f]{40})/([0-9a-f]{64})", self.url_path)
        name = f"{match.group(1)}/{query.get('x-path', '')}" if match else self.url_path.lstrip("/")
        self.count_as = name if match else ""
        # checked before any fault: a secret that is sent here must be seen
        if "Authorization" in self.headers:
            message = (
                "Only one auth mechanism allowed; only the X-Amz-Algorithm query parameter, Signature query string "
            )
            self._refuse(400, "InvalidArgument", message + "parameter or the Authorization header should be specified")
            return
        if self.instead(name):
            return
        signature = query.pop("X-Amz-Signature", "")
        if match is None or self.command != "GET" or signature != self.hub.signature(self.url_path, query):
            self._refuse(403, "SignatureDoesNotMatch", "The request signature we calculated does not match")
            return
        if time.time() > float(query["X-Amz-Date"]) + float(query["X-Amz-Expires"]):
            self._refuse(403, "AccessDenied", "Request has expired")
            return
        repository, revision, sha256 = match.groups()
        file = self.hub.root / repository / revision / query["x-path"]
        headers = {
            "Content-Disposition": query["response-content-disposition"],
            "Last-Modified": formatdate(1_767_225_600, usegmt=True),
        }
        self.send_file(name, file, file.stat().st_size, f'"{sha256[:32]}"', headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
        self.answer(status, body.encode(), {"Content-Type": "application/xml"})


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder with OWNER/NAME/REVISION")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    parser.add_argument("--port", type=int, default=0, help="the hub's port (0: any free one)")
    parser.add_argument("--content-port", type=int, default=0, help="the content host's port (0: any free one)")
    parser.add_argument("--log", type=Path, help="one line for each request")
    parser.add_argument("--static", type=Path, help="folder served below /static/")
    parser.add_argument("--xet", action="store_true", help="LFS files are in Xet storage, which never answers")
    parser.add_argument("--resolve-cache", action="store_true", help="small files are redirected once on the hub")
    parser.add_argument("--rate", type=int, default=0, help="bytes a second of all connections together (0: no limit)")
    parser.add_argument(
        "--expires", type=float, default=3600, help="seconds that an address on the content host is good"
    )
    given = parser.parse_args(argv)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    hub = Hub(
        given.root,
        host=given.host,
        port=given.port,
        content_port=given.content_port,
        log=given.log,
        xet=given.xet,
        rate=given.rate,
        resolve_cache=given.resolve_cache,
        expires_s=given.expires,
        static=given.static,
    )
    with hub:
        print(json.dumps({"hub": hub.url, "content": hub.content_url}), flush=True)
        done.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
