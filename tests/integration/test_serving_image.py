"""The image for GPUs on a real node, from a real registry that asks who one is.

The base is a stand-in: vLLM 0.33.0's own Python sources on nothing, so whatever is done to the real image is done to
the same files. What this cannot show: that the real base is 30 GB and comes over a slow line, and that it decodes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from nodes import Node, Play

from .images import NAME, PACKAGES, PASSWORD, plan, push, role_play, role_variables, with_registry

BUILD = "/var/lib/gpu-node/build/vllm-cuda"
PROGRAM = f"PYTHONPATH={BUILD}/program python3 -m gpu_node_image --folder"
PATCHED = f"{PACKAGES}/vllm/models/deepseek_v41/attention.py"
IMAGE = "localhost/gpu-node/vllm-cuda"
PATCH = "0001-dsv41-sm120-page-geometry.patch"


def push_variant(node: Node, base: str, tag: str, file: str, change: str) -> str:
    """Push the base with one file of its packages changed by a line of sed."""
    folder = f"/srv/{tag}/root/{PACKAGES}"
    node.ssh(f"mkdir -p $(dirname {folder}/{file}) && sed '{change}' /srv/base/root/{PACKAGES}/{file} >{folder}/{file}")
    node.ssh(f"printf 'FROM {NAME}@{base}\nCOPY root/ /\n' >/srv/{tag}/Containerfile")
    argv = f"--quiet --isolation chroot --pull --authfile /srv/push.json --tag {tag}"
    node.ssh(f"podman build {argv} /srv/{tag}", timeout=120)
    return push(node, tag, tag)


@pytest.fixture(scope="module")
def node(node: Callable[[str], Node]) -> Node:
    """A node with Podman, a registry, and the stand-in as its tag v0.33.0."""
    return with_registry(node("image"))


@pytest.fixture(scope="module")
def digest(node: Node) -> str:
    return node.ssh("cat /srv/base-digest").strip()


def run(node: Node, *args: str, **variables: Any) -> Play:
    """The role alone, as on a node of profile 8x that has Podman."""
    file = node.folder / "image.yml"
    file.write_text(json.dumps(role_play(vars={"serving_plan_result": plan()})))
    return node.playbook(*args, playbook=str(file), extra=role_variables(**variables), timeout=300)


def said(play: Play) -> str:
    """The output on one line: errors are wrapped."""
    return " ".join(play.output.replace("\\n", " ").split())


def tags(node: Node) -> list[str]:
    return node.ssh(f"podman images --format '{{{{.Repository}}}}:{{{{.Tag}}}}' {IMAGE}").split()


def test_a_tag_is_refused_before_anything_changes(node: Node) -> None:
    play = run(node, serving_image_base=f"{NAME}:v0.33.0")
    assert play.rc == 2
    text = said(play)
    assert f"Nothing was changed. serving_image_base: {NAME}:v0.33.0 has the tag v0.33.0 and no digest" in text
    assert f"set it to {NAME}@sha256:..." in text and "serving_image_allow_tag" in text
    assert play.changed == 0
    assert node.run("test -e /var/lib/gpu-node").returncode == 1


def test_a_dry_run_on_a_bare_node_is_clean(node: Node, digest: str) -> None:
    for variables in ({"serving_image_base": f"{NAME}@{digest}"}, {"serving_image_allow_tag": True}):
        play = run(node, "--check", "--diff", **variables)
        assert play.rc == 0, play.tail()
        assert play.changed > 0
        assert PASSWORD not in play.output
    assert node.run("test -e /var/lib/gpu-node || test -e /etc/gpu-node").returncode == 1


@pytest.fixture(scope="module")
def built(node: Node, digest: str) -> str:
    """The image's name, built by the role from the digest."""
    play = run(node, "-vv", "--diff", serving_image_base=f"{NAME}@{digest}")
    assert play.rc == 0, play.tail(60)
    assert f"patch {PATCH}: applies" in play.output
    assert PASSWORD not in play.output
    (name,) = tags(node)
    return name


def inspect(node: Node, image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.ssh(f"podman image inspect {image}"))[0]
    return found


def read_in(node: Node, image: str, path: str) -> str:
    return node.ssh(f"cat $(podman image mount {image})/{path}; podman image unmount {image} >/dev/null")


def test_the_image_has_the_patch_its_labels_and_its_bill(node: Node, digest: str, built: str) -> None:
    assert "block_size=_swa_page_tokens()" in read_in(node, built, PATCHED)
    labels = inspect(node, built)["Labels"]
    assert labels["org.opencontainers.image.base.digest"] == digest
    assert labels["org.opencontainers.image.base.name"] == NAME
    assert labels["io.github.gpu-node.image.key"][:12] == built.rpartition(":")[2]
    assert labels["io.github.gpu-node.image.patches"].startswith(f"{PATCH}=")
    assert labels["io.github.gpu-node.image.wheel"] == "none"
    bill = json.loads(node.ssh(f"cat /var/lib/gpu-node/images/{built.rpartition(':')[2]}.cdx.json"))
    names = {one["purl"].partition("@")[0] for one in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX" and {"pkg:pypi/vllm", "pkg:deb/debian/podman"} <= names
    assert bill["metadata"]["component"]["version"] == f"sha256:{inspect(node, built)['Id']}"
    # Files of the base that no patch touches are the base's own, in its layer.
    assert inspect(node, built)["RootFS"]["Layers"][0] == inspect(node, f"{NAME}@{digest}")["RootFS"]["Layers"][0]


def test_credentials_are_in_one_file_that_only_root_reads(node: Node, built: str) -> None:
    assert node.ssh("stat -c '%a %U' /etc/gpu-node/secrets/registry-auth.json").strip() == "600 root"
    place = node.run(f"grep -rl {PASSWORD} /etc/gpu-node /var/lib/gpu-node /root -s").stdout
    assert place == "", "the password itself is nowhere: the file has it as Podman wants it"
    assert PASSWORD not in node.ssh("journalctl -u gpu-node-image-build")


def test_the_second_run_changes_nothing_and_a_tag_is_looked_up_once(node: Node, digest: str, built: str) -> None:
    again = run(node, serving_image_base=f"{NAME}@{digest}")
    assert (again.rc, again.changed) == (0, 0), again.tail()
    tag = run(node, serving_image_base=f"{NAME}:v0.33.0", serving_image_allow_tag=True)
    assert (tag.rc, tag.changed) == (0, 1), tag.tail()
    assert json.loads(node.ssh("cat /var/lib/gpu-node/images/tags.json")) == {f"{NAME}:v0.33.0": digest}
    # It is not asked again: the registry is gone, and the same image is wanted.
    node.ssh("systemctl stop docker-registry")
    try:
        for args in ((), ("--check",)):
            later = run(node, *args, serving_image_base=f"{NAME}:v0.33.0", serving_image_allow_tag=True)
            assert (later.rc, later.changed) == (0, 0), later.tail()
    finally:
        node.ssh("systemctl start docker-registry")
    assert tags(node) == [built]


def attempt(node: Node, **changes: Any) -> subprocess.CompletedProcess[str]:
    """The job of the build itself, with another request, under a name of its own."""
    request = {**json.loads(node.ssh(f"cat {BUILD}/request.json")), "ref": f"{IMAGE}:try", "bill": "/srv/try.cdx.json"}
    node.ssh(
        f"rm -rf /srv/try && cp -r {BUILD} /srv/try && cat >/srv/try/request.json",
        stdin=json.dumps({**request, **changes}),
    )
    return node.run(f"{PROGRAM} /srv/try build", timeout=120)


def refused(node: Node, done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why; nothing is left under a name."""
    assert done.returncode == 1, done.stdout
    assert f"{IMAGE}:try" not in tags(node)
    assert node.run("test -e /srv/try.cdx.json").returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Traceback" not in line
    return line


def test_a_base_of_another_version_is_named(node: Node, digest: str, built: str) -> None:
    name = node.ssh(f"cd /srv/base/root/{PACKAGES} && ls -d vllm-0.33.0*.dist-info").strip()
    old = push_variant(node, digest, "old", f"{name}/METADATA", "s/^Version: .*/Version: 0.32.1/")
    play = run(node, serving_image_base=f"{NAME}@{old}")
    assert play.rc == 2
    remedy = "set serving_image_base to an image of 0.33.0"
    assert f"{NAME}@{old} has vllm 0.32.1 and the profile is made for 0.33.0: {remedy}" in said(play)
    assert tags(node) == []


def test_a_patch_that_does_not_apply_is_named(node: Node, digest: str, built: str) -> None:
    other = push_variant(
        node, digest, "other", "vllm/models/deepseek_v41/attention.py", "s/block_size=32,/block_size=48,/"
    )
    line = refused(node, attempt(node, base=f"{NAME}@{other}"))
    assert f"patch {PATCH} does not apply to vllm in {NAME}@{other}" in line
    assert "vllm/models/deepseek_v41/attention.py has other lines around line 5" in line


def test_a_patch_that_is_upstream_already_is_named(node: Node, digest: str, built: str) -> None:
    assert attempt(node, base=f"{NAME}@{digest}").returncode == 0
    upstream = push(node, f"{IMAGE}:try", "upstream")
    node.ssh("rm -f /srv/try.cdx.json")
    line = refused(node, attempt(node, base=f"{NAME}@{upstream}"))
    assert f"patch {PATCH} is already upstream in vllm in {NAME}@{upstream}" in line
    assert "take it out of patches/series.yml" in line


@pytest.mark.full
def test_no_room_no_such_digest_and_no_credentials_are_one_line_each(node: Node, digest: str, built: str) -> None:
    absent = f"{NAME}@sha256:{'0' * 64}"
    line = refused(node, attempt(node, base=absent, free_gib=10**6))
    assert "too little disk" in line and "1000000 GiB are needed (serving_image_free_gib)" in line
    line = refused(node, attempt(node, base=absent))
    assert f"{absent} could not be pulled" in line and "manifest unknown" in line
    line = refused(node, attempt(node, base=absent, auth_file=""))
    assert f"{absent} could not be pulled" in line and "serving_image_registries" in line
    assert "authentication required" in line


def test_a_build_that_is_killed_has_no_name_and_the_next_one_goes_on(node: Node, digest: str, built: str) -> None:
    base = f"{NAME}@{digest}"
    assert attempt(node, base=base).returncode == 0
    for step in ("step 2 of 4", "step 3 of 4"):
        node.ssh(f"podman rmi {IMAGE}:try >/dev/null; rm -f /srv/try.cdx.json")
        # Killed, not asked to end, as soon as it says that it is there.
        kill = f"grep -q -m1 '{step}' && pkill -9 -f 'gpu_node_image --folder /srv/[t]ry'"
        node.run(f"{PROGRAM} /srv/try build | ({kill})", timeout=120)
        assert f"{IMAGE}:try" not in tags(node)
        assert node.run("test -e /srv/try.cdx.json").returncode == 1
        assert node.run(f"{PROGRAM} /srv/try build", timeout=120).returncode == 0
        assert f"{IMAGE}:try" in tags(node)
