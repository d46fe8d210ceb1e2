# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Filters around the pure functions of the role model_weights."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.module_utils import fan_out, fetch_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import ManifestError, parse_manifest

Results = list[dict[str, Any]]


def _content(slurped: dict[str, Any]) -> str:
    return base64.b64decode(slurped["content"]).decode(errors="replace")


def weights_address(given: str, known: str, facts: dict[str, Any]) -> str:
    """Return the address by which its peers reach a node; see ``fetch_plan.serve_address``.

    :param facts: what ``setup`` says.
    """
    return fetch_plan.serve_address(given, known, {name.removeprefix("ansible_"): facts[name] for name in facts})


def weights_peers(
    records: Results, networks: Results, hostvars: Mapping[str, Any], site: str, port: int
) -> list[dict[str, Any]]:
    """Return nodes outside of the play as ``fan_out`` knows nodes.

    :param records: results of reading the record of each named artifact.
    :param networks: results of asking each of these nodes for its addresses, in the same order.
    :param site: the site of the node that names them, and ``port`` its port; a peer's own go before them.
    """
    peers = []
    for record, network in zip(records, networks, strict=True):
        wanted = record["item"]["item"]["value"]
        host = wanted["source"]["node"]
        known = hostvars[host]
        address = weights_address(
            known.get("model_weights_serve_address", ""),
            known.get("ansible_host", host),
            network.get("ansible_facts", {}),
        )
        if not address:
            raise AnsibleFilterError(
                f"{host} has no address by which its peers reach it; set model_weights_serve_address"
            )
        found = {
            "key": record["source"].rpartition("/")[2].removesuffix(".json"),
            "record": json.loads(_content(record)),
        }
        port = int(known.get("model_weights_serve_port", port))
        peers.append(
            fetch_plan.read_peer(host, known.get("model_weights_site", site), address, port, {wanted["name"]: found})
        )
    return peers


def weights_listings(listed: Results, manifests: Results) -> dict[str, dict[str, Any]]:
    """Return by key of the plan what is to be fetched: files and bytes.

    :param listed: results of the module ``artifact_source``.
    :param manifests: results of reading the manifests of nodes that have an artifact already.
    """
    found = {
        item["item"]["key"]: {"files": item.get("files") or {}, "bytes": item.get("bytes") or 0}
        for item in listed
        if "files" in item
    }
    for slurped in manifests:
        way = slurped["item"]["item"]
        try:
            manifest = parse_manifest(_content(slurped))
        except ManifestError as error:
            raise AnsibleFilterError(f"{way['value']['seed']}: {slurped['source']}: {error}") from error
        if manifest["digest"] != way["value"]["seed_digest"]:
            raise AnsibleFilterError(
                f"{way['value']['seed']}: {slurped['source']} is of {manifest['digest'][:12]}, "
                f"not of {way['value']['seed_digest'][:12]}"
            )
        files = manifest["files"]
        found[way["key"]] = {"files": files, "bytes": sum(entry["size"] for entry in files.values())}
    return found


def weights_lists(
    ways: dict[str, dict[str, Any]], listings: dict[str, dict[str, dict[str, Any]]], host: str
) -> dict[str, dict[str, Any]]:
    """Return by key of the plan the list that a node goes by: its own, or that of the node that asks the source."""
    return {
        key: listings[host][key] if key in listings[host] else listings[way["seed"]][way["seed_key"]]
        for key, way in ways.items()
    }


def weights_fetches(
    artifacts: dict[str, Any], ways: dict[str, Any], lists: dict[str, Any], measures: Results
) -> list[dict[str, Any]]:
    """Return what a node fetches; see ``fetch_plan.to_fetch``."""
    return [
        {**fetch, "http": fetch_plan.needs_http(fetch)}
        for fetch in fetch_plan.to_fetch(artifacts, ways, lists, measures)
    ]


def weights_described(fetches: list[dict[str, Any]], endpoint: str, dry: bool) -> list[str]:
    """Say what is, or in a dry run would be, fetched."""
    return [("would fetch " if dry else "to fetch: ") + line for line in fetch_plan.describe(fetches, endpoint)]


def weights_unused(found: list[dict[str, Any]], remove: bool) -> list[str]:
    """Say what nothing uses, and what becomes of it; see ``gpu-node-weights unused --json``."""
    if not found:
        return ["every artifact is in use"]
    lines = [f"{one['folder']}: {fetch_plan.size_text(one['bytes'])}, {one['why']}" for one in found]
    total = fetch_plan.size_text(sum(one["bytes"] for one in found))
    end = "removed now" if remove else "removed by -e prune_weights_remove=true"
    return [*lines, f"{total} in {len(found)} folders, {end}"]


class FilterModule:
    """What Ansible loads."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "weights_address": weights_address,
            "weights_described": weights_described,
            "weights_differing": fan_out.differing,
            "weights_fetches": weights_fetches,
            "weights_found": fetch_plan.found_artifacts,
            "weights_listings": weights_listings,
            "weights_lists": weights_lists,
            "weights_peers": weights_peers,
            "weights_requests": fetch_plan.requests,
            "weights_result": fetch_plan.results,
            "weights_servers": fan_out.servers,
            "weights_space_problem": fetch_plan.space_problem,
            "weights_unused": weights_unused,
            "weights_ways": fan_out.ways,
        }
