"""Switches, the version guard, and how rows are cut."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FILES = Path(__file__).resolve().parents[3] / "roles" / "kernels" / "files"


def register(environment: dict[str, str], *path: Path) -> subprocess.CompletedProcess[str]:
    """Call what vLLM calls, in a fresh Python, and say which of torch and vLLM it imported."""
    code = (
        "import sys; from ds41k.plugin import register; register(); print(sorted({'torch', 'vllm'} & set(sys.modules)))"
    )
    variables = {"PYTHONPATH": ":".join(map(str, (FILES, *path))), **environment}
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=variables, check=False)


def vllm_of(version: str, folder: Path) -> Path:
    """A folder in which a vLLM of that version counts as installed."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("off", [{}, {"DS41_IDX_CHUNK": "0", "DS41_CAND": ""}, {"DS41_IDX_CHUNK_MB": "512"}])
def test_with_every_switch_off_nothing_is_imported(off: dict[str, str]) -> None:
    done = register(off)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", ["DS41_IDX_CHUNK", "DS41_ROWTOPK", "DS41_CAND"])
def test_an_unknown_vllm_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    done = register({name: "1"}, vllm_of("0.34.0", tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ds41k.plugin.PluginError: ds41k: vLLM 0.34.0 is unknown, its indexer's decode step is replaced in 0.33.0 "
        "alone: unset DS41_IDX_CHUNK, DS41_ROWTOPK and DS41_CAND, or take a known vLLM"
    )


def test_a_known_vllm_passes_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds41k import plugin

    monkeypatch.syspath_prepend(str(vllm_of("0.33.0+cu130", tmp_path)))
    plugin.check_version()


def test_switches_are_read() -> None:
    from ds41k.plugin import Switches, read_switches

    assert read_switches({}) == Switches()
    assert not Switches().any
    environment = {"DS41_IDX_CHUNK": "1", "DS41_IDX_CHUNK_MB": "512", "DS41_ROWTOPK": "1", "DS41_CAND": "1"}
    assert read_switches(environment) == Switches(True, 512 << 20, True, True)
    assert read_switches({"DS41_CAND": "1"}) == Switches(cand=True)


@pytest.mark.parametrize("value", ["yes", "2", "true", " 1"])
def test_what_is_no_switch_is_refused(value: str) -> None:
    from ds41k.plugin import PluginError, read_switches

    with pytest.raises(PluginError, match=f"DS41_ROWTOPK={value} is no switch: 1 is on"):
        read_switches({"DS41_ROWTOPK": value})


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "256M", "9999999", "²"])
def test_what_is_no_budget_is_refused(value: str) -> None:
    from ds41k.plugin import PluginError, read_switches

    with pytest.raises(PluginError, match=f"DS41_IDX_CHUNK_MB={value} is no budget"):
        read_switches({"DS41_IDX_CHUNK_MB": value})


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    import ds41k
    from ds41k import plugin

    project = tomllib.loads((FILES / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["ds41k"].partition(":")
    assert module == plugin.__name__ and getattr(plugin, function) is plugin.register
    assert project["version"] == ds41k.__version__


def test_rows_of_the_8x_profile() -> None:
    from ds41k.chunks import chunk_rows

    wanted = [(first, first + 64) for first in range(0, 1024, 64)]
    assert chunk_rows(1024, 8, 1 << 20, 256 << 20) == chunk_rows(1024, 1, 1 << 20, 256 << 20) == wanted


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 1 << 20), st.integers(1, 1 << 28))
def test_ranges_are_whole_sequences_in_order_within_the_budget(n: int, each: int, width: int, budget: int) -> None:
    from ds41k.chunks import chunk_rows

    ranges = chunk_rows(n * each, each, width, budget)
    assert [row for first, last in ranges for row in range(first, last)] == list(range(n * each))
    for first, last in ranges:
        assert (last - first) % each == 0
        assert (last - first) * width * 4 <= budget or last - first == each
    # No more of them than needed.
    for (first, last), (_, after) in itertools.pairwise(ranges):
        assert (last - first + each) * width * 4 > budget and after > last
