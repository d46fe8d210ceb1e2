"""A container that works and leaves nothing: no network, no rights, a root that it cannot write."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_node_image import podman


def work(what: str, name: str, arguments: list[str], image: str, command: list[str], log: Path) -> None:
    """Run a command in a container of an image that is there, and say now and then how far it is.

    :param arguments: more of ``podman run``'s.
    :param command: in place of the image's own entry point; its first word is the program.
    :raises ImageError: with its last line when it fails.
    """
    # Podman's own events would stand between the job's lines.
    argv = ["podman", "--events-backend=none", "run", "--rm", "--replace", "--name", name, "--pull=never"]
    argv += ["--network=none", "--log-driver=none"]
    # /tmp stays writable and executable. HOME: what compiles at run time keeps it there.
    argv += ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--env=HOME=/tmp"]
    argv += [*arguments, f"--entrypoint={command[0]}", image, *command[1:]]
    podman.work(what, argv, log, os.environ)
