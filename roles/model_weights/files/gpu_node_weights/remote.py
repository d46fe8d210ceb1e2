"""Fetches the files of a listing over HTTP: gives them to workers one by one, and sees to it that bytes keep coming."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import Stamp, cores
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import STATE_FILE

from gpu_node_weights.errors import WeightsError
from gpu_node_weights.progress import say, size_text, time_text
from gpu_node_weights.request import Request, Wanted

# How long between two questions for a file that a peer does not have yet.
_PEER_WAIT_S = 0.5
_LOOK_S = 0.25
_LONGEST_BACKOFF_S = 30.0
# A server that keeps saying "later" is believed this often for one file before it counts as broken.
_BUSY_TIMES = 20
# Wrong bytes can come from a cache on the way; not again and again.
_WRONG_TIMES = 2
# A worker first reads its libraries, from a cold disk or beside whatever else the node does: until it says that it is
# ready, or for so long, no byte is no stall.
_START_S = 60.0
_NEW_PYTHON = "Remove its environment, and run the play again, which makes it anew"
# What a worker needs of this node's environment: its way out, and where the packages lie.
_PASSED = (
    *("PATH", "LANG", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_FATAL = {
    "denied": "a gated or private repository needs a token of somebody who was let in (model_weights_hub_token)",
    "gone": "look at repository, revision and address of the source",
    "disk_full": "make room, or use another disk for /var/lib/gpu-node/artifacts",
    "defect": "that is a defect of this program; report it with these lines",
    "disk": "look into the kernel's log (journalctl --dmesg)",
}


@dataclass(frozen=True)
class Route:
    """A way that bytes can come; ``upstream`` is a peer's address, empty for the source itself."""

    label: str
    transport: str
    upstream: str = ""


@dataclass
class Task:
    """A file on its way: ``tries`` counts failures without a byte between them, ``reached`` the bytes at the last."""

    place: int
    wanted: Wanted
    not_before: float = 0.0
    tries: int = 0
    busy: int = 0
    wrong: int = 0
    reached: int = 0


@dataclass(frozen=True)
class Done:
    """A verified file: its SHA-256 and the stamp of what was hashed."""

    path: str
    sha256: str
    stamp: Stamp


class Worker:
    """One process that moves files."""

    def __init__(self, request: Request, transport: str, streams: int, home: Path) -> None:
        # No longer than our own patience: the library goes on from where a connection ended.
        limit = str(max(1, int(min(30.0, request.stall_s / 2))))
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        environment |= {
            "HOME": str(home),
            "HF_HOME": str(home),
            "HF_ENDPOINT": request.endpoint,
            "HF_HUB_DISABLE_XET": "0" if transport == "xet" else "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": limit,
            "HF_HUB_ETAG_TIMEOUT": limit,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if request.token_file and not request.upstreams:
            environment["HF_TOKEN_PATH"] = request.token_file
        self.streams = streams
        self.tasks: dict[int, Task | None] = {}
        self.began, self.ready = time.monotonic(), False
        self._rest = b""
        try:
            self._process = subprocess.Popen(
                [request.python, "-P", "-m", "gpu_node_weights.worker", str(streams)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise WeightsError(f"{request.python} cannot be run: {error.strerror}. {_NEW_PYTHON}") from error
        if self._process.stdin is None or self._process.stdout is None:
            raise WeightsError("a worker has no pipes")
        self._orders, self.answers = self._process.stdin, self._process.stdout

    def give(self, number: int, order: dict[str, Any], task: Task | None) -> None:
        self.tasks[number] = task
        # That one died is seen at the end of its answers.
        with contextlib.suppress(BrokenPipeError):
            self._orders.write((json.dumps({"id": number, **order}) + "\n").encode())
            self._orders.flush()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return its answers, and whether more can come."""
        data = os.read(self.answers.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines], bool(data)

    def kill(self) -> None:
        """End it without asking: what it hangs in may never look."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        self.answers.close()


class Remote:
    """One fetch over HTTP, from the source or from peers."""

    def __init__(
        self,
        request: Request,
        incoming: Path,
        wanted: list[Wanted],
        verified: Callable[[Done], None],
        report: Callable[[int], None],
    ) -> None:
        """Prepare a fetch of files.

        :param incoming: the artifact's folder of unfinished things.
        :param verified: is told each file that is verified and in its place.
        :param report: is told several times a second how many bytes of the wanted files are there.
        """
        self._request = request
        self._incoming = incoming
        self._verified, self._report = verified, report
        # Always in the same order, so that what a peer asks for is what the one before it has first.
        ordered = sorted(wanted, key=lambda item: (-item.size, item.path))
        self._pending = [Task(place, item, reached=self._part_bytes(item)) for place, item in enumerate(ordered)]
        self._left = len(wanted)
        self._done_bytes = 0
        self._routes = self._choose_routes(wanted)
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._number = 0
        self._stalls = 0
        # The transports by which files really came.
        self._brought: set[str] = set()
        # Of a peer: when it was asked, when it last was seen to go on, when it last had not yet what was wanted.
        self._peer_asked, self._peer_alive, self._peer_lacked = 0.0, time.monotonic(), 0.0
        self._peer_beat: Any = None

    @property
    def _route(self) -> Route:
        return self._routes[0]

    def _choose_routes(self, wanted: list[Wanted]) -> list[Route]:
        if self._request.upstreams:
            return [Route(f"plain HTTP from {url.split('/')[2]}", "http", url) for url in self._request.upstreams]
        xet = Route("Xet", "xet")
        has_xet = self._request.source["type"] == "hub" and any(item.xet for item in wanted)
        return [xet] * (has_xet and "xet" in self._request.transports) + [Route("plain HTTP", "http")]

    def run(self) -> str:
        """Fetch everything; return the way that finished, for people.

        :raises WeightsError: when it cannot go on; what is verified or begun stays for the next run.
        """
        try:
            self._begin_workers()
            self._watch()
        finally:
            self._end_workers()
        # A hub, or a site's cache of it, may list what it does not give over Xet.
        brought = self._route.transport in self._brought
        return f"over {self._route.label if brought else self._routes[-1].label}"

    def _watch(self) -> None:
        """Give out files and take answers until all are there, looking at every turn whether bytes come."""
        mark, mark_bytes = time.monotonic(), self._bytes()
        while self._left:
            now = time.monotonic()
            self._give(now)
            alive = self._take()
            count = self._bytes()
            now = time.monotonic()
            self._report(count)
            # A little is no progress: a connection that trickles for hours is as bad as one that hangs.
            if alive or self._waiting(now) or count - mark_bytes >= self._least():
                if count - mark_bytes >= self._least():
                    self._stalls = 0
                mark, mark_bytes = now, count
            elif now - mark >= self._request.stall_s:
                self._stall(count - mark_bytes, now - mark)
                mark, mark_bytes = time.monotonic(), self._bytes()

    def _least(self) -> int:
        """Return the bytes that count as progress within the time of a stall."""
        return max(1, int(self._request.minimum_rate * self._request.stall_s))

    def _bytes(self) -> int:
        """Return how many bytes of what was wanted are on the disk."""
        count = self._done_bytes
        for worker in self._workers:
            for task in worker.tasks.values():
                if task:
                    count += self._part_bytes(task.wanted)
        return count + sum(min(task.reached, task.wanted.size) for task in self._pending)

    def _part_bytes(self, wanted: Wanted) -> int:
        part = self._part(wanted)
        for path in (part, part.with_name(f"{part.name}.xet")):
            with contextlib.suppress(FileNotFoundError):
                # One that is written in several places at once is long before it is full.
                found = path.stat()
                return min(found.st_size, found.st_blocks * 512, wanted.size)
        return 0

    def _part(self, wanted: Wanted) -> Path:
        return self._incoming / "parts" / f"{wanted.path}.part"

    def _waiting(self, now: float) -> bool:
        """Tell whether nothing moves because workers start, or a server or a living peer asked to wait."""
        if any(not worker.ready and now - worker.began < _START_S for worker in self._workers):
            return True
        if self._route.upstream:
            # Connections that hang are ended by the worker's own limit, so these two tell enough.
            return now - self._peer_lacked < 2 * _PEER_WAIT_S and now - self._peer_alive < self._request.stall_s
        if any(task for worker in self._workers for task in worker.tasks.values()):
            return False
        return bool(self._pending) and all(task.not_before > now for task in self._pending)

    # --- giving out

    def _begin_workers(self) -> None:
        request = self._request
        count = request.processes or max(1, min(4, cores(), len(self._pending)))
        home = self._incoming / "home"
        home.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            streams = request.streams // count + (number < request.streams % count)
            if streams:
                worker = Worker(request, self._route.transport, streams, home)
                self._workers.append(worker)
                self._selector.register(worker.answers, selectors.EVENT_READ, worker)

    def _end_workers(self) -> None:
        for worker in self._workers:
            self._selector.unregister(worker.answers)
            worker.kill()
            for task in worker.tasks.values():
                if task:
                    self._put_back(task, 0.0)
        self._workers = []

    def _put_back(self, task: Task, delay: float) -> None:
        task.reached = self._part_bytes(task.wanted)
        task.not_before = time.monotonic() + delay
        self._pending.append(task)

    def _give(self, now: float) -> None:
        for worker in self._workers:
            while len(worker.tasks) < worker.streams:
                ready = [task for task in self._pending if task.not_before <= now]
                if not ready:
                    break
                task = min(ready, key=lambda task: task.place)
                self._pending.remove(task)
                self._number += 1
                worker.give(self._number, self._order(task.wanted), task)
        if self._route.upstream and now - self._peer_asked >= min(5.0, self._request.stall_s / 4):
            self._peer_asked = now
            self._number += 1
            order = {"kind": "state", "url": f"{self._route.upstream.rstrip('/')}/{STATE_FILE}"}
            self._workers[0].give(self._number, order, None)

    def _order(self, wanted: Wanted) -> dict[str, Any]:
        source, path = self._request.source, quote(wanted.path)
        from_hub = source["type"] == "hub" and not self._route.upstream
        if self._route.upstream:
            url = f"{self._route.upstream.rstrip('/')}/{path}"
        elif from_hub:
            folder = f"{quote(source['folder'].strip('/'))}/" if source.get("folder") else ""
            url = f"{self._request.endpoint}/{source['repository']}/resolve/{source['revision']}/{folder}{path}"
        else:
            url = f"{source['url'].rstrip('/')}/{path}"
        return {
            "kind": "hub" if from_hub else "peer" if self._route.upstream else "plain",
            "url": url,
            "part": str(self._part(wanted)),
            "target": str(self._incoming / "files" / wanted.path),
            "size": wanted.size,
            "sha256": wanted.sha256,
            "git_sha1": wanted.git_sha1,
            "revision": source["revision"] if from_hub else "",
        }

    # --- taking

    def _take(self) -> bool:
        """Take what workers say within a moment; tell whether one of them said that it is at work."""
        alive = False
        for key, _ in self._selector.select(_LOOK_S):
            worker: Worker = key.data
            if worker not in self._workers:
                # It was ended a moment ago, with all the others; what it did is found on the disk.
                break
            answers, more = worker.read()
            worker.ready = worker.ready or bool(answers)
            # Good news first: bad news may end every worker.
            for answer in sorted(answers, key=lambda answer: not answer.get("ok", True)):
                if "alive" in answer:
                    alive = True
                elif worker in self._workers:
                    task = worker.tasks.pop(answer["id"])
                    alive = self._settle(task, answer) or alive
            if not more and worker in self._workers:
                self._ended(worker)
                break
        return alive

    def _settle(self, task: Task | None, answer: dict[str, Any]) -> bool:
        if task is None:
            self._hear_peer(answer.get("state", {}))
            return False
        if not answer["ok"]:
            self._judge(task, answer)
            return False
        self._left -= 1
        self._brought.add(answer["transport"])
        self._done_bytes += task.wanted.size
        self._verified(Done(task.wanted.path, answer["sha256"], answer["stamp"]))
        # Even an empty file is progress.
        return True

    def _hear_peer(self, state: dict[str, Any]) -> None:
        """A peer whose own fetch goes on is worth waiting for."""
        if state.get("state") == "failed":
            self._change_route(f"that node's own fetch has failed: {state.get('message', '')}")
        elif state.get("state") == "running" and state.get("beat") != self._peer_beat:
            self._peer_alive, self._peer_beat = time.monotonic(), state.get("beat")

    def _judge(self, task: Task, answer: dict[str, Any]) -> None:
        """Decide what a file that did not come means for it, and for the whole."""
        kind, what = answer["kind"], f"{task.wanted.path}: {answer['message']}"
        moved = self._part_bytes(task.wanted) > task.reached
        task.tries = 0 if moved else task.tries + 1
        if kind == "absent":
            task.tries = 0
            self._peer_lacked = time.monotonic()
            self._put_back(task, _PEER_WAIT_S)
        elif kind in _FATAL:
            raise WeightsError(f"{what}; {_FATAL[kind]}, and run again: what is here is kept")
        elif kind == "busy" and task.busy < _BUSY_TIMES:
            task.busy = 0 if moved else task.busy + 1
            delay = answer["retry_after"] or min(_LONGEST_BACKOFF_S, 0.5 * 2**task.busy)
            say(f"{what}; asking again in {time_text(delay)}")
            self._put_back(task, delay)
        elif kind == "wrong":
            task.wrong += 1
            task.tries = 0
            self._put_back(task, 0.0)
            say(f"{what}; thrown away")
            if task.wrong >= _WRONG_TIMES:
                task.wrong = 0
                self._change_route(f"{what}, {_WRONG_TIMES} times over")
        else:
            say(f"{what}; try {task.tries} of {self._request.tries}")
            self._put_back(task, min(_LONGEST_BACKOFF_S, 0.25 * 2**task.tries))
            if task.tries >= self._request.tries:
                task.tries = 0
                self._change_route(what)

    # --- when it does not go on

    def _stall(self, count: int, seconds: float) -> None:
        self._stalls += 1
        slow = f"{size_text(count)} in {time_text(seconds)}"
        if self._stalls >= self._request.tries or (self._route.upstream and not count):
            self._stalls = 0
            self._change_route(f"{slow} are too few (model_weights_stall_seconds, model_weights_minimum_rate)")
        else:
            self._replace(f"stalled: {slow} over {self._route.label}")

    def _ended(self, worker: Worker) -> None:
        """A worker ended by itself: out of memory, or a defect in a library; again and again is no way to go on.

        :raises WeightsError: when it never was ready, so that another one would not be either.
        """
        if not worker.ready:
            raise WeightsError(f"{self._request.python} cannot run the worker; the lines above say why. {_NEW_PYTHON}")
        self._stalls += 1
        if self._stalls >= self._request.tries:
            self._stalls = 0
            self._change_route("its workers end by themselves (journalctl --dmesg says whether memory ran out)")
        else:
            self._replace("a worker ended by itself")

    def _replace(self, why: str) -> None:
        say(f"{self._request.name}: {why}; beginning again from where it was")
        self._end_workers()
        self._begin_workers()

    def _change_route(self, why: str) -> None:
        """Go on another way; tasks in hand are put back first by who calls.

        :raises WeightsError: when there is no other.
        """
        if len(self._routes) == 1:
            raise WeightsError(
                f"{self._request.name} does not come over {self._route.label}: {why}; run again to go on from here"
            )
        old = self._routes.pop(0)
        say(f"{self._request.name}: over {old.label}: {why}; going on over {self._route.label}")
        self._end_workers()
        self._peer_alive, self._peer_beat, self._stalls = time.monotonic(), None, 0
        for task in self._pending:
            part = self._part(task.wanted)
            part.with_name(f"{part.name}.xet").unlink(missing_ok=True)
            task.tries = task.busy = task.wrong = 0
            task.reached = self._part_bytes(task.wanted)
        self._begin_workers()
