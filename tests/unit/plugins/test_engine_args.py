"""Arguments of the engine: what an operator may give, and the whole set."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.engine_args import (
    OWNED,
    check_engine_args,
    engine_args,
    normalise,
    speculative_config,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.samples import cpu_profile


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
        "kernel-config.backend": None,
    }
    assert check_engine_args(good | {"enforce_eager": False, "rope-theta": 1e-6}) == []


def test_all_wrong_arguments_are_named_at_once() -> None:
    assert len(check_engine_args({"port": 1, "api-key": "x", "dtype": "'auto'", "a b": 1})) == 4


@given(st.dictionaries(st.text() | st.integers(), st.text() | st.dates() | st.floats() | st.none(), max_size=5))
def test_any_arguments_get_sentences_or_none(args: dict[Any, Any]) -> None:
    assert all(problem.startswith("engine_args: ") for problem in check_engine_args(args))


def test_speculation() -> None:
    assert speculative_config("none", 7) is None
    assert speculative_config("mtp", 1) == {"method": "mtp", "num_speculative_tokens": 1}
    ngram = speculative_config("ngram", 7)
    assert ngram == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


def test_the_whole_set_of_the_cpu_profile() -> None:
    profile = cpu_profile()
    extra = {"--max_logprobs": 5, "enforce_eager": False}
    args = engine_args(profile["settings"] | {"engine_args": extra}, profile["engine_args"], "/model", 8001)
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
        "speculative-config": speculative_config("ngram", 7),
        "max-logprobs": 5,
        # the operator's word is the last
        "enforce-eager": False,
    }
    without = engine_args(profile["settings"] | {"speculative_method": "none"}, {}, "/model", 8000)
    assert "speculative-config" not in without


def test_a_profile_sets_nothing_that_the_plan_decides() -> None:
    assert not {normalise(name) for name in cpu_profile()["engine_args"]} & set(OWNED)
