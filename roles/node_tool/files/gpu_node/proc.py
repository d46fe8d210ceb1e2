"""What /proc tells: sockets, processes, control groups. Reads only."""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpu_node.errors import ParseError
from gpu_node.files import read_text

ESTABLISHED = 0x01
LISTEN = 0x0A

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Socket:
    """One line of /proc/net/tcp or tcp6."""

    local: IPAddress
    local_port: int
    remote: IPAddress
    remote_port: int
    state: int
    inode: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the local address."""
        return _plain(self.local).is_loopback


def _plain(address: IPAddress) -> IPAddress:
    """::ffff:127.0.0.1 as 127.0.0.1."""
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


def _endpoint(text: str) -> tuple[IPAddress, int]:
    """`0100007F:1F40` is 127.0.0.1:8000: 32-bit words in the machine's (little-endian) order, port in plain hex."""
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    if len(raw) not in (4, 16) or not 0 <= int(port, 16) <= 0xFFFF:
        raise ValueError(text)
    swapped = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    return ipaddress.ip_address(swapped), int(port, 16)


def parse_tcp_table(text: str) -> list[Socket]:
    """The sockets of a /proc/net/tcp or tcp6 text. Raises ParseError that names the line."""
    sockets = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if number == 1 or not fields:
            continue
        try:
            local, local_port = _endpoint(fields[1])
            remote, remote_port = _endpoint(fields[2])
            sockets.append(Socket(local, local_port, remote, remote_port, int(fields[3], 16), int(fields[9])))
        except (ValueError, IndexError):
            raise ParseError(f"line {number} of the kernel's TCP table is not understood: {line[:100]!r}") from None
    return sockets


@dataclass(frozen=True)
class Process:
    """A process whose number cannot be mistaken for a later one's."""

    pid: int
    started: int  # clock ticks since boot


class Proc:
    """The processes and sockets of this node (host network namespace)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def pids(self) -> list[int]:
        return [int(entry.name) for entry in self.root.iterdir() if entry.name.isdecimal()]

    def _stat(self, pid: int) -> list[str] | None:
        """The fields of /proc/<pid>/stat from the state on (index 0 = state, 1 = ppid, 19 = start time)."""
        text = read_text(self.root / str(pid) / "stat")
        fields = text.rpartition(")")[2].split() if text else []
        return fields if len(fields) > 19 else None

    def process(self, pid: int) -> Process | None:
        """The process of that number, or None when there is none or it is dead and merely not yet reaped."""
        stat = self._stat(pid)
        return Process(pid, int(stat[19])) if stat and stat[0] not in "ZX" else None

    def alive(self, process: Process) -> bool:
        return self.process(process.pid) == process

    def name(self, pid: int) -> str:
        return (read_text(self.root / str(pid) / "comm") or "").strip()

    def arguments(self, pid: int) -> list[str]:
        """The argument vector; [] for a kernel thread or a process that is gone."""
        text = read_text(self.root / str(pid) / "cmdline") or ""
        return text.rstrip("\0").split("\0") if text.strip("\0") else []

    def describe(self, pid: int) -> str:
        """`pid 12 (python3 -m http.server)`, for an error."""
        command = " ".join(self.arguments(pid)) or self.name(pid) or "gone"
        return f"pid {pid} ({command[:160]})"

    def in_unit(self, unit: str) -> set[int]:
        """The processes in the unit's control group or below it (cgroup v1, v2 and hybrid)."""
        member = re.compile(rf"/{re.escape(unit)}(/|$)", re.MULTILINE)
        return {pid for pid in self.pids() if member.search(read_text(self.root / str(pid) / "cgroup") or "")}

    def _parents(self) -> dict[int, int]:
        return {pid: int(stat[1]) for pid in self.pids() if (stat := self._stat(pid))}

    def descendants(self, ancestor: int) -> set[int]:
        """The process and all below it."""
        parents = self._parents()
        found = {ancestor}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found

    def ancestors(self, pid: int) -> set[int]:
        """The process and all above it."""
        parents = self._parents()
        found: set[int] = set()
        while pid and pid not in found:
            found.add(pid)
            pid = parents.get(pid, 0)
        return found

    def sockets(self) -> list[Socket]:
        """All TCP sockets, IPv4 and IPv6."""
        texts = [read_text(self.root / "net" / table) or "" for table in ("tcp", "tcp6")]
        return [socket for text in texts for socket in parse_tcp_table(text)]

    def inodes(self, pid: int) -> set[int]:
        """The socket inodes that a process holds."""
        found: set[int] = set()
        try:
            descriptors = list((self.root / str(pid) / "fd").iterdir())
        except (FileNotFoundError, ProcessLookupError):
            return found
        for descriptor in descriptors:
            try:
                target = os.readlink(descriptor)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if match := re.fullmatch(r"socket:\[(\d+)\]", target):
                found.add(int(match[1]))
        return found

    def owners(self, inode: int) -> list[int]:
        """The processes that hold the socket."""
        return sorted(pid for pid in self.pids() if inode in self.inodes(pid))

    def listeners(self, port: int) -> list[Socket]:
        return [socket for socket in self.sockets() if socket.state == LISTEN and socket.local_port == port]

    def connections_of(self, name: str, port: int) -> int:
        """How many established connections the processes of that name hold to the local port."""
        wanted = {
            socket.inode
            for socket in self.sockets()
            if socket.state == ESTABLISHED and socket.remote_port == port and _plain(socket.remote).is_loopback
        }
        if not wanted:
            return 0
        held: set[int] = set()
        for pid in self.pids():
            if self.name(pid) == name:
                held |= self.inodes(pid)
        return len(wanted & held)
