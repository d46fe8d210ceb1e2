# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""What names a build of the kernels."""

from __future__ import annotations

import hashlib
import json


def kernels_key(sources: dict[str, str], image: str, target: str, arch: str) -> str:
    """Return the hash of all that a build is made of: the same for the same inputs, and for nothing else.

    :param sources: texts by path, the recipe's included; flags are in them.
    :param image: what it is built in, by digest: that has the compilers and torch's headers.
    :param target: which libraries (``8x``, ``2x``).
    :param arch: GPUs to build for.
    """
    return hashlib.sha256(json.dumps([sources, image, target, arch], sort_keys=True).encode()).hexdigest()
