"""A fleet as its tests see it: the playbooks that work on it, what its nodes say, and its clients."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fleet as machines
import yaml
from fleet import FleetNode
from fleet_load import Load, Outcome, Target, ask
from nodes import Play, Playbook
from testhost import ROOT, STATE

# Several rollouts on a busy machine of two CPUs.
PLAY_TIMEOUT_S = 1800
Releases = dict[str, list[str]]


class Fleet:
    """Three nodes behind HAProxy.

    `changes` is what the settings differ by from the inventory's, `variables` what else was rolled out.
    """

    def __init__(self) -> None:
        self.nodes: list[FleetNode] = [machines.node(number) for number in (1, 2, 3)]
        self.changes: dict[str, Any] = {}
        self.variables: dict[str, Any] = {}
        self._sequences = 16

    def take_over(self) -> None:
        """Begin with what the fleet serves, which may be from an earlier run."""
        self._sequences = max(self.sequences())
        self.changes = {"max_num_seqs": self._sequences}

    def another(self) -> dict[str, int]:
        """A setting as no release had it yet."""
        self._sequences += 1
        return {"max_num_seqs": self._sequences}

    # -- playbooks ----------------------------------------------------------------------------------------------------

    def start(
        self,
        playbook: str = "playbooks/rollout.yml",
        *args: str,
        changes: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Playbook:
        extra = {"fleet_changes": {**self.changes, **(changes or {})}, **self.variables, **variables}
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

    def sequences(self) -> set[int]:
        """The setting that `another` changes, as the replicas serve it."""
        return {row["engine_args"]["max-num-seqs"] for rows in self.serving().values() for row in rows}

    def claimed(self, name: str, playbook: Playbook) -> str:
        """The rollout that this controller has on a node; empty when it has none."""
        record = self.wanted()[name]
        return str(record["rollout"]) if record["controller"]["pid"] == playbook.process.pid else ""

    def step(self, one: FleetNode, index: int) -> str:
        """The step at which a replica's switch is; empty when none is under way."""
        text = one.run(f"cat /var/lib/gpu-node/replicas/{index}/switch.json").stdout
        journal = json.loads(text or "{}")
        return str(journal["step"]) if journal and journal["outcome"] is None else ""

    def unreachable(self, one: FleetNode) -> None:
        """No SSH any more, and the connections that are there cut; it serves on."""
        one.docker("sh", "-c", "systemctl stop ssh.service; pkill -x sshd || true")

    def reachable(self, one: FleetNode) -> None:
        one.docker("systemctl", "start", "ssh.service")

    def inventory_overrides(self) -> dict[str, Any]:
        """The settings of the scenario's inventory."""
        file = ROOT / "molecule" / "fleet" / "inventory" / "group_vars" / "gpu_nodes" / "main.yml"
        found: dict[str, Any] = yaml.safe_load(file.read_text())["fleet_overrides"]
        return found

    def front_backend(self) -> str:
        """What playbooks/targets.yml wrote for HAProxy."""
        written = sorted((self.folder / "targets").glob("*haproxy*"))
        assert written, "playbooks/targets.yml has written nothing for HAProxy"
        return written[0].read_text()

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
        targets = [Target("front", machines.front_address(), machines.FRONT_PORT, clients=2)]
        if direct:
            targets += [Target(one.name, one.address, 8080, pause_s=1.0) for one in self.nodes]
        return Load(targets, self.key)

    def long_request(self, one: FleetNode, tokens: int) -> Long:
        return Long(Target(one.name, one.address, 8080), self.key, tokens)


class Long:
    """A stream that runs while the test goes on."""

    def __init__(self, target: Target, key: str, tokens: int) -> None:
        self.outcomes: list[Outcome] = []
        self._thread = threading.Thread(target=self._ask, args=(target, key, tokens), daemon=True)
        self._thread.start()

    def _ask(self, target: Target, key: str, tokens: int) -> None:
        self.outcomes.append(ask(target, key, "stream", tokens))

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def end(self, timeout_s: float = 60) -> Outcome:
        self._thread.join(timeout_s)
        assert not self.running, f"still running after {timeout_s:.0f} s"
        return self.outcomes[0]


def kill(playbook: Playbook) -> None:
    """SIGKILL for a controller and all that it started here, as when its machine is lost."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(playbook.process.pid, signal.SIGKILL)
    playbook.process.wait(10)


def words(play: Play) -> str:
    """The output in one line: Ansible wraps what it prints."""
    return " ".join(play.output.split())


def wait_for(what: str, check: Any, timeout_s: float = 900, every_s: float = 0.2) -> Any:
    """The first true answer of `check`."""
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(every_s)
    return found
