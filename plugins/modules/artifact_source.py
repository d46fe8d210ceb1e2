#!/usr/bin/python
# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Ask an artifact's source what it holds."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: artifact_source
short_description: Ask an artifact's source what it holds
version_added: "0.1.0"
description:
  - Lists the files that a fetch would take, with sizes and, where the source tells them, hashes.
  - A hub and a mirror are asked over HTTP; a folder or an archive on the node is looked at.
options:
  source:
    description: Where it comes from, as the plan has it.
    type: dict
    required: true
  endpoint:
    description: The hub's address. A source's own C(endpoint) is used first.
    type: str
    default: https://huggingface.co
  token:
    description: The hub's token, for gated and private repositories.
    type: str
    default: ""
  timeout:
    description: Seconds until an answer must begin.
    type: int
    default: 30
  proxy_file:
    description:
      - File on the node with C(http_proxy), C(https_proxy) and C(no_proxy), a line each, as the role C(package_access)
        writes it. One that does not exist is passed over. In a file, because a proxy may need a password.
    type: path
    default: /etc/gpu-node/proxy.env
extends_documentation_fragment: [serving.gpu_node.reads_only]
author: The gpu_node authors (@gpu-node)
"""

EXAMPLES = r"""
- name: Ask what a repository holds
  serving.gpu_node.artifact_source:
    source:
      type: hub
      repository: example/model
      revision: 0123456789abcdef0123456789abcdef01234567
      include: ["*.safetensors", "*.json"]
"""

RETURN = r"""
files:
  description:
    - By path C(size) in bytes, C(sha256), C(git_sha1) and C(xet).
    - Empty for an archive, whose content is known when it is unpacked.
  returned: always
  type: dict
bytes:
  description: Size of all files together; of an archive its own.
  returned: always
  type: int
"""

import json
import os
import ssl
import time
import urllib.error
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url
from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import taken_below
from ansible_collections.serving.gpu_node.plugins.module_utils.listing import (
    Listing,
    ListingError,
    hub_listing,
    manifest_listing,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import MANIFEST, ManifestError, parse_manifest

# A hub that is busy for a moment is asked again; seconds between, unless it says how long.
_PAUSES = (1, 4, 15)
_LONGEST_PAUSE = 120
_LARGEST_ANSWER = 256 * 1024 * 1024


class SourceError(Exception):
    """The source gives no listing; the text says why, and what to do."""


def get(url: str, headers: dict[str, str], timeout: int) -> bytes:
    """Return what a server answers.

    :raises SourceError: when it refuses, cannot be reached, or stays busy.
    """
    for pause in (*_PAUSES, None):
        try:
            # The token is for the host that was asked, not for one that it sends us to.
            with open_url(url, headers=headers, timeout=timeout, unredirected_headers=["Authorization"]) as answer:
                return bytes(answer.read(_LARGEST_ANSWER))
        except urllib.error.HTTPError as error:
            if error.code not in (429, 500, 502, 503, 504) or pause is None:
                raise SourceError(refusal(url, error)) from error
            asked = error.headers.get("Retry-After", "")
            time.sleep(min(_LONGEST_PAUSE, int(asked)) if asked.isdigit() else pause)
        except (urllib.error.URLError, ssl.SSLError, ConnectionError, TimeoutError) as error:
            if pause is None:
                reason = getattr(error, "reason", error)
                raise SourceError(
                    f"{url} cannot be reached: {reason}; look at the node's network and proxy, or use another source"
                ) from error
            time.sleep(pause)
    raise SourceError(f"{url} gives no answer")


def take_proxy(path: Path) -> None:
    """Have what this process asks go the way out that the node has."""
    if path.is_file():
        pairs = (line.partition("=") for line in path.read_text(encoding="utf-8").splitlines())
        os.environ.update({name.strip(): value.strip() for name, _, value in pairs if value.strip()})


def refusal(url: str, error: urllib.error.HTTPError) -> str:
    """Return what a refusal means, for whoever has to do something about it."""
    code = error.headers.get("X-Error-Code", "")
    if error.code in (401, 403):
        return (
            f"{url} answered {error.code}{f' ({code})' if code else ''}: a gated or private repository needs a token "
            "of somebody who was let in (model_weights_hub_token); a repository that does not exist looks the same"
        )
    if code == "RevisionNotFound":
        return f"{url} answered 404: the repository has no such commit; correct the source's revision"
    if error.code == 404:
        return f"{url} answered 404: there is no such thing; correct the source"
    if error.code in (301, 302, 303, 307, 308):
        return f"{url} sends its clients round in a circle; correct the source's address"
    return f"{url} answered {error.code}; try again later, or use another source"


def ask_hub(source: dict[str, Any], endpoint: str, token: str, timeout: int) -> Listing:
    """List a repository at one commit."""
    repository, revision = source["repository"], source["revision"]
    url = f"{(source.get('endpoint') or endpoint).rstrip('/')}/api/models/{quote(repository)}/revision/{revision}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    data = get(f"{url}?blobs=true", headers, timeout)
    try:
        answer = json.loads(data)
    except ValueError as error:
        raise SourceError(f"{url} answered with something else than JSON; is the endpoint a hub?") from error
    return hub_listing(answer, source)


def ask_mirror(source: dict[str, Any], timeout: int) -> Listing:
    """List a mirrored artifact, whose manifest must be the wanted one."""
    url = f"{source['url'].rstrip('/')}/{MANIFEST}"
    manifest = parse_manifest(get(url, {}, timeout).decode(errors="replace"))
    if manifest["digest"] != source["digest"]:
        raise SourceError(
            f"{url} has the digest {manifest['digest']}, not {source['digest']}; correct the source, or the mirror"
        )
    return manifest_listing(manifest)


def look_at_folder(source: dict[str, Any]) -> Listing:
    """List a folder on the node."""
    folder = Path(source["path"])
    if not folder.is_dir():
        raise SourceError(f"{folder} is no folder on this node; mount it, or correct the source's path")
    return {
        name: {"size": file.stat().st_size, "sha256": None, "git_sha1": None, "xet": False}
        for name, file in taken_below(source).items()
    }


def look_at_archive(source: dict[str, Any]) -> int:
    """Return the size of an archive on the node, in bytes."""
    path = Path(source["path"])
    if not path.is_file():
        raise SourceError(f"{path} is no file on this node; copy it there, or correct the source's path")
    return path.stat().st_size


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "dict", "required": True},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "int", "default": 30},
            "proxy_file": {"type": "path", "default": "/etc/gpu-node/proxy.env"},
        },
        supports_check_mode=True,
    )
    source, timeout = module.params["source"], module.params["timeout"]
    files: Listing = {}
    size = 0
    try:
        kind = source.get("type")
        take_proxy(Path(module.params["proxy_file"]))
        if kind == "hub":
            files = ask_hub(source, module.params["endpoint"], module.params["token"], timeout)
        elif kind == "mirror":
            files = ask_mirror(source, timeout)
        elif kind == "path":
            files = look_at_folder(source)
        elif kind == "archive":
            size = look_at_archive(source)
        elif kind != "generated":
            raise SourceError(f"a source of type {kind} holds no listing of its own")
    except (SourceError, ListingError, ManifestError, OSError) as error:
        module.fail_json(msg=str(error))
    total = size or sum(entry["size"] for entry in files.values())
    module.exit_json(changed=False, files=files, bytes=total)


if __name__ == "__main__":
    main()
