"""The driver's way out of the kernel and over a reboot: the role's tasks, with stand-ins for what touches a node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.nvidia_smi import parse_driver_version

from tests.unit.plugins.playbooks import run_playbook
from tests.unit.plugins.test_nvidia_driver import MODULES

ROOT = Path(__file__).resolve().parents[3]
FAKE = '#!/bin/sh\necho "$0 $*" >>"$(dirname "$0")/calls"\n'


def program(folder: Path, name: str, text: str = "") -> None:
    (folder / name).write_text(FAKE + text)
    (folder / name).chmod(0o755)


def run_tasks(folder: Path, tasks: str, **variables: Any) -> tuple[dict[str, Any], str]:
    """Include a file of the role's tasks; return how the module is to be loaded then, and what was printed.

    The role host_settings is a stand-in that says that the machine was started anew.
    """
    collection = folder / "collections/ansible_collections/serving/gpu_node"
    (collection / "roles/host_settings/tasks").mkdir(parents=True)
    (collection / "plugins").symlink_to(ROOT / "plugins")
    (collection / "roles/nvidia_driver").symlink_to(ROOT / "roles/nvidia_driver")
    asked = ("allowed", "timeout", "reasons | join")
    words = " ".join(f"{{{{ host_settings_reboot_{name} }}}}" for name in asked)
    stand_in = [
        {"ansible.builtin.debug": {"msg": f"asked: {words}"}},
        {"ansible.builtin.set_fact": {"host_settings_result": {"reboot_required": False}}},
    ]
    (collection / "roles/host_settings/tasks/reboot.yml").write_text(yaml.safe_dump(stand_in, sort_keys=False))
    path = f"{folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    play = {
        "hosts": "here",
        "gather_facts": False,
        "environment": {"PATH": path},
        "tasks": [
            {
                "ansible.builtin.set_fact": {
                    "_nvidia_driver_loading": {"action": "reload", "why": "580.95.05 is loaded"}
                }
            },
            {
                "ansible.builtin.include_role": {"name": "serving.gpu_node.nvidia_driver", "tasks_from": tasks},
                "vars": variables,
            },
            {
                "ansible.builtin.copy": {
                    "content": "{{ {'loading': _nvidia_driver_loading} | to_json }}",
                    "dest": str(folder / "told.json"),
                    "mode": "0600",
                }
            },
        ],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": local}}}))
    told = folder / "told.json"
    _, output = run_playbook(folder, folder / "hosts.yml", folder / "play.yml", collections=folder / "collections")
    loading = json.loads(told.read_text())["loading"] if told.exists() else {}
    return loading, output


def unload(folder: Path, modules: str, rmmod: str = "") -> tuple[dict[str, Any], str]:
    program(folder, "rmmod", rmmod)
    (folder / "modules").write_text(modules)
    return run_tasks(
        folder, "unload", _nvidia_driver_modules_file=str(folder / "modules"), _nvidia_driver_complete=False
    )


def test_what_is_loaded_is_unloaded_in_order(tmp_path: Path) -> None:
    loading, output = unload(tmp_path, MODULES)
    assert loading.get("action") == "reload", output
    assert (tmp_path / "calls").read_text().split()[1:] == ["nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia"]


def test_a_module_in_use_waits_for_a_reboot_and_none_is_taken_out(tmp_path: Path) -> None:
    loading, output = unload(tmp_path, MODULES.replace("nvidia_uvm 4816896 0", "nvidia_uvm 4816896 4"))
    assert loading == {
        "action": "reboot",
        "why": "580.95.05 is loaded, and the loaded module is in use (nvidia_uvm by 4 open devices)",
    }, output
    assert not (tmp_path / "calls").exists()


def test_a_module_that_is_taken_into_use_meanwhile_waits_for_a_reboot(tmp_path: Path) -> None:
    loading, output = unload(tmp_path, MODULES, "echo 'rmmod: ERROR: Module nvidia_uvm is in use' >&2; exit 1\n")
    assert loading["action"] == "reboot", output
    assert loading["why"].endswith("(rmmod: ERROR: Module nvidia_uvm is in use)")


def reboot(folder: Path, installed: str) -> tuple[dict[str, Any], str]:
    program(folder, "dpkg-query")
    return run_tasks(folder, "reboot", _nvidia_driver_installed=installed, nvidia_driver_reboot_timeout_s=900)


def test_a_node_that_comes_back_without_the_driver_is_refused(tmp_path: Path) -> None:
    loading, output = reboot(tmp_path, "590.48.01")
    assert "asked: True 900 NVIDIA driver: 580.95.05 is loaded" in output
    assert "After the reboot: loaded is " in output
    assert "wanted 590.48.01. Look for NVRM" in output
    assert loading == {}


def test_a_reboot_that_brought_the_driver_is_done_with(tmp_path: Path) -> None:
    version = Path("/proc/driver/nvidia/version")
    loaded = parse_driver_version(version.read_text())["version"] if version.exists() else ""
    loading, output = reboot(tmp_path, loaded)
    assert loading == {"action": "none", "why": ""}, output
