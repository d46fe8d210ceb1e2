# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Which groups of GPUs have to add up before a replica starts on them. Pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from typing import Any


def groups_of(replicas: Iterable[dict[str, Any]], gpus: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``replica``, ``uuids`` in the order of ranks and NCCL's ``environment`` of each replica with several GPUs.

    :param replicas: the plan's.
    :param gpus: the node's, as its driver sees them; a group with one that it does not see is left out.
    """
    uuids = {gpu["pci_address"]: gpu["uuid"] for gpu in gpus if gpu.get("uuid")}
    return [
        {
            "replica": replica["index"],
            "uuids": [uuids[gpu["pci_address"]] for gpu in replica["gpus"]],
            # What goes around a broken path has to go around it here, too.
            "environment": {name: value for name, value in replica["env"].items() if name.startswith("NCCL_")},
        }
        for replica in replicas
        if len(replica["gpus"]) > 1 and all(gpu["pci_address"] in uuids for gpu in replica["gpus"])
    ]


def report_key(group: dict[str, Any], image: str, driver: str) -> str:
    """Return the name of a group's report: what it is about is in it, so that another image or card asks anew."""
    about = json.dumps([image, driver, group["uuids"], group["environment"]], sort_keys=True)
    return hashlib.sha256(about.encode()).hexdigest()[:12]


def choose_runs(
    groups: Iterable[dict[str, Any]], image: str, driver: str, stored: Collection[str], busy: dict[str, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups that can be asked now, each with its ``key``, and a sentence for each that has to wait.

    :param stored: keys of the reports that lie on the node.
    :param busy: by UUID why a GPU cannot be had; a GPU that is not in it is free.
    """
    runs, waiting = [], []
    for group in groups:
        key = report_key(group, image, driver)
        if key in stored:
            continue
        taken = next((uuid for uuid in group["uuids"] if uuid in busy), "")
        if taken:
            waiting.append(
                f"replica {group['replica']}: the all-reduce over its {len(group['uuids'])} GPUs was not tried with "
                f"this image and driver: {taken} is in use ({busy[taken]}); a run while all are free tries it"
            )
        else:
            runs.append({**group, "key": key})
    return runs, waiting
