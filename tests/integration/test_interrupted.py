"""A run that is killed loses nothing, and the next run goes on; what is there already is adopted.

These come first (conftest.py): the node that is made serve here, with two kills on the way, is then what `served` is to
the other tests.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest
from nodes import Node, Playbook

MODEL = "/var/lib/gpu-node/artifacts/tiny-deepseek-v3"


@pytest.fixture(scope="module")
def bare(node: Callable[[str], Node], archive_made: None) -> Node:
    """A bare node that finds the image in an archive."""
    return node("served")


def kill(playbook: Playbook) -> None:
    """As when the controller dies: nothing is tidied up."""
    os.killpg(playbook.process.pid, signal.SIGKILL)
    playbook.process.wait()


def started(node: Node, index: int) -> str:
    return node.ssh(f"systemctl show -P InvocationID -P MainPID vllm-replica@{index}.service")


def test_a_missing_runtime_is_not_installed_when_it_may_only_be_verified(bare: Node) -> None:
    play = bare.playbook(extra={"container_runtime_manage": False})
    assert play.rc == 2
    message = " ".join(play.output.split())
    assert "podman: none (wanted: 4.3 or newer); install it, or set container_runtime_manage: true" in message
    assert bare.run("test -e /usr/bin/podman").returncode == 1


def test_killed_while_the_image_is_loaded_and_between_the_replicas(bare: Node) -> None:
    # What a kill in the middle of writing the model leaves behind.
    bare.ssh(f"mkdir -p {MODEL}/.incoming-x && echo half >{MODEL}/.incoming-x/config.json")
    loading = bare.start_playbook()
    loading.wait_for("Load the archive", timeout=300)
    bare.ssh(
        "for i in $(seq 100); do systemctl is-active -q gpu-node-image-load && exit 0; sleep 0.1; done; exit 1",
        timeout=90,
    )
    kill(loading)
    assert bare.ssh("systemctl show -P SubState gpu-node-image-load").strip() in ("running", "exited"), (
        "the job lives on"
    )

    between = bare.start_playbook()
    between.wait_for(" serves", timeout=600)
    between.wait_for("replica 1: start", timeout=60)
    kill(between)
    first = started(bare, 0)

    bare.converge()
    assert started(bare, 0) == first, "replica 0 was served and must not be touched again"
    assert bare.ssh("gpu-node smoke --json")
    status = bare.ssh("gpu-node status")
    assert status.count(" active ") == 2, status
    # The job went on without the play, and each replica was started once.
    history = json.loads(bare.ssh("gpu-node history --json"))
    assert sorted((row["replica"], row["outcome"]) for row in history) == [(0, "new"), (1, "new")]


def test_adopting_what_is_there_changes_nothing(served: Node) -> None:
    adopt = {"container_runtime_manage": False, "model_weights_manage": False, "serving_image_manage": False}
    assert served.converge(extra=adopt).changed == 0


@pytest.mark.full
def test_a_flipped_byte_in_the_weights_is_found_and_made_good(served: Node) -> None:
    file = f"$(echo {MODEL}/????????????/model.safetensors)"
    served.ssh(f"printf X | dd of={file} bs=1 seek=100000 conv=notrunc status=none")
    play = served.playbook(extra={"model_weights_manage": False})
    assert play.rc == 2
    assert "model.safetensors has SHA-256" in " ".join(play.output.split())
    served.converge()
    assert served.converge().changed == 0
    assert served.ssh(f"ls -d {MODEL}/*.bad-1")


@pytest.mark.full
def test_a_missing_image_is_named_when_it_may_only_be_verified(served: Node) -> None:
    extra = {"serving_image_manage": False, "serving_image_archive": ""}
    ref = served.ssh("podman images --format '{{.Repository}}:{{.Tag}}' localhost/gpu-node/vllm-cpu").split()[0]
    served.ssh(f"podman tag {ref} localhost/kept:1 && podman untag {ref} {ref}")
    play = served.playbook(extra=extra)
    served.ssh(f"podman tag localhost/kept:1 {ref} && podman untag localhost/kept:1 localhost/kept:1")
    assert play.rc == 2
    assert f"The image {ref} is not on gpu-node" in " ".join(play.output.split())


@pytest.mark.full
def test_killed_in_the_image_build(node: Callable[[str], Node]) -> None:
    """The real build on a bare node; the job goes on without the play and the next run follows it to its end."""
    bare = node("build")
    extra = {"serving_image_archive": ""}
    building = bare.start_playbook(extra=extra)
    building.wait_for("step 2 of 2", timeout=600)
    kill(building)
    again = bare.start_playbook(extra=extra)
    again.wait_for("is running already; following it", timeout=120)
    again.wait_for("built localhost/gpu-node/vllm-cpu", timeout=900)
    play = again.finish(timeout=900)
    assert play.rc == 0, play.tail()
    assert bare.ssh("gpu-node smoke --json")
