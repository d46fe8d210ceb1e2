# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What a serving image is made of: references, the key that names it, its labels, and what cannot be an input."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

LABEL = "io.github.gpu-node"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_HOST = re.compile(r"(?:localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:))(?::[0-9]{1,5})?")
_PATH = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
# What one worker that unpacks a layer or compiles needs at most; with less, the kernel ends the build or a replica.
GIB_PER_JOB = 2


class ImageReferenceError(ValueError):
    """No reference of an image; the sentence says why."""


def parse_reference(text: str) -> dict[str, str]:
    """Return ``repository``, ``tag`` and ``digest`` (empty where not given) of a full reference of an image.

    :raises ImageReferenceError: also when the registry is left out: which one Podman then asks is a choice of its own.
    """
    name, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise ImageReferenceError(f"{text}: after @ comes sha256: and 64 hex digits")
    head, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        head, tag = name, ""
    elif not _TAG.fullmatch(tag):
        raise ImageReferenceError(f"{text}: '{tag}' is no tag")
    host, slash, path = head.partition("/")
    if not slash or not _HOST.fullmatch(host):
        raise ImageReferenceError(f"{text}: begin it with its registry, for example docker.io/{head or 'NAME'}")
    if not _PATH.fullmatch(path):
        raise ImageReferenceError(f"{text}: '{path}' is no name of an image")
    return {"repository": head, "tag": tag, "digest": digest}


def pinned(reference: dict[str, str], digest: str = "") -> str:
    """Return a reference that names content; Podman takes no tag beside a digest."""
    return f"{reference['repository']}@{digest or reference['digest']}"


def input_problems(
    device: str,
    base: str,
    prebuilt: str,
    archive: str,
    wheel: str,
    allow_tag: bool,
    registry: str = "",
    recipe: str = "own",
) -> list[str]:
    """Return a sentence for each input of the role that cannot be used, before anything changes.

    :param device: the plan's (``cpu``, ``cuda``).
    :param base: what the image is built on; only images for CUDA have one.
    :param prebuilt: an image to take as it is; empty when it is built or loaded.
    :param archive: an archive to load; empty when it is not loaded.
    :param wheel: path of our plugin's wheel; empty when there is none.
    :param allow_tag: whether ``base`` may be a tag, whose digest is then looked up once.
    :param registry: where a fleet keeps its image, with a folder; empty when there is no such place.
    :param recipe: whose recipe makes it: ``own`` or ``pack``.
    """
    problems = _registry_problems(registry) if registry else []
    if prebuilt and archive:
        problems.append(
            "serving_image_prebuilt and serving_image_archive are both set: an image comes from one of them"
        )
    if prebuilt and recipe == "pack":
        problems.append(
            "serving_image_prebuilt and serving_image_recipe: pack are both set: an image comes from one of them"
        )
    elif recipe == "pack" and wheel:
        problems.append(
            f"serving_image_plugin_wheel: {wheel} is not put into a pack's image, which has kernels of its own; leave "
            "it empty, or set serving_image_recipe: own"
        )
    if prebuilt:
        problems += _pin_problems("serving_image_prebuilt", prebuilt, allow_tag=False)
    elif device == "cuda" and recipe != "pack":
        problems += _pin_problems("serving_image_base", base, allow_tag)
        if wheel and not re.fullmatch(r"/.+/[^/]+-[^/]+-[^/]+-[^/]+-[^/]+\.whl", wheel):
            problems.append(f"serving_image_plugin_wheel: {wheel} is no path of a wheel on the node")
    return problems


def _registry_problems(text: str) -> list[str]:
    try:
        reference = parse_reference(text)
    except ImageReferenceError as error:
        return [f"serving_image_registry: {error}"]
    if reference["tag"] or reference["digest"]:
        return [
            f"serving_image_registry: {text} names one image; give registry and folder alone, {reference['repository']}"
        ]
    return []


def _pin_problems(variable: str, text: str, allow_tag: bool) -> list[str]:
    try:
        reference = parse_reference(text)
    except ImageReferenceError as error:
        return [f"{variable}: {error}"]
    if reference["digest"] or (allow_tag and reference["tag"]):
        return []
    tag = f"the tag {reference['tag']}" if reference["tag"] else "no tag"
    name = f"{reference['repository']}:{reference['tag'] or 'TAG'}"
    remedy = (
        f"set it to {reference['repository']}@sha256:... (`skopeo inspect --no-tags docker://{name}` says the digest)"
    )
    if variable == "serving_image_base":
        remedy += ", or set serving_image_allow_tag to true to have it looked up once and kept"
    return [f"{variable}: {text} has {tag} and no digest, and what a tag names changes; {remedy}"]


def image_key(inputs: dict[str, Any]) -> str:
    """Return the hash that names an image: the same for the same inputs, and for nothing else."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def image_labels(key: str, inputs: dict[str, Any]) -> dict[str, str]:
    """Return the labels that tell an image's inputs without the node that built it."""
    labels = {f"{LABEL}.image.key": key}
    for name, value in inputs.items():
        if isinstance(value, dict):
            value = " ".join(f"{inner}={text}" for inner, text in sorted(value.items()))
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        labels[f"{LABEL}.image.{name}"] = str(value) or "none"
    base = str(inputs.get("base", ""))
    if "@" in base:
        repository, _, digest = base.partition("@")
        labels |= {"org.opencontainers.image.base.name": repository, "org.opencontainers.image.base.digest": digest}
    return labels


def build_jobs(available_bytes: int, cpus: int) -> int:
    """Return how many workers a build may have: as many as memory that is free now carries, at most one a CPU."""
    return max(1, min(cpus, available_bytes // (GIB_PER_JOB << 30)))
