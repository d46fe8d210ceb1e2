"""A wheel out of files that lie ready: the same files give the same bytes on every node."""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Mapping

# The first moment that a zip archive can name.
_MADE = (1980, 1, 1, 0, 0, 0)


def wheel_bytes(files: Mapping[str, bytes], pyproject: str, name: str) -> bytes:
    """Return a wheel.

    :param files: by path in the folder of packages, content.
    :param pyproject: text of the project's pyproject.toml: name, version, Python and entry points are taken from it.
    :param name: the wheel's file name, which has its tags.
    """
    project = tomllib.loads(pyproject)["project"]
    folder = f"{project['name']}-{project['version']}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}"]
    lines += [f"Summary: {project['description']}", f"License: {project['license']}"]
    lines += [f"Requires-Python: {project['requires-python']}"]
    tag = "-".join(name.removesuffix(".whl").split("-")[-3:])
    points = ""
    for group, entries in sorted(project.get("entry-points", {}).items()):
        points += f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(entries.items()))
    about = {
        "METADATA": "\n".join(lines) + "\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: gpu_node_kernels\nRoot-Is-Purelib: false\nTag: {tag}\n",
        "entry_points.txt": points,
    }
    everything = {**files, **{f"{folder}/{key}": text.encode() for key, text in about.items()}}
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in sorted(everything.items()))
    everything[f"{folder}/RECORD"] = f"{record}{folder}/RECORD,,\n".encode()
    stream = io.BytesIO()
    # Stored as it is: what a compressor writes depends on its version.
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for path, data in sorted(everything.items()):
            entry = zipfile.ZipInfo(path, _MADE)
            entry.external_attr = 0o100644 << 16
            # 3 is Unix, whatever this runs on
            entry.create_system = 3
            archive.writestr(entry, data)
    return stream.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
