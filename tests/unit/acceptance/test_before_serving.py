"""The all-reduce before a replica starts: what its rows mean, what is kept, and what it ends with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_node_accept import before_serving, node

CARDS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
SUMS = [{"bytes": size, "bus_gb_s": 0.5, "correct": True} for size in (8, 4096)]
HANGS = {"error": "hung in the start of NCCL: nothing within 180 s"}


def printed(cards: Sequence[str], *rows: dict[str, Any], nccl: str = "2.30.4") -> str:
    start = {"cards": list(cards), "torch": "2.13", "nccl": nccl}
    return "\n".join(["a library says hello", *(json.dumps(row) for row in (start, *rows))])


@pytest.mark.parametrize(
    ("code", "text", "verdict", "word"),
    [
        # Slow is no reason to refuse; acceptance warns of it.
        (0, printed(CARDS[:2], *SUMS), "pass", "2 sizes right"),
        # No row at all within the limit, and one size that hangs after others were right.
        (0, printed(CARDS[:2], HANGS), "fail", "hung in the start of NCCL"),
        (0, printed(CARDS[:2], *SUMS, {"error": "hung in an all-reduce of 524,288 bytes"}), "fail", "4,096 bytes were"),
        (124, printed(CARDS[:2]), "fail", "hung: the container did not end within 580 s"),
        (0, printed(CARDS[:2], SUMS[0], {**SUMS[1], "correct": False}), "fail", "wrong sums at 4096 bytes"),
        (0, printed(CARDS[:2]), "fail", "wrong sums at no size"),
        # What tells nothing about the cards is no refusal.
        (2, '{"error": "torch sees no card: exit 1: No module named torch"}', "not run", "No module named torch"),
        (125, "Error: localhost/image: image not known", "not run", "image not known"),
        (127, "", "not run", "exit 127"),
        (0, printed(CARDS[:1], *SUMS), "not run", "saw 1 of 2 cards"),
        (0, printed(CARDS[:2], {"error": "no backend"}, nccl=""), "not run", "no NCCL"),
        (137, printed(CARDS[:2], SUMS[0]), "not run", "exit 137"),
    ],
)
def test_the_verdict(code: int, text: str, verdict: str, word: str) -> None:
    outcome = before_serving.judge(2, code, text)
    assert outcome.verdict == verdict
    assert word in f"{outcome.seen} {outcome.why}"
    assert all(name in outcome.remedy for name in ("iommu", "acs", "NCCL_P2P_DISABLE")) == (verdict == "fail")


Load = Callable[[Sequence[str]], tuple[int, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[list[str]], list[str]]]:
    """Run the program over groups; its exit code, the cards of each container, and the reports."""

    def call(load: Load, *groups: Sequence[str]) -> tuple[int, list[list[str]], list[str]]:
        asked = []

        def run_load(
            image: str,
            uuids: Sequence[str],
            program: Path,
            arguments: Sequence[str],
            timeout_s: float,
            environment: Mapping[str, str],
        ) -> tuple[int, str]:
            assert (image, list(arguments)) == ("localhost/i:1", ["allreduce", "--limit", "30"])
            assert environment == {"NCCL_P2P_DISABLE": "1"}
            asked.append(list(uuids))
            return load(uuids)

        monkeypatch.setattr(node, "run_load", run_load)
        runs = [
            {"key": f"k{n}", "replica": n, "uuids": list(uuids), "environment": {"NCCL_P2P_DISABLE": "1"}}
            for n, uuids in enumerate(groups)
        ]
        folder = tmp_path / "reports"
        about = {"ref": "localhost/i:1", "image": "1" * 64, "driver": "590", "folder": str(folder), "runs": runs}
        (tmp_path / "request.json").write_text(json.dumps(about))
        code = before_serving.main([str(tmp_path / "request.json")])
        return code, asked, sorted(path.name for path in folder.iterdir())

    return call


def test_two_cards_and_then_all(ask: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, asked, reports = ask(lambda uuids: (0, printed(uuids, *SUMS)), CARDS, CARDS[:2])
    assert (code, reports) == (0, ["k0.json", "k1.json"])
    # A replica of two cards is asked once.
    assert asked == [CARDS[:2], CARDS, CARDS[:2]]
    kept = json.loads((tmp_path / "reports/k0.json").read_text())
    assert (kept["uuids"], kept["image"], kept["driver"]) == (CARDS, "1" * 64, "590")
    assert f"stored {tmp_path}/reports/k0.json" in capsys.readouterr().out.splitlines()


def test_a_group_that_hangs_is_refused_and_asked_again(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def load(uuids: Sequence[str]) -> tuple[int, str]:
        return 0, printed(uuids, *([HANGS] if len(uuids) == 4 else SUMS))

    code, asked, reports = ask(load, CARDS, CARDS[:2])
    # The other group is looked at nevertheless, and its report stays.
    assert (code, reports) == (1, ["k1.json"])
    assert asked == [CARDS[:2], CARDS, CARDS[:2]]
    (error,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("error: "))
    assert "replica 0: all-reduce over 4 cards (GPU-a, GPU-b, GPU-c, GPU-d): hung in the start of NCCL" in error
    assert "host_settings_iommu" in error and "host_settings_acs_redirect" in error and "NCCL_P2P_DISABLE" in error


def test_two_cards_that_are_wrong_are_enough(ask: Any) -> None:
    code, asked, reports = ask(lambda uuids: (0, printed(uuids, {**SUMS[0], "correct": False})), CARDS)
    assert (code, asked, reports) == (1, [CARDS[:2]], [])


def test_an_image_that_cannot_try_is_a_warning_and_no_refusal(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, asked, reports = ask(lambda _: (2, '{"error": "torch sees no card: exit 1: No module named torch"}'), CARDS)
    assert (code, asked, reports) == (0, [CARDS[:2]], [])
    said = capsys.readouterr().out
    assert said.startswith("warning: replica 0: ") and "nothing was found out" in said and "stored" not in said
