"""The text of the two files that nginx includes, and nothing else: pure functions."""

import hashlib
import re
from collections.abc import Collection, Sequence

from gpu_node.config import Client, ReplicaConfig

HEAD = "# Written by gpu-node from the out-reasons; changes by hand are lost.\n"


def pcre_literal(text: str) -> str:
    """The text as a pattern that matches exactly it, inside a double-quoted nginx parameter.

    Everything but letters, digits, `_` and `-` becomes a hexadecimal escape; nginx makes the doubled backslash one.
    """
    return "".join(
        char if char.isascii() and (char.isalnum() or char in "_-") else f"\\\\x{ord(char):02x}" for char in text
    )


def render_secrets(clients: Sequence[Client], engine_key: str) -> str:
    """secrets.conf: which client a request's key belongs to, and the engine's own header.

    Patterns, not plain texts: nginx's plain map compares without case, and its hash buckets overflow on long keys.
    """
    lines = [HEAD, "map $http_authorization $gpu_node_client {\n"]
    if clients:
        lines.append('    default "";\n')
        lines += [f'    "~^(?i:Bearer) {pcre_literal(client.key)}$" "{client.name}";\n' for client in clients]
    else:
        lines.append('    default "local";\n')
    lines += [
        "}\n",
        "map $server_port $gpu_node_engine_authorization {\n",
        f'    default "Bearer {engine_key}";\n',
        "}\n",
    ]
    return "".join(lines)


def render_members(replicas: Sequence[ReplicaConfig], out: Collection[int], secrets: str, generation: int) -> str:
    """members.conf: the upstreams, the replicas in `out` marked down, how many are in, and the generation.

    It also carries a digest of secrets.conf: other secrets are another generation, and their takeover is provable.
    """
    servers = "".join(
        f"    server 127.0.0.1:{replica.port} max_fails=0{' down' if replica.index in out else ''};\n"
        for replica in replicas
    )
    members = sum(replica.index not in out for replica in replicas)
    keepalive = "    keepalive 64;\n    keepalive_timeout 60s;\n"
    return (
        f"{HEAD}# secrets.conf: {hashlib.sha256(secrets.encode()).hexdigest()[:16]}\n"
        # The zone: without it each of nginx's processes counts its own connections only, and the least busy is a guess.
        f"upstream gpu_node_least {{\n    zone gpu_node_least 256k;\n    least_conn;\n{servers}{keepalive}}}\n"
        f"upstream gpu_node_hash {{\n    hash $gpu_node_affinity consistent;\n{servers}{keepalive}}}\n"
        f'map $server_port $gpu_node_members {{\n    default "{members}";\n}}\n'
        f'map $server_port $gpu_node_generation {{\n    default "{generation}";\n}}\n'
    )


def parse_generation(members: str) -> int | None:
    """The generation of a members.conf text; None when it holds none."""
    match = re.search(r'\$gpu_node_generation \{\s*default "(\d{1,18})";', members, re.ASCII)
    return int(match[1]) if match else None
