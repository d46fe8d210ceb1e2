#!/usr/bin/env python3
"""Test and demo nodes: Docker containers that run systemd as PID 1, sshd and real workloads.

Runs before any virtual environment exists, hence the standard library alone.
Everything it takes from this machine (apt sources, certificates, pip settings) ends in the
image and in .demo/ and never in the repository.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".demo"
IMAGE = "gpu-node-testhost"
LABEL = "gpu-node-testhost"
# systemd 257 (Debian 13) refuses cgroup v1, and the machines that host test nodes may have nothing newer.
NODE_SUITE = "bookworm"
NODE_PACKAGES = ("systemd", "systemd-sysv", "dbus", "openssh-server", "python3", "ca-certificates", "iproute2")
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LOCAL_CA_DIR = Path("/usr/local/share/ca-certificates")
WHEELS_DIR = "/srv/wheels"
DOCKER_PID = Path("/var/run/docker.pid")
CONTAINERD_PID = Path("/var/run/docker/containerd/containerd.pid")
CONTAINER_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")

# What a container cannot do (or what only makes noise in a test); without the masks the state never becomes "running".
MASKED_UNITS = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "dev-hugepages.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-logind.service",
    "systemd-modules-load.service",
    "systemd-remount-fs.service",
    "systemd-sysctl.service",
)
# Host keys belong to a node, not to the image.
SSH_DROPIN = "[Service]\nExecStartPre=\nExecStartPre=/usr/bin/ssh-keygen -A\nExecStartPre=/usr/sbin/sshd -t\n"
# A node's host key is as old as the node, and another node may have had its port before.
SSH_CONFIG = """\
Host *
    User root
    IdentityFile "{key}"
    IdentitiesOnly yes
    BatchMode yes
    ConnectTimeout 10
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    ControlPath /tmp/gpu-node-ssh-%C
    LogLevel ERROR
"""


class HostError(Exception):
    """One line for the person who called."""


def say(text: str) -> None:
    print(f"testhost: {text}", flush=True)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    start = time.monotonic()
    say(f"{what} ...")
    yield
    say(f"{what}: done in {time.monotonic() - start:.0f} s")


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Two test runs of one checkout must not start two engines or build the image twice."""
    ensure_state()
    with (STATE / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another testhost.py to finish with the {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(argv: Sequence[str], *, stdin: str | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def checked(argv: Sequence[str], *, stdin: str | None = None, timeout: float = 120) -> str:
    """Run and return stdout; the error names the command and its last line."""
    try:
        done = run(argv, stdin=stdin, timeout=timeout)
    except subprocess.TimeoutExpired as err:
        raise HostError(f"`{shlex.join(argv)}` gave no result within {timeout:.0f} s") from err
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise HostError(f"`{shlex.join(argv)}` failed with {done.returncode}: {lines[-1]}")
    return done.stdout


def wait_with_progress(process: subprocess.Popen[bytes], log: Path, every_s: float = 10) -> int:
    """Wait for a long process and say now and then how far its log is."""
    start = time.monotonic()
    while True:
        try:
            return process.wait(timeout=every_s)
        except subprocess.TimeoutExpired:
            say(f"  {time.monotonic() - start:.0f} s: {last_line(log)}")


def last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in re.split(r"[\r\n]+", log.read_text(errors="replace")[-4000:]) if line.strip()]
        if lines:
            return lines[-1].strip()[:100]
    return "no output yet"


# --- what this machine is configured with ------------------------------------------------------------------


@dataclass(frozen=True)
class AptSource:
    uri: str
    suite: str
    components: tuple[str, ...]
    trusted: bool = False

    def line(self) -> str:
        return f"deb {'[trusted=yes] ' if self.trusted else ''}{self.uri} {self.suite} {' '.join(self.components)}"


def parse_deb822(text: str) -> list[dict[str, str]]:
    """Stanzas of a .sources file, field names in lower case; continuation lines are joined."""
    stanzas: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    name = ""
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            continue
        if not line.strip():
            if fields:
                stanzas.append(fields)
            fields, name = {}, ""
        elif line[0] in " \t":
            if name:
                fields[name] += " " + line.strip()
        elif ":" in line:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            fields[name] = value.strip()
    return stanzas


def parse_list_line(line: str) -> dict[str, str] | None:
    """One line of a sources.list in the shape of a deb822 stanza."""
    match = re.fullmatch(r"\s*(deb(?:-src)?)\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+[^\s#]+)*)\s*(?:#.*)?", line)
    if not match:
        return None
    kind, options, uri, suite, components = match.groups()
    fields = {"types": kind, "uris": uri, "suites": suite, "components": components.strip()}
    for option in (options or "").split():
        key, _, value = option.partition("=")
        fields[key.lower()] = value
    return fields


def select_sources(stanzas: Sequence[Mapping[str, str]], codename: str, suite: str) -> list[AptSource]:
    """The distribution's own entries, with their suites turned into the node's release.

    A third-party repository differs in its suite name, in its components or in its key.
    """
    wanted = {codename, f"{codename}-updates", f"{codename}-security"}
    found: dict[AptSource, None] = {}
    for fields in stanzas:
        signed_by = fields.get("signed-by", "")
        if (
            "deb" not in fields.get("types", "").split()
            or fields.get("enabled", "yes").lower() in ("no", "false", "0")
            or "main" not in fields.get("components", "").split()
            or (signed_by and "debian-archive" not in signed_by)
        ):
            continue
        trusted = fields.get("trusted", "").lower() == "yes"
        for name in fields.get("suites", "").split():
            if name.rstrip("/") not in wanted:
                continue
            for uri in fields.get("uris", "").split():
                found[AptSource(uri, suite + name.rstrip("/")[len(codename) :], ("main",), trusted)] = None
    return list(found)


def read_apt_stanzas(etc_apt: Path) -> list[dict[str, str]]:
    stanzas: list[dict[str, str]] = []
    parts = sorted((etc_apt / "sources.list.d").glob("*")) if (etc_apt / "sources.list.d").is_dir() else []
    for path in [etc_apt / "sources.list", *parts]:
        if not path.is_file():
            continue
        if path.suffix == ".sources":
            stanzas += parse_deb822(path.read_text(errors="replace"))
        elif path.suffix == ".list":
            stanzas += filter(None, map(parse_list_line, path.read_text(errors="replace").splitlines()))
    return stanzas


def os_release(text: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key: value.strip("\"'") for key, _, value in pairs}


def select_apt_conf(dump: str, environment: Mapping[str, str]) -> list[str]:
    """How this machine reaches its mirrors: proxies, certificates, date checks."""
    kept = re.compile(r'Acquire::(?:(?:http|https)::\S+|Check-Valid-Until|Check-Date|ForceIPv[46]|Retries) "(?!")')
    lines = [line for line in dump.splitlines() if kept.match(line)]
    for scheme in ("http", "https"):
        proxy = environment.get(f"{scheme}_proxy") or environment.get(f"{scheme.upper()}_PROXY")
        if proxy and not any(line.lower().startswith(f"acquire::{scheme}::proxy ") for line in lines):
            lines.append(f'Acquire::{scheme}::Proxy "{proxy}";')
    return lines


def parse_pip_config(listing: str) -> dict[str, str]:
    """`pip config list`: name='value' per line; an environment variable wins over every file."""
    values: dict[str, str] = {}
    from_environment: dict[str, str] = {}
    for line in listing.splitlines():
        name, separator, literal = line.partition("=")
        scope, dot, key = name.strip().partition(".")
        if not separator or not dot:
            continue
        try:
            value = str(ast.literal_eval(literal.strip()))
        except (ValueError, SyntaxError):
            continue
        (from_environment if scope == ":env:" else values)[key] = value
    merged = {**values, **from_environment}
    if "default-timeout" in merged:
        merged.setdefault("timeout", merged["default-timeout"])
    return merged


@dataclass(frozen=True)
class PipSettings:
    conf: str
    wheel_dirs: tuple[str, ...]
    ca_file: str | None


def select_pip_settings(config: Mapping[str, str]) -> PipSettings:
    """What of this machine's pip configuration also holds on a node.

    Indexes must be reachable from there; a local folder of wheels becomes a read-only mount at WHEELS_DIR.
    """
    lines: list[str] = []
    for key in ("index-url", "extra-index-url"):
        urls = [url for url in config.get(key, "").split() if url.startswith(("http://", "https://"))]
        if urls:
            lines.append(f"{key} = {' '.join(urls)}")
    lines += [f"{key} = {config[key]}" for key in ("proxy", "timeout", "trusted-host") if config.get(key)]
    cert = config.get("cert")
    if cert:
        lines.append(f"cert = {CA_BUNDLE}")
    links = [link.removeprefix("file://") for link in config.get("find-links", "").split()]
    wheel_dirs = tuple(link for link in links if Path(link).is_dir())
    mounted = [mount for mount, _ in zip(wheel_mounts(), wheel_dirs, strict=False)]
    remote = [link for link in links if link.startswith(("http://", "https://"))]
    if mounted or remote:
        lines.append(f"find-links = {' '.join([*mounted, *remote])}")
    conf = "[global]\n" + "".join(line.replace("\n", " ") + "\n" for line in lines) if lines else ""
    return PipSettings(conf, wheel_dirs, cert if cert and Path(cert) != CA_BUNDLE and Path(cert).is_file() else None)


def wheel_mounts() -> Iterator[str]:
    yield WHEELS_DIR
    number = 2
    while True:
        yield f"{WHEELS_DIR}-{number}"
        number += 1


@dataclass(frozen=True)
class Machine:
    sources: tuple[AptSource, ...]
    apt_conf: tuple[str, ...]
    certificates: tuple[tuple[str, bytes], ...]
    pip: PipSettings


def read_machine(suite: str = NODE_SUITE) -> Machine:
    release = os_release(Path("/etc/os-release").read_text())
    if release.get("ID") != "debian":
        raise HostError(
            f"this machine is {release.get('PRETTY_NAME', 'unknown')}: a node image is made from the apt sources of a "
            "Debian machine; run it on Debian"
        )
    codename = release.get("VERSION_CODENAME", "")
    sources = select_sources(read_apt_stanzas(Path("/etc/apt")), codename, suite)
    if not sources:
        raise HostError(f"/etc/apt has no enabled Debian source with suite {codename} and component main: add one")
    pip = select_pip_settings(parse_pip_config(run([sys.executable, "-m", "pip", "config", "list"]).stdout))
    certificates = [(path.name, path.read_bytes()) for path in sorted(LOCAL_CA_DIR.glob("**/*.crt"))]
    if pip.ca_file:
        certificates.append(("pip-cert.crt", Path(pip.ca_file).read_bytes()))
    apt_conf = select_apt_conf(run(["apt-config", "dump"]).stdout, os.environ)
    return Machine(tuple(sources), tuple(apt_conf), tuple(certificates), pip)


# --- Docker engine ----------------------------------------------------------------------------------------


def answering_client() -> str | None:
    """A docker client that an engine answers: one in /usr/local may be too new for the distribution's engine."""
    for client in dict.fromkeys(filter(None, (shutil.which("docker"), "/usr/bin/docker"))):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = run([client, "version", "--format", "{{.Server.Version}}"], timeout=20)
            if done.returncode == 0 and done.stdout.strip():
                return client
    return None


def docker(*args: str, stdin: str | None = None, timeout: float = 120) -> str:
    return checked([client(), *args], stdin=stdin, timeout=timeout)


_client: str | None = None


def client() -> str:
    global _client
    _client = _client or answering_client()
    if _client is None:
        raise HostError("no Docker engine answers; run `python3 tests/host/testhost.py docker`")
    return _client


def install(packages: Sequence[str], why: str) -> None:
    names = " ".join(packages)
    if os.environ.get("TESTHOST_INSTALL") == "no":
        raise HostError(f"{why}; TESTHOST_INSTALL=no forbids to install it: apt-get install {names}")
    if os.geteuid() != 0:
        raise HostError(f"{why}; run as root, or install it yourself: apt-get install {names}")
    if not shutil.which("apt-get"):
        raise HostError(f"{why}; there is no apt-get here: install {names} yourself")
    ensure_state()
    log = STATE / "apt.log"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    commands = (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages])
    with step(f"{why}: installing {names} from the distribution"), log.open("wb") as out:
        for argv in commands:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
            if wait_with_progress(process, log) != 0:
                raise HostError(f"`{shlex.join(argv)}` failed: {last_line(log)} (all of it: {log})")


def ensure_tools() -> None:
    missing = [
        package
        for tool, package in (("mmdebstrap", "mmdebstrap"), ("ssh-keygen", "openssh-client"))
        if not shutil.which(tool)
    ]
    if missing:
        install(missing, f"{' and '.join(missing)} missing")


def alive(pid_file: Path, command: str) -> int | None:
    """The pid in a file, if that is a live process of this command.

    The pid of a killed one may be another process by now, or a zombie that nothing reaps.
    """
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        if name == command and rest.split()[0] not in ("Z", "X"):
            return pid
    return None


def daemon_pid() -> int | None:
    return alive(DOCKER_PID, "dockerd")


def bridge_missing() -> bool:
    name = docker(
        "network", "inspect", "bridge", "--format", '{{index .Options "com.docker.network.bridge.name"}}'
    ).strip()
    return not Path(f"/sys/class/net/{name or 'docker0'}").exists()


def managed_by_systemd() -> bool:
    return Path("/run/systemd/system").is_dir() and run(["systemctl", "cat", "docker.service"]).returncode == 0


def outer_mtu() -> int | None:
    """A bridge wider than the machine's own link stalls large packets."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/route").read_text().splitlines()[1:]:
            device, destination = line.split()[:2]
            if destination == "00000000":
                return int(Path(f"/sys/class/net/{device}/mtu").read_text())
    return None


def stop_daemon(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    for _ in range(300):
        if daemon_pid() != pid:
            return
        time.sleep(0.1)
    raise HostError(f"dockerd (pid {pid}) did not end within 30 s of SIGTERM; end it and try again")


def start_daemon() -> None:
    if os.geteuid() != 0:
        raise HostError("no Docker engine answers and only root may start one; run as root or start dockerd")
    if managed_by_systemd():
        checked(["systemctl", "restart", "docker.service"])
        return
    if (pid := daemon_pid()) is not None:
        say(f"dockerd (pid {pid}) is there but does not answer; stopping it")
        stop_daemon(pid)
    DOCKER_PID.unlink(missing_ok=True)
    if alive(CONTAINERD_PID, "containerd") is None:
        CONTAINERD_PID.unlink(missing_ok=True)
    ensure_state()
    argv = ["dockerd"]
    if (mtu := outer_mtu()) and mtu < 1500:
        argv += ["--mtu", str(mtu)]
    with (STATE / "dockerd.log").open("ab") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (STATE / "dockerd.pid").write_text(f"{process.pid}\n")
    for _ in range(120):
        if answering_client():
            return
        if process.poll() is not None:
            raise HostError(f"dockerd ended at once: {last_line(STATE / 'dockerd.log')} ({STATE / 'dockerd.log'})")
        time.sleep(0.5)
    raise HostError(f"dockerd does not answer after 60 s; see {STATE / 'dockerd.log'}")


def ensure_docker() -> None:
    if answering_client() and not bridge_missing():
        return
    with lock("engine"):
        bring_up_docker()


def bring_up_docker() -> None:
    if answering_client():
        if not bridge_missing():
            return
        with step("Docker's bridge interface is gone: restarting the engine"):
            if not managed_by_systemd() and (pid := daemon_pid()) is not None:
                stop_daemon(pid)
            start_daemon()
        return
    if not shutil.which("dockerd"):
        install(("docker.io", "iptables"), "no Docker engine on this machine")
    if not answering_client():  # the package may have started it
        with step("starting dockerd"):
            start_daemon()
    if not answering_client():
        raise HostError(
            "dockerd runs, but no docker client here can talk to it; install the client of the same version"
        )


# --- image ------------------------------------------------------------------------------------------------


def ensure_state() -> None:
    STATE.mkdir(mode=0o700, exist_ok=True)


def ensure_keys() -> None:
    """The ssh key pair that nodes accept, how to connect with it, and the demo client's key."""
    ensure_state()
    key = STATE / "id_ed25519"
    if not key.exists():
        checked(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "gpu-node-testhost", "-f", str(key)])
    (STATE / "ssh_config").write_text(SSH_CONFIG.format(key=key))
    client_key = STATE / "client-key"
    if not client_key.exists():
        with os.fdopen(os.open(client_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(24) + "\n")


def overlay_files(machine: Machine) -> dict[str, bytes]:
    """Files laid over the bootstrapped root."""
    files = {
        "etc/apt/sources.list": "".join(source.line() + "\n" for source in machine.sources).encode(),
        "etc/ssh/sshd_config.d/node.conf": b"PermitRootLogin prohibit-password\nPasswordAuthentication no\nUseDNS no\n",
        "etc/systemd/system/ssh.service.d/node.conf": SSH_DROPIN.encode(),
    }
    if machine.apt_conf:
        files["etc/apt/apt.conf.d/80machine"] = "".join(line + "\n" for line in machine.apt_conf).encode()
    if machine.pip.conf:
        files["etc/pip.conf"] = machine.pip.conf.encode()
    for name, data in machine.certificates:
        files[f"usr/local/share/ca-certificates/{name}"] = data
    return files


def bootstrap_argv(machine: Machine, overlay: Path) -> list[str]:
    masks = " ".join(f'"$1/etc/systemd/system/{unit}"' for unit in MASKED_UNITS)
    hooks = (
        f"sync-in {shlex.quote(str(overlay))} /",
        'chroot "$1" update-ca-certificates',
        'rm -f "$1"/etc/ssh/ssh_host_* "$1"/etc/machine-id "$1"/etc/resolv.conf',
        'touch "$1"/etc/machine-id',
        f'for unit in {masks}; do ln -sf /dev/null "$unit"; done',
        'chroot "$1" systemctl set-default multi-user.target',
        f'mkdir -m 0700 -p "$1/root/.ssh" && mkdir -p "$1{WHEELS_DIR}"',
    )
    argv = ["mmdebstrap", "--variant=minbase", "--format=tar", f"--include={','.join(NODE_PACKAGES)}"]
    argv += [f"--aptopt={line}" for line in machine.apt_conf]
    argv += [f"--customize-hook={hook}" for hook in hooks]
    return [*argv, NODE_SUITE, "-", *(source.line() for source in machine.sources)]


def image_key(machine: Machine) -> str:
    """Hash of everything that goes into the root folder: another checkout with the same inputs finds the same image."""
    files = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(overlay_files(machine).items())]
    inputs = json.dumps([bootstrap_argv(machine, Path("overlay")), files])
    return hashlib.sha256(inputs.encode()).hexdigest()[:12]


def build_image(machine: Machine, ref: str) -> None:
    ensure_tools()
    log = STATE / "image.log"
    with tempfile.TemporaryDirectory(prefix="gpu-node-testhost-") as folder:
        overlay = Path(folder) / "overlay"
        for name, data in overlay_files(machine).items():
            path = overlay / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        # mkdtemp's 0700 would become the mode of the node's root folder
        overlay.chmod(0o755)
        import_argv = [
            client(),
            "import",
            "--change",
            "ENV container=docker",
            "--change",
            f"LABEL {LABEL}=image",
            "-",
            ref,
        ]
        with log.open("wb") as out:
            bootstrap = subprocess.Popen(
                bootstrap_argv(machine, overlay), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=out
            )
            importer = subprocess.Popen(import_argv, stdin=bootstrap.stdout, stdout=out, stderr=out)
            if bootstrap.stdout:
                bootstrap.stdout.close()
            failed = wait_with_progress(bootstrap, log)
            import_failed = importer.wait()
    if failed:
        # the importer took whatever came; a half root must not pass for the image
        run([client(), "image", "rm", ref])
        raise HostError(f"mmdebstrap failed with {failed}: {last_line(log)} (all of it: {log})")
    if import_failed:
        raise HostError(f"docker import failed with {import_failed}: {last_line(log)}")


def image_exists(ref: str) -> bool:
    return run([client(), "image", "inspect", ref]).returncode == 0


def remove_images(but: str = "") -> None:
    """Node images of other inputs; the engine refuses, and rightly, while a node runs on one."""
    listing = docker("image", "ls", "--filter", f"label={LABEL}=image", "--format", "{{.ID}} {{.Repository}}:{{.Tag}}")
    for identity, _, ref in (line.partition(" ") for line in listing.splitlines()):
        if ref != but and run([client(), "image", "rm", identity]).returncode == 0:
            say(f"removed the image {ref}")


def ensure_image() -> tuple[str, Machine]:
    ensure_docker()
    ensure_state()
    machine = read_machine()
    ref = f"{IMAGE}:{image_key(machine)}"
    if not image_exists(ref):
        with lock("image"):
            if not image_exists(ref):
                with step(f"building the node image {ref} (Debian {NODE_SUITE}, about a minute)"):
                    build_image(machine, ref)
                remove_images(but=ref)
    return ref, machine


# --- nodes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeSpec:
    name: str
    publish: tuple[str, ...]
    volumes: tuple[str, ...]
    # one that was made of the node image, with packages of a test in it; empty is the node image itself
    image: str = ""

    def fingerprint(self) -> str:
        fields = {"publish": sorted(self.publish), "volumes": sorted(self.volumes)}
        return json.dumps({**fields, **({"image": self.image} if self.image else {})}, sort_keys=True)


def parse_publish(text: str) -> str:
    """HOST:CONT, both port numbers; nodes listen on the machine's loopback alone."""
    match = re.fullmatch(r"(\d{1,5}):(\d{1,5})", text)
    if not match or not all(1 <= int(port) <= 65535 for port in match.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:CONTAINER, two port numbers from 1 to 65535")
    return text


def parse_port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number from 1 to 65535")
    return int(text)


def parse_volume(text: str) -> str:
    match = re.fullmatch(r"(/[^:]+):(/[^:]+?)(:ro)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not SRC:DST or SRC:DST:ro with absolute paths")
    return text


def parse_name(text: str) -> str:
    if not CONTAINER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a node name: letters, digits, dot, dash and underscore")
    return text


def run_argv(spec: NodeSpec, ref: str, wheel_dirs: Sequence[str]) -> list[str]:
    """`docker run` for a systemd that has no CAP_SYS_RESOURCE, so not --privileged."""
    argv = [
        "run",
        "-d",
        "--name",
        spec.name,
        "--hostname",
        spec.name,
        "--label",
        f"{LABEL}=node",
        "--label",
        f"{LABEL}.spec={spec.fingerprint()}",
        "--cap-add",
        "ALL",
        "--cap-drop",
        "SYS_RESOURCE",
        "--security-opt",
        "seccomp=unconfined",
        "--security-opt",
        "apparmor=unconfined",
        "--cgroupns=host",
        "-v",
        "/sys/fs/cgroup:/sys/fs/cgroup:rw",
        "--tmpfs",
        "/run",
        "--tmpfs",
        "/run/lock",
        "--tmpfs",
        "/tmp:exec",
        "-v",
        f"{spec.name}-containers:/var/lib/containers",
        "--stop-signal",
        "SIGRTMIN+3",
        "--stop-timeout",
        "180",
    ]
    for port in spec.publish:
        argv += ["-p", f"127.0.0.1:{port}"]
    mounts = [f"{source}:{mount}:ro" for source, mount in zip(wheel_dirs, wheel_mounts(), strict=False)]
    for volume in (*spec.volumes, *mounts):
        argv += ["-v", volume]
    return [*argv, ref, "/lib/systemd/systemd"]


def container(name: str) -> tuple[str, str] | None:
    """(state, spec fingerprint) of a node, None when there is none."""
    template = '{{.State.Status}} {{index .Config.Labels "' + LABEL + '.spec"}}'
    done = run([client(), "container", "inspect", "--format", template, name])
    if done.returncode != 0:
        return None
    state, _, spec = done.stdout.strip().partition(" ")
    if not spec:
        raise HostError(f"container {name} exists and is not a test node: choose another name or remove it")
    return state, spec


def create(spec: NodeSpec) -> None:
    ref, machine = ensure_image()
    for volume in spec.volumes:
        if not Path(source := volume.split(":")[0]).exists():
            raise HostError(f"--volume {volume}: {source} does not exist on this machine")
    for port in spec.publish:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(port.split(":")[0])))
            except OSError as err:
                raise HostError(
                    f"port {port.split(':')[0]} on 127.0.0.1 is in use: choose another one or free it"
                ) from err
    try:
        docker(*run_argv(spec, spec.image or ref, machine.pip.wheel_dirs))
    except HostError:
        run([client(), "rm", "-f", "-v", spec.name])
        raise


def authorize(name: str) -> None:
    public = (STATE / "id_ed25519.pub").read_text()
    script = (
        "umask 077; cat >/root/.ssh/authorized_keys.new && mv /root/.ssh/authorized_keys.new /root/.ssh/authorized_keys"
    )
    docker("exec", "-i", name, "sh", "-c", script, stdin=public)


LIST_JOBS = ("systemctl", "list-jobs", "--no-legend", "--plain")


def waits_for_replicas(jobs: str) -> bool:
    """Whether all that systemd still does is to start replicas: loading an engine takes minutes, and the node is up."""
    running = [fields[1] for line in jobs.splitlines() if (fields := line.split()) and fields[-1] == "running"]
    return bool(running) and all(unit.startswith("vllm-replica@") for unit in running)


def wait_for_boot(name: str, timeout_s: float = 120) -> str:
    """systemd's state once it has settled; says what it waits for."""
    start = time.monotonic()
    told = start
    state = "no answer"
    while time.monotonic() - start < timeout_s:
        done = run([client(), "exec", name, "systemctl", "is-system-running"])
        state = done.stdout.strip() or done.stderr.strip() or state
        if state in ("running", "degraded"):
            return state
        if state == "starting" and waits_for_replicas(run([client(), "exec", name, *LIST_JOBS]).stdout):
            return "running; its replicas are still loading"
        if container_state(name) != "running":
            tail = run([client(), "logs", "--tail", "3", name])
            raise HostError(f"node {name} ended while booting: {(tail.stdout + tail.stderr).strip() or 'no output'}")
        if time.monotonic() - told > 5:
            told = time.monotonic()
            say(f"  {told - start:.0f} s: systemd on {name} says {state}")
        time.sleep(0.3)
    raise HostError(f"node {name} did not boot within {timeout_s:.0f} s: systemd says {state}")


def container_state(name: str) -> str:
    return run([client(), "container", "inspect", "--format", "{{.State.Status}}", name]).stdout.strip()


def wait_for_ssh(name: str, port: int, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    why = "no answer"
    while time.monotonic() < deadline:
        try:
            # docker-proxy accepts before sshd does: only the banner proves the server
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                if connection.recv(4) == b"SSH-":
                    return
                why = "no SSH banner"
        except OSError as err:
            why = str(err)
        time.sleep(0.2)
    raise HostError(f"node {name} does not answer SSH on 127.0.0.1:{port} within {timeout_s:.0f} s: {why}")


def up(name: str, ssh_port: int | None, publish: Sequence[str], volumes: Sequence[str], image: str = "") -> None:
    ensure_docker()
    ensure_tools()
    ensure_keys()
    ports = ([f"{ssh_port}:22"] if ssh_port else []) + list(publish)
    spec = NodeSpec(name, tuple(ports), tuple(volumes), image)
    found = container(name)
    if found is not None and found[1] != spec.fingerprint():
        raise HostError(
            f"node {name} exists with {found[1]}, asked for {spec.fingerprint()}: run `testhost.py down {name}` first"
        )
    fresh = found is None
    if found is None:
        create(spec)
        say(f"booting the new node {name}")
    elif found[0] == "paused":
        docker("unpause", name)
    elif found[0] != "running":
        docker("start", name)
        say(f"booting the stopped node {name}")
    state = wait_for_boot(name)
    authorize(name)
    if ssh_port:
        wait_for_ssh(name, ssh_port)
    if state != "running":
        failed = docker("exec", name, "systemctl", "list-units", "--failed", "--plain", "--no-legend").split("\n")
        names = ", ".join(line.split()[0] for line in failed if line.strip())
        if fresh:
            raise HostError(f"node {name} booted {state}: {names} failed")
        say(f"node {name} is {state}: {names} failed")
    where = f": ssh -F {STATE.name}/ssh_config -p {ssh_port} 127.0.0.1" if ssh_port else ""
    say(f"node {name} is up{where}")


def remove_cgroups(container_id: str) -> None:
    """systemd leaves its groups behind when it is killed; Docker removes only its own."""
    for top in Path("/sys/fs/cgroup").glob(f"**/docker/{container_id}"):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def remove_node(name: str) -> bool:
    """Whether there was anything to remove."""
    container_id = run([client(), "container", "inspect", "--format", "{{.Id}}", name]).stdout.strip()
    if container_id:
        docker("rm", "-f", "-v", name)
        remove_cgroups(container_id)
    volume = run([client(), "volume", "inspect", f"{name}-containers"]).returncode == 0
    if volume:
        docker("volume", "rm", f"{name}-containers")
    return bool(container_id) or volume


def down(name: str) -> None:
    ensure_docker()
    say(f"node {name} removed" if remove_node(name) else f"there is no node {name}")


def purge() -> None:
    """Every node, volume, image and virtual machine, the dockerd that this tool started, and .demo/."""
    if answering_client():
        for name in docker("ps", "-a", "--filter", f"label={LABEL}=node", "--format", "{{.Names}}").split():
            with step(f"removing node {name} and its volume"):
                remove_node(name)
        remove_images()
    elif shutil.which("dockerd") and Path("/var/lib/docker").is_dir():
        say("no Docker engine answers: nodes and images, if any, stay; run `testhost.py docker`, then purge again")
    ours = STATE / "dockerd.pid"
    if ours.exists() and (pid := daemon_pid()) is not None and ours.read_text().strip() == str(pid):
        with step("stopping the dockerd that was started for the nodes"):
            stop_daemon(pid)
    for pid_file in STATE.glob("vm/*/qemu.pid"):
        if (pid := alive(pid_file, "qemu-system-x86")) is not None:
            os.kill(pid, signal.SIGTERM)
            say(f"ended the virtual machine {pid_file.parent.name}")
    if STATE.exists():
        shutil.rmtree(STATE)
        say(f"removed {STATE.name}/")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="testhost.py", description=__doc__.splitlines()[0] if __doc__ else None)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("docker", help="make sure a Docker engine answers")
    verbs.add_parser("image", help="build the node image when its inputs changed")
    one = verbs.add_parser("up", help="boot a node and wait for it")
    one.add_argument("name", type=parse_name)
    one.add_argument("--ssh-port", type=parse_port, help="port of the node's sshd on this machine's loopback")
    one.add_argument("--publish", type=parse_publish, action="append", default=[], metavar="HOST:CONTAINER")
    one.add_argument("--volume", type=parse_volume, action="append", default=[], metavar="SRC:DST[:ro]")
    one.add_argument("--image", default="", help="an image made of the node image, instead of it")
    verbs.add_parser("down", help="remove a node and its volume").add_argument("name", type=parse_name)
    verbs.add_parser("purge", help="remove every trace")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    try:
        if options.verb == "docker":
            ensure_docker()
        elif options.verb == "image":
            say(f"node image {ensure_image()[0]}")
        elif options.verb == "up":
            up(options.name, options.ssh_port, options.publish, options.volume, options.image)
        elif options.verb == "down":
            down(options.name)
        else:
            purge()
    except HostError as err:
        print(f"testhost: error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("testhost: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
