# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The software bill of materials of an image: CycloneDX 1.5 of its Debian and Python packages."""

from __future__ import annotations

import re
import uuid
from typing import Any
from urllib.parse import quote

# NCCL up to this one fails on RTX PRO 6000 Blackwell cards in collectives of 512 KiB and more
# (https://github.com/NVIDIA/nccl/issues/2418; what came before knows these cards less).
_BAD_NCCL = (2, 26, 2)
_NAMESPACE = uuid.UUID("6f1c3f0a-3a53-5d52-8d0e-6a7f8a4c9b11")


def _fields(stanza: str) -> dict[str, str]:
    """Return the fields of one stanza; a field's further lines are not needed."""
    found: dict[str, str] = {}
    for line in stanza.split("\n"):
        name, colon, value = line.partition(":")
        if colon and not line[:1].isspace():
            found.setdefault(name, value.strip())
    return found


def dpkg_components(status: str, distribution: str) -> list[dict[str, str]]:
    """Return the installed packages of dpkg's status file.

    :param distribution: ``ID`` of the image's os-release (``debian``, ``ubuntu``).
    """
    components = []
    for stanza in status.split("\n\n"):
        fields = _fields(stanza)
        # A package that was removed and kept its configuration is in the file as well.
        if fields.get("Status", "").split()[2:] != ["installed"]:
            continue
        name, version, architecture = fields["Package"], fields["Version"], fields.get("Architecture", "all")
        purl = f"pkg:deb/{quote(distribution)}/{quote(name)}@{quote(version, safe='')}?arch={quote(architecture)}"
        components.append({"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl})
    return sorted(components, key=lambda one: one["purl"])


def python_components(metadata: list[str]) -> list[dict[str, str]]:
    """Return the installed distributions.

    :param metadata: the texts of their METADATA files.
    """
    components = {}
    for text in metadata:
        # Only the head: a description may have lines that look like fields.
        fields = _fields(text.partition("\n\n")[0])
        name, version = fields.get("Name", ""), fields.get("Version", "")
        if name and version:
            normal = quote(name.lower().replace("_", "-"))
            purl = f"pkg:pypi/{normal}@{quote(version, safe='')}"
            components[purl] = {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
    return [components[purl] for purl in sorted(components)]


def cyclonedx(image: str, image_id: str, components: list[dict[str, str]], labels: dict[str, str]) -> dict[str, Any]:
    """Return the document; the same image gives the same document.

    :param image: its name.
    :param image_id: 64 hex digits.
    :param components: of ``dpkg_components`` and ``python_components``.
    :param labels: the image's own, which say what it was made of.
    """
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, image_id)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "name": image,
                "version": f"sha256:{image_id}",
                "bom-ref": f"image:{image_id}",
                "properties": [{"name": name, "value": value} for name, value in sorted(labels.items())],
            }
        },
        "components": components,
    }


def nccl_problem(bill: dict[str, Any]) -> str:
    """Return why an image's NCCL cannot serve on several cards; empty when nothing is known against it.

    :param bill: of :func:`cyclonedx`; an image for CPUs has no NCCL.
    """
    versions = {one["name"]: one["version"] for one in bill.get("components", [])}
    wheels = [name for name in versions if re.fullmatch(r"nvidia[-_]nccl(?:[-_]cu[0-9]+)?", name)]
    # torch takes the one that came with it before the distribution's.
    for name in wheels or [name for name in ("libnccl2",) if name in versions]:
        # "2.27.5" of a wheel, "2.27.5-1+cuda12.9" of a Debian package.
        match = re.match(r"([0-9]+)\.([0-9]+)\.([0-9]+)", versions[name])
        if match and tuple(map(int, match.groups())) <= _BAD_NCCL:
            return (
                f"{name} {versions[name]}: NCCL up to {'.'.join(map(str, _BAD_NCCL))} fails on these cards from 512 "
                "KiB on (https://github.com/NVIDIA/nccl/issues/2418); take a base with a newer one"
            )
    return ""
