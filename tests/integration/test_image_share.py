"""One node builds the image, the others take it: the same bytes everywhere, from each other or from a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nodes import Node, Play

from .images import CREDENTIALS, NAME, REGISTRY, images, plan, role_play, role_variables, trust, with_registry
from .weights import Fleet

# Two nodes and several builds: minutes.
pytestmark = pytest.mark.full

IMAGE = "localhost/gpu-node/vllm-cuda"
ROOM = {
    "name": "room",
    "hosts": "gpu_nodes",
    "gather_facts": False,
    "become": True,
    "tasks": [
        {"ansible.builtin.include_role": {"name": "serving.gpu_node.serving_image", "tasks_from": "forget_archives"}}
    ],
}


class Images:
    """Two nodes with Podman; the first one has the registry, and the second one cannot read the base."""

    def __init__(self, first: Node, second: Node, fleet: Fleet) -> None:
        self.first, self.second, self.fleet = first, second, fleet
        self.base = f"{NAME}@{first.ssh('cat /srv/base-digest').strip()}"

    def run(self, *args: str, serial: int = 0, **variables: Any) -> Play:
        """The role on both, then making room, as playbooks/artifacts.yml does."""
        play = role_play(vars={"serving_plan_result": plan()}, serial=serial or "100%")
        extra = role_variables(**{"serving_image_base": self.base, **variables})
        return self.fleet.play([*play, ROOM], extra, *args, on=("n1", "n2"))

    def forget(self, *nodes: Node) -> None:
        for node in nodes:
            node.ssh("podman rmi -af >/dev/null; rm -rf /var/lib/gpu-node/images /var/lib/gpu-node/build")

    def same(self) -> str:
        """The one image that both have, under one name and one id."""
        first, second = images(self.first, IMAGE), images(self.second, IMAGE)
        assert first == second and len(first) == 1, (first, second)
        return next(iter(first))


@pytest.fixture(scope="module")
def fleet(node: Callable[[str], Node], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    first, second = with_registry(node("image")), node("image2")
    second.ssh(
        "apt-get -qq update && apt-get -qq install -y --no-install-recommends podman crun >/dev/null 2>&1", timeout=300
    )
    yield Images(first, second, Fleet([first, second], None, tmp_path_factory.mktemp("share")))
    # The first one is bare again for the tests that come after these.
    first.ssh("podman rmi -af >/dev/null; rm -rf /var/lib/gpu-node /etc/gpu-node")


def test_a_dry_run_says_who_would_make_it(fleet: Images) -> None:
    fleet.forget(fleet.first, fleet.second)
    play = fleet.run("--check", "--diff")
    assert play.rc == 0, play.tail(60)
    assert f"would take {IMAGE}:" in play.output and "from n1" in play.output
    assert images(fleet.second, IMAGE) == {}


def test_one_node_builds_it_and_the_other_takes_it(fleet: Images) -> None:
    fleet.forget(fleet.first, fleet.second)
    play = fleet.run()
    assert play.rc == 0, play.tail(60)
    fleet.same()
    # The second one never asked for the base, and has the bill of materials all the same.
    assert images(fleet.second, NAME) == {}
    assert fleet.second.ssh("ls /var/lib/gpu-node/images").count(".cdx.json") == 1
    for node in (fleet.first, fleet.second):
        left = node.ssh("find /var/lib/gpu-node -name 'serving-image-*'")
        assert left.strip() == ""
    again = fleet.run()
    assert (again.rc, again.changed) == (0, 0), again.tail(60)


def test_a_canary_gives_it_to_the_next_batch(fleet: Images) -> None:
    fleet.forget(fleet.first, fleet.second)
    play = fleet.run(serial=1)
    assert play.rc == 0, play.tail(60)
    fleet.same()
    assert images(fleet.second, NAME) == {}


def test_built_twice_it_is_the_same_image(fleet: Images) -> None:
    before = images(fleet.first, IMAGE)
    fleet.forget(fleet.first)
    fleet.first.ssh("podman system reset --force >/dev/null 2>&1 || podman system prune -af >/dev/null")
    play = fleet.fleet.play(
        role_play(vars={"serving_plan_result": plan()}), role_variables(serving_image_base=fleet.base), on=("n1",)
    )
    assert play.rc == 0, play.tail(60)
    assert images(fleet.first, IMAGE) == before


def test_nobody_waits_for_a_node_that_failed(fleet: Images) -> None:
    fleet.forget(fleet.first, fleet.second)
    gone = f"{NAME}@sha256:{'0' * 64}"
    play = fleet.run(serving_image_base=gone)
    assert play.rc == 2
    said = " ".join(play.output.split())
    assert f"{gone} could not be pulled" in said
    assert "from n1, which failed: see that node's error, mend it and run again" in said
    assert images(fleet.second, IMAGE) == {}


def test_a_registry_keeps_it_for_the_fleet(fleet: Images) -> None:
    fleet.forget(fleet.first, fleet.second)
    place = f"{fleet.fleet.address('n1')}:5000"
    for node in (fleet.first, fleet.second):
        trust(node, REGISTRY, place)
    given: dict[str, Any] = {
        "serving_image_registry": f"{place}/gpu-node",
        "serving_image_registries": [*CREDENTIALS, {**CREDENTIALS[0], "registry": place}],
    }
    denied = fleet.run(**{**given, "serving_image_registries": CREDENTIALS})
    assert denied.rc == 2
    assert f"{place}/gpu-node/vllm-cuda:" in denied.output and "serving_image_registries" in denied.output
    play = fleet.run(**given)
    assert play.rc == 0, play.tail(60)
    tag = fleet.same()
    # Whoever comes later finds it there, and builds nothing.
    fleet.forget(fleet.first)
    play = fleet.run(**given, serving_image_base=fleet.base)
    assert play.rc == 0, play.tail(60)
    assert fleet.same() == tag
    assert images(fleet.first, NAME) == {}
    again = fleet.run(**given)
    assert (again.rc, again.changed) == (0, 0), again.tail(60)


def test_another_image_under_our_name_is_refused(fleet: Images) -> None:
    place = f"{fleet.fleet.address('n1')}:5000"
    given: dict[str, Any] = {
        "serving_image_registry": f"{place}/gpu-node",
        "serving_image_registries": [*CREDENTIALS, {**CREDENTIALS[0], "registry": place}],
    }
    fleet.run(**given)
    tag = fleet.same()
    auth = "--authfile /etc/gpu-node/secrets/registry-auth.json"
    fleet.first.ssh(f"podman pull -q {auth} {fleet.base}", timeout=180)
    fleet.first.ssh(f"podman push -q {auth} {fleet.base} {place}/gpu-node/vllm-cuda:{tag}", timeout=180)
    fleet.forget(fleet.first, fleet.second)
    play = fleet.run(**given)
    assert play.rc == 2
    assert "its label io.github.gpu-node.image.key is missing" in " ".join(play.output.split())
    assert images(fleet.first, IMAGE) == {} == images(fleet.second, IMAGE)
