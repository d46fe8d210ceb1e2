"""Debian 13 with cgroup v2 and two real NUMA nodes: the dry run, Podman, the plan, and containers that hold to it.

Everything is the product's own, the unit included, but for the engine: emulated in software, vLLM would take hours to
start. The container's `vllm` is a shell script that looks at its confinement and waits, so the unit's gate, which
waits for a token, is left out.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from typing import Any

import jinja2
import pytest
from ansible.plugins.loader import init_plugin_loader
from nodes import Node, free_port
from testhost import ROOT
from virtual_machine import VirtualMachine

# Ansible's own import hook: the regular package `ansible_collections` in site-packages would hide the checkout.
init_plugin_loader([str(ROOT / "collections")])

from ansible_collections.serving.gpu_node.plugins.module_utils.plan import node_config  # noqa: E402
from ansible_collections.serving.gpu_node.plugins.module_utils.release import resolve_plan  # noqa: E402
from ansible_collections.serving.gpu_node.plugins.module_utils.settings import podman_bytes  # noqa: E402

pytestmark = pytest.mark.full

NAME = "gpu-node-test-numa"
PREPARE = "playbooks/prepare.yml"
MEMORY = "512m"
OVERRIDES = {
    "container_memory": MEMORY,
    "shm_size": "64m",
    "drain_timeout": 5,
    "shutdown_timeout": 5,
    "balancer_address": "127.0.0.1",
}
# The machine's disk is small, and a stand-in serves: no image of the engine comes to it.
EXTRA = {"serving_plan_overrides": OVERRIDES, "preflight_space_gib": {"image": 1, "state": 1}}
ENGINE = """\
#!/bin/busybox sh
trap 'exit 0' TERM
if busybox touch /probe; then echo root=writable; else echo root=read-only; fi
busybox cp /bin/busybox /tmp/busybox && /tmp/busybox true && echo tmp=executable
echo "args=$*"
echo "model=$(busybox ls /model)"
busybox sleep 100000 &
wait
"""
MAKE_IMAGE = """\
set -e
mkdir -p /srv/image/bin /srv/image/tmp
cp "$(command -v busybox)" /srv/image/bin/
cat >/srv/image/bin/vllm
chmod 0755 /srv/image/bin/vllm
tar -C /srv/image -c . | podman import -q - localhost/gpu-node/stand-in >&2
podman image inspect --format '{{.Id}}' localhost/gpu-node/stand-in
"""
# What the kernel says of a replica's container; its output is a JSON object.
LOOK = """\
import json, subprocess, sys
from pathlib import Path
index = sys.argv[1]
wanted = {"Cpus_allowed_list", "Mems_allowed_list", "NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}
def output(*argv):
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
def status(pid):
    pairs = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value.strip() for name, _, value in pairs if name in wanted}
pid = output("podman", "container", "inspect", "--format", "{{.State.Pid}}", f"vllm-replica-{index}")
top = Path("/sys/fs/cgroup")
payload = top / Path(f"/proc/{pid}/cgroup").read_text().strip().removeprefix("0::/")
maps = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
own = [line for line in maps if "anon=" in line and "file=" not in line]
print(json.dumps({
    "pid": pid,
    "unit": output("systemctl", "show", "--value", "-p", "ControlGroup", f"vllm-replica@{index}.service"),
    "cgroup": "/" + str(payload.relative_to(top)),
    "memory_max": (payload / "memory.max").read_text().strip(),
    "status": {one: status(one) for one in (payload / "cgroup.procs").read_text().split()},
    "memory_on": sorted({word.split("=")[0] for line in own for word in line.split() if word[:1] == "N"}),
}))
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[VirtualMachine]:
    one = VirtualMachine(NAME, free_port(), 0)
    one.down()
    one.up()
    yield one
    one.down()


@pytest.fixture(scope="module")
def prepared(machine: VirtualMachine) -> VirtualMachine:
    play = machine.playbook(playbook=PREPARE, extra=EXTRA)
    assert play.rc == 0, play.tail()
    return machine


@pytest.fixture(scope="module")
def plan(machine: VirtualMachine) -> dict[str, Any]:
    """The plan that plan.yml makes of the machine."""
    saved = machine.folder / "plan.json"
    save = {"content": "{{ serving_plan_result | ansible.builtin.to_json }}", "dest": str(saved), "mode": "0600"}
    task = {"name": "Save", "ansible.builtin.copy": save, "delegate_to": "localhost"}
    plays = [
        {"import_playbook": str(ROOT / "playbooks/plan.yml")},
        {"name": "Save the plan", "hosts": "gpu_nodes", "gather_facts": False, "tasks": [task]},
    ]
    playbook = machine.folder / "save-plan.yml"
    playbook.write_text(json.dumps(plays))
    play = machine.playbook(playbook=str(playbook), extra=EXTRA)
    assert play.rc == 0, play.tail()
    for line in (
        "replica 0: vllm-replica@0.service port 8000 CPUs 0-1 memory node 0 cap 512m",
        "replica 1: vllm-replica@1.service port 8001 CPUs 2-3 memory node 1 cap 512m",
    ):
        assert line in play.output
    loaded: dict[str, Any] = json.loads(saved.read_text())
    return loaded


def unit_text(plan: dict[str, Any]) -> str:
    """The product's unit, its gate that waits for a token replaced by a command that systemd must be able to start."""
    template = (ROOT / "roles/replica/templates/vllm-replica@.service.j2").read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    text = environment.from_string(template).render(ansible_managed="", serving_plan_result=plan)
    gate = "ExecStartPost=/usr/local/bin/gpu-node unit-ready %i\n"
    assert gate in text
    return text.replace(gate, "ExecStartPost=/bin/true\n")


def node_files(resolved: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Text and mode of everything that a replica's unit needs on the node."""
    files = {
        "etc/gpu-node/node.json": (json.dumps(node_config(resolved)), 0o644),
        "etc/gpu-node/secrets/engine.env": ("VLLM_API_KEY=not-asked-for\n", 0o600),
        "etc/systemd/system/vllm-replica@.service": (unit_text(resolved), 0o644),
        "usr/local/bin/gpu-node": ((ROOT / "roles/node_tool/files/gpu-node").read_text(), 0o755),
    }
    for path in (ROOT / "roles/node_tool/files/gpu_node").glob("*.py"):
        files[f"usr/local/lib/gpu-node/gpu_node/{path.name}"] = (path.read_text(), 0o644)
    for replica in resolved["replicas"]:
        model, image = replica["model"], replica["image"]
        files[f"var/lib/gpu-node/artifacts/{model['name']}/{model['digest'][:12]}/config.json"] = ("{}\n", 0o644)
        files[f"var/lib/gpu-node/cache/{replica['index']}/{image['id'][:12]}/.keep"] = ("", 0o600)
        for name, text in replica["files"].items():
            files[f"var/lib/gpu-node/releases/{replica['release']}/{name}"] = (text, 0o644)
    return files


def unpack(machine: Node, resolved: dict[str, Any]) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, (text, mode) in node_files(resolved).items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text.encode()), mode
            tar.addfile(member, io.BytesIO(text.encode()))
        for replica in resolved["replicas"]:
            link = tarfile.TarInfo(f"var/lib/gpu-node/replicas/{replica['index']}/current")
            link.type, link.linkname = tarfile.SYMTYPE, f"/var/lib/gpu-node/releases/{replica['release']}"
            tar.addfile(link)
    argv = machine.ssh_argv("tar -x --no-same-owner -f - -C / && systemctl daemon-reload")
    subprocess.run(argv, input=archive.getvalue(), check=True, timeout=300)


@pytest.fixture(scope="module")
def looks(prepared: VirtualMachine, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """What the kernel says of each replica's container, both running."""
    image = prepared.ssh(MAKE_IMAGE, stdin=ENGINE, timeout=300).strip()
    resolved = resolve_plan(
        plan, {"model": "0" * 64}, {"ref": "localhost/gpu-node/stand-in:latest", "id": image}, [], [], {}
    )
    unpack(prepared, resolved)
    for index in (0, 1):
        unit = f"vllm-replica@{index}.service"
        done = prepared.run(f"systemctl start {unit}", timeout=400)
        journal = prepared.ssh(f"journalctl -u {unit} -o cat --no-pager", timeout=120)
        assert done.returncode == 0, journal
    return [json.loads(prepared.ssh(f"python3 - {index}", stdin=LOOK, timeout=300)) for index in (0, 1)]


@pytest.mark.parametrize("playbook", ["playbooks/plan.yml", PREPARE])
def test_a_dry_run_on_the_bare_machine_is_clean(machine: VirtualMachine, playbook: str) -> None:
    assert machine.run("command -v podman nginx || python3 -c 'import apt'").returncode != 0
    play = machine.playbook("--check", playbook=playbook, extra=EXTRA)
    assert play.rc == 0, play.tail()
    assert machine.run("ls /etc/gpu-node /usr/bin/podman").stdout == ""


def test_each_replica_gets_a_numa_node_of_its_own(plan: dict[str, Any]) -> None:
    assert [(one["cpus"], one["memory_nodes"]) for one in plan["replicas"]] == [("0-1", "0"), ("2-3", "1")]


def test_podman_is_installed_once(prepared: VirtualMachine) -> None:
    assert prepared.ssh("podman version --format '{{.Client.Version}}'").startswith("5.")
    again = prepared.playbook(playbook=PREPARE, extra=EXTRA)
    assert (again.rc, again.changed) == (0, 0), again.tail()


def test_replicas_are_pinned_to_their_numa_nodes(
    prepared: VirtualMachine, plan: dict[str, Any], looks: list[dict[str, Any]]
) -> None:
    # Without a pin every CPU and both memory nodes are allowed, and the kernel says so.
    free = prepared.ssh("grep -E '^(Cpus|Mems)_allowed_list' /proc/1/status").split()
    assert free == ["Cpus_allowed_list:", "0-3", "Mems_allowed_list:", "0-1"]
    for replica, look in zip(plan["replicas"], looks, strict=True):
        assert len(look["status"]) > 1
        for status in look["status"].values():
            assert status["Cpus_allowed_list"] == replica["cpus"]
            assert status["Mems_allowed_list"] == replica["memory_nodes"]
        assert look["memory_on"] == [f"N{replica['memory_nodes']}"]


def test_replicas_are_confined_inside_their_units(looks: list[dict[str, Any]]) -> None:
    for index, look in enumerate(looks):
        assert look["unit"].endswith(f"/vllm-replica@{index}.service")
        assert look["cgroup"].startswith(look["unit"] + "/")
        assert look["memory_max"] == str(podman_bytes(MEMORY))
        for status in look["status"].values():
            for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
                assert int(status[kind], 16) == 0, kind
            assert status["NoNewPrivs"] == "1"


def test_the_root_is_read_only_and_tmp_takes_programs(prepared: VirtualMachine, looks: list[dict[str, Any]]) -> None:
    for index in range(len(looks)):
        said = prepared.ssh(f"journalctl -u vllm-replica@{index} -o cat --no-pager", timeout=120).splitlines()
        wanted = {"root=read-only", "tmp=executable", "args=serve --config /etc/vllm/engine.yaml", "model=config.json"}
        assert wanted <= set(said), said


def test_a_stop_leaves_the_other_replica_alone(prepared: VirtualMachine, looks: list[dict[str, Any]]) -> None:
    prepared.ssh("systemctl stop vllm-replica@0", timeout=400)
    shown = prepared.ssh("systemctl show -p ActiveState -p Result vllm-replica@0").split()
    assert sorted(shown) == ["ActiveState=inactive", "Result=success"]
    assert prepared.run("podman container exists vllm-replica-0").returncode == 1
    assert json.loads(prepared.ssh("python3 - 1", stdin=LOOK, timeout=300))["pid"] == looks[1]["pid"]
