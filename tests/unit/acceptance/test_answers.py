"""What the engine answers, from recorded answers and from a server that answers wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_node_accept import answers, limits
from gpu_node_accept.checks import CheckError
from gpu_node_accept.server import Streamed, parse_metrics, parse_stream


def streamed(first_s: float = 1.0, prompt: int = 1000, tokens: int = 8, seconds: float = 2.0) -> Streamed:
    return Streamed("text", first_s, seconds, prompt, tokens)


@pytest.mark.parametrize(
    ("texts", "others", "drafts", "verdict", "word"),
    [
        (["same", "same", "same"], 0, None, "pass", "3 times"),
        (["same", "same"], 0, 12, "pass", "12 drafts"),
        (["same", "same"], 0, 0, "pass", "drafted nothing"),
        (["same", "sane", "same"], 0, 5, "fail", "1 of 2 repeats differ, the first at character 2"),
        (["same", "same but longer"], 0, None, "fail", "at character 4"),
        (["", ""], 0, None, "fail", "empty"),
    ],
)
def test_determinism(texts: list[str], others: int, drafts: float | None, verdict: str, word: str) -> None:
    found = answers.determinism(texts, others, drafts)
    assert (found.verdict, word in found.seen) == (verdict, True), found


def test_a_difference_while_others_asked_is_an_open_question() -> None:
    found = answers.determinism(["a", "b"], 3, None)
    assert (found.verdict, found.applies) == ("not run", True)
    assert "3 requests of others" in found.why


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"message": {"content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}}


@pytest.mark.parametrize(
    ("choice", "verdict"),
    [
        (call("get_weather", '{"city": "Paris", "unit": "celsius"}'), "pass"),
        (call("get_weather", "{'city': 'Paris'}"), "fail"),
        (call("get_weather", '{"town": "Paris"}'), "fail"),
        (call("get_weather", '"Paris"'), "fail"),
        (call("weather", '{"city": "Paris"}'), "fail"),
        ({"message": {"content": "<tool>get_weather(Paris)</tool>"}}, "fail"),
    ],
)
def test_tool_calls(choice: dict[str, Any], verdict: str) -> None:
    assert answers.tool_call(choice).verdict == verdict


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ({"reasoning": "17 times 19 is ...", "content": "323"}, "pass"),
        ({"reasoning_content": "17 times 19 is ...", "content": "It is 323."}, "pass"),
        ({"reasoning": "hm", "content": "331"}, "warn"),
        ({"reasoning": None, "content": "<think>17 times</think>323"}, "fail"),
        ({"reasoning": "17", "content": "</think>323"}, "fail"),
        ({"reasoning": "17 times 19 is ...", "content": ""}, "fail"),
    ],
)
def test_thoughts(message: dict[str, Any], verdict: str) -> None:
    assert answers.reasoning({"message": message, "finish_reason": "stop"}).verdict == verdict


@pytest.mark.parametrize(
    ("cold_s", "warm_s", "hits", "verdict"),
    [
        (2.0, 0.2, 990, "pass"),
        (2.0, 1.9, 990, "fail"),
        (2.0, 0.2, 0, "fail"),
        (0.05, 0.05, 990, "pass"),
        (2.0, 0.2, None, "not run"),
    ],
)
def test_prefix_cache(cold_s: float, warm_s: float, hits: float | None, verdict: str) -> None:
    assert answers.prefix_cache(streamed(cold_s), streamed(warm_s), hits).verdict == verdict


def test_prompts_of_an_exact_length_begin_differently() -> None:
    one, other = answers.token_prompt(300, 1), answers.token_prompt(300, 2)
    assert len(one) == len(other) == 300
    assert one[:8] != other[:8]
    # Ids of the small vocabulary of the embedded model, and above its special tokens.
    assert all(100 < token < 300 for token in one + other)


# --- limits


def test_the_whole_window() -> None:
    assert limits.full_window(streamed(prompt=2040, tokens=8), 2048).verdict == "pass"
    assert limits.full_window(streamed(prompt=1024, tokens=8), 2048).verdict == "fail"
    assert limits.full_window(streamed(prompt=2040, tokens=1), 2048).verdict == "fail"


@pytest.mark.parametrize(
    ("found", "running", "preempted", "verdict"),
    [
        ([streamed()] * 4, 4, 0, "pass"),
        ([streamed()] * 4, 3, 0, "warn"),
        ([streamed()] * 4, 4, 2, "fail"),
        ([streamed()] * 3 + [streamed(tokens=5)], 4, 0, "fail"),
        ([streamed()] * 3 + [CheckError("HTTP 500")], 4, 0, "fail"),
    ],
)
def test_all_sequences_at_once(found: list[Any], running: float, preempted: float, verdict: str) -> None:
    assert limits.concurrency(found, 8, running, preempted).verdict == verdict


def test_the_offload_tier_is_used() -> None:
    assert limits.offload_hit(1.5e9, streamed(), 70).verdict == "pass"
    assert limits.offload_hit(0, streamed(), 70).verdict == "fail"
    assert limits.offload_hit(None, streamed(), 70).verdict == "not run"


def test_start_times() -> None:
    history = [
        {"to": "aaa", "outcome": "new", "seconds": {"start": 400.0}},
        {"to": "bbb", "outcome": "rolled_back", "seconds": {"start": 10.0}},
    ]
    assert limits.start_times(120, history, "aaa").verdict == "pass"
    assert limits.start_times(600, history, "aaa").verdict == "warn"
    assert "not in gpu-node history" in limits.start_times(120, history, "bbb").seen
    assert limits.read_history("no JSON") == [] == limits.read_history('{"a": 1}')


class Commands:
    """Notes what is run, and lets some of it fail."""

    def __init__(self, *failing: str) -> None:
        self.ran: list[str] = []
        self._failing = failing

    def __call__(self, argv: list[str], timeout_s: float) -> tuple[int, str]:
        text = " ".join(argv)
        self.ran.append(text)
        return (1, "it does not") if text.startswith(self._failing) else (0, "")


def test_a_restart_drains_first_and_lets_in_again() -> None:
    commands = Commands()
    assert limits.restart("vllm-replica@0.service", 0, commands, 10) >= 0
    assert commands.ran == [
        "gpu-node drain 0",
        "systemctl stop vllm-replica@0.service",
        "systemctl start vllm-replica@0.service",
        "gpu-node undrain 0",
    ]


@pytest.mark.parametrize("failing", ["gpu-node drain", "systemctl stop", "systemctl start"])
def test_a_restart_that_fails_lets_in_again_and_says_so(failing: str) -> None:
    commands = Commands(failing)
    with pytest.raises(CheckError, match=failing):
        limits.restart("vllm-replica@0.service", 0, commands, 10)
    assert commands.ran[-1] == "gpu-node undrain 0"
    assert ("systemctl stop vllm-replica@0.service" in commands.ran) == (failing != "gpu-node drain")


# --- streams and metrics


def event(text: str) -> bytes:
    return f"data: {text}\n".encode()


TOKEN = event('{"choices": [{"text": "a"}]}')
USAGE = event('{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}')
DONE = event("[DONE]")


def read(*lines: bytes, times: tuple[float, ...] = ()) -> Streamed:
    clock = iter([*times, *[99.0] * 20]) if times else iter(range(50))
    return parse_stream(lines, 0.0, lambda: next(clock), 1000.0)


def test_a_stream_counts_by_usage() -> None:
    # Speculation puts several tokens in an event: events are no count.
    found = read(TOKEN, TOKEN, USAGE, DONE)
    assert (found.text, found.completion_tokens, found.prompt_tokens) == ("aa", 9, 5)


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ((TOKEN, USAGE), "without .DONE"),
        ((TOKEN, DONE), "no usage"),
        ((USAGE, DONE), "no token"),
        ((TOKEN, event('{"error": "x"}'), DONE), "an error"),
        ((TOKEN, event("{half"), DONE), "not JSON"),
    ],
)
def test_half_a_stream_is_no_answer(lines: tuple[bytes, ...], match: str) -> None:
    with pytest.raises(CheckError, match=match):
        read(*lines)


def test_metrics() -> None:
    text = """\
# HELP vllm:prefix_cache_hits_total hits
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 12.0
vllm:prefix_cache_hits_total{engine="1",model_name="a b"} 3
vllm:bad NaN
vllm:cache_config_info{kv_cache_size_tokens="19328",engine="0"} 1.0
"""
    metrics = parse_metrics(text)
    assert metrics.value("vllm:prefix_cache_hits") == 15
    assert metrics.value("vllm:bad") is None
    assert metrics.label("vllm:cache_config_info", "kv_cache_size_tokens") == "19328"
    assert answers.moved(parse_metrics(""), metrics, "vllm:prefix_cache_hits") == 15
    assert answers.moved(metrics, parse_metrics(""), "vllm:prefix_cache_hits") is None
