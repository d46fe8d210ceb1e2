"""Bad input gets one clear error before anything changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from nodes import HOST, Node, free_port

OUTSIDE = {"balancer_address": "0.0.0.0"}


def refused(served: Node, extra: dict[str, Any], *words: str) -> None:
    """site.yml fails with these words, in one error, and changed nothing."""
    before = served.ssh(
        "gpu-node status --json; find /etc/gpu-node /etc/nginx /var/lib/gpu-node/releases -newer /etc/hostname | wc -l"
    )
    play = served.playbook(extra=extra)
    assert play.rc == 2, play.tail()
    assert play.changed == 0
    # A loop's item fails as "failed: ", everything else as "fatal: ".
    assert len(re.findall(r"^(?:fatal|failed): ", play.output, re.MULTILINE)) == 1, play.tail()
    message = " ".join(play.output.split())
    for word in words:
        assert word in message, f"{word!r} is not in:\n{play.tail()}"
    after = served.ssh(
        "gpu-node status --json; find /etc/gpu-node /etc/nginx /var/lib/gpu-node/releases -newer /etc/hostname | wc -l"
    )
    assert after == before


def full(*values: Any) -> Any:
    """A case of make test-full: each play costs as much as the next, and unit tests have them all."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"max_num_seq": 8}, ["unknown setting 'max_num_seq'", "'max_num_seqs'"]),
        full({"max_num_seqs": "8"}, ["max_num_seqs: '8' is str", "a whole number of sequences is needed"]),
        full({"kv_cache_memory": "18GiB"}, ["kv_cache_memory: '18GiB'", "write 18G for 18 GiB"]),
        full({"replicas": 60}, ["replicas: 60 needs as many CPUs", "or less"]),
        full({"engine_args": {"api-key": "x"}}, ["'api-key' is not for overriding"]),
        (
            {"max_model_len": "2k", "container_memory": "3GB"},
            ["max_model_len: '2k' is str", "container_memory: '3GB'", "nothing was changed"],
        ),
    ],
)
def test_settings(served: Node, overrides: dict[str, Any], words: list[str]) -> None:
    refused(served, {"serving_plan_overrides": {**OUTSIDE, **overrides}}, *words)


def test_an_unknown_profile_names_the_known_ones(served: Node) -> None:
    refused(served, {"serving_plan_profile": "16x"}, "unknown profile '16x'", "the known ones are 2x, 8x, cpu")


def test_listening_outside_needs_a_client_key(served: Node) -> None:
    refused(
        served, {"balancer_client_keys": []}, "no client key is set", "set balancer_client_keys or listen on 127.0.0.1"
    )


def test_a_variable_of_a_later_role_with_the_wrong_type_fails_first(served: Node) -> None:
    refused(served, {"balancer_client_keys": [{"name": "a"}]}, "missing required arguments: key")


@contextmanager
def listening(served: Node, port: int) -> Iterator[None]:
    served.ssh(f"systemd-run --quiet --unit squatter /usr/bin/python3 -m http.server --bind 127.0.0.1 {port}")
    served.ssh(f"for i in $(seq 50); do ss -ltn | grep -q :{port} && exit 0; sleep 0.1; done; exit 1")
    try:
        yield
    finally:
        served.ssh("systemctl stop squatter")


def test_a_port_that_something_else_has(served: Node) -> None:
    with listening(served, 8101):
        refused(
            served,
            {"serving_plan_overrides": {**OUTSIDE, "first_port": 8100}},
            "port 8101, wanted for replica 1, is in use by process",
            "http.server",
        )


def test_a_node_that_cannot_be_reached_is_named(served: Node) -> None:
    other = served.folder / "unreachable.json"
    port = free_port()
    hostvars = {
        "ansible_host": "127.0.0.1",
        "ansible_port": port,
        "ansible_ssh_common_args": "-o ConnectTimeout=3",
    }
    other.write_text(json.dumps({"gpu_nodes": {"hosts": {HOST: hostvars}}}))
    play = served.playbook("-i", str(other))
    assert play.rc == 4
    assert f"ssh: connect to host 127.0.0.1 port {port}: Connection refused" in " ".join(play.output.split())
    assert play.recap[HOST]["unreachable"] == 1
    assert play.changed == 0
