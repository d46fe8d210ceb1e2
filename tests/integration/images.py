"""A stand-in for vLLM's image: its own Python sources of 0.33.0 on nothing, in a real registry that asks who one is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import yaml
from nodes import Node
from testhost import ROOT

REGISTRY = "localhost:5000"
NAME = f"{REGISTRY}/vllm/vllm-openai"
USER, PASSWORD = "puller", "pull-pass-51c7"
CREDENTIALS = [{"registry": REGISTRY, "username": USER, "password": PASSWORD}]
PACKAGES = "usr/local/lib/python3.12/dist-packages"

REGISTRY_CONFIG = """\
version: 0.1
storage: {filesystem: {rootdirectory: /var/lib/docker-registry}}
http: {addr: ":5000"}
auth: {htpasswd: {realm: test, path: /etc/docker/registry/users}}
"""
PREPARE = f"""\
set -e
mkdir -p /etc/docker/registry
python3 -c "import crypt as c; print('{USER}:' + c.crypt('{PASSWORD}', c.mksalt(c.METHOD_BLOWFISH, rounds=16)))" \\
    >/etc/docker/registry/users
apt-get -qq update && apt-get -qq install -y --no-install-recommends podman crun skopeo docker-registry >/dev/null 2>&1
cat >/etc/docker/registry/config.yml
systemctl restart docker-registry
mkdir -p /srv/base/root/{PACKAGES} /srv/base/root/var/lib/dpkg /srv/base/root/etc
cp -r /srv/cache/vllm-0.33.0/. /srv/base/root/{PACKAGES}
cp /var/lib/dpkg/status /srv/base/root/var/lib/dpkg/status
cp -L /etc/os-release /srv/base/root/etc/os-release
printf 'FROM scratch\\nCOPY root/ /\\n' >/srv/base/Containerfile
echo {PASSWORD} | podman login --authfile /srv/push.json --username {USER} --password-stdin {REGISTRY} >/dev/null
"""


def trust(node: Node, *registries: str) -> None:
    """Have Podman speak plain HTTP with registries of the test."""
    lines = "".join(f'[[registry]]\nlocation="{registry}"\ninsecure=true\n' for registry in registries)
    folder = "/etc/containers/registries.conf.d"
    node.ssh(f"mkdir -p {folder} && cat >{folder}/test.conf", stdin=lines)


def push(node: Node, image: str, tag: str) -> str:
    """Push an image, forget it here, and return its digest."""
    to = f"--authfile /srv/push.json --digestfile /srv/digest {image} {NAME}:{tag}"
    node.ssh(f"podman push --quiet {to} && podman rmi -af", timeout=180)
    return node.ssh("cat /srv/digest").strip()


def with_registry(one: Node) -> Node:
    """Give a node Podman and a registry that has the stand-in as its tag v0.33.0; once."""
    subprocess.run([sys.executable, str(ROOT / "tests" / "engine" / "fetch_vllm.py")], check=True, capture_output=True)
    if one.run("test -e /srv/base-digest").returncode != 0:
        trust(one, REGISTRY)
        one.ssh(PREPARE, stdin=REGISTRY_CONFIG, timeout=300)
        one.ssh("podman build --quiet --isolation chroot --tag base /srv/base", timeout=120)
        one.ssh(f"printf %s {push(one, 'base', 'v0.33.0')} >/srv/base-digest")
    return one


def profile_image() -> dict[str, Any]:
    """What profile 8x says of its image."""
    text = (ROOT / "roles" / "serving_plan" / "vars" / "8x.yml").read_text()
    return dict(yaml.safe_load(text)["_serving_plan_profile"]["image"])


def role_play(role: str = "serving_image", **play: Any) -> list[dict[str, Any]]:
    """A play of the role alone, as on nodes of profile 8x that have Podman."""
    return [
        {
            "name": "image",
            "hosts": "gpu_nodes",
            "gather_facts": False,
            "become": True,
            "roles": [{"role": f"serving.gpu_node.{role}"}],
            **play,
        }
    ]


def role_variables(**variables: Any) -> dict[str, Any]:
    """What such a play is run with; the plan is a variable of the play, or the roles could not pass another one on."""
    return {
        "package_access_apt_ready": True,
        "container_runtime_podman": {"stat": {"exists": True}},
        "serving_image_archive": "",
        "serving_image_free_gib": 1,
        "serving_image_registries": CREDENTIALS,
        **variables,
    }


def plan() -> dict[str, Any]:
    return {"profile": "8x", "device": "cuda", "image": profile_image(), "artifacts": {}}


def images(node: Node, name: str) -> dict[str, str]:
    """Ids by tag."""
    found = json.loads(node.ssh("podman images --format json"))
    pairs = [(full, image["Id"]) for image in found for full in image.get("Names") or []]
    return {full.rpartition(":")[2]: identity for full, identity in pairs if full.startswith(f"{name}:")}
