"""The plan: what it refuses, what it places where, and what makes a release."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.describe import describe_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import OWNED, config_lines
from ansible_collections.serving.gpu_node.plugins.module_utils.manifest import digest
from ansible_collections.serving.gpu_node.plugins.module_utils.placement import PlacementError, place_on_cpus
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import PlanError, build_plan, node_config
from ansible_collections.serving.gpu_node.plugins.module_utils.profile_budget import check_caps
from ansible_collections.serving.gpu_node.plugins.module_utils.release import release_files, release_of, resolve_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import parse_cpu_list
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plugins.samples import (
    IMAGE,
    MODEL,
    cpu_profile,
    intent,
    listener,
    numa_node,
    resolved,
    topology,
)

UNIT = Path(__file__).parents[3] / "roles/replica/templates/vllm-replica@.service.j2"
DIGESTS = {"model": MODEL}
TWO_NODES = topology([numa_node(0, [0, 2, 4, 6]), numa_node(1, [1, 3, 5, 7])])


def problems(overrides: dict[str, Any], node: dict[str, Any] | None = None, client_auth: bool = False) -> list[str]:
    with pytest.raises(PlanError) as caught:
        intent(overrides, node, client_auth)
    assert str(caught.value) == "\n".join(f"- {text}" for text in caught.value.problems)
    return caught.value.problems


def ids(plan: dict[str, Any]) -> list[str]:
    return [replica["release"] for replica in plan["replicas"]]


def release(plan: dict[str, Any], index: int = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(plan["replicas"][index]["files"]["release.json"])
    return parsed


# Refusals


def test_more_replicas_than_cpus() -> None:
    assert problems({"replicas": 3}) == [
        "replicas: 3 needs as many CPUs, and this node has 2; set replicas to 2 or less",
    ]


def test_more_cpus_for_each_replica_than_its_numa_node_has() -> None:
    assert problems({"cpus_per_replica": 5}, TWO_NODES) == [
        "cpus_per_replica: 5 for 1 replicas on NUMA node 0 needs 5 CPUs, and it has 4; "
        "lower cpus_per_replica or replicas"
    ]


def test_a_window_beyond_the_kv_cache() -> None:
    assert problems({"kv_cache_memory": "6M"}) == [
        "max_model_len: a request of 2,048 tokens does not fit the KV cache, which holds 1,812 (scaled from what this "
        "profile's engine reports); set max_model_len to at most 1812, or raise kv_cache_memory"
    ]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 17}, "16 is less than one token for each of 17 sequences"),
        (
            {"max_num_batched_tokens": 1024, "engine_args": {"enable-chunked-prefill": False}},
            "1024 is less than a prompt of 2048 tokens, and enable-chunked-prefill is off",
        ),
    ],
)
def test_a_prefill_chunk_that_is_too_small(overrides: dict[str, Any], says: str) -> None:
    (problem,) = problems(overrides)
    assert problem.startswith("max_num_batched_tokens: ")
    assert says in problem


def test_memory_caps_beyond_a_numa_node() -> None:
    node = topology([numa_node(0, [0, 1, 2, 3], gib=64), numa_node(1, [4, 5, 6, 7], gib=5)])
    assert problems({"replicas": 4}, node) == [
        "container_memory: 3g for 2 replicas is 6.0 GiB, and NUMA node 1 has 5.0 GiB; "
        "lower container_memory or replicas"
    ]
    assert intent({"replicas": 2}, node)["replicas"][1]["memory_nodes"] == "1"


def test_memory_caps_that_just_fit() -> None:
    placed = place_on_cpus(topology([numa_node(0, [0, 1], gib=6)]), 2, 0)
    assert check_caps(placed, "3g") == []
    assert len(check_caps(placed, "3221225473b")) == 1


@pytest.mark.parametrize(
    ("port", "user"),
    [
        (8000, "replica 0"),
        (8001, "replica 1"),
        (8080, "the balancer (balancer_port)"),
        (8079, "the balancer (balancer_status_port)"),
    ],
)
def test_a_port_that_something_else_uses(port: int, user: str) -> None:
    assert problems({}, topology(listeners=[listener(port, unit="squatter.service")])) == [
        f"port {port}, wanted for {user}, is in use by process 77 (python3 -m http.server) on 127.0.0.1; "
        "stop it or choose another port"
    ]


def test_a_port_whose_user_cannot_be_seen() -> None:
    (problem,) = problems({}, topology(listeners=[listener(8000, pid=0, command="")]))
    assert "is in use by process 0 (unknown) on 127.0.0.1" in problem


def test_two_sockets_on_a_port_are_one_problem() -> None:
    node = topology(listeners=[listener(8000), {**listener(8000), "address": "::1"}])
    assert len(problems({}, node)) == 1


def test_what_this_project_runs_there_already_is_in_nobodys_way() -> None:
    own = [
        listener(8000, "vllm-replica@0.service"),
        listener(8001, "vllm-replica@1.service"),
        listener(8080, "nginx.service"),
        listener(8079, "nginx.service"),
        listener(22, "ssh.service"),
    ]
    assert intent({}, topology(listeners=own))["state"] == "intent"


def test_the_port_of_another_replica_is_in_use() -> None:
    (problem,) = problems({"first_port": 8001}, topology(listeners=[listener(8001, "vllm-replica@1.service")]))
    assert problem.startswith("port 8001, wanted for replica 0, is in use by process 77")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"balancer_port": 8001}, "balancer_port: 8001 is also the port of replica 1; choose another"),
        ({"balancer_status_port": 8000}, "balancer_status_port: 8000 is also the port of replica 0; choose another"),
        (
            {"balancer_status_port": 8080},
            "balancer_status_port: 8080 is also the port of the balancer (balancer_port); choose another",
        ),
        ({"first_port": 65535}, "replica 1 would have port 65536, beyond 65535; lower first_port"),
    ],
)
def test_ports_that_cannot_be(overrides: dict[str, Any], problem: str) -> None:
    assert problems(overrides) == [problem]


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.1", "::", "2001:db8::1"])
def test_beyond_loopback_a_client_key_is_needed(address: str) -> None:
    assert problems({"balancer_address": address}) == [
        f"balancer_address: {address} is reachable from outside and no client key is set; "
        "set balancer_client_keys or listen on 127.0.0.1"
    ]
    assert intent({"balancer_address": address}, client_auth=True)["balancer"]["address"] == address


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_on_loopback_no_client_key_is_needed(address: str) -> None:
    assert intent({"balancer_address": address})["balancer"]["address"] == address


def test_an_address_that_is_none() -> None:
    assert problems({"balancer_address": "localhost"}) == [
        "balancer_address: 'localhost' is no IP address; write 127.0.0.1 or 0.0.0.0"
    ]


@pytest.mark.parametrize("name", OWNED)
def test_arguments_that_the_plan_decides(name: str) -> None:
    assert problems({"engine_args": {name: 1}}) == [f"engine_args: '{name}' is not for overriding; {OWNED[name]}"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MAX_NUM_SEQS", "8", "is a setting; set max_num_seqs in serving_plan_overrides"),
        ("HF_HUB_OFFLINE", "0", "is set by the plan itself"),
        ("OMP_NUM_THREADS", "8", "is set by the plan itself"),
        ("CUDA_VISIBLE_DEVICES", "0", "is set by the plan itself"),
        ("VLLM_API_KEY", "x", "looks like a secret"),
        ("A-B", "x", "is no name of an environment variable"),
        ("A", 1, "1 is no text in one line; write it in quotes"),
        ("A", "x\ny", "is no text in one line"),
        (
            "ENGRAM_TABLE_MEMORY",
            " Disk",
            "reads the Engram tables with io_uring, which replicas' containers do not have",
        ),
    ],
)
def test_environment_that_the_engine_cannot_be_given(name: str, value: Any, said: str) -> None:
    (problem,) = problems({"engine_env": {name: value}})
    assert problem.startswith(f"engine_env: '{name}'") and said in problem


def test_tables_in_memory_are_a_packs_own_business() -> None:
    assert resolved({"engine_env": {"ENGRAM_TABLE_MEMORY": "pinned"}})["warnings"] == []


def test_what_a_pack_asks_for_reaches_the_engine_and_is_shown() -> None:
    plan = resolved({"engine_env": {"PACK_HOOKS": "/opt/pack/recipe/hooks"}})
    assert "PACK_HOOKS=/opt/pack/recipe/hooks\n" in plan["replicas"][0]["files"]["engine.env"]
    assert any("PACK_HOOKS=/opt/pack/recipe/hooks" in line for line in describe_plan(plan, {}))


def test_quoted_json_for_the_engine() -> None:
    (problem,) = problems({"engine_args": {"hf-overrides": "'{\"a\": 1}'"}})
    assert "begins with a quote" in problem


def test_arguments_with_impossible_names_are_an_error_of_ours() -> None:
    assert "no name of an argument" in problems({"engine_args": {8: 1}})[0]


def test_every_reason_is_named_at_once() -> None:
    overrides = {
        "replicas": 3,
        "balancer_address": "0.0.0.0",
        "balancer_port": 8079,
        "engine_args": {"api-key": "x"},
    }
    found = problems(overrides, topology(listeners=[listener(8002)]))
    starts = ["engine_args:", "balancer_address:", "replicas: 3", "balancer_status_port:", "port 8002"]
    assert [text.startswith(start) for text, start in zip(found, starts, strict=True)] == [True] * 5


def test_wrong_settings_hide_no_other_reason() -> None:
    found = problems({"replicas": "2", "nonsense": 1, "balancer_address": "0.0.0.0", "engine_args": {"port": 1}})
    starts = ["unknown setting 'nonsense'", "replicas: '2'", "engine_args: 'port'", "balancer_address: 0.0.0.0"]
    assert [text.startswith(start) for text, start in zip(found, starts, strict=True)] == [True] * 4
    # and make none up
    assert len(problems({"balancer_address": 5, "engine_args": []})) == 2


# Placement


def test_replicas_are_dealt_to_the_numa_nodes() -> None:
    plan = intent({"replicas": 4}, TWO_NODES)
    placed = [(replica["cpus"], replica["cpu_count"], replica["memory_nodes"]) for replica in plan["replicas"]]
    assert placed == [("0,2", 2, "0"), ("4,6", 2, "0"), ("1,3", 2, "1"), ("5,7", 2, "1")]


def test_the_node_with_more_cpus_gets_more_replicas() -> None:
    nodes = [numa_node(0, [0, 5]), numa_node(5, [1, 2, 3, 4, 6, 7])]
    placed = place_on_cpus(topology(nodes), 4, 0)
    assert [place.domain.nodes for place in placed] == [(0,), (5,), (5,), (5,)]
    assert [place.cpus for place in placed] == [[0, 5], [1, 2], [3, 4], [6, 7]]


def test_as_many_cpus_as_asked_for() -> None:
    plan = intent({"cpus_per_replica": 1}, topology([numa_node(0, [0, 1, 2, 3])]))
    assert [replica["cpus"] for replica in plan["replicas"]] == ["0", "1"]
    assert [replica["env"]["OMP_NUM_THREADS"] for replica in plan["replicas"]] == ["1", "1"]


def test_without_numa_nodes_cpus_are_shared_and_no_memory_is_pinned() -> None:
    node = topology([]) | {"cpus": [0, 1, 2, 3], "memory_bytes": 64 * 2**30}
    plan = resolved({}, node)
    assert [(replica["cpus"], replica["memory_nodes"]) for replica in plan["replicas"]] == [("0-1", ""), ("2-3", "")]
    assert "--cpuset-mems" not in release(plan)["podman_args"]
    assert "memory node any" in "\n".join(describe_plan(plan, {}))
    (problem,) = problems({"container_memory": "40g"}, node)
    assert "and this machine has 64.0 GiB" in problem


NODES = st.lists(st.integers(1, 12), min_size=1, max_size=8).flatmap(
    lambda sizes: st.permutations(range(sum(sizes))).map(
        lambda cpus: [
            numa_node(number * 2, sorted(cpus[sum(sizes[:number]) : sum(sizes[: number + 1])]))
            for number in range(len(sizes))
        ]
    )
)


@given(NODES, st.integers(1, 64), st.integers(0, 4))
def test_every_replica_has_cpus_of_its_own_inside_one_node(
    nodes: list[dict[str, Any]], replicas: int, per_replica: int
) -> None:
    total = sum(len(node["cpus"]) for node in nodes)
    try:
        placed = place_on_cpus(topology(nodes), replicas, per_replica)
    except PlacementError:
        # without a wish for their number, only a lack of CPUs stands in the way
        assert per_replica or replicas > total
        return
    assert len(placed) == replicas
    used: list[int] = []
    for place in placed:
        (node,) = [node for node in nodes if (node["id"],) == place.domain.nodes]
        assert set(place.cpus) <= set(node["cpus"])
        assert len(place.cpus) == per_replica if per_replica else place.cpus
        used += place.cpus
    assert len(used) == len(set(used))


@settings(max_examples=30)
@given(NODES, st.integers(1, 20))
def test_the_container_is_pinned_to_what_the_plan_says(nodes: list[dict[str, Any]], wish: int) -> None:
    replicas = min(wish, sum(len(node["cpus"]) for node in nodes))
    plan = resolved({"replicas": replicas, "container_memory": "1g"}, topology(nodes))
    for number, replica in enumerate(plan["replicas"]):
        argv = release(plan, number)["podman_args"]
        assert argv[argv.index("--cpuset-cpus") + 1] == replica["cpus"]
        assert argv[argv.index("--cpuset-mems") + 1] == replica["memory_nodes"]
        assert replica["port"] == 8000 + number
        (node,) = [node for node in nodes if str(node["id"]) == replica["memory_nodes"]]
        assert set(parse_cpu_list(replica["cpus"])) <= set(node["cpus"])


# Releases

NOT_THE_CONTAINERS: list[dict[str, Any]] = [
    {"balancer_port": 9090},
    {"balancer_status_port": 9091},
    {"balancer_address": "127.0.0.2"},
    {"drain_timeout": 5},
    {"start_timeout": 1200},
    {"prober_interval": 9},
    {"prober_stall": 90},
    {"balancer_announce": 0},
    {"gate_tokens": 8},
    {"gate_speed_factor": 0},
]
THE_CONTAINERS: list[dict[str, Any]] = [
    {"served_model_name": "other"},
    {"max_model_len": 1024},
    {"max_num_seqs": 8},
    {"max_num_batched_tokens": 1024},
    {"kv_cache_memory": "65M"},
    {"speculative_method": "none"},
    {"speculative_tokens": 3},
    {"container_memory": "4g"},
    {"shm_size": "128m"},
    {"first_port": 8100},
    # the engine's own argument: it ends running requests within it
    {"shutdown_timeout": 30},
    {"engine_args": {"max-logprobs": 3}},
    {"engine_args": {"enforce-eager": False}},
    {"engine_env": {"PACK_HOOKS": "/opt/pack/recipe/hooks"}},
    {"replicas": 1},
]


def test_the_same_inputs_have_the_same_id() -> None:
    assert ids(resolved()) == ids(resolved())
    assert all(re.fullmatch("[0-9a-f]{12}", number) for number in ids(resolved()))
    assert len(set(ids(resolved()))) == 2


def test_the_id_is_the_hash_of_the_release_without_it() -> None:
    found = release(resolved())
    assert found["id"] == digest({key: value for key, value in found.items() if key != "id"})[:12]
    texts = resolved()["replicas"][0]["files"]
    for name in ("engine.yaml", "engine.env"):
        assert found["files"][name] == hashlib.sha256(texts[name].encode()).hexdigest()


def test_resolving_twice_changes_nothing() -> None:
    once = resolved()
    assert resolve_plan(once, DIGESTS, IMAGE, [], [], {}) == once


@pytest.mark.parametrize("overrides", NOT_THE_CONTAINERS)
def test_what_is_not_the_containers_makes_no_new_release(overrides: dict[str, Any]) -> None:
    assert ids(resolved(overrides)) == ids(resolved())
    # and yet it is in the plan
    assert node_config(resolved(overrides)) != node_config(resolved()) or set(overrides) == {"balancer_address"}


@pytest.mark.parametrize("overrides", THE_CONTAINERS)
def test_what_is_the_containers_makes_a_new_release(overrides: dict[str, Any]) -> None:
    assert ids(resolved(overrides))[0] != ids(resolved())[0]


def test_every_setting_is_one_of_the_two() -> None:
    """A new setting has to be added to one of the lists above."""
    tested = {name for overrides in NOT_THE_CONTAINERS + THE_CONTAINERS for name in overrides}
    assert tested | {"cpus_per_replica"} == set(cpu_profile()["settings"])


def test_other_artifacts_or_cpus_make_a_new_release() -> None:
    base = ids(resolved())
    assert ids(resolved(model="c" * 64))[0] != base[0]
    assert ids(resolved(image={**IMAGE, "id": "c" * 64}))[0] != base[0]
    assert ids(resolved({"cpus_per_replica": 1}, topology([numa_node(0, [0, 1])]))) == base
    assert ids(resolved(node=topology([numa_node(0, [2, 3])])))[0] != base[0]
    assert ids(resolved(node=topology([numa_node(1, [0, 1])])))[0] != base[0]


@pytest.mark.parametrize("part", ["environment", "engine_args"])
def test_what_the_profile_gives_the_engine_makes_a_new_release(part: str) -> None:
    profile = cpu_profile()
    profile[part]["SOMETHING-NEW"] = "1"
    plan = resolve_plan(build_plan(profile, {}, topology(), False, {}), DIGESTS, IMAGE, [], [], {})
    assert ids(plan)[0] != ids(resolved())[0]


def test_secrets_are_files_on_the_node_and_in_no_release() -> None:
    assert ids(resolved(client_auth=True)) == ids(resolved())
    found = release(resolved())
    assert "/etc/gpu-node/secrets/engine.env" in found["podman_args"]
    assert not [name for name in found["env"] if "KEY" in name or "TOKEN" in name]
    assert "api-key" not in found["engine_args"]


def test_the_container_is_confined() -> None:
    found = release(resolved(), 1)
    argv = found["podman_args"]
    pairs = list(pairwise(argv))
    for pair in [
        ("--network", "host"),
        ("--ipc", "private"),
        ("--shm-size", "256m"),
        ("--memory", "3g"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--volume", f"/var/lib/gpu-node/artifacts/tiny-deepseek-v3/{MODEL[:12]}:/model:ro"),
        ("--volume", f"/var/lib/gpu-node/cache/1/{IMAGE['id'][:12]}:/cache"),
        ("--volume", "/var/lib/gpu-node/replicas/1/current/engine.yaml:/etc/vllm/engine.yaml:ro"),
        ("--env-file", "/var/lib/gpu-node/replicas/1/current/engine.env"),
    ]:
        assert pair in pairs
    assert "--read-only" in argv
    assert all(isinstance(word, str) for word in argv)
    assert found["command"] == ["vllm", "serve", "--config", "/etc/vllm/engine.yaml"]
    assert found["engine_args"]["host"] == "127.0.0.1"


def test_every_cache_is_in_the_replicas_own_folder() -> None:
    env = release(resolved())["env"]
    caches = {name: value for name, value in env.items() if name.endswith(("_HOME", "_ROOT", "_DIR")) or name == "HOME"}
    assert caches
    assert all(value == "/cache" or value.startswith("/cache/") for value in caches.values())


def test_the_environment_file() -> None:
    lines = resolved()["replicas"][0]["files"]["engine.env"].splitlines()
    assert lines == sorted(lines)
    assert dict(line.split("=", 1) for line in lines) == release(resolved())["env"]
    # the source recipe's names stay recognisable
    assert {"MAX_MODEL_LEN=2048", "MAX_NUM_SEQS=16", "MAX_BATCHED=2048", "KV_MEM=64M", "SPEC_K=7"} <= set(lines)
    assert {"CONTAINER_MEM=3g", "VLLM_HOST_IP=127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING=0"} <= set(lines)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*=[^\s'\"#]+", line) for line in lines)


# No surrogates: they are no Unicode, and no file or terminal of Ansible's carries them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(
        ["yes", "null", "1e3", "0x10", "2030-01-01", "~", "- a", "a: b", "#", "{", "|", "\x85", "\u2028"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(lambda t: len(t) < 99), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,12}", fullmatch=True) | st.sampled_from(["yes", "no", "on", "null", "y"])


def loads_as_written(arguments: dict[str, Any]) -> None:
    text = release_files({"engine_args": arguments, "env": {}})["engine.yaml"]
    loaded = (yaml.safe_load(text) if text else None) or {}
    spelled = config_lines(arguments)
    # as text, so that 1 and 1.0 and True differ
    assert json.dumps(loaded, sort_keys=True) == json.dumps(spelled, sort_keys=True)
    assert len(text.splitlines()) == len(spelled)


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_the_engines_file_loads_back_to_its_arguments(arguments: dict[str, Any]) -> None:
    loads_as_written(arguments)


@pytest.mark.parametrize(
    "value", [1e-06, 1.5e-07, 1e22, -1e-9, 0.0, "1e-06", "a\x7fb\x85c\u2028d\ufeffe", {"k": 1e-06}]
)
def test_values_that_yaml_reads_otherwise_than_json(value: Any) -> None:
    loads_as_written({"hf-overrides": value})


def test_the_engines_file_of_the_plan() -> None:
    text = resolved({"engine_args": {"rope": {"factor": 1e-6}}})["replicas"][1]["files"]["engine.yaml"]
    assert yaml.safe_load(text) == resolved({"engine_args": {"rope": {"factor": 1e-6}}})["replicas"][1]["engine_args"]
    assert '"port": 8001\n' in text


def test_inputs_are_left_alone() -> None:
    profile, node, overrides = cpu_profile(), topology(), {"engine_args": {"dtypes": [1]}}
    before = copy.deepcopy((profile, node, overrides))
    resolve_plan(build_plan(profile, overrides, node, False, {}), DIGESTS, IMAGE, [], [], {})
    assert (profile, node, overrides) == before


# What the node's own tool and people read


def test_the_node_tools_configuration() -> None:
    plan = intent({"balancer_address": "::1", "balancer_port": 9000, "drain_timeout": 7})
    assert node_config(plan) == {
        "replicas": [
            {"index": 0, "port": 8000, "unit": "vllm-replica@0.service", "container": "vllm-replica-0"},
            {"index": 1, "port": 8001, "unit": "vllm-replica@1.service", "container": "vllm-replica-1"},
        ],
        "served_model_name": "tiny",
        "balancer": {"status_port": 8079, "listen": ["[::1]:9000"]},
        "drain_timeout_s": 7,
        "start_timeout_s": 600,
        "shutdown_timeout_s": 60,
        "announce_s": 2,
        "gate": {"tokens": 64, "speed_factor": 0.2},
        "prober": {"interval_s": 5, "http_timeout_s": 5, "http_failures": 2, "stall_s": 30, "idle_probe_s": 30},
    }


def test_the_gate_asks_for_no_more_than_half_the_window() -> None:
    plan = intent({"max_model_len": 100, "max_num_batched_tokens": 100})
    assert node_config(plan)["gate"]["tokens"] == 50


def test_systemd_waits_longer_than_what_it_waits_for() -> None:
    plan = intent({"balancer_announce": 30, "drain_timeout": 100, "shutdown_timeout": 50, "start_timeout": 200})
    service = plan["service"]
    assert service["stop_timeout"] > 30 + 100 + 50


@pytest.mark.parametrize("start_timeout", [200, 5400])
def test_the_start_limit_spans_the_slowest_failures_that_the_unit_allows(start_timeout: int) -> None:
    plan = intent({"balancer_announce": 30, "drain_timeout": 900, "start_timeout": start_timeout})
    text = jinja2.Template(UNIT.read_text()).render(serving_plan_result=plan)
    unit = {name: int(value) for name, value in re.findall(r"^(\w+)=(\d+)$", text, re.MULTILINE)}
    failure = unit["TimeoutStartSec"] + unit["TimeoutStopSec"] + unit["RestartSec"]
    assert unit["StartLimitIntervalSec"] > unit["StartLimitBurst"] * failure
    assert unit["TimeoutStartSec"] > start_timeout


def test_the_plan_of_a_bare_node_as_lines() -> None:
    assert describe_plan(intent({"max_num_seqs": 8, "speculative_method": "none"}), {}) == [
        "profile cpu (intent), served as 'tiny'",
        "balancer on 127.0.0.1:8080, replicas on loopback",
        "model tiny-deepseek-v3: from nowhere: generated on the node",
        'changed from the profile: max_num_seqs=8, speculative_method="none"',
        "--- the machine ---",
        "NUMA node 0: CPUs 0-1, 64 GiB",
        "  +-- replica 0: vllm-replica@0.service port 8000 CPUs 0 memory node 0 cap 3g",
        "  +-- replica 1: vllm-replica@1.service port 8001 CPUs 1 memory node 0 cap 3g",
        "--- budgets, for each replica ---",
        "context window                     [###---------------------] 2,048 of 19,328 tokens of a replica, estimated",
        "                                   9.44 full-length requests in 19,328 tokens of KV cache",
        "--- engine ---",
        "vllm serve /model",
        "--disable-uvicorn-access-log",
        "--distributed-executor-backend uni",
        "--enforce-eager",
        "--host 127.0.0.1",
        "--kv-cache-memory-bytes 64M",
        "--max-model-len 2048",
        "--max-num-batched-tokens 2048",
        "--max-num-seqs 8",
        "--port 8000",
        "--served-model-name tiny",
        "--shutdown-timeout 60",
        "environment: MAX_MODEL_LEN=2048 MAX_NUM_SEQS=8 MAX_BATCHED=2048 KV_MEM=64M SPEC_K=7 CONTAINER_MEM=3g",
        "replica 1 the same, but for --port 8001",
        "--- what changes ---",
        "replica 0: release auto; none now, will be started",
        "replica 1: release auto; none now, will be started",
        "reboots: none",
        "other files of the node: site.yml --check --diff shows each change",
    ]


def running(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(number): release(plan, number) for number in range(len(plan["replicas"]))}


def release_lines(plan: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [line.partition(": ")[2] for line in describe_plan(plan, now) if ": release " in line]


def test_what_stays_is_said() -> None:
    plan = resolved()
    now = running(plan)
    assert release_lines(plan, now)[0] == f"release {ids(plan)[0]} stays"
    assert release_lines(intent(), now)[0] == f"release {ids(plan)[0]} stays unless image or model change"


def test_what_is_switched_is_said_with_old_and_new_value() -> None:
    now = running(resolved())
    plan = resolved({"max_num_seqs": 8})
    line = release_lines(plan, now)[0]
    assert line.startswith(f"release {ids(resolved())[0]} -> {ids(plan)[0]}, will be switched: ")
    assert "max-num-seqs 16 -> 8" in line
    assert 'MAX_NUM_SEQS "16" -> "8"' in line
    moved = release_lines(intent({"replicas": 1}), now)
    assert 'cpus "0" -> "0-1"' in moved[0]


def test_a_new_image_is_said() -> None:
    line = release_lines(resolved(image={**IMAGE, "id": "c" * 64}), running(resolved()))[0]
    assert line.endswith("will be switched: image, model or container settings")


def test_a_change_of_the_container_alone_is_said_before_anything_changes() -> None:
    line = release_lines(intent({"shm_size": "128m"}), running(resolved()))[0]
    assert line == f"release {ids(resolved())[0]} -> auto, will be switched: image, model or container settings"


def test_a_replica_that_cannot_be_read_is_started_and_a_surplus_one_removed() -> None:
    lines = describe_plan(intent({"replicas": 1}), {**running(resolved()), "0": {}, "10": {}})
    assert "replica 0: release auto; none now, will be started" in lines
    assert lines[-4:-2] == [
        "replica 1: no longer in the plan, will be drained, stopped and removed",
        "replica 10: no longer in the plan, will be drained, stopped and removed",
    ]


def test_release_of_names_the_replicas_own_folders_only() -> None:
    plan = resolved()
    for number in (0, 1):
        argv = " ".join(release_of(plan, plan["replicas"][number])["podman_args"])
        assert f"replicas/{1 - number}/" not in argv
        assert f"cache/{1 - number}/" not in argv
