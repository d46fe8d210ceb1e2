"""A node that is a virtual machine, for tests that need a kernel, boots or NUMA nodes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import vm
from nodes import Node, NodeError
from testhost import STATE


class VirtualMachine(Node):
    """A node that is no container."""

    @property
    def folder(self) -> Path:
        return vm.VMS / self.container

    def up(self) -> None:
        self._call("up", self.container, "--ssh-port", str(self.ssh_port))
        hostvars = {
            "ansible_host": "127.0.0.1",
            "ansible_port": self.ssh_port,
            "ansible_ssh_common_args": f"-F '{STATE / 'ssh_config'}'",
            "ansible_ssh_timeout": 60,
        }
        self.inventory.write_text(json.dumps({"gpu_nodes": {"hosts": {"gpu-node": hostvars}}}))

    def down(self) -> None:
        self._call("down", self.container)

    @staticmethod
    def _call(*args: str) -> None:
        argv = [sys.executable, str(Path(vm.__file__)), *args]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise NodeError(f"vm.py {' '.join(args)}: {done.stderr.strip()}")
