#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Keep a program of several files on the node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: program_files
short_description: Keep a program of several files on the node
version_added: "0.1.0"
description:
  - Writes the files of a program in one step for all of them; copying them one by one takes seconds a file.
  - A file that another version of the program had, and this one does not, is removed.
options:
  path:
    description: Folder that holds the program. Folders below it are made.
    type: path
    required: true
  files:
    description: By path below O(path) the text of each file.
    type: dict
    required: true
  folders:
    description: Folders below O(path) that belong to the program alone, in which no other C(*.py) file may stay.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Says which files would be written and removed.
    support: full
  diff_mode:
    description: Shows what would be written.
    support: full
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Install the program
  serving.gpu_node.program_files:
    path: /usr/local/lib/gpu-node
    files:
      example/__init__.py: ""
    folders: [example]
"""

RETURN = r"""
written:
  description: Files that were missing or had other content.
  returned: always
  type: list
  elements: str
removed:
  description: Files that belonged to another version.
  returned: always
  type: list
  elements: str
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def read(path: Path) -> str | None:
    """Return a file's text, or None when there is no such file or it is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def make_folder(root: Path, folder: Path) -> None:
    """Make a folder below ``root`` that everybody can read, whatever the umask is."""
    for one in reversed([folder, *folder.parents]):
        if one == root or root in one.parents:
            one.mkdir(parents=True, exist_ok=True)
            one.chmod(0o755)


def write_file(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.chmod(0o644)
    fresh.replace(path)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "folders": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    root = Path(module.params["path"])
    wanted: dict[str, str] = module.params["files"]
    try:
        found = {name: read(root / name) for name in wanted}
        written = [name for name, text in wanted.items() if found[name] != text]
        there = [path for folder in module.params["folders"] for path in sorted((root / folder).glob("**/*.py"))]
        removed = [name for name in (path.relative_to(root).as_posix() for path in there) if name not in wanted]
        if not module.check_mode:
            for name in written:
                make_folder(root, (root / name).parent)
                write_file(root / name, wanted[name])
            for name in removed:
                (root / name).unlink()
    except OSError as error:
        module.fail_json(msg=f"the program below {root} could not be written: {error}")
    diff = [
        {"before_header": name, "after_header": name, "before": found[name] or "", "after": wanted[name]}
        for name in written
    ]
    module.exit_json(changed=bool(written or removed), written=written, removed=removed, diff=diff)


if __name__ == "__main__":
    main()
