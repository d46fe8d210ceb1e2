"""The node's program for the kernels: the wheel that it writes, and what it keeps of a check."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from gpu_node_image.errors import ImageError
from gpu_node_kernels import container, qualify
from gpu_node_kernels.wheel import wheel_bytes

from tests.unit.kernels.support import FILES

NAME = "ds41k-0.1.0-py3-none-linux_x86_64.whl"
PYPROJECT = (FILES / "pyproject.toml").read_text(encoding="utf-8")
CONTENT = {"ds41k/__init__.py": b"", "ds41k/lib/libds41k_idx.so": b"\x7fELF", "ds41k/plugin.py": b"register = None\n"}


def test_pip_takes_the_wheel_and_vllm_finds_the_plugin(tmp_path: Path) -> None:
    wheel, target = tmp_path / NAME, tmp_path / "site"
    wheel.write_bytes(wheel_bytes(CONTENT, PYPROJECT, NAME))
    argv = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(argv, check=True, capture_output=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    (found,) = importlib.metadata.distributions(path=[str(target)])
    assert (found.metadata["Name"], found.version, found.metadata["License"]) == ("ds41k", "0.1.0", "MIT")
    assert [(point.group, point.value) for point in found.entry_points] == [
        ("vllm.general_plugins", "ds41k.plugin:register")
    ]
    assert (target / "ds41k/lib/libds41k_idx.so").read_bytes() == b"\x7fELF"


def test_the_same_files_give_the_same_bytes_and_others_do_not() -> None:
    once = wheel_bytes(CONTENT, PYPROJECT, NAME)
    assert wheel_bytes(dict(reversed(CONTENT.items())), PYPROJECT, NAME) == once
    assert wheel_bytes({**CONTENT, "ds41k/plugin.py": b"register = 1\n"}, PYPROJECT, NAME) != once
    # Nothing of the compressor's or of the clock's is in it.
    entries = zipfile.ZipFile(BytesIO(once)).infolist()
    assert {(one.compress_type, one.date_time) for one in entries} == {(zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0))}


GOOD = {
    "kernels": {
        "rowtopk": {"correct": True, "faster": False, "shapes": [{}]},
        "chunks": {"correct": True, "shapes": []},
    }
}


def run_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str, error: str = ""
) -> tuple[dict[str, Any], list[list[str]]]:
    """Run the check with a container that leaves a report and ends well, or badly."""
    calls: list[list[str]] = []

    def work(what: str, name: str, arguments: list[str], image: str, command: list[str], log: Path) -> None:
        calls.append([*arguments, image, *command])
        if report:
            (tmp_path / "reports/.work/report.json").write_text(report)
        if error:
            raise ImageError(error)

    monkeypatch.setattr(container, "work", work)
    request = {
        "ref": "localhost/x:1",
        "image": "b" * 64,
        "kernels": "k1",
        "folder": str(tmp_path / "reports"),
        "runs": [{"key": "abc", "gpu": "card", "driver": "590", "uuid": "GPU-1"}],
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    qualify.run(tmp_path / "request.json")
    return json.loads((tmp_path / "reports/abc.json").read_text()), calls


def test_a_report_is_kept_with_what_it_is_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, (call,) = run_check(tmp_path, monkeypatch, json.dumps(GOOD))
    assert kept == {"gpu": "card", "driver": "590", "image": "b" * 64, "kernels": "k1", "report": GOOD}
    assert call[:2] == ["--device", "nvidia.com/gpu=GPU-1"]
    assert call[-5:] == ["python3", "-m", "ds41k.qualify", "--json", "/report/report.json"]
    said = capsys.readouterr().out
    assert "stored" in said and "card: rowtopk correct, slower; chunks correct" in said
    run_check(tmp_path, monkeypatch, json.dumps(GOOD))
    said = capsys.readouterr().out
    assert "is the same as before" in said and "stored" not in said


def test_a_kernel_that_is_not_correct_is_a_report_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"kernels": {"rowtopk": {"correct": False, "faster": False, "shapes": [], "failures": ["x"]}}}
    kept, _ = run_check(tmp_path, monkeypatch, json.dumps(bad), error="exit code 1")
    assert kept["report"] == bad
    assert "rowtopk NOT CORRECT" in capsys.readouterr().out


@pytest.mark.parametrize("report", ["", '{"kernels":'])
def test_a_check_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str) -> None:
    kept, _ = run_check(tmp_path, monkeypatch, report, error="No module named ds41k (exit code 1; all of it: log)")
    why = "the check failed: No module named ds41k (exit code 1; all of it: log)"
    assert kept["report"] == {"kernels": {}, "not_qualified": why}
