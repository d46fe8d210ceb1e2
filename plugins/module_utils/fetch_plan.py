# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a node fetches in a run: from what it has, what the source lists and who serves it. Pure functions."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

ROOT = "/var/lib/gpu-node/artifacts"
# Of a peer's files two come at once: so they arrive in order, and the next node's fetch follows closely behind.
PEER_STREAMS = 2
# A file system that is full to the last byte stops more than a fetch; the node's program keeps the same back.
SPARE_BYTES = 1 << 28
_UNITS = ("B", "kB", "MB", "GB", "TB")


def size_text(count: int) -> str:
    """Return bytes as people read them."""
    value, unit = float(count), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value /= 1000
        unit += 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def found_artifacts(looks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return by key of the plan what the module ``artifact`` found.

    :param looks: results of a loop over the plan's artifacts (``key`` and ``value`` with ``name`` and ``source``).
    """
    return {
        look["item"]["key"]: {
            "name": look["item"]["value"]["name"],
            "source": look["item"]["value"]["source"],
            **{name: look.get(name) or "" for name in ("key", "state", "digest", "folder")},
            "draft_tokens": int(look.get("draft_tokens") or 0),
            "problems": list(look.get("problems") or []),
        }
        for look in looks
    }


def to_fetch(
    artifacts: dict[str, dict[str, Any]],
    ways: dict[str, dict[str, Any]],
    lists: dict[str, dict[str, Any]],
    looks: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return what this node fetches, one entry an artifact.

    :param artifacts: what it has, see ``found_artifacts``.
    :param ways: by the plan's key, see ``fan_out.ways``.
    :param lists: by the plan's key ``{"files", "bytes"}`` of what belongs to it.
    :param looks: results of the module ``artifact`` that measured what lacks.
    """
    seen = {look["item"]["key"]: look for look in looks}
    fetches = []
    for key, way in ways.items():
        listing, look = lists[key], seen.get(key, {})
        files = listing["files"]
        adopted = bool(artifacts[key]["source"].get("adopt"))
        fetches.append(
            {
                "plan_key": key,
                **{name: artifacts[key][name] for name in ("name", "source", "key")},
                # That something was never here is no news.
                "problems": artifacts[key]["problems"] if artifacts[key]["state"] == "damaged" else [],
                "digest": way["seed_digest"] or artifacts[key]["source"].get("digest", ""),
                "files": files,
                "count": len(files),
                "bytes": int(listing["bytes"]),
                "needed_bytes": 0 if adopted else int(look.get("needed_bytes", listing["bytes"])),
                "reused_bytes": int(look.get("reused_bytes", 0)),
                "free_bytes": int(look.get("free_bytes", 0)),
                "missing_count": len(look.get("missing_files", files)),
                **{name: way[name] for name in ("upstreams", "urls")},
            }
        )
    return fetches


def needs_http(fetch: dict[str, Any]) -> bool:
    """Tell whether a fetch needs huggingface_hub."""
    return bool(fetch["upstreams"]) or fetch["source"]["type"] in ("hub", "mirror", "peer")


def origin(fetch: dict[str, Any], endpoint: str) -> str:
    """Say where the bytes come from."""
    if fetch["upstreams"]:
        return f"from node {fetch['upstreams'][0]}"
    source = fetch["source"]
    kind = source["type"]
    if kind == "hub":
        site = urlsplit(source.get("endpoint") or endpoint).netloc
        folder = f", folder {source['folder']}" if source.get("folder") else ""
        return f"from {site}: {source['repository']}{folder} at {source['revision'][:12]}"
    if kind == "mirror":
        return f"from {source['url']}"
    if kind == "path":
        return f"from {source['path']}, {'where it lies' if source.get('adopt') else 'copied'}"
    return f"from {source['path']}" if kind == "archive" else "generated on the node"


def describe(fetches: list[dict[str, Any]], endpoint: str) -> list[str]:
    """Say what is fetched: files, size, from where, and what is there already."""
    lines = []
    for fetch in fetches:
        what = f"{fetch['missing_count']} of {fetch['count']} files, {size_text(fetch['needed_bytes'])}"
        if not fetch["count"]:
            # Nobody has counted what is only made, or unpacked, by the fetch itself.
            what = size_text(fetch["needed_bytes"]) if fetch["needed_bytes"] else "a few files"
        reused = f"; {size_text(fetch['reused_bytes'])} are here already" if fetch["reused_bytes"] else ""
        lines.append(f"{fetch['name']}: {what}, {origin(fetch, endpoint)}{reused}")
        lines += [f"{fetch['name']}: {problem}" for problem in fetch["problems"][:3]]
    return lines


def space_problem(fetches: list[dict[str, Any]]) -> str:
    """Return why the disk cannot take it, or an empty text."""
    needed = sum(fetch["needed_bytes"] for fetch in fetches)
    free = min((fetch["free_bytes"] for fetch in fetches), default=0)
    if not needed or needed + SPARE_BYTES <= free:
        return ""
    shares = ", ".join(f"{fetch['name']} {size_text(fetch['needed_bytes'])}" for fetch in fetches)
    lacks, free_text = size_text(needed + SPARE_BYTES - free), size_text(free)
    return (
        f"{ROOT} lacks {lacks}: {size_text(needed)} are still to come ({shares}), {size_text(SPARE_BYTES)} are to "
        f"spare, {free_text} are free. Make room (playbooks/prune_weights.yml lists what no replica uses), or mount a "
        "larger disk there"
    )


def requests(fetches: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by artifact name the request that the node's program reads.

    :param settings: ``endpoint``, ``token_file``, ``python``, ``transports``, ``streams``, ``stall_s``, ``tries``,
        ``minimum_rate``.
    """
    return {
        fetch["name"]: {
            "schema": 1,
            "root": ROOT,
            **{name: fetch[name] for name in ("name", "key", "source", "digest")},
            # What lies on the node is listed by the program itself.
            "files": fetch["files"] if needs_http(fetch) else {},
            "upstreams": fetch["urls"],
            **settings,
            "endpoint": fetch["source"].get("endpoint") or settings["endpoint"],
            # A token is for the hub, not for peers, mirrors and folders.
            "token_file": settings["token_file"] if fetch["source"]["type"] == "hub" and not fetch["urls"] else "",
            "streams": min(PEER_STREAMS, settings["streams"]) if fetch["urls"] else settings["streams"],
            "processes": 0,
            "report_s": 5,
        }
        for fetch in fetches
    }


def results(artifacts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what later roles need; ``auto`` stands for what a dry run could not make, 0 draft tokens for not told."""
    return {
        "digests": {key: artifact["digest"] or "auto" for key, artifact in artifacts.items()},
        "folders": {key: artifact["folder"] for key, artifact in artifacts.items()},
        "draft_tokens": {key: artifact["draft_tokens"] for key, artifact in artifacts.items()},
    }


def serve_address(given: str, known: str, facts: dict[str, Any]) -> str:
    """Return the address by which its peers reach a node, or an empty text.

    :param given: what the operator said.
    :param known: how Ansible reaches it.
    :param facts: the node's network facts.
    """
    own = [*facts.get("all_ipv4_addresses", []), *facts.get("all_ipv6_addresses", [])]
    candidates = [given] if given else [known if known in own else ""]
    if not given:
        candidates += [facts.get(name, {}).get("address", "") for name in ("default_ipv4", "default_ipv6")]
    for candidate in candidates:
        try:
            address = ipaddress.ip_address(candidate)
        except ValueError:
            continue
        if not address.is_loopback and not address.is_link_local and not address.is_unspecified:
            return str(address)
    return ""


def read_peer(host: str, site: str, address: str, port: int, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a node outside of the play as ``fan_out`` knows nodes.

    :param records: by artifact name ``{"key": ..., "record": content of its .sources/KEY.json}``.
    """
    return {
        "host": host,
        "site": site,
        "address": address,
        "port": port,
        "artifacts": {
            name: {
                "name": name,
                "source": found["record"]["source"],
                "key": found["key"],
                "state": "complete",
                "digest": found["record"]["digest"],
                "folder": f"{ROOT}/{name}/{found['record']['digest'][:12]}",
            }
            for name, found in records.items()
        },
    }
