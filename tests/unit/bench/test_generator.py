"""Load by `vllm bench serve`: how it is called, and what of its result becomes a figure."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from gpu_node_bench import generator, request, run
from gpu_node_bench.errors import NoFigureError
from gpu_node_bench.generator import Generator, Load

from tests.unit.bench import programs
from tests.unit.bench.server import KEY, MODEL, Server

LOAD = Load((1, 4), 16, 2, "code", True, {"chat_template_kwargs": {"thinking": False}}, 10, 20)
RESULT: dict[str, Any] = {
    "duration": 2.0, "completed": 8, "failed": 0, "output_throughput": 64.0, "output_lens": [16] * 8,
    "input_lens": [20] * 8, "ttfts": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], "median_tpot_ms": 5.0,
    "errors": [""] * 8,
}  # fmt: skip


def levels(server: Server, tmp_path: Path) -> dict[str, Any]:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    wanted = request.parse(
        {
            "options": {"levels": [1, 4], "level_tokens": 16, "ignore_eos": True, "busy_wait_s": 1},
            "generator": {"image": "b" * 64, "model_folder": "/models/x", "tokenizer_mode": "deepseek_v4"},
            "targets": [{"name": "r0", "url": server.url, "model": MODEL, "key_file": str(key), "parts": ["levels"]}],
        }
    )
    return run.run(wanted, tmp_path / "out", lambda _: None)


def test_each_level_is_measured_and_nothing_secret_is_left(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = programs.podman(tmp_path, monkeypatch)
    report = levels(server, tmp_path)
    one, four = report["figures"]
    assert (one["measure"], four["measure"]) == ("load/code/1", "load/code/4")
    # the stand-in asks one after the other: 16 tokens in 20 + 30 ms
    assert one["value"] == pytest.approx(16 / 0.05, rel=0.3), one
    assert four["details"]["requests"] == 8
    assert len(server.seen) == (2 + 1) + (8 + 4)
    assert all(body["ignore_eos"] and body["chat_template_kwargs"] == {"thinking": False} for body in server.seen)
    assert KEY not in log.read_text()
    assert KEY not in json.dumps(report)
    assert not list(tmp_path.glob("out/**/key.env"))
    assert len(log.read_text().splitlines()) == 1


def test_no_prompt_is_in_two_levels_or_twice_in_one() -> None:
    texts = [one["conversations"][0]["value"] for streams in (1, 4) for one in generator.data_set(LOAD, streams)]
    assert len(texts) == len(set(texts)) == 10


def test_the_key_is_in_a_file_of_its_own_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.podman(tmp_path, monkeypatch)
    with generator.start(LOAD, "http://127.0.0.1:1", MODEL, KEY, Generator("i", "/m"), tmp_path / "out"):
        assert stat.S_IMODE((tmp_path / "out/key.env").stat().st_mode) == 0o600
    assert not (tmp_path / "out/key.env").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("result['output_lens'][0] = 3", "1 of 2 requests ended early"),
        (
            "result.update(completed=1, failed=1, errors=['', 'x\\nServerError: gone'])",
            "1 of 2 requests failed: ServerError",
        ),
        ("raise RuntimeError('no route')", "vllm bench serve failed: RuntimeError: no route"),
        ("sys.exit(2)", "vllm bench serve failed: exit 2"),
        ("return", "wrote no result"),
        ("os._exit(7)", "ended by itself: some line of the program"),
        ("del result['ttfts']", "no numbers for ttfts"),
        ("result['output_throughput'] *= 2", "figures disagree"),
        ("ask('a stranger asks')", "other traffic meanwhile: 1 requests"),
    ],
)
def test_a_level_that_went_wrong_has_no_number(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, words: str
) -> None:
    programs.podman(tmp_path, monkeypatch, change)
    report = levels(server, tmp_path)
    assert words in report["figures"][0]["invalid"], report["figures"][0]
    assert report["figures"][0]["value"] is None


def test_without_podman_no_level_has_a_number(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = levels(server, tmp_path)
    assert [one["invalid"] for one in report["figures"]] == ["podman does not start: No such file or directory"] * 2


def test_a_result_becomes_a_level() -> None:
    found = generator.parse(RESULT, LOAD, 4)
    assert (found.tokens_per_s, found.first_p50_s, found.first_p99_s, found.between_p50_s) == (64.0, 0.45, 0.8, 0.005)
    # four requests to warm up, with the first prompt
    assert (found.own_requests, found.own_tokens, found.own_prompt_tokens) == (12, 192, 240)


@pytest.mark.parametrize(
    "name", ["duration", "completed", "failed", "output_throughput", "output_lens", "median_tpot_ms"]
)
def test_a_result_without_a_field_is_none(name: str) -> None:
    with pytest.raises(NoFigureError):
        generator.parse({key: value for key, value in RESULT.items() if key != name}, LOAD, 4)


def test_the_tokenizer_is_read_in_the_plans_mode() -> None:
    argv = generator.arguments(LOAD, 4, "http://x", MODEL, Generator("i", "/m", "deepseek_v4"))
    assert argv[-2:] == ["--tokenizer-mode", "deepseek_v4"]
    assert argv[:2] == ["bench", "serve"]
