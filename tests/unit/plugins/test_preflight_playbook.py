"""`playbooks/preflight.yml`: what is checked before any connection, the report, and where it is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.vault import VaultLib, VaultSecret

from tests.unit.plugins.playbooks import run_playbook

ROOT = Path(__file__).resolve().parents[3]
# An address for documentation: nothing answers there, so that a connection would fail.
INVENTORY: dict[str, Any] = {
    "gpu_nodes": {
        "hosts": {
            "here": {"ansible_connection": "local", "ansible_become": False},
            "away": {"ansible_host": "192.0.2.1"},
        },
        "vars": {"ansible_python_interpreter": sys.executable, "ansible_timeout": 2},
    }
}
# Ports and room that a busy machine has, too.
SMALL = {
    "serving_plan_overrides": {
        "replicas": 1,
        "container_memory": "1g",
        "first_port": 45871,
        "balancer_port": 45872,
        "balancer_status_port": 45873,
    },
    "preflight_space_gib": {"image": 0, "state": 0},
}


def play(folder: Path, *arguments: str, **variables: Any) -> tuple[dict[str, int], str]:
    """Run the playbook; return the counts of its recap and everything it printed."""
    (folder / "hosts.yml").write_text(yaml.safe_dump(INVENTORY))
    (folder / "variables.yml").write_text(yaml.safe_dump(variables))
    command = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [
            str(command),
            *("-i", str(folder / "hosts.yml"), str(ROOT / "playbooks/preflight.yml")),
            *("-e", f"@{folder / 'variables.yml'}", *arguments),
        ],
        cwd=folder,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    recap = done.stdout.rpartition("PLAY RECAP")[2]
    words = [word.split("=") for word in recap.split() if "=" in word]
    return {name: int(count) for name, count in words}, done.stdout + done.stderr


def test_the_report_is_shown_and_written_once(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    told = {**SMALL, "preflight_report_dir": str(reports), "preflight_accepted": ["os", "memory", "podman"]}
    counts, output = play(tmp_path, "-l", "here", "--check", **told)
    assert (counts["failed"], counts["unreachable"]) == (0, 0), output
    assert not reports.exists()
    counts, output = play(tmp_path, "-l", "here", **told)
    assert (counts["failed"], counts["changed"]) == (0, 2), output
    report = json.loads((reports / "here.preflight.json").read_text())
    assert report["passed"] is True
    assert {"variables", "inventory", "plan", "os", "space"} <= {check["check"] for check in report["checks"]}
    assert f"{len(report['checks'])} checks: 0 failed" in output


def test_profile_8x_fails_here_once_and_names_everything(tmp_path: Path) -> None:
    counts, output = play(tmp_path, "-l", "here", "--check", serving_plan_profile="8x")
    assert (counts["failed"], counts["changed"]) == (1, 0)
    failed = output.partition("here is not ready; nothing was changed:")[2]
    for words in (
        "- sources: serving_plan_sources: model: revision",
        "- image: serving_image_base: docker.io/vllm/vllm-openai:v0.33.0 has the tag v0.33.0",
        "- plan: drafter",
        "- gpus: 0 on PCI: none",
    ):
        assert words in failed
    assert "wanted: 8 that the profile is made for" in failed
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"balancer_client_keys": [{"name": "team-a", "key": "{{ vault_team_a_key }}"}]},
            [
                "variables: balancer_client_keys cannot be evaluated: 'vault_team_a_key' is undefined",
                "--ask-vault-pass",
            ],
        ),
        (
            {"serving_plan_overrides": "nothing", "container_runtime_manage": "maybe"},
            ["variables: serving_plan_overrides", "variables: container_runtime_manage", "convert to bool"],
        ),
        ({"preflight_space_gib": {"modell": 3}}, ["modell"]),
    ],
)
def test_variables_that_cannot_be_used_are_refused_without_a_connection(
    tmp_path: Path, variables: dict[str, Any], words: list[str]
) -> None:
    counts, output = play(tmp_path, "-l", "away", **variables)
    assert (counts["failed"], counts["unreachable"], counts["changed"]) == (1, 0, 0), output
    for word in words:
        assert word in output
    assert "Traceback" not in output


def test_a_secret_of_the_wrong_form_is_not_shown(tmp_path: Path) -> None:
    counts, output = play(tmp_path, "-l", "away", balancer_client_keys=["hunter2-is-a-secret"])
    assert (counts["failed"], counts["unreachable"]) == (1, 0)
    assert "variables: balancer_client_keys: not of the right form (its content is not shown)" in output
    assert "hunter2" not in output


def test_a_vault_that_was_not_handed_over_is_named(tmp_path: Path) -> None:
    locked = VaultLib().encrypt("hunter2", VaultSecret(b"password")).decode()
    lines = "\n".join(f"      {line}" for line in locked.splitlines())
    (tmp_path / "vault.yml").write_text(f"balancer_client_keys:\n  - name: team-a\n    key: !vault |\n{lines}\n")
    counts, output = play(tmp_path, "-l", "away", "-e", f"@{tmp_path / 'vault.yml'}")
    assert (counts["failed"], counts["unreachable"]) == (1, 0)
    assert "variables: balancer_client_keys cannot be evaluated" in output
    assert "--vault-password-file" in output
    assert "hunter2" not in output


def test_a_topology_of_a_file_needs_no_node(tmp_path: Path) -> None:
    sources = {"model": {"revision": "0123456789" * 4}}
    file = str(ROOT / "inventories/topologies/2x.yml")
    base = f"docker.io/vllm/vllm-openai@sha256:{'a' * 64}"
    told = {"serving_plan_profile": "2x", "topology_file": file, "serving_image_base": base}
    counts, output = play(tmp_path, "-l", "away", **told, serving_plan_sources=sources)
    assert (counts["failed"], counts["unreachable"]) == (0, 0), output
    assert "3 checks: 0 failed" in output
    counts, output = play(tmp_path, "-l", "away", **told, serving_plan_sources={"model": {"revision": "main"}})
    assert (counts["failed"], counts["unreachable"]) == (1, 0)
    assert "sources: serving_plan_sources: model: revision 'main' is no commit" in output
    assert output.count("- plan: ") == 0


@pytest.mark.parametrize(
    ("variables", "allowed"),
    [
        ({}, False),
        ({"nvidia_driver_reboot_allowed": "yes"}, True),
        # This one reboots for whatever asks for it, the driver too.
        ({"host_settings_reboot_allowed": True}, True),
    ],
)
def test_either_consent_lets_a_reboot_repair_the_driver(
    tmp_path: Path, variables: dict[str, Any], allowed: bool
) -> None:
    role = ROOT / "roles/preflight"
    tasks = [
        {"ansible.builtin.include_vars": {"file": str(role / "vars/main.yml")}},
        {"ansible.builtin.debug": {"msg": "allowed: {{ _preflight_variables.driver.reboot_allowed }}"}},
    ]
    told = {"topology_result": {"topology": {}}, "preflight_space_gib": {}, "role_path": str(role)}
    playbook = tmp_path / "show.yml"
    playbook.write_text(
        yaml.safe_dump([{"hosts": "here", "gather_facts": False, "vars": {**told, **variables}, "tasks": tasks}])
    )
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(INVENTORY))
    _, output = run_playbook(tmp_path, tmp_path / "hosts.yml", playbook)
    assert f"allowed: {allowed}" in output
