"""Out-reasons: why a replica is not in the balancer. One file for each replica and reason; in = no file."""

import datetime
import json
from dataclasses import dataclass
from pathlib import Path

from gpu_node import files
from gpu_node.paths import Paths

PERSISTENT = ("operator", "rollout")  # survive a reboot
VOLATILE = ("unit", "prober", "watcher")


@dataclass(frozen=True)
class Reasons:
    """The out-reasons of all replicas."""

    paths: Paths

    def _directories(self, index: int) -> tuple[Path, Path]:
        return self.paths.replica(index) / "out", self.paths.volatile(index) / "out"

    def _file(self, index: int, reason: str) -> Path:
        persistent, volatile = self._directories(index)
        if reason in PERSISTENT:
            return persistent / reason
        if reason in VOLATILE:
            return volatile / reason
        raise ValueError(f"unknown out-reason {reason!r}")

    def add(self, index: int, reason: str, by: str) -> bool:
        """Add the reason; says whether it is new. One that stands keeps its time and author."""
        path = self._file(index, reason)
        if path.exists():
            return False
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        files.atomic_write(path, json.dumps({"since": since, "by": by}) + "\n")
        return True

    def remove(self, index: int, reason: str) -> bool:
        """Remove the reason; says whether it stood."""
        return files.remove(self._file(index, reason))

    def of(self, index: int) -> list[str]:
        """The reasons that stand, sorted. A file of a name unknown here counts too: out is the safe side."""
        return sorted(
            entry.name
            for directory in self._directories(index)
            if directory.is_dir()
            for entry in directory.iterdir()
            if not entry.name.startswith(".")
        )
