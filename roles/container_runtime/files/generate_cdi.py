#!/usr/bin/python3
"""Write /etc/cdi/nvidia.yaml: what `--device nvidia.com/gpu=UUID` gives a container.

What there is to give is what nvidia-ctk finds. Its specification is not taken as it is:

- No hooks. crun makes a read-only root read-only before it runs them, so they fail, and the container does not start
  (containers/crun issue 667). What they do here is to link the libraries' short names, libcuda.so.1 for example: each
  link that the host has beside a library becomes a mount of its own instead, in a folder that the C library of Debian
  and Ubuntu searches without a cache.
- No sockets of services. A container does not start when a mount is not there, and computing needs none of them.
- No /dev/dri. Computing needs none of it either, and the groups that come with it take a CDI version that Podman before
  5.0 does not read.

The file is replaced in one step, and only by one that names a GPU. It holds JSON, which every reader of YAML reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET = Path("/etc/cdi/nvidia.yaml")
# The newest version that Podman 4.3 reads; nothing in here needs a newer one.
VERSION = "0.5.0"
LIMIT_S = 240
NODES = ["nvidia-ctk", "system", "create-device-nodes", "--control-devices", "--load-kernel-modules"]
GENERATE = ["nvidia-ctk", "cdi", "generate", "--device-name-strategy=uuid", "--format=json"]
MOUNT_OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
# Debian's own driver packages keep libraries in a folder below it.
SEARCHED = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or 'x86_64-linux-gnu'}"


class GenerateError(Exception):
    """One line for the journal."""


def device_nodes(edits: dict[str, Any]) -> list[dict[str, str]]:
    """Return the nodes for computing, each with its path and, where it is another one, that on the host."""
    return [
        {key: str(node[key]) for key in ("path", "hostPath") if node.get(key)}
        for node in edits.get("deviceNodes") or []
        if not str(node["path"]).startswith("/dev/dri/")
    ]


def mounts(edits: dict[str, Any], links: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    """Return the mounts of files, libraries once more under each of their links' names.

    :param links: returns the links on the host, in the folder of a path, that lead to it.
    """
    found = []
    for mount in edits.get("mounts") or []:
        host, inside = str(mount["hostPath"]), str(mount["containerPath"])
        if host.startswith(("/run/", "/var/run/", "/tmp/")):
            continue
        names = [inside]
        if ".so." in os.path.basename(host):
            folder = os.path.dirname(inside)
            if folder not in (SEARCHED, SEARCHED.removeprefix("/usr")):
                folder = SEARCHED
                names.append(f"{folder}/{os.path.basename(inside)}")
            names += [f"{folder}/{os.path.basename(link)}" for link in links(host)]
        found += [
            {"hostPath": host, "containerPath": name, "options": mount.get("options") or MOUNT_OPTIONS}
            for name in names
        ]
    return found


def serving_spec(spec: dict[str, Any], links: Callable[[str], list[str]]) -> dict[str, Any]:
    """Return our specification from the one that nvidia-ctk made.

    :raises GenerateError: when that has no GPU, or has not the form of a specification.
    """
    try:
        common = spec.get("containerEdits") or {}
        devices = []
        for device in spec.get("devices") or []:
            if not str(device["name"]).startswith("GPU-"):
                continue
            edits = device.get("containerEdits") or {}
            own: dict[str, Any] = {"deviceNodes": device_nodes(edits)}
            if files := mounts(edits, links):
                own["mounts"] = files
            devices.append({"name": str(device["name"]), "containerEdits": own})
        result = {
            "cdiVersion": VERSION,
            "kind": "nvidia.com/gpu",
            "devices": devices,
            "containerEdits": {
                "env": [str(item) for item in common.get("env") or []],
                "deviceNodes": device_nodes(common),
                "mounts": mounts(common, links),
            },
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise GenerateError(f"nvidia-ctk made no CDI specification: {error!r}") from None
    if not devices:
        raise GenerateError("nvidia-ctk found no GPU; does `nvidia-smi -L` list any?")
    return result


def links_to(path: str) -> list[str]:
    """Return the symbolic links beside a file that lead to it."""
    folder, real = os.path.dirname(path), os.path.realpath(path)
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    stem = os.path.basename(path).split(".so.")[0]
    found = [f"{folder}/{name}" for name in names if name.startswith(f"{stem}.so")]
    return sorted(link for link in found if os.path.islink(link) and os.path.realpath(link) == real)


def ask(command: list[str]) -> str:
    """Return what a command printed.

    :raises GenerateError: when it fails, hangs or is not there.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise GenerateError(f"{' '.join(command[:3])} did not end in {LIMIT_S} s: a GPU or the driver hangs") from None
    except OSError as error:
        raise GenerateError(f"{command[0]} could not be started: {error.strerror or error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise GenerateError(f"{' '.join(command[:3])} failed with exit status {done.returncode}: {lines[-1][:400]}")
    return done.stdout


def replace(target: Path, text: str) -> bool:
    """Write a file in one step; return whether it is another one than before."""
    try:
        if target.read_text(encoding="utf-8") == text:
            return False
    except (OSError, UnicodeDecodeError):
        pass
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    # Podman reads what ends in .yaml or .json: not this one.
    incoming = target.with_name(f".{target.name}.incoming")
    with incoming.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    incoming.chmod(0o644)
    incoming.replace(target)
    return True


def main() -> None:
    """Generate, and say what was done."""
    try:
        # Nobody else makes the nodes of nvidia-uvm before the first CUDA program runs.
        ask(NODES)
    except GenerateError as error:
        print(f"device nodes: {error}", file=sys.stderr)
    try:
        text = ask(GENERATE)
        spec = serving_spec(json.loads(text), links_to)
    except ValueError as error:
        raise GenerateError(f"nvidia-ctk's answer is no JSON: {error}") from None
    changed = replace(TARGET, json.dumps(spec, indent=1) + "\n")
    names = ", ".join(device["name"] for device in spec["devices"])
    print(f"{TARGET} {'written' if changed else 'unchanged'}: {names}")


if __name__ == "__main__":
    try:
        main()
    except (GenerateError, OSError) as problem:
        sys.exit(f"{TARGET} stays as it is: {problem}")
