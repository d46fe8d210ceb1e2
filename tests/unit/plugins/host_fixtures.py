"""Lays out made-up machines and reads them as the modules do; see fixtures/hosts/README.md."""

from __future__ import annotations

import os
import re
import shutil
import stat
import struct
from pathlib import Path
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_smi import GPU_QUERY
from ansible_collections.serving.gpu_node.plugins.modules import gpu_topology, host_state

HOSTS = Path(__file__).parent / "fixtures" / "hosts"
COMMANDS = ".commands"
_GROUP = r"\{([^{}\s\"]*,[^{}\s\"]*)\}"
_ACS_BITS = {"SrcValid": 0, "ReqRedir": 2, "CmpltRedir": 3, "UpstreamFwd": 4}


def acs_config(bits: str) -> bytes:
    """A port's configuration space: first an unrelated extended capability, then Access Control Services."""
    if bits == "cut":
        return bytes(64)
    config = bytearray(4096)
    # Advanced Error Reporting at 0x100, whose next one is at 0x148.
    struct.pack_into("<I", config, 0x100, 0x0001 | 2 << 16 | 0x148 << 20)
    struct.pack_into("<I", config, 0x148, 0x000D | 1 << 16)
    struct.pack_into("<H", config, 0x148 + 6, sum(1 << _ACS_BITS[bit] for bit in bits.split(",")))
    return bytes(config)


def expand(text: str) -> list[str]:
    """Write out ``{a,b}``; several groups of one text take the same place in each."""
    groups = re.findall(_GROUP, text)
    count = len(groups[0].split(",")) if groups else 1
    assert all(len(group.split(",")) == count for group in groups), text
    # The odd pieces are the groups.
    pieces = re.split(_GROUP, text)
    return [
        "".join(piece.split(",")[number] if odd % 2 else piece for odd, piece in enumerate(pieces))
        for number in range(count)
    ]


def _place(root: Path, header: str, content: str) -> None:
    if header.startswith("$ "):
        (root / COMMANDS).mkdir(exist_ok=True)
        command = root / COMMANDS / header[2:].removesuffix(" x").replace("/", "|")
        command.unlink(missing_ok=True)
        if not header.endswith(" x"):
            command.write_text(content)
        return
    words = header.split(" ")
    path = root / words[0].lstrip("/")
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif words[1:] == ["x"] and path.is_dir():
        shutil.rmtree(path)
    if words[1:] == ["x"]:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if words[1:2] == ["->"]:
        path.symlink_to(words[2])
    elif words[1:] and words[1].startswith("acs="):
        path.write_bytes(acs_config(words[1][4:]))
    elif words[1:] and words[1].startswith("efi="):
        path.write_bytes(bytes([6, 0, 0, 0, int(words[1][4:])]))
    else:
        path.write_text(content)


def lay_out(name: str, root: Path) -> Path:
    """Make the machine's files below ``root``."""
    folder = HOSTS / name
    base = (folder / "BASE").read_text().strip() if (folder / "BASE").exists() else "good-8x"
    if base and name != "good-8x":
        lay_out(base, root)
    for part in re.split(r"^=== ", (folder / "files.txt").read_text(), flags=re.MULTILINE)[1:]:
        header, _, content = part.partition("\n")
        headers = expand(header)
        contents = expand(content) if len(headers) > 1 else [content]
        for number, one in enumerate(headers):
            _place(root, one, contents[number if len(contents) > 1 else 0])
    return root


def ask(root: Path) -> host_state.Ask:
    """The machine's commands."""

    def answer(argv: list[str]) -> str:
        path = root / COMMANDS / " ".join(argv).replace("/", "|")
        return path.read_text() if path.exists() else ""

    return answer


def _nvidia_smi(root: Path) -> str | None:
    query = root / COMMANDS / f"nvidia-smi --query-gpu={GPU_QUERY} --format=csv,noheader,nounits"
    if not query.exists():
        return None
    script = root / "nvidia-smi"
    script.write_text(f'#!/bin/sh\ncase $1 in --query-gpu*) cat "{query}";; esac\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def read_topology(root: Path) -> dict[str, Any]:
    """The machine's topology, as `gpu_topology` reads it."""
    return {
        **gpu_topology.read_hardware(root / "sys", root / "proc", _nvidia_smi(root)),
        "listeners": gpu_topology.read_listeners(root / "proc"),
        "releases": {},
    }


def read_host(root: Path, free_gib: int = 2000) -> dict[str, Any]:
    """The machine's state, as `host_state` reads it; every folder is on one large disk."""
    space = {"free_bytes": free_gib * 2**30, "total_bytes": 4000 * 2**30, "device": 1, "used_bytes": 0}
    folders = ["/var/lib/gpu-node", "/var/lib/containers", "/var/lib/gpu-node/artifacts/deepseek-v4.1-flash"]
    return host_state.read_host(root, ask(root), dict.fromkeys(folders, space))


def lock(root: Path, path: str, pid: int, command: str) -> None:
    """Have a process hold the lock of a file."""
    inode = (root / path.lstrip("/")).stat().st_ino
    (root / "proc/locks").write_text(f"1: POSIX  ADVISORY  WRITE {pid} fe:00:{inode} 0 EOF\n")
    (root / f"proc/{pid}/fd").mkdir(parents=True)
    os.symlink(path, root / f"proc/{pid}/fd/4")
    (root / f"proc/{pid}/cmdline").write_text(command.replace(" ", "\0"))
