"""What every verb needs, put together once."""

from collections.abc import Callable
from dataclasses import dataclass

from gpu_node import drain
from gpu_node.config import NodeConfig, Release, Served, linked_release, load_engine_key, release_for, served
from gpu_node.engine import Engine
from gpu_node.errors import ConfigError
from gpu_node.host import Host
from gpu_node.membership import Membership
from gpu_node.paths import Paths
from gpu_node.proc import Proc


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit."""

    load: str
    active: str
    sub: str
    result: str
    main_pid: int
    restarts: int = 0
    enabled: str = ""

    @property
    def word(self) -> str:
        """One word for a table."""
        if self.load == "not-found":
            return "missing"
        return self.sub if self.sub == "auto-restart" else self.active or "unknown"


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def parse_unit_state(text: str) -> UnitState:
    """The output of `systemctl show`; properties that are not there are empty."""
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    return UnitState(
        values.get("LoadState", ""),
        values.get("ActiveState", ""),
        values.get("SubState", ""),
        values.get("Result", ""),
        _whole(values.get("MainPID", "")),
        _whole(values.get("NRestarts", "")),
        values.get("UnitFileState", ""),
    )


class Tool:
    """The node as this run of the tool sees it."""

    def __init__(self, paths: Paths, node: NodeConfig, host: Host, by: str) -> None:
        self.paths = paths
        self.node = node
        self.host = host
        self.by = by
        self.membership = Membership(paths, node, host, by)
        self.reasons = self.membership.reasons
        self.proc = Proc(paths.proc)

    def engine(self, index: int) -> Engine:
        """The replica's server, asked with the engine's own key."""
        return Engine("127.0.0.1", self.served(index).port, load_engine_key(self.paths))

    def served(self, index: int) -> Served:
        """Where the replica listens and what it serves, by the release that it runs."""
        return served(self.paths, self.node, index)

    def unit_state(self, index: int) -> UnitState:
        properties = "LoadState,ActiveState,SubState,Result,MainPID,NRestarts,UnitFileState"
        return parse_unit_state(
            self.host.run(["systemctl", "show", f"--property={properties}", self.node.replica(index).unit]).stdout
        )

    def release(self, index: int) -> Release:
        """The release that `current` points at, checked. Raises ConfigError."""
        replica = self.node.replica(index)
        identity = linked_release(self.paths, index, "current")
        if identity is None:
            raise ConfigError(f"replica {index} has no release: run `gpu-node switch {index} RELEASE`")
        return release_for(self.paths, replica, identity)

    def wait_idle(self, index: int, timeout_s: float, say: Callable[[str], None] | None = None) -> drain.Sample | None:
        """Wait for the replica's running requests; None, or what still ran after timeout_s."""
        port = self.served(index).port
        # The metrics are open, so a damaged key file does not stop a drain.
        engine = Engine("127.0.0.1", port, None)
        prefix = f"replica {index}: "
        return drain.wait_idle(
            lambda: drain.look(port, engine, self.proc), self.host, prefix, timeout_s, say or self.host.say
        )
