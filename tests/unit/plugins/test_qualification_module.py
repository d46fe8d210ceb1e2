"""The module `qualification`: which reports lie there, and which GPUs are free."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.modules import qualification

from tests.unit.plugins.module_runner import run_module

GPUS = [{"uuid": "GPU-0", "model": "card"}, {"uuid": "GPU-1", "model": "card"}]
STORED = {"image": "new", "kernels": "k1", "gpu": "card", "driver": "590", "report": {"kernels": {"rowtopk": {}}}}


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the module; ``units`` by replica the state of its unit, ``apps`` what nvidia-smi prints, None without one."""

    def call(apps: str | None = "", units: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        def smi(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            if apps is None:
                raise FileNotFoundError(2, "No such file or directory", argv[0])
            return subprocess.CompletedProcess(argv, 0, apps, "")

        def systemctl(self: AnsibleModule, argv: list[str], check_rc: bool) -> tuple[int, str, str]:
            return 0, (units or {})[argv[-1].partition("@")[2].partition(".")[0]] + "\n", ""

        monkeypatch.setattr(subprocess, "run", smi)
        monkeypatch.setattr(AnsibleModule, "run_command", systemctl)
        args = {"path": str(tmp_path / "reports"), "image": "new", "kernels": "k1", "driver": "590", "gpus": GPUS}
        return run_module(qualification.main, {**args, "replicas": str(tmp_path / "replicas"), **more})

    return call


def release(tmp_path: Path, index: int, text: str) -> None:
    folder = tmp_path / "replicas" / str(index) / "current"
    folder.mkdir(parents=True)
    (folder / "release.json").write_text(text)


def store(tmp_path: Path, text: str) -> None:
    (tmp_path / "reports").mkdir(exist_ok=True)
    (tmp_path / "reports" / "one.json").write_text(text)


def test_on_a_bare_node_the_first_gpu_is_free(look: Any) -> None:
    answer = look()
    assert answer["changed"] is False
    assert [run["uuid"] for run in answer["runs"]] == ["GPU-0"]
    assert answer["records"][0]["pending"] is True


def test_a_report_that_lies_there_is_taken(look: Any, tmp_path: Path) -> None:
    store(tmp_path, json.dumps(STORED))
    assert (look()["runs"], look()["records"][0]["report"]) == ([], STORED["report"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({**STORED, "report": None})])
def test_a_damaged_report_is_none(look: Any, tmp_path: Path, text: str) -> None:
    store(tmp_path, text)
    assert len(look()["runs"]) == 1


@pytest.mark.parametrize(
    ("state", "free"), [("active", "GPU-1"), ("activating", "GPU-1"), ("inactive", "GPU-0"), ("failed", "GPU-0")]
)
def test_the_gpu_of_a_replica_that_is_not_stopped_is_in_use(look: Any, tmp_path: Path, state: str, free: str) -> None:
    release(tmp_path, 0, json.dumps({"gpus": [{"uuid": "GPU-0"}]}))
    assert look(units={"0": state})["runs"][0]["uuid"] == free


def test_a_process_on_a_gpu_is_named(look: Any) -> None:
    apps = "GPU-0, 77, python3\nGPU-1, 78, vllm\nGPU-9, 1, other\n"
    answer = look(apps)
    assert answer["runs"] == []
    assert "(process 77 (python3) computes on it)" in answer["records"][0]["why"]


def test_without_an_answer_of_the_driver_no_gpu_counts_as_free(look: Any) -> None:
    answer = look(None)
    assert answer["runs"] == [] and "nvidia-smi does not say what runs on it" in answer["records"][0]["why"]


def test_a_release_that_cannot_be_read_is_an_error(look: Any, tmp_path: Path) -> None:
    release(tmp_path, 0, "{")
    answer = look(units={"0": "active"})
    assert answer["failed"] and "nobody knows which GPUs replica 0 uses" in answer["msg"]


def test_where_no_check_may_be_made_none_is(look: Any) -> None:
    answer = look(allowed=False)
    assert answer["runs"] == [] and not answer["records"][0]["pending"]
    assert "kernels_manage is false" in answer["records"][0]["why"]
