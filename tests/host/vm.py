#!/usr/bin/env python3
"""A virtual machine with Debian 13 and two real NUMA nodes, emulated in software: it needs no KVM, and is slow.

What a container cannot be: a node with its own kernel, cgroup v2 and a NUMA topology that pins can be held against.
Like testhost.py it needs the standard library alone and takes apt sources and certificates from this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import testhost
from testhost import SSH_DROPIN, STATE, HostError, Machine, say, step

SUITE = "trixie"
PACKAGES = (
    *testhost.NODE_PACKAGES,
    "linux-image-cloud-amd64",
    "initramfs-tools",
    # update-grub as on a real machine, and the boot loader that reads what it writes
    "grub2-common",
    "grub-pc-bin",
    # what the tests put into a container
    "busybox-static",
)
VMS = STATE / "vm"
DISK_SIZE = "6G"
MEMORY_PER_NODE = "2G"
QEMU = "qemu-system-x86_64"
# /proc cuts a process's name at 15 characters
QEMU_COMMAND = QEMU[:15]
BOOT_SECONDS = 900
# Timers that would take apt's lock or the little computing power there is; nobody logs in on the console.
MASKED_UNITS = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
)
# The addresses of qemu's user network. The name server there asks this machine's.
NETWORK = "[Match]\nName=eth0\n\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n"
RESOLV_CONF = "nameserver 10.0.2.3\n"
# One kind of host key: emulated, the others take half a minute.
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key"
SSHD = f"""\
HostKey {HOST_KEY}
PermitRootLogin prohibit-password
PasswordAuthentication no
UseDNS no
LoginGraceTime 0
# Who waits for the boot asks again and again.
PerSourcePenalties no
"""
MAKE_HOST_KEY = f"/bin/sh -c 'test -e {HOST_KEY} || ssh-keygen -q -t ed25519 -N \"\" -f {HOST_KEY}'"
# The initrd with the drivers of this one disk boots in a fraction of the time.
INITRD_MODULES = "virtio_pci\nvirtio_blk\next4\n"
# The parameters that this machine needs; whatever a test adds comes through the guest's own update-grub.
KERNEL_LINE = "console=ttyS0 net.ifnames=0 mitigations=off panic=1"
GRUB_DEFAULTS = f"""\
GRUB_DEFAULT=0
GRUB_TIMEOUT=0
GRUB_TERMINAL=console
GRUB_DISABLE_OS_PROBER=true
GRUB_CMDLINE_LINUX_DEFAULT=""
GRUB_CMDLINE_LINUX="{KERNEL_LINE}"
"""
# Until the guest runs update-grub for the first time: there is no disk that it could look at while the root is made.
GRUB_CONFIG = f"""\
linux /vmlinuz root=/dev/vda rw {KERNEL_LINE}
initrd /initrd.img
boot
"""
GRUB_FOLDER = "/usr/lib/grub/i386-pc"
# GRUB on a small disk of its own: it looks for the guest's configuration and goes by that.
GRUB_SEARCH = "search --no-floppy --file --set=root /boot/grub/grub.cfg\nset prefix=($root)/boot/grub\n"
GRUB_CORE = "/boot/grub/core.img"
GRUB_BUILT_IN = "biosdisk ext2 search search_fs_file normal linux test"
FSTAB = "/dev/vda / ext4 defaults 0 0\n"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


# --- the disk ---------------------------------------------------------------------------------------------


def ensure_tools() -> None:
    testhost.ensure_tools()
    wanted = ((QEMU, "qemu-system-x86"), ("mke2fs", "e2fsprogs"))
    missing = [package for tool, package in wanted if not shutil.which(tool)]
    if missing:
        testhost.install(missing, f"{' and '.join(missing)} missing")


def overlay_files(machine: Machine) -> dict[str, bytes]:
    """Files laid over the bootstrapped root."""
    return {
        **testhost.overlay_files(machine),
        "etc/ssh/sshd_config.d/node.conf": SSHD.encode(),
        "etc/systemd/system/ssh.service.d/node.conf": SSH_DROPIN.replace(
            "/usr/bin/ssh-keygen -A", MAKE_HOST_KEY
        ).encode(),
        "etc/systemd/network/10-user.network": NETWORK.encode(),
        "etc/resolv.conf": RESOLV_CONF.encode(),
        "etc/fstab": FSTAB.encode(),
        "etc/default/grub": GRUB_DEFAULTS.encode(),
        "boot/grub/grub.cfg": GRUB_CONFIG.encode(),
        "boot/grub/search.cfg": GRUB_SEARCH.encode(),
        "root/.ssh/authorized_keys": (STATE / "id_ed25519.pub").read_bytes(),
    }


def bootstrap_argv(machine: Machine, overlay: Path, root: Path) -> list[str]:
    masks = " ".join(f'"$1/etc/systemd/system/{unit}"' for unit in MASKED_UNITS)
    modules = '"$1/etc/initramfs-tools'
    before = (
        f'mkdir -p {modules}/conf.d" && echo MODULES=list >{modules}/conf.d/vm"',
        f'printf %s {shlex.quote(INITRD_MODULES)} >{modules}/modules"',
    )
    after = (
        # mmdebstrap lent the root this machine's
        'rm -f "$1"/etc/resolv.conf',
        f"sync-in {shlex.quote(str(overlay))} /",
        'chroot "$1" update-ca-certificates',
        'rm -f "$1"/etc/ssh/ssh_host_* && : >"$1"/etc/machine-id',
        f'for unit in {masks}; do ln -sf /dev/null "$unit"; done',
        'chroot "$1" systemctl set-default multi-user.target',
        'chroot "$1" systemctl enable systemd-networkd.service',
        'chmod 0700 "$1/root/.ssh" && chmod 0600 "$1/root/.ssh/authorized_keys"',
        f'cp -r "$1{GRUB_FOLDER}" "$1/boot/grub/"',
        f'chroot "$1" grub-mkimage -O i386-pc -o {GRUB_CORE} -p /boot/grub -c /boot/grub/search.cfg {GRUB_BUILT_IN}',
    )
    argv = ["mmdebstrap", "--variant=minbase", "--format=directory", f"--include={','.join(PACKAGES)}"]
    argv += [f"--aptopt={line}" for line in machine.apt_conf]
    argv += [f"--essential-hook={hook}" for hook in before]
    argv += [f"--customize-hook={hook}" for hook in after]
    return [*argv, SUITE, str(root), *(source.line() for source in machine.sources)]


def image_key(machine: Machine) -> str:
    files = [(name, hashlib.sha256(data).hexdigest()) for name, data in sorted(overlay_files(machine).items())]
    inputs = json.dumps([bootstrap_argv(machine, Path("overlay"), Path("root")), files, DISK_SIZE])
    return hashlib.sha256(inputs.encode()).hexdigest()[:12]


def bootstrap_problem(log: str) -> str:
    """Why mmdebstrap failed: apt's own words, which are not the log's last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("E: ", "Err:"))]
    return (told or lines or ["no output"])[0][:200]


def build_image(machine: Machine, image: Path) -> None:
    """The folder: disk.img with the guest's root, boot.img with GRUB. It gets its name when it is complete."""
    if os.geteuid() != 0:
        raise HostError("only root can make the virtual machine's disk, whose files belong to root; run as root")
    log = VMS / "image.log"
    work = VMS / "image.new"
    shutil.rmtree(work, ignore_errors=True)
    root, overlay, result = work / "root", work / "overlay", work / "result"
    result.mkdir(parents=True)
    for name, data in overlay_files(machine).items():
        path = overlay / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    overlay.chmod(0o755)
    with log.open("wb") as out:
        argv = bootstrap_argv(machine, overlay, root)
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        if (failed := testhost.wait_with_progress(process, log)) != 0:
            mirrors = " ".join(dict.fromkeys(source.uri for source in machine.sources))
            why = bootstrap_problem(log.read_text(errors="replace"))
            raise HostError(f"no Debian 13 ({SUITE}) from {mirrors}: mmdebstrap failed with {failed}: {why} ({log})")
    (result / "boot.img").write_bytes(boot_disk(root))
    say("  writing the disk")
    testhost.checked(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(result / "disk.img"), DISK_SIZE], timeout=600)
    result.rename(image)
    shutil.rmtree(work)


def boot_disk(root: Path) -> bytes:
    """A disk that is nothing but GRUB: its boot sector, then what that loads, filled to whole sectors."""
    parts = (f"{GRUB_FOLDER}/boot.img", GRUB_CORE)
    sectors = b"".join((root / part.lstrip("/")).read_bytes() for part in parts)
    # An empty megabyte after it: a BIOS takes the geometry of a smaller disk for a floppy's.
    return sectors + bytes(-len(sectors) % 512 + 2**20)


def ensure_image() -> Path:
    machine = testhost.read_machine(SUITE)
    image = VMS / f"image-{image_key(machine)}"
    with testhost.lock("vm-image"):
        if not image.exists():
            for old in VMS.glob("image-*"):
                shutil.rmtree(old)
            with step(f"making the disk of a virtual machine with Debian 13 ({SUITE}), two to four minutes"):
                build_image(machine, image)
    return image


# --- the machine ------------------------------------------------------------------------------------------


def qemu_argv(folder: Path, ssh_port: int) -> list[str]:
    """Two sockets of two cores, each socket a NUMA node with its own memory."""
    argv = [QEMU, "-name", folder.name, "-accel", "tcg,thread=multi", "-smp", "4,sockets=2,cores=2", "-m", "4G"]
    for node, cpus in enumerate(("0-1", "2-3")):
        argv += ["-object", f"memory-backend-ram,id=memory{node},size={MEMORY_PER_NODE}"]
        argv += ["-numa", f"node,nodeid={node},cpus={cpus},memdev=memory{node}"]
    argv += [
        "-drive",
        f"file={folder / 'boot.img'},if=none,id=boot,format=raw",
        "-device",
        "ide-hd,drive=boot,bootindex=0",
    ]
    argv += ["-drive", f"file={folder / 'disk.img'},if=virtio,format=raw,cache=unsafe"]
    argv += ["-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{ssh_port}-:22"]
    argv += ["-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci"]
    return [*argv, "-display", "none", "-monitor", "none", "-serial", f"file:{folder / 'console.log'}"]


def running(folder: Path) -> int | None:
    """The pid of this machine's emulator; a pid file may be older than the process that has its number now."""
    pid = testhost.alive(folder / "qemu.pid", QEMU_COMMAND)
    if pid is None:
        return None
    with contextlib.suppress(OSError):
        if str(folder / "disk.img").encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def ssh_argv(ssh_port: int, command: str) -> list[str]:
    return [
        "ssh",
        "-F",
        str(STATE / "ssh_config"),
        "-o",
        "ConnectTimeout=60",
        "-p",
        str(ssh_port),
        "127.0.0.1",
        command,
    ]


def start(folder: Path, ssh_port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", ssh_port))
        except OSError as err:
            raise HostError(f"port {ssh_port} on 127.0.0.1 is in use: choose another one or free it") from err
    with (folder / "qemu.log").open("wb") as log:
        process = subprocess.Popen(
            qemu_argv(folder, ssh_port), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    (folder / "qemu.pid").write_text(f"{process.pid}\n")
    (folder / "ssh-port").write_text(f"{ssh_port}\n")
    time.sleep(1)
    if process.poll() is not None:
        raise HostError(f"{QEMU} ended at once: {testhost.last_line(folder / 'qemu.log')}")


def wait_for_boot(folder: Path, ssh_port: int, timeout_s: float = BOOT_SECONDS) -> str:
    """systemd's state once it has settled; says what the console shows meanwhile."""
    begin = told = time.monotonic()
    state = "no answer"
    while time.monotonic() - begin < timeout_s:
        if running(folder) is None:
            raise HostError(f"{folder.name} ended while booting: {testhost.last_line(folder / 'qemu.log')}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = testhost.run(ssh_argv(ssh_port, "systemctl is-system-running"), timeout=90)
            state = done.stdout.strip() or state
        if state in ("running", "degraded"):
            return state
        if time.monotonic() - told > 10:
            told = time.monotonic()
            console = ANSI.sub("", testhost.last_line(folder / "console.log"))
            say(f"  {told - begin:.0f} s: systemd says {state}, the console {console}")
        time.sleep(2)
    raise HostError(f"{folder.name} did not boot within {timeout_s:.0f} s: systemd says {state} ({folder}/console.log)")


def up(name: str, ssh_port: int) -> None:
    ensure_tools()
    testhost.ensure_keys()
    VMS.mkdir(exist_ok=True)
    folder = VMS / name
    if running(folder) is not None:
        if (at := (folder / "ssh-port").read_text().strip()) != str(ssh_port):
            raise HostError(f"{name} runs with its SSH port at {at}; run `vm.py down {name}` first")
    else:
        if not (folder / "disk.img").exists():
            shutil.rmtree(folder, ignore_errors=True)
            image = ensure_image()
            folder.mkdir()
            for part in ("boot.img", "disk.img"):
                testhost.checked(["cp", "--sparse=always", str(image / part), str(folder / part)])
        start(folder, ssh_port)
    with step(f"booting {name}, one to four minutes"):
        state = wait_for_boot(folder, ssh_port)
    if state != "running":
        failed = testhost.checked(ssh_argv(ssh_port, "systemctl list-units --failed --plain --no-legend"))
        units = ", ".join(line.split()[0] for line in failed.splitlines() if line.strip())
        raise HostError(f"{name} booted {state}: {units} failed")
    say(f"{name} is up: ssh -F {STATE.name}/ssh_config -p {ssh_port} 127.0.0.1")


def down(name: str) -> None:
    """The machine and its disk; the image that the disk is a copy of stays for the next one."""
    folder = VMS / name
    if not folder.exists():
        say(f"there is no {name}")
        return
    if (pid := running(folder)) is not None:
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            if running(folder) is None:
                break
            time.sleep(0.1)
        else:
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)
    say(f"{name} removed")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vm.py", description=__doc__.splitlines()[0] if __doc__ else None)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("up", help="boot a virtual machine and wait for it")
    one.add_argument("name", type=testhost.parse_name)
    one.add_argument("--ssh-port", type=testhost.parse_port, required=True, help="its sshd's port on 127.0.0.1")
    verbs.add_parser("down", help="end it and remove its disk").add_argument("name", type=testhost.parse_name)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = arguments(argv)
    try:
        if options.verb == "up":
            up(options.name, options.ssh_port)
        else:
            down(options.name)
    except HostError as err:
        print(f"testhost: error: {err}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("testhost: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
