"""The served node as the fault tests see it: its two replicas, their processes, the access log and its clients."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nodes import Node, Play

from .streaming import Background, Client, Load

ACCESS_LOG = "/var/log/nginx/access.log"
STATE = "/var/lib/gpu-node"
# A start takes 25 s on an idle machine; two at once on a machine with other work take several times that.
START_S = 300
# Short, so that tests of the prober do not wait long; they are no part of a release.
OVERRIDES = {"balancer_address": "0.0.0.0", "prober_interval": 2, "prober_stall": 10}
# One GET from the node itself to a replica, past the balancer: status and body.
DIRECT = """
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(sys.argv[1], timeout=10)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, answer.read().decode())
"""


def wait_until(what: str, happened: Callable[[], object], timeout_s: float, every_s: float = 0.5) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(every_s)


@dataclass(frozen=True)
class Process:
    """A process on the node that no later one of the same number is taken for."""

    pid: int
    started: str


class Site:
    """The served node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._sessions: dict[int, str] = {}

    # -- the node's command and units ---------------------------------------------------------------------------------

    def converge(self, **overrides: Any) -> Play:
        return self.node.converge(extra={"serving_plan_overrides": {**OVERRIDES, **overrides}})

    def status(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.node.ssh("gpu-node status --json"))[index]
        return row

    def out(self, index: int) -> list[str]:
        reasons: list[str] = self.status(index)["out"]
        return reasons

    def serves(self, index: int) -> bool:
        row = self.status(index)
        return (row["state"], row["out"]) == ("active", [])

    def wait_serving(self, index: int) -> None:
        """In, and no nginx process is left that would send its requests elsewhere."""
        wait_until(f"replica {index} serves again", lambda: self.serves(index), START_S, every_s=1)
        serving = sum(self.serves(one) for one in (0, 1))
        wait_until(
            "nginx takes it over",
            lambda: all(self.client.ask("/health").json()["replicas"] == serving for _ in range(8)),
            20,
        )

    def wait_out(self, index: int, reason: str) -> None:
        """Out for that one reason, and no nginx process is left that would still send it a request."""
        wait_until(f"replica {index} goes out: {reason}", lambda: self.out(index) == [reason], 60)
        wait_until(
            "nginx takes it over",
            lambda: all(self.client.ask("/health").json()["replicas"] == 1 for _ in range(8)),
            20,
        )

    def all_serve(self) -> None:
        """Both replicas in, whatever an earlier test left behind."""
        for index in (0, 1):
            row = self.status(index)
            if row["state"] not in ("active", "activating", "auto-restart"):
                self.node.ssh(f"systemctl reset-failed {row['unit']}; systemctl start --no-block {row['unit']}")
            if "operator" in row["out"]:
                self.node.ssh(f"gpu-node undrain {index}")
        for index in (0, 1):
            self.wait_serving(index)
            # Each deliberate failure counts as a start; together they are no series that has to end.
            self.node.ssh(f"systemctl reset-failed {self.unit(index)}")

    def stop(self, index: int) -> None:
        self.node.ssh(f"systemctl stop {self.unit(index)}; systemctl reset-failed {self.unit(index)}", timeout=300)

    @staticmethod
    def unit(index: int) -> str:
        return f"vllm-replica@{index}.service"

    def release(self, index: int) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.node.ssh(f"cat {STATE}/replicas/{index}/current/release.json"))
        return value

    # -- journals -----------------------------------------------------------------------------------------------------

    def now(self) -> str:
        """A moment for `journal`. The journal counts whole entries, so the clock is the node's."""
        return self.node.ssh("date +@%s.%6N").strip()

    def journal(self, index: int, since: str) -> str:
        return self.node.ssh(f"journalctl --sync; journalctl -q --no-pager -o cat -u {self.unit(index)} -S {since}")

    def wait_for_journal(self, index: int, since: str, text: str, timeout_s: float) -> None:
        wait_until(f"replica {index}'s journal says {text!r}", lambda: text in self.journal(index, since), timeout_s)

    # -- processes ----------------------------------------------------------------------------------------------------

    def process(self, pid: int) -> Process | None:
        done = self.node.run(f"cut -d')' -f2- /proc/{pid}/stat")
        return Process(pid, done.stdout.split()[19]) if done.returncode == 0 and done.stdout.split()[0] != "Z" else None

    def _of(self, pid: int) -> Process:
        process = self.process(pid)
        assert process is not None, f"no process {pid}"
        return process

    def monitor(self, index: int) -> Process:
        """conmon, the unit's main process."""
        return self._of(int(self.node.ssh(f"systemctl show --value -p MainPID {self.unit(index)}")))

    def server(self, index: int) -> Process:
        """The engine's main process: the HTTP server."""
        return self._of(int(self.node.ssh(f"podman container inspect -f '{{{{.State.Pid}}}}' vllm-replica-{index}")))

    def core(self, index: int) -> Process:
        """The process that computes. It names itself, but not always, and is then what multiprocessing calls it."""
        names = shlex.quote("VLLM::EngineCore|spawn_main")
        return self._of(int(self.node.ssh(f"pgrep -P {self.server(index).pid} -f {names}")))

    def alive(self, process: Process) -> bool:
        return self.process(process.pid) == process

    def signal(self, name: str, process: Process) -> float:
        """Send it; the time by which it was sent."""
        return float(self.node.ssh(f"kill -{name} {process.pid} && date +%s.%N"))

    def direct(self, index: int, path: str) -> tuple[int, str]:
        status, _, body = self.node.ssh(f"python3 - http://127.0.0.1:{self.port(index)}{path}", stdin=DIRECT).partition(
            " "
        )
        return int(status), body

    # -- clients ------------------------------------------------------------------------------------------------------

    @cached_property
    def client(self) -> Client:
        return self.new_client()

    def new_client(self, *, keep: bool = False) -> Client:
        return Client(self.node.http_port, self.node.client_key, keep=keep)

    def load(self) -> Load:
        return Load(self.node.http_port, self.node.client_key)

    def background(self, kind: str, tokens: int, index: int) -> Background:
        """A completion that runs on that replica while the test goes on."""
        return Background(Client(self.node.http_port, self.node.client_key), kind, tokens, self.session(index))

    @staticmethod
    def port(index: int) -> int:
        return 8000 + index

    @staticmethod
    def upstream(index: int) -> str:
        return f"127.0.0.1:{Site.port(index)}"

    def session(self, index: int) -> str:
        """An X-Session-ID whose requests go to that replica, when it is in. Both have to be in."""
        number = 0
        while index not in self._sessions:
            name = f"session-{number}"
            upstream = self.row(self.client.complete(1, session=name).request_id)["upstream"]
            self._sessions.setdefault(int(upstream.rpartition(":")[2]) - 8000, name)
            number += 1
            assert number < 64, f"64 sessions, and none goes to replica {index}"
        return self._sessions[index]

    def served_by(self, session: str) -> str:
        """The upstream that a request of the session gets now."""
        answer = self.client.complete(1, session=session, timeout_s=60)
        assert answer.status == 200, answer
        return str(self.row(answer.request_id)["upstream"])

    # -- the access log -----------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """A place in the access log; `rows` gives what came after it."""
        return int(self.node.ssh(f"stat -c %s {ACCESS_LOG}"))

    def rows(self, mark: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.node.ssh(f"tail -c +{mark + 1} {ACCESS_LOG}").splitlines()]

    def row(self, request_id: str) -> dict[str, Any]:
        """What nginx noted about the request; it does so when the request has ended."""
        deadline = time.monotonic() + 5
        while True:
            done = self.node.run(f"tail -n 400 {ACCESS_LOG} | grep -F '\"{request_id}\"'")
            if done.returncode == 0:
                row: dict[str, Any] = json.loads(done.stdout)
                return row
            assert time.monotonic() < deadline, f"no line for request {request_id!r} in {ACCESS_LOG}"
            time.sleep(0.1)
