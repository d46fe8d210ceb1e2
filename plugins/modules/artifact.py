#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Keep a verified artifact on a node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: artifact
short_description: Keep a verified artifact (weights, a model folder) on a node
version_added: "0.1.0"
description:
  - An artifact is a folder O(path)/O(name)/DIGEST with a C(manifest.json) that lists every file with size and SHA-256.
  - It is made in a folder beside it, hashed on this node's disk, made read-only and then renamed into place in one
    step, so an interrupted run leaves nothing that looks complete, and the next run makes it again.
  - A folder that is there is hashed again; one whose bytes differ is moved aside (never deleted) and made anew.
options:
  path:
    description: Folder that holds the node's artifacts.
    type: path
    required: true
  name:
    description: The artifact's name.
    type: str
    required: true
  source:
    description:
      - Where it comes from. C(type=generated) makes the tiny DeepSeek-V3-shaped model from C(seed).
    type: dict
    required: true
    suboptions:
      type:
        description: Kind of source.
        type: str
        choices: [generated]
        required: true
      seed:
        description: Seed of the random weights.
        type: int
        default: 0
  manage:
    description: Whether to make what is missing. When false, the artifact is only verified and must be complete.
    type: bool
    default: true
attributes:
  check_mode:
    description: Says what would be made, verifies what is there.
    support: full
  diff_mode:
    description: Weights have no readable difference.
    support: none
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Make the tiny model
  serving.gpu_node.artifact:
    path: /var/lib/gpu-node/artifacts
    name: tiny-deepseek-v3
    source:
      type: generated
      seed: 0
"""

RETURN = r"""
digest:
  description: SHA-256 over the manifest's list of files, 64 hex digits.
  returned: always
  type: str
folder:
  description: Where the artifact lies.
  returned: always
  type: str
problems:
  description: What was wrong with the folder found there.
  returned: always
  type: list
  elements: str
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import (
    SHORT,
    ManifestError,
    build_manifest,
    compare_files,
    parse_manifest,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.tiny_model import GENERATOR_VERSION, model_files

MANIFEST = "manifest.json"


def hash_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of every file below ``folder`` but its manifest."""
    files = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and relative != MANIFEST:
            with path.open("rb") as stream:
                files[relative] = {
                    "size": path.stat().st_size,
                    "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
                }
    return files


def verify(folder: Path) -> list[str]:
    """Return what is wrong with an artifact's folder; an empty list means complete, every byte hashed."""
    try:
        manifest = parse_manifest((folder / MANIFEST).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return [f"{folder} has no {MANIFEST}"]
    except ManifestError as error:
        return [f"{folder}: {error}"]
    problems = compare_files(manifest["files"], hash_folder(folder))
    if not problems and folder.name != manifest["digest"][:SHORT]:
        problems = [f"{folder} holds the artifact with digest {manifest['digest'][:SHORT]}"]
    return problems


def write_artifact(folder: Path, manifest: dict[str, Any], files: dict[str, bytes]) -> list[str]:
    """Write the files beside ``folder``, verify them from the disk and rename them into place."""
    # One writer at a time is the play's own order; what an interrupted one left is thrown away.
    incoming = folder.parent / f".incoming-{folder.name}" / folder.name
    shutil.rmtree(incoming.parent, ignore_errors=True)
    incoming.mkdir(parents=True)
    contents = {**files, MANIFEST: (json.dumps(manifest, indent=1) + "\n").encode()}
    for name, data in contents.items():
        with (incoming / name).open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        (incoming / name).chmod(0o444)
    problems = verify(incoming)
    if not problems:
        incoming.chmod(0o555)
        incoming.rename(folder)
        shutil.rmtree(incoming.parent)
    return problems


def move_aside(folder: Path) -> None:
    """Keep a folder that is not what its name says, under another name, for whoever wants to know why."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.bad-{number}")).exists():
        number += 1
    folder.rename(aside)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "source": {
                "type": "dict",
                "required": True,
                "options": {
                    "type": {"type": "str", "required": True, "choices": ["generated"]},
                    "seed": {"type": "int", "default": 0},
                },
            },
            "manage": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    name, seed = module.params["name"], module.params["source"]["seed"]
    files = model_files(seed)
    wanted = {path: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()}
    source = {"type": "generated", "generator": "tiny-deepseek-v3", "version": GENERATOR_VERSION, "seed": seed}
    manifest = build_manifest(name, source, wanted)
    folder = Path(module.params["path"]) / name / manifest["digest"][:SHORT]
    answer = {"digest": manifest["digest"], "folder": str(folder)}
    try:
        problems = verify(folder) if folder.is_dir() else [f"{folder} is missing"]
        if problems and not module.params["manage"]:
            module.fail_json(
                msg=f"artifact '{name}' is not complete and this run may only verify: {'; '.join(problems)}. "
                "Put it there, or let this run make it (manage: true)",
                problems=problems,
                **answer,
            )
        if problems and not module.check_mode:
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.is_dir():
                move_aside(folder)
            left = write_artifact(folder, manifest, files)
            if left:
                module.fail_json(
                    msg=f"artifact '{name}' does not read back as it was written: {'; '.join(left)}. "
                    f"Check the disk under {folder.parent}",
                    problems=left,
                    **answer,
                )
    except OSError as error:
        module.fail_json(msg=f"artifact '{name}' in {folder}: {error}", problems=[str(error)], **answer)
    module.exit_json(changed=bool(problems), problems=problems, **answer)


if __name__ == "__main__":
    main()
