"""Where everything lies on the node."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """All paths, below a root that only tests change (environment variable GPU_NODE_ROOT)."""

    root: Path

    @classmethod
    def from_environment(cls) -> "Paths":
        return cls(Path(os.environ.get("GPU_NODE_ROOT", "/")))

    @property
    def node_json(self) -> Path:
        return self.root / "etc/gpu-node/node.json"

    @property
    def engine_env(self) -> Path:
        return self.root / "etc/gpu-node/secrets/engine.env"

    @property
    def clients_json(self) -> Path:
        return self.root / "etc/gpu-node/secrets/clients.json"

    @property
    def members_conf(self) -> Path:
        return self.root / "etc/gpu-node/nginx/members.conf"

    @property
    def secrets_conf(self) -> Path:
        return self.root / "etc/gpu-node/nginx/secrets.conf"

    @property
    def nginx_pid(self) -> Path:
        return self.root / "run/nginx.pid"

    @property
    def proc(self) -> Path:
        return self.root / "proc"

    @property
    def membership_lock(self) -> Path:
        return self.root / "run/lock/gpu-node-membership.lock"

    @property
    def switch_lock(self) -> Path:
        return self.root / "run/lock/gpu-node-switch.lock"

    def release(self, release_id: str) -> Path:
        return self.root / "var/lib/gpu-node/releases" / release_id

    def replica(self, index: int) -> Path:
        """What of a replica survives a reboot."""
        return self.root / "var/lib/gpu-node/replicas" / str(index)

    def volatile(self, index: int) -> Path:
        """What of a replica ends with a reboot."""
        return self.root / "run/gpu-node" / str(index)

    def journal(self, index: int) -> Path:
        return self.replica(index) / "switch.json"

    def probe_memory(self, index: int) -> Path:
        return self.volatile(index) / "probe.json"
