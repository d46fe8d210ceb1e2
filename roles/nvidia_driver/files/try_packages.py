#!/usr/bin/python3
"""Tries a package source in a temporary folder, and leaves the node's own apt as it is.

Takes from its input base64 of JSON: {"sources": deb822 text or "", "key": text or "", "preferences": text,
"names": [package], "headers": [package], "ours": [files of the node's apt configuration that this source replaces],
"proxy": URL or ""}. In `sources`, @KEY@ stands for the key's file.
Prints JSON: {"update": {"rc", "text"}, "madison": text, "simulate": {"rc", "text"}}.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ETC = Path("/etc/apt")
LISTS = Path("/var/lib/apt/lists")
UPDATE_SECONDS = 300


def run(argv: list[str], seconds: int = 120) -> dict[str, Any]:
    """Run a command; its output and its errors are one text."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"rc": 124, "text": f"E: {argv[0]} gave no result within {seconds} s"}
    return {"rc": done.returncode, "text": done.stdout[-20000:]}


def copy_files(source: Path, target: Path, ours: list[str]) -> None:
    """Copy a folder's files, without those that this source replaces."""
    target.mkdir()
    for path in sorted(source.glob("*")) if source.is_dir() else []:
        if path.is_file() and str(path) not in ours:
            shutil.copy(path, target)


def copy_lists(target: Path) -> None:
    """Make the node's package lists known here; links cost nothing, and apt replaces files and never writes in them."""
    (target / "partial").mkdir(parents=True)
    for path in LISTS.glob("*_*"):
        if path.is_file():
            try:
                os.link(path, target / path.name)
            except OSError:
                shutil.copy(path, target)


def attempt(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read the source's lists, then ask what it offers and what an installation would do."""
    parts, preferences, lists = folder / "sources.d", folder / "preferences.d", folder / "lists"
    copy_files(ETC / "sources.list.d", parts, wanted["ours"])
    copy_files(ETC / "preferences.d", preferences, wanted["ours"])
    copy_lists(lists)
    (preferences / "90-trial.pref").write_text(wanted["preferences"])
    (folder / "cache").mkdir()
    # _apt, the user that apt fetches and verifies as, has to get in.
    for path in (folder, lists, lists / "partial"):
        path.chmod(0o755)
    options = [f"Dir::State::lists={lists}", f"Dir::Cache={folder}/cache", f"Dir::Etc::preferencesparts={preferences}"]
    source = folder / "trial.sources"
    if wanted["sources"]:
        key = folder / "trial.asc"
        key.write_text(wanted["key"])
        source.write_text(wanted["sources"].replace("@KEY@", str(key)))
    # The node's own sources, for headers and dependencies: another one that is broken is not this source's fault.
    run(["apt-get", "update", "-q", *each([*options, f"Dir::Etc::sourceparts={parts}"])], UPDATE_SECONDS)
    update: dict[str, Any] = {"rc": 0, "text": ""}
    if wanted["sources"]:
        ours = ["APT::Get::List-Cleanup=false", f"Dir::Etc::sourcelist={source}", "Dir::Etc::sourceparts=/dev/null"]
        update = run(["apt-get", "update", "-q", *each([*options, *ours])], UPDATE_SECONDS)
        # apt says a source that it could not reach in a warning, and ends with 0.
        if update["rc"] == 0 and re.search(r"^(W: Failed to fetch|E:|Err:)", update["text"], re.MULTILINE):
            update["rc"] = 100
        shutil.copy(source, parts / "trial.sources")
    options.append(f"Dir::Etc::sourceparts={parts}")
    names = [*wanted["names"], *wanted["headers"]]
    madison = run(["apt-cache", *each(options), "madison", *names])
    install = ["apt-get", "-s", "-q", "--no-install-recommends", "--allow-downgrades", "--allow-change-held-packages"]
    return {
        "update": update,
        "madison": madison["text"],
        "simulate": run([*install, *each(options), "install", *names]),
    }


def each(options: list[str]) -> list[str]:
    """Return the options as apt takes them."""
    return [word for option in options for word in ("-o", option)]


def main() -> None:
    """Do it."""
    wanted = json.loads(base64.b64decode(sys.stdin.read()))
    if wanted["proxy"]:
        os.environ.update(http_proxy=wanted["proxy"], https_proxy=wanted["proxy"])
    with tempfile.TemporaryDirectory(prefix="gpu-node-apt-") as folder:
        print(json.dumps(attempt(Path(folder), wanted)))


if __name__ == "__main__":
    main()
