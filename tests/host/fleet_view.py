"""A fleet as its tests see it: the playbooks that work on it, what its nodes say, and its clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fleet as machines
from fleet import FleetNode
from fleet_load import Load, Target
from nodes import Play, Playbook
from testhost import STATE

PLAY_TIMEOUT_S = 900
Releases = dict[str, list[str]]


class Fleet:
    """Three nodes behind HAProxy. `changes` is what the settings differ by from the inventory's."""

    def __init__(self) -> None:
        self.nodes: list[FleetNode] = [machines.node(number) for number in (1, 2, 3)]
        self.changes: dict[str, Any] = {}

    # -- playbooks ----------------------------------------------------------------------------------------------------

    def start(
        self,
        playbook: str = "playbooks/rollout.yml",
        *args: str,
        changes: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Playbook:
        extra = {"fleet_changes": {**self.changes, **(changes or {})}, **variables}
        return machines.start_playbook(playbook, *args, extra=extra)

    def run(self, playbook: str = "playbooks/rollout.yml", *args: str, **variables: Any) -> Play:
        return self.start(playbook, *args, **variables).finish(PLAY_TIMEOUT_S)

    def rollout(self, *args: str, changes: Mapping[str, Any] | None = None, **variables: Any) -> Play:
        """rollout.yml, which must succeed; its changes of settings stay."""
        play = self.run("playbooks/rollout.yml", *args, changes=changes, **variables)
        assert play.rc == 0, play.tail(80)
        self.changes |= changes or {}
        return play

    # -- what is there ------------------------------------------------------------------------------------------------

    def each(self, command: str) -> dict[str, str]:
        """Its output on every node."""
        with ThreadPoolExecutor(3) as pool:
            found = pool.map(lambda one: one.ssh(command, timeout=120), self.nodes)
            return {one.name: text for one, text in zip(self.nodes, found, strict=True)}

    def status(self) -> dict[str, list[dict[str, Any]]]:
        return {name: json.loads(text) for name, text in self.each("gpu-node status --json").items()}

    def releases(self) -> Releases:
        """What every replica serves; each is active, in the balancer, and runs what it points at."""
        found: Releases = {}
        for name, rows in self.status().items():
            assert [(row["state"], row["out"]) for row in rows] == [("active", [])] * 2, rows
            assert [row["running"] for row in rows] == [row["release"] for row in rows], rows
            found[name] = [row["release"] for row in rows]
        return found

    def history(self, count: int = 50) -> dict[str, list[dict[str, Any]]]:
        """Finished switches of every node, the latest last."""
        return {name: json.loads(text) for name, text in self.each(f"gpu-node history --json -n {count}").items()}

    def wanted(self) -> dict[str, Any]:
        return {name: json.loads(text) for name, text in self.each("cat /var/lib/gpu-node/wanted.json").items()}

    def serving(self) -> dict[str, list[dict[str, Any]]]:
        """What every replica's release is made of."""
        texts = self.each("cat /var/lib/gpu-node/replicas/*/current/release.json")
        return {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}

    def claimed(self, name: str, playbook: Playbook) -> str:
        """The rollout that this controller has on a node; empty when it has none."""
        record = self.wanted()[name]
        return str(record["rollout"]) if record["controller"]["pid"] == playbook.process.pid else ""

    def wait_for_front(self, down: Sequence[str] = (), timeout_s: float = 40) -> None:
        """Wait until HAProxy sends to every node but these."""
        deadline = time.monotonic() + timeout_s
        while True:
            servers = machines.front_servers()
            states = {name: state.startswith("UP") for name, state in servers.items()}
            if states == {one.name: one.name not in down for one in self.nodes}:
                return
            assert time.monotonic() < deadline, f"HAProxy says {servers}"
            time.sleep(0.5)

    # -- clients ------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """For what a test writes on this machine."""
        return machines.FOLDER

    @property
    def key(self) -> str:
        return (STATE / "client-key").read_text().strip()

    def load(self, *, direct: bool = True) -> Load:
        """Clients of HAProxy, and of each node's own balancer while a node is never to be without a replica."""
        targets = [Target("front", machines.front_address(), machines.FRONT_PORT, clients=3)]
        if direct:
            targets += [Target(one.name, one.address, 8080, pause_s=0.4) for one in self.nodes]
        return Load(targets, self.key)


def kill(playbook: Playbook) -> None:
    """SIGKILL for a controller and all that it started here, as when its machine is lost."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(playbook.process.pid, signal.SIGKILL)
    playbook.process.wait(10)


def words(play: Play) -> str:
    """The output in one line: Ansible wraps what it prints."""
    return " ".join(play.output.split())


def wait_for(what: str, check: Any, timeout_s: float = 180, every_s: float = 0.2) -> Any:
    """The first true answer of `check`."""
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(every_s)
    return found
