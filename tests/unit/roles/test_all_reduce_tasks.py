"""The all-reduce before serving, from plan to report (DRV-08): the role's tasks, with stand-ins for job and Podman."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.plugins.playbooks import ROOT, run_playbook

UUIDS = [f"GPU-{n}" for n in range(4)]
# `follow` without systemd.
FOLLOW = """\
import pathlib, subprocess
from ansible.plugins.action import ActionBase

class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        if self._task.check_mode:
            return {"changed": True, "lines": []}
        assert all(pathlib.Path(path).exists() for path in self._task.args["inputs"])
        done = subprocess.run(self._task.args["argv"], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        return {"changed": True, "lines": lines, "failed": done.returncode != 0, "msg": lines[-1]}
"""
PODMAN = """\
#!/bin/sh
echo "$@" >>{folder}/asked
case $(cat {folder}/image) in
no-torch) echo '{{"error": "torch sees no card: exit 1: No module named torch"}}'; exit 2;;
esac
printf '{{"nccl": "2.30.4", "cards": ['
for word; do case $word in nvidia.com/gpu=*) printf '%s"%s"' "$comma" "${{word#*=}}"; comma=,;; esac; done
echo ']}}'
case $(cat {folder}/image) in
hangs) echo '{{"error": "hung in the start of NCCL: nothing within 180 s"}}';;
*) echo '{{"bytes": 8, "bus_gb_s": 0.1, "correct": true}}';;
esac
"""


@dataclass
class Node:
    """A node with four GPUs, of which the plan's one replica has all."""

    folder: Path
    image: str = "right"
    apps: str = ""

    def run(self, *arguments: str, **facts: Any) -> tuple[dict[str, int], str]:
        (self.folder / "image").write_text(self.image)
        (self.folder / "apps").write_text(self.apps)
        (self.folder / "asked").unlink(missing_ok=True)
        addresses = [f"0000:1{n}:00.0" for n in range(4)]
        gpus = [{"pci_address": address, "uuid": uuid} for address, uuid in zip(addresses, UUIDS, strict=True)]
        replica = {"index": 0, "env": {}, "gpus": [{"pci_address": address} for address in addresses]}
        given = {
            "serving_plan_result": {"replicas": [replica]},
            "serving_image_result": {"id": "1" * 64, "ref": "localhost/i:1"},
            "topology_result": {"topology": {"driver": {"version": "590"}, "gpus": gpus}},
            "_acceptance_folder": str(self.folder / "acceptance"),
            **facts,
        }
        (self.folder / "given.json").write_text(json.dumps(given))
        given_at = ("-e", f"@{self.folder}/given.json")
        counts, output = run_playbook(
            self.folder,
            self.folder / "hosts.yml",
            self.folder / "play.yml",
            *given_at,
            *arguments,
            collections=self.folder / "collections",
        )
        return counts["here"], output

    def asked(self) -> list[int]:
        """How many cards each container had."""
        path = self.folder / "asked"
        return [line.count("nvidia.com/gpu=") for line in path.read_text().splitlines()] if path.exists() else []

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.folder.glob("acceptance/all_reduce/*.json")]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    collection = tmp_path / "collections/ansible_collections/serving/gpu_node"
    (collection / "plugins/action").mkdir(parents=True)
    (collection / "plugins/modules").mkdir()
    (collection / "plugins/action/follow.py").write_text(FOLLOW)
    (collection / "plugins/modules/follow.py").write_text("")
    for name in ("all_reduce", "program_files"):
        (collection / f"plugins/modules/{name}.py").symlink_to(ROOT / f"plugins/modules/{name}.py")
    for kind in ("filter", "module_utils"):
        (collection / "plugins" / kind).symlink_to(ROOT / "plugins" / kind)
    (collection / "roles").mkdir()
    for role in ("acceptance", "node_tool"):
        (collection / "roles" / role).symlink_to(ROOT / "roles" / role)
    tasks = [{"ansible.builtin.include_role": {"name": "serving.gpu_node.acceptance", "tasks_from": "all_reduce"}}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "here", "gather_facts": False, "tasks": tasks}]))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": local}}}))
    (tmp_path / "bin").mkdir()
    for name, text in (
        ("podman", PODMAN.format(folder=tmp_path)),
        ("nvidia-smi", f"#!/bin/sh\ncat {tmp_path}/apps\n"),
    ):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Node(tmp_path)


def test_it_is_asked_once(node: Node) -> None:
    dry, output = node.run("--check")
    assert (dry["failed"], node.asked(), (node.folder / "acceptance").exists()) == (0, [], False), output
    first, output = node.run()
    assert (first["failed"], node.asked()) == (0, [2, 4]), output
    (report,) = node.reports()
    assert (report["image"], report["driver"], report["uuids"]) == ("1" * 64, "590", UUIDS)
    for arguments in ([], ["--check"]):
        again, output = node.run(*arguments)
        assert (again["failed"], again["changed"], node.asked()) == (0, 0, []), output


def test_a_hang_is_refused_with_what_to_do_and_asked_again_after_the_mend(node: Node) -> None:
    node.image = "hangs"
    counts, output = node.run()
    assert (counts["failed"], node.asked(), node.reports()) == (1, [2], []), output
    for words in ("hung in the start of NCCL", "host_settings_iommu", "host_settings_acs_redirect", "NCCL_P2P_DISABLE"):
        assert words in output
    node.image = "right"
    counts, output = node.run()
    assert (counts["failed"], node.asked(), len(node.reports())) == (0, [2, 4], 1), output


def test_gpus_in_use_are_said_and_left_alone(node: Node) -> None:
    node.apps = "GPU-3, 77, python3\n"
    counts, output = node.run()
    assert (counts["failed"], counts["changed"], node.asked()) == (0, 0, []), output
    assert "GPU-3 is in use (process 77 (python3) computes on it); a run while all are free tries it" in output


def test_an_image_without_torch_is_no_refusal_and_leaves_nothing(node: Node) -> None:
    node.image = "no-torch"
    counts, output = node.run()
    assert (counts["failed"], node.asked(), node.reports()) == (0, [2], []), output
    # The program's files lie there by now.
    counts, output = node.run()
    assert (counts["failed"], counts["changed"], node.reports()) == (0, 0, []), output


def test_a_dry_run_without_an_image_is_clean(node: Node) -> None:
    counts, output = node.run("--check", serving_image_result={"id": "auto", "ref": "auto"})
    assert (counts["failed"], counts["changed"]) == (0, 0), output
