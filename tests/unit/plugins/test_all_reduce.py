"""Which replicas' GPUs are asked for an all-reduce, and which have to wait."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.serving.gpu_node.plugins.module_utils.all_reduce import groups_of, report_key
from ansible_collections.serving.gpu_node.plugins.modules import all_reduce

from tests.unit.plugins.module_runner import run_module

GPUS = [{"pci_address": f"0000:1{n}:00.0", "uuid": f"GPU-{n}", "model": "card"} for n in range(4)]
ENV = {"NCCL_SOCKET_IFNAME": "lo", "VLLM_LOGGING_LEVEL": "INFO"}
PLANNED: list[dict[str, Any]] = [
    {
        "index": 0,
        "env": ENV,
        "gpus": [{"pci_address": GPUS[1]["pci_address"]}, {"pci_address": GPUS[0]["pci_address"]}],
    },
    {"index": 1, "env": ENV, "gpus": [{"pci_address": gpu["pci_address"]} for gpu in GPUS[2:]]},
]
GROUPS = groups_of(PLANNED, GPUS)


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the module; ``apps`` what nvidia-smi prints, None where nobody may ask; ``state`` of a unit."""

    def call(apps: str | None = "", state: str = "inactive", **more: Any) -> dict[str, Any]:
        def smi(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            assert apps is not None, "nobody has to look what runs"
            return subprocess.CompletedProcess(argv, 0, apps, "")

        monkeypatch.setattr(subprocess, "run", smi)
        monkeypatch.setattr(AnsibleModule, "run_command", lambda *_, **__: (0, f"{state}\n", ""))
        args = {"path": str(tmp_path / "reports"), "image": "i", "driver": "590", "planned": PLANNED, "gpus": GPUS}
        return run_module(all_reduce.main, {**args, "replicas": str(tmp_path / "replicas"), **more})

    return call


def test_on_a_bare_node_every_group_is_asked_in_the_order_of_its_ranks(look: Any) -> None:
    answer = look()
    assert (answer["changed"], answer["waiting"]) == (False, [])
    assert [(run["replica"], run["uuids"]) for run in answer["runs"]] == [
        (0, ["GPU-1", "GPU-0"]),
        (1, ["GPU-2", "GPU-3"]),
    ]
    assert answer["runs"][0]["environment"] == {"NCCL_SOCKET_IFNAME": "lo"}
    assert answer["runs"][0]["key"] == report_key(GROUPS[0], "i", "590")


def test_a_second_run_asks_nothing(look: Any, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    for group in GROUPS:
        (tmp_path / "reports" / f"{report_key(group, 'i', '590')}.json").write_text("{}")
    assert (look(None)["runs"], look(None)["waiting"]) == ([], [])
    # Another image, driver or way around asks anew.
    assert len(look(image="j")["runs"]) == len(look(driver="591")["runs"]) == 2
    around = [{**one, "env": {**ENV, "NCCL_P2P_DISABLE": "1"}} for one in PLANNED]
    assert look(planned=around)["runs"][1]["environment"]["NCCL_P2P_DISABLE"] == "1"
    # What has nothing to do with NCCL does not.
    assert look(None, planned=[{**one, "env": {**ENV, "OTHER": "1"}} for one in PLANNED])["runs"] == []


def test_a_group_with_one_gpu_in_use_waits_and_the_other_is_asked(look: Any) -> None:
    answer = look("GPU-0, 77, python3\n")
    assert [run["replica"] for run in answer["runs"]] == [1]
    (sentence,) = answer["waiting"]
    assert "replica 0" in sentence and "GPU-0 is in use (process 77 (python3) computes on it)" in sentence


@pytest.mark.parametrize(("state", "asked"), [("active", [1]), ("activating", [1]), ("failed", [0, 1])])
def test_a_replica_that_runs_is_left_alone(look: Any, tmp_path: Path, state: str, asked: list[int]) -> None:
    folder = tmp_path / "replicas/0/current"
    folder.mkdir(parents=True)
    (folder / "release.json").write_text(json.dumps({"gpus": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}]}))
    assert [run["replica"] for run in look(state=state)["runs"]] == asked


def test_a_replica_of_one_gpu_has_nothing_to_add_up_and_one_that_the_driver_does_not_see_no_uuid() -> None:
    alone = {"index": 0, "env": {}, "gpus": PLANNED[0]["gpus"][:1]}
    assert groups_of([alone, {"index": 1, "env": {}, "gpus": []}], GPUS) == []
    unseen = [{**gpu, "uuid": ""} for gpu in GPUS[:1]] + GPUS[1:]
    assert [group["replica"] for group in groups_of(PLANNED, unseen)] == [1]
