# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Which of a node's GPUs are in use, and by what."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

# A lost card can hold nvidia-smi up for ever.
NVIDIA_SMI_SECONDS = 20


def used_gpus(module: AnsibleModule, folder: Path, uuids: list[str]) -> dict[str, str]:
    """Return by UUID why a GPU cannot be had; a GPU that is not in it is free.

    :param folder: holds what replicas are made of.
    """
    return {**_used_by_processes(uuids), **_used_by_replicas(module, folder)}


def _used_by_replicas(module: AnsibleModule, folder: Path) -> dict[str, str]:
    """Return by UUID the replica that runs, starts or stops on a GPU."""
    busy = {}
    for file in sorted(folder.glob("*/current/release.json")):
        index = file.parent.parent.name
        unit = f"vllm-replica@{index}.service"
        state = module.run_command(["systemctl", "show", "--value", "--property=ActiveState", unit], check_rc=True)[1]
        if state.strip() in ("inactive", "failed"):
            continue
        try:
            gpus = json.loads(file.read_text(encoding="utf-8")).get("gpus", [])
        except (OSError, ValueError) as error:
            module.fail_json(msg=f"{file} cannot be read, so nobody knows which GPUs replica {index} uses: {error}")
        busy.update({gpu["uuid"]: f"replica {index} runs on it" for gpu in gpus})
    return busy


def _used_by_processes(uuids: list[str]) -> dict[str, str]:
    """Return by UUID a process that computes on a GPU; when the driver does not say, all of them count as in use."""
    argv = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, timeout=NVIDIA_SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        return dict.fromkeys(uuids, f"nvidia-smi does not say what runs on it: {error}")
    busy = {}
    for line in done.stdout.splitlines():
        uuid, _, rest = line.partition(",")
        pid, _, name = rest.partition(",")
        if uuid.strip() in uuids:
            busy[uuid.strip()] = f"process {pid.strip()} ({name.strip()}) computes on it"
    return busy
