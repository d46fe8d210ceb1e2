# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The plan of a node: profile + overrides + topology -> what runs where, and which release each replica is on.

Pure functions. ``build_plan`` gives the *intent* plan, which is known on a bare node; ``resolve_plan`` completes it
with the digests of what was built and fetched.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import check_engine_args, engine_args
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import SHORT, canonical, digest
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import (
    SETTINGS,
    SettingsError,
    podman_bytes,
    resolve_settings,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import format_cpu_list

# The id of the one "NUMA node" of a machine whose kernel tells of none: nothing is pinned to it.
NO_NUMA = -1
STATE = "/var/lib/gpu-node"
CONFIG = "/etc/gpu-node"
AUTO = "auto"
MODEL_PATH = "/model"
ENGINE_CONFIG_PATH = "/etc/vllm/engine.yaml"
# The engine closes an idle connection after this long; the balancer does so earlier, or a request meets a closing one.
ENGINE_KEEPALIVE_SECONDS = 90
# The engine's own deadline for its start. The node's (start_timeout) decides, and must not be part of a release, or
# changing it would restart every replica.
ENGINE_READY_SECONDS = 7 * 86400
RESTART_DELAY_SECONDS = 10
START_BURST = 3
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class PlanError(ValueError):
    """The plan cannot work; ``problems`` holds a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(f"- {problem}" for problem in problems))
        self.problems = problems


def _node_name(number: int) -> str:
    return "this machine" if number == NO_NUMA else f"NUMA node {number}"


def share_cpus(nodes: list[dict[str, Any]], replicas: int, per_replica: int) -> list[dict[str, Any]]:
    """Place replicas on NUMA nodes and give each its own CPUs.

    :param nodes: usable NUMA nodes, each ``{"id", "cpus", "memory_bytes"}``.
    :param replicas: how many to place; they are dealt to the nodes in turn.
    :param per_replica: CPUs for each; 0 shares a node's CPUs evenly among its replicas.
    :returns: for each replica ``{"cpus": [int], "numa_node": int}``.
    :raises PlanError: when a node has fewer CPUs than its replicas need.
    """
    total = sum(len(node["cpus"]) for node in nodes)
    if replicas > total:
        raise PlanError(
            [f"replicas: {replicas} needs as many CPUs, and this node has {total}; set replicas to {total} or less"]
        )
    # A replica never spans NUMA nodes. Dealing to the node with most CPUs left keeps uneven nodes fair.
    shares: dict[int, int] = {node["id"]: 0 for node in nodes}
    order: list[int] = []
    for _ in range(replicas):
        best = max(nodes, key=lambda node: (len(node["cpus"]) / (shares[node["id"]] + 1), -node["id"]))
        shares[best["id"]] += 1
        order.append(best["id"])
    order.sort()
    placed = []
    for node in nodes:
        count = shares[node["id"]]
        if not count:
            continue
        width = per_replica or len(node["cpus"]) // count
        if width * count > len(node["cpus"]):
            raise PlanError(
                [
                    f"cpus_per_replica: {per_replica} for {count} replicas on {_node_name(node['id'])} needs "
                    f"{width * count} CPUs, and it has {len(node['cpus'])}; lower cpus_per_replica or replicas"
                ]
            )
        placed += [
            {"cpus": node["cpus"][index * width : (index + 1) * width], "numa_node": node["id"]}
            for index in range(count)
        ]
    return placed


def check_memory(nodes: list[dict[str, Any]], placed: list[dict[str, Any]], cap: str) -> list[str]:
    """Return a sentence for every NUMA node whose memory is smaller than the caps of its replicas together."""
    problems = []
    for node in nodes:
        count = sum(place["numa_node"] == node["id"] for place in placed)
        need, have = count * podman_bytes(cap), node["memory_bytes"]
        if need > have:
            problems.append(
                f"container_memory: {cap} for {count} replicas is {need / 2**30:.1f} GiB, and {_node_name(node['id'])} "
                f"has {have / 2**30:.1f} GiB; lower container_memory or replicas"
            )
    return problems


def check_ports(settings: dict[str, Any], listeners: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for every wanted port that something else listens on, and for ports wanted twice."""
    seats = [_seat(index, settings) for index in range(settings["replicas"])]
    wanted = {seat["port"]: (f"replica {seat['index']}", seat["unit"]) for seat in seats}
    problems = []
    for user in ("balancer_port", "balancer_status_port"):
        port = settings[user]
        if port in wanted:
            problems.append(f"{user}: {port} is also the port of {wanted[port][0]}; choose another")
        wanted[port] = (f"the balancer ({user})", "nginx.service")
    for port, (user, unit) in wanted.items():
        if port > 65535:
            problems.append(f"{user} would have port {port}, beyond 65535; lower first_port")
        for listener in listeners:
            if listener["port"] == port and listener["unit"] != unit:
                holder = f"process {listener['pid']} ({listener['command'] or 'unknown'})"
                problems.append(
                    f"port {port}, wanted for {user}, is in use by {holder} on {listener['address']}; "
                    "stop it or choose another port"
                )
                break
    return problems


def _check_balancer(settings: dict[str, Any], client_auth: bool) -> list[str]:
    try:
        address = ipaddress.ip_address(settings["balancer_address"])
    except ValueError:
        return [f"balancer_address: '{settings['balancer_address']}' is no IP address; write 127.0.0.1 or 0.0.0.0"]
    if not address.is_loopback and not client_auth:
        return [
            f"balancer_address: {address} is reachable from outside and no client key is set; "
            "set balancer_client_keys or listen on 127.0.0.1"
        ]
    return []


def _podman_args(replica: dict[str, Any], settings: dict[str, Any], model: str, image: str) -> list[str]:
    """Return the arguments between ``podman run`` and the image: confinement, environment and mounts."""
    current = f"{STATE}/replicas/{replica['index']}/current"
    pins = ["--cpuset-cpus", replica["cpus"]]
    if replica["memory_nodes"]:
        pins += ["--cpuset-mems", replica["memory_nodes"]]
    return [
        *("--network", "host", "--ipc", "private", "--shm-size", settings["shm_size"]),
        *pins,
        *("--memory", settings["container_memory"], "--pids-limit", "32768"),
        # /tmp stays writable and executable: compilers that run at start put shared objects there.
        *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--env-file", f"{current}/engine.env", "--env-file", f"{CONFIG}/secrets/engine.env"),
        *("--volume", f"{current}/engine.yaml:{ENGINE_CONFIG_PATH}:ro"),
        *("--volume", f"{STATE}/artifacts/{replica['model']['name']}/{model[:SHORT]}:{MODEL_PATH}:ro"),
        *("--volume", f"{STATE}/cache/{replica['index']}/{image[:SHORT]}:/cache"),
        *("--log-driver", "passthrough"),
    ]


def _environment(replica: dict[str, Any], settings: dict[str, Any], fixed: dict[str, str]) -> dict[str, str]:
    """Return the container's environment: nothing in it is secret.

    The settings that the source recipe knows keep its names, so that whoever knows the recipe finds them.
    """
    recipe = {item.environment: str(settings[name]) for name, item in SETTINGS.items() if item.environment}
    loopback = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1"}
    loopback |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    caches = {
        "HOME": "/cache",
        "XDG_CACHE_HOME": "/cache",
        "VLLM_CACHE_ROOT": "/cache/vllm",
        "VLLM_CONFIG_ROOT": "/cache/config",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
        "TRITON_CACHE_DIR": "/cache/triton",
        "HF_HOME": "/cache/huggingface",
    }
    common = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(ENGINE_KEEPALIVE_SECONDS),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(ENGINE_READY_SECONDS),
        "OMP_NUM_THREADS": str(replica["cpu_count"]),
    }
    return {**recipe, **common, **loopback, **caches, **fixed}


def _seat(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a replica is called and where it listens, which its number alone decides."""
    return {
        "index": index,
        "unit": f"vllm-replica@{index}.service",
        "container": f"vllm-replica-{index}",
        "port": settings["first_port"] + index,
    }


def _replica(index: int, place: dict[str, Any], profile: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    replica: dict[str, Any] = {
        **_seat(index, settings),
        "cpus": format_cpu_list(place["cpus"]),
        "cpu_count": len(place["cpus"]),
        "memory_nodes": "" if place["numa_node"] == NO_NUMA else str(place["numa_node"]),
        "gpus": [],
        "model": {"name": profile["artifacts"]["model"]["name"], "digest": AUTO},
        "image": {"ref": AUTO, "id": AUTO},
        "release": AUTO,
    }
    replica["engine_args"] = engine_args(settings, profile["engine_args"], MODEL_PATH, replica["port"])
    replica["env"] = _environment(replica, settings, profile["environment"])
    return replica


def build_plan(
    profile: dict[str, Any],
    overrides: dict[str, Any],
    topology: dict[str, Any],
    client_auth: bool,
) -> dict[str, Any]:
    """Return the intent plan of a node.

    :param profile: a profile's data: ``name``, ``device``, ``settings``, ``engine_args``, ``environment``,
        ``artifacts`` and ``image``.
    :param overrides: the operator's settings (see ``settings.resolve_settings``).
    :param topology: what ``gpu_topology`` returned.
    :param client_auth: whether clients of the balancer must show a key.
    :raises PlanError: with every reason at once.
    """
    try:
        settings = resolve_settings(profile["settings"], overrides)
    except SettingsError as error:
        # What does not depend on the wrong settings is checked all the same, so that one run names everything.
        asked = {**profile["settings"], **overrides}
        problems = list(error.problems)
        if isinstance(asked.get("engine_args"), dict):
            problems += check_engine_args(asked["engine_args"])
        if isinstance(asked.get("balancer_address"), str):
            problems += _check_balancer(asked, client_auth)
        raise PlanError(problems) from error
    problems = check_engine_args(settings["engine_args"]) + _check_balancer(settings, client_auth)
    whole = {"id": NO_NUMA, "cpus": topology["cpus"], "memory_bytes": topology["memory_bytes"]}
    nodes = topology["numa_nodes"] or [whole]
    try:
        placed = share_cpus(nodes, settings["replicas"], settings["cpus_per_replica"])
        problems += check_memory(nodes, placed, settings["container_memory"])
    except PlanError as error:
        problems += error.problems
    problems += check_ports(settings, topology["listeners"])
    if problems:
        raise PlanError(problems)
    start_limit = START_BURST * (settings["start_timeout"] + RESTART_DELAY_SECONDS)
    return {
        "schema": 1,
        "state": "intent",
        "profile": profile["name"],
        "settings": settings,
        "changed_settings": {name: value for name, value in settings.items() if profile["settings"][name] != value},
        "served_model_name": settings["served_model_name"],
        "artifacts": profile["artifacts"],
        "image": profile["image"],
        "balancer": {
            "address": settings["balancer_address"],
            "port": settings["balancer_port"],
            "status_port": settings["balancer_status_port"],
        },
        "service": {
            "start_timeout": settings["start_timeout"],
            "drain_timeout": settings["drain_timeout"],
            "shutdown_timeout": settings["shutdown_timeout"],
            # Longer than the drain and the engine's own shutdown together, or systemd cuts streams that may still end.
            "stop_timeout": settings["drain_timeout"] + settings["shutdown_timeout"] + 90,
            "restart_delay": RESTART_DELAY_SECONDS,
            "start_burst": START_BURST,
            "start_limit_interval": start_limit + 60,
        },
        "prober": {"interval": settings["prober_interval"], "stall": settings["prober_stall"]},
        "replicas": [_replica(index, place, profile, settings) for index, place in enumerate(placed)],
    }


def release_of(plan: dict[str, Any], replica: dict[str, Any]) -> dict[str, Any]:
    """Return the release of one replica: everything its container is made of, under the hash of just that.

    What does not change the container (the balancer, timeouts of the unit, other replicas) is not in it, so changing
    those restarts nothing.
    """
    release: dict[str, Any] = {
        "schema": 1,
        "replica": replica["index"],
        "profile": plan["profile"],
        "model": replica["model"],
        "image": replica["image"],
        "served_model_name": plan["served_model_name"],
        "port": replica["port"],
        "cpus": replica["cpus"],
        "memory_nodes": replica["memory_nodes"],
        "gpus": replica["gpus"],
        "podman_args": _podman_args(replica, plan["settings"], replica["model"]["digest"], replica["image"]["id"]),
        "command": ["vllm", "serve", "--config", ENGINE_CONFIG_PATH],
        "engine_args": replica["engine_args"],
        "env": replica["env"],
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
    arguments = "".join(f"{_yaml(name)}: {_yaml(value)}\n" for name, value in sorted(release["engine_args"].items()))
    environment = "".join(f"{name}={value}\n" for name, value in sorted(release["env"].items()))
    return {"engine.yaml": arguments, "engine.env": environment}


def resolve_plan(plan: dict[str, Any], model_digest: str, image: dict[str, str]) -> dict[str, Any]:
    """Return the resolved plan: digests in place of ``auto``, and the release of every replica.

    :param plan: an intent plan.
    :param model_digest: 64 hex digits, the digest of the model's manifest.
    :param image: ``{"ref": name, "id": 64 hex digits}``.
    """
    replicas = []
    for intent in plan["replicas"]:
        model = {**intent["model"], "digest": model_digest}
        replica = {**intent, "model": model, "image": dict(image)}
        release = release_of(plan, replica)
        replicas.append({**replica, "release": release["id"], "files": _all_files(release)})
    return {**plan, "state": "resolved", "replicas": replicas}


def _all_files(release: dict[str, Any]) -> dict[str, str]:
    return {**release_files(release), "release.json": canonical(release) + "\n"}


def node_config(plan: dict[str, Any]) -> dict[str, Any]:
    """Return what the node's own tool needs to know of the plan (``node.json``)."""
    balancer, service, prober = plan["balancer"], plan["service"], plan["prober"]
    host = f"[{balancer['address']}]" if ":" in balancer["address"] else balancer["address"]
    return {
        "replicas": [
            {name: replica[name] for name in ("index", "port", "unit", "container")} for replica in plan["replicas"]
        ],
        "served_model_name": plan["served_model_name"],
        "balancer": {"status_port": balancer["status_port"], "listen": [f"{host}:{balancer['port']}"]},
        "drain_timeout_s": service["drain_timeout"],
        "start_timeout_s": service["start_timeout"],
        "shutdown_timeout_s": service["shutdown_timeout"],
        "prober": {
            "interval_s": prober["interval"],
            "http_timeout_s": 5,
            "http_failures": 2,
            "stall_s": prober["stall"],
            "idle_probe_s": prober["stall"],
        },
    }


def describe_plan(plan: dict[str, Any], running: dict[str, dict[str, Any]]) -> list[str]:
    """Return the plan as lines that a person reads before anything changes.

    :param running: by replica number (as text) the ``release.json`` that it points at now; empty when it has none.
    """
    balancer = plan["balancer"]
    lines = [
        f"profile {plan['profile']} ({plan['state']}): model {plan['artifacts']['model']['name']} "
        f"served as '{plan['served_model_name']}'",
        f"balancer on {balancer['address']}:{balancer['port']}, replicas on loopback",
    ]
    if plan["changed_settings"]:
        changed = ", ".join(f"{name}={canonical(value)}" for name, value in sorted(plan["changed_settings"].items()))
        lines.append(f"changed from the profile: {changed}")
    for replica in plan["replicas"]:
        lines.append(
            f"replica {replica['index']}: {replica['unit']} port {replica['port']} CPUs {replica['cpus']} "
            f"memory node {replica['memory_nodes'] or 'any'} cap {plan['settings']['container_memory']}"
        )
        lines.append(f"  engine: {canonical(replica['engine_args'])}")
        lines.append(f"  release: {_release_change(plan, replica, running.get(str(replica['index'])))}")
    surplus = sorted({int(index) for index in running} - {replica["index"] for replica in plan["replicas"]})
    lines += [f"replica {index}: no longer in the plan, will be drained, stopped and removed" for index in surplus]
    return lines


def _release_change(plan: dict[str, Any], replica: dict[str, Any], running: dict[str, Any] | None) -> str:
    """Say what becomes of a replica: started, switched (and why), or left alone."""
    if not running:
        return f"{replica['release']}; none now, will be started"
    differing = []
    for part in ("engine_args", "env"):
        want, have = replica[part], running.get(part, {})
        for name in sorted(set(want) | set(have)):
            if want.get(name) != have.get(name):
                differing.append(f"{name} {canonical(have.get(name))} -> {canonical(want.get(name))}")
    for part in ("cpus", "memory_nodes", "port", "gpus"):
        if replica[part] != running.get(part):
            differing.append(f"{part} {canonical(running.get(part))} -> {canonical(replica[part])}")
    release = replica["release"]
    if release == AUTO:
        # With the image and the model that run now, so that what is known already shows in the intent plan.
        same = {**replica, "model": running["model"], "image": running["image"]}
        release = release_of(plan, same)["id"]
    if release != running["id"] and not differing:
        differing.append("image, model or container settings")
    if not differing:
        return f"{running['id']} stays" + (" unless image or model change" if replica["release"] == AUTO else "")
    return f"{running['id']} -> {replica['release']}, will be switched: {'; '.join(differing)}"
