"""What the role nvidia_driver does on a node: its tasks, with stand-ins for what touches one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.plugins.playbooks import run_playbook
from tests.unit.plugins.test_nvidia_driver import MODULES, host

ROOT = Path(__file__).resolve().parents[3]
FAKE = '#!/bin/sh\necho "$0 $*" >>"$(dirname "$0")/calls"\n'


def program(folder: Path, name: str, text: str = "") -> None:
    (folder / name).write_text(FAKE + text)
    (folder / name).chmod(0o755)


# Answers with what the test wrote, in place of reading a machine.
MODULE = """#!/usr/bin/python
import json
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"paths": {"type": "list"}}, supports_check_mode=True)
module.exit_json(changed=False, **json.load(open("FILE")))
"""
# Stands in for community.general's, which reads /proc/modules.
MODPROBE = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule(argument_spec={"name": {}, "state": {}})
open("FOLDER/calls", "a").write("modprobe " + module.params["name"] + chr(10))
module.exit_json(changed=True)
"""
# What the module systemd_service asks of a unit that runs, before it stops or starts it.
SYSTEMCTL = """case $1 in show) echo "LoadState=loaded"; echo "ActiveState=${STATE:-active}";; esac
"""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to root takes root")
CARDS = [f"0000:{bus}:00.0" for bus in ("38", "41")]


def lay_out_modules(folder: Path, collection: Path, answers: dict[str, dict[str, Any]]) -> None:
    """Make the collection's plugins; the modules that read a machine answer what is given."""
    (collection / "plugins/modules").mkdir(parents=True)
    for path in (ROOT / "plugins").iterdir():
        if path.name not in ("modules", "__pycache__"):
            (collection / "plugins" / path.name).symlink_to(path)
    for path in (ROOT / "plugins/modules").glob("*.py"):
        target = collection / "plugins/modules" / path.name
        if path.stem in answers:
            (folder / f"{path.stem}.json").write_text(json.dumps(answers[path.stem]))
            target.write_text(MODULE.replace("FILE", str(folder / f"{path.stem}.json")))
        else:
            target.symlink_to(path)
    general = folder / "collections/ansible_collections/community/general/plugins/modules"
    general.mkdir(parents=True)
    (general / "modprobe.py").write_text(MODPROBE.replace("FOLDER", str(folder)))


def machine(loaded: str, *lost: str, **changes: Any) -> dict[str, dict[str, Any]]:
    """A server with two cards, those of `lost` without a UUID, as the modules tell it."""
    gpus = [{"pci_address": card, "device_id": "0x2bb5", "driver": "nvidia" if loaded else ""} for card in CARDS]
    told = [{"pci_address": card, "uuid": "" if card in lost else f"GPU-{card}"} for card in CARDS]
    state = host(gpus=gpus, nvidia__loaded=loaded, **changes)
    return {
        "host_state": {"host": state},
        "gpu_topology": {"topology": {"gpus": told, "driver": {"version": loaded}}},
    }


def plan(*cards: str) -> dict[str, Any]:
    return {"replicas": [{"gpus": [{"pci_address": card, "uuid": "auto"} for card in cards]}]}


def run_tasks(
    folder: Path, tasks: str, *arguments: str, answers: dict[str, dict[str, Any]] | None = None, **variables: Any
) -> tuple[dict[str, Any], str]:
    """Include a file of the role's tasks; return how the module is to be loaded then, and what was printed.

    The role host_settings is a stand-in that says that the machine was started anew.
    """
    collection = folder / "collections/ansible_collections/serving/gpu_node"
    (collection / "roles/host_settings/tasks").mkdir(parents=True)
    lay_out_modules(folder, collection, answers or machine(""))
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
        "environment": {"PATH": path, "STATE": variables.pop("state", "active")},
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
    _, output = run_playbook(
        folder, folder / "hosts.yml", folder / "play.yml", *arguments, collections=folder / "collections"
    )
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


def reboot(folder: Path, answers: dict[str, dict[str, Any]], **variables: Any) -> tuple[dict[str, Any], str]:
    program(folder, "dpkg-query")
    return run_tasks(
        folder,
        "reboot",
        answers=answers,
        _nvidia_driver_installed="590.48.01",
        nvidia_driver_reboot_timeout_s=900,
        **variables,
    )


def test_a_node_that_comes_back_without_the_driver_is_refused(tmp_path: Path) -> None:
    loading, output = reboot(tmp_path, machine("580.95.05"))
    assert "asked: True 900 NVIDIA driver: 580.95.05 is loaded" in output
    assert "After the reboot: loaded is 580.95.05, wanted 590.48.01. Look for NVRM" in output
    assert loading == {}


def test_a_reboot_that_brought_the_driver_is_done_with(tmp_path: Path) -> None:
    loading, output = reboot(tmp_path, machine("590.48.01"))
    assert loading == {"action": "none", "why": ""}, output


def test_a_card_that_does_not_come_up_after_the_reboot_is_named(tmp_path: Path) -> None:
    # DRV-01
    loading, output = reboot(tmp_path, machine("590.48.01", CARDS[1]), serving_plan_result=plan(*CARDS))
    assert "Driver 590.48.01 is loaded, and 0000:41:00.0 did not come up with it. Look for NVRM, Xid" in output
    assert loading == {}


# --- into the kernel -----------------------------------------------------------------------------------------


def load(folder: Path, answers: dict[str, dict[str, Any]], **variables: Any) -> tuple[dict[str, Any], str]:
    """The node has 590.48.01 installed, and no module has it loaded when the tasks begin."""
    for name in ("rmmod", "dpkg-query"):
        program(folder, name)
    (folder / "modules").write_text(MODULES)
    given = {
        "_nvidia_driver_host": "{{ __nvidia_driver_read.host | default(before) }}",
        "before": machine("")["host_state"]["host"],
        "_nvidia_driver_installed": "590.48.01",
        "_nvidia_driver_complete": False,
        "_nvidia_driver_options_wait": False,
        "_nvidia_driver_waiting_file": str(folder / "waiting"),
        "_nvidia_driver_modules_file": str(folder / "modules"),
    }
    return run_tasks(folder, "load", answers=answers, **{**given, **variables})


def test_a_driver_with_every_card_of_the_plan_is_taken(tmp_path: Path) -> None:
    loading, output = load(tmp_path, machine("590.48.01"), serving_plan_result=plan(*CARDS))
    assert loading == {"action": "load", "why": "no driver is loaded"}, output
    assert "modprobe nvidia\n" in (tmp_path / "calls").read_text()


def test_a_card_that_the_new_driver_does_not_initialise_is_named(tmp_path: Path) -> None:
    # DRV-01
    loading, output = load(tmp_path, machine("590.48.01", CARDS[0]), serving_plan_result=plan(*CARDS))
    assert "Driver 590.48.01 is loaded, and 0000:38:00.0 did not come up with it" in output
    assert "reset or reseat the card, or leave it out of the plan (gpus)" in output
    assert loading == {}


def test_a_module_of_another_version_is_refused(tmp_path: Path) -> None:
    loading, output = load(tmp_path, machine("580.95.05"))
    assert "Loaded is 580.95.05, wanted 590.48.01. Look for NVRM in the kernel's log" in output
    assert loading == {}


def test_options_that_wait_have_the_module_loaded_anew_and_are_then_forgotten(tmp_path: Path) -> None:
    (tmp_path / "waiting").touch()
    loaded = machine("590.48.01")
    loading, output = load(tmp_path, loaded, before=loaded["host_state"]["host"], _nvidia_driver_options_wait=True)
    assert loading == {"action": "reload", "why": "its options changed"}, output
    assert "rmmod nvidia_uvm" in (tmp_path / "calls").read_text()
    assert not (tmp_path / "waiting").exists()


def test_options_that_wait_for_a_module_in_use_ask_for_a_reboot(tmp_path: Path) -> None:
    (tmp_path / "waiting").touch()
    loaded = machine("590.48.01")
    (tmp_path / "used").write_text(MODULES.replace("nvidia_uvm 4816896 0", "nvidia_uvm 4816896 4"))
    loading, output = load(
        tmp_path,
        loaded,
        before=loaded["host_state"]["host"],
        _nvidia_driver_options_wait=True,
        _nvidia_driver_modules_file=str(tmp_path / "used"),
    )
    assert loading["action"] == "reboot", output
    assert loading["why"].startswith("its options changed, and the loaded module is in use")
    # so the next run asks for it as well
    assert (tmp_path / "waiting").exists()


# --- options -------------------------------------------------------------------------------------------------


@as_root
@pytest.mark.parametrize(
    ("loaded", "written", "waits"),
    [
        ("590.48.01", "options nvidia_uvm uvm_disable_hmm=1\n", True),
        # Nothing of the options themselves is another than before.
        ("590.48.01", "# an older text\noptions nouveau modeset=0\n", False),
        ("", "options nvidia_uvm uvm_disable_hmm=1\n", False),
    ],
    ids=["others are loaded", "the same", "nothing is loaded"],
)
def test_other_options_than_the_loaded_ones_are_remembered(
    tmp_path: Path, loaded: str, written: str, waits: bool
) -> None:
    program(tmp_path, "update-initramfs")
    file, waiting = tmp_path / "modprobe.d/nvidia.conf", tmp_path / "waiting"
    file.parent.mkdir()
    file.write_text(written)
    loading, output = run_tasks(
        tmp_path,
        "set_options",
        # Without a card nothing is written for the boot.
        _nvidia_driver_host={**machine(loaded)["host_state"]["host"], "gpus": []},
        _nvidia_driver_modules={"nvidia": "nvidia", "nvidia_uvm": "nvidia_uvm"},
        _nvidia_driver_options_file=str(file),
        _nvidia_driver_waiting_file=str(waiting),
    )
    assert loading != {}, output
    assert "blacklist nouveau" in file.read_text()
    assert waiting.exists() == waits


# --- replicas ------------------------------------------------------------------------------------------------


@as_root
def test_a_second_drain_forgets_no_replica_of_an_interrupted_one(tmp_path: Path) -> None:
    program(tmp_path, "systemctl", SYSTEMCTL)
    drained = tmp_path / "drained"
    drained.write_text("vllm-replica@0.service\nvllm-replica@1.service\n")
    _, output = run_tasks(
        tmp_path,
        "drain",
        _nvidia_driver_drained_file=str(drained),
        __nvidia_driver_running=["vllm-replica@1.service", "vllm-replica@2.service"],
    )
    assert drained.read_text().split() == [f"vllm-replica@{number}.service" for number in range(3)], output
    calls = (tmp_path / "calls").read_text()
    assert "stop vllm-replica@1.service" in calls
    assert "stop vllm-replica@2.service" in calls


def test_drained_replicas_are_started_again_and_forgotten(tmp_path: Path) -> None:
    program(tmp_path, "systemctl", SYSTEMCTL)
    drained = tmp_path / "drained"
    drained.write_text("vllm-replica@0.service\nvllm-replica@1.service\n")
    _, output = run_tasks(tmp_path, "resume", state="inactive", _nvidia_driver_drained_file=str(drained))
    calls = (tmp_path / "calls").read_text()
    assert [f"start vllm-replica@{number}.service" in calls for number in (0, 1)] == [True, True], output
    assert not drained.exists()


def refuse(folder: Path, running: str, **variables: Any) -> tuple[dict[str, Any], str]:
    program(folder, "systemctl", f"printf '{running}'\n")
    given = {
        "_nvidia_driver_host": machine("580.95.05")["host_state"]["host"],
        "_nvidia_driver_installed": "590.48.01",
        "_nvidia_driver_complete": True,
    }
    return run_tasks(folder, "refuse", **{**given, **variables})


UNIT = "vllm-replica@0.service loaded active running vLLM replica 0\\n"


def test_the_driver_is_not_changed_under_running_replicas(tmp_path: Path) -> None:
    loading, output = refuse(tmp_path, UNIT)
    assert (
        "Nothing was changed. The driver is to become 590.48.01 (now 590.48.01), and vllm-replica@0.service" in output
    )
    assert "set nvidia_driver_drain_allowed: true" in output
    assert loading == {}


@pytest.mark.parametrize(
    ("running", "variables"),
    [(UNIT, {"nvidia_driver_drain_allowed": "yes"}), ("", {"nvidia_driver_drain_allowed": "false"})],
)
def test_it_is_changed_with_consent_or_where_nothing_runs(
    tmp_path: Path, running: str, variables: dict[str, Any]
) -> None:
    loading, output = refuse(tmp_path, running, **variables)
    assert loading["action"] == "reload", output


# --- the module on disk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("licence", "fits"), [("Dual MIT/GPL", True), ("NVIDIA", False)])
def test_a_module_that_is_not_the_open_one_is_refused(tmp_path: Path, licence: str, fits: bool) -> None:
    program(tmp_path, "modinfo", f"echo '{licence}'\n")
    built = [{"module": "nvidia", "version": "590.48.01", "kernel": "6.1.0-50-amd64", "state": "installed"}]
    loading, output = run_tasks(
        tmp_path,
        "build",
        _nvidia_driver_host=machine("", nvidia__dkms=built)["host_state"]["host"],
        _nvidia_driver_installed="590.48.01",
        _nvidia_driver_wanted_kernels=["6.1.0-50-amd64"],
        _nvidia_driver_modules={"nvidia": "nvidia", "nvidia_uvm": "nvidia_uvm"},
        _nvidia_driver_complete=True,
    )
    assert (loading != {}) == fits, output
    assert ("Blackwell cards work with no other" in output) != fits


# --- holds ---------------------------------------------------------------------------------------------------


def hold(folder: Path, message: str) -> str:
    """Hold a package while dpkg fails once with a message."""
    once = f"[ -e {folder}/failed ] || {{ touch {folder}/failed; echo '{message}' >&2; exit 2; }}\n"
    program(folder, "dpkg", f'case "$*" in *set-selections*) cat >/dev/null; {once};; *) echo "x install";; esac\n')
    _, output = run_tasks(
        folder,
        "hold",
        _nvidia_driver_host=machine("")["host_state"]["host"] | {"nvidia": {"held": []}},
        _nvidia_driver_present={"nvidia-driver-cuda": "590.48.01-1"},
        nvidia_driver_apt_lock_timeout_s=10,
    )
    return output


def test_a_hold_waits_for_the_lock(tmp_path: Path) -> None:
    output = hold(tmp_path, "dpkg: error: dpkg frontend lock was locked by another process with pid 71")
    assert (tmp_path / "calls").read_text().count("--set-selections") == 2, output
    assert "failed=0" in output


def test_a_hold_that_fails_for_another_reason_is_not_repeated(tmp_path: Path) -> None:
    output = hold(tmp_path, "dpkg: error: no such disk")
    assert (tmp_path / "calls").read_text().count("--set-selections") == 1, output
    assert "failed=1" in output
