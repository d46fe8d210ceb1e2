"""The command line of `gpu-node-weights`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.artifact_store import (
    Store,
    complete_folders,
    files_below,
    stores,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import MANIFEST

from gpu_node_weights import local, unused
from gpu_node_weights.errors import WeightsError
from gpu_node_weights.fetch import Fetch, now_text
from gpu_node_weights.progress import say, size_text, time_text, warn
from gpu_node_weights.request import read_request

_LOOK_EVERY_S = 10.0


def fetch(arguments: argparse.Namespace) -> int:
    """Complete an artifact."""
    request = read_request(arguments.request)
    Fetch(request).run()
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Hash every byte of the complete artifacts again."""
    found: list[dict[str, Any]] = []
    for store in stores(arguments.root):
        if arguments.name in ("", store.name):
            found += [_verify_one(store, folder) for folder in complete_folders(store)]
    if arguments.name and not found:
        raise WeightsError(f"{arguments.root} has no complete artifact '{arguments.name}'")
    if arguments.json:
        print(json.dumps(found))
    return 1 if any(item["problems"] for item in found) else 0


def _verify_one(store: Store, folder: Path) -> dict[str, Any]:
    total = sum(path.stat().st_size for path in files_below(folder).values())
    what = f"{store.name} {folder.name}"
    say(f"{what}: hashing {size_text(total)}")
    began = time.monotonic()
    last = [began]

    def tick() -> None:
        now = time.monotonic()
        if now - last[0] >= _LOOK_EVERY_S:
            last[0] = now
            say(f"{what}: hashing for {time_text(now - began)}")

    problems, stamps, manifest = store.check(folder, again=True, tick=tick)
    if manifest:
        # A file without a stamp is not believed by the next run, which fetches it again.
        store.write_stamps(manifest["digest"], now_text(), stamps)
    seconds = time.monotonic() - began
    for problem in problems:
        warn(f"error: {folder}/{problem}" if manifest else f"error: {problem}")
    if not problems:
        say(f"{what}: {len(stamps)} files as they were, {size_text(total)} in {time_text(seconds)}")
    else:
        warn(f"error: {what}: {len(problems)} of {len(manifest.get('files', {}))} files are wrong; run site.yml")
    return {"name": store.name, "folder": str(folder), "bytes": total, "seconds": seconds, "problems": problems}


def list_unused(arguments: argparse.Namespace) -> int:
    """List, and with --remove remove, what nothing uses."""
    found = unused.find_unused(arguments.root, arguments.releases, arguments.replicas)
    if arguments.json:
        print(json.dumps([{"folder": str(item.folder), "bytes": item.size, "why": item.why} for item in found]))
    for item in found:
        if not arguments.json:
            say(f"{item.folder}: {size_text(item.size)}, {item.why}")
        if arguments.remove:
            unused.remove(arguments.root, item)
    return 0


def pack(arguments: argparse.Namespace) -> int:
    """Copy one artifact with its manifest, for another machine."""
    store = Store(arguments.root, arguments.name)
    folder = store.folder(arguments.digest)
    problems, _, _ = store.check(folder)
    if problems:
        raise WeightsError(f"{folder}: {'; '.join(problems[:3])}; run site.yml first")
    for name, file in {**files_below(folder), MANIFEST: store.manifest_path(folder)}.items():
        target = arguments.folder / name
        if not target.exists() or target.stat().st_size != file.stat().st_size:
            part = target.with_name(f".{target.name}.part")
            local.copy_file(file, part, lambda count: None)
            part.replace(target)
    say(f"{arguments.folder}: a copy of {folder}")
    return 0


def main(argv: list[str]) -> int:
    """Run a command; what is wrong is one line on standard error, and exit code 1."""
    parser = argparse.ArgumentParser(prog="gpu-node-weights", description="weights and other artifacts of this node")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("fetch", help="complete an artifact, going on from what is there")
    one.add_argument("request", type=Path)
    one.set_defaults(run=fetch)
    one = commands.add_parser("verify", help="hash every byte again")
    one.add_argument("root", type=Path)
    one.add_argument("--name", default="")
    one.add_argument("--json", action="store_true")
    one.set_defaults(run=verify)
    one = commands.add_parser("unused", help="what no release that is served, wanted or a way back uses")
    one.add_argument("root", type=Path)
    one.add_argument("--releases", type=Path, required=True)
    one.add_argument("--replicas", type=Path, required=True)
    one.add_argument("--remove", action="store_true")
    one.add_argument("--json", action="store_true")
    one.set_defaults(run=list_unused)
    one = commands.add_parser("pack", help="copy an artifact for another machine")
    one.add_argument("root", type=Path)
    one.add_argument("name")
    one.add_argument("digest")
    one.add_argument("folder", type=Path)
    one.set_defaults(run=pack)
    arguments = parser.parse_args(argv)
    try:
        result: int = arguments.run(arguments)
    except WeightsError as error:
        warn(f"error: {error}")
        return 1
    except OSError as error:
        warn(f"error: {error}; look at that disk or folder, and run again: what is there is kept")
        return 1
    return result
