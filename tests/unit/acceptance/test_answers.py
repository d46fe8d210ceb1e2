"""What the engine answers, from recorded answers and from a server that answers wrongly."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_node_accept import answers, limits, traffic
from gpu_node_accept.checks import CheckError
from gpu_node_accept.server import Answer, Streamed, parse_metrics


def streamed(first_s: float = 1.0, prompt: int = 1000, tokens: int = 8) -> Streamed:
    return Streamed(first_s, prompt, tokens)


@pytest.mark.parametrize(
    ("texts", "drafts", "verdict", "word"),
    [
        (["same", "same", "same"], None, "pass", "3 times"),
        (["same", "same"], 12, "pass", "12 drafts"),
        (["same", "same"], 0, "pass", "drafted nothing"),
        (["same", "sane", "same"], 5, "fail", "1 of 2 repeats differ, the first at character 2"),
        (["same", "same but longer"], None, "fail", "at character 4"),
        (["", ""], None, "fail", "empty"),
    ],
)
def test_determinism(texts: list[str], drafts: float | None, verdict: str, word: str) -> None:
    found = answers.determinism(texts, "", drafts)
    assert (found.verdict, word in found.seen) == (verdict, True), found


def test_a_difference_while_others_asked_is_an_open_question() -> None:
    found = answers.determinism(["a", "b"], "1 requests of others ran", None)
    assert (found.verdict, found.applies) == ("not run", True)
    assert "1 of 1 repeats differ" in found.why and "1 requests of others ran" in found.why


@pytest.mark.parametrize(
    ("made", "accepted", "verdict", "seen"),
    [
        (700, 340, "pass", "48.6% of 700 drafted tokens, 7 at a time"),
        (700, 70, "pass", "10.0% of 700"),
        (700, 69, "warn", "9.9% of 700"),
        # cases VLLM-08
        (1000, 44, "warn", "4.4% of 1,000"),
        (700, 0, "warn", "0.0% of 700"),
        (0, 0, "fail", "speculation drafted nothing"),
    ],
)
def test_drafts(made: float, accepted: float, verdict: str, seen: str) -> None:
    found = answers.drafts(made, accepted, 7)
    assert (found.verdict, seen in found.seen) == (verdict, True), found


def test_drafts_without_a_counter_or_a_head_are_no_answer() -> None:
    found = answers.drafts(None, None, 7)
    assert (found.verdict, found.applies) == ("not run", True)
    server: Any = None
    for arguments in ({}, {"speculative-config": {"method": "ngram"}}):
        assert not answers.ask_drafts(server, arguments).applies


class Drafting:
    """An engine with a head: counters of before and after one answer."""

    def __init__(self, accepted: int) -> None:
        self.accepted, self.asked = accepted, 0

    def metrics(self) -> Any:
        made, taken = 500 + 700 * self.asked, 200 + self.accepted * self.asked
        return parse_metrics(
            f"vllm:spec_decode_num_draft_tokens_total {made}\nvllm:spec_decode_num_accepted_tokens_total {taken}\n"
        )

    def chat(self, body: dict[str, Any], _: float) -> Answer:
        assert body["max_tokens"] > 100
        self.asked += 1
        return Answer({"content": "2, 3, 5"}, "stop", 300)


@pytest.mark.parametrize(("accepted", "verdict"), [(340, "pass"), (31, "warn")])
def test_drafts_are_counted_over_one_answer(accepted: int, verdict: str) -> None:
    server: Any = Drafting(accepted)
    config = {"method": "dspark", "num_speculative_tokens": 7}
    found = answers.ask_drafts(server, {"speculative-config": config})
    assert (found.verdict, f"{accepted / 700:.1%} of 700" in found.seen) == (verdict, True), found


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        (call("get_weather", '{"city": "Paris", "unit": "celsius"}'), "pass"),
        (call("get_weather", "{'city': 'Paris'}"), "fail"),
        (call("get_weather", '{"town": "Paris"}'), "fail"),
        (call("get_weather", '"Paris"'), "fail"),
        (call("weather", '{"city": "Paris"}'), "fail"),
        ({"content": "<tool>get_weather(Paris)</tool>"}, "fail"),
    ],
)
def test_tool_calls(message: dict[str, Any], verdict: str) -> None:
    assert answers.tool_call(Answer(message, "tool_calls", 9)).verdict == verdict


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
    assert answers.reasoning(Answer(message, "stop", 9)).verdict == verdict


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
    assert answers.prefix_cache(streamed(cold_s), streamed(warm_s), hits, "").verdict == verdict
    # Others' hits and prompts are neither a pass nor a fail.
    busy = answers.prefix_cache(streamed(cold_s), streamed(warm_s), hits, "1 requests of others ran")
    assert (busy.verdict, busy.applies) == ("not run", True)


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
    assert limits.concurrency(found, 8, running, preempted, "").verdict == verdict
    busy = limits.concurrency(found, 8, running, preempted, "1 requests of others ran")
    # Others may set a sequence back for want of KV cache; an answer that is not whole is a failure with them, too.
    assert busy.verdict == ("not run" if preempted else verdict)


def test_the_offload_tier_is_used() -> None:
    assert limits.offload_hit(1.5e9, streamed(), 70, "").verdict == "pass"
    assert limits.offload_hit(0, streamed(), 70, "").verdict == "fail"
    assert limits.offload_hit(None, streamed(), 70, "").verdict == "not run"
    assert limits.offload_hit(1.5e9, streamed(), 70, "1 requests of others ran").verdict == "not run"


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


# --- metrics


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
    assert traffic.moved(parse_metrics(""), metrics, "vllm:prefix_cache_hits") == 15
    assert traffic.moved(metrics, parse_metrics(""), "vllm:prefix_cache_hits") is None


@pytest.mark.parametrize(
    ("running", "generated", "said"),
    [
        ((0, 0), (100, 292), ""),
        # One long stream of somebody else, that no counter of ended requests shows.
        ((1, 1), (100, 292), "1 requests of others ran"),
        ((0, 2), (100, 292), "2 requests of others ran"),
        ((0, 0), (100, 1492), "1,200 tokens were generated for others"),
        ((1, 0), (100, 300), "1 requests of others ran and 8 tokens were generated for others"),
    ],
)
def test_what_others_had_meanwhile(running: tuple[int, int], generated: tuple[int, int], said: str) -> None:
    before, after = (
        parse_metrics(f"vllm:num_requests_running {now}\nvllm:generation_tokens_total {tokens}\n")
        for now, tokens in zip(running, generated, strict=True)
    )
    assert traffic.others(before, after, 192) == said
