# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""Releases: what one replica's container is made of, under the hash of just that, and the files the engine reads."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.budgets import Findings, check_drafter
from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import (
    DRAFTER_PATH,
    MODEL_PATH,
    config_lines,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import SHORT, canonical, digest
from ansible_collections.serving.gpu_node.plugins.module_utils.qualification import decide
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import recipe_environment

STATE = "/var/lib/gpu-node"
CONFIG = "/etc/gpu-node"
ENGINE_CONFIG_PATH = "/etc/vllm/engine.yaml"
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class ResolveError(ValueError):
    """The plan cannot be completed.

    :param problems: a sentence for each reason.
    :param waits: there is one reason, and it goes away once a GPU is free for the check of the kernels.
    """

    def __init__(self, problems: list[str], waits: bool = False) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.waits = waits


def _artifact_path(artifact: dict[str, str]) -> str:
    return f"{STATE}/artifacts/{artifact['name']}/{artifact['digest'][:SHORT]}"


def _podman_args(replica: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """Return the arguments between ``podman run`` and the image: confinement, devices, environment and mounts."""
    current = f"{STATE}/replicas/{replica['index']}/current"
    pins = ["--cpuset-cpus", replica["cpus"]] if replica["cpus"] else []
    if replica["memory_nodes"]:
        pins += ["--cpuset-mems", replica["memory_nodes"]]
    # By UUID: an index names another card after one has failed or been moved.
    devices = [part for gpu in replica["gpus"] for part in ("--device", f"nvidia.com/gpu={gpu['uuid']}")]
    if devices:
        # Transfers between host and GPU memory lock the pages that they use.
        devices += ["--ulimit", "memlock=-1:-1"]
    drafter = ["--volume", f"{_artifact_path(replica['drafter'])}:{DRAFTER_PATH}:ro"] if replica["drafter"] else []
    return [
        *("--network", "host", "--ipc", "private", "--shm-size", container["shm_size"]),
        *pins,
        *devices,
        *("--memory", container["memory"], "--pids-limit", "32768"),
        # /tmp stays writable and executable: compilers that run at start put shared objects there.
        *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--env-file", f"{current}/engine.env", "--env-file", f"{CONFIG}/secrets/engine.env"),
        *("--volume", f"{current}/engine.yaml:{ENGINE_CONFIG_PATH}:ro"),
        *("--volume", f"{_artifact_path(replica['model'])}:{MODEL_PATH}:ro"),
        *drafter,
        *("--volume", f"{STATE}/cache/{replica['index']}/{replica['image']['id'][:SHORT]}:/cache"),
        *("--log-driver", "passthrough"),
    ]


def release_of(plan: dict[str, Any], replica: dict[str, Any]) -> dict[str, Any]:
    """Return the release of one replica: everything its container is made of, under the hash of just that.

    What does not change the container (the balancer, timeouts of the unit, other replicas) is not in it, so changing
    those restarts nothing.
    """
    # An image of another hand may have an entry point of its own, which would take the command for its arguments.
    podman_args = _podman_args(replica, plan["container"])
    command = ["vllm", "serve", "--config", ENGINE_CONFIG_PATH]
    if plan["device"] == "cuda":
        podman_args, command = [*podman_args, "--entrypoint", command[0]], command[1:]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu["uuid"] for gpu in replica["gpus"])} if replica["gpus"] else {}
    release: dict[str, Any] = {
        "schema": 1,
        "replica": replica["index"],
        "profile": plan["profile"],
        "model": replica["model"],
        "drafter": replica["drafter"],
        "image": replica["image"],
        "served_model_name": plan["served_model_name"],
        "port": replica["port"],
        "cpus": replica["cpus"],
        "memory_nodes": replica["memory_nodes"],
        "gpus": replica["gpus"],
        "podman_args": podman_args,
        "command": command,
        "engine_args": replica["engine_args"],
        "env": {**replica["env"], **visible},
    }
    files = release_files(release)
    release["files"] = {name: _sha256(text) for name, text in files.items()}
    return {"id": digest(release)[:SHORT], **release}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _yaml(value: Any) -> str:
    """Return a value as YAML that loads back to it: JSON, but for the two places where YAML reads JSON otherwise."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml(key)}: {_yaml(inner)}" for key, inner in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(inner) for inner in value) + "]"
    text = canonical(value)
    if isinstance(value, str):
        # A control character is an error to YAML, and Unicode's line ends are folded to a space.
        return _NOT_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    # 1e-06 is a text to YAML 1.1; 1.0e-06 is a number.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def release_files(release: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a release's files that the engine reads.

    ``engine.yaml`` has one argument a line, and nothing in it is left to a YAML writer's taste in quoting.
    """
    spelled = config_lines(release["engine_args"])
    arguments = "".join(f"{_yaml(name)}: {_yaml(value)}\n" for name, value in sorted(spelled.items()))
    environment = "".join(f"{name}={value}\n" for name, value in sorted(release["env"].items()))
    return {"engine.yaml": arguments, "engine.env": environment}


def _check_head(draft: dict[str, Any], draft_tokens: dict[str, int]) -> tuple[Findings, tuple[str, ...]]:
    """Return what is wrong with what the head is to draft, and the warnings of it that no longer hold."""
    told = draft_tokens.get(draft["artifact"], 0) if draft else 0
    if not told:
        return Findings(), ()
    name, tokens = {"name": draft["head"]}, draft["tokens"]
    unsure = check_drafter("dspark", tokens, name).warnings
    source = f"config.json of the artifact '{draft['artifact']}'"
    return check_drafter("dspark", tokens, {**name, "block_size": told}, source=source), unsure


def resolve_plan(
    plan: dict[str, Any],
    digests: dict[str, str],
    image: dict[str, str],
    gpus: list[dict[str, Any]],
    qualification: list[dict[str, Any]],
    draft_tokens: dict[str, int],
) -> dict[str, Any]:
    """Return the resolved plan: digests and UUIDs in place of ``auto``, and the release of every replica.

    The kernels' switches are decided here, since what a check found on the GPUs decides them.

    :param plan: an intent plan.
    :param digests: by artifact (``model``, ``drafter``) 64 hex digits, the digest of its manifest.
    :param image: ``{"ref": name, "id": 64 hex digits}``; what else it tells (``recipe``) is no part of a release.
    :param gpus: what ``gpu_topology`` says of the GPUs now.
    :param qualification: a record for each model of GPU (see ``qualification``).
    :param draft_tokens: by artifact what the DSpark head in it drafts in one block, 0 or none when it does not say.
    :raises ResolveError: when the driver has no UUID for a GPU of the plan, an artifact is missing, the head drafts
        fewer tokens than are asked for, or a switch that is needed has no report that allows it.
    """
    uuids = {gpu["pci_address"]: gpu["uuid"] for gpu in gpus}
    unseen = [
        f"replica {replica['index']}: the driver does not see GPU {gpu['pci_address']}; "
        "look for 'NVRM' in the kernel's log"
        for replica in plan["replicas"]
        for gpu in replica["gpus"]
        if not uuids.get(gpu["pci_address"])
    ]
    unseen += [
        f"the artifact '{key}' is not on the node yet; run playbooks/artifacts.yml first"
        for key in plan["artifacts"]
        if key not in digests
    ]
    head, unsure = _check_head(plan["draft"], draft_tokens)
    decisions = decide(plan, qualification, image.get("recipe", ""))
    others = [*unseen, *head.refusals]
    if others or decisions.problems:
        raise ResolveError([*others, *decisions.problems], waits=decisions.waits and not others)
    # What was not known before the head was there is known now.
    warnings = [text for text in plan["warnings"] if text not in unsure]
    replicas = []
    for intent in plan["replicas"]:
        drafter = {**intent["drafter"], "digest": digests["drafter"]} if intent["drafter"] else None
        replica = {
            **intent,
            "gpus": [{**gpu, "uuid": uuids[gpu["pci_address"]]} for gpu in intent["gpus"]],
            "model": {**intent["model"], "digest": digests["model"]},
            "drafter": drafter,
            "image": {"ref": image["ref"], "id": image["id"]},
            "env": {**intent["env"], **recipe_environment(decisions.values)},
        }
        release = release_of(plan, replica)
        replicas.append({**replica, "release": release["id"], "files": _all_files(release)})
    return {
        **plan,
        "state": "resolved",
        "settings": decisions.settings,
        "kernels": {**plan["kernels"], "switches": decisions.switches} if plan["kernels"] else {},
        "warnings": [*warnings, *(text for text in decisions.warnings if text not in warnings)],
        "replicas": replicas,
    }


def _all_files(release: dict[str, Any]) -> dict[str, str]:
    return {**release_files(release), "release.json": canonical(release) + "\n"}


def release_manifest(plan: dict[str, Any], replica: dict[str, Any], image: dict[str, Any]) -> dict[str, Any]:
    """Return what people want to know of a release: the versions and digests that its id stands for.

    It is no part of the release, so the same release made again by somebody else is the same.

    :param image: what the role ``serving_image`` tells: beside name and id the recipe, for example.
    """
    artifacts = {
        name: {**replica[name], "source": plan["artifacts"].get(name, {}).get("source", {})} if replica[name] else None
        for name in ("model", "drafter")
    }
    engine = {"engine": plan["image"].get("package", ""), "engine_version": plan["image"].get("version", "")}
    return {
        "release": replica["release"],
        "replica": replica["index"],
        "profile": plan["profile"],
        **artifacts,
        "image": {**image, **replica["image"], "base": plan["image"].get("base", ""), **engine},
        "driver": plan["topology"]["driver"]["version"],
        "kernels": plan["kernels"].get("switches", []) if plan["kernels"] else [],
    }
