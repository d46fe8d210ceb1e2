"""Whole runs against a server of known speed: the right figure, or the reason why there is none."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_node_bench import cli, request, run
from gpu_node_bench.errors import BenchError

from tests.unit.bench import programs
from tests.unit.bench.server import KEY, MODEL, Server

OPTIONS = {
    "workloads": ["code"], "runs": 2, "tokens_short": 8, "tokens_long": 88, "short_runs": 2, "long_runs": 2,
    "busy_wait_s": 0.3, "stall_s": 1, "first_token_s": 5,
    # A run of 0.16 s on a busy machine; a pause may be half of that.
    "spread_limit": 1.0, "first_spread_limit": 4.0,
}  # fmt: skip


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"VLLM_API_KEY={KEY}\n")
    path.chmod(0o600)
    return path


def measure(
    server: Server, key_file: Path, parts: list[str], target: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    one = {"name": "r0", "url": server.url, "model": MODEL, "key_file": str(key_file), "parts": parts}
    wanted = request.parse({"options": OPTIONS | options, "targets": [one | (target or {})]})
    return run.run(wanted, key_file.parent, lambda _: None)


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
    report = measure(server, key_file, ["decode"], workloads=["code", "prose", "math"])
    assert figure(report, "acceptance")["value"] == pytest.approx(0.486)
    assert figure(report, "accepted/code")["value"] == pytest.approx(2.43)
    assert report["targets"][0]["speculation"]["all"]["at"] == pytest.approx((0.8, 0.6, 0.5, 0.3, 0.23))


def test_acceptance_of_all_is_of_all_three_workloads_or_there_is_none(server: Server, key_file: Path) -> None:
    """A share of code and math alone is higher, and no figure that others have too."""
    server.behaviour.draft, server.behaviour.accepted = 5, (80, 60, 50, 30, 23)
    server.behaviour.fault, server.behaviour.fault_after, server.behaviour.fault_prompt = "early", 8, "essay"
    report = measure(server, key_file, ["decode"], workloads=["code", "prose", "math"])
    assert "ended early" in figure(report, "decode/prose")["invalid"]
    assert figure(report, "acceptance/code")["value"] == pytest.approx(0.486)
    assert figure(report, "acceptance/prose")["invalid"] == "decode/prose has no number"
    for measured in ("acceptance", "accepted"):
        assert figure(report, measured)["value"] is None
        assert figure(report, measured)["invalid"] == "not of all workloads: prose gave no drafts"
    report = measure(server, key_file, ["decode"], workloads=["code", "math"])
    assert [one["measure"] for one in report["figures"]][2:] == [
        "acceptance/code", "accepted/code", "acceptance/math", "accepted/math",
    ]  # fmt: skip


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
    assert report["summary"] == {"figures": 1, "invalid": 1}
    assert KEY not in json.dumps(report)


def test_a_stall_that_is_no_longer_than_the_limit_is_measured_again(server: Server, key_file: Path) -> None:
    """One request with 0.12 s between two of its tokens, at 500 tok/s: that speed, or none."""
    server.behaviour.pauses, server.behaviour.pause_s, server.behaviour.fault_after = 1, 0.12, 7
    report = measure(server, key_file, ["decode"])
    # one request warms the cache, and is of no run: its pause is nobody's
    assert report["targets"][0]["notes"] == []
    server.behaviour.pauses = 2
    report = measure(server, key_file, ["decode"])
    assert figure(report, "decode/code")["value"] == pytest.approx(500, rel=0.1)
    (note,) = report["targets"][0]["notes"]
    assert re.search(r"repeated: a pause of 0\.1\d* s between two tokens", note)


def test_stalls_that_go_on_give_no_number(server: Server, key_file: Path) -> None:
    """Each run has one, so they agree on a wrong speed."""
    server.behaviour.pauses, server.behaviour.pause_s, server.behaviour.fault_after = 99, 0.12, 7
    report = measure(server, key_file, ["decode"], repeats=1)
    assert re.search(r"a pause of .* \(2 attempts\)", figure(report, "decode/code")["invalid"])


def test_a_wait_before_the_first_token_of_one_point_does_not_cancel(server: Server, key_file: Path) -> None:
    server.behaviour.pauses, server.behaviour.pause_s, server.behaviour.fault_after = 2, 0.12, 0
    report = measure(server, key_file, ["decode"])
    assert figure(report, "decode/code")["value"] == pytest.approx(500, rel=0.1)
    (note,) = report["targets"][0]["notes"]
    assert re.search(r"repeated: a pause of 0\.1\d* s before a first token", note)


def test_runs_that_differ_too_much_have_no_mean(server: Server, key_file: Path) -> None:
    """Each attempt meets the engine at two speeds."""
    speeds = iter([0.002, 0.002, 0.002, 0.008, 0.008] * 2)
    server.before = lambda: setattr(server.behaviour, "token_s", next(speeds))
    report = measure(server, key_file, ["decode"], repeats=1)
    one = figure(report, "decode/code")
    assert (one["value"], one["runs"]) == (None, [])
    assert re.search(r"differ by 1[12]\d\.\d% of their mean, more than 100%: .* \(2 attempts\)", one["invalid"])
    assert len(server.seen) == 10


def test_a_first_token_that_came_late_once_is_measured_again(server: Server, key_file: Path) -> None:
    """Of two cold prompts one waited 0.3 s: their mean is nobody's time."""
    server.behaviour.first_s, server.behaviour.prompt_token_s = 0.02, 0.0002
    waits = iter([0.0] * 7 + [0.3])
    server.before = lambda: setattr(server.behaviour, "first_s", 0.02 + next(waits, 0.0))
    report = measure(server, key_file, ["first"], prompt_lengths=[1000], reference_window=4096, spread_limit=0.5)
    assert figure(report, "first/1000")["value"] == pytest.approx(0.22, rel=0.2)
    assert figure(report, "prefill/1000")["value"] == pytest.approx(1000 / 0.22, rel=0.2)
    (note,) = report["targets"][0]["notes"]
    assert "repeated: the runs differ by" in note


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


@pytest.fixture
def other() -> Iterator[Server]:
    one = Server()
    one.start()
    yield one
    one.stop()


def test_counters_of_another_engine_are_noticed(server: Server, other: Server, key_file: Path) -> None:
    report = measure(server, key_file, ["decode"], {"metrics": [other.url]})
    assert "not the counters of" in figure(report, "decode/code")["invalid"]


@pytest.mark.parametrize("kind", ["replica", "balancer"])
def test_a_replica_without_counters_has_no_figure(server: Server, key_file: Path, kind: str) -> None:
    """Else who looks away would see nobody."""
    server.behaviour.has_metrics = False
    report = measure(server, key_file, ["decode"], {"kind": kind})
    assert "/metrics answered HTTP 404" in figure(report, "decode/code")["invalid"]
    with pytest.raises(BenchError, match="metrics: expected the engines' URLs"):
        measure(server, key_file, ["decode"], {"kind": kind, "metrics": []})


def test_one_look_that_failed_costs_one_figure_and_not_the_guard(server: Server, key_file: Path) -> None:
    server.behaviour.has_metrics = False
    server.before = lambda: setattr(server.behaviour, "has_metrics", True)
    lost = measure(server, key_file, ["decode", "first"], {"kind": "replica"}, prompt_lengths=[])
    assert "HTTP 404" in figure(lost, "decode/code")["invalid"]
    server.behaviour.has_metrics = True
    server.behaviour.draft, server.behaviour.accepted = 5, (80, 60, 50, 30, 23)
    threading.Timer(0.15, lambda: setattr(server.counts, "strangers", 2)).start()
    report = measure(server, key_file, ["decode"], {"kind": "replica"})
    assert "other traffic meanwhile" in report["targets"][0]["notes"][0]
    assert figure(report, "acceptance/code")["value"]


def test_requests_to_the_nodes_other_replica_are_seen(server: Server, other: Server, key_file: Path) -> None:
    target = {"kind": "replica", "neighbours": [other.url]}
    threading.Timer(0.15, lambda: setattr(other.counts, "strangers", 2)).start()
    report = measure(server, key_file, ["decode"], target)
    assert figure(report, "decode/code")["value"] == pytest.approx(500, rel=0.1)
    (note,) = report["targets"][0]["notes"]
    assert "other traffic meanwhile: 2 requests of the node's other replicas, 32 generated tokens of" in note
    other.counts.running = 1
    report = measure(server, key_file, ["decode"], target)
    assert "other traffic: 1 requests run" in figure(report, "decode/code")["invalid"]
    other.counts.running, other.behaviour.has_metrics = 0, False
    report = measure(server, key_file, ["decode"], target)
    assert "/metrics answered HTTP 404" in figure(report, "decode/code")["invalid"]


def test_what_the_nodes_prober_asks_an_idle_replica_is_nobodys_traffic(
    server: Server, other: Server, key_file: Path, tmp_path: Path
) -> None:
    """A measurement that lasts minutes always has some; the prober notes each after it has the answer."""
    noted = tmp_path / "probe.json"
    noted.write_text(json.dumps({"proofs": 4, "proof_tokens": 132}))
    target = {"kind": "replica", "neighbours": [other.url], "neighbours_proofs": [str(noted)]}

    def asked(count: int) -> None:
        other.counts.requests += count
        other.counts.generated += count
        other.counts.prompt += 33 * count

    def note(count: int) -> None:
        noted.write_text(json.dumps({"proofs": 4 + count, "proof_tokens": 33 * (4 + count)}))

    def in_the_third_answer(*actions: Callable[[], object]) -> None:
        answers = itertools.count(1)
        server.before = lambda: [action() for action in actions] if next(answers) == 3 else None

    in_the_third_answer(lambda: asked(1), threading.Timer(0.7, note, [1]).start)
    report = measure(server, key_file, ["decode"], target)
    assert figure(report, "decode/code")["value"] == pytest.approx(500, rel=0.1)
    assert report["targets"][0]["notes"] == []
    # Another one's request in the same time is seen.
    in_the_third_answer(lambda: asked(2), lambda: note(2))
    report = measure(server, key_file, ["decode"], target)
    (said,) = report["targets"][0]["notes"]
    assert "other traffic meanwhile: 1 requests of the node's other replicas, 1 generated tokens of" in said


def test_cards_that_nobody_looks_at_are_no_cards_that_were_not_slowed(
    server: Server, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    line = f"{uuid}, 00000000:01:00.0, NVIDIA RTX PRO 6000, 91629, 97887, 412.5, 63, 0x0000000000000004"
    target = {"kind": "replica", "gpus": [uuid]}
    programs.nvidia_smi(tmp_path, monkeypatch, line)
    report = measure(server, key_file, ["decode"], target, sample_interval_ms=100)
    assert figure(report, "decode/code")["value"] == pytest.approx(500, rel=0.1)
    assert figure(report, "memory/0000:01:00.0")["value"] == 91629
    programs.nvidia_smi(tmp_path, monkeypatch, line, dies=True)
    report = measure(server, key_file, ["decode"], target, sample_interval_ms=100)
    why = "nvidia-smi ended by itself (exit code 15)"
    assert figure(report, "decode/code")["invalid"] == f"whether cards were slowed down cannot be seen: {why}"
    assert figure(report, "memory/0000:01:00.0")["invalid"] == f"not seen to the end: {why}"
    assert report["cards_note"] == why
    monkeypatch.setenv("PATH", str(tmp_path))
    report = measure(server, key_file, ["decode"], target)
    assert "cannot be seen: there is no nvidia-smi here" in figure(report, "decode/code")["invalid"]


@pytest.mark.parametrize(
    ("kind", "replicas", "most", "streams"),
    [
        ("replica", 1, 0, ["load/code/1", "load/code/64", "load/code/128"]),
        ("replica", 1, 64, ["load/code/1", "load/code/64"]),
        ("balancer", 2, 128, ["total/code/2", "total/code/128", "total/code/256"]),
        ("balancer", 2, 64, ["total/code/2", "total/code/128"]),
        ("balancer", 1, 0, ["total/code/1", "total/code/64", "total/code/128"]),
    ],
)
def test_levels_are_for_each_replica_and_as_many_as_it_decodes_at_once(
    server: Server, key_file: Path, kind: str, replicas: int, most: int, streams: list[str]
) -> None:
    target = {"kind": kind, "replicas": replicas, "max_num_seqs": most}
    report = measure(server, key_file, ["levels"], target, levels=[1, 64, 128])
    assert [one["measure"] for one in report["figures"]] == streams
    assert report["targets"][0]["notes"] == (
        ["not measured with 128 streams a replica: it decodes 64 at once (max_num_seqs), the others would wait"]
        if most == 64
        else []
    )


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


def test_a_broken_baseline_does_not_cost_the_measurement(
    server: Server, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, release = tmp_path / "baselines", tmp_path / "out", "a" * 12
    folder.mkdir()
    target = {"url": server.url, "model": MODEL, "key_file": str(key_file), "parts": ["decode"]}
    (tmp_path / "request.json").write_text(json.dumps({"release": release, "options": OPTIONS, "targets": [target]}))
    argv = ["run", "--request", str(tmp_path / "request.json"), "--out", str(out), "--baselines", str(folder), "--keep"]
    (folder / f"{release}.json").write_text('{"schema": 1, "figures": [{"id": "endpoint/decode/code"}]}')
    assert cli.main(argv) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["figures"][0]["value"] == pytest.approx(500, rel=0.1)
    assert "is no whole report: the report has no 'program'" in report["unusable_baselines"][0]
    assert "passed over: " in capsys.readouterr().out
    # One that cannot be written.
    (folder / f"{release}.json").unlink()
    (folder / f"{release}.partial").mkdir()
    assert cli.main(argv) == 0
    report = json.loads((out / "report.json").read_text())
    assert "aaaaaaaaaaaa.json: Is a directory" in report["unusable_baselines"][0]
    (folder / f"{release}.partial").rmdir()
    assert cli.main(argv) == 0
    assert cli.main(argv) == 0
    assert json.loads((out / "report.json").read_text())["comparison"]["rows"][0]["verdict"] != "unknown"


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
