"""Whole runs against a server of known speed: the right figure, or the reason why there is none."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gpu_node_bench import cli, request, run
from gpu_node_bench.errors import BenchError

from tests.unit.bench.server import KEY, MODEL, Server

OPTIONS = {
    "workloads": ["code"], "runs": 2, "tokens_short": 8, "tokens_long": 88, "short_runs": 2, "long_runs": 2,
    "busy_wait_s": 0.3, "stall_s": 1, "first_token_s": 5,
}  # fmt: skip


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"VLLM_API_KEY={KEY}\n")
    path.chmod(0o600)
    return path


def measure(
    server: Server, key_file: Path, parts: list[str], lines: list[str] | None = None, **options: Any
) -> dict[str, Any]:
    wanted = request.parse(
        {
            "options": OPTIONS | options,
            "targets": [{"name": "r0", "url": server.url, "model": MODEL, "key_file": str(key_file), "parts": parts}],
        }
    )
    return run.run(wanted, key_file.parent, (lines if lines is not None else []).append)


def figure(report: dict[str, Any], measure: str) -> dict[str, Any]:
    (found,) = [one for one in report["figures"] if one["measure"] == measure]
    return dict(found)


def test_the_speed_of_a_server_is_what_it_is(server: Server, key_file: Path) -> None:
    """One token each 2 ms, three in an event, after a prefill that is longer than the rest."""
    server.behaviour.per_event, server.behaviour.first_s = 4, 0.3
    report = measure(server, key_file, ["decode"])
    one = figure(report, "decode/code")
    assert one["value"] == pytest.approx(500, rel=0.1)
    assert one["invalid"] is None
    assert len(one["runs"]) == 2
    assert one["details"]["tokens_per_event"] == 4
    assert [body["max_tokens"] for body in server.seen] == [8, 8, 88, 8, 88]
    assert len({body["messages"][0]["content"] for body in server.seen}) == 1


def test_acceptance_is_of_the_run_alone(server: Server, key_file: Path) -> None:
    server.behaviour.draft, server.behaviour.accepted = 5, (80, 60, 50, 30, 23)
    # what was counted before the run does not count
    server.counts.drafts, server.counts.accepted = 5000, [1, 1, 1, 1, 1]
    report = measure(server, key_file, ["decode"])
    assert figure(report, "acceptance")["value"] == pytest.approx(0.486)
    assert figure(report, "accepted/code")["value"] == pytest.approx(2.43)
    assert report["targets"][0]["speculation"]["all"]["at"] == pytest.approx((0.8, 0.6, 0.5, 0.3, 0.23))


def test_first_tokens_prefill_and_cache_by_prompts_of_exact_length(server: Server, key_file: Path) -> None:
    server.behaviour.first_s, server.behaviour.prompt_token_s = 0.02, 0.0002
    report = measure(server, key_file, ["first"], prompt_lengths=[1000, 2000], reference_window=4096)
    assert 0.02 <= figure(report, "first/short")["value"] < 0.08
    for length in (1000, 2000):
        cold = 0.02 + length * 0.0002
        assert figure(report, f"first/{length}")["value"] == pytest.approx(cold, rel=0.2)
        assert figure(report, f"prefill/{length}")["value"] == pytest.approx(length / cold, rel=0.2)
        assert figure(report, f"repeat/{length}")["value"] < cold / 2
    assert report["summary"]["invalid"] == 0


def test_a_repeat_that_is_no_cache_repeat_has_no_number(server: Server, key_file: Path) -> None:
    server.behaviour.caching = False
    report = measure(server, key_file, ["first"], prompt_lengths=[1000], reference_window=4096)
    assert figure(report, "first/1000")["value"]
    assert "no cache repeat" in figure(report, "repeat/1000")["invalid"]


def test_another_tokenizer_has_no_long_prompts(server: Server, key_file: Path) -> None:
    server.behaviour.word_tokens = 4
    report = measure(server, key_file, ["first"], prompt_lengths=[1000], reference_window=4096)
    for measured in ("first/1000", "prefill/1000", "repeat/1000"):
        assert "tokenizer mismatch: 4.00 tokens a word" in figure(report, measured)["invalid"]
    assert figure(report, "first/short")["value"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no usage", "no usage"),
        ("early", "ended early: 8 of 88"),
        ("http 500", "HTTP 500"),
        ("stall", "stalled"),
        ("wrong model", "wrong model"),
        ("cut", "IncompleteRead|ended without"),
    ],
)
def test_a_fault_makes_the_figure_invalid_and_the_run_says_so(
    server: Server, key_file: Path, fault: str, words: str
) -> None:
    server.behaviour.fault, server.behaviour.fault_after = fault, 8
    report = measure(server, key_file, ["decode"])
    one = figure(report, "decode/code")
    assert one["value"] is None
    assert one["runs"] == []
    assert re.search(words, one["invalid"])
    assert report["summary"] == {"figures": 1, "invalid": 1, "unsteady": 0}
    assert KEY not in json.dumps(report)


def test_runs_that_differ_are_unsteady_and_not_hidden(server: Server, key_file: Path) -> None:
    begin = time.monotonic()
    timer = threading.Timer(0.35, lambda: setattr(server.behaviour, "token_s", 0.008))
    timer.start()
    report = measure(server, key_file, ["decode"], runs=3)
    one = figure(report, "decode/code")
    assert time.monotonic() - begin > 0.5
    assert one["value"]
    assert "differ by" in one["unsteady"]


def test_requests_of_others_are_seen_and_the_measurement_repeated(server: Server, key_file: Path) -> None:
    timer = threading.Timer(0.15, lambda: setattr(server.counts, "strangers", 2))
    timer.start()
    report = measure(server, key_file, ["decode"])
    assert figure(report, "decode/code")["value"] == pytest.approx(500, rel=0.1)
    (note,) = report["targets"][0]["notes"]
    assert "repeated: other traffic meanwhile: 2 requests, 32 generated tokens" in note


def test_requests_of_others_that_go_on_give_no_number(server: Server, key_file: Path) -> None:
    stop = threading.Event()

    def others() -> None:
        while not stop.wait(0.05):
            server.counts.strangers += 1

    thread = threading.Thread(target=others)
    thread.start()
    try:
        report = measure(server, key_file, ["decode"])
    finally:
        stop.set()
        thread.join()
    assert "other traffic meanwhile" in figure(report, "decode/code")["invalid"]


def test_a_busy_engine_is_not_measured(server: Server, key_file: Path) -> None:
    server.counts.running = 3
    report = measure(server, key_file, ["decode"])
    assert "other traffic: 3 requests run" in figure(report, "decode/code")["invalid"]
    assert server.seen == []


def test_an_engine_that_is_restarted_meanwhile_gives_no_number(server: Server, key_file: Path) -> None:
    timer = threading.Timer(0.15, lambda: setattr(server.counts, "started", 2000.0))
    timer.start()
    report = measure(server, key_file, ["decode"])
    assert "restarted" in figure(report, "decode/code")["invalid"]


def test_a_stream_that_was_preempted_has_no_speed(server: Server, key_file: Path) -> None:
    """Its prompt is counted twice, which is nobody else's traffic."""

    def preempt() -> None:
        server.counts.preempted, server.counts.prompt = 1, server.counts.prompt + 80

    threading.Timer(0.15, preempt).start()
    report = measure(server, key_file, ["decode"])
    assert "1 preemptions" in figure(report, "decode/code")["invalid"]


def test_an_endpoint_without_counters_is_measured_and_that_is_noted(server: Server, key_file: Path) -> None:
    server.behaviour.has_metrics = False
    report = measure(server, key_file, ["decode", "first"], prompt_lengths=[1000], reference_window=4096)
    assert figure(report, "decode/code")["value"] == pytest.approx(500, rel=0.1)
    assert any("cannot be seen" in note for note in report["targets"][0]["notes"])
    assert figure(report, "repeat/1000")["notes"] == ["whether the prefix cache was hit cannot be seen"]


def test_counters_of_another_engine_are_noticed(server: Server, key_file: Path) -> None:
    other = Server()
    other.start()
    wanted = request.parse(
        {
            "options": OPTIONS,
            "targets": [
                {
                    "name": "r0", "url": server.url, "model": MODEL, "key_file": str(key_file), "parts": ["decode"],
                    "metrics": [other.url],
                }
            ],
        }
    )  # fmt: skip
    report = run.run(wanted, key_file.parent, lambda _: None)
    other.stop()
    assert "not the counters of" in figure(report, "decode/code")["invalid"]


def test_a_model_of_another_name_leaves_nothing_to_measure(server: Server, key_file: Path) -> None:
    wanted = request.parse(
        {"options": OPTIONS, "targets": [{"name": "r0", "url": server.url, "model": "big", "key_file": str(key_file)}]}
    )
    report = run.run(wanted, key_file.parent, lambda _: None)
    assert report["summary"]["invalid"] == report["summary"]["figures"] > 5
    assert all("wrong model" in one["invalid"] for one in report["figures"])
    assert server.seen == []


def test_levels_without_a_generator_say_so(server: Server, key_file: Path) -> None:
    report = measure(server, key_file, ["levels"], levels=[1, 8])
    assert [one["invalid"] for one in report["figures"]] == [
        "no load generator: the request names no serving image"
    ] * 2


def test_a_moved_clock_is_said() -> None:
    assert run.clock(0.01, 600)["note"] == ""
    assert "moved by -3600.00 s" in run.clock(-3600, 600)["note"]


def test_the_command_line_writes_report_and_page(
    server: Server, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--option={name}={json.dumps(value)}" for name, value in OPTIONS.items()]
    argv = ["run", "--url", server.url + "/v1", "--model", MODEL, "--key-file", str(key_file), "--part", "decode"]
    assert cli.main([*argv, *options, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "endpoint/decode/code: " in out
    assert KEY not in out
    assert json.loads((tmp_path / "out/report.json").read_text())["schema"] == 1
    assert "<h2>Figures</h2>" in (tmp_path / "out/page.html").read_text()
    server.behaviour.fault = "no usage"
    assert cli.main([*argv, *options, "--out", str(tmp_path / "out")]) == 3
    assert 'class="tag bad">invalid' in (tmp_path / "out/page.html").read_text()


def test_a_key_that_others_can_read_is_refused(key_file: Path) -> None:
    key_file.chmod(0o640)
    with pytest.raises(BenchError, match=r"can be read by others \(mode 0640\)") as caught:
        request.key(str(key_file))
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sk-1\n", "sk-1"),
        ("VLLM_API_KEY=sk-2=\n", "sk-2="),
        ("sk-3=with=signs", "sk-3=with=signs"),
        ('[{"name": "a", "key": "k4"}, {"name": "b", "key": "k5"}]', "k4"),
        ("[]", None),
    ],
)
def test_keys_in_their_files(tmp_path: Path, text: str, found: str | None) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    assert request.key(str(path)) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runs": 1}, "options.runs: expected a whole number, at least 2, found 1"),
        ({"runs": True}, "options.runs"),
        ({"runs": 2.5}, "options.runs"),
        ({"rums": 3}, "no option 'rums'"),
        ({"levels": [8, 8]}, "options.levels: expected a list of whole numbers from 1, none twice"),
        ({"levels": [0]}, "options.levels"),
        ({"workloads": ["poem"]}, "out of code, prose, math"),
        ({"level_workload": "poem"}, "one of code, prose, math"),
        ({"tokens_long": 64}, "must be larger than tokens_short"),
        ({"ignore_eos": 1}, "true or false"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BenchError, match=words):
        request.options(options)
