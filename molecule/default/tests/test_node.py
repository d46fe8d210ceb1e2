"""What really runs on a node that site.yml made serve, compared with its releases."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from typing import Any

import pytest
from testinfra.host import Host

LOOPBACK = re.compile(r"127\.|\[?::1\]?$|\[::ffff:127\.")


def read_json(host: Host, path: str) -> dict[str, Any]:
    return dict(json.loads(host.file(path).content_string))


@pytest.fixture(scope="module")
def node(host: Host) -> dict[str, Any]:
    return read_json(host, "/etc/gpu-node/node.json")


@pytest.fixture(scope="module")
def secrets(host: Host) -> list[str]:
    engine = host.file("/etc/gpu-node/secrets/engine.env").content_string.strip().partition("=")[2]
    clients = [client["key"] for client in json.loads(host.file("/etc/gpu-node/secrets/clients.json").content_string)]
    assert len(engine) >= 32
    assert clients, "the demo's balancer listens beyond loopback, so it must have clients"
    assert engine not in clients
    return [engine, *clients]


@pytest.fixture(params=[0, 1])
def release(request: pytest.FixtureRequest, host: Host) -> dict[str, Any]:
    """The current release of one replica."""
    return read_json(host, f"/var/lib/gpu-node/replicas/{request.param}/current/release.json")


def unit_of(release: dict[str, Any]) -> str:
    return f"vllm-replica@{release['replica']}.service"


def processes(host: Host, release: dict[str, Any]) -> list[int]:
    """Every process in the unit's control group, the engine's included, on cgroup v1 and v2."""
    group = host.check_output("systemctl show --property ControlGroup --value %s", unit_of(release))
    found = host.check_output(
        "for root in /sys/fs/cgroup/systemd /sys/fs/cgroup; do "
        'test -d "$root"%s && find "$root"%s -name cgroup.procs -exec cat {} + && break; done',
        group,
        group,
    )
    return [int(pid) for pid in found.split()]


def command_line(host: Host, pid: int) -> list[str]:
    return host.check_output("tr '\\0' '\\n' </proc/%s/cmdline", str(pid)).splitlines()


def engine_processes(host: Host, release: dict[str, Any]) -> list[int]:
    """The container's processes: everything but conmon."""
    return [pid for pid in processes(host, release) if "conmon" not in command_line(host, pid)[0]]


def status(host: Host, pid: int) -> dict[str, str]:
    lines = host.file(f"/proc/{pid}/status").content_string.splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_the_node_is_healthy(host: Host) -> None:
    assert host.check_output("systemctl is-system-running") == "running"


@pytest.mark.parametrize("name", ["nginx", "gpu-node-boot", "gpu-node-prober"])
def test_services_run_now_and_after_a_boot(host: Host, name: str) -> None:
    assert host.service(name).is_running
    assert host.service(name).is_enabled


def test_there_are_two_replicas(node: dict[str, Any]) -> None:
    assert [replica["index"] for replica in node["replicas"]] == [0, 1]


def test_the_replica_runs_now_and_after_a_boot(host: Host, release: dict[str, Any]) -> None:
    service = host.service(unit_of(release))
    assert service.is_running
    assert service.is_enabled


def test_the_main_process_is_the_planned_command(host: Host, release: dict[str, Any]) -> None:
    lines = [command_line(host, pid) for pid in engine_processes(host, release)]
    command = release["command"]
    # vllm is a Python script: its interpreter and full path come first
    assert any(line[-len(command) + 1 :] == command[1:] and line[-len(command)].endswith(command[0]) for line in lines)


def test_every_process_keeps_to_its_cpus_and_memory_nodes(host: Host, release: dict[str, Any]) -> None:
    pids = engine_processes(host, release)
    assert pids
    for pid in pids:
        values = status(host, pid)
        assert values["Cpus_allowed_list"] == release["cpus"]
        if release["memory_nodes"]:
            assert values["Mems_allowed_list"] == release["memory_nodes"]


def test_replicas_do_not_share_a_cpu(host: Host, node: dict[str, Any]) -> None:
    cpus = [
        read_json(host, f"/var/lib/gpu-node/replicas/{replica['index']}/current/release.json")["cpus"]
        for replica in node["replicas"]
    ]
    assert len(set(cpus)) == len(cpus)


def test_processes_have_no_capabilities_and_cannot_gain_any(host: Host, release: dict[str, Any]) -> None:
    for pid in engine_processes(host, release):
        values = status(host, pid)
        assert int(values["CapEff"], 16) == 0
        assert int(values["CapBnd"], 16) == 0
        assert values["NoNewPrivs"] == "1"


def test_the_container_has_its_limits(host: Host, release: dict[str, Any]) -> None:
    name = f"vllm-replica-{release['replica']}"
    container = json.loads(host.check_output("podman container inspect %s", name))[0]
    limits = container["HostConfig"]
    assert limits["ReadonlyRootfs"] is True
    assert limits["CpusetCpus"] == release["cpus"]
    assert limits["CpusetMems"] == release["memory_nodes"]
    assert limits["Memory"] == size(after(release["podman_args"], "--memory"))
    assert limits["ShmSize"] == size(after(release["podman_args"], "--shm-size"))
    assert limits["PidsLimit"] == int(after(release["podman_args"], "--pids-limit"))
    assert limits["NetworkMode"] == "host"
    assert container["Image"] == release["image"]["id"]


def test_the_kernel_holds_the_memory_limit(host: Host, release: dict[str, Any]) -> None:
    wanted = size(after(release["podman_args"], "--memory"))
    lines = host.file(f"/proc/{engine_processes(host, release)[0]}/cgroup").content_string.splitlines()
    groups = dict(line.split(":", 2)[1:] for line in lines)
    if "memory" in groups:
        path = f"/sys/fs/cgroup/memory{groups['memory']}/memory.limit_in_bytes"
    else:
        path = f"/sys/fs/cgroup{groups['']}/memory.max"
    assert int(host.file(path).content_string) == wanted


def after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def size(text: str) -> int:
    """Podman's sizes: binary units in lower case."""
    units = {"b": 0, "k": 10, "m": 20, "g": 30}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)


def test_the_release_is_what_its_id_says(host: Host, release: dict[str, Any]) -> None:
    content = {key: value for key, value in release.items() if key != "id"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(canonical.encode()).hexdigest()[:12] == release["id"]
    for name, digest in release["files"].items():
        file = host.file(f"/var/lib/gpu-node/releases/{release['id']}/{name}")
        assert file.sha256sum == digest
        assert file.mode & 0o222 == 0


def test_the_server_reports_what_was_planned(host: Host, release: dict[str, Any]) -> None:
    script = (
        "import json, os, urllib.request\n"
        "key = open('/etc/gpu-node/secrets/engine.env').read().strip().partition('=')[2]\n"
        f"request = urllib.request.Request('http://127.0.0.1:{release['port']}/v1/models')\n"
        "request.add_header('Authorization', 'Bearer ' + key)\n"
        "print(json.dumps(json.load(urllib.request.urlopen(request, timeout=30))))\n"
    )
    model = json.loads(host.check_output(f"python3 -c {shlex.quote(script)}"))["data"][0]
    assert model["id"] == release["served_model_name"]
    assert model["max_model_len"] == release["engine_args"]["max-model-len"]


def test_only_ssh_and_the_balancer_listen_beyond_loopback(host: Host, node: dict[str, Any]) -> None:
    listening = [line.split()[3] for line in host.check_output("ss -Hltn").splitlines()]
    outside = {int(address.rpartition(":")[2]) for address in listening if not LOOPBACK.match(address)}
    balancer = {int(address.rpartition(":")[2]) for address in node["balancer"]["listen"]}
    assert outside == balancer | {22}
    assert {replica["port"] for replica in node["replicas"]} <= {
        int(address.rpartition(":")[2]) for address in listening
    }


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/etc/gpu-node/node.json", 0o644),
        ("/etc/gpu-node/secrets/engine.env", 0o600),
        ("/etc/gpu-node/secrets/clients.json", 0o600),
        ("/etc/gpu-node/nginx", 0o700),
        ("/etc/gpu-node/nginx/members.conf", 0o600),
        ("/etc/gpu-node/nginx/secrets.conf", 0o600),
        ("/usr/local/bin/gpu-node", 0o755),
    ],
)
def test_modes(host: Host, path: str, mode: int) -> None:
    file = host.file(path)
    assert oct(file.mode) == oct(mode)
    assert (file.user, file.group) == ("root", "root")


def test_no_secret_in_a_command_line(host: Host, secrets: list[str]) -> None:
    # read on the node, compared here: a grep for a key would itself have it on its command line
    lines = host.check_output("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert "vllm" in lines
    assert [secret[:4] for secret in secrets if secret in lines] == []


def test_no_secret_in_the_journal_or_a_log(host: Host, secrets: list[str]) -> None:
    logs = host.check_output("journalctl --all --no-pager; cat /var/log/nginx/* /var/log/*.log 2>/dev/null; true")
    assert "vllm-replica@0" in logs
    assert [secret[:4] for secret in secrets if secret in logs] == []


def test_no_secret_in_a_file_that_others_can_read(host: Host, secrets: list[str]) -> None:
    text = host.check_output(
        "find /etc /usr/local /var/lib/gpu-node/releases /var/lib/gpu-node/replicas /run/gpu-node "
        "-type f -perm /044 -size -1M -exec cat {} + 2>/dev/null"
    )
    assert [secret[:4] for secret in secrets if secret in text] == []


def test_every_replica_is_in_the_balancer(host: Host) -> None:
    table = json.loads(host.check_output("gpu-node status --json"))
    replicas = table["replicas"] if isinstance(table, dict) else table
    assert [replica["out"] for replica in replicas] == [[], []]


def test_the_node_answers_completions(host: Host) -> None:
    assert host.run("gpu-node smoke").rc == 0
