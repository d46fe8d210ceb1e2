# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""The plan of a node: profile + overrides + topology -> what runs where.

Pure functions. ``build_plan`` gives the *intent* plan, which is known on a bare node; ``release.resolve_plan``
completes it with what was built, fetched and seen by a driver.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import (
    DRAFTER_PATH,
    check_engine_args,
    engine_args,
    normalise,
    said_twice,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.placement import (
    Place,
    PlacementError,
    check_gpus,
    count_remedy,
    gpu_name,
    place_on_cpus,
    place_on_gpus,
    select_gpus,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.profile_budget import Budget, budget
from ansible_collections.serving.gpu_node.plugins.module_utils.qualification import wanted_kernels
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import (
    AUTO,
    SettingsError,
    check_engine_env,
    recipe_environment,
    resolve_settings,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.sources import (
    check_source,
    folder_source,
    lay_sources,
    recipe_source,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import format_cpu_list
from ansible_collections.serving.gpu_node.plugins.module_utils.vllm_arguments import VERSION, unknown_arguments

# The engine closes an idle connection after this long; the balancer does so earlier, or a request meets a closing one.
ENGINE_KEEPALIVE_SECONDS = 90
# The engine's own deadline for its start. The node's (start_timeout) decides, and must not be part of a release, or
# changing it would restart every replica.
ENGINE_READY_SECONDS = 7 * 86400
RESTART_DELAY_SECONDS = 10
START_BURST = 3


class PlanError(ValueError):
    """The plan cannot work; ``problems`` holds a sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(f"- {problem}" for problem in problems))
        self.problems = problems


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


def _environment(
    profile: dict[str, Any], settings: dict[str, Any], replica: dict[str, Any], fixed: dict[str, str]
) -> dict[str, str]:
    """Return the container's environment but for its GPUs' UUIDs: nothing in it is secret."""
    recipe = {"PROFILE": profile["name"], **recipe_environment(settings)}
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
    }
    if profile["device"] == "cuda":
        # Ranks follow CUDA_VISIBLE_DEVICES, which the release adds; without this CUDA puts the fastest card first.
        common["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        caches |= {
            "CUDA_CACHE_PATH": "/cache/cuda",
            "DG_JIT_CACHE_DIR": "/cache/deep_gemm",
            "FLASHINFER_WORKSPACE_BASE": "/cache/flashinfer",
        }
    else:
        common["OMP_NUM_THREADS"] = str(replica["cpu_count"])
    return {**recipe, **common, **loopback, **caches, **fixed, **settings["engine_env"]}


def _check_env(profile: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    # Which names the plan sets itself does not depend on where a replica is.
    own = _environment(profile, {**settings, "engine_env": {}}, {"cpu_count": 1}, profile["environment"])
    return check_engine_env(settings["engine_env"], [*own, "CUDA_VISIBLE_DEVICES"])


def _seat(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what a replica is called and where it listens, which its number alone decides."""
    return {
        "index": index,
        "unit": f"vllm-replica@{index}.service",
        "container": f"vllm-replica-{index}",
        "port": settings["first_port"] + index,
    }


def _replica(
    index: int, place: Place, profile: dict[str, Any], settings: dict[str, Any], artifacts: dict[str, Any], sums: Budget
) -> dict[str, Any]:
    drafter = {"name": artifacts["drafter"]["name"], "digest": AUTO} if "drafter" in artifacts else None
    replica: dict[str, Any] = {
        **_seat(index, settings),
        "cpus": format_cpu_list(place.cpus),
        "cpu_count": len(place.cpus),
        "memory_nodes": ",".join(map(str, place.domain.nodes)),
        # In the order of their ranks.
        "gpus": [{"pci_address": gpu["pci_address"], "uuid": gpu["uuid"] or AUTO} for gpu in place.gpus],
        "model": {"name": artifacts["model"]["name"], "digest": AUTO},
        "drafter": drafter,
        "image": {"ref": AUTO, "id": AUTO},
        "release": AUTO,
    }
    replica["engine_args"] = engine_args(
        settings,
        profile["engine_args"],
        replica["port"],
        sums.graph_sizes,
        sums.kv_offload_gib,
        DRAFTER_PATH if drafter else "",
    )
    replica["env"] = _environment(profile, settings, replica, profile["environment"])
    return replica


def _gone(topology: dict[str, Any]) -> str:
    """Name the GPUs that running releases use and that are on the bus no more."""
    there = {gpu["pci_address"] for gpu in topology["gpus"]}
    gone = [
        f"{gpu['pci_address']} of replica {index}"
        for index, release in sorted(topology["releases"].items())
        for gpu in release.get("gpus", [])
        if gpu["pci_address"] not in there
    ]
    return f"; gone from the bus since the running release: {', '.join(gone)}" if gone else ""


def _place(
    profile: dict[str, Any], settings: dict[str, Any], topology: dict[str, Any]
) -> tuple[list[Place], list[str], list[str]]:
    """Return the replicas' places, warnings, and problems (with which there are no places)."""
    if profile["device"] != "cuda":
        try:
            return place_on_cpus(topology, settings["replicas"], settings["cpus_per_replica"]), [], []
        except PlacementError as error:
            return [], [], error.problems
    gpus, warnings, problems = select_gpus(topology, settings["gpus"], profile["cards"])
    problems += check_gpus(gpus, topology["driver"]["version"])
    replicas, size = settings["replicas"], settings["tensor_parallel_size"]
    # A node without any GPU of the profile has its own sentence already.
    if not problems and len(gpus) != replicas * size:
        there = ", ".join(gpu_name(gpu) for gpu in gpus) or "none"
        problems.append(
            f"replicas: {replicas} with tensor_parallel_size {size} needs {replicas * size} GPUs, and there are "
            f"{len(gpus)}: {there}{_gone(topology)}; {count_remedy(topology, gpus, replicas, size)}"
        )
    if problems:
        return [], warnings, problems
    try:
        places = place_on_gpus(topology, gpus, settings)
    except PlacementError as error:
        return [], warnings, error.problems
    loose = [index for index, place in enumerate(places) if not place.domain.nodes]
    if loose:
        pinned = "no memory" if settings["cpus_per_replica"] else "no CPU and no memory"
        which = ", ".join(map(str, loose))
        warnings.append(
            f"the NUMA node of GPUs of replica {which} is not known or has nothing to pin to (usual "
            f"in a virtual machine): {pinned} is pinned there; have the hypervisor show the guest its nodes, if it can"
        )
    return places, warnings, []


def _artifacts(
    profile: dict[str, Any], settings: dict[str, Any], sources: dict[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the artifacts that this plan needs, problems, and what the operator still has to fill in."""
    laid, problems = lay_sources(profile["artifacts"], sources)
    pack = laid.get("pack", {}).get("source")
    if pack:
        laid["pack"] = {**laid["pack"], "source": recipe_source(pack)}
    else:
        laid.pop("pack", None)
    wanted = settings.get("drafter", "none")
    own_folder = wanted != "none" and profile["drafters"].get(wanted, {}).get("artifact")
    of_pack = {}
    if not own_folder:
        laid.pop("drafter", None)
    elif not laid["drafter"]["source"]:
        drafter = laid.pop("drafter")
        # The pack has a folder of the drafter's name.
        of_pack = {**drafter, "source": folder_source(pack, drafter["name"])} if pack else {}
        if not of_pack.get("source"):
            problems.append(
                f"drafter: '{wanted}' has no source; either set serving_plan_sources.drafter to where the head lies "
                "(the pack's folder drafter-code-k7), or set drafter: released for the head that comes with the model"
            )
    missing = []
    for key, artifact in laid.items():
        wrong, unfilled = check_source(key, artifact["source"])
        problems += wrong
        missing += unfilled
    # What is wrong or missing in its source was said of the pack's.
    return {**laid, **({"drafter": of_pack} if of_pack else {})}, problems, missing


def _draft(settings: dict[str, Any], artifacts: dict[str, Any]) -> dict[str, Any]:
    """Return the DSpark head, the artifact that it lies in and what it is to draft; empty without one.

    ``release.resolve_plan`` compares it with what the head's own configuration says.
    """
    head = settings.get("drafter", "none")
    if head == "none":
        return {}
    artifact = "drafter" if "drafter" in artifacts else "model"
    return {"head": head, "artifact": artifact, "tokens": settings["speculative_tokens"]}


def _unknown_arguments(profile: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    if profile["image"]["version"] != VERSION:
        return []
    return unknown_arguments(normalise(name) for name in settings["engine_args"])


def _service(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a replica's unit."""
    # The gate gives up at start_timeout and says why; systemd waits a little longer than that.
    unit_start = settings["start_timeout"] + 60
    # Longer than announcing, the drain and the engine's own shutdown together, or systemd cuts streams that may still
    # end.
    stop = settings["balancer_announce"] + settings["drain_timeout"] + settings["shutdown_timeout"] + 90
    return {
        "start_timeout": settings["start_timeout"],
        "unit_start_timeout": unit_start,
        "drain_timeout": settings["drain_timeout"],
        "shutdown_timeout": settings["shutdown_timeout"],
        "stop_timeout": stop,
        "restart_delay": RESTART_DELAY_SECONDS,
        "start_burst": START_BURST,
        # Longer than the slowest failures in a row, or what can never start would be tried for ever.
        "start_limit_interval": START_BURST * (unit_start + stop + RESTART_DELAY_SECONDS) + 60,
    }


def build_plan(
    profile: dict[str, Any],
    overrides: dict[str, Any],
    topology: dict[str, Any],
    client_auth: bool,
    sources: dict[str, Any],
) -> dict[str, Any]:
    """Return the intent plan of a node.

    :param profile: a profile's data: a file of the role's ``vars``.
    :param overrides: the operator's settings (see ``settings.resolve_settings``).
    :param topology: what ``gpu_topology`` returned.
    :param client_auth: whether clients of the balancer must show a key.
    :param sources: the operator's sources of artifacts (see ``sources.lay_sources``).
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
    wrong_args = check_engine_args(settings["engine_args"])
    wrong_args = wrong_args or said_twice(profile["engine_args"], settings["engine_args"])
    problems = wrong_args + _check_env(profile, settings) + _check_balancer(settings, client_auth)
    artifacts, wrong, missing = _artifacts(profile, settings, sources)
    places, warnings, unplaced = _place(profile, settings, topology)
    # Arguments that are none are told once, and not reckoned with.
    sums = budget(profile, {**settings, "engine_args": {}} if wrong_args else settings, places, topology)
    problems += wrong + unplaced + sums.problems + check_ports(settings, topology["listeners"])
    if problems:
        raise PlanError(problems)
    replicas = [_replica(index, place, profile, settings, artifacts, sums) for index, place in enumerate(places)]
    return {
        "schema": 1,
        "state": "intent",
        "profile": profile["name"],
        "device": profile["device"],
        "settings": settings,
        "changed_settings": {name: value for name, value in settings.items() if profile["settings"][name] != value},
        "served_model_name": settings["served_model_name"],
        "artifacts": artifacts,
        "image": profile["image"],
        "topology": {name: topology[name] for name in ("numa_nodes", "gpus", "links", "driver", "memory_bytes")},
        # What the kernels' switches wait for; release.resolve_plan decides them.
        "kernels": wanted_kernels(profile, settings, overrides),
        "budgets": sums.bars,
        "expected": sums.expected,
        "warnings": [*topology["warnings"], *warnings, *sums.warnings, *_unknown_arguments(profile, settings)],
        "draft": _draft(settings, artifacts),
        # What has to be filled in before anything can be fetched.
        "missing": missing,
        "container": {
            "memory": settings["container_memory"],
            "shm_size": sums.shm_size,
            "need_bytes": sums.need_bytes,
        },
        "balancer": {
            "address": settings["balancer_address"],
            "port": settings["balancer_port"],
            "status_port": settings["balancer_status_port"],
            "announce": settings["balancer_announce"],
        },
        "service": _service(settings),
        "prober": {"interval": settings["prober_interval"], "stall": settings["prober_stall"]},
        "gate": {
            # A window that is too short for them is no reason to fail a release.
            "tokens": min(settings["gate_tokens"], max(settings["max_model_len"] // 2, 4)),
            "speed_factor": settings["gate_speed_factor"],
        },
        "replicas": replicas,
    }


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
        "announce_s": balancer["announce"],
        "gate": plan["gate"],
        "prober": {
            "interval_s": prober["interval"],
            "http_timeout_s": 5,
            "http_failures": 2,
            "stall_s": prober["stall"],
            "idle_probe_s": prober["stall"],
        },
    }
