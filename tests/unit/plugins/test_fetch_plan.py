"""What a node fetches in a run, and what it says about it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.filter import model_weights as filters
from ansible_collections.serving.gpu_node.plugins.module_utils import fetch_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import build_manifest
from hypothesis import given
from hypothesis import strategies as st

HUB = {"type": "hub", "repository": "owner/name", "revision": "a" * 40}
FILES = {"a.bin": {"size": 10, "sha256": "1" * 64}, "b.bin": {"size": 20, "sha256": "2" * 64}}
SETTINGS: dict[str, Any] = {
    "endpoint": "https://hub.example",
    "token_file": "/secret",
    "python": "/venv/bin/python",
    "transports": ["xet", "http"],
    "streams": 8,
    "stall_s": 60,
    "tries": 3,
    "minimum_rate": 65536,
}


def fetch(source: dict[str, Any] | None = None, upstreams: tuple[str, ...] = (), **look: Any) -> dict[str, Any]:
    """One artifact's fetch, as the role puts it together."""
    source = source or HUB
    artifacts = {
        "model": {"name": "m", "source": source, "key": "k" * 12, "state": look.pop("state", "missing")}
        | {"digest": "", "folder": "", "problems": ["m is broken"]}
    }
    way = {
        "model": {
            "seed": "n1",
            "seed_key": "model",
            "seed_digest": "",
            "upstreams": list(upstreams),
            "urls": [f"http://10.0.0.1:8189/m/{name}" for name in upstreams],
        }
    }
    measured = {"item": {"key": "model"}, "needed_bytes": 30, "reused_bytes": 0, "free_bytes": 1 << 40}
    measured |= {"missing_files": list(FILES), **look}
    (made,) = fetch_plan.to_fetch(artifacts, way, {"model": {"files": FILES, "bytes": 30}}, [measured])
    return made


def told(made: dict[str, Any]) -> dict[str, Any]:
    return fetch_plan.requests([made], SETTINGS)["m"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (HUB, "hub.example: owner/name at aaaaaaaaaaaa"),
        ({**HUB, "folder": "x/y", "endpoint": "https://cache.example"}, "cache.example: owner/name, folder x/y at"),
        ({"type": "mirror", "url": "https://m.example/f", "digest": "d" * 64}, "from https://m.example/f"),
        ({"type": "path", "path": "/srv/x"}, "from /srv/x, copied"),
        ({"type": "path", "path": "/srv/x", "adopt": True}, "from /srv/x, where it lies"),
        ({"type": "archive", "path": "/srv/x.tar"}, "from /srv/x.tar"),
        ({"type": "generated", "seed": 0}, "generated on the node"),
    ],
)
def test_where_it_comes_from_is_said(source: dict[str, Any], words: str) -> None:
    assert words in fetch_plan.describe([fetch(source)], SETTINGS["endpoint"])[0]


def test_files_and_size_are_said_and_what_is_here_already() -> None:
    made = fetch(needed_bytes=20_000_000, reused_bytes=5_000_000, missing_files=["b.bin"])
    (line,) = fetch_plan.describe([made], SETTINGS["endpoint"])
    assert line.startswith("m: 1 of 2 files, 20.0 MB, from ")
    assert line.endswith("; 5.0 MB are here already")


def test_damage_is_said_and_that_nothing_was_there_is_not() -> None:
    assert len(fetch_plan.describe([fetch()], "")) == 1
    assert fetch_plan.describe([fetch(state="damaged")], "")[1] == "m: m is broken"


def test_from_a_node_two_files_come_at_once_without_a_token() -> None:
    made = told(fetch(upstreams=("n1", "n0")))
    assert made["upstreams"] == ["http://10.0.0.1:8189/m/n1", "http://10.0.0.1:8189/m/n0"]
    assert (made["streams"], made["token_file"]) == (2, "")
    assert fetch_plan.needs_http(fetch({"type": "path", "path": "/x"}, upstreams=("n1",)))


def test_from_the_hub_the_token_goes_along_and_a_sources_own_endpoint_is_used() -> None:
    assert (told(fetch())["streams"], told(fetch())["token_file"]) == (8, "/secret")
    assert told(fetch({**HUB, "endpoint": "https://cache.example"}))["endpoint"] == "https://cache.example"


@pytest.mark.parametrize("kind", ["path", "archive", "generated", "mirror"])
def test_a_token_is_for_the_hub_alone(kind: str) -> None:
    assert told(fetch({"type": kind, "path": "/x", "url": "https://x"}))["token_file"] == ""


def test_what_lies_on_the_node_is_listed_by_the_program() -> None:
    assert told(fetch({"type": "path", "path": "/x"}))["files"] == {}
    assert told(fetch())["files"] == FILES


@pytest.mark.parametrize(("free", "refused"), [((1 << 28) + 30, False), ((1 << 28) + 29, True)])
def test_room_is_what_lacks_and_a_spare(free: int, refused: bool) -> None:
    problem = fetch_plan.space_problem([fetch(free_bytes=free)])
    assert bool(problem) == refused
    if refused:
        assert "lacks 1 B: 30 B are still to come (m 30 B), 268.4 MB are to spare, 268.4 MB are free" in problem


def test_two_artifacts_share_the_room() -> None:
    free = (1 << 28) + 40
    assert fetch_plan.space_problem([fetch(free_bytes=free)]) == ""
    assert "60 B are still to come" in fetch_plan.space_problem([fetch(free_bytes=free)] * 2)


def test_what_is_complete_or_adopted_needs_no_room() -> None:
    assert fetch_plan.space_problem([]) == ""
    assert fetch_plan.space_problem([fetch(needed_bytes=0, free_bytes=0)]) == ""
    assert fetch_plan.space_problem([fetch({"type": "path", "path": "/x", "adopt": True}, free_bytes=0)]) == ""


FACTS = {
    "default_ipv4": {"address": "10.0.0.5"},
    "default_ipv6": {"address": "fd00::5"},
    "all_ipv4_addresses": ["10.0.0.5", "192.168.1.5"],
    "all_ipv6_addresses": ["fe80::1"],
}


@pytest.mark.parametrize(
    ("given_address", "known", "facts", "address"),
    [
        ("", "192.168.1.5", FACTS, "192.168.1.5"),
        ("", "node.example", FACTS, "10.0.0.5"),
        ("", "127.0.0.1", FACTS, "10.0.0.5"),
        ("192.168.1.5", "10.0.0.5", {}, "192.168.1.5"),
        ("", "x", {"default_ipv6": {"address": "fd00::5"}}, "fd00::5"),
        ("127.0.0.1", "x", FACTS, ""),
        ("no address", "x", FACTS, ""),
        ("", "x", {"default_ipv6": {"address": "fe80::1"}}, ""),
        ("", "x", {}, ""),
    ],
)
def test_the_address_by_which_peers_reach_a_node(
    given_address: str, known: str, facts: dict[str, Any], address: str
) -> None:
    assert fetch_plan.serve_address(given_address, known, facts) == address
    assert filters.weights_address(given_address, known, {f"ansible_{key}": facts[key] for key in facts}) == address


@given(st.integers(0, 10**15))
def test_sizes_are_short(count: int) -> None:
    assert len(fetch_plan.size_text(count)) <= 9


def slurped(text: str, **more: Any) -> dict[str, Any]:
    return {"content": base64.b64encode(text.encode()).decode(), **more}


def manifest_of(digest: str = "") -> dict[str, Any]:
    manifest = build_manifest("m", HUB, FILES)
    way = {"key": "model", "value": {"seed": "n1", "seed_digest": digest or manifest["digest"]}}
    return slurped(json.dumps(manifest), source="/x/manifest", item={"item": way})


def test_the_list_is_the_sources_or_that_of_a_node_that_has_it() -> None:
    asked = {"item": {"key": "drafter"}, "files": FILES, "bytes": 30}
    found = filters.weights_listings([asked], [manifest_of()])
    assert found == {"drafter": {"files": FILES, "bytes": 30}, "model": {"files": FILES, "bytes": 30}}


def test_a_manifest_of_another_artifact_is_refused() -> None:
    with pytest.raises(AnsibleFilterError, match=r"n1: /x/manifest is of .*, not of eeeeeeeeeeee"):
        filters.weights_listings([], [manifest_of("e" * 64)])
    broken = {**manifest_of(), **slurped("{}")}
    with pytest.raises(AnsibleFilterError, match="n1: /x/manifest: "):
        filters.weights_listings([], [broken])


def test_a_dry_run_says_would() -> None:
    assert filters.weights_described([fetch()], "", True)[0].startswith("would fetch m: ")
    assert filters.weights_described([fetch()], "", False)[0].startswith("to fetch: m: ")


def test_what_a_dry_run_could_not_make_is_auto() -> None:
    artifacts = {
        "model": {"digest": "", "folder": "", "draft_tokens": 0},
        "drafter": {"digest": "d" * 64, "folder": "/x", "draft_tokens": 7},
    }
    assert fetch_plan.results(artifacts) == {
        "digests": {"model": "auto", "drafter": "d" * 64},
        "folders": {"model": "", "drafter": "/x"},
        "draft_tokens": {"model": 0, "drafter": 7},
    }


def test_unused_folders_are_listed_with_what_they_free() -> None:
    one = {"folder": "/a/m/1", "bytes": 2_000_000, "why": "its bytes were wrong"}
    assert filters.weights_unused([one], False) == [
        "/a/m/1: 2.0 MB, its bytes were wrong",
        "2.0 MB in 1 folders, removed by -e prune_weights_remove=true",
    ]
    assert filters.weights_unused([], True) == ["every artifact is in use"]


def test_a_peer_outside_of_the_play_is_a_node_with_its_own_address_and_port() -> None:
    record = {"digest": "d" * 64, "source": HUB}
    item = {"item": {"key": "model", "value": {"name": "m", "source": {"type": "peer", "node": "x"}}}}
    read = slurped(json.dumps(record), source="/var/lib/gpu-node/artifacts/m/.sources/kkkkkkkkkkkk.json", item=item)
    network = {"ansible_facts": {"ansible_default_ipv4": {"address": "10.0.0.9"}}}
    (peer,) = filters.weights_peers([read], [network], {"x": {"model_weights_serve_port": 9000}}, "default", 8189)
    assert (peer["host"], peer["address"], peer["port"], peer["site"]) == ("x", "10.0.0.9", 9000, "default")
    artifact = peer["artifacts"]["m"]
    assert (artifact["key"], artifact["state"], artifact["digest"]) == ("k" * 12, "complete", "d" * 64)
    with pytest.raises(AnsibleFilterError, match="x has no address"):
        filters.weights_peers([read], [{}], {"x": {}}, "default", 8189)
