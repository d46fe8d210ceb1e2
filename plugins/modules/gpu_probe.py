#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Start a container with GPUs and see whether it gets exactly those, also after systemd was reloaded."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_probe
short_description: Prove that a container gets exactly the wanted GPUs
version_added: "0.1.0"
description:
  - Starts a container the way a replica is started (Podman, CDI, its own control group within a unit of systemd,
    read-only, without capabilities), with the GPUs O(devices). It lists the device nodes, opens them and starts CUDA,
    then does the same once more after C(systemctl daemon-reload), which takes the GPUs away from containers whose
    device rules systemd does not know.
  - It needs no image. The container's root is a folder with this node's Python in it, made for the moment and removed
    after it. So the driver's libraries are there only when CDI brings them.
  - It allocates nothing on the GPUs, and does not disturb what runs on them.
options:
  devices:
    description: The GPUs, by UUID.
    type: list
    elements: str
    required: true
  nodes:
    description: The device nodes that the container should have, each with its path on the node, as of C(cdi_spec).
    type: dict
    required: true
  cuda:
    description: Whether to start CUDA in the container, and compare the GPUs that it finds.
    type: bool
    default: true
  timeout:
    description: Seconds after which it is given up. A GPU without the persistence daemon takes seconds to wake.
    type: int
    default: 120
attributes:
  check_mode:
    description: Starts nothing, and says so in RV(probed).
    support: full
  diff_mode:
    description: There is nothing to show a difference of.
    support: none
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Prove that a container gets the GPU, with the nodes that cdi_spec returned
  serving.gpu_node.gpu_probe:
    devices: [GPU-01234567-89ab-cdef-0123-456789abcdef]
    nodes: "{{ specification.nodes }}"
  register: probe
"""

RETURN = r"""
probed:
  description: Whether a container was started.
  returned: always
  type: bool
problems:
  description: A sentence for everything that the container did not see, saw too much, or could not use.
  returned: always
  type: list
  elements: str
looks:
  description: What the container saw, before and after the reload, with C(nodes) and C(cuda).
  returned: always
  type: list
  elements: dict
"""

import contextlib
import inspect
import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils import gpu_look
from ansible_collections.serving.gpu_node.plugins.module_utils.cdi import GPU_KIND
from ansible_collections.serving.gpu_node.plugins.module_utils.probe import look_problems, start_problem

NAME = "gpu-node-probe"
# What the driver's libraries ask for beside what Python has loaded; most are empty since glibc 2.34.
GLIBC = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1")
CUDA_LIBRARY = "libcuda.so.1"
MOMENTS = ("at its start", "after systemctl daemon-reload")
# Removing what is left is given this long; a process that waits in the driver cannot be ended at all.
CLEANUP_SECONDS = 30


class ProbeError(Exception):
    """The container gave no answer; the text says why."""


def loaded_libraries(maps: str) -> list[str]:
    """Return the shared libraries of a process and its loader, from the text of its ``maps``."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if path.startswith("/") and ".so" in path.rsplit("/", 1)[-1])


def build_root(root: Path, python: Path, maps: str) -> None:
    """Put this node's Python and the libraries it has loaded into an empty folder."""
    for folder in ("usr/bin", "usr/lib", "usr/lib64", "proc", "sys", "dev", "etc", "tmp", "run", "var"):
        (root / folder).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    libraries = [Path(path) for path in loaded_libraries(maps)]
    folders = {path.parent for path in libraries if path.name.startswith("libc.")}
    libraries += [folder / name for folder in folders for name in GLIBC if (folder / name).exists()]
    stdlib = sysconfig.get_path("platstdlib")
    for library in libraries:
        if str(library).startswith(f"{stdlib}/"):
            continue
        target = root / str(library).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
        if library.name.startswith("ld-"):
            # where programs name it: in /lib64 or /lib, whichever the machine's kind of processor has
            shutil.copy2(library, root / "usr/lib64" / library.name)
            shutil.copy2(library, root / "usr/lib" / library.name)
    target = root / str(python).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(python, target)
    # gives libraries with a longer file name the name that programs ask for
    subprocess.run(["/sbin/ldconfig", "-r", str(root)], check=False, capture_output=True, timeout=CLEANUP_SECONDS)


def podman_command(root: Path, python: Path, devices: list[str], cuda: bool) -> list[str]:
    """Return the command of a container that is confined like a replica's."""
    stdlib = sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
    return [
        "podman", "run", "--interactive", "--rm", "--replace", "--name", NAME, "--cgroups=split", "--pull=never",
        "--log-driver=none", "--network=host", "--ipc=private", "--cap-drop=all", "--security-opt=no-new-privileges",
        "--read-only", "--memory=2g", "--pids-limit=256",
        *(f"--volume={folder}:{folder}:ro" for folder in stdlib),
        *(part for device in devices for part in ("--device", f"{GPU_KIND}={device}")),
        "--rootfs", str(root),
        str(python), "-I", "-S", "-B", "-c", inspect.getsource(gpu_look), *([CUDA_LIBRARY] if cuda else []),
    ]  # fmt: skip


def unit_command(timeout: int) -> list[str]:
    """Return what starts a command in a unit of its own that ends by itself should nobody end it."""
    return [
        "systemd-run", "--quiet", "--wait", "--pipe", "--collect", f"--unit={NAME}",
        "--property=Delegate=yes", "--property=KillMode=mixed", "--property=TimeoutStopSec=15",
        f"--property=RuntimeMaxSec={timeout + CLEANUP_SECONDS}", "--",
    ]  # fmt: skip


def _remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0)


def ask(process: subprocess.Popen[bytes], errors: Path, devices: list[str], deadline: float) -> dict[str, Any]:
    """Have the container look, and return what it says.

    :raises ProbeError: when it ends or does not answer in time.
    """
    if process.stdin is None or process.stdout is None:
        raise ProbeError("the container has no streams")
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"look\n")
        process.stdin.flush()
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([process.stdout], [], [], _remaining(deadline))[0]:
            raise ProbeError(
                "the container did not answer in time: a GPU or the driver hangs; look into the kernel's log"
                " (`journalctl --dmesg`), or give it more time"
            )
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            raise ProbeError(start_problem(errors.read_text(encoding="utf-8", errors="replace"), devices))
        text += part
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ProbeError(f"the container's answer is damaged: {text[:200]!r}") from error


def reload_systemd(deadline: float) -> None:
    """Reload systemd's units, which makes it set the device rules of every unit anew."""
    try:
        done = subprocess.run(
            ["systemctl", "daemon-reload"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_remaining(deadline) + 1,
        )
    except subprocess.TimeoutExpired:
        raise ProbeError("systemctl daemon-reload did not end in time") from None
    if done.returncode:
        raise ProbeError(f"systemctl daemon-reload failed: {done.stderr.strip()[:300]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the container, also one that hangs, and leave nothing of it."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    for command in (
        ["podman", "rm", "--force", "--time", "0", "--ignore", NAME],
        ["systemctl", "stop", f"{NAME}.service"],
    ):
        if process.poll() is None or command[0] == "podman":
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, check=False, capture_output=True, timeout=CLEANUP_SECONDS)
    if process.poll() is None:
        process.kill()
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def running(command: list[str], errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the container for a while."""
    with errors.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def probe(
    devices: list[str], nodes: dict[str, str], cuda: bool, timeout: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Start the container, look, reload systemd, look again; return what it saw and what is wrong."""
    deadline = time.monotonic() + timeout
    looks: list[dict[str, Any]] = []
    problems: list[str] = []
    python = Path(os.path.realpath(sys.executable))
    # not in /run or /tmp, from which a hardened node runs nothing
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir="/var/lib", ignore_cleanup_errors=True) as folder:
        root, errors = Path(folder) / "root", Path(folder) / "errors"
        build_root(root, python, Path("/proc/self/maps").read_text())
        command = unit_command(timeout) + podman_command(root, python, devices, cuda)
        try:
            with running(command, errors) as process:
                for moment in MOMENTS:
                    if looks:
                        reload_systemd(deadline)
                    looks.append(ask(process, errors, devices, deadline))
                    numbers = {path: node_numbers(host) for path, host in nodes.items()}
                    problems += look_problems(looks[-1], numbers, devices, moment)
        except ProbeError as error:
            problems.append(str(error))
    return looks, problems


def node_numbers(path: str) -> list[int]:
    """Return major and minor number of a device node; none when it is not there."""
    try:
        device = os.stat(path).st_rdev
    except OSError:
        return []
    return [os.major(device), os.minor(device)]


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "devices": {"type": "list", "elements": "str", "required": True},
            "nodes": {"type": "dict", "required": True},
            "cuda": {"type": "bool", "default": True},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    params = module.params
    if not params["devices"]:
        module.fail_json(msg="devices is empty: a container without GPUs proves nothing")
    if module.check_mode:
        module.exit_json(changed=False, probed=False, problems=[], looks=[])
    try:
        looks, problems = probe(params["devices"], params["nodes"], params["cuda"], params["timeout"])
    except OSError as error:
        module.fail_json(msg=f"the probe container could not be prepared: {error}")
    module.exit_json(changed=False, probed=True, problems=problems, looks=looks)


if __name__ == "__main__":
    main()
