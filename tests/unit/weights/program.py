"""The node's fetching program as a real process, on a node's disk made of a folder."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import (
    MANIFEST,
    SHORT,
    digest,
    parse_manifest,
)

from tests.doubles.hub.server import Hub, Repository

ROOT = Path(__file__).parents[3]
SOURCES = (ROOT / "roles/model_weights/files", ROOT / "collections")
NAME = "tiny"


@dataclass
class Ran:
    """What a run of the program said; ``last`` is its last line."""

    code: int
    text: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def last(self) -> str:
        return self.lines[-1] if self.lines else ""


class Running:
    """The program at work."""

    def __init__(self, request: Path, log: Path) -> None:
        # -S: the supervisor gets by with the standard library, as on a node
        argv = [sys.executable, "-S", "-P", "-m", "gpu_node_weights", "fetch", str(request)]
        self.began = time.monotonic()
        self.log = log
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
            # out of the role's folder, which is copied to nodes as it is
            "PYTHONPYCACHEPREFIX": str(ROOT / ".pytest_cache/bytecode"),
        }
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def workers(self) -> list[int]:
        """The process ids of its workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def wait_for(self, ready: Callable[[], bool], what: str, seconds: float = 15) -> None:
        until = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.text()}"
            assert time.monotonic() < until, f"no {what} within {seconds} s:\n{self.text()}"
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self, seconds: float = 40) -> Ran:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not ended after {seconds} s:\n{self.text()}") from None
        return Ran(code, self.text(), time.monotonic() - self.began)


class Node:
    """A node's disk with artifacts, and requests as the play writes them."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.folder = folder
        self.hub = hub
        self.root = folder / "artifacts"
        self.runs = 0
        folder.mkdir(exist_ok=True)

    def request(self, repository: Repository | None = None, **changes: Any) -> Path:
        """Write a request; from a repository of the hub when one is given."""
        told: dict[str, Any] = {
            "schema": 1,
            "root": str(self.root),
            "name": NAME,
            "source": {"type": "hub"},
            "digest": "",
            "files": {},
            "upstreams": [],
            "endpoint": self.hub.url,
            "token_file": "",
            "python": sys.executable,
            "transports": ["xet", "http"],
            "streams": 4,
            "processes": 1,
            "stall_s": 1.5,
            "tries": 3,
            "minimum_rate": 2000,
            "report_s": 0.2,
        }
        if repository is not None:
            told["source"] |= {"repository": repository.name, "revision": repository.revision}
            told["files"] = repository.wanted()
            told["digest"] = self.digest_of(repository)
        told |= changes
        told["key"] = digest(told["source"])[:SHORT]
        path = self.folder / f"request-{told['key']}.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(told), encoding="utf-8")
        return path

    @staticmethod
    def digest_of(repository: Repository) -> str:
        return digest({path: {"size": e.size, "sha256": e.sha256} for path, e in sorted(repository.entries.items())})

    def start(self, request: Path) -> Running:
        self.runs += 1
        return Running(request, self.folder / f"run-{self.runs}.log")

    def fetch(self, request: Path, seconds: float = 40) -> Ran:
        return self.start(request).end(seconds)

    @property
    def base(self) -> Path:
        return self.root / NAME

    def complete(self) -> list[Path]:
        """The folders that a replica could be pointed at."""
        return sorted(
            path for path in (self.base.iterdir() if self.base.is_dir() else ()) if len(path.name) == SHORT
            and not path.name.startswith(".")
        )  # fmt: skip

    def assert_complete(self, repository: Repository, folder: Path | None = None) -> Path:
        """The artifact is there, byte for byte and nothing else, read-only, and nothing unfinished is left of it."""
        folder = folder or self.base / self.digest_of(repository)[:SHORT]
        assert folder in self.complete()
        manifest = parse_manifest((folder / MANIFEST).read_text())
        assert set(manifest["files"]) == set(repository.entries)
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        assert set(found) == {*repository.entries, MANIFEST}
        for path, entry in repository.entries.items():
            assert found[path].read_bytes() == repository.content(path), path
            assert manifest["files"][path] == {"size": entry.size, "sha256": entry.sha256}
        for item in (folder, *folder.rglob("*")):
            assert not stat.S_IMODE(item.stat().st_mode) & 0o222, item
        assert not list((self.base / ".incoming").glob("*/files/*"))
        assert not list((self.base / ".incoming").glob("*/parts/**/*.part*"))
        return folder

    def verified(self) -> set[str]:
        """The files of unfinished artifacts that are verified."""
        found = set()
        for folder in (self.base / ".incoming").glob("*/files"):
            found |= {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        return {path for path in found if not path.startswith(".")}

    def begun(self) -> int:
        """The bytes of files that are not verified yet."""
        return sum(path.stat().st_size for path in (self.base / ".incoming").glob("*/parts/**/*.part"))


def assert_refused(ran: Ran, *words: str) -> None:
    """It ended with one clear error, in one line, the last."""
    assert ran.code == 1, ran.text
    assert ran.last.startswith("error: "), ran.text
    assert sum(line.startswith("error: ") for line in ran.lines) == 1, ran.text
    assert "Traceback" not in ran.text
    for word in words:
        assert word in ran.last, ran.text


def assert_done(ran: Ran, *words: str) -> None:
    assert ran.code == 0, ran.text
    assert ran.last.startswith(f"complete: {NAME} "), ran.text
    assert "Traceback" not in ran.text
    for word in words:
        assert word in ran.text, ran.text
