"""The engine files of our plans, read by the argument parser of the vLLM that the GPU profiles run.

The parser runs in the image of the CPU build, which has its dependencies: one container for all cases. With
ENGINE_PYTHON=/path/to/python, a Python that has them, it runs in that one instead, and no node is needed.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import image_cache
import pytest
import yaml
from ansible.plugins.loader import init_plugin_loader
from nodes import Node
from testhost import ROOT

# Ansible's own import hook: the regular package `ansible_collections` in site-packages would hide the checkout.
init_plugin_loader([str(ROOT / "collections")])

from ansible_collections.serving.gpu_node.plugins.module_utils.plan import build_plan  # noqa: E402
from ansible_collections.serving.gpu_node.plugins.module_utils.release import resolve_plan  # noqa: E402
from ansible_collections.serving.gpu_node.plugins.module_utils.vllm_arguments import NAMES  # noqa: E402

ENGINE = ROOT / "tests" / "engine"
PROFILES = ROOT / "roles" / "serving_plan" / "vars"
RELEASE = "/var/lib/gpu-node/replicas/0/current/release.json"
ON_NODE = "/tmp/parse_arguments.py"
DIGESTS = {"model": "a" * 64, "drafter": "c" * 64}
IMAGE = {"ref": "localhost/gpu-node/vllm:key", "id": "b" * 64}
GPUS = {"cpu": 0, "8x": 8, "2x": 2}
HUB = {"model": {"revision": "d" * 40}}
# What an operator of that profile must say about where artifacts come from.
SOURCES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "8x": {**HUB, "drafter": {"type": "path", "path": "/srv/drafter-code-k7"}},
    "2x": HUB,
}
# None of these is what the engine would take by itself, so each shows up as a difference.
FIRST_PORT = 8100
ENDPOINT = {"first_port": FIRST_PORT, "shutdown_timeout": 240, "served_model_name": "under-test"}
# What every replica of ours has and the observed run, served to one person from a shell, had not.
OURS = {
    "model",
    "model_tag",
    "served_model_name",
    "host",
    "port",
    "shutdown_timeout",
    "disable_uvicorn_access_log",
}
DSPARK = {"method": "dspark", "draft_sample_method": "probabilistic"}

# Each kind of argument that an operator may lay over a profile's, with what it must become.
OVERRIDES = {
    "enable-prefix-caching": False,
    "compilation-config.cudagraph_mode": "PIECEWISE",
    "kernel_config.enable_jit_warmup": False,
    "max-logprobs": -1,
    "generation-config": "vllm",
}

Plan = dict[str, Any]
Values = dict[str, Any]
# Refused texts of the engine's file, each with a word of the reason.
REFUSED = {
    "unknown-argument": ("nonsense: 1", "unrecognized arguments: --nonsense"),
    "gone-argument": ("swap-space: 16", "unrecognized arguments: --swap-space"),
    "unknown-flag": ("nonsense: true", "unrecognized arguments: --nonsense"),
    "no-such-unit": ("kv-cache-memory-bytes: 18GiB", "18GiB"),
    "fraction-of-a-binary-unit": ("kv-cache-memory-bytes: 1.5G", "Decimals are not allowed"),
    "key-of-speculation": ("speculative-config: {method: dspark, num_spec_tokens: 7}", "num_spec_tokens"),
    "method-of-speculation": ("speculative-config: {method: dsparc, num_speculative_tokens: 7}", "dsparc"),
    "no-tokens-of-speculation": ("speculative-config: {method: dspark, num_speculative_tokens: 0}", "greater than 0"),
    "key-of-compilation": ("compilation-config: {cudagraph_mod: FULL}", "cudagraph_mod"),
    "key-of-kernels": ("kernel-config: {moe_backnd: marlin}", "moe_backnd"),
    "kernel": ("moe-backend: flashinfer_cutlas", "flashinfer_cutlas"),
    "attention": ("attention-backend: FLASHINFER_MLA_SPARSE_DSV42", "FLASHINFER_MLA_SPARSE_DSV42"),
    "tokenizer": ("tokenizer-mode: deepseek_v42", "deepseek_v42"),
    "reasoning-parser": ("reasoning-parser: deepseek_v42", "deepseek_v42"),
    "tool-parser": ("{enable-auto-tool-choice: true, tool-call-parser: deepseek_v42}", "deepseek_v42"),
    "tool-choice-without-parser": ("enable-auto-tool-choice: true", "requires --tool-call-parser"),
    "cache-type": ("kv-cache-dtype: fp9", "fp9"),
    "more-than-all-memory": ("gpu-memory-utilization: 1.5", "less than or equal to 1"),
    "text-that-looks-like-an-option": ("served-model-name: -x", "expected at least one argument"),
}


def topology(gpus: int) -> dict[str, Any]:
    """Two sockets of 64 CPUs and 755 GiB, with the GPUs dealt to them in halves; two of them share the first socket."""
    nodes = [
        {"id": node, "socket": node, "cpus": list(range(64 * node, 64 * node + 64)), "memory_bytes": 755 * 2**30}
        for node in (0, 1)
    ]
    node_of = [0 if gpus < 8 else index // (gpus // 2) for index in range(gpus)]
    addresses = [f"0000:{0x20 + 0x10 * index:02x}:00.0" for index in range(gpus)]
    return {
        "schema": 1,
        "cpus": list(range(128)),
        "cores": [[cpu] for cpu in range(128)],
        "memory_bytes": 2 * 755 * 2**30,
        "numa_nodes": nodes,
        "gpus": [
            {
                "pci_address": address,
                "device_id": "0x2bb5",
                "numa_node": node_of[index],
                "uuid": f"GPU-00000000-0000-4000-8000-{index:012d}",
                "model": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                "memory_mib": 97887,
                "mig": False,
            }
            for index, address in enumerate(addresses)
        ],
        "links": [
            [one, other, "NODE" if node_of[first] == node_of[second] else "SYS"]
            for first, one in enumerate(addresses)
            for second, other in enumerate(addresses)
            if first < second
        ],
        "driver": {"version": "590.48.01" if gpus else "", "open": True if gpus else None},
        "warnings": [],
        "listeners": [],
        "releases": {},
    }


def plan_of(name: str, **overrides: Any) -> Plan:
    """Return the resolved plan of a profile."""
    profile = yaml.safe_load((PROFILES / f"{name}.yml").read_text())["_serving_plan_profile"]
    node = topology(GPUS[name])
    plan: Plan = build_plan(profile, {**ENDPOINT, **overrides}, node, False, SOURCES[name])
    resolved: Plan = resolve_plan(plan, DIGESTS, {**IMAGE, "recipe": "pack"}, node["gpus"], [], {})
    return resolved


def line(name: str) -> list[str]:
    """Return a stored command line, as the words after `vllm serve`."""
    return shlex.split((ENGINE / name).read_text())


def config(text: str) -> dict[str, Any]:
    """Return a case of a small engine file, given as `name: value` or as a mapping in braces."""
    body = yaml.safe_load(text)
    return {"config": json.dumps({"model": "/model", **body})}


def all_cases(plans: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {
        "defaults": config("{}"),
        "observed-2x": {"argv": line("observed_2x.args")},
        "line-8x": {"argv": line("profile_8x.args")},
        "18G": config("kv-cache-memory-bytes: 18G"),
        "18g": config("kv-cache-memory-bytes: 18g"),
        "no-flag": config("{no-enable-prefix-caching: true, no-async-scheduling: true}"),
        "false": config("{enable-prefix-caching: false, nonsense: false}"),
        "no-model": {"config": "max-num-seqs: 4\n"},
    }
    cases |= {f"refused-{name}": config(text) for name, (text, _) in REFUSED.items()}
    cases |= {
        f"plan-{name}-{replica['index']}": {"config": replica["files"]["engine.yaml"]}
        for name, plan in plans.items()
        for replica in plan["replicas"]
    }
    return cases


def in_container(node: Node, sources: Path, asked: str) -> str:
    """Return what the parser prints, run in the node's own image."""
    seen = f"{image_cache.MOUNT}/{sources.name}"
    assert node.run(f"test -d {seen}").returncode == 0, f"{node.container} does not see {seen}"
    node.ssh(f"cat >{ON_NODE}", stdin=(ENGINE / "parse_arguments.py").read_text())
    image = json.loads(node.ssh(f"cat {RELEASE}"))["image"]["ref"]
    volumes = f"-v {seen}:/sources:ro -v {ON_NODE}:/parse_arguments.py:ro"
    environment = "-e PYTHONPATH=/sources -e PYTHONDONTWRITEBYTECODE=1 -e VLLM_TARGET_DEVICE=cpu"
    # A network of its own would need sysctls that a node in a container may not set.
    podman = f"podman run --rm -i --network host {volumes} {environment} {shlex.quote(image)}"
    return node.ssh(f"{podman} python3 /parse_arguments.py", stdin=asked, timeout=600)


def in_python(python: str, sources: Path, asked: str) -> str:
    done = subprocess.run(
        [python, str(ENGINE / "parse_arguments.py")],
        input=asked,
        env={**os.environ, "PYTHONPATH": str(sources), "VLLM_TARGET_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def fetch_sources() -> Path:
    fetch = [sys.executable, str(ENGINE / "fetch_vllm.py")]
    fetched = subprocess.run(fetch, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1900, check=False)
    assert fetched.returncode == 0, fetched.stderr
    return Path(fetched.stdout.strip())


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {
        **{name: plan_of(name) for name in GPUS},
        "prose": plan_of("8x", speculative_tokens=3),
        "overridden": plan_of("2x", engine_args=OVERRIDES),
    }


@pytest.fixture(scope="module")
def parsed(request: pytest.FixtureRequest, plans: dict[str, Plan]) -> dict[str, dict[str, Any]]:
    """By case what vLLM made of it: `{"values": ...}` or `{"error": ...}`."""
    sources = fetch_sources()
    cases = all_cases(plans)
    asked = json.dumps(list(cases.values()))
    python = os.environ.get("ENGINE_PYTHON")
    if python:
        printed = in_python(python, sources, asked)
    else:
        printed = in_container(request.getfixturevalue("served"), sources, asked)
    answer = json.loads(printed)
    assert sources.name == f"vllm-{answer['version']}"
    return dict(zip(cases, answer["results"], strict=True))


def values_of(parsed: dict[str, dict[str, Any]], case: str) -> Values:
    assert "error" not in parsed[case], parsed[case]
    values: Values = parsed[case]["values"]
    return values


def differing(one: Values, other: Values) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def arrived(name: str, value: Any, values: Values) -> bool:
    """Tell whether an argument of the plan is what the engine has, in its own type."""
    have = values[name.replace("-", "_")]
    if isinstance(value, dict):
        return all(have[key] == inner for key, inner in value.items())
    if name == "kv-cache-memory-bytes":
        number, unit = str(value)[:-1], str(value)[-1]
        return bool(have == (int(number) * {"M": 2**20, "G": 2**30}[unit] if unit in "MG" else int(value)))
    return bool(have == ([value] if isinstance(have, list) and not isinstance(value, list) else value)) and (
        isinstance(have, list) or type(have) is type(value)
    )


def test_the_names_that_the_plan_knows_are_the_parsers() -> None:
    sources = fetch_sources() / "vllm"
    found = set()
    for file in ("engine/arg_utils.py", "entrypoints/common/cli_args.py"):
        for part in ast.walk(ast.parse((sources / file).read_text())):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "add_argument":
                words = [word.value for word in part.args if isinstance(word, ast.Constant)]
                found |= {word[2:] for word in words if isinstance(word, str) and word.startswith("--")}
            # These are registered from the fields of a class.
            if isinstance(part, ast.ClassDef) and part.name in ("BaseFrontendArgs", "FrontendArgs"):
                fields = [item.target for item in part.body if isinstance(item, ast.AnnAssign)]
                found |= {field.id.replace("_", "-") for field in fields if isinstance(field, ast.Name)}
    assert found == NAMES


@pytest.mark.parametrize("name", [*GPUS, "prose", "overridden"])
def test_every_argument_of_a_plan_arrives(plans: dict[str, Plan], parsed: dict[str, dict[str, Any]], name: str) -> None:
    for replica in plans[name]["replicas"]:
        values = values_of(parsed, f"plan-{name}-{replica['index']}")
        lost = {
            argument: (value, values.get(argument.replace("-", "_")))
            for argument, value in replica["engine_args"].items()
            if not arrived(argument, value, values)
        }
        assert not lost
        # Nothing else than the plan's arguments is set: no value slipped from one argument into another.
        named = {argument.replace("-", "_") for argument in replica["engine_args"]}
        assert differing(values, values_of(parsed, "defaults")) <= named


@pytest.mark.parametrize("name", GPUS)
def test_every_replica_of_a_plan_listens_on_loopback_on_its_own_port(
    plans: dict[str, Plan], parsed: dict[str, dict[str, Any]], name: str
) -> None:
    endpoints = [values_of(parsed, f"plan-{name}-{replica['index']}") for replica in plans[name]["replicas"]]
    assert [(one["host"], one["port"]) for one in endpoints] == [
        ("127.0.0.1", FIRST_PORT + index) for index in range(len(endpoints))
    ]


def test_the_2x_plan_is_the_observed_command_but_for_the_endpoint(parsed: dict[str, dict[str, Any]]) -> None:
    plan, observed = values_of(parsed, "plan-2x-0"), values_of(parsed, "observed-2x")
    assert differing(plan, observed) == OURS
    assert {name: plan[name] for name in OURS} == {
        "model": "/model",
        "model_tag": None,
        "served_model_name": ["under-test"],
        "host": "127.0.0.1",
        "port": FIRST_PORT,
        "shutdown_timeout": 240,
        "disable_uvicorn_access_log": True,
    }


def test_the_observed_2x_command_has_the_documents_values(parsed: dict[str, dict[str, Any]]) -> None:
    values = values_of(parsed, "observed-2x")
    assert {name: values[name] for name in ("model", "tensor_parallel_size", "max_model_len", "max_num_seqs")} == {
        "model": "deepseek-ai/DeepSeek-V4-Flash-0731",
        "tensor_parallel_size": 2,
        "max_model_len": 262_144,
        "max_num_seqs": 64,
    }
    assert values["speculative_config"] == {**DSPARK, "num_speculative_tokens": 5}
    assert values["kernel_config"]["moe_backend"] == "flashinfer_cutlass"
    assert values["compilation_config"]["cudagraph_mode"] == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("case", ["plan-8x-0", "plan-8x-1", "line-8x"])
def test_the_8x_profile_has_the_documents_values(parsed: dict[str, dict[str, Any]], case: str) -> None:
    values = values_of(parsed, case)
    intended = {
        "tensor_parallel_size": 4,
        "enable_expert_parallel": True,
        "kv_cache_dtype": "fp8",
        "block_size": 256,
        "kv_cache_memory_bytes": 18 * 2**30,
        "max_model_len": 1_048_576,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 16_384,
        "cudagraph_capture_sizes": [1, 8, 16, 32, 64, 128, 256, 512, 1024],
        "async_scheduling": True,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "enable_flashinfer_autotune": True,
        "tokenizer_mode": "deepseek_v41",
        "reasoning_parser": "deepseek_v41",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "deepseek_v41",
        "attention_backend": "FLASHINFER_MLA_SPARSE_DSV41",
        "moe_backend": "flashinfer_cutlass",
        "kv_offloading_backend": "native",
        "disable_uvicorn_access_log": True,
    }
    assert {name: values[name] for name in intended} == intended
    # 150 GB in GiB, and the head for code with its own seven tokens
    assert values["kv_offloading_size"] == pytest.approx(150e9 / 2**30, abs=0.05)
    speculation = dict(values["speculative_config"])
    assert speculation.pop("model").startswith("/")
    assert speculation == {**DSPARK, "num_speculative_tokens": 7}
    compilation = values["compilation_config"]
    assert (compilation["cudagraph_mode"], compilation["custom_ops"]) == ("FULL_AND_PIECEWISE", ["all"])


def test_the_8x_plan_sets_nothing_that_its_command_line_does_not(parsed: dict[str, dict[str, Any]]) -> None:
    plan, command = values_of(parsed, "plan-8x-0"), values_of(parsed, "line-8x")
    paths_and_endpoint = {"model", "model_tag", "served_model_name", "port", "shutdown_timeout", "speculative_config"}
    # packed Engram tables are ours: the line was written before their rounding was known
    assert differing(plan, command) <= paths_and_endpoint | {"kv_offloading_size", "engram_config"}


def test_three_draft_tokens_end_the_graphs_at_512_rows(parsed: dict[str, dict[str, Any]]) -> None:
    values = values_of(parsed, "plan-prose-0")
    assert values["speculative_config"]["num_speculative_tokens"] == 3
    assert values["cudagraph_capture_sizes"] == [1, 8, 16, 32, 64, 128, 256, 512]


def test_overrides_of_arguments_change_just_what_they_name(parsed: dict[str, dict[str, Any]]) -> None:
    changed, plan = values_of(parsed, "plan-overridden-0"), values_of(parsed, "plan-2x-0")
    whole = {"enable_prefix_caching", "max_logprobs", "generation_config", "compilation_config", "kernel_config"}
    assert differing(changed, plan) == whole
    assert (changed["enable_prefix_caching"], changed["max_logprobs"], changed["generation_config"]) == (
        False,
        -1,
        "vllm",
    )
    for name, key, value in (
        ("compilation_config", "cudagraph_mode", "PIECEWISE"),
        ("kernel_config", "enable_jit_warmup", False),
    ):
        assert changed[name] == {**plan[name], key: value}


def test_sizes_of_the_key_value_cache(parsed: dict[str, dict[str, Any]]) -> None:
    assert values_of(parsed, "18G")["kv_cache_memory_bytes"] == 19_327_352_832
    assert values_of(parsed, "18g")["kv_cache_memory_bytes"] == 18_000_000_000


def test_a_flag_is_switched_off_by_its_other_name(parsed: dict[str, dict[str, Any]]) -> None:
    values = values_of(parsed, "no-flag")
    assert values["enable_prefix_caching"] is False
    assert values["async_scheduling"] is False


def test_the_engine_reads_false_as_nothing(parsed: dict[str, dict[str, Any]]) -> None:
    """Why a plan must never write `false`: the engine drops it, whatever the name, and says nothing."""
    assert differing(values_of(parsed, "false"), values_of(parsed, "defaults")) == set()


@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_refuses(parsed: dict[str, dict[str, Any]], name: str) -> None:
    assert REFUSED[name][1] in parsed[f"refused-{name}"].get("error", "")


def test_the_engine_refuses_a_file_without_a_model(parsed: dict[str, dict[str, Any]]) -> None:
    assert "No model specified" in parsed["no-model"].get("error", "")
