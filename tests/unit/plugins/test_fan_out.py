"""Who asks whom for an artifact."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.fan_out import differing, servers, ways

HUB = {"type": "hub", "repository": "owner/name", "revision": "a" * 40}
DIGEST = "d" * 64


def node(number: int, state: str = "missing", source: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A node whose plan has one artifact."""
    artifact = {
        "name": "m",
        "source": source or HUB,
        "key": more.pop("key", "k" * 12),
        "state": state,
        "digest": more.pop("digest", DIGEST if state == "complete" else ""),
        "folder": "/srv/m/dddddddddddd" if state == "complete" else "",
    }
    return {
        "host": f"n{number}",
        "site": "default",
        "address": f"10.0.0.{number}",
        "port": 8189,
        "artifacts": {"model": artifact},
        **more,
    }


def upstreams(
    nodes: list[dict[str, Any]], outside: list[dict[str, Any]] | None = None, turn: str = "sources"
) -> dict[str, list[str]]:
    return {host: way["model"]["upstreams"] for host, way in ways(nodes, outside or [], turn).items() if way}


def test_one_node_asks_the_source_and_serves_nobody() -> None:
    assert upstreams([node(1)]) == {"n1": []}
    assert servers([node(1)], [], "sources") == {}


def test_the_first_asks_the_source_and_each_other_the_one_before_it() -> None:
    nodes = [node(1), node(2), node(3), node(4)]
    assert upstreams(nodes) == {"n1": [], "n2": ["n1"], "n3": ["n2", "n1"], "n4": ["n3", "n1"]}
    assert {host: server["clients"] for host, server in servers(nodes, [], "sources").items()} == {
        "n1": ["10.0.0.2", "10.0.0.3", "10.0.0.4"],
        "n2": ["10.0.0.3"],
        "n3": ["10.0.0.4"],
    }


def test_addresses_are_made_of_address_name_and_the_servers_own_key() -> None:
    nodes = [node(1, address="fd00::1"), node(2)]
    assert ways(nodes, [], "sources")["n2"]["model"]["urls"] == ["http://[fd00::1]:8189/m/kkkkkkkkkkkk"]
    assert ways([node(1, address=""), node(2)], [], "sources")["n2"]["model"]["urls"] == []


def test_a_node_that_has_it_is_the_seed_and_the_source_is_not_asked() -> None:
    nodes = [node(1), node(2, "complete"), node(3)]
    found = ways(nodes, [], "sources")
    assert {host: way["model"]["upstreams"] for host, way in found.items() if way} == {"n1": ["n2"], "n3": ["n1", "n2"]}
    assert found["n1"]["model"]["seed"] == "n2"
    assert found["n1"]["model"]["seed_digest"] == DIGEST
    assert servers(nodes, [], "sources")["n2"]["artifacts"] == [
        {"name": "m", "key": "k" * 12, "folder": "/srv/m/dddddddddddd"}
    ]


def test_of_several_that_have_it_the_nearest_serves() -> None:
    nodes = [node(1, "complete"), node(2, "complete"), node(3)]
    assert upstreams(nodes) == {"n3": ["n2"]}
    assert list(servers(nodes, [], "sources")) == ["n2"]


def test_all_complete_needs_nobody() -> None:
    nodes = [node(1, "complete"), node(2, "complete")]
    assert upstreams(nodes) == {}
    assert servers(nodes, [], "sources") == {}


def test_a_batch_gets_it_from_an_earlier_one() -> None:
    assert upstreams([node(2), node(3)], [node(1, "complete")]) == {"n2": ["n1"], "n3": ["n2", "n1"]}


def test_what_an_outside_node_lacks_does_not_count() -> None:
    assert upstreams([node(2)], [node(1, "damaged")]) == {"n2": []}


@pytest.mark.parametrize("other", [{"site": "elsewhere"}, {"key": "x" * 12}])
def test_another_site_or_another_source_is_another_chain(other: dict[str, Any]) -> None:
    assert upstreams([node(1), node(2, **other)]) == {"n1": [], "n2": []}


def test_a_path_is_each_nodes_own() -> None:
    source = {"type": "path", "path": "/srv/m"}
    assert upstreams([node(1, source=source), node(2, source=source)]) == {"n1": [], "n2": []}


def peer_of(number: int) -> dict[str, Any]:
    return {"type": "peer", "node": f"n{number}"}


def test_a_named_peer_is_asked_in_a_round_of_its_own_when_it_has_it() -> None:
    path = {"type": "path", "path": "/x"}
    before = [node(1, source=peer_of(2), key="p" * 12), node(2, source=path)]
    assert upstreams(before) == {"n2": []}
    after = [node(1, source=peer_of(2), key="p" * 12), node(2, "complete", source=path)]
    found = ways(after, [], "peers")["n1"]["model"]
    assert found["upstreams"] == ["n2"]
    assert found["urls"] == ["http://10.0.0.2:8189/m/kkkkkkkkkkkk"], "the key is the server's own"
    assert found["seed_digest"] == DIGEST


def test_several_that_name_one_peer_are_a_chain() -> None:
    nodes = [node(1, source=peer_of(9)), node(2, source=peer_of(9))]
    assert upstreams(nodes, [node(9, "complete")], "peers") == {"n1": ["n9"], "n2": ["n1", "n9"]}


def test_a_peer_of_a_peer_is_in_its_chain() -> None:
    nodes = [node(1, source=peer_of(2)), node(2, source=peer_of(9))]
    assert upstreams(nodes, [node(9, "complete")], "peers") == {"n1": ["n9"], "n2": ["n1", "n9"]}


def test_a_peer_that_does_not_have_it_is_named() -> None:
    nodes = [node(1, source=peer_of(9)), node(2)]
    found = ways(nodes, [], "peers")["n1"]["model"]["problem"]
    assert found.startswith("model of n1: node n9 has no complete artifact 'm'")
    assert ways(nodes, [], "sources")["n2"]["model"]["problem"] == ""


def test_nodes_that_name_each_other_are_each_told() -> None:
    found = ways([node(1, source=peer_of(2)), node(2, source=peer_of(1))], [], "peers")
    assert "node n2 has no" in found["n1"]["model"]["problem"]
    assert "node n1 has no" in found["n2"]["model"]["problem"]


def test_other_bytes_from_one_source_are_named() -> None:
    nodes = [node(1, "complete"), node(2, "complete"), node(3, "complete", digest="e" * 64)]
    assert differing(nodes, []) == [
        "m differs between nodes that share its source: dddddddddddd on n1, n2; eeeeeeeeeeee on n3"
    ]
    assert differing(nodes[:2], []) == []
