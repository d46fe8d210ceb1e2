"""The commands of the program."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu_node_image.errors import ImageError

from gpu_node_kernels import build, qualify


def main(argv: list[str]) -> int:
    """Run one command; return its exit code."""
    parser = argparse.ArgumentParser(prog="gpu_node_kernels", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run in (("build", build.run), ("qualify", qualify.run)):
        one = commands.add_parser(name, help=run.__doc__)
        one.add_argument("request", type=Path, help="what is to be done, as JSON")
        one.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments.request)
    except (ImageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
