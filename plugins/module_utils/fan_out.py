# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Which node of a play gets an artifact from where, so that a source is asked by one node of a site alone.

Pure functions. The nodes of a site that want the same artifact form a chain: those that have it come first, then the
others in the order in which Ansible works on them. So a node waits for earlier ones only, and a play with fewer forks
than nodes cannot lock itself up. The first node asks the source; every other one asks the one before it, and the seed
(the nearest node that has it all, else the first one) where that one fails.

There are two rounds: first the nodes that ask sources, and then those whose source is a peer, which has it all by then.

A node is ``{"host", "site", "address", "port", "artifacts"}``; an artifact, by its key in the plan, is ``{"name",
"source", "key", "state", "digest", "folder"}``.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

# What a node asks over the network. The other types are the node's own business.
SHARED = ("hub", "mirror")
ROUNDS = {"sources": ("hub", "mirror", "path", "archive", "generated"), "peers": ("peer",)}


@dataclass(frozen=True)
class Seat:
    """One node's place in a chain."""

    node: dict[str, Any]
    plan_key: str
    artifact: dict[str, Any]

    @property
    def host(self) -> str:
        return str(self.node["host"])

    @property
    def complete(self) -> bool:
        return bool(self.artifact["state"] == "complete")

    @property
    def named_peer(self) -> str:
        """The node that this one's source names, if it does."""
        source = self.artifact["source"]
        return str(source["node"]) if source["type"] == "peer" else ""

    @property
    def url(self) -> str:
        address = ipaddress.ip_address(self.node["address"])
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"http://{host}:{self.node['port']}/{self.artifact['name']}/{self.artifact['key']}"


def _identity(seat: Seat, seats: dict[tuple[str, str], Seat]) -> tuple[str, ...]:
    """Return what the seats of one chain have in common."""
    name = seat.artifact["name"]
    passed = [seat.host]
    end = seat
    while (peer := end.named_peer) and (peer, name) in seats:
        if peer in passed:
            # They name each other in a circle: nobody has it, which `ways` says.
            return ("own", seat.host, name)
        end = seats[peer, name]
        passed.append(peer)
    if end.artifact["source"]["type"] in SHARED:
        return ("shared", str(end.node["site"]), name, end.artifact["key"])
    return ("own", end.host, name)


def chains(nodes: list[dict[str, Any]], outside: list[dict[str, Any]], round_name: str) -> list[list[Seat]]:
    """Return the chains of a batch of nodes, each in its order.

    :param nodes: the batch, in Ansible's order.
    :param outside: nodes that are not in the batch; only what they have complete counts.
    :param round_name: whose turn it is, see ``ROUNDS``; what others lack does not count.
    """
    everywhere = [Seat(node, key, artifact) for node in outside for key, artifact in node["artifacts"].items()]
    everywhere = [seat for seat in everywhere if seat.complete]
    everywhere += [Seat(node, key, artifact) for node in nodes for key, artifact in node["artifacts"].items()]
    seats = [seat for seat in everywhere if seat.complete or seat.artifact["source"]["type"] in ROUNDS[round_name]]
    by_name = {(seat.host, seat.artifact["name"]): seat for seat in seats}
    found: dict[tuple[str, ...], list[Seat]] = {}
    for seat in seats:
        found.setdefault(_identity(seat, by_name), []).append(seat)
    return [sorted(chain, key=lambda seat: not seat.complete) for chain in found.values()]


def _seed(chain: list[Seat]) -> Seat:
    complete = [seat for seat in chain if seat.complete]
    return complete[-1] if complete else chain[0]


def _upstreams(chain: list[Seat], place: int) -> list[Seat]:
    """Return whom a node asks, the nearest one first; nobody when it asks its source."""
    seed = _seed(chain)
    if chain[place] is seed:
        return []
    before = chain[place - 1]
    return [before] if before is seed else [before, seed]


def ways(
    nodes: list[dict[str, Any]], outside: list[dict[str, Any]], round_name: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return, by host and by the plan's key of each artifact that is not complete there, how it comes to the node.

    ``seed``: the node that knows the list of files (itself, when it asks the source); ``seed_key``: that node's own key
    of the artifact in its plan; ``seed_digest``: the artifact's digest when the seed has it all; ``upstreams``: the
    nodes to ask, and ``urls`` their addresses; ``problem``: why it cannot come, or empty.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {node["host"]: {} for node in nodes}
    for chain in chains(nodes, outside, round_name):
        seed = _seed(chain)
        for place, seat in enumerate(chain):
            if seat.complete:
                continue
            asked = _upstreams(chain, place)
            # Without one that has it, the first of those that name a peer has nobody to ask, and the others only it.
            problem = _lacking_peer(seat) if seed.named_peer and not seed.complete else ""
            found[seat.host][seat.plan_key] = {
                "seed": seed.host,
                "seed_key": seed.plan_key,
                "seed_digest": seed.artifact["digest"] if seed.complete else "",
                "upstreams": [upstream.host for upstream in asked],
                "urls": [upstream.url for upstream in asked] if all(one.node["address"] for one in asked) else [],
                "problem": problem,
            }
    return found


def _lacking_peer(seat: Seat) -> str:
    name = seat.artifact["name"]
    return (
        f"{seat.plan_key} of {seat.host}: node {seat.named_peer} has no complete artifact '{name}' and does not get "
        "one in this run; run site.yml on it first, or give another source"
    )


def servers(nodes: list[dict[str, Any]], outside: list[dict[str, Any]], round_name: str) -> dict[str, dict[str, Any]]:
    """Return by host what a node has to serve to others, and to whom.

    ``folder`` is empty for what the node is still fetching itself.
    """
    found: dict[str, dict[str, Any]] = {}
    for chain in chains(nodes, outside, round_name):
        for place, seat in enumerate(chain):
            if seat.complete:
                continue
            for upstream in _upstreams(chain, place):
                server = found.setdefault(
                    upstream.host,
                    {
                        "address": upstream.node["address"],
                        "port": upstream.node["port"],
                        "clients": [],
                        "artifacts": [],
                    },
                )
                if seat.node["address"] not in server["clients"]:
                    server["clients"].append(seat.node["address"])
                entry = {
                    "name": upstream.artifact["name"],
                    "key": upstream.artifact["key"],
                    "folder": upstream.artifact["folder"] if upstream.complete else "",
                }
                if entry not in server["artifacts"]:
                    server["artifacts"].append(entry)
    return found


def differing(nodes: list[dict[str, Any]], outside: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for every chain whose nodes do not have the same artifact."""
    problems = []
    for chain in chains(nodes, outside, "peers"):
        digests: dict[str, list[str]] = {}
        for seat in (seat for seat in chain if seat.complete):
            digests.setdefault(seat.artifact["digest"], []).append(seat.host)
        if len(digests) > 1:
            who = "; ".join(f"{digest[:12]} on {', '.join(hosts)}" for digest, hosts in digests.items())
            problems.append(f"{chain[0].artifact['name']} differs between nodes that share its source: {who}")
    return problems
