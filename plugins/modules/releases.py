#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Write releases: immutable folders named after their content."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: releases
short_description: Write the releases of a node's replicas
version_added: "0.1.0"
description:
  - A release is a folder O(path)/ID with read-only files. It appears whole or not at all, and is never changed.
  - A file that was lost or edited since is put back.
  - A release that is new gets C(manifest.json) as well, which says who made it when, and of what. It is no part of the
    release, and is never written again.
options:
  path:
    description: Folder that holds the releases.
    type: path
    required: true
  releases:
    description: By release id the texts of its files by name.
    type: dict
    required: true
  manifest:
    description: By release id what C(manifest.json) says; C(created) is added.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Says which releases would be written.
    support: full
  diff_mode:
    description: Shows the files that would be written.
    support: full
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Write the releases
  serving.gpu_node.releases:
    path: /var/lib/gpu-node/releases
    releases:
      0123456789ab:
        engine.yaml: "port: 8000\n"
    manifest:
      0123456789ab:
        by: alice@controller
"""

RETURN = r"""
written:
  description: Files that were missing or had other content, as ID/NAME.
  returned: always
  type: list
  elements: str
"""

import datetime
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def read(path: Path) -> str | None:
    """Return a file's text, or None when there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def write_file(path: Path, text: str) -> None:
    """Write a read-only file so that it is on the disk, replacing what is there in one step."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.chmod(0o444)
    fresh.replace(path)


def write_release(folder: Path, files: dict[str, str], manifest: dict[str, Any]) -> None:
    """Make the folder whole: a new one appears by one rename, one that is there gets back what differs."""
    if folder.is_dir():
        for name, text in files.items():
            if read(folder / name) != text:
                write_file(folder / name, text)
        return
    incoming = folder.with_name(f".incoming-{folder.name}")
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    for name, text in files.items():
        write_file(incoming / name, text)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_file(incoming / "manifest.json", json.dumps({"created": created, **manifest}, indent=1) + "\n")
    incoming.chmod(0o755)
    incoming.rename(folder)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "releases": {"type": "dict", "required": True},
            "manifest": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    root = Path(module.params["path"])
    releases: dict[str, dict[str, str]] = module.params["releases"]
    wanted = {f"{release}/{name}": text for release in releases for name, text in releases[release].items()}
    try:
        found = {name: read(root / name) for name in wanted}
        written = [name for name, text in wanted.items() if found[name] != text]
        if written and not module.check_mode:
            for release in {name.split("/")[0] for name in written}:
                write_release(root / release, releases[release], module.params["manifest"].get(release, {}))
    except OSError as error:
        module.fail_json(msg=f"a release could not be written below {root}: {error}")
    diff = [
        {"before_header": name, "after_header": name, "before": found[name] or "", "after": wanted[name]}
        for name in written
    ]
    module.exit_json(changed=bool(written), written=written, diff=diff)


if __name__ == "__main__":
    main()
