#!/usr/bin/env python3
"""The serving image as an archive: built by the first node that needs it, loaded by every later one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from testhost import ROOT, STATE, client

CACHE = STATE / "cache"
# where test nodes find the folder, read-only
MOUNT = "/srv/cache"
RELEASE = "/var/lib/gpu-node/replicas/0/current/release.json"


def archive() -> Path:
    """Named after what the role serving_image names the image after, so that an outdated one is not found."""
    profile = yaml.safe_load((ROOT / "roles" / "serving_plan" / "vars" / "cpu.yml").read_text())
    image = profile["_serving_plan_profile"]["image"]
    digest = hashlib.sha256(json.dumps(image, sort_keys=True).encode())
    files = ROOT / "roles" / "serving_image" / "files"
    series = yaml.safe_load((files / "patches" / "series.yml").read_text())
    patches = [f"patches/{entry['file']}" for entry in series if entry["package"] == image["package"]]
    for name in (image["containerfile"], image["lock"], "name_distribution.py", *patches):
        digest.update((files / name).read_bytes())
    return CACHE / f"vllm-cpu-{digest.hexdigest()[:12]}.tar"


def on_node() -> str:
    """Path of the archive as a node sees it; empty when there is none yet."""
    return f"{MOUNT}/{archive().name}" if archive().exists() else ""


def save(container: str) -> str:
    """Take the image out of a node that built it, and say what was done.

    An interrupted save leaves nothing behind that looks whole.
    """
    path = archive()
    if path.exists():
        return f"{path.name} is there"
    CACHE.mkdir(parents=True, exist_ok=True)
    for outdated in CACHE.glob("vllm-cpu-*"):
        outdated.unlink()
    release = subprocess.run([client(), "exec", container, "cat", RELEASE], check=False, capture_output=True, text=True)
    if release.returncode != 0:
        return f"nothing to take from {container}: it has no release yet"
    name = json.loads(release.stdout)["image"]["ref"]
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        subprocess.run([client(), "exec", container, "podman", "save", name], check=True, stdout=out)
    os.replace(partial, path)
    return f"saved {name} as {path.name}"


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] == "where":
        print(on_node())
    elif len(sys.argv) == 3 and sys.argv[1] == "save":
        print(f"image_cache: {save(sys.argv[2])}")
    else:
        sys.exit("usage: image_cache.py where | save CONTAINER")
