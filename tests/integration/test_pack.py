"""A pack's own recipe on a real node: its scripts run by Podman, or by a Docker engine where there is one.

The pack is a stand-in (tests/doubles/pack). What this cannot show: that a real pack's image is 30 GB and decodes.
"""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Callable
from typing import Any

import pytest
from ansible.plugins.loader import init_plugin_loader
from nodes import Node, Play
from testhost import ROOT

from .images import images, role_play, role_variables

# Ansible's own import hook: the regular package `ansible_collections` in site-packages would hide the checkout.
init_plugin_loader([str(ROOT / "collections")])

from tests.unit.plugins.samples import intent  # noqa: E402

# Builds of a pack: minutes.
pytestmark = pytest.mark.full

PACK = ROOT / "tests" / "doubles" / "pack"
IMAGE = "localhost/gpu-node/vllm-cuda"
ARTIFACTS = "/var/lib/gpu-node/artifacts"
BUILD = "/var/lib/gpu-node/build/vllm-cuda"
PROGRAM = f"PYTHONPATH={BUILD}/program python3 -m gpu_node_image"
KERNELS = ["fp8ar", "fp8arg", "rowtopk", "xmoe_do_i8", "xmoe_p8k"]


def put_pack(node: Node) -> None:
    """Put the pack on the node as /srv/pack."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(PACK, "pack")
    node.ssh("rm -rf /srv/pack && base64 -d | tar -xz -C /srv", stdin=base64.b64encode(packed.getvalue()).decode())


def variant(node: Node, name: str, script: str, lines: str) -> dict[str, Any]:
    """The source of a pack whose script ends with other lines."""
    node.ssh(f"rm -rf /srv/{name} && cp -r /srv/pack /srv/{name} && cat >>/srv/{name}/recipe/{script}", stdin=lines)
    return {"type": "path", "path": f"/srv/{name}"}


SOURCE = {"type": "path", "path": "/srv/pack"}


def plan(pack: dict[str, Any] | None) -> dict[str, Any]:
    """Profile 8x with a pack, without its model: 300 GB say nothing here."""
    sources = {"pack": pack} if pack else {}
    made = intent({"drafter": "code" if pack else "released"}, name="8x", sources=sources)
    return {**made, "artifacts": {key: one for key, one in made["artifacts"].items() if key != "model"}}


def play_variables(**variables: Any) -> dict[str, Any]:
    return role_variables(**{"serving_image_registries": [], **variables})


def book(node: Node, pack: dict[str, Any] | None) -> str:
    roles = [{"role": f"serving.gpu_node.{role}"} for role in ("model_weights", "serving_image")]
    file = node.folder / "pack.yml"
    told = [{"ansible.builtin.debug": {"var": "serving_image_result"}}]
    file.write_text(json.dumps(role_play(vars={"serving_plan_result": plan(pack)}, roles=roles, post_tasks=told)))
    return str(file)


def run(node: Node, *args: str, pack: dict[str, Any] | None = SOURCE, **variables: Any) -> Play:
    """What playbooks/artifacts.yml does."""
    return node.playbook(*args, playbook=book(node, pack), extra=play_variables(**variables), timeout=300)


def said(play: Play) -> str:
    """The output on one line: errors are wrapped."""
    return " ".join(play.output.replace("\\n", " ").split())


def boot(one: Node) -> Node:
    """Bare but for Podman, also when an earlier run left it."""
    if one.run("command -v podman").returncode != 0:
        install = "apt-get -qq install -y --no-install-recommends podman crun >/dev/null 2>&1"
        one.ssh(f"apt-get -qq update && {install}", timeout=300)
    one.ssh("podman rmi -af >/dev/null; rm -rf /var/lib/gpu-node /etc/gpu-node /srv/go")
    put_pack(one)
    return one


@pytest.fixture(scope="module")
def node(node: Callable[[str], Node]) -> Node:
    """A node that has Podman, and the pack's files as an operator may have them."""
    return boot(node("pack"))


def test_a_recipe_without_a_pack_is_refused_before_the_image_changes(node: Node) -> None:
    play = run(node, pack=None, serving_image_recipe="pack")
    assert play.rc == 2
    assert "Nothing was changed. serving_image_recipe: pack needs a pack, and none is configured" in said(play)
    assert node.run(f"test -e {BUILD}").returncode == 1


def test_a_dry_run_on_a_bare_node_is_clean(node: Node) -> None:
    play = run(node, "--check", "--diff")
    assert play.rc == 0, play.tail()
    assert play.changed > 0
    assert "the pack has no serve/profile-8x.env yet" in play.output
    assert node.run(f"test -e {BUILD}").returncode == 1
    assert images(node, IMAGE) == {}


@pytest.fixture(scope="module")
def built(node: Node) -> Play:
    play = run(node, "-v")
    assert play.rc == 0, play.tail(60)
    return play


def name_of(node: Node) -> str:
    (tag,) = set(images(node, IMAGE)) - {"try"}
    return f"{IMAGE}:{tag}"


def test_one_image_holds_what_both_scripts_made(node: Node, built: Play) -> None:
    for line in ("Podman builds", "5 kernel libraries: fp8ar.so"):
        assert line in built.output
    assert "building the image of the pack" in node.ssh(f"cat {BUILD}/pack-image.log")
    name = name_of(node)
    recipe = "opt/pack/recipe"
    looks = f"cat {recipe}/kernels/*/*.so; ls {recipe}; cat opt/patches/vllm/*.diff"
    lines = node.ssh(f"cd $(podman image mount {name}) && {{ {looks}; }}; podman image unmount {name} >&2").splitlines()
    assert lines[:5] == [f"{kernel} for 8x" for kernel in KERNELS]
    # what hooks them in comes along
    assert lines[5:10] == ["docker", "hooks", "kernels", "patches", "serve"]
    assert lines[10:] == ["Applied in the image."]
    (found,) = json.loads(node.ssh(f"podman image inspect {name}"))
    labels = {name.removeprefix("io.github.gpu-node.image."): value for name, value in found["Labels"].items()}
    assert (labels["recipe"], labels["profile"]) == ("pack", "8x")
    assert labels["key"][:12] == name.rpartition(":")[2]
    assert labels["pack"].startswith(node.ssh(f"ls {ARTIFACTS}/pack-8x").strip())
    bill = json.loads(node.ssh(f"cat /var/lib/gpu-node/images/{labels['key'][:12]}.cdx.json"))
    assert [one["purl"] for one in bill["components"]] == ["pkg:pypi/vllm@0.33.0"]
    assert "recipe: pack" in built.output


def test_of_the_pack_only_recipe_and_drafter_are_there(node: Node, built: Play) -> None:
    assert node.ssh(f"cd {ARTIFACTS}/pack-8x/* && ls").split() == ["gpu-node-manifest.json", "recipe"]
    assert "dspark_block_size" in node.ssh(f"cat {ARTIFACTS}/drafter-code-k7/*/config.json")
    assert node.run(f"find {ARTIFACTS} -name '*.safetensors' | grep .").returncode == 1


def test_settings_that_differ_are_shown_and_nothing_of_them_is_applied(built: Play) -> None:
    lines = [line.strip() for line in built.output.replace("\\n", "\n").splitlines()]
    assert "differs: MAX_BATCHED  pack 8192, ours 16384" in lines
    assert sum(line.startswith("differs:") for line in lines) == 1, "18 GiB and 400 GiB are the same in every spelling"
    assert "only in the pack: XMOE_LIB=/opt/pack/recipe/kernels/xmoe_p8k/xmoe_p8k.so" in lines
    assert "not understood, line 12: GPUS=$(nvidia-smi -L | wc -l)" in lines


def test_the_second_run_and_a_dry_run_change_nothing(node: Node, built: Play) -> None:
    before = images(node, IMAGE)
    for args in ((), ("--check", "--diff")):
        again = run(node, *args)
        assert (again.rc, again.changed) == (0, 0), again.tail()
    assert images(node, IMAGE) == before


def attempt(node: Node, pack: str, **changes: Any) -> tuple[int, str, str]:
    """The job itself with another pack, under a name of its own."""
    request = {**json.loads(node.ssh(f"cat {BUILD}/request.json")), "ref": f"{IMAGE}:try", "bill": "/srv/try.cdx.json"}
    text = json.dumps({**request, "pack": pack, **changes})
    node.ssh(f"rm -rf /srv/try && cp -r {BUILD} /srv/try && cat >/srv/try/request.json", stdin=text)
    done = node.run(f"{PROGRAM} --folder /srv/try pack", timeout=120)
    return done.returncode, done.stdout, done.stderr.strip()


def test_a_script_that_fails_is_told_once_with_its_end(node: Node, built: Play) -> None:
    variant(node, "failing", "kernels/build.sh", 'echo "nvcc fatal: no sm_120a" >&2\nexit 7\n')
    code, _, error = attempt(node, "/srv/failing")
    assert code == 1
    first, *lines = error.splitlines()
    assert first == "error: kernels/build.sh 8x of the pack failed; its last lines:"
    assert lines[-2:] == [
        "built rowtopk",
        "nvcc fatal: no sm_120a (exit code 7; all of it: /srv/try/pack-kernels.log)",
    ]
    assert "try" not in images(node, IMAGE)


def test_two_images_are_refused_until_one_is_named(node: Node, built: Play) -> None:
    more = "docker build --tag second:1 --label second=1 --file docker/Dockerfile . >/dev/null\n"
    variant(
        node, "two", "docker/build.sh", f"docker build --tag first:1 --label first=1 --file docker/Dockerfile .\n{more}"
    )
    code, _, error = attempt(node, "/srv/two")
    assert (code, error) == (
        1,
        "error: docker/build.sh of the pack made or pulled localhost/first:1, localhost/second:1; "
        "set serving_image_pack_image to the name of the one that replicas run",
    )
    assert "try" not in images(node, IMAGE)
    code, _, error = attempt(node, "/srv/two", pack_image="second:1")
    assert (code, error) == (0, "")
    (found,) = json.loads(node.ssh(f"podman image inspect {IMAGE}:try"))
    assert found["Labels"]["second"] == "1"
    node.ssh(f"podman rmi {IMAGE}:try")


def test_a_repository_that_is_the_recipe_makes_the_same(node: Node, built: Play) -> None:
    """Its image is what the engine has under that name already, so nothing appears or changes."""
    code, said_there, error = attempt(node, "/srv/pack/recipe")
    assert (code, error) == (0, "")
    assert "5 kernel libraries: fp8ar.so" in said_there
    layers = "podman image inspect --format '{{.RootFS.Layers}}'"
    first, second = (node.ssh(f"{layers} {image}") for image in (f"{IMAGE}:try", name_of(node)))
    assert first.split()[:-1] == second.split()[:-1]
    node.ssh(f"podman rmi {IMAGE}:try")


def test_no_library_and_too_little_disk_are_refused(node: Node, built: Play) -> None:
    variant(node, "none", "kernels/build.sh", "rm -r */\n")
    code, _, error = attempt(node, "/srv/none")
    assert code == 1 and error.startswith("error: kernels/build.sh 8x of the pack made no library below /srv/try/pack/")
    code, _, error = attempt(node, "/srv/pack", free_gib=1 << 20)
    assert code == 1 and error.startswith("error: too little disk for the image: ")
    assert "try" not in images(node, IMAGE)


def test_a_killed_build_leaves_no_name_and_the_next_run_makes_it(node: Node, built: Play) -> None:
    before = images(node, IMAGE)
    source = variant(node, "slow", "kernels/build.sh", "[ -e /srv/go ] || sleep 300\n")
    started = node.start_playbook(playbook=book(node, source), extra=play_variables())
    started.wait_for("step 2 of 4: kernels/build.sh 8x", 120)
    node.ssh("systemctl kill --signal=KILL gpu-node-image-build.service")
    assert started.finish(60).rc == 2
    assert images(node, IMAGE) == before
    assert node.run("pgrep -f kernels/build.sh").returncode == 1
    node.ssh(f"touch /srv/go && {PROGRAM} --folder {BUILD} pack", timeout=120)
    assert len(images(node, IMAGE)) == len(before) + 1


DAEMON = {"storage-driver": "vfs", "iptables": False, "bridge": "none"}


def test_a_docker_engine_of_the_node_builds_and_is_left_alone(node: Node) -> None:
    """Without a network of its own, which a node that is itself a container cannot give it."""
    node.ssh("mkdir -p /etc/docker && cat >/etc/docker/daemon.json", stdin=json.dumps(DAEMON))
    node.ssh("apt-get -qq install -y --no-install-recommends docker.io >/dev/null 2>&1", timeout=300)
    try:
        engine = node.ssh("systemctl start docker && systemctl show --property=ExecMainStartTimestamp,MainPID docker")
        before = images(node, IMAGE)
        source = variant(node, "docker", "patches/vllm/one.diff", "Made by a Docker engine.\n")
        play = run(node, pack=source)
        assert play.rc == 0, play.tail(60)
        assert "the node's Docker engine builds (/var/lib/docker)" in play.output
        assert "pack-vllm:latest from Docker to Podman" in play.output
        assert "pack-vllm" in node.ssh("docker images")
        assert node.ssh("systemctl show --property=ExecMainStartTimestamp,MainPID docker") == engine
        (tag,) = set(images(node, IMAGE)) - set(before)
        look = f"cd $(podman image mount {IMAGE}:{tag}) && cat opt/patches/vllm/one.diff opt/pack/recipe/kernels/*/*.so"
        assert node.ssh(look).splitlines()[:2] == ["Made by a Docker engine.", "fp8ar for 8x"]
    finally:
        node.ssh("systemctl disable --now docker.socket docker; apt-get -qq purge -y docker.io >/dev/null 2>&1")
