"""Moves the bytes of single files, as its supervisor tells it on standard input, and hashes them on the disk.

Runs with the Python of the environment that has huggingface_hub. The library reads its settings when it is imported, so
the supervisor sets them in this process' environment. One that stalls is killed, and nothing that it has on the disk is
lost.

One JSON object a line. In: ``{"id", "kind": "hub" | "plain" | "peer", "url", "target", "part", "size", "sha256",
"git_sha1", "revision"}``, or ``{"id", "kind": "state", "url"}``. Out: ``{"id", "ok", ...}``, and ``{"alive": true}``
when it is ready, and while a long file is hashed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import httpx2
from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import Sums, hash_file, stamp
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.file_download import get_hf_file_metadata, http_get, xet_get

# Public, but exported in a way that type checkers do not see.
from huggingface_hub.utils import build_hf_headers, get_session, parse_ratelimit_headers  # type: ignore[attr-defined]

# Signed addresses carry a key in their query; a message must not.
_QUERY = re.compile(r"(https?://[^\s'\"?]+)\?[^\s'\"]*")
_BUSY = (408, 425, 429, 500, 502, 503, 504)
# The library gathers so many bytes before it writes any. Its own 10 MiB for each stream are lost in a kill, look like a
# stall on a slow line, and cost more time in copying than small blocks do in calls.
_BLOCK = 1 << 18
# The library takes 64 KiB at a time, with the same work around each block: this leaves a third of the CPU time.
_RECEIVE = 1 << 19
_PRINT = threading.Lock()
XET = os.environ.get("HF_HUB_DISABLE_XET") != "1"


class FetchError(Exception):
    """A file that did not come; ``kind`` says what the supervisor can do about it."""

    def __init__(self, kind: str, message: str, retry_after: float = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after


def answer(value: dict[str, Any]) -> None:
    with _PRINT:
        print(json.dumps(value), flush=True)


def retry_after(response: httpx2.Response) -> float:
    """Return how many seconds a busy server asks to wait; 0 when it does not say."""
    limit = parse_ratelimit_headers(response.headers)
    if response.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    with contextlib.suppress(ValueError):
        return float(response.headers.get("Retry-After", "0"))
    return 0.0


def judge(response: httpx2.Response) -> None:
    """Turn an answer that is no file into a failure, before the library waits on its own account."""
    # Without the path, which is long on a content host and says nothing.
    status, where = response.status_code, response.request.url.netloc.decode()
    if status in _BUSY:
        raise FetchError("busy", f"{where} answered {status}", retry_after(response))
    if status in (401, 403):
        code = response.headers.get("X-Error-Code", "")
        if response.request.url.query and not code:
            # A signed address of a content host, which is good for a while: the next try gets a fresh one.
            raise FetchError("network", f"{where} answered {status} to a signed address")
        raise FetchError("denied", f"{where} answered {status}{f' ({code})' if code else ''}")
    if status in (404, 410):
        raise FetchError("gone", f"{where} answered {status}")


def make_client() -> httpx2.Client:
    """Return the library's HTTP client with our judgement of answers; every read has a limit."""
    timeout = httpx2.Timeout(float(os.environ["HF_HUB_DOWNLOAD_TIMEOUT"]))
    return httpx2.Client(event_hooks={"response": [judge]}, follow_redirects=True, timeout=timeout)


def origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


class Limited(io.BufferedRandom):
    """A part that takes no more bytes than its file has: a server that never ends must not fill the disk."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(io.FileIO(path, "r+b"))
        self._size = size

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > self._size:
            raise FetchError("wrong", f"more came than the {self._size} bytes that were promised")
        return super().write(data)


def fetch_bytes(url: str, headers: dict[str, str], part: Path, size: int) -> None:
    """Fetch a file's bytes from where its part ends."""
    start = part.stat().st_size if part.exists() else 0
    if start > size:
        start = 0
    part.touch()
    try:
        with Limited(part, size) as stream:
            stream.truncate(start)
            stream.seek(start)
            if start < size or size == 0:
                # Without its own idea of the size, the library takes files of any size over plain HTTP.
                http_get(url, stream, resume_size=start, headers={**headers, "accept-encoding": "identity"})
    except FetchError as failure:
        if failure.kind == "wrong":
            part.unlink()
        raise
    if (got := part.stat().st_size) < size:
        raise FetchError("network", f"the connection ended after {got} of {size} bytes")


def fetch_from_hub(order: dict[str, Any], part: Path) -> tuple[Path, str]:
    """Fetch a file from the hub; return where its bytes are, and the transport that brought them."""
    url, size = order["url"], order["size"]
    token = bool(os.environ.get("HF_TOKEN_PATH"))
    found = get_hf_file_metadata(url, token=token)
    if found.commit_hash and found.commit_hash != order["revision"]:
        raise FetchError("gone", f"{url} is of commit {found.commit_hash}, not {order['revision']}")
    if found.size is not None and found.size != size:
        raise FetchError("wrong", f"{url} has {found.size} bytes, {size} were promised")
    headers = build_hf_headers(token=token)
    if XET and found.xet_file_data is not None:
        # What that transport leaves behind may have holes, so nothing goes on from it.
        part = part.with_name(f"{part.name}.xet")
        part.unlink(missing_ok=True)
        xet_get(incomplete_path=part, xet_file_data=found.xet_file_data, headers=headers, expected_size=size)
        if (got := part.stat().st_size) != size:
            raise FetchError("network", f"{got} of {size} bytes came")
        return part, "xet"
    if origin(found.location) != origin(url):
        # A signed address of a content host: the token is not for it.
        headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    fetch_bytes(found.location, headers, part, size)
    return part, "http"


def classify(error: BaseException) -> FetchError:
    """Return the failure that an exception of the library, the network or the disk means."""
    if isinstance(error, FetchError):
        return error
    text = _QUERY.sub(r"\1", str(error)).strip().splitlines()
    message = f"{type(error).__name__}: {text[0] if text else 'no more is known'}"
    if isinstance(error, LocalTokenNotFoundError):
        return FetchError("denied", f"{os.environ['HF_TOKEN_PATH']} holds no token")
    if isinstance(error, httpx2.RequestError):
        # Which machine it was is not in its text.
        with contextlib.suppress(RuntimeError):
            message = f"{error.request.url.netloc.decode()}: {message}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError("disk_full", message)
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO):
        return FetchError("disk", message)
    if isinstance(error, httpx2.TooManyRedirects):
        return FetchError("gone", f"{message}: the server sends its clients round in a circle")
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 416:
        return FetchError("wrong", message)
    if isinstance(error, (KeyError, TypeError, AttributeError, NameError, IndexError)):
        return FetchError("defect", message)
    return FetchError("network", message)


def verify(order: dict[str, Any], part: Path) -> Sums:
    """Hash what is on the disk.

    :raises FetchError: when it is not what the listing says; the part is removed, or it would be gone on with.
    """
    beat = [time.monotonic()]

    def tick() -> None:
        if time.monotonic() - beat[0] > 1:
            beat[0] = time.monotonic()
            answer({"alive": True})

    sums = hash_file(part, git=bool(order["git_sha1"]), tick=tick)
    for name, have in (("sha256", sums.sha256), ("git_sha1", sums.git_sha1)):
        if order[name] and order[name] != have:
            part.unlink()
            raise FetchError("wrong", f"its {name.replace('_', ' ')} is {have}, not {order[name]}")
    return sums


def settle(part: Path, target: Path) -> None:
    """Have the bytes on the disk for good, then give the file its place among the verified ones."""
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.chmod(0o444)
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)


def carry_out(order: dict[str, Any]) -> dict[str, Any]:
    if order["kind"] == "state":
        return {"state": peer_state(order["url"])}
    part, target, transport = Path(order["part"]), Path(order["target"]), "http"
    part.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        # An earlier worker had it all, and ended before it could say so.
        part = target
    elif order["kind"] == "hub":
        part, transport = fetch_from_hub(order, part)
    else:
        try:
            fetch_bytes(order["url"], {}, part, order["size"])
        except FetchError as failure:
            if order["kind"] == "peer" and failure.kind in ("gone", "busy"):
                raise FetchError("absent", str(failure)) from failure
            raise
    sums = verify(order, part)
    if part != target:
        settle(part, target)
    return {"sha256": sums.sha256, "stamp": stamp(target), "transport": transport}


def peer_state(url: str) -> dict[str, Any]:
    """Return what a peer says of its own fetch; an empty mapping when it says nothing."""
    with contextlib.suppress(FetchError, httpx2.HTTPError, ValueError):
        state = get_session().get(url).json()
        if isinstance(state, dict):
            return state
    return {}


def serve(orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    while True:
        order = orders.get()
        try:
            result = {"ok": True, **carry_out(order)}
        except Exception as error:
            failure = classify(error)
            message = _QUERY.sub(r"\1", str(failure))
            result = {"ok": False, "kind": failure.kind, "message": message, "retry_after": failure.retry_after}
        answer({"id": order["id"], **result})


def main() -> None:
    """Serve until the supervisor closes the pipe; then end at once, whatever hangs."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    set_client_factory(make_client)
    constants.DOWNLOAD_CHUNK_SIZE = _BLOCK
    httpcore2.HTTP11Connection.READ_NUM_BYTES = _RECEIVE
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for _ in range(int(sys.argv[1])):
        threading.Thread(target=serve, args=(orders,), daemon=True).start()
    answer({"alive": True})
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
