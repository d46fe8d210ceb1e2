#!/usr/bin/env python3
"""A bundle: a folder with all that a node without a way outside needs, and the SHA-256 of every file in it.

bundle.py make REQUEST.json      put it together; what is there already is not made again
bundle.py verify FOLDER          hash every file, and name those that are not what they were
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIST = "bundle.json"
WEIGHTS = "/usr/local/bin/gpu-node-weights"
ARTIFACTS = "/var/lib/gpu-node/artifacts"
BLOCK = 4 * 1024 * 1024
_SHOWN = 20


class BundleError(Exception):
    """One line for the operator."""


def say(text: str) -> None:
    print(text, flush=True)


def run(argv: list[str], what: str, folder: Path | None = None) -> str:
    """Run a command.

    :raises BundleError: with its last line.
    """
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
        raise BundleError(f"{what}: `{argv[0]}` failed with {done.returncode}: {lines[-1]}")
    return done.stdout


# -- hashes


def sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def files_below(folder: Path) -> dict[str, Path]:
    """Return every file of a bundle but its list, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / LIST
    }


def hash_all(files: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Hash files on every core, the largest first, and say how far that is."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total, done, last = sum(sizes.values()), 0, time.monotonic()
    found = {}
    names = sorted(files, key=lambda name: -sizes[name])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, digest in zip(names, pool.map(lambda name: sha256(files[name]), names), strict=True):
            found[name] = {"size": sizes[name], "sha256": digest}
            done += sizes[name]
            if time.monotonic() - last >= 5:
                last = time.monotonic()
                say(f"hashed {done / 1e9:.1f} of {total / 1e9:.1f} GB")
    return found


def seal(folder: Path) -> int:
    """Write the list of everything; return how many files there are."""
    files = hash_all(files_below(folder))
    fresh = folder / f".{LIST}.new"
    fresh.write_text(json.dumps({"schema": 1, "files": dict(sorted(files.items()))}, indent=1) + "\n")
    fresh.replace(folder / LIST)
    return len(files)


def compare(wanted: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for every file that is missing, surplus, or of another size or content."""
    problems = [f"{name} is missing" for name in sorted(set(wanted) - set(found))]
    problems += [f"{name} does not belong to it" for name in sorted(set(found) - set(wanted))]
    for name in sorted(set(wanted) & set(found)):
        want, have = wanted[name], found[name]
        if want["size"] != have["size"]:
            problems.append(f"{name} has {have['size']} bytes, not {want['size']}")
        elif want["sha256"] != have["sha256"]:
            problems.append(f"{name} has SHA-256 {have['sha256']}, not {want['sha256']}")
    return problems


def verify(folder: Path) -> None:
    """Compare a bundle with its list.

    :raises BundleError: when it is not what it was.
    """
    try:
        wanted = json.loads((folder / LIST).read_text())["files"]
    except OSError as error:
        raise BundleError(
            f"{folder / LIST}: {error.strerror}; that is no finished bundle, copy it again or make it anew"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{folder / LIST} is no list of a bundle ({error}); copy it again") from error
    problems = compare(wanted, hash_all(files_below(folder)))
    for problem in problems[:_SHOWN]:
        say(f"error: {problem}")
    if problems:
        raise BundleError(f"{folder}: {len(problems)} files are not what they were; copy it again")
    say(f"{folder}: {len(wanted)} files as they were")


# -- Debian packages


def installed(listing: str) -> list[tuple[str, str, str]]:
    """Return name, architecture and version of every package of this node.

    Also of those that every Debian system has: where the bundle is used they may be older than the others need.

    :param listing: lines ``status TAB name TAB architecture TAB version`` of dpkg-query.
    """
    rows = (line.split("\t") for line in listing.splitlines())
    return [(name, architecture, version) for status, name, architecture, version in rows if status.strip() == "ii"]


def file_name(name: str, architecture: str, version: str) -> str:
    """Return what apt calls a package's file."""
    return f"{name}_{version.replace(':', '%3a')}_{architecture}.deb"


def stanza(control: str, name: str, size: int, digest: str) -> str:
    """Return a package's entry in the repository's list."""
    return f"{control.rstrip()}\nFilename: ./{name}\nSize: {size}\nSHA256: {digest}\n"


def collect_packages(folder: Path) -> None:
    """Fetch the node's packages in the versions that it has, and make a repository of them."""
    folder.mkdir(exist_ok=True)
    form = "${db:Status-Abbrev}\\t${Package}\\t${Architecture}\\t${Version}\\n"
    wanted = installed(run(["dpkg-query", "--show", f"--showformat={form}"], "the node's packages"))
    lacking = [one for one in wanted if not (folder / file_name(*one)).exists()]
    say(f"packages: {len(lacking)} of {len(wanted)} to fetch")
    for start in range(0, len(lacking), 50):
        names = [f"{name}:{architecture}={version}" for name, architecture, version in lacking[start : start + 50]]
        # As root: its own user may not write here.
        run(
            ["apt-get", "--quiet", "--option=APT::Sandbox::User=root", "download", *names],
            "packages: a version that the node has is in none of its sources any more: upgrade the node, and run again",
            folder,
        )
        say(f"packages: {min(start + 50, len(lacking))} of {len(lacking)} fetched")
    keep = {file_name(*one) for one in wanted}
    for path in folder.glob("*.deb"):
        if path.name not in keep:
            path.unlink()
    entries = []
    for path in sorted(folder.glob("*.deb")):
        control = run(["dpkg-deb", "--field", str(path)], path.name)
        entries.append(stanza(control, path.name, path.stat().st_size, sha256(path)))
    (folder / "Packages").write_text("\n".join(entries))
    (folder / "packages.txt").write_text("".join(f"{name} {version}\n" for name, _, version in sorted(wanted)))


# -- the rest


def save_image(folder: Path, reference: str) -> None:
    """Save the image, once; a half-written archive never has the final name."""
    archive, note = folder / "image.tar", folder / "image.txt"
    if archive.exists() and note.exists() and note.read_text().strip() == reference:
        say(f"image: {reference} is there")
        return
    say(f"image: saving {reference}")
    fresh = folder / ".image.tar.new"
    fresh.unlink(missing_ok=True)
    run(["podman", "save", "--quiet", "--output", str(fresh), reference], "image")
    fresh.chmod(0o644)
    fresh.replace(archive)
    note.write_text(f"{reference}\n")


def collect_wheels(folder: Path, request: dict[str, Any]) -> None:
    """Fetch the Python packages that fetch."""
    say("wheels: the packages that fetch over HTTP")
    own = [option for one in request["wheel_folders"] for option in ("--find-links", one)]
    argv = [request["pip"], "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    run([*argv, *(["--no-index", *own] if own else []), "--requirement", request["requirements"]], "wheels")
    shutil.copyfile(request["requirements"], folder / "requirements.txt")


def make(request: dict[str, Any]) -> None:
    """Put a bundle together."""
    folder = Path(request["folder"])
    # Until it is whole again, it is no bundle.
    (folder / LIST).unlink(missing_ok=True)
    kept = set()
    for name, digest in request["artifacts"]:
        target = folder / "artifacts" / name / digest[:12]
        kept.add(target)
        say(f"artifact: {name} {digest[:12]}")
        run([WEIGHTS, "pack", ARTIFACTS, name, digest, str(target)], f"artifact {name}")
    for old in set((folder / "artifacts").glob("*/*")) - kept:
        shutil.rmtree(old)
    save_image(folder, request["image"])
    collect_wheels(folder / "wheels", request)
    collect_packages(folder / "packages")
    say(f"complete: {folder}, {seal(folder)} files")


def main(argv: list[str]) -> int:
    """Run a command; what is wrong is one line, and exit code 1."""
    commands: dict[str, Callable[[Path], None]] = {
        "make": lambda path: make(json.loads(path.read_text())),
        "verify": verify,
    }
    if len(argv) != 2 or argv[0] not in commands:
        print(f"usage: bundle.py {' | '.join(commands)} PATH", file=sys.stderr)
        return 2
    try:
        commands[argv[0]](Path(argv[1]))
    except (BundleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
