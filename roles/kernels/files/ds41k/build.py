#!/usr/bin/env python3
"""Build the kernel libraries from `csrc/`, once per input. Of torch only the headers are needed.

    build.sh [8x|2x|all] [--arch auto|sm_90a|sm_120a|both] [--out DIR] [--python PY]

A library is named by a key: the hash of its sources, the compiler, the host compiler, torch's version, architectures
and flags. `manifest.json` beside it holds that key, so a second run with the same inputs builds nothing. Exit codes:
0 built or up to date, 1 an error in one line, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CSRC = Path(__file__).resolve().parent / "csrc"
ARCHES = ("sm_90a", "sm_120a")
# The first nvcc that knows sm_120a's own features.
OLDEST_NVCC = (12, 9)
# The stable ABI that the registration uses; the library then loads in every newer torch.
OLDEST_TORCH = (2, 11)
TORCH_TARGET = "0x020b000000000000"
# No --use_fast_math: results are promised to the bit.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "-Xptxas",
    "-v",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "-cudart",
    "static",
)
TIMEOUT_S = 1800
MANIFEST = "manifest.json"
DEFAULT_CUDA = Path("/usr/local/cuda")

_ASK_PYTHON = """
import importlib.util, json, os, sys
torch = importlib.util.find_spec("torch")
nvidia = importlib.util.find_spec("nvidia")
folders = [os.path.join(p, "cu13", "bin", "nvcc") for p in (nvidia.submodule_search_locations if nvidia else [])]
print(json.dumps({"torch": os.path.dirname(torch.origin) if torch and torch.origin else None, "nvcc": folders}))
"""


class BuildError(Exception):
    """One line for the person who called."""


@dataclass(frozen=True)
class Library:
    """A library of `csrc/`: every file of `folder` is an input, `.cu` and `.cpp` files are compiled."""

    name: str
    folder: Path

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file())

    def sources(self) -> list[Path]:
        return [path for path in self.files() if path.suffix in (".cu", ".cpp")]


LIBRARIES = {"idx": Library("libds41k_idx.so", CSRC / "idx")}
# Which libraries a profile's node needs.
TARGETS = {"8x": ("idx",), "2x": ("idx",), "all": ("idx",)}


@dataclass(frozen=True)
class Toolchain:
    """What a library is made with."""

    nvcc: Path
    nvcc_version: str
    host_compiler: str
    torch: Path
    torch_version: str


def run(argv: Sequence[str | Path], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [str(word) for word in argv],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            cwd=folder,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{argv[0]} did not end within {TIMEOUT_S} s") from None
    except OSError as error:
        raise BuildError(f"{argv[0]} cannot be run: {error.strerror}") from error


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def ask_python(python: str) -> dict[str, Any]:
    """Return where that Python has torch and nvcc, without importing either."""
    done = run([python, "-c", _ASK_PYTHON])
    if done.returncode != 0:
        raise BuildError(f"{python} cannot say where its torch is: {last_line(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"


def find_nvcc(beside_python: Sequence[str]) -> tuple[Path, str]:
    """Return the nvcc to use and its version; $CUDA_HOME, then /usr/local/cuda, then NVIDIA's pip packages."""
    homes = [os.environ["CUDA_HOME"]] if os.environ.get("CUDA_HOME") else []
    places = [Path(home) / "bin" / "nvcc" for home in homes]
    places += [DEFAULT_CUDA / "bin" / "nvcc", *map(Path, beside_python)]
    nvcc = next((place for place in places if os.access(place, os.X_OK)), None)
    if nvcc is None:
        looked = ", ".join(map(str, places))
        raise BuildError(
            f"no nvcc in {looked}: set CUDA_HOME to a CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-crt "
            "nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
        )
    done = run([nvcc, "--version"])
    found = re.search(r"release (\d+)\.(\d+), V([\d.]+)", done.stdout)
    if done.returncode != 0 or found is None:
        raise BuildError(f"{nvcc} --version does not name a release: {last_line(done.stdout + done.stderr)}")
    if (int(found[1]), int(found[2])) < OLDEST_NVCC:
        needed = dotted(OLDEST_NVCC)
        raise BuildError(f"{nvcc} is {found[3]}, which does not know sm_120a: nvcc {needed} or newer is needed")
    return nvcc, found[3]


def find_torch(folder: str | None, python: str) -> tuple[Path, str]:
    """Return torch's folder and version; its headers are enough, so a torch for CPUs will do."""
    if folder is None:
        raise BuildError(
            f"{python} has no torch, whose headers are needed: --python names one that has it (a CPU torch will do)"
        )
    text = (Path(folder) / "version.py").read_text(encoding="utf-8")
    found = re.search(r"__version__ = ['\"](\d+)\.(\d+)([^'\"]*)['\"]", text)
    if found is None:
        raise BuildError(f"{folder}/version.py names no version")
    version = f"{found[1]}.{found[2]}{found[3]}"
    if (int(found[1]), int(found[2])) < OLDEST_TORCH:
        raise BuildError(f"torch {version} of {python} is too old: {dotted(OLDEST_TORCH)} or newer is needed")
    if not (Path(folder) / "include" / "torch" / "csrc" / "stable" / "library.h").is_file():
        raise BuildError(f"torch {version} in {folder} has no headers of the stable ABI (include/torch/csrc/stable)")
    return Path(folder), version


def find_toolchain(python: str) -> Toolchain:
    answer = ask_python(python)
    nvcc, nvcc_version = find_nvcc(answer["nvcc"])
    torch, torch_version = find_torch(answer["torch"], python)
    done = run(["c++", "--version"])
    if done.returncode != 0:
        raise BuildError(f"c++ does not work: {last_line(done.stderr)}")
    return Toolchain(nvcc, nvcc_version, done.stdout.splitlines()[0], torch, torch_version)


def choose_arches(wanted: str) -> tuple[str, ...]:
    """Return the architectures; `auto` goes by the GPUs of this machine, and takes both when it sees none."""
    if wanted == "both":
        return ARCHES
    if wanted != "auto":
        return (wanted,)
    try:
        done = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    except BuildError:
        return ARCHES
    known = {"9.0": "sm_90a", "12.0": "sm_120a"}
    seen = {known.get(line.strip()) for line in done.stdout.splitlines() if line.strip()}
    if done.returncode != 0 or not seen or None in seen:
        return ARCHES
    return tuple(arch for arch in ARCHES if arch in seen)


def source_hash(library: Library) -> str:
    digest = hashlib.sha256()
    for path in library.files():
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def key_of(library: Library, tools: Toolchain, arches: Sequence[str]) -> str:
    """Return the hash of all that the library is made of; where the tools lie is not part of it."""
    parts = [library.name, source_hash(library), tools.nvcc_version, tools.host_compiler, tools.torch_version]
    return hashlib.sha256(json.dumps([*parts, list(arches), list(FLAGS), TORCH_TARGET]).encode()).hexdigest()


def read_kernels(text: str) -> list[dict[str, Any]]:
    """Return what ptxas -v says of each kernel: name, architecture, registers, spilled bytes."""
    kernels: list[dict[str, Any]] = []
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            kernels.append({"name": found[1], "arch": found[2], "registers": 0, "spilled_bytes": 0})
        elif kernels and (found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)):
            kernels[-1]["spilled_bytes"] = max(int(found[1]), int(found[2]))
        elif kernels and (found := re.search(r"Used (\d+) registers", line)):
            kernels[-1]["registers"] = int(found[1])
    return kernels


def demangle(names: Sequence[str]) -> list[str]:
    done = run(["c++filt", *names])
    plain = done.stdout.splitlines()
    return plain if done.returncode == 0 and len(plain) == len(names) else list(names)


def check_kernels(kernels: Sequence[dict[str, Any]], arches: Sequence[str]) -> None:
    """Raise when a kernel spills, or when there is none for an architecture (the gate would then have seen nothing)."""
    for arch in arches:
        if not any(kernel["arch"] == arch for kernel in kernels):
            raise BuildError(f"nvcc named no kernel for {arch}, so nothing is known of spills: its output has changed")
    for kernel in kernels:
        if kernel["spilled_bytes"]:
            raise BuildError(
                f"{kernel['name']} for {kernel['arch']} spills {kernel['spilled_bytes']} bytes of registers to memory, "
                "the limit is 0: use fewer registers, or relax its __launch_bounds__"
            )


def compile_one(tools: Toolchain, library: Library, source: Path, arches: Sequence[str], target: Path) -> str:
    """Compile one file and return what the compiler said."""
    argv: list[str | Path] = [tools.nvcc, *FLAGS, "-c", source, "-o", target]
    if source.suffix == ".cu":
        for arch in arches:
            argv += ["-gencode", f"arch={arch.replace('sm', 'compute')},code={arch}"]
    else:
        argv += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-DUSE_CUDA", f'-DDS41K_ARCHES="{", ".join(arches)}"']
        # Not ours, so its warnings are not: -isystem.
        argv += ["-isystem", tools.torch / "include"]
    done = run(argv)
    if done.returncode != 0:
        text = done.stderr + done.stdout
        errors = [line for line in text.splitlines() if "error" in line]
        raise BuildError(
            f"{source.name} of {library.name} does not compile: {errors[0] if errors else last_line(text)}"
        )
    return done.stderr + done.stdout


def link(tools: Toolchain, library: Library, objects: Sequence[Path], arches: Sequence[str], folder: Path) -> Path:
    """Link and return the library, which needs torch by name but no torch to link against."""
    empty = folder / "empty.c"
    empty.write_text("void ds41k_empty(void) {}\n", encoding="utf-8")
    for name in ("torch", "torch_cpu"):
        stub = folder / f"lib{name}.so"
        done = run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{stub.name}", empty, "-o", stub])
        if done.returncode != 0:
            raise BuildError(f"cc cannot link a shared library: {last_line(done.stderr)}")
    # Registration runs when the library is loaded; nobody has to find a symbol in it.
    script = folder / "exports"
    script.write_text("{ local: *; };\n", encoding="utf-8")
    target = folder / library.name
    argv: list[str | Path] = [tools.nvcc, "-shared", "-cudart", "static", *objects, "-o", target]
    for arch in arches:
        argv += ["-gencode", f"arch={arch.replace('sm', 'compute')},code={arch}"]
    # nvcc writes the path of the libraries' folder, and names of files with its process number, into what it makes.
    # Without both the same inputs give the same bytes.
    argv += ["-Xlinker", "--no-as-needed", "-L", ".", "-ltorch", "-ltorch_cpu", "-Xlinker", "--strip-all"]
    argv += ["-Xlinker", f"--version-script={script}", "-Xlinker", "--build-id=none"]
    done = run(argv, folder)
    if done.returncode != 0:
        raise BuildError(f"{library.name} does not link: {last_line(done.stderr + done.stdout)}")
    return target


def check_exports(library: Path) -> None:
    done = run(["nm", "-D", "--defined-only", library])
    if done.returncode != 0:
        raise BuildError(f"nm cannot read {library.name}: {last_line(done.stderr)}")
    names = [line.split()[-1] for line in done.stdout.splitlines() if line.strip()]
    if names:
        raise BuildError(f"{library.name} exports {len(names)} symbols, {names[0]} among them, and must export none")


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def up_to_date(folder: Path, library: Library, key: str) -> bool:
    """Whether that very library lies there, whole."""
    entry = read_manifest(folder).get(library.name, {})
    try:
        return bool(entry["key"] == key and entry["sha256"] == file_hash(folder / library.name))
    except (OSError, KeyError, TypeError):
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what is known of each library in the folder, by file name; nothing when the manifest cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def build(library: Library, tools: Toolchain, arches: Sequence[str], out: Path) -> bool:
    """Build the library into `out`, with its manifest; return False when it was there already.

    Raises BuildError; what lay in `out` before then lies there still.
    """
    key = key_of(library, tools, arches)
    if up_to_date(out, library, key):
        return False
    with tempfile.TemporaryDirectory(dir=out, prefix=".build-") as name:
        folder = Path(name).resolve()
        sources = library.sources()
        objects = [folder / f"{source.name}.o" for source in sources]
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            pairs = zip(sources, objects, strict=True)
            jobs = [pool.submit(compile_one, tools, library, source, arches, target) for source, target in pairs]
            said = "\n".join(job.result() for job in jobs)
        kernels = read_kernels(said)
        for kernel, plain in zip(kernels, demangle([kernel["name"] for kernel in kernels]), strict=True):
            kernel["name"] = plain
        check_kernels(kernels, arches)
        made = link(tools, library, objects, arches, folder)
        check_exports(made)
        entry = {
            "key": key,
            "sha256": file_hash(made),
            "sources": source_hash(library),
            "nvcc": tools.nvcc_version,
            "host_compiler": tools.host_compiler,
            "torch_headers": tools.torch_version,
            "arches": list(arches),
            "flags": list(FLAGS),
            "kernels": kernels,
        }
        note = folder / MANIFEST
        manifest = {**read_manifest(out), library.name: entry}
        note.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        # The manifest last: without it, or with an older one, the library counts as not built.
        os.replace(made, out / library.name)
        os.replace(note, out / MANIFEST)
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time in a folder; the second finds the first one's result."""
    with (folder / ".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"build: {text}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of build.sh; returns the exit code."""
    parser = argparse.ArgumentParser(prog="build.sh", description="Build the kernel libraries, once per input.")
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS), default="all", help="libraries of a profile")
    parser.add_argument("--arch", choices=["auto", *ARCHES, "both"], default="auto", help="GPUs to build for")
    parser.add_argument("--out", type=Path, default=CSRC.parent / "lib", metavar="DIR", help="where the library goes")
    parser.add_argument(
        "--python", default=sys.executable, metavar="PY", help="the Python whose torch headers are used"
    )
    arguments = parser.parse_args(argv)
    try:
        tools = find_toolchain(arguments.python)
        arches = choose_arches(arguments.arch)
        say(f"nvcc {tools.nvcc_version}, headers of torch {tools.torch_version}, for {' and '.join(arches)}")
        arguments.out.mkdir(parents=True, exist_ok=True)
        with locked(arguments.out):
            for name in TARGETS[arguments.target]:
                library, start = LIBRARIES[name], time.monotonic()
                if build(library, tools, arches, arguments.out):
                    say(f"{library.name}: built in {time.monotonic() - start:.0f} s, in {arguments.out}")
                else:
                    say(f"{library.name}: up to date in {arguments.out}")
    except BuildError as error:
        print(f"build: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"build: error: {error.filename or arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build: interrupted; run it again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
