"""What a fetch is asked for: a JSON file that the play writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import path_problem

from gpu_node_weights.errors import WeightsError

# Sources that hold whole listings; the others are walked on this node.
LISTED = ("hub", "mirror", "peer")


@dataclass(frozen=True)
class Wanted:
    """One file of a listing; a hash is empty where the source does not tell it."""

    path: str
    size: int
    sha256: str = ""
    git_sha1: str = ""
    xet: bool = False


@dataclass(frozen=True)
class Request:
    """A fetch. Times are in seconds, rates in bytes per second; ``processes`` 0 chooses by the number of CPUs."""

    root: Path
    name: str
    key: str
    source: dict[str, Any]
    digest: str
    files: dict[str, Wanted]
    upstreams: tuple[str, ...]
    endpoint: str
    token_file: str
    python: str
    transports: tuple[str, ...]
    streams: int
    processes: int
    stall_s: float
    tries: int
    minimum_rate: int
    report_s: float

    @property
    def over_http(self) -> bool:
        return bool(self.upstreams) or self.source["type"] in LISTED

    @property
    def total(self) -> int:
        return sum(wanted.size for wanted in self.files.values())


def read_request(path: Path) -> Request:
    """Read a request file.

    :raises WeightsError: when it is no request, or lists a path that would leave the artifact's folder.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        files = {
            name: Wanted(
                name,
                int(entry["size"]),
                entry.get("sha256") or "",
                entry.get("git_sha1") or "",
                bool(entry.get("xet", False)),
            )
            for name, entry in told["files"].items()
        }
        request = Request(
            root=Path(told["root"]),
            name=told["name"],
            key=told["key"],
            source=dict(told["source"]),
            digest=told.get("digest") or "",
            files=files,
            upstreams=tuple(told.get("upstreams") or ()),
            endpoint=str(told.get("endpoint") or "https://huggingface.co").rstrip("/"),
            token_file=told.get("token_file") or "",
            python=told.get("python") or "",
            transports=tuple(told.get("transports") or ("http",)),
            streams=int(told.get("streams") or 8),
            processes=int(told.get("processes") or 0),
            stall_s=float(told.get("stall_s") or 60),
            tries=int(told.get("tries") or 3),
            minimum_rate=int(told.get("minimum_rate") or 0),
            report_s=float(told.get("report_s") or 10),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no request that can be carried out: {type(error).__name__} {error}") from error
    problems = [problem for problem in map(path_problem, files) if problem]
    # A file where another one has a folder: neither could be written.
    problems += [
        f"{name!r} is listed as a file and as a folder"
        for name in files
        if any(name in _parents(other) for other in files if other.startswith(name))
    ]
    if problems:
        raise WeightsError(f"the listing of {request.name} cannot be fetched: {'; '.join(problems[:5])}")
    if request.over_http and not files:
        raise WeightsError(
            f"the source of {request.name} lists no file; look at its folder, include and exclude patterns"
        )
    return request


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
