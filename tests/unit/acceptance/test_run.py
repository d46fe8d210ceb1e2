"""Levels, a whole run against a small real server, and what becomes of checks that break."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gpu_node_accept import node, run
from gpu_node_accept.checks import Book, CheckError, Title, counts, not_here, not_run, passed, result, warned

TITLE = Title("one", "Engine", "a check")
METRICS = """\
vllm:cache_config_info{kv_cache_size_tokens="19328"} 1.0
vllm:prefix_cache_hits_total 100.0
vllm:request_success_total 5.0
"""


class Handler(BaseHTTPRequestHandler):
    """An engine that answers at once, and always the same."""

    hits = 0
    slow_s = 0.0
    # When each stream began and ended, and its prompt.
    streams: ClassVar[list[tuple[float, float, list[int]]]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, text: str, kind: str = "application/json") -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            return self._send(METRICS.replace("100.0", str(type(self).hits)), "text/plain")
        return self._send(json.dumps({"version": "0.33.0"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer engine-key":
            self.send_error(401)
            return None
        if not body.get("stream"):
            answer = {"choices": [{"message": {"content": "2, 3, 5"}}], "usage": {"completion_tokens": 9}}
            return self._send(json.dumps(answer))
        type(self).hits += len(body["prompt"])
        began = time.monotonic()
        time.sleep(self.slow_s)
        self.streams.append((began, time.monotonic(), body["prompt"]))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(item)}\n\n" for item in events) + "data: [DONE]\n\n"
        return self._send(text, "text/event-stream")


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    (tmp_path / "engine.env").write_text("VLLM_API_KEY=engine-key\n")
    monkeypatch.setattr(run, "ENGINE_ENV", tmp_path / "engine.env")
    monkeypatch.setattr(run, "RELEASES", tmp_path / "replicas")
    monkeypatch.setattr(node, "HELD", tmp_path / "held")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


SMOKE_ROW = {"target": "replica 0", "stream": False, "ok": True, "completion_tokens": 32, "tokens_per_s": 120.0}
SMOKE = [{**SMOKE_ROW, "ttft_ms": None, "error": None}]
STATUS = [{"index": 0, "state": "active", "out": [], "release": "0123456789ab"}]


def commands(**more: Any) -> Any:
    """Stands for the node's commands."""

    def ran(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        name = " ".join(argv[:2])
        answers: dict[str, tuple[int, str]] = {
            "gpu-node smoke": (0, json.dumps(SMOKE)),
            "gpu-node status": (0, json.dumps(STATUS)),
            "gpu-node history": (0, "[]"),
            "systemctl show": (0, "0123456789abcdef\n"),
            "journalctl -q": (0, "non-default args: {'api_key': '***'}\n"),
            **more,
        }
        return answers.get(name, (127 if argv[0] in ("nvidia-smi", "dcgmi") else 0, ""))

    return ran


def request(port: int, level: str, **more: Any) -> dict[str, Any]:
    arguments = {"max-model-len": 2048, "max-num-seqs": 4}
    replica = {"index": 0, "unit": "vllm-replica@0.service", "port": port, "gpus": [], "engine_args": arguments}
    return {
        "node": "n",
        "level": level,
        "profile": "cpu",
        "device": "cpu",
        "served_model_name": "tiny",
        "expected": {"kv_tokens": 19328},
        "replicas": [replica],
        "gpu_timeout": 30,
        "determinism_tokens": 64,
        "concurrency_tokens": 16,
        "limit_timeout": 60,
        "start_timeout": 60,
        "stop_timeout": 60,
        **more,
    }


def verdicts(asked: dict[str, Any], tmp_path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    for replica in asked["replicas"]:
        path = run.RELEASES / str(replica["index"]) / "current/release.json"
        if not path.exists():
            path.parent.mkdir(parents=True)
            names = ("port", "gpus", "engine_args")
            release = {"id": "0123456789ab", "served_model_name": "tiny", **{name: replica[name] for name in names}}
            path.write_text(json.dumps(release))
    (tmp_path / "request.json").write_text(json.dumps(asked))
    assert run.main([str(tmp_path / "request.json"), str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    return report, {check["id"]: check["verdict"] for check in report["checks"]}


def test_smoke_is_answers_and_the_kv_cache(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "run", commands())
    report, found = verdicts(request(port, "smoke"), tmp_path)
    assert found == {"serves_plain": "pass", "settings": "pass", "kv_tokens": "pass", "key_kept": "pass"}
    assert (report["result"], report["releases"]) == ("pass", {"0": "0123456789ab"})


def test_after_a_rollback_what_runs_is_asked_and_the_difference_is_said(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of today have another port and window; the engine that serves is of the release before."""
    monkeypatch.setattr(node, "run", commands())
    asked = request(port, "smoke")
    assert verdicts(asked, tmp_path)[1]["settings"] == "pass"
    replica = {**asked["replicas"][0], "port": 1, "engine_args": {"max-model-len": 4096, "max-num-seqs": 4}}
    report, found = verdicts({**asked, "replicas": [replica]}, tmp_path)
    assert (found["settings"], found["kv_tokens"], report["result"]) == ("warn", "pass", "warn")
    row = next(check for check in report["checks"] if check["id"] == "settings")
    assert row["seen"] == f"release 0123456789ab has port {port} (1); max-model-len 2048 (4096)"
    assert "rollout.yml" in row["remedy"]


def test_a_key_that_the_engine_logs_or_keeps_is_found(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases VLLM-15: it is in the start's line of arguments, and in what the compiled code depends on."""
    monkeypatch.setattr(node, "run", commands(**{"journalctl -q": (0, "non-default args: {'api_key': 'engine-key'}")}))
    report, found = verdicts(request(port, "smoke"), tmp_path)
    assert (found["key_kept"], report["result"]) == ("fail", "fail")
    row = next(check for check in report["checks"] if check["id"] == "key_kept")
    assert row["seen"] == "it is in the log of vllm-replica@0.service"
    assert "engine-key" not in json.dumps(report)


def test_standard_on_a_node_without_cards(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "run", commands())
    report, found = verdicts(request(port, "standard"), tmp_path)
    assert {name: found[name] for name in ("determinism", "prefix_cache", "kv_tokens")} == {
        "determinism": "pass",
        "prefix_cache": "pass",
        "kv_tokens": "pass",
    }
    cards = [check for check in report["checks"] if check["part"] == "Cards"]
    assert len(cards) == 11
    assert {(check["verdict"], check["why"]) for check in cards} == {("not run", "profile cpu has no GPUs")}
    # What means nothing here leaves nothing open.
    assert (report["result"], report["counts"]["open"]) == ("pass", 0)
    assert not set(found) & {"full_window", "restart"}


def test_full_goes_to_the_limits(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "run", commands())
    _, found = verdicts(request(port, "full"), tmp_path)
    assert found["full_window"] == found["restart"] == "pass"
    # It answers at once, so no two requests overlap.
    assert found["concurrency"] == "warn"


def test_a_replica_that_an_operator_drained_is_not_restarted(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained = json.dumps([{**STATUS[0], "out": ["operator"]}])
    monkeypatch.setattr(node, "run", commands(**{"gpu-node status": (0, drained)}))
    report, found = verdicts(request(port, "full"), tmp_path)
    assert found["restart"] == "not run"
    assert report["result"] == "incomplete"


def test_everything_is_collected_when_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(node, "run", commands(**{"gpu-node smoke": (2, "gpu-node: error: node.json is missing")}))
    report, found = verdicts(request(1, "standard"), tmp_path)
    assert report["result"] == "fail"
    assert {name for name, verdict in found.items() if verdict == "fail"} == {
        *("serves", "kv_tokens", "determinism", "prefix_cache"),
    }


def test_cards_that_the_driver_does_not_show_fail(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "run", commands())
    report, found = verdicts(request(port, "standard", device="cuda"), tmp_path)
    assert report["result"] == "fail"
    assert {verdict for name, verdict in found.items() if name.startswith("gpu_")} == {"fail"}


def test_a_prefix_cache_that_the_engine_switched_off(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "run", commands())
    monkeypatch.setitem(globals(), "METRICS", METRICS.replace("{kv", '{enable_prefix_caching="False",kv'))
    assert verdicts(request(port, "standard"), tmp_path)[1]["prefix_cache"] == "not run"
    asked = request(port, "standard")
    asked["replicas"][0]["engine_args"]["enable-prefix-caching"] = True
    assert verdicts(asked, tmp_path)[1]["prefix_cache"] == "fail"


XML = (Path(__file__).parent / "fixtures" / "smi_q_2x_h200.xml").read_text()
CARD = {"pci_address": "0000:00:06.0", "uuid": "GPU-00000000-0000-0000-0000-000000000000"}


def cuda(port: int, **more: Any) -> dict[str, Any]:
    asked = request(port, "standard", device="cuda")
    asked["replicas"][0]["gpus"] = [CARD]
    return {**asked, **more}


def smi(processes: str) -> Any:
    """A driver with two cards, and who has memory on them."""
    ran = commands()

    def with_cards(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        if argv[0] == "nvidia-smi":
            return (0, XML) if "-x" in argv else (0, processes)
        return ran(argv, timeout_s)  # type: ignore[no-any-return]

    return with_cards


def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release whose image has the load program."""
    monkeypatch.setattr(run, "RELEASES", tmp_path)
    release = tmp_path / "0/current/release.json"
    release.parent.mkdir(parents=True)
    release.write_text(json.dumps({"image": {"ref": "localhost/i:1"}}))


def test_a_card_that_was_swapped_since_it_was_served(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "run", smi(""))
    monkeypatch.setattr(run, "RELEASES", tmp_path)
    release = tmp_path / "0/current/release.json"
    release.parent.mkdir(parents=True)
    for uuid, verdict in ((CARD["uuid"], "pass"), ("GPU-11111111-0000-0000-0000-000000000000", "fail")):
        release.write_text(json.dumps({"gpus": [{**CARD, "uuid": uuid}]}))
        _, found = verdicts(cuda(port), tmp_path)
        assert found["gpu_presence"] == verdict


def test_busy_cards_are_read_under_their_own_load(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "run", smi(f"{CARD['uuid']}, 4711, /usr/bin/python3\n"))
    monkeypatch.setitem(run.BUSY_S, "standard", 0.1)
    report, found = verdicts(cuda(port), tmp_path)
    assert found["gpu_load"] == "pass"
    assert found["gpu_link"] == found["gpu_throttle"] == found["gpu_temperature"] == found["gpu_power"] == "pass"
    assert found["gpu_pairs"] == found["gpu_all_reduce"] == "not run"
    assert "4711 (python3)" in str(report["checks"]) and "gpu-node leave" in str(report["checks"])
    assert report["result"] == "incomplete"


def test_without_load_idle_cards_are_no_answer(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "run", smi(f"{CARD['uuid']}, 4711, /usr/bin/python3\n"))
    asked = cuda(port)
    asked["replicas"][0]["port"] = 1
    began = time.monotonic()
    report, found = verdicts(asked, tmp_path)
    # An engine that ends under load is a finding, and the others need not go on.
    assert found["gpu_load"] == "fail" and time.monotonic() - began < 10
    assert "replica 0 does not generate" in str(report["checks"])
    assert found["gpu_link"] == found["gpu_throttle"] == found["gpu_temperature"] == found["gpu_power"] == "not run"


def test_a_burn_in_of_a_serving_node_lasts_and_takes_all_sequences(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "run", smi(f"{CARD['uuid']}, 4711, /usr/bin/python3\n"))
    assert run.BUSY_S["full"] == 300
    monkeypatch.setitem(run.BUSY_S, "full", 1.5)
    monkeypatch.setattr(Handler, "streams", [])
    monkeypatch.setattr(Handler, "slow_s", 0.1)
    asked = cuda(port, level="full")
    asked["replicas"][0]["engine_args"]["max-num-seqs"] = 12
    report, found = verdicts(asked, tmp_path)
    load = next(check for check in report["checks"] if check["id"] == "gpu_load")
    assert (load["verdict"], "12 requests at once" in load["seen"]) == ("pass", True), load
    assert load["seconds"] >= 1.5
    assert found["gpu_link"] == "pass"
    # No other check asks with a quarter of the window.
    work = [stream for stream in Handler.streams if len(stream[2]) == 512]
    assert work[-1][0] - work[0][0] > 1
    at_once = [sum(began <= start < ended for began, ended, _ in work) for start, _, _ in work]
    assert max(at_once) == 12
    # Each prompt is another one: the prefix cache takes no work away.
    assert len({tuple(prompt) for _, _, prompt in work}) == len(work) > 24


def test_what_the_load_brings_about_counts(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's log and the cards' memory errors are read after the load."""
    said: list[str] = []
    ran = smi(f"{CARD['uuid']}, 4711, /usr/bin/python3\n")

    def breaks_under_load(argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        if argv[0] == "journalctl":
            return 0, "\n".join(said)
        code, text = ran(argv, timeout_s)
        zero = "<sram_uncorrectable_parity>0<"
        assert zero in XML
        return code, text.replace(zero, zero.replace("0", "3")) if said else text

    def generate(self: run.Acceptance, seconds: float, streams: Sequence[int]) -> list[int]:
        said.append("NVRM: Xid (PCI:0000:00:06): 79, pid=1, GPU has fallen off the bus.")
        return [1]

    monkeypatch.setattr(node, "run", breaks_under_load)
    monkeypatch.setattr(run.Acceptance, "_generate", generate)
    _, found = verdicts(cuda(port), tmp_path)
    assert (found["gpu_load"], found["gpu_xid"], found["gpu_ecc"]) == ("pass", "fail", "fail")


def test_free_cards_are_loaded_in_the_serving_image(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[Sequence[str]] = []

    def load(
        image: str, uuids: Sequence[str], program: Path, arguments: Sequence[str], s: float
    ) -> list[dict[str, Any]]:
        loads.append([image, *uuids, arguments[0]])
        return [{"cards": list(uuids)}, *told]

    monkeypatch.setattr(node, "run", smi(""))
    monkeypatch.setattr(node, "gpu_load", load)
    served(tmp_path, monkeypatch)
    told: list[dict[str, Any]] = [{"cards": 1, "tflops": 312.5, "seconds": 15.1}]
    report, found = verdicts(cuda(port), tmp_path)
    assert found["gpu_load"] == found["gpu_link"] == "pass"
    assert "the load program, 15 s, 312.5 TFLOPS in sum" in str(report["checks"])
    # One card: nothing between cards.
    assert loads == [["localhost/i:1", CARD["uuid"], "load"]]
    assert found["gpu_pairs"] == found["gpu_all_reduce"] == "not run"
    assert report["data"] == {}
    # A load that broke, or was ended from outside, is a finding.
    for broken in ([{"error": "CUDA error: device-side assert"}], []):
        told[:] = broken
        _, found = verdicts(cuda(port), tmp_path)
        assert (found["gpu_load"], found["gpu_link"]) == ("fail", "not run")


OTHER = {"pci_address": "0000:00:07.0", "uuid": "GPU-00000000-0000-0000-0000-000000000001"}


def test_what_was_measured_between_cards_is_in_the_report(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"bytes": 8, "us": 21.5, "bus_gb_s": 0.0, "correct": True}

    def load(
        image: str, uuids: Sequence[str], program: Path, arguments: Sequence[str], s: float
    ) -> list[dict[str, Any]]:
        ways: list[dict[str, Any]] = [
            {"item": [0, 1], "gb_s": 50.5, "correct": True, "peer": True},
            {"item": [1, 0], "error": "hung: nothing within 30 s"},
        ]
        rows: dict[str, list[dict[str, Any]]] = {
            "load": [{"cards": 2, "tflops": 600.0, "seconds": 15.0}],
            "pairs": ways,
            "allreduce": [size, {"error": "hung in an all-reduce"}],
        }
        return [{"cards": list(reversed(uuids)), "nccl": "2.31.2"}, *rows[arguments[0]]]

    monkeypatch.setattr(node, "run", smi(""))
    monkeypatch.setattr(node, "gpu_load", load)
    served(tmp_path, monkeypatch)
    asked = cuda(port)
    asked["replicas"][0]["gpus"] = [CARD, OTHER]
    report, found = verdicts(asked, tmp_path)
    assert report["data"] == {
        "pairs": [
            {"from": "0000:00:07.0", "to": "0000:00:06.0", "gb_s": 50.5, "correct": True, "peer": True},
            {"from": "0000:00:06.0", "to": "0000:00:07.0", "error": "hung: nothing within 30 s"},
        ],
        "all_reduce": {"replica 0": {"sizes": [size], "error": "hung in an all-reduce", "nccl": "2.31.2"}},
    }
    assert found["gpu_pairs"] == found["gpu_all_reduce"] == "fail"
    assert "0000:00:06.0 to 0000:00:07.0: hung" in str(report["checks"])


def test_a_held_node_says_what_is_open(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "run", commands())
    node.HELD.write_text("{}")
    report, found = verdicts(request(port, "standard"), tmp_path)
    assert found["serves"] == "not run"
    assert report["result"] == "incomplete"


def test_a_wrong_key_is_told_without_the_key(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.ENGINE_ENV.write_text("VLLM_API_KEY=another-key\n")
    monkeypatch.setattr(node, "run", commands())
    report, found = verdicts(request(port, "standard"), tmp_path)
    assert found["determinism"] == "fail"
    assert "401" in str(report) and "another-key" not in str(report)


def test_an_old_report_is_not_left(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"level": "full"}))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(KeyError):
        run.main([str(tmp_path / "request.json"), str(tmp_path / "report.json")])
    assert not (tmp_path / "report.json").exists()
    (tmp_path / "request.json").write_text(json.dumps({"level": "most"}))
    assert run.main([str(tmp_path / "request.json"), str(tmp_path / "report.json")]) == 2


# --- the book


def test_a_check_that_breaks_is_a_failure_and_not_the_end() -> None:
    book = Book(lambda _: None)

    def breaks() -> Any:
        raise ValueError("half an answer")

    def refuses() -> Any:
        raise CheckError("HTTP 500", "an answer", "look there")

    book.run(TITLE, "replica 0", breaks)
    book.run(TITLE, "replica 0", refuses)
    book.run(TITLE, "replica 0", lambda: passed("it"))
    assert [(check.verdict, check.seen) for check in book.checks] == [
        ("fail", "ValueError: half an answer"),
        ("fail", "HTTP 500"),
        ("pass", "it"),
    ]
    assert result(book.checks) == "fail"


def test_not_run_is_never_a_pass() -> None:
    book = Book(lambda _: None)
    book.add(TITLE, "n", not_here("no GPUs"))
    assert result(book.checks) == "incomplete"
    book.add(TITLE, "n", passed("it"))
    assert result(book.checks) == "pass"
    book.add(TITLE, "n", warned("a bit", "none", "look"))
    assert result(book.checks) == "warn"
    book.add(TITLE, "n", not_run("busy"))
    assert result(book.checks) == "incomplete"
    assert counts(book.checks) == {"pass": 1, "warn": 1, "fail": 0, "not run": 2, "open": 1}
