"""A stream gives the right value or none: every fault of a server that really streams, one by one."""

from __future__ import annotations

import time
from unittest.mock import MagicMock

import pytest
from gpu_node_bench.endpoint import Endpoint, Limits, _Reader
from gpu_node_bench.errors import BenchError, NoFigureError

from tests.unit.bench.server import KEY, MODEL, Server

LIMITS = Limits(first_s=3, stall_s=0.5)


def ask(server: Server, tokens: int = 20, key: str | None = KEY, model: str = MODEL, limits: Limits = LIMITS):  # type: ignore[no-untyped-def]
    return Endpoint(server.url, key, model).stream(
        "What now?", tokens, limits, {"chat_template_kwargs": {"thinking": False}}
    )


@pytest.mark.parametrize("per_event", [1, 6, 7, 20])
def test_tokens_are_counted_by_usage_and_not_by_events(server: Server, per_event: int) -> None:
    server.behaviour.per_event = per_event
    server.behaviour.first_s = 0.1
    answer = ask(server)
    assert (answer.tokens, answer.prompt_tokens) == (20, 7)
    assert answer.events == -(-20 // per_event)
    assert 0.1 <= answer.first_s <= answer.last_s
    # the last event comes 19 times 2 ms after the first token was due
    assert 0.138 <= answer.last_s < 0.6


def test_the_request_is_greedy_streamed_and_without_thinking(server: Server) -> None:
    ask(server)
    body = server.seen[-1]
    assert (body["temperature"], body["stream"], body["max_tokens"]) == (0, True, 20)
    assert body["stream_options"] == {"include_usage": True}
    assert body["chat_template_kwargs"] == {"thinking": False}
    assert "ignore_eos" not in body


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no usage", "has no usage"),
        ("usage without completion_tokens", "no usage.completion_tokens"),
        ("early", r"ended early: 8 of 20 tokens \(finish_reason stop\)"),
        ("http 500", r"HTTP 500: engine died, key \*\*\*"),
        ("cut", "does not answer: IncompleteRead|ended without"),
        ("error", "carried an error: .*engine died"),
        ("wrong model", "wrong model: another-model answered, not the-model"),
        ("stall", "stalled: no event for 0.5 s after 8 events"),
        ("silence", "stalled: no event for 0.5 s after 8 events"),
    ],
)
def test_a_fault_gives_no_number(server: Server, fault: str, words: str, closes: bool) -> None:
    server.behaviour.fault, server.behaviour.fault_after, server.behaviour.closes = fault, 8, closes
    begin = time.monotonic()
    with pytest.raises(NoFigureError, match=words):
        ask(server)
    assert time.monotonic() - begin < 2.5


def test_a_gap_that_a_token_ends_is_a_stall_all_the_same() -> None:
    """Several reads may lie in one gap, each within the time that a read may take."""
    reader = _Reader(MagicMock(), MagicMock(), 100.0, Limits(first_s=3, stall_s=0.5), MODEL)
    token = b'data: {"choices": [{"delta": {"content": "x"}}]}'
    reader._line(token, 103.0)
    reader._line(token, 103.5)
    with pytest.raises(TimeoutError):
        reader._line(token, 104.1)
    assert reader.stalled() == "stalled: no event for 0.5 s after 2 events"
    late = _Reader(MagicMock(), MagicMock(), 100.0, Limits(first_s=3, stall_s=0.5), MODEL)
    with pytest.raises(TimeoutError):
        late._line(token, 103.1)
    assert late.stalled() == "stalled: no token within 3 s"


def test_the_gaps_of_a_stream(server: Server) -> None:
    server.behaviour.pauses, server.behaviour.pause_s, server.behaviour.fault_after = 1, 0.3, 8
    answer = ask(server)
    assert 0.3 < answer.gap_longest_s < 0.45
    assert answer.gap_median_s < 0.05
    assert ask(server, tokens=1).gap_longest_s == 0


def test_a_first_token_that_does_not_come_is_a_stall(server: Server) -> None:
    server.behaviour.first_s = 5
    with pytest.raises(NoFigureError, match=r"stalled: no token within 0\.3 s"):
        ask(server, limits=Limits(0.3, 0.2))


def test_a_wrong_key_is_named_without_showing_it(server: Server) -> None:
    with pytest.raises(NoFigureError, match="HTTP 401") as caught:
        ask(server, key="sk-wrong")
    assert "sk-wrong" not in str(caught.value)


def test_nobody_there(server: Server) -> None:
    with pytest.raises(NoFigureError, match="does not answer: ConnectionRefusedError"):
        Endpoint("http://127.0.0.1:9", KEY, MODEL).stream("x", 1, LIMITS, {})


def test_a_step_of_the_wall_clock_changes_no_figure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begin = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() - (3600 if time.monotonic() > begin + 0.03 else 0))
    server.behaviour.first_s = 0.1
    answer = ask(server)
    assert 0.1 <= answer.first_s < answer.last_s < 1
    assert answer.clock_step_s == pytest.approx(-3600, abs=1)


def test_the_window_comes_from_the_list_of_models(server: Server) -> None:
    assert Endpoint(server.url, KEY, MODEL).window() == 4096
    assert Endpoint(server.url + "/v1", KEY, MODEL).window() == 4096
    server.behaviour.window = None
    assert Endpoint(server.url, KEY, MODEL).window() is None
    with pytest.raises(NoFigureError, match=r"wrong model: .* serves the-model, not other"):
        Endpoint(server.url, KEY, "other").window()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://user:pw@host/", "http://host/?a=1"])
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError, match="a base URL reads"):
        Endpoint(url, None, MODEL)
