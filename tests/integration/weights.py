"""Nodes of one inventory, which fetch artifacts from a test hub on this machine, or from each other."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nodes import ANSIBLE_PLAYBOOK, SSH_CONFIG, Node, NodeError, Play, Playbook
from testhost import ROOT

from tests.doubles.hub.server import Hub, Repository

ARTIFACTS = "/var/lib/gpu-node/artifacts"
SERVER_PORT = 8189


def this_machine(node: Node) -> str:
    """This machine's address on the nodes' network."""
    return str(json.loads(node.ssh("ip -json route show default"))[0]["gateway"])


class Fleet:
    """Nodes n1, n2, ... of one inventory, and the hub that they fetch from."""

    def __init__(self, nodes: Sequence[Node], hub: Hub | None, folder: Path) -> None:
        self.nodes = {f"n{number}": node for number, node in enumerate(nodes, 1)}
        self._hub = hub
        self.folder = folder
        self.runs = 0
        hosts = {
            name: {
                "ansible_host": "127.0.0.1",
                "ansible_port": node.ssh_port,
                "ansible_user": "root",
                "ansible_ssh_common_args": f"-F '{SSH_CONFIG}'",
            }
            for name, node in self.nodes.items()
        }
        self.inventory = folder / "hosts.json"
        self.inventory.write_text(json.dumps({"gpu_nodes": {"hosts": hosts}}))

    @property
    def hub(self) -> Hub:
        assert self._hub, "this fleet has no hub"
        return self._hub

    @property
    def endpoint(self) -> str:
        """The hub as the nodes reach it."""
        return f"http://{this_machine(self.nodes['n1'])}:{self.hub.url.rpartition(':')[2]}"

    def source(self, repository: Repository, **more: Any) -> dict[str, Any]:
        return {"type": "hub", "repository": repository.name, "revision": repository.revision, **more}

    def start(
        self,
        source: dict[str, Any],
        *args: str,
        name: str = "m",
        on: Sequence[str] = ("n1",),
        playbook: str = "",
        serial: int = 0,
        sources: dict[str, dict[str, Any]] | None = None,
        roles: Sequence[str] = ("model_weights",),
        **extra: Any,
    ) -> Playbook:
        """The role on some of the nodes; ``sources`` gives single nodes another source than the others."""
        artifacts = {"model": {"name": name, "source": source}}
        variables = {
            "model_weights_endpoint": self.endpoint,
            "model_weights_stall_seconds": 4,
            **extra,
        }
        play: dict[str, Any] = {
            "name": "weights",
            "hosts": "gpu_nodes",
            "gather_facts": False,
            "become": True,
            "vars": {
                "of_node": {node: {"model": {"name": name, "source": one}} for node, one in (sources or {}).items()},
                "usual": artifacts,
                "serving_plan_result": {
                    "artifacts": "{{ of_node[inventory_hostname] | default(usual) }}",
                    "device": "cpu",
                },
            },
            "roles": [{"role": f"serving.gpu_node.{role}"} for role in roles],
        }
        if serial:
            play["serial"] = serial
        return self.start_play([play], variables, *args, on=on, playbook=playbook)

    def start_play(
        self, plays: list[dict[str, Any]], extra: dict[str, Any], *args: str, on: Sequence[str], playbook: str = ""
    ) -> Playbook:
        """Plays of the test's own, or one of the collection's playbooks."""
        self.runs += 1
        file = self.folder / f"play-{self.runs}.json"
        file.write_text(json.dumps(plays))
        extra_file = self.folder / f"extra-{self.runs}.json"
        with os.fdopen(os.open(extra_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
            json.dump(extra, out)
        return self._start(*args, "-e", f"@{extra_file}", "-l", ",".join(on), playbook or str(file))

    def play(self, plays: list[dict[str, Any]], extra: dict[str, Any], *args: str, on: Sequence[str]) -> Play:
        return self.start_play(plays, extra, *args, on=on).finish(900)

    def _start(self, *args: str) -> Playbook:
        log = self.folder / f"play-{self.runs}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [ANSIBLE_PLAYBOOK, "-i", str(self.inventory), *args],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"},
                start_new_session=True,
            )
        return Playbook(process, log)

    def run(self, source: dict[str, Any], *args: str, **options: Any) -> Play:
        return self.start(source, *args, **options).finish(900)

    def converge(self, source: dict[str, Any], *args: str, **options: Any) -> Play:
        """As ``run``, and it must succeed."""
        play = self.run(source, *args, **options)
        if play.rc != 0:
            raise NodeError(f"the role failed with {play.rc}:\n{play.tail(60)}")
        return play

    def playbook(self, name: str, *args: str, on: Sequence[str] = ("n1",), **extra: Any) -> Play:
        """One of the collection's playbooks."""
        self.runs += 1
        variables = [option for key, value in extra.items() for option in ("-e", json.dumps({key: value}))]
        return self._start(*args, *variables, "-l", ",".join(on), f"playbooks/{name}.yml").finish(900)

    # -- what is on a node

    def ssh(self, node: str, command: str, **options: Any) -> str:
        return self.nodes[node].ssh(command, **options)

    def folder_of(self, node: str, name: str = "m") -> str:
        """The complete artifact of that name that was made last."""
        return self.ssh(node, f"ls -td {ARTIFACTS}/{name}/????????????").split()[0]

    def assert_whole(self, node: str, repository: Repository, name: str = "m") -> None:
        """The newest artifact is byte for byte what the hub has, read-only, and there is nothing else in it."""
        folder = self.folder_of(node, name)
        sums = self.ssh(node, f"cd {folder} && find . -type f ! -name gpu-node-manifest.json -exec sha256sum {{}} +")
        found = {path.removeprefix("./"): digest for digest, path in map(str.split, sums.splitlines())}
        assert found == {path: entry.sha256 for path, entry in repository.entries.items()}
        assert self.ssh(node, f"find {folder} -perm /222").strip() == ""
        assert self.ssh(node, f"ls {ARTIFACTS}/{name}/.incoming").strip() == ""

    def address(self, node: str) -> str:
        return str(json.loads(self.ssh(node, "ip -json route get 192.0.2.1"))[0]["prefsrc"])

    def forget(self, node: str, name: str = "m") -> None:
        self.ssh(node, f"rm -rf {ARTIFACTS}/{name}")

    def wait_on(self, node: str, command: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while self.nodes[node].run(command).returncode != 0:
            assert time.monotonic() < deadline, f"`{command}` on {node}: not within {seconds} s"
            time.sleep(0.2)
