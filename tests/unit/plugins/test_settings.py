"""Overrides: every wrong one gets a sentence that says what is wrong and what to write."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import (
    SETTINGS,
    SettingsError,
    podman_bytes,
    recipe_environment,
    resolve_settings,
    vllm_bytes,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.samples import cpu_profile, profile

DEFAULTS: dict[str, Any] = cpu_profile()["settings"]
ENVIRONMENT = {item.environment: name for name, item in SETTINGS.items() if item.environment}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


class Text(str):
    """Ansible hands in subclasses like this one."""


class Number(int):
    """Ansible hands in subclasses like this one."""


def problems(overrides: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        resolve_settings(DEFAULTS, overrides)
    assert str(caught.value) == "; ".join(caught.value.problems)
    return caught.value.problems


def test_the_profile_has_a_good_value_for_every_setting() -> None:
    for name in ("cpu", "2x", "8x"):
        defaults = profile(name)["settings"]
        assert resolve_settings(defaults, {}) == defaults
        # what every node needs, whatever serves on it
        assert {"replicas", "cpus_per_replica", "max_model_len", "kv_cache_memory", "container_memory"} <= set(defaults)
        assert {"shm_size", "first_port", "balancer_port", "start_timeout", "engine_args"} <= set(defaults)


def test_every_setting_is_in_a_profile() -> None:
    used = {setting for name in ("cpu", "2x", "8x") for setting in profile(name)["settings"]}
    assert used == set(SETTINGS)


def test_every_setting_is_described() -> None:
    for name, setting in SETTINGS.items():
        assert setting.description, name
        assert setting.unit or setting.kind in ("text", "mapping", "flag"), name


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("replica", "replicas"),
        ("max_model_length", "max_model_len"),
        ("max-num-seqs", "max_num_seqs"),
        ("kv_cache_mem", "kv_cache_memory"),
        ("balancer_adress", "balancer_address"),
        ("engine_arguments", "engine_args"),
        # the recipe's own names are known, so the nearest one may be one of them, in any case
        ("SPEC_KK", "SPEC_K"),
        ("MAX_NUM_SEQ", "MAX_NUM_SEQS"),
        ("kv_mem", "KV_MEM"),
        ("CONTAINER_MEMORY", "container_memory"),
    ],
)
def test_an_unknown_setting_is_named_with_the_nearest_one(key: str, nearest: str) -> None:
    assert problems({key: 1}) == [f"unknown setting '{key}'; the nearest known one is '{nearest}'"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"replicas": "2"}, "replicas: '2' is str, a whole number of replicas is needed; write replicas: 8"),
        (
            {"replicas": Text("2")},
            "replicas: '2' is str, a whole number of replicas is needed; write replicas: 8",
        ),
        (
            {"replicas": True},
            "replicas: True is bool, a whole number of replicas is needed; write replicas: 8",
        ),
        (
            {"drain_timeout": 1.5},
            "drain_timeout: 1.5 is float, a whole number of seconds is needed; write drain_timeout: 8",
        ),
        (
            {"drain_timeout": None},
            "drain_timeout: None is empty, a whole number of seconds is needed; write drain_timeout: 8",
        ),
        ({"replicas": 0}, "replicas: 0 is outside 1 to 64 replicas"),
        ({"replicas": 65}, "replicas: 65 is outside 1 to 64 replicas"),
        ({"first_port": 65536}, "first_port: 65536 is outside 1 to 65535 TCP port"),
        (
            {"served_model_name": Number(5)},
            "served_model_name: 5 is int, a text is needed; put it in quotes",
        ),
        ({"served_model_name": ""}, "served_model_name: '' is empty, a text is needed; put it in quotes"),
        ({"served_model_name": ["a"]}, "served_model_name: ['a'] is list, a text is needed; put it in quotes"),
        (
            {"kv_cache_memory": "18GiB"},
            "kv_cache_memory: '18GiB' is no size that vLLM takes; write 18G for 18 GiB or 18g for 18 billion bytes",
        ),
        (
            {"kv_cache_memory": "18GB"},
            "kv_cache_memory: '18GB' is no size that vLLM takes; write 18G for 18 GiB or 18g for 18 billion bytes",
        ),
        (
            {"kv_cache_memory": 18},
            "kv_cache_memory: 18 is int, a text is needed; put it in quotes",
        ),
        (
            {"container_memory": "18GiB"},
            "container_memory: '18GiB' is no size that podman takes; write a whole number and b, k, m or g, like 4g",
        ),
        (
            {"container_memory": "1.5g"},
            "container_memory: '1.5g' is no size that podman takes; write a whole number and b, k, m or g, like 4g",
        ),
        ({"speculative_method": "medusa"}, "speculative_method: 'medusa' is not one of none, ngram, mtp"),
        (
            {"engine_args": ["--a"]},
            "engine_args: ['--a'] is list, a mapping is needed; write engine_args: {} for none",
        ),
        ({"engine_args": None}, "engine_args: None is empty, a mapping is needed; write engine_args: {} for none"),
        (
            {"SPEC_K": "7"},
            "speculative_tokens: '7' is str, a whole number of tokens is needed; write speculative_tokens: 8",
        ),
        (
            {"SPEC_K": 7, "speculative_tokens": 7},
            "'speculative_tokens' and 'SPEC_K' are the same setting; give one of them",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_to_write(overrides: dict[str, Any], problem: str) -> None:
    assert problems(overrides) == [problem]


def test_all_wrong_settings_are_named_at_once() -> None:
    found = problems({"replicas": "2", "nonsense": 1, "kv_cache_memory": "18GiB", "SPEC_K": 0})
    assert [text.split(":")[0].split(" '")[0] for text in found] == [
        "unknown setting",
        "replicas",
        "kv_cache_memory",
        "speculative_tokens",
    ]


def test_a_profile_with_an_unknown_setting_is_named() -> None:
    with pytest.raises(SettingsError, match="the profile has a value for 'nonsense', which is no setting"):
        resolve_settings({**DEFAULTS, "nonsense": 1}, {})


@pytest.mark.parametrize("key", ["kv_offload_gb", "KV_OFFLOAD_GB", "drafter"])
def test_a_setting_of_another_profile_is_named(key: str) -> None:
    assert problems({key: 1}) == [f"'{key}' means nothing to this profile; leave it out"]


def test_the_profile_itself_is_no_setting() -> None:
    assert problems({"PROFILE": "8x"}) == ["PROFILE: '8x' cannot be set here; set serving_plan_profile"]


def example(setting: Any) -> Any:
    examples = {"vllm_size": "9G", "podman_size": "9g", "flag": True, "number": 0.5, "int": 32}
    return setting.choices[0] if setting.choices else examples[setting.kind]


@pytest.mark.parametrize(("environment", "name"), ENVIRONMENT.items())
def test_the_recipes_names_are_taken(environment: str, name: str) -> None:
    value = example(SETTINGS[name])
    where = profile("8x")["settings"]
    assert resolve_settings(where, {environment: value})[name] == value


@pytest.mark.parametrize(("given", "value"), [(0, False), (1, True), ("0", False), ("1", True), (True, True)])
def test_a_switch_of_the_recipe_is_0_or_1(given: Any, value: bool) -> None:
    assert resolve_settings(profile("8x")["settings"], {"DS41_IDX_CHUNK": given})["chunked_indexer"] is value


@pytest.mark.parametrize("given", [0, 1, "1", "yes", None])
def test_by_our_name_a_switch_is_true_or_false(given: Any) -> None:
    with pytest.raises(SettingsError, match="true or false is needed; write chunked_indexer: true"):
        resolve_settings(profile("8x")["settings"], {"chunked_indexer": given})


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"gpus": "0000:01:00.0"}, "gpus: '0000:01:00.0' is no list of PCI addresses; write gpus: [] for none"),
        ({"gpus": [1]}, "gpus: [1] is no list of PCI addresses"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization: 1.2 is outside 0 to 1 share"),
        ({"gpu_memory_utilization": "0.9"}, "is str, a number of share is needed; write gpu_memory_utilization: 0.93"),
        ({"drafter": "medusa"}, "drafter: 'medusa' is not one of code, released, none"),
        ({"tensor_parallel_size": "auto"}, "tensor_parallel_size: 'auto' is str, a whole number of GPUs is needed"),
    ],
)
def test_a_wrong_value_of_a_gpu_profile_is_named(overrides: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve_settings(profile("2x")["settings"], overrides)
    (found,) = caught.value.problems
    assert problem in found


def test_a_long_value_is_shown_in_part() -> None:
    (problem,) = problems({"kv_cache_memory": "9" * 5000})
    assert len(problem) < 200


def test_a_text_of_several_lines_is_refused() -> None:
    (problem,) = problems({"served_model_name": "tiny\nother"})
    assert problem == ("served_model_name: 'tiny\\nother' holds control characters; write it in one line of plain text")


def test_auto_is_taken_where_the_profile_has_it() -> None:
    assert resolve_settings(profile("2x")["settings"], {"shm_size": "auto"})["shm_size"] == "auto"
    assert "is no size that podman takes" in problems({"shm_size": "auto"})[0]


@pytest.mark.parametrize("size", ["1.5G", "18GiB", "18GB", "0.5", "-1g", "18 G", "٣G", "9" * 16])
def test_sizes_that_the_engines_parser_refuses(size: str) -> None:
    assert "is no size that vLLM takes" in problems({"kv_cache_memory": size})[0]


@pytest.mark.parametrize("size", ["1.5g", "18G", "18g", "64M", "1048576"])
def test_sizes_that_the_engines_parser_takes(size: str) -> None:
    assert resolve_settings(DEFAULTS, {"kv_cache_memory": size})["kv_cache_memory"] == size


def test_the_environment_has_the_recipes_names_and_spelling() -> None:
    found = recipe_environment(resolve_settings(profile("8x")["settings"], {"chunked_indexer": False}))
    assert found["KV_MEM"] == "18G"
    assert found["DS41_IDX_CHUNK"] == "0"
    assert found["DS41_ROWTOPK"] == "1"
    # what the plan works out is no value of the recipe
    assert "KV_MEM" not in recipe_environment(profile("2x")["settings"])


@pytest.mark.parametrize(
    ("size", "size_in_bytes"), [("512", 512), ("512b", 512), ("2k", 2048), ("3m", 3 * 2**20), ("4g", 4 * 2**30)]
)
def test_podmans_sizes_are_binary(size: str, size_in_bytes: int) -> None:
    assert podman_bytes(size) == size_in_bytes


@pytest.mark.parametrize(
    ("size", "size_in_bytes"),
    [
        ("18G", 19_327_352_832),
        ("18g", 18_000_000_000),
        ("1.5g", 1_500_000_000),
        ("64M", 67_108_864),
        ("25.6k", 25_600),
        ("2K", 2_048),
        ("1T", 1_099_511_627_776),
        ("19327352832", 19_327_352_832),
    ],
)
def test_the_engines_sizes_are_decimal_or_binary(size: str, size_in_bytes: int) -> None:
    assert vllm_bytes(size) == size_in_bytes
    assert resolve_settings(DEFAULTS, {"kv_cache_memory": size})["kv_cache_memory"] == size


@given(st.dictionaries(st.sampled_from([*SETTINGS, *ENVIRONMENT]) | st.text() | st.integers(), ANYTHING, max_size=5))
def test_any_overrides_are_settings_or_the_named_error(overrides: dict[Any, Any]) -> None:
    try:
        settings = resolve_settings(DEFAULTS, overrides)
    except SettingsError as error:
        assert error.problems
        assert all(error.problems)
    else:
        assert set(settings) == set(DEFAULTS)
        assert podman_bytes(settings["container_memory"]) > 0
