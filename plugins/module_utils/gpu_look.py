# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a container sees of the GPUs. This file's text runs inside it, so it needs nothing but Python's own library.

For every line that comes in, one line of JSON goes out: the device nodes and whether they can be opened, and what CUDA
finds. Each look is a process of its own, because CUDA starts only once in a process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

# What a CUDA program opens. /dev/dri and the capability files are only looked for.
_OPENED = re.compile("nvidia([0-9]+|ctl|-uvm)")


def look_at_nodes(dev: Path) -> dict[str, dict[str, Any]]:
    """Return the NVIDIA and DRI device nodes below ``dev``: by path their numbers and why they cannot be opened."""
    found: dict[str, dict[str, Any]] = {}
    for folder, _, names in os.walk(dev):
        for name in names:
            path = Path(folder) / name
            inside = path.relative_to(dev).as_posix()
            if not inside.startswith(("nvidia", "dri/")):
                continue
            try:
                info = path.stat()
            except OSError as error:
                found[f"/dev/{inside}"] = {"device": [], "error": error.strerror or str(error)}
                continue
            if stat.S_ISCHR(info.st_mode):
                found[f"/dev/{inside}"] = {
                    "device": [os.major(info.st_rdev), os.minor(info.st_rdev)],
                    "error": open_error(path) if _OPENED.fullmatch(inside) else "",
                }
    return found


def open_error(path: Path) -> str:
    """Return why a node cannot be opened; empty when it can."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def error_name(cuda: Any, code: int) -> str:
    """Return CUDA's name of an error, CUDA_ERROR_NO_DEVICE for example."""
    name = ctypes.c_char_p()
    known = not cuda.cuGetErrorName(code, ctypes.byref(name)) and name.value
    return f"error {code} ({name.value.decode(errors='replace')})" if known and name.value else f"error {code}"


def ask_cuda(library: str) -> dict[str, Any]:
    """Start CUDA and return ``{"error": text, "uuids": [GPU-...]}``."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        return {"error": f"{library} cannot be loaded: {error}", "uuids": []}
    code = cuda.cuInit(0)
    if code:
        return {"error": f"cuInit failed with {error_name(cuda, code)}", "uuids": []}
    count = ctypes.c_int()
    code = cuda.cuDeviceGetCount(ctypes.byref(count))
    uuids = []
    for number in range(0 if code else count.value):
        device, raw = ctypes.c_int(), ctypes.create_string_buffer(16)
        code = cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetUuid(raw, device)
        if code:
            break
        text = raw.raw.hex()
        uuids.append(f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")
    return {"error": f"CUDA failed with {error_name(cuda, code)}" if code else "", "uuids": uuids}


def look(library: str) -> dict[str, Any]:
    """Return what is seen; without a library CUDA is not asked."""
    return {"nodes": look_at_nodes(Path("/dev")), "cuda": ask_cuda(library) if library else None}


def main(library: str) -> None:
    """Answer each line of standard input."""
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            print(json.dumps(look(library)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"nodes": {}, "cuda": {"error": "CUDA ended the process", "uuids": []}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
