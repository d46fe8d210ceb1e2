"""The sums on observations with known answers; what gives no number says why."""

from __future__ import annotations

import math

import pytest
from gpu_node_bench import arithmetic, engine_counters
from gpu_node_bench.arithmetic import Calibration, Drafts
from gpu_node_bench.errors import DisturbedError, NoFigureError
from gpu_node_bench.figures import figure, settle
from gpu_node_bench.request import Options
from hypothesis import given
from hypothesis import strategies as st


def test_two_points_cancel_what_comes_before_the_first_token() -> None:
    """276 tok/s, with a prefill of 10.24 s in both."""
    short, long = 10.24 + 64 / 276, 10.24 + 896 / 276
    assert arithmetic.two_point(64, short, 896, long) == pytest.approx(276.0)


@given(st.floats(1, 5000), st.floats(0, 100), st.integers(1, 500), st.integers(501, 2000))
def test_two_points_give_the_speed_whatever_the_prefill(speed: float, prefill: float, one: int, two: int) -> None:
    if (two - one) / speed > arithmetic.LEAST_DIFFERENCE_S:
        found = arithmetic.two_point(one, prefill + one / speed, two, prefill + two / speed)
        assert found == pytest.approx(speed, rel=1e-6)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((64, 1.0, 64, 2.0), "two lengths"),
        ((896, 1.0, 64, 2.0), "two lengths"),
        ((64, 2.0, 896, 1.0), "gives no speed"),
        ((64, 1.0, 896, 1.0), "gives no speed"),
        ((64, 1.0, 896, 1.01), "gives no speed"),
        ((64, 1.0, 896, math.inf), "gives no speed"),
        ((64, 1.0, 896, math.nan), "gives no speed"),
    ],
)
def test_two_points_that_give_no_speed_are_refused(points: tuple[int, float, int, float], words: str) -> None:
    with pytest.raises(NoFigureError, match=words):
        arithmetic.two_point(*points)


def test_mean_and_spread() -> None:
    found = arithmetic.summary([270.0, 276.0, 282.0])
    assert found.mean == 276.0
    assert found.spread == pytest.approx(12 / 276)


def test_runs_that_are_too_far_apart_are_no_figure() -> None:
    made = settle(figure("a", "decode/code", "decode", Options()), [270.0, 276.0, 282.0], 0.07)
    assert (made["value"], made["spread"]) == (276.0, pytest.approx(12 / 276))
    with pytest.raises(DisturbedError, match=r"differ by 4\.3% of their mean, more than 4%: 270, 276, 282"):
        settle(made, [270.0, 276.0, 282.0], 0.04)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf]])
def test_runs_without_a_number_have_no_mean(values: list[float]) -> None:
    with pytest.raises(NoFigureError):
        arithmetic.summary(values)


def test_acceptance_of_the_published_run() -> None:
    """48.6%, 2.43 of each 5-token draft."""
    found = arithmetic.acceptance(Drafts(1000, 5000, 2430, (800, 600, 500, 300, 230)))
    assert (found.rate, found.per_draft, found.drafted_per_draft) == (0.486, 2.43, 5.0)
    assert found.at == (0.8, 0.6, 0.5, 0.3, 0.23)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Drafts(0, 0, 0, ()), "drafted nothing"),
        (Drafts(10, 50, 51, ()), "disagree"),
        (Drafts(10, 50, -1, ()), "disagree"),
        (Drafts(10, 50, 20, (10, 5)), "20 tokens accepted, 15 by position"),
        (Drafts(10, 50, 20, (11, 9)), "more often than the 10 drafts"),
    ],
)
def test_counters_that_disagree_give_no_acceptance(seen: Drafts, words: str) -> None:
    with pytest.raises(NoFigureError, match=words):
        arithmetic.acceptance(seen)


def test_lengths_stay_where_they_fit_and_shrink_with_the_window() -> None:
    lengths = (107_016, 211_722)
    assert arithmetic.scaled_lengths(lengths, 262_144, 1_048_576, 1) == list(lengths)
    assert arithmetic.scaled_lengths(lengths, 262_144, 262_144, 1) == list(lengths)
    assert arithmetic.scaled_lengths(lengths, 262_144, 2048, 1) == [836, 1654]
    assert arithmetic.scaled_lengths((300_000,), 262_144, 2048, 1) == [2047]


def calibrate(**changed: int) -> Calibration:
    counts = {"empty": 13, "one": 73, "three": 193, "filled": 29} | changed
    return arithmetic.calibrate(**counts, fillers=16, words=60, per_word=(0.8, 3.0))


@given(st.integers(13, 300_000))
def test_a_calibrated_prompt_has_exactly_that_many_tokens(tokens: int) -> None:
    calibration = calibrate()
    blocks, fillers = calibration.parts(tokens)
    assert calibration.fixed + blocks * calibration.block + fillers == tokens
    assert 0 <= fillers < calibration.block


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"three": 192}, "has 60 tokens and two more have 119"),
        ({"filled": 45}, "16 filler words have 32 tokens"),
        ({"one": 373, "three": 1093}, "6.00 tokens a word"),
        ({"one": 33, "three": 73}, "0.33 tokens a word"),
    ],
)
def test_a_tokenizer_that_is_another_one_is_noticed(changed: dict[str, int], words: str) -> None:
    with pytest.raises(NoFigureError, match=f"tokenizer mismatch: .*{words}"):
        calibrate(**changed)


def test_a_prompt_cannot_be_shorter_than_its_frame() -> None:
    with pytest.raises(NoFigureError, match="at least 13 tokens here"):
        calibrate().parts(12)


PAGE = """\
# HELP vllm:num_requests_running x
process_start_time_seconds {started}
vllm:num_requests_running{{engine="0"}} 1.0
vllm:num_requests_waiting{{engine="0"}} 2.0
vllm:request_success_total{{engine="0",finished_reason="length"}} {done}
vllm:request_success_total{{engine="0",finished_reason="stop"}} 1.0
vllm:prompt_tokens_total{{engine="0"}} 1e+03
vllm:generation_tokens_total{{engine="0"}} 500.0
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {tokens}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
"""


def page(done: int = 5, scale: int = 1, started: float = 1.0) -> str:
    counts = {"drafts": 10, "tokens": 20, "accepted": 12, "first": 8, "second": 4}
    return PAGE.format(done=done, started=started, **{name: count * scale for name, count in counts.items()})


def test_counters_of_several_engines_are_added_and_their_difference_is_taken() -> None:
    before, after = engine_counters.counters([page(), page()]), engine_counters.counters([page(8), page(9, scale=3)])
    assert (before.running, before.waiting, before.requests, before.prompt_tokens) == (2, 4, 12, 2000)
    moved = engine_counters.moved(before, after)
    assert moved.requests == 7
    assert moved.speculation == Drafts(20, 40, 24, (16, 8))


def test_a_restarted_engine_gives_no_difference() -> None:
    before = engine_counters.counters([page()])
    for after in (page(started=2.0), page(done=1)):
        with pytest.raises(NoFigureError, match="restarted"):
            engine_counters.moved(before, engine_counters.counters([after]))


def test_hits_beside_the_gpu_are_hits_too() -> None:
    hits = "vllm:prefix_cache_hits_total 5.0\n"
    assert engine_counters.counters([page()]).cached_tokens is None
    assert engine_counters.counters([page() + hits]).cached_tokens == 5
    assert engine_counters.counters([page() + hits + "vllm:prompt_tokens_cached_total 9.0\n"]).cached_tokens == 9


def test_a_page_that_is_no_engines_is_refused() -> None:
    with pytest.raises(NoFigureError, match="vllm:num_requests_running"):
        engine_counters.counters([page(), "nginx_connections 3\n"])
