#!/usr/bin/env python3
"""Several nodes with a stand-in for the engine, and HAProxy in front of them.

Nodes start with their packages and the engine's images, so that a fleet is there in seconds; all else on them is the
product's. They have addresses of their own on a network of Docker's, and no ports on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import image_cache
import testhost
from nodes import ANSIBLE_PLAYBOOK, SSH_CONFIG, Node, NodeError, Playbook, call_testhost
from testhost import ROOT, STATE, docker

PREFIX = "gpu-node-fleet"
FOLDER = STATE / "fleet"
# The range for benchmarks of networks: no other network of Docker's is in it.
SUBNET = "198.18.99"
PACKAGES = ("podman", "crun", "nginx", "haproxy")
BAKE = f"""\
printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d && chmod 0755 /usr/sbin/policy-rc.d
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends {" ".join(PACKAGES)} >/dev/null
rm /usr/sbin/policy-rc.d
systemctl disable --quiet nginx.service haproxy.service
rm -f /etc/nginx/sites-enabled/default
"""
# What Python needs to be a server, as one layer.
ENGINE_FILES = r"""cd /
libraries=$(ldd /usr/bin/python3.11 /usr/bin/env /usr/bin/dash | grep -o '/lib[^ ]*' | sort -u)
files=$(for one in $libraries; do echo "usr$one"; readlink -f "$one" | cut -c2-; done | sort -u)
tar -cf - --exclude=test --exclude=idlelib --exclude=lib2to3 --exclude=ensurepip --exclude=tkinter --exclude=asyncio \
    --exclude='config-3.11*' --exclude=pydoc_data --exclude=unittest \
    bin lib lib64 usr/bin/python3 usr/bin/python3.11 usr/bin/env usr/bin/dash usr/bin/sh usr/lib/python3.11 \
    etc/passwd etc/group $files
"""
ENGINE = ROOT / "tests" / "doubles" / "engine" / "vllm"
IMAGE = "localhost/gpu-node/stand-in"
# Two of them, for a change of images.
TAGS = ("one", "two")
FRONT = f"{PREFIX}-front"
FRONT_SOCKET = "/run/haproxy/admin.sock"
FRONT_PORT = 8080
FRONT_CONFIG = f"""\
global
    stats socket {FRONT_SOCKET} mode 600 level admin
    maxconn 4096
    hard-stop-after 30s
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend clients
    bind :{FRONT_PORT}
    default_backend %s

%s"""
ASK_FRONT = """\
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.argv[2].encode() + b'\\n')
while data := s.recv(65536): sys.stdout.write(data.decode())
"""


@dataclass
class FleetNode(Node):
    """A node of the fleet, reached at its own address."""

    number: int = 0

    @property
    def name(self) -> str:
        """In the inventory."""
        return f"fleet-{self.number}"

    @property
    def address(self) -> str:
        return address(self.number)

    def ssh_argv(self, command: str) -> list[str]:
        return ["ssh", "-F", str(SSH_CONFIG), self.address, command]

    def up(self) -> None:
        volumes = [part for volume in self.volumes for part in ("--volume", volume)]
        call_testhost("up", self.container, "--image", base_image(), *volumes)
        connect(self.container, self.address)
        wait_for_port(self.address, 22)

    def docker(self, *argv: str, stdin: str | None = None, timeout: float = 120) -> str:
        flags = [] if stdin is None else ["-i"]
        return docker("exec", *flags, self.container, *argv, stdin=stdin, timeout=timeout)

    def status(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.ssh("gpu-node status --json"))
        return found


def node(number: int) -> FleetNode:
    return FleetNode(f"{PREFIX}-{number}", 0, 0, (f"{image_cache.CACHE}:{image_cache.MOUNT}:ro",), number=number)


def address(number: int) -> str:
    return f"{SUBNET}.{10 + number}"


def front_address() -> str:
    return f"{SUBNET}.10"


# --- images ---------------------------------------------------------------------------------------------------------


_base = ""


def base_image() -> str:
    """The node image with the packages that every node of the fleet would install."""
    global _base
    if _base:
        return _base
    parent, _ = testhost.ensure_image()
    key = hashlib.sha256(json.dumps([parent, BAKE]).encode()).hexdigest()[:12]
    ref = f"{testhost.IMAGE}-fleet:{key}"
    if not testhost.image_exists(ref):
        with testhost.lock("fleet"):
            if not testhost.image_exists(ref):
                with testhost.step(f"putting {', '.join(PACKAGES)} into the node image"):
                    bake(parent, ref)
    _base = ref
    return ref


def bake(parent: str, ref: str) -> None:
    name = f"{PREFIX}-base"
    testhost.run([testhost.client(), "rm", "-f", "-v", name])
    try:
        docker("run", "--name", name, parent, "sh", "-ec", BAKE, timeout=600)
        docker("commit", "--change", f"LABEL {testhost.LABEL}=image", name, ref, timeout=300)
    finally:
        testhost.run([testhost.client(), "rm", "-f", "-v", name])


def engine_archive() -> Path:
    """The stand-in's images as an archive that Podman loads; the nodes see it in image_cache.MOUNT."""
    key = hashlib.sha256(json.dumps([base_image(), ENGINE_FILES, ENGINE.read_text(), TAGS]).encode()).hexdigest()[:12]
    path = image_cache.CACHE / f"stand-in-{key}.tar"
    if not path.exists():
        image_cache.CACHE.mkdir(parents=True, exist_ok=True)
        for outdated in image_cache.CACHE.glob("stand-in-*"):
            outdated.unlink()
        argv = [testhost.client(), "run", "--rm", base_image(), "sh", "-c", ENGINE_FILES]
        system = subprocess.run(argv, check=True, capture_output=True, timeout=120).stdout
        half = path.with_suffix(".half")
        write_archive(half, system)
        half.replace(path)
    return path


def write_archive(path: Path, system: bytes) -> None:
    """Images in the form of `docker save`, one a tag: the same Python, the engine, and what it is to do."""
    files: dict[str, bytes] = {}
    manifest = []
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    for tag in TAGS:
        told = json.dumps({"kv_tokens": 19328, "image": tag}).encode()
        own = layer({"usr/local/bin/vllm": (ENGINE.read_bytes(), 0o755), "etc/stand-in.json": (told, 0o644)})
        hashes = [hashlib.sha256(data).hexdigest() for data in (system, own)]
        config = {
            "architecture": machine,
            "os": "linux",
            "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE=1"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{one}" for one in hashes]},
        }
        text = json.dumps(config).encode()
        name = f"{hashlib.sha256(text).hexdigest()}.json"
        layers = [f"{one}.tar" for one in hashes]
        files |= {name: text, **dict(zip(layers, (system, own), strict=True))}
        manifest.append({"Config": name, "RepoTags": [f"{IMAGE}:{tag}"], "Layers": layers})
    files["manifest.json"] = json.dumps(manifest).encode()
    path.write_bytes(layer({name: (data, 0o644) for name, data in files.items()}))


def layer(files: dict[str, tuple[bytes, int]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, (data, mode) in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


# --- nodes ----------------------------------------------------------------------------------------------------------


def ensure_network() -> None:
    if testhost.run([testhost.client(), "network", "inspect", PREFIX]).returncode != 0:
        docker("network", "create", "--subnet", f"{SUBNET}.0/24", PREFIX)


def connect(container: str, at: str) -> None:
    """Give the container that address; it keeps it over restarts."""
    template = "{{range $name, $one := .NetworkSettings.Networks}}{{$name}} {{end}}"
    if PREFIX not in docker("inspect", "--format", template, container).split():
        docker("network", "connect", "--ip", at, PREFIX, container)


def wait_for_port(host: str, port: int, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=2):
                return
        except OSError as err:
            if time.monotonic() > deadline:
                raise NodeError(f"{host}:{port} does not answer within {timeout_s:.0f} s: {err}") from err
        time.sleep(0.1)


def start_node(number: int, archive: str) -> None:
    one = node(number)
    one.up()
    one.docker(
        "sh", "-c", f"podman image exists {IMAGE}:{TAGS[-1]} || podman load --quiet --input {archive}", timeout=300
    )


def start_front() -> None:
    call_testhost("up", FRONT, "--image", base_image())
    connect(FRONT, front_address())


def up(numbers: Sequence[int]) -> None:
    """Boot the nodes and the one in front of them, all at once."""
    archive = f"{image_cache.MOUNT}/{engine_archive().name}"
    ensure_network()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with testhost.step(f"booting {len(numbers)} nodes and the balancer before them"), ThreadPoolExecutor(4) as pool:
        front = pool.submit(start_front)
        list(pool.map(lambda number: start_node(number, archive), numbers))
        front.result()
    inspect = ["podman", "image", "inspect", "--format", "{{.Digest}}"]
    digests = node(numbers[0]).docker(*inspect, *(f"{IMAGE}:{tag}" for tag in TAGS)).split()
    images = {tag: f"{IMAGE}@{digest}" for tag, digest in zip(TAGS, digests, strict=True)}
    (FOLDER / "images.json").write_text(json.dumps(images))


def down() -> None:
    testhost.ensure_docker()
    listing = docker("ps", "-a", "--filter", f"label={testhost.LABEL}=node", "--format", "{{.Names}}").split()
    with ThreadPoolExecutor(4) as pool:
        names = [name for name in listing if name.startswith(f"{PREFIX}-")]
        list(pool.map(testhost.remove_node, names))
    testhost.run([testhost.client(), "network", "rm", PREFIX])
    testhost.say(f"removed {', '.join(sorted(names)) or 'nothing, there was no fleet'}")


# --- the balancer in front --------------------------------------------------------------------------------------------


def configure_front(backend: str) -> None:
    """Give HAProxy a backend section, below a frontend that sends everything there."""
    name = next(line.split()[1] for line in backend.splitlines() if line.startswith("backend "))
    docker("exec", "-i", FRONT, "sh", "-c", "cat >/etc/haproxy/haproxy.cfg", stdin=FRONT_CONFIG % (name, backend))
    docker("exec", FRONT, "haproxy", "-c", "-q", "-f", "/etc/haproxy/haproxy.cfg")
    docker("exec", FRONT, "systemctl", "reload-or-restart", "haproxy.service")
    wait_for_port(front_address(), FRONT_PORT)


def front_servers() -> dict[str, str]:
    """HAProxy's view: the state of every server by its name, `UP` or `DOWN` with what is said besides."""
    lines = docker("exec", FRONT, "python3", "-c", ASK_FRONT, FRONT_SOCKET, "show stat").splitlines()
    names = lines[0].removeprefix("# ").split(",")
    rows = [dict(zip(names, line.split(","), strict=False)) for line in lines[1:] if line]
    return {row["svname"]: row["status"] for row in rows if row["svname"] not in ("FRONTEND", "BACKEND")}


# --- playbooks --------------------------------------------------------------------------------------------------------


# Every playbook of this process, whether it has ended or not.
started: list[Playbook] = []


def start_playbook(
    playbook: str,
    *args: str,
    inventory: str = "molecule/fleet/inventory/hosts.yml",
    extra: dict[str, Any] | None = None,
    checkout: Path = ROOT,
) -> Playbook:
    """ansible-playbook as an operator of that checkout calls it, as the leader of a process group of its own."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    file, log = (FOLDER / f"{os.getpid()}-{len(started)}.{kind}" for kind in ("json", "log"))
    file.write_text(json.dumps(extra or {}))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(checkout / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_FORCE_COLOR": "0",
        "MOLECULE_PROJECT_DIRECTORY": str(ROOT),
    }
    argv = [ANSIBLE_PLAYBOOK, "-i", str(ROOT / inventory), "-e", f"@{file}", *args, playbook]
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            cwd=checkout,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    started.append(Playbook(process, log))
    return started[-1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="fleet.py", description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("up", help="boot the nodes").add_argument("--nodes", type=int, default=3)
    verbs.add_parser("down", help="remove every node")
    verbs.add_parser("reboot", help="reboot a node").add_argument("container")
    verbs.add_parser("front", help="give the balancer in front a backend").add_argument("file", type=Path)
    options = parser.parse_args()
    try:
        if options.verb == "up":
            up(range(1, options.nodes + 1))
        elif options.verb == "down":
            down()
        elif options.verb == "reboot":
            node(int(options.container.rpartition("-")[2])).reboot()
        else:
            configure_front(options.file.read_text())
    except (testhost.HostError, NodeError) as err:
        print(f"fleet: error: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
