# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Fingerprints of OpenPGP public keys, so that a repository's key can be compared with a pinned one before it is used.

Pure functions; the node needs no gpg for it. Formats: RFC 4880, sections 4.2 (packet headers), 5.5.2 (version 4 keys),
6.2 (ASCII armour) and 12.2 (fingerprints).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re

_BLOCK = re.compile(
    r"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)-----END PGP PUBLIC KEY BLOCK-----", re.DOTALL | re.ASCII
)
_PUBLIC_KEY = 6
_FINGERPRINT = re.compile("[0-9A-F]{40}")


class KeyFileError(ValueError):
    """A text that is no OpenPGP public key, or one of a form that is not known here."""


def _dearmor(text: str) -> bytes:
    """Return the packets of one armoured block: headers end at a blank line, a checksum may stand at the end."""
    lines = [line.strip() for line in text.splitlines()]
    if "" in lines and all(":" in line for line in lines[: lines.index("")]):
        lines = lines[lines.index("") + 1 :]
    body = "".join(line for line in lines if not re.fullmatch("=[A-Za-z0-9+/]{4}", line))
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise KeyFileError(f"the key's text is damaged: {error}") from error


def _packets(data: bytes) -> list[tuple[int, bytes]]:
    """Return tag and body of every packet."""
    found, at = [], 0
    try:
        while at < len(data):
            head = data[at]
            if not head & 0x80:
                raise KeyFileError("the key's text is damaged: a packet begins with a wrong bit")
            if head & 0x40:
                tag, first = head & 0x3F, data[at + 1]
                if first < 192:
                    size, at = first, at + 2
                elif first < 224:
                    size, at = ((first - 192) << 8) + data[at + 2] + 192, at + 3
                elif first == 255:
                    size, at = int.from_bytes(data[at + 2 : at + 6], "big"), at + 6
                else:
                    raise KeyFileError("the key has a packet in parts, which keys never have")
            else:
                tag, kind = (head >> 2) & 0x0F, head & 0x03
                if kind == 3:
                    raise KeyFileError("the key has a packet without a length, which keys never have")
                width = 1 << kind
                size, at = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
            if at + size > len(data):
                raise KeyFileError("the key's text is damaged: it ends within a packet")
            found.append((tag, data[at : at + size]))
            at += size
    except IndexError:
        raise KeyFileError("the key's text is damaged: it ends within a packet's header") from None
    return found


def key_fingerprints(text: str) -> list[str]:
    """Return the fingerprint (40 upper-case hex digits) of every primary public key in an ASCII-armoured text.

    :raises KeyFileError: when there is no key, the text is damaged, or a key is of another version than 4.
    """
    blocks = _BLOCK.findall(text)
    if not blocks:
        raise KeyFileError(
            "there is no '-----BEGIN PGP PUBLIC KEY BLOCK-----' in it; a binary key file becomes text with"
            " `gpg --no-default-keyring --keyring FILE --export --armor`"
        )
    bodies = [body for block in blocks for tag, body in _packets(_dearmor(block)) if tag == _PUBLIC_KEY]
    if not bodies:
        raise KeyFileError("the key's text holds no public key")
    for body in bodies:
        if body[:1] != b"\x04":
            raise KeyFileError(f"a key of version {body[0] if body else '(none)'}; only version 4 is known here")
    return [
        # What SHA-1 is used for is the standard's choice; nobody can make a second key for a given fingerprint.
        hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
        for body in bodies
        if len(body) < 65536
    ]


def key_problem(text: str, pinned: str, source: str) -> str:
    """Return why the key in a text is not the pinned one; empty when it is.

    :param text: what was read.
    :param pinned: the fingerprint it must have, 40 hex digits, spaces allowed.
    :param source: where the text came from, for the message.
    """
    wanted = re.sub(r"\s", "", pinned).upper()
    if not _FINGERPRINT.fullmatch(wanted):
        return f"the pinned fingerprint '{pinned}' has not 40 hex digits"
    try:
        found = key_fingerprints(text)
    except KeyFileError as error:
        return f"{source}: {error}"
    if found != [wanted]:
        return (
            f"the key of {source} has the fingerprint {', '.join(found) or '(none)'}, not {wanted}: nothing was"
            " installed from there. Compare it with what the repository's owner publishes; only when they agree, change"
            " the pinned fingerprint"
        )
    return ""
