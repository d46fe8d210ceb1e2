"""Arguments of the engine: what an operator may give, and the whole set."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import (
    OWNED,
    check_engine_args,
    config_lines,
    engine_args,
    lay_over,
    normalise,
    speculative_config,
)
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
    assert check_engine_args(good | {"enforce_eager": False, "rope-theta": 1e-6}) == []


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
    assert config_lines({"async-scheduling": False, "enforce-eager": True, "headless": False, "seed": 0}) == {
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
    assert not {normalise(key) for key in shipped(name)["engine_args"]} & set(OWNED)
    assert check_engine_args(shipped(name)["engine_args"]) == []
