# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Which node of a play makes an image, so that it is made once and every node runs the same bytes.

Pure functions. A node's seat is ``{"host", "site", "ref", "present", "archive"}``: ``present`` says that Podman has the
image, ``archive`` that the node has an archive of it to give.
"""

from __future__ import annotations

from typing import Any


def maker(seats: list[dict[str, Any]], host: str, batch: list[str]) -> str:
    """Return the node that a node gets its image from; its own name when it makes or has it itself.

    :param seats: of every node of the play whose turn it is or was.
    :param host: the node that asks; it has a seat.
    :param batch: the nodes that are worked on together, in Ansible's order. One of them that has the image can make an
        archive now; a node of an earlier batch can only give one that it has.
    """
    own = next(seat for seat in seats if seat["host"] == host)
    if own["present"]:
        return host
    same = [seat for seat in seats if (seat["ref"], seat["site"]) == (own["ref"], own["site"])]
    beside = sorted((seat for seat in same if seat["host"] in batch), key=lambda seat: batch.index(seat["host"]))
    givers = [seat for seat in beside if seat["present"]] + [seat for seat in same if seat["archive"]]
    return str((givers or beside)[0]["host"])


def takers(makers: dict[str, str], seats: list[dict[str, Any]], host: str) -> list[str]:
    """Return the nodes that take their image from a node.

    :param makers: by node, what ``maker`` said.
    """
    lacking = [seat["host"] for seat in seats if not seat["present"]]
    return [taker for taker, giver in makers.items() if giver == host != taker and taker in lacking]
