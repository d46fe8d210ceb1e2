"""The commands of the program."""

from __future__ import annotations

import argparse
import compileall
import sys
from pathlib import Path

from ansible_collections.serving.gpu_node.plugins.module_utils.patch_series import PatchError

from gpu_node_image import build, pack, trees
from gpu_node_image.errors import ImageError
from gpu_node_image.podman import say


def check(arguments: argparse.Namespace) -> None:
    """See that every patch applies to a wheel, before anything is installed."""
    request = build.read_request(arguments.folder)
    version = arguments.wheel.name.split("-")[1].partition("+")[0]
    if version != request.version:
        raise ImageError(
            f"{arguments.wheel.name} is {version} and the patches are for {request.version}; pin that in the lock"
        )
    build.check(request.series, trees.wheel_reader(arguments.wheel), arguments.wheel.name)


def apply(arguments: argparse.Namespace) -> None:
    """Apply the patches to a folder of installed packages."""
    request = build.read_request(arguments.folder)
    changed = build.check(request.series, trees.folder_reader(arguments.packages), str(arguments.packages))
    for path, text in changed.items():
        file = arguments.packages / path
        file.write_text(text, "utf-8", newline="")
        # The file system is read-only later, where it would be compiled at each start.
        if not compileall.compile_file(file, quiet=1, force=True):
            raise ImageError(f"{path} is no Python after its patch; make the patch anew")
    say(f"{len(request.patches)} patches applied, {len(changed)} files changed")


def labels(arguments: argparse.Namespace) -> None:
    """Print the arguments that give a build its labels, one a line."""
    print("\n".join(build.read_request(arguments.folder).label_arguments))


def main(argv: list[str]) -> int:
    """Run one command; return its exit code."""
    parser = argparse.ArgumentParser(prog="gpu_node_image", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="the build's folder, which has request.json and patches/"
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("check", help=check.__doc__)
    one.add_argument("wheel", type=Path)
    one.set_defaults(run=check)
    one = commands.add_parser("apply", help=apply.__doc__)
    one.add_argument("packages", type=Path)
    one.set_defaults(run=apply)
    one = commands.add_parser("labels", help=labels.__doc__)
    one.set_defaults(run=labels)
    one = commands.add_parser("build", help=build.build.__doc__)
    one.set_defaults(run=lambda arguments: build.build(build.read_request(arguments.folder)))
    one = commands.add_parser("pack", help=pack.build.__doc__)
    one.set_defaults(run=lambda arguments: pack.build(build.read_request(arguments.folder)))
    one = commands.add_parser("take", help=build.take.__doc__)
    one.set_defaults(run=lambda arguments: build.take(build.read_request(arguments.folder)))
    one = commands.add_parser("load", help=build.load.__doc__)
    one.add_argument("archive")
    one.set_defaults(run=lambda arguments: build.load(build.read_request(arguments.folder), arguments.archive))
    one = commands.add_parser("save", help=build.save.__doc__)
    one.add_argument("archives", type=Path)
    one.set_defaults(run=lambda arguments: build.save(build.read_request(arguments.folder), arguments.archives))
    one = commands.add_parser("fetch", help=build.fetch.__doc__)
    one.set_defaults(run=lambda arguments: build.fetch(build.read_request(arguments.folder)))
    one = commands.add_parser("push", help=build.push.__doc__)
    one.set_defaults(run=lambda arguments: build.push(build.read_request(arguments.folder)))
    one = commands.add_parser("finish", help=build.finish.__doc__)
    one.add_argument("image")
    one.set_defaults(run=lambda arguments: build.finish(build.read_request(arguments.folder), arguments.image))
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ImageError, PatchError, OSError, SyntaxError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
