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

    @property
    def rollout_lock(self) -> Path:
        return self.root / "run/lock/gpu-node-rollout.lock"

    @property
    def wanted_lock(self) -> Path:
        return self.root / "run/lock/gpu-node-wanted.lock"

    @property
    def wanted(self) -> Path:
        """What this node has to run, and who said so."""
        return self.root / "var/lib/gpu-node/wanted.json"

    @property
    def held(self) -> Path:
        """While it is there, no replica starts: the units' condition."""
        return self.root / "var/lib/gpu-node/held"

    @property
    def leaving(self) -> Path:
        """While it is there, /health says 503. Here nginx's processes may look, in /var/lib/gpu-node they may not.

        It need not survive a reboot: after one nobody is in before it has generated.
        """
        return self.root / "run/gpu-node/leaving"

    @property
    def history(self) -> Path:
        return self.root / "var/lib/gpu-node/history.jsonl"

    @property
    def metrics(self) -> Path:
        """What nginx serves as the node's own metrics."""
        return self.root / "run/gpu-node/metrics.prom"

    @property
    def access_log(self) -> Path:
        return self.root / "var/log/nginx/access.log"

    @property
    def releases(self) -> Path:
        return self.root / "var/lib/gpu-node/releases"

    def release(self, release_id: str) -> Path:
        return self.releases / release_id

    def replica(self, index: int) -> Path:
        """What of a replica survives a reboot."""
        return self.root / "var/lib/gpu-node/replicas" / str(index)

    def caches(self, index: int) -> Path:
        """What the replica's engines compiled, by image."""
        return self.root / "var/lib/gpu-node/cache" / str(index)

    def cache(self, index: int, image_id: str) -> Path:
        return self.caches(index) / image_id[:12]

    def volatile(self, index: int) -> Path:
        """What of a replica ends with a reboot."""
        return self.root / "run/gpu-node" / str(index)

    def journal(self, index: int) -> Path:
        return self.replica(index) / "switch.json"

    def running(self, index: int) -> Path:
        """The id of the release that the replica's container was started from."""
        return self.volatile(index) / "release"

    def probe_memory(self, index: int) -> Path:
        return self.volatile(index) / "probe.json"
