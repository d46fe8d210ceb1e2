"""Arguments of the engine: what an operator may give, and the whole set."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import (
    GONE,
    OWNED,
    OWNED_FAMILIES,
    check_engine_args,
    config_lines,
    engine_args,
    lay_over,
    normalise,
    read_value,
    said_twice,
    speculative_config,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.vllm_arguments import NAMES, unknown_arguments
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.samples import cpu_profile
from tests.unit.plugins.samples import profile as shipped

NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@pytest.mark.parametrize(
    "given_name", ["max-logprobs", "max_logprobs", "--max-logprobs", "--max_logprobs", " max-logprobs "]
)
def test_every_spelling_of_a_name_is_one_argument(given_name: str) -> None:
    assert normalise(given_name) == "max-logprobs"


@pytest.mark.parametrize("name", ["api-ke", "max_model", "speculative-config.num_speculative_tokens"])
def test_the_beginning_or_a_part_of_an_argument_of_the_plan_is_refused_too(name: str) -> None:
    (problem,) = check_engine_args({name: "x"})
    assert f"'{name}' is not for overriding" in problem


@pytest.mark.parametrize("name", OWNED)
def test_what_the_plan_decides_is_not_for_overriding(name: str) -> None:
    for spelling in (name, f"--{name}", name.replace("-", "_")):
        assert check_engine_args({spelling: "x"}) == [f"engine_args: '{spelling}' is not for overriding; {OWNED[name]}"]


# What each pins, splits or takes is the plan's, in whatever way it is spelled.
FAMILIES = [
    ("numa-bind", "cpuset"),
    ("numa_bind", "cpuset"),
    ("--numa_bind_nodes", "cpuset"),
    ("numa-bind-cpus", "cpuset"),
    ("no-numa-bind", "cpuset"),
    ("numa", "cpuset"),
    ("data-parallel-size", "set replicas"),
    ("data_parallel_backend", "set replicas"),
    ("spec-tokens", "set speculative_tokens"),
    ("spec_method", "set speculative_tokens"),
    ("spec-model", "drafter"),
    ("cpu-offload-gb", "weights are in GPU memory"),
    ("cpu_offload_params", "weights are in GPU memory"),
    ("offload-backend", "weights are in GPU memory"),
    ("offload-group-size", "weights are in GPU memory"),
]


@pytest.mark.parametrize(("name", "why"), FAMILIES)
def test_a_whole_family_of_arguments_is_the_plans(name: str, why: str) -> None:
    (problem,) = check_engine_args({name: "1"})
    assert problem.startswith(f"engine_args: '{name}' is not for overriding; ")
    assert why in problem


def test_every_owned_name_is_one_of_the_engine() -> None:
    assert OWNED.keys() - {"tp"} <= NAMES
    assert all(any(name.startswith(family) for name in NAMES) for family in OWNED_FAMILIES)
    assert not GONE.keys() & NAMES


def test_an_argument_is_refused_for_its_own_name_and_not_for_the_beginning_of_another() -> None:
    refused = {name for name in NAMES if check_engine_args({name: "x"})}
    assert refused == {name for name in NAMES if name in OWNED or name.startswith(tuple(OWNED_FAMILIES))}


@pytest.mark.parametrize(
    ("name", "instead"),
    [("swap-space", "set kv_offload_gb"), ("--disable_log_requests", "leave it out"), ("rope-scaling", "hf-overrides")],
)
def test_an_argument_that_the_parser_has_no_more_is_refused(name: str, instead: str) -> None:
    (problem,) = check_engine_args({name: 4})
    assert problem.startswith(f"engine_args: '{name}' is gone from vLLM 0.33.0; ") and instead in problem


def test_a_name_that_the_parser_has_not_is_told_with_the_nearest() -> None:
    assert unknown_arguments(["max-logprobs", "no-enable-eplb", "kernel-config.moe_backend", "no-numa-bind"]) == []
    (typo, short) = unknown_arguments(["max-logprobz", "max-logpr"])
    assert "'max-logprobz' is no argument of vLLM 0.33.0" in typo and typo.endswith("the nearest one is 'max-logprobs'")
    # The parser takes the beginning of a name; the plan does not know it for what it means.
    assert short.endswith("the nearest one is 'max-logprobs'")


@pytest.mark.parametrize(
    ("given_args", "names"),
    [
        (
            {"attention-config.backend": "FLASHINFER_MLA_SPARSE_DSV41"},
            ("attention-backend", "attention-config.backend"),
        ),
        ({"kernel-config": {"moe_backend": "marlin"}}, ("moe-backend", "kernel-config.moe_backend")),
        (
            {"kernel_config.enable-flashinfer-autotune": False},
            ("enable-flashinfer-autotune", "kernel-config.enable_flashinfer_autotune"),
        ),
        (
            {"structured-outputs-config": {"reasoning_parser": "none"}},
            ("reasoning-parser", "structured-outputs-config.reasoning_parser"),
        ),
    ],
)
def test_a_thing_by_two_names_is_refused(given_args: dict[str, Any], names: tuple[str, str]) -> None:
    (problem,) = said_twice(shipped("8x")["engine_args"], given_args)
    assert f"'{names[0]}' and '{names[1]}' are the same thing" in problem
    assert problem.endswith(f"give it by the name '{names[0]}'")


def test_a_thing_by_two_names_is_given_as_the_profile_has_it() -> None:
    (problem,) = said_twice(shipped("2x")["engine_args"], {"moe-backend": "marlin"})
    assert problem.endswith("give it by the name 'kernel-config.moe_backend'")
    for name in ("cpu", "2x", "8x"):
        assert said_twice(shipped(name)["engine_args"], {}) == []
    assert said_twice(shipped("8x")["engine_args"], {"moe-backend": "marlin"}) == []


@pytest.mark.parametrize("value", ["sk-a-real-secret", "'sk-a-real-secret'", {1: "sk-a-real-secret"}])
def test_the_engines_key_is_never_an_argument_and_never_shown(value: Any) -> None:
    (problem,) = check_engine_args({"--api-key": value})
    assert "'--api-key' is not for overriding" in problem
    assert "made on the node" in problem
    assert "sk-a-real-secret" not in problem


@pytest.mark.parametrize("value", ['\'{"method":"mtp"}\'', '"quoted"', "'"])
def test_a_quoted_value_is_refused(value: str) -> None:
    (problem,) = check_engine_args({"hf-overrides": value})
    assert f"the value of 'hf-overrides' begins with a quote: {value!r}" in problem
    assert "give the bare text, and JSON as a YAML mapping" in problem


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (' \'{"method":"mtp"}\'', ' \'{"method":"mtp"}\''),
        ({"cudagraph_mode": "'FULL'"}, "'FULL'"),
        ({"pass_config": {"names": ["a", ' "b"']}}, ' "b"'),
        ('{"cudagraph_mode": "\'FULL\'"}', "'FULL'"),
        ({'"cudagraph_mode"': "FULL"}, '"cudagraph_mode"'),
        (["name=path", "'name=path'"], "'name=path'"),
    ],
)
def test_a_quote_is_found_after_blanks_and_inside(value: Any, part: str) -> None:
    (problem,) = check_engine_args({"compilation-config": value})
    assert "the value of 'compilation-config' " in problem
    assert f"begins with a quote: {part!r}" in problem


@pytest.mark.parametrize(
    "value", ['{\\"cudagraph_mode\\": \\"FULL\\"}', "{'cudagraph_mode':'FULL'}", "{cudagraph_mode: FULL}", "[1, 2 ]]"]
)
def test_a_text_that_was_to_be_json_is_refused(value: str) -> None:
    (problem,) = check_engine_args({"compilation-config": value})
    assert f"is {value!r}, which is no JSON; write it as a YAML mapping or list" in problem


@pytest.mark.parametrize("value", ["{{ messages }}", "{% for m in messages %}x{% endfor %}", "[::1]:8000", "{# a #}x"])
def test_a_text_that_only_begins_like_json_stays_one(value: str) -> None:
    assert check_engine_args({"chat-template": value}) == []
    assert lay_over({}, {"chat-template": value}) == {"chat-template": value}


def test_json_is_read_as_the_mapping_that_it_is() -> None:
    text = ' {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2]}'
    (problem,) = check_engine_args({"compilation-config": text})
    assert "cudagraph_capture_sizes in 'compilation-config' is not for overriding" in problem
    base: dict[str, Any] = {"compilation-config": {"cudagraph_mode": "FULL", "pass_config": {"a": 1}}}
    laid = lay_over(base, {"compilation-config.pass_config": '{"a": 2}'})
    assert laid == {"compilation-config": {"cudagraph_mode": "FULL", "pass_config": {"a": 2}}}
    assert lay_over(base, {"compilation-config": '{"mode": 3}'}) == {"compilation-config": {"mode": 3}}
    assert read_value("{broken") == "{broken" and read_value("18G") == "18G"


@pytest.mark.parametrize("value", [["https://a.example", "*"], '["https://a.example", "*"]'])
def test_the_lists_that_the_engine_reads_as_json_are_written_so(value: Any) -> None:
    assert check_engine_args({"allowed_origins": value}) == []
    assert lay_over({}, {"allowed_origins": value}) == {"allowed-origins": '["https://a.example","*"]'}


@pytest.mark.parametrize("name", [8, "", "--", "a b", "a:b", "#a", "max\nlogprobs", None])
def test_what_is_no_name_is_refused(name: Any) -> None:
    (problem,) = check_engine_args({name: 1})
    assert f"'{name}' is no name of an argument" in problem


def test_one_argument_in_two_spellings_is_refused() -> None:
    assert check_engine_args({"max_logprobs": 5, "--max-logprobs": 6}) == [
        "engine_args: '--max-logprobs' and 'max_logprobs' are the same argument; give one of them"
    ]


@pytest.mark.parametrize(
    "value",
    [
        datetime.date(2030, 1, 1),
        {"inner": [datetime.datetime(2030, 1, 1)]},
        {1: "a"},
        {"a", "b"},
        b"raw",
        float("nan"),
        [float("inf")],
    ],
)
def test_a_value_without_a_json_text_is_refused(value: Any) -> None:
    (problem,) = check_engine_args({"hf-overrides": value})
    assert "the value of 'hf-overrides' holds something that JSON has not" in problem


def test_what_is_in_order_passes() -> None:
    good = {
        "max-logprobs": 5,
        "compilation-config": {"mode": 3, "sizes": [1, 8]},
        "dtype": "auto",
        "kernel-config.backend": "auto",
        "allowed-origins": ["*"],
    }
    assert check_engine_args(good | {"enforce_eager": False, "watermark": 1e-6}) == []


def test_all_wrong_arguments_are_named_at_once() -> None:
    assert len(check_engine_args({"port": 1, "api-key": "x", "dtype": "'auto'", "a b": 1})) == 4


@given(st.dictionaries(st.text() | st.integers(), st.text() | st.dates() | st.floats() | st.none(), max_size=5))
def test_any_arguments_get_sentences_or_none(args: dict[Any, Any]) -> None:
    assert all(problem.startswith("engine_args: ") for problem in check_engine_args(args))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "is empty, which the engine reads as the text 'None'"),
        ("false", "is the text 'false', which the engine takes for something else; write it without quotes"),
        ("True", "is the text 'True'"),
        ("-1", "does not take for a value"),
        ("", "does not take for a value"),
        ([], "lists of texts and numbers, with one at least"),
        ([{"name": "a"}], "lists of texts and numbers"),
        ([True], "lists of texts and numbers"),
    ],
)
def test_a_value_that_the_engines_parser_takes_for_something_else_is_refused(value: Any, why: str) -> None:
    (problem,) = check_engine_args({"lora-modules": value})
    assert problem.startswith("engine_args: the value of 'lora-modules' ")
    assert why in problem


def test_a_mapping_and_a_part_of_it_are_refused() -> None:
    (problem,) = check_engine_args({"kernel_config": {"a": 1}, "kernel-config.moe_backend": "auto"})
    assert problem == "engine_args: 'kernel-config.moe_backend' is also in 'kernel_config'; give one of them"
    assert len(check_engine_args({"kernel-config.moe_backend": "auto", "kernel_config": {"a": 1}})) == 1


@pytest.mark.parametrize("name", ["no-enable-expert-parallel", "--no_enable_expert_parallel"])
def test_the_opposite_of_an_argument_of_the_plan_is_refused(name: str) -> None:
    (problem,) = check_engine_args({name: True})
    assert problem == f"engine_args: '{name}' is not for overriding; set expert_parallel"


@pytest.mark.parametrize(
    "args",
    [
        {"compilation-config": {"cudagraph_capture_sizes": [1, 2]}},
        {"compilation_config.cudagraph_capture_sizes": [1, 2]},
        {"compilation-config.cudagraph-capture-sizes": [1]},
    ],
)
def test_graph_sizes_by_another_way_are_refused_too(args: dict[str, Any]) -> None:
    (problem,) = check_engine_args(args)
    assert "cudagraph_capture_sizes in" in problem
    assert "they follow from max_num_seqs and speculative_tokens" in problem


def test_a_part_of_a_mapping_is_laid_into_it() -> None:
    base: dict[str, Any] = {"compilation-config": {"cudagraph_mode": "FULL", "custom_ops": ["all"]}, "dtype": "auto"}
    assert lay_over(base, {"--compilation_config.cudagraph-mode": "PIECEWISE", "kernel-config.a.b": 1}) == {
        "compilation-config": {"cudagraph_mode": "PIECEWISE", "custom_ops": ["all"]},
        "kernel-config": {"a": {"b": 1}},
        "dtype": "auto",
    }
    assert lay_over(base, {"compilation-config": {"mode": 3}})["compilation-config"] == {"mode": 3}
    assert base["compilation-config"]["cudagraph_mode"] == "FULL"


def test_a_switch_turned_off_is_spelled_as_the_engine_takes_it() -> None:
    """In its configuration file `name: false` changes nothing."""
    assert config_lines(
        {"async-scheduling": False, "enforce-eager": True, "aggregate-engine-logging": False, "seed": 0}
    ) == {
        "no-async-scheduling": True,
        "enforce-eager": True,
        "seed": 0,
    }


def test_speculation() -> None:
    assert speculative_config({"speculative_method": "none", "speculative_tokens": 7}, "") is None
    assert speculative_config({"speculative_method": "mtp", "speculative_tokens": 1}, "") == {
        "method": "mtp",
        "num_speculative_tokens": 1,
    }
    assert speculative_config({"speculative_method": "ngram", "speculative_tokens": 7}, "") == NGRAM


def test_speculation_with_a_head() -> None:
    wanted = {"method": "dspark", "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}
    assert speculative_config({"drafter": "none", "speculative_tokens": 5}, "") is None
    assert speculative_config({"drafter": "released", "speculative_tokens": 5}, "") == wanted
    with_folder = speculative_config({"drafter": "code", "speculative_tokens": 5}, "/drafter")
    assert with_folder == {**wanted, "model": "/drafter"}


def test_the_whole_set_of_the_cpu_profile() -> None:
    profile = cpu_profile()
    extra = {"--max_logprobs": 5, "enforce_eager": False}
    args = engine_args(profile["settings"] | {"engine_args": extra}, profile["engine_args"], 8001, [], 0, "")
    assert args == {
        "model": "/model",
        "served-model-name": "tiny",
        "host": "127.0.0.1",
        "port": 8001,
        "max-model-len": 2048,
        "max-num-seqs": 16,
        "max-num-batched-tokens": 2048,
        "kv-cache-memory-bytes": "64M",
        "shutdown-timeout": 60,
        "distributed-executor-backend": "uni",
        "disable-uvicorn-access-log": True,
        "speculative-config": NGRAM,
        "max-logprobs": 5,
        # the operator's word is the last
        "enforce-eager": False,
    }
    without = engine_args(profile["settings"] | {"speculative_method": "none"}, {}, 8000, [], 0, "")
    assert "speculative-config" not in without


@pytest.mark.parametrize("name", ["cpu", "2x", "8x"])
def test_a_profile_sets_nothing_that_the_plan_decides(name: str) -> None:
    names = {normalise(key) for key in shipped(name)["engine_args"]}
    assert not names & set(OWNED)
    assert unknown_arguments(names) == []
    assert check_engine_args(shipped(name)["engine_args"]) == []
