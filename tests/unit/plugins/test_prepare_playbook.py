"""`playbooks/prepare.yml` after the driver: who reboots, what is looked at afterwards, and a clean end without consent.

The roles are stand-ins that note that they were called; the playbook is the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


def note(words: str) -> dict[str, Any]:
    return {"ansible.builtin.debug": {"msg": f"called: {words}"}}


def fact(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"ansible.builtin.set_fact": {name: value}}


ROLES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "package_access": {"main": [note("package_access")]},
    "container_runtime": {"main": [note("container_runtime")]},
    # A driver that waits for a reboot until there was one.
    "nvidia_driver": {
        "main": [
            note("nvidia_driver"),
            fact(
                "nvidia_driver_result",
                {"reboot_required": "{{ waits and not rebooted | default(false) }}", "why": "580.95.05 is loaded"},
            ),
        ]
    },
    "host_settings": {
        "main": [note("host_settings")],
        "reboot": [
            note("reboot for {{ host_settings_reboot_reasons | join }}"),
            fact("rebooted", "{{ consent and host_settings_reboot_reasons | length > 0 }}"),  # type: ignore[arg-type]
            fact(
                "host_settings_result",
                {"reboot_required": "{{ host_settings_reboot_reasons | length > 0 and not rebooted }}"},
            ),
        ],
    },
}


def calls(folder: Path, device: str, **variables: Any) -> list[str]:
    """Run the playbook; return what was called, in order."""
    collection = folder / "collections/ansible_collections/serving/gpu_node"
    for role, files in ROLES.items():
        (collection / "roles" / role / "tasks").mkdir(parents=True)
        for name, tasks in files.items():
            (collection / "roles" / role / "tasks" / f"{name}.yml").write_text(yaml.safe_dump(tasks, sort_keys=False))
    plan = {"device": device, "missing": [], "profile": "8x"}
    (folder / "preflight.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False}]))
    planned = {"hosts": "all", "gather_facts": False, "tasks": [fact("serving_plan_result", plan)]}
    (folder / "plan.yml").write_text(yaml.safe_dump([planned]))
    (folder / "prepare.yml").write_text((ROOT / "playbooks/prepare.yml").read_text())
    local = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    inventory = {"gpu_nodes": {"hosts": {"here": local}, "vars": variables}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "-i",
            "hosts.yml",
            "prepare.yml",
            "-e",
            "ansible_become=no",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PWD": str(folder),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("called: ")[2].rstrip('"') for line in done.stdout.splitlines() if "called: " in line]


BEGIN = ["package_access", "host_settings", "nvidia_driver"]
REBOOT = "reboot for NVIDIA driver: 580.95.05 is loaded"


@pytest.mark.parametrize(
    ("waits", "consent", "expected"),
    [
        (False, False, [*BEGIN, "reboot for ", "container_runtime"]),
        # A container with a driver that is half there would prove nothing: a clean end, and nothing of it.
        (True, False, [*BEGIN, REBOOT]),
        # What the reboot brought is looked at before containers are given the GPUs.
        (True, True, [*BEGIN, REBOOT, "nvidia_driver", "container_runtime"]),
    ],
)
def test_a_driver_that_waits_for_a_reboot(tmp_path: Path, waits: bool, consent: bool, expected: list[str]) -> None:
    assert calls(tmp_path, "cuda", waits=waits, consent=consent) == expected


def test_a_node_without_gpus_gets_the_container_runtime_alone(tmp_path: Path) -> None:
    assert calls(tmp_path, "cpu", waits=True, consent=True) == ["package_access", "container_runtime"]
