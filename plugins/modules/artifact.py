#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Look at an artifact on a node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: artifact
short_description: Look at an artifact (weights, a drafter head) on a node
version_added: "0.1.0"
description:
  - An artifact is a folder O(path)/O(name)/DIGEST with a manifest that lists every file with size and SHA-256.
  - Nothing is changed, and nobody but this node's disk is asked. A file is hashed when its size, modification time or
    inode are not those of its last hashing.
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
    description: Where it comes from, as the plan has it. Equal sources have equal keys on every node.
    type: dict
    required: true
  files:
    description:
      - What the source holds, by path C(size) in bytes and, as far as it is known, C(sha256).
      - With it, the module says what a fetch would take.
    type: dict
    default: {}
extends_documentation_fragment: [serving.gpu_node.reads_only]
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Look for the tiny model
  serving.gpu_node.artifact:
    path: /var/lib/gpu-node/artifacts
    name: tiny-deepseek-v3
    source:
      type: generated
      seed: 0
"""

RETURN = r"""
state:
  description:
    - C(complete) when its every byte is there and was hashed, C(damaged) when some are not what they were.
    - Else C(missing).
  returned: always
  type: str
key:
  description: The source's short name on a node, 12 hex digits.
  returned: always
  type: str
digest:
  description: SHA-256 over the manifest's list of files, 64 hex digits; empty when it is not known yet.
  returned: always
  type: str
folder:
  description: Where the artifact lies; empty when that is not known yet.
  returned: always
  type: str
draft_tokens:
  description: How many tokens its DSpark head drafts in one block; 0 when its C(config.json) does not say.
  returned: always
  type: int
problems:
  description: What is wrong with it.
  returned: always
  type: list
  elements: str
begun_bytes:
  description: Bytes of it that an unfinished fetch has left.
  returned: always
  type: int
needed_bytes:
  description: Bytes that are still to be fetched.
  returned: with O(files)
  type: int
reused_bytes:
  description: Bytes that another artifact of this node holds, which are linked.
  returned: with O(files)
  type: int
missing_files:
  description: Files that are still to be fetched.
  returned: with O(files)
  type: list
  elements: str
free_bytes:
  description: Free bytes of the file system below O(path).
  returned: always
  type: int
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import (
    Store,
    begun,
    free_bytes,
    needed_bytes,
    read_json,
    seen_at_source,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.draft_head import draft_tokens
from ansible_collections.serving.gpu_node.plugins.module_utils.sources import source_key


def look(store: Store, key: str, source: dict[str, Any]) -> dict[str, Any]:
    """Return state, digest, folder, problems and draft tokens of what a source gave, or was to give."""
    record = store.recorded(key)
    digest = record.get("digest") or source.get("digest") or ""
    folder = store.folder(digest) if digest else None
    answer: dict[str, Any] = {
        "state": "missing",
        "digest": digest,
        "folder": str(folder or ""),
        "draft_tokens": 0,
        "problems": [],
    }
    if folder is None or not folder.is_dir():
        return {**answer, "problems": [f"{folder or store.base / key} is not there"]}
    problems, _, _ = store.check(folder)
    if problems:
        return {**answer, "state": "damaged", "problems": problems}
    seen = seen_at_source(source)
    if seen and record and seen != record.get("seen"):
        # A copy stays whole when its source is gone; one whose source has changed is not what was asked for.
        return {**answer, "problems": [f"{source['path']} has changed since it was taken"]}
    return {**answer, "state": "complete", "draft_tokens": draft_tokens(read_json(folder / "config.json"))}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "source": {"type": "dict", "required": True},
            "files": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    root, name, source = Path(module.params["path"]), module.params["name"], module.params["source"]
    files = module.params["files"]
    store, key = Store(root, name), source_key(source)
    answer: dict[str, Any] = {}
    try:
        answer = look(store, key, source)
        answer |= {"begun_bytes": sum(begun(store.incoming(key)).values()), "free_bytes": free_bytes(root)}
        if files:
            needed, reused, missing = needed_bytes(root, store.incoming(key), files)
            answer |= {"needed_bytes": needed, "reused_bytes": reused, "missing_files": missing}
    except OSError as error:
        module.fail_json(msg=f"artifact '{name}' below {root}: {error}; look at that disk")
    module.exit_json(changed=False, key=key, **answer)


if __name__ == "__main__":
    main()
