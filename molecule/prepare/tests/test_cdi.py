"""Containers with GPUs on a node without any: a stand-in for NVIDIA's toolkit, everything else is real.

The tests follow one another: bare, refused, installed, broken in every way. What is a stand-in is said in
tests/doubles/container_toolkit/README.md.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

pytestmark = pytest.mark.full

PROJECT = Path(__file__).resolve().parents[3]
DOUBLES = PROJECT / "tests" / "doubles" / "container_toolkit"
FIRST = "GPU-00000000-0000-0000-0000-000000000010"
SECOND = "GPU-00000000-0000-0000-0000-000000000011"
ABSENT = "GPU-00000000-0000-0000-0000-0000000000ff"
SPEC = "/etc/cdi/nvidia.yaml"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
REPOSITORY = "http://127.0.0.1:8099"
OURS = (
    "/etc/apt/keyrings/gpu-node-container-toolkit.asc",
    "/etc/apt/sources.list.d/gpu-node-container-toolkit.sources",
    "/etc/systemd/system/nvidia-cdi-refresh.service",
    "/etc/systemd/system/gpu-node-cdi.service",
    SPEC,
)
Run = Callable[..., subprocess.CompletedProcess[str]]


def ansible(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of Ansible's programs against the scenario's node."""
    inventory = os.environ.get("PREPARE_INVENTORY", "molecule/prepare/inventory")
    return subprocess.run(
        [str(Path(sys.executable).parent / program), "-i", "inventories/demo", "-i", inventory, *arguments],
        cwd=PROJECT,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
            "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
            "MOLECULE_PROJECT_DIRECTORY": str(PROJECT),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def changed(play: subprocess.CompletedProcess[str]) -> int:
    return int(re.findall(r"^gpu-node\s+:.*?\bchanged=(\d+)", play.stdout, re.MULTILINE)[-1])


def words(play: subprocess.CompletedProcess[str]) -> str:
    """The output in one line: Ansible wraps what it prints."""
    return " ".join(play.stdout.split())


@pytest.fixture(scope="module")
def repository(host: Host) -> str:
    """A signed apt repository on the node; returns its key's fingerprint."""
    target = "/srv/doubles"
    host.check_output("rm -rf %s && mkdir -p %s", target, target)
    for file in DOUBLES.iterdir():
        script = f"cat >{target}/{file.name}"
        host.check_output("printf %s %s | base64 -d | sh -c %s", "%s", encoded(file), script)
    host.check_output("apt-get -q update && sh %s/make_repository.sh 1.17.7 1.18.2 1.19.0 1.19.1", target)
    return str(host.check_output("cat /srv/toolkit/fingerprint"))


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


@pytest.fixture(scope="module")
def docker(host: Host) -> str:
    """An operator's Docker beside Podman; returns since when it runs."""
    host.check_output(
        "DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends docker.io"
        " && systemctl start docker"
    )
    return docker_start(host)


def docker_start(host: Host) -> str:
    return str(
        host.check_output("systemctl show docker --property=ActiveState,MainPID,ExecMainStartTimestampMonotonic")
    )


@pytest.fixture(scope="module")
def role(repository: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`role(*arguments, **variables)`: container_runtime for a plan with the two "GPUs"."""
    folder = tmp_path_factory.mktemp("role")
    gpus = [{"pci_address": "0000:38:00.0", "uuid": FIRST}, {"pci_address": "0000:49:00.0", "uuid": SECOND}]

    def run(*arguments: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        extra = {
            "serving_plan_result": {"device": "cuda", "replicas": [{"gpus": gpus}]},
            "topology_result": {"topology": {"gpus": []}},
            "container_runtime_storage_gib": 1,
            "container_runtime_repository_url": f"{REPOSITORY}/deb",
            "container_runtime_repository_suite": "./",
            "container_runtime_repository_key": f"{REPOSITORY}/key.asc",
            "container_runtime_repository_fingerprint": repository,
            **variables,
        }
        file = folder / "extra.json"
        file.write_text(json.dumps(extra))
        return ansible("ansible-playbook", *arguments, "-e", f"@{file}", str(DOUBLES / "role.yml"))

    return run


def module(name: str, **arguments: Any) -> dict[str, Any]:
    """What a module of ours answers on the node."""
    done = ansible("ansible", "gpu-node", "-m", f"serving.gpu_node.{name}", "-a", json.dumps(arguments), "-o")
    answer: dict[str, Any] = json.loads(done.stdout.partition("=>")[2])
    return answer


def check(*devices: str) -> dict[str, Any]:
    return module("cdi_spec", devices=list(devices), podman="4.3.1")


def probe(*devices: str) -> dict[str, Any]:
    """Probe with what the specification promises for the GPUs that the node really has."""
    nodes = check(FIRST, SECOND)["nodes"]
    cards = {FIRST: "/dev/nvidia0", SECOND: "/dev/nvidia1"}
    left = {card for uuid, card in cards.items() if uuid not in devices}
    return module("gpu_probe", devices=list(devices), nodes={path: nodes[path] for path in nodes if path not in left})


@pytest.fixture
def specification(host: Host) -> Iterator[Callable[[str], None]]:
    """`specification(text)` writes another one for one test."""
    whole = host.file(SPEC).content_string

    def write(text: str) -> None:
        host.check_output("printf %s %s >%s", "%s", text, SPEC)

    yield write
    write(whole)
    host.run("rm -f /run/cdi/nvidia.yaml")


# --- from a bare node -------------------------------------------------------------------------------------------------


def test_a_dry_run_on_a_bare_node(role: Run, host: Host) -> None:
    play = role("--check")
    assert play.returncode == 0, play.stdout
    assert [path for path in OURS if host.file(path).exists] == []


def test_a_repository_that_another_key_signs(role: Run, host: Host) -> None:
    play = role(container_runtime_repository_key=f"{REPOSITORY}/other.asc")
    assert play.returncode == 2
    assert "container_runtime_repository_key: the key of http://127.0.0.1:8099/other.asc has the fingerprint" in words(
        play
    )
    assert [path for path in OURS if host.file(path).exists] == []


def test_a_version_that_is_known_to_be_bad(role: Run) -> None:
    play = role(container_runtime_toolkit_version="1.19.1")
    assert play.returncode == 2
    assert "nvidia-container-toolkit 1.19.1 is known to be bad: CUDA does not start in containers" in words(play)
    assert changed(play) == 0


def test_a_version_that_the_repository_does_not_have(role: Run, host: Host) -> None:
    play = role(container_runtime_toolkit_version="1.18.9")
    assert play.returncode == 2
    assert "1.18.9 of nvidia-container-toolkit-base is not to be had from" in words(play)
    assert "there are 1.19.1-1, 1.19.0-1, 1.18.2-1, 1.17.7-1" in words(play)
    assert not host.package("nvidia-container-toolkit-base").is_installed


def test_the_toolkit_is_installed_and_gpus_are_proven(role: Run, host: Host, docker: str) -> None:
    play = role()
    assert play.returncode == 0, play.stdout
    assert host.package("nvidia-container-toolkit-base").version == "1.18.2-1"
    assert docker_start(host) == docker
    assert not host.file("/etc/docker/daemon.json").exists


def test_the_second_run_changes_nothing(role: Run) -> None:
    play = role()
    assert (play.returncode, changed(play)) == (0, 0), play.stdout


def test_a_dry_run_on_a_converged_node(role: Run) -> None:
    play = role("--check", "--diff")
    assert (play.returncode, changed(play)) == (0, 0), play.stdout


# --- what is there ----------------------------------------------------------------------------------------------------


def test_no_upgrade_takes_the_version_away(role: Run, host: Host) -> None:
    assert "nvidia-container-toolkit-base" in host.check_output("apt-mark showhold").split()
    simulated = host.check_output("apt-get --simulate dist-upgrade")
    assert "1.19" not in simulated


def test_the_toolkits_own_specification_is_not_made(host: Host) -> None:
    assert host.check_output("systemctl is-enabled nvidia-cdi-refresh.service || true") == "masked"
    assert not host.file("/run/cdi/nvidia.yaml").exists


def test_the_specification_is_made_at_boot_before_replicas(host: Host) -> None:
    for unit in ("gpu-node-cdi.service", "gpu-node-cdi.path"):
        assert host.check_output("systemctl is-enabled %s", unit) == "enabled"
    after = host.file("/etc/systemd/system/vllm-replica@.service.d/cdi.conf").content_string
    assert "After=gpu-node-cdi.service" in after
    assert host.check_output("systemd-analyze verify gpu-node-cdi.service gpu-node-cdi.path 2>&1") == ""


def test_no_hook_of_a_runtime_is_left(host: Host) -> None:
    assert "hook" not in host.file(SPEC).content_string
    assert host.run("ls /etc/containers/oci/hooks.d /usr/share/containers/oci/hooks.d").stdout == ""


# --- the probe --------------------------------------------------------------------------------------------------------


def test_a_container_gets_the_one_gpu_that_it_is_given(role: Run, host: Host) -> None:
    answer = probe(SECOND)
    assert answer["problems"] == []
    before, after = answer["looks"]
    assert before == after
    assert before["cuda"]["uuids"] == [SECOND]
    assert before["nodes"].keys() == {"/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"}
    assert host.check_output("podman ps --all --quiet") == ""
    assert host.check_output("find /var/lib -maxdepth 1 -name '.gpu-node-probe*'") == ""


def test_a_missing_device_is_named(role: Run) -> None:
    assert f"there is no nvidia.com/gpu={ABSENT} in {SPEC}" in check(FIRST, ABSENT)["problems"][0]
    answer = probe(FIRST, ABSENT)
    assert answer["looks"] == []
    assert f"Podman does not find every CDI device of {FIRST}, {ABSENT}:" in answer["problems"][0]


def test_a_gpu_more_than_wanted_is_named(role: Run, specification: Callable[[str], None], host: Host) -> None:
    spec = json.loads(host.file(SPEC).content_string)
    spec["devices"][0]["containerEdits"]["deviceNodes"] += spec["devices"][1]["containerEdits"]["deviceNodes"]
    specification(json.dumps(spec))
    problems = " ".join(probe(FIRST)["problems"])
    assert "has /dev/nvidia1 as well" in problems
    assert f"finds {SECOND} with CUDA, which it was not given" in problems


def test_a_partial_specification_is_named(role: Run, specification: Callable[[str], None], host: Host) -> None:
    spec = json.loads(host.file(SPEC).content_string)
    spec["containerEdits"]["deviceNodes"] = spec["containerEdits"]["deviceNodes"][:1]
    specification(json.dumps(spec))
    assert f"is partial: nvidia.com/gpu={FIRST} comes without /dev/nvidia-uvm" in check(FIRST)["problems"][0]


def test_hooks_are_why_a_container_does_not_start(role: Run, specification: Callable[[str], None], host: Host) -> None:
    """What nvidia-ctk writes does not work with a read-only root under crun."""
    specification(host.check_output("nvidia-ctk cdi generate --device-name-strategy=uuid --format=json"))
    host.check_output("mkdir -p /run/nvidia-persistenced && touch /run/nvidia-persistenced/socket")
    problems = module("gpu_probe", devices=[FIRST], nodes={})["problems"]
    assert "crun makes a read-only root read-only before it runs hooks" in problems[0]


def test_a_second_specification_is_named(role: Run, specification: Callable[[str], None], host: Host) -> None:
    host.check_output("mkdir -p /run/cdi && cp %s /run/cdi/nvidia.yaml", SPEC)
    assert f"{SPEC} and /run/cdi/nvidia.yaml both have" in check(FIRST)["problems"][0]


# --- changes of the driver --------------------------------------------------------------------------------------------


def test_a_specification_that_the_driver_left_behind(role: Run, host: Host) -> None:
    """New libraries and none of the old ones: found without help, then made anew without help."""
    host.check_output("systemctl stop gpu-node-cdi.path")
    host.check_output(
        "mv %s/libcuda.so.590.48.01 %s/libcuda.so.590.99.99 && echo 590.99.99 >/etc/gpu-double/driver && ldconfig",
        LIBRARIES,
        LIBRARIES,
    )
    assert f"is stale: it mounts {LIBRARIES}/libcuda.so.590.48.01" in check(FIRST)["problems"][0]
    play = role(container_runtime_manage=False)
    assert play.returncode == 2
    assert f"is stale: it mounts {LIBRARIES}/libcuda.so.590.48.01" in words(play)
    assert "Would have made the specification anew, but container_runtime_manage is false" in words(play)
    # A line for each problem, not one line with the two characters of a line's end in it.
    assert "\\n" not in play.stdout
    problems = check(FIRST, SECOND)["problems"]
    assert problems
    for problem in problems:
        assert re.search(rf"^\s*- {re.escape(problem[:40])}", play.stdout, re.MULTILINE), play.stdout
    host.check_output("systemctl start gpu-node-cdi.path && touch /etc/ld.so.cache")
    deadline = time.monotonic() + 30
    while "libcuda.so.590.99.99" not in host.file(SPEC).content_string:
        assert time.monotonic() < deadline, host.check_output("journalctl -u gpu-node-cdi.service -n 20")
        time.sleep(0.5)
    assert check(FIRST, SECOND)["problems"] == []


def test_a_driver_that_does_not_answer(role: Run, host: Host) -> None:
    """Kernel module and libraries of two drivers until the next boot: said, and what is there stays."""
    host.check_output("systemctl stop gpu-node-cdi.path")
    spec = host.file(SPEC).content_string
    host.check_output("rm -f %s", SPEC)
    host.check_output("echo 'Driver/library version mismatch' >/etc/gpu-double/failure")
    play = role()
    assert play.returncode == 2
    assert "The CDI specification could not be made:" in words(play)
    assert "Driver/library version mismatch" in words(play)
    host.check_output("rm /etc/gpu-double/failure")
    play = role()
    assert play.returncode == 0, play.stdout
    assert host.file(SPEC).content_string == spec


def test_a_driver_that_is_not_loaded_yet(role: Run) -> None:
    gpus = [{"pci_address": "0000:38:00.0", "uuid": "auto"}]
    play = role(serving_plan_result={"device": "cuda", "replicas": [{"gpus": gpus}]})
    assert (play.returncode, changed(play)) == (0, 0), play.stdout
    assert "No container was tried: the driver does not tell 0000:38:00.0 yet" in words(play)


def test_dockers_daemon_was_never_restarted(role: Run, host: Host, docker: str) -> None:
    assert docker_start(host) == docker
