"""Real nodes for the integration tests.

KEEP_NODES=1 leaves the nodes running at the end and takes them over in the next run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import image_cache
import pytest
from nodes import Node, NodeError, call_testhost, free_port
from testhost import STATE

NodeFactory = Callable[..., Node]
HERE = Path(__file__).resolve().parent
KEEP = os.environ.get("KEEP_NODES") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)
    # They begin on the bare node that later serves for all the others: a node of their own would cost minutes.
    items.sort(key=lambda item: item.path.name != "test_interrupted.py")


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine and the node image."""
    call_testhost("image")


@pytest.fixture(scope="session")
def node(engine: None) -> Iterator[NodeFactory]:
    """`node("name")`: a booted bare node, the same one for every test that asks for that name."""
    nodes: dict[str, Node] = {}

    def boot(name: str) -> Node:
        if name not in nodes:
            one = kept_node(name) or new_node(name)
            one.up()
            (one.folder / "ports.json").write_text(json.dumps([one.ssh_port, one.http_port]))
            nodes[name] = one
        return nodes[name]

    yield boot
    if not KEEP:
        for one in nodes.values():
            one.down()


def container_name(name: str) -> str:
    return f"gpu-node-test-{name}"


def mounts() -> tuple[str, ...]:
    image_cache.CACHE.mkdir(parents=True, exist_ok=True)
    return (f"{image_cache.CACHE}:{image_cache.MOUNT}:ro",)


def kept_node(name: str) -> Node | None:
    ports = STATE / "nodes" / container_name(name) / "ports.json"
    if not KEEP or not ports.exists():
        return None
    ssh_port, http_port = json.loads(ports.read_text())
    return Node(container_name(name), ssh_port, http_port, mounts())


def new_node(name: str) -> Node:
    """A fresh one, also when an interrupted run left one of that name."""
    one = Node(container_name(name), free_port(), free_port(), mounts())
    one.down()
    return one


@pytest.fixture(scope="session")
def archive_made(node: NodeFactory) -> None:
    """The serving image as an archive, built on a node of its own where no scenario has built it before."""
    if not image_cache.archive().exists():
        builder = node("archive")
        builder.converge()
        image_cache.save(builder.container)


@pytest.fixture(scope="session")
def served(node: NodeFactory) -> Node:
    """The node that site.yml made serve: two replicas behind the balancer."""
    one = node("served")
    one.converge()
    image_cache.save(one.container)
    return one


@pytest.fixture(scope="session")
def image_archive(served: Node) -> Path:
    """The serving image as an archive on this machine; nodes see its folder at image_cache.MOUNT."""
    archive = image_cache.archive()
    if not archive.exists():
        raise NodeError(f"{archive} is missing although {served.container} serves")
    return archive
