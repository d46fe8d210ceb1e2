"""A bundle of a node that serves, used on one without a way outside."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import testhost
from nodes import Node

FOLDER = "/srv/gpu-node-bundle"
BUNDLE = "playbooks/bundle.yml"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bundled(served: Node) -> Node:
    play = served.playbook(playbook=BUNDLE)
    assert play.rc == 0, play.tail(60)
    return served


@pytest.fixture(scope="module")
def cut_off(node: Callable[[str], Node], bundled: Node) -> Node:
    """A bare node that has the bundle and reaches nothing but this machine."""
    bare = node("bundle")
    give = subprocess.Popen(
        [testhost.client(), "exec", bundled.container, "tar", "-C", "/srv", "-cf", "-", "gpu-node-bundle"],
        stdout=subprocess.PIPE,
    )
    take = [testhost.client(), "exec", "-i", bare.container, "tar", "-C", "/srv", "-xf", "-"]
    subprocess.run(take, stdin=give.stdout, check=True, timeout=600)
    assert give.wait() == 0
    bare.ssh("ip route del default; rm -f /etc/pip.conf")
    return bare


def test_everything_is_in_it_and_hashed(bundled: Node) -> None:
    found = bundled.ssh(
        f"cd {FOLDER} && ls && ls artifacts/*/*/model.safetensors wheels/huggingface_hub-*.whl packages/podman_*"
    )
    for name in ("artifacts", "bundle.json", "image.tar", "packages", "vars.yml", "wheels"):
        assert name in found.split()
    assert bundled.playbook("-e", "bundle_action=verify", playbook=BUNDLE).rc == 0


def test_a_damaged_one_is_refused_with_the_files_name(cut_off: Node) -> None:
    wheel = cut_off.ssh(f"ls {FOLDER}/wheels/huggingface_hub-*.whl").strip()
    cut_off.ssh(f"cp {wheel} /tmp/wheel && printf X | dd of={wheel} bs=1 seek=1000 conv=notrunc status=none")
    play = cut_off.playbook("-e", "bundle_action=verify", playbook=BUNDLE)
    cut_off.ssh(f"cp /tmp/wheel {wheel}")
    assert play.rc == 2
    assert f"{wheel.removeprefix(FOLDER + '/')} has SHA-256" in " ".join(play.output.split())


def test_a_node_without_a_way_outside_serves_from_it(cut_off: Node) -> None:
    verified = cut_off.playbook("-e", "bundle_action=verify", playbook=BUNDLE)
    assert verified.rc == 0, verified.tail(60)
    variables = cut_off.folder / "vars.yml"
    variables.write_text(cut_off.ssh(f"cat {FOLDER}/vars.yml"))
    play = cut_off.converge("-e", f"@{variables}")
    assert play.rc == 0
    assert cut_off.ssh("gpu-node smoke --json")
    assert cut_off.converge("-e", f"@{variables}").changed == 0
