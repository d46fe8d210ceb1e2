"""Runs code that a model wrote: in a container without network, without rights, without any file of this machine."""

from __future__ import annotations

import secrets
import subprocess
from dataclasses import dataclass

CONTAINER = "gpu-node-quality-code"
MEMORY = "512m"
PIDS = 64
LIMIT_S = 20


class SandboxError(Exception):
    """The container itself does not work, so that nothing can be said of any program."""


@dataclass(frozen=True)
class Ran:
    """Whether the program passed its tests, and why not."""

    ok: bool
    why: str = ""


def command(image: str) -> list[str]:
    """The program comes by standard input: not even that is a file that the container could reach."""
    return [
        *("podman", "--events-backend=none", "run", "--rm", "--replace", "--interactive", "--name", CONTAINER),
        *("--pull=never", "--network=none", "--log-driver=none", "--read-only", "--read-only-tmpfs=false"),
        *("--cap-drop=all", "--security-opt=no-new-privileges", "--user=65534:65534", "--ipc=private"),
        *(f"--memory={MEMORY}", f"--memory-swap={MEMORY}", f"--pids-limit={PIDS}", f"--timeout={LIMIT_S}"),
        *("--entrypoint=python3", image, "-I", "-"),
    ]


def program(code: str, tests: str, mark: str) -> str:
    """The code, then its tests, then a mark: a program that ends itself early does not reach it."""
    return f"{code}\n\n{tests}\nprint({mark!r})\n"


def run(image: str, code: str, tests: str) -> Ran:
    """Run a program and its tests. Raises SandboxError."""
    mark = f"passed-{secrets.token_hex(8)}"
    try:
        done = subprocess.run(
            command(image), input=program(code, tests, mark), capture_output=True, text=True, errors="replace",
            timeout=LIMIT_S + 60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        subprocess.run(["podman", "rm", "--force", "--time=0", CONTAINER], capture_output=True, timeout=60, check=False)
        return Ran(False, f"not done within {LIMIT_S + 60} s")
    except FileNotFoundError:
        raise SandboxError("podman is not on this node") from None
    if done.returncode == 0 and done.stdout.splitlines()[-1:] == [mark]:
        return Ran(True)
    if done.returncode in (125, 126, 127):
        raise SandboxError(f"the container does not start: {done.stderr.strip()[-300:]}")
    last = [line for line in done.stderr.splitlines() if line.strip()]
    return Ran(False, last[-1][:200] if last else f"exit {done.returncode}, its tests were not reached")


def prove(image: str) -> None:
    """Raises SandboxError unless a right program passes, a wrong one fails, and there is no way out."""
    if not run(image, "x = 1", "assert x == 1").ok:
        raise SandboxError("a right program does not pass in the container")
    if run(image, "x = 1", "assert x == 2").ok:
        raise SandboxError("a wrong program passes in the container")
    reach = "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.connect(('192.0.2.1', 9))"
    if run(image, reach, "").ok:
        raise SandboxError("a program in the container reaches a network")
    if run(image, "open('/tmp/x', 'w')", "").ok:
        raise SandboxError("a program in the container can write files")
