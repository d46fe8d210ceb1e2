"""What nvidia-smi says while a benchmark runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gpu_node_bench.gpus import Card, Sample, Sampler, card_report, parse_line

from tests.unit.bench import programs

UUID = "GPU-00000000-0000-0000-0000-000000000001"
LINE = f"{UUID}, 00000000:01:00.0, NVIDIA RTX PRO 6000, 91629, 97887, 412.5, 63, 0x0000000000000004"


def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, knows_events: bool = True) -> Sampler:
    programs.nvidia_smi(tmp_path, monkeypatch, *lines, knows_events=knows_events)
    with Sampler(100) as sampler:
        time.sleep(0.4)
    return sampler


@pytest.mark.parametrize("knows_events", [True, False])
def test_peaks_and_power_of_each_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_events: bool) -> None:
    other = LINE.replace("0001", "0002").replace(":01:", ":02:").replace("91629", "91700")
    sampler = sampled(tmp_path, monkeypatch, LINE, other, knows_events=knows_events)
    one, two = sampler.report(0.0)
    assert (one["address"], one["memory_peak_mib"], two["memory_peak_mib"]) == ("0000:01:00.0", 91629, 91700)
    assert (one["power_peak_w"], one["temperature_peak_c"], one["power_capped"], one["slowed"]) == (412.5, 63, True, [])
    assert one["samples"] > 1
    # the power limit is normal under load
    assert sampler.slowed(0, float("inf")) == ""


@pytest.mark.parametrize(
    ("bits", "word"),
    [("20", "heat (software)"), ("40", "heat (hardware)"), ("8", "hardware slowdown"), ("80", "power brake")],
)
def test_a_card_that_is_slowed_down_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: str, word: str
) -> None:
    sampler = sampled(tmp_path, monkeypatch, LINE.replace("0x0000000000000004", f"0x{bits}"))
    assert sampler.slowed(0, float("inf")) == f"throttled meanwhile: {UUID[:12]}: {word}"
    assert sampler.slowed(0, float("inf"), ["GPU-another"]) == ""
    assert sampler.slowed(0, 1) == ""


def test_a_card_that_does_not_say_has_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampled(tmp_path, monkeypatch, f"{UUID}, 00000000:01:00.0, X, [N/A], 97887, [N/A], 63, [N/A]")
    (card,) = sampler.report(0.0)
    assert (card["memory_peak_mib"], card["power_peak_w"], card["power"]) == (None, None, [])


def test_a_machine_without_cards_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Sampler(100) as sampler:
        assert sampler.why == "there is no nvidia-smi here"
    programs.on_path(tmp_path / "bin", "nvidia-smi", "#!/bin/sh\necho 'no driver' >&2\nexit 9\n", monkeypatch)
    with Sampler(100) as sampler:
        assert sampler.why == "nvidia-smi failed: no driver"


def test_other_lines_are_no_samples() -> None:
    assert parse_line("", 0) is None
    assert parse_line("Unable to determine the device handle for GPU 0000:01:00.0", 0) is None


def test_a_long_run_is_thinned_out_and_its_peak_stays() -> None:
    samples = [Sample(float(at), UUID, 1.0, 2.0, 900.0 if at == 777 else 300.0, 50.0, 0) for at in range(2000)]
    power = card_report(Card(UUID, "00000000:01:00.0", "X", samples), 0.0)["power"]
    assert len(power) <= 240
    assert [777.0, 900.0] in power
