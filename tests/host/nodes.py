"""Test nodes for the integration tests: boot one, run playbooks against it, look at it over SSH."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import image_cache
import testhost
from testhost import ROOT, STATE

TESTHOST = [sys.executable, str(Path(testhost.__file__))]
SSH_CONFIG = STATE / "ssh_config"
ANSIBLE_PLAYBOOK = str(Path(sys.executable).parent / "ansible-playbook")
RECAP = re.compile(r"^(\S+)\s+: (ok=\d+(?:\s+\w+=\d+)*)\s*$", re.MULTILINE)
# the one host of a test's inventory; the container behind it has another name per test
HOST = "gpu-node"


class NodeError(AssertionError):
    """A command on a node, or a playbook, did not do what the test needs."""


@dataclass(frozen=True)
class Play:
    rc: int
    output: str
    recap: dict[str, dict[str, int]]

    @property
    def changed(self) -> int:
        return sum(counts["changed"] for counts in self.recap.values())

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.output.splitlines()[-lines:])


def parse_recap(output: str) -> dict[str, dict[str, int]]:
    """Counts per host of the last PLAY RECAP; empty when the run did not get that far."""
    _, found, recap = output.rpartition("PLAY RECAP")
    if not found:
        return {}
    return {
        host: {name: int(number) for name, _, number in (pair.partition("=") for pair in counts.split())}
        for host, counts in RECAP.findall(recap)
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call_testhost(*args: str, timeout: float = 900) -> str:
    done = subprocess.run(
        [*TESTHOST, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode != 0:
        raise NodeError(f"testhost.py {' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass
class Playbook:
    """A running ansible-playbook; its output goes to a file that can be read meanwhile."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output():
            if self.process.poll() is not None:
                raise NodeError(f"the playbook ended with {self.process.returncode} before {text!r}:\n{self.output()}")
            if time.monotonic() > deadline:
                raise NodeError(f"{text!r} did not show within {timeout:.0f} s:\n{self.output()[-3000:]}")
            time.sleep(0.2)

    def finish(self, timeout: float) -> Play:
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise NodeError(f"the playbook did not end within {timeout:.0f} s:\n{self.output()[-3000:]}") from None
        return Play(rc, self.output(), parse_recap(self.output()))


@dataclass
class Node:
    container: str
    ssh_port: int
    http_port: int
    volumes: Sequence[str] = ()
    runs: int = field(default=0)

    @property
    def folder(self) -> Path:
        return STATE / "nodes" / self.container

    @property
    def inventory(self) -> Path:
        return self.folder / "hosts.yml"

    @property
    def url(self) -> str:
        """The balancer, from this machine."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def client_key(self) -> str:
        return (STATE / "client-key").read_text().strip()

    def up(self) -> None:
        args = ["up", self.container, "--ssh-port", str(self.ssh_port), "--publish", f"{self.http_port}:8080"]
        for volume in self.volumes:
            args += ["--volume", volume]
        call_testhost(*args)
        self.folder.mkdir(parents=True, exist_ok=True)
        hostvars = {
            "ansible_host": "127.0.0.1",
            "ansible_port": self.ssh_port,
            "ansible_ssh_common_args": f"-F '{SSH_CONFIG}'",
        }
        self.inventory.write_text(json.dumps({"gpu_nodes": {"hosts": {HOST: hostvars}}}))

    def down(self) -> None:
        call_testhost("down", self.container)

    def reboot(self) -> None:
        subprocess.run([testhost.client(), "restart", self.container], check=True, capture_output=True, timeout=300)
        self.up()

    def ssh_argv(self, command: str) -> list[str]:
        return ["ssh", "-F", str(SSH_CONFIG), "-p", str(self.ssh_port), "127.0.0.1", command]

    def run(self, command: str, *, timeout: float = 60, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.ssh_argv(command), input=stdin or "", capture_output=True, text=True, timeout=timeout, check=False
        )

    def ssh(self, command: str, *, timeout: float = 60, stdin: str | None = None) -> str:
        """Stdout of a command that must succeed."""
        done = self.run(command, timeout=timeout, stdin=stdin)
        if done.returncode != 0:
            raise NodeError(
                f"`{command}` on {self.container} failed with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def start_playbook(self, *args: str, playbook: str = "site.yml", extra: dict[str, Any] | None = None) -> Playbook:
        """ansible-playbook with the demo's inventory, pointed at this node; extra variables travel in a 0600 file."""
        self.runs += 1
        variables = {"serving_image_archive": image_cache.on_node(), **(extra or {})}
        extra_file = self.folder / "extra.json"
        with os.fdopen(os.open(extra_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(variables, file)
        log = self.folder / f"play-{self.runs}.log"
        argv = [ANSIBLE_PLAYBOOK, "-i", "inventories/demo", "-i", str(self.inventory), "-l", HOST]
        argv += ["-e", f"@{extra_file}", *args, playbook]
        with log.open("wb") as out:
            process = subprocess.Popen(
                argv,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"},
                start_new_session=True,
            )
        return Playbook(process, log)

    def playbook(
        self, *args: str, playbook: str = "site.yml", extra: dict[str, Any] | None = None, timeout: float = 1800
    ) -> Play:
        return self.start_playbook(*args, playbook=playbook, extra=extra).finish(timeout)

    def role(
        self, name: str, *args: str, extra: dict[str, Any] | None = None, tasks_from: Sequence[str] = ("main",)
    ) -> Play:
        """One role alone, by the entry points to call."""
        tasks = [
            {"name": entry, "ansible.builtin.include_role": {"name": f"serving.gpu_node.{name}", "tasks_from": entry}}
            for entry in tasks_from
        ]
        play = {"name": name, "hosts": "gpu_nodes", "gather_facts": False, "become": True, "tasks": tasks}
        playbook = self.folder / f"role-{name}.yml"
        playbook.write_text(json.dumps([play]))
        return self.playbook(*args, playbook=str(playbook), extra=extra)

    def converge(self, *args: str, extra: dict[str, Any] | None = None, timeout: float = 1800) -> Play:
        """site.yml, which must succeed."""
        play = self.playbook(*args, extra=extra, timeout=timeout)
        if play.rc != 0:
            raise NodeError(f"site.yml on {self.container} failed with {play.rc}:\n{play.tail()}")
        return play
