# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Listening TCP sockets, from the text of ``/proc/net/tcp`` and ``/proc/net/tcp6``."""

from __future__ import annotations

import ipaddress
from typing import Any

_LISTEN = "0A"


def _address(hexadecimal: str) -> str:
    """Decode the kernel's address: 32-bit words, each in the machine's (little-endian) order."""
    raw = bytes.fromhex(hexadecimal)
    ordered = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return str(ipaddress.ip_address(ordered))


def parse_listeners(text: str) -> list[dict[str, Any]]:
    """Return the listening sockets as ``{"address": str, "port": int, "inode": int}``; other lines are left out."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN or fields[1].count(":") != 1:
            continue
        host, port = fields[1].split(":")
        try:
            found.append({"address": _address(host), "port": int(port, 16), "inode": int(fields[9])})
        except ValueError:
            continue
    return found
