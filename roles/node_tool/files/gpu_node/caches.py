"""What the engines compiled and keep: a folder for each replica and image, as one image's is of no use to another."""

import re
import shutil

from gpu_node import files
from gpu_node.config import Release, linked_release, load_release, started_release
from gpu_node.errors import ToolError
from gpu_node.paths import Paths
from gpu_node.switch import parse_journal
from gpu_node.tool import Tool
from gpu_node.wanted import Record

FOLDER = re.compile(r"[0-9a-f]{12}")


def make(paths: Paths, release: Release) -> None:
    """Make the release's folder: Podman does not, and an image that is gone back to may have lost its own."""
    paths.cache(release.replica, release.image_id).mkdir(mode=0o700, parents=True, exist_ok=True)


def _kept(tool: Tool, index: int) -> set[str]:
    """The releases that the replica runs, is to run, or may go back to. Raises ToolError when that cannot be told."""
    paths = tool.paths
    kept = {linked_release(paths, index, link) for link in ("current", "previous")} | {started_release(paths, index)}
    if (text := files.read_text(paths.journal(index))) is not None:
        journal = parse_journal(text, str(paths.journal(index)))
        kept |= {journal.source, journal.target}
    if wanted := Record(paths, tool.host, tool.by).read():
        kept |= {wanted.targets.get(index), wanted.before.get(index)}
    return {release for release in kept if release}


def remove_unused(tool: Tool, index: int) -> None:
    """Remove the replica's folders of images that no release needs any more; none while one cannot be read."""
    paths = tool.paths
    try:
        needed = {paths.cache(index, load_release(paths, release).image_id) for release in _kept(tool, index)}
        folder = paths.caches(index)
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            if entry not in needed and FOLDER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
                tool.host.say(f"replica {index}: removed {entry}, the cache of an image that no release needs")
    except (ToolError, OSError) as error:
        tool.host.warn(f"replica {index}: caches of images that no release needs stay: {error}")
