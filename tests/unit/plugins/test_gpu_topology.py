"""The module `gpu_topology`, on made-up /proc and /sys trees and on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import TopologyError, usable_numa_nodes
from ansible_collections.serving.gpu_node.plugins.modules import gpu_topology

from tests.unit.plugins.module_runner import run_module

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def add_node(root: Path, number: int, cpus: str, kib: int) -> None:
    write(root / f"node{number}" / "cpulist", cpus + "\n")
    write(root / f"node{number}" / "meminfo", f"Node {number} MemTotal:       {kib} kB\n")


def test_numa_nodes_with_and_without_cpus_and_memory(tmp_path: Path) -> None:
    add_node(tmp_path, 0, "0,2,4,6", 1024)
    add_node(tmp_path, 1, "1,3,5,7", 2048)
    # a memory expander, and a socket without memory of its own
    add_node(tmp_path, 2, "", 4096)
    add_node(tmp_path, 10, "8-9", 0)
    write(tmp_path / "possible", "0-10")
    found = gpu_topology.read_numa_nodes(tmp_path)
    assert {node["id"]: node["cpus"] for node in found} == {0: [0, 2, 4, 6], 1: [1, 3, 5, 7], 2: [], 10: [8, 9]}
    assert usable_numa_nodes(found, list(range(10))) == [
        {"id": 0, "cpus": [0, 2, 4, 6], "memory_bytes": 2**20, "socket": None},
        {"id": 1, "cpus": [1, 3, 5, 7], "memory_bytes": 2**21, "socket": None},
    ]


def test_eight_nodes(tmp_path: Path) -> None:
    for number in range(8):
        add_node(tmp_path, number, f"{number * 4}-{number * 4 + 3},{32 + number * 4}-{35 + number * 4}", 1024)
    found = gpu_topology.read_numa_nodes(tmp_path)
    assert sorted(cpu for node in found for cpu in node["cpus"]) == list(range(64))


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    assert gpu_topology.read_numa_nodes(tmp_path / "node") == []
    assert gpu_topology.read_gpus(tmp_path / "pci") == ([], [])


def test_a_node_that_says_nonsense_is_named(tmp_path: Path) -> None:
    add_node(tmp_path, 0, "all of them", 1024)
    with pytest.raises(TopologyError, match="all of them"):
        gpu_topology.read_numa_nodes(tmp_path)


def add_device(root: Path, address: str, vendor: str, device_class: str, numa_node: str | None) -> None:
    write(root / address / "vendor", vendor + "\n")
    write(root / address / "class", device_class + "\n")
    write(root / address / "device", "0x2bb1\n")
    if numa_node is not None:
        write(root / address / "numa_node", numa_node + "\n")


def test_gpus_in_pci_order(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:c1:00.0", "0x10de", "0x030000", "1")
    add_device(tmp_path, "0000:c1:00.1", "0x10de", "0x040300", "1")
    add_device(tmp_path, "0000:01:00.0", "0x10de", "0x030200", "0")
    add_device(tmp_path, "0000:02:00.0", "0x1a03", "0x030000", "0")
    # a virtual machine does not tell, and a kernel without NUMA has no such file
    add_device(tmp_path, "0000:00:07.0", "0x10de", "0x030200", "-1")
    add_device(tmp_path, "0001:00:00.0", "0x10de", "0x030200", None)
    add_device(tmp_path, "10000:00:00.0", "0x10de", "0x030200", "0")
    gpus, warnings = gpu_topology.read_gpus(tmp_path)
    assert [(gpu["pci_address"], gpu["numa_node"]) for gpu in gpus] == [
        ("0000:00:07.0", None),
        ("0000:01:00.0", 0),
        ("0000:c1:00.0", 1),
        ("0001:00:00.0", None),
        ("10000:00:00.0", 0),
    ]
    assert {gpu["device_id"] for gpu in gpus} == {"0x2bb1"}
    assert warnings == []


def tcp_line(port: int, inode: int, address: str = "0100007F") -> str:
    return f"   0: {address}:{port:04X} 00000000:0000 0A 0:0 00:0 0 0 0 {inode} 1\n"


def add_process(proc: Path, pid: int, command: str, cgroup: str, inodes: list[int]) -> None:
    write(proc / str(pid) / "cmdline", command)
    write(proc / str(pid) / "comm", "short\n")
    write(proc / str(pid) / "cgroup", cgroup)
    (proc / str(pid) / "fd").mkdir()
    (proc / str(pid) / "fd" / "0").symlink_to("/dev/null")
    for number, inode in enumerate(inodes, 3):
        (proc / str(pid) / "fd" / str(number)).symlink_to(f"socket:[{inode}]")


def test_listeners_have_their_process_and_unit(tmp_path: Path) -> None:
    write(tmp_path / "net" / "tcp", HEAD + tcp_line(8080, 11) + tcp_line(8000, 12) + tcp_line(9000, 99))
    write(tmp_path / "net" / "tcp6", HEAD + tcp_line(22, 13, "0" * 32))
    split = "0::/system.slice/system-vllm\\x2dreplica.slice/vllm-replica@0.service/libpod-payload-abc\n"
    hybrid = "12:cpuset:/\n1:name=systemd:/system.slice/nginx.service\n0::/system.slice/nginx.service\n"
    add_process(tmp_path, 30, "nginx: worker process", hybrid, [11])
    add_process(tmp_path, 20, "nginx: master process\0", hybrid, [11, 500])
    add_process(tmp_path, 40, "python3\0-m\0vllm\0", split, [12])
    add_process(tmp_path, 50, "", "0::/user.slice/session-3.scope\n", [13])
    # one that ended while it was looked at
    (tmp_path / "60").mkdir()
    found = {item["port"]: item for item in gpu_topology.read_listeners(tmp_path)}
    assert list(found) == [22, 8000, 8080, 9000]
    assert found[8080] == {
        "address": "127.0.0.1",
        "port": 8080,
        "pid": 20,
        "command": "nginx: master process",
        "unit": "nginx.service",
    }
    assert (found[8000]["unit"], found[8000]["command"]) == ("vllm-replica@0.service", "python3 -m vllm")
    assert (found[22]["address"], found[22]["unit"], found[22]["command"]) == ("::", "", "short")
    # nobody's that can be seen
    assert (found[9000]["pid"], found[9000]["command"], found[9000]["unit"]) == (0, "", "")


def test_a_kernel_without_ipv6(tmp_path: Path) -> None:
    write(tmp_path / "net" / "tcp", HEAD + tcp_line(8080, 11))
    assert [item["port"] for item in gpu_topology.read_listeners(tmp_path)] == [8080]


def test_releases_that_cannot_be_read_count_as_none(tmp_path: Path) -> None:
    assert gpu_topology.read_releases(tmp_path / "nothing") == {}
    release = {"id": "0123456789ab", "model": {}, "image": {}, "port": 8000}
    write(tmp_path / "0" / "current" / "release.json", json.dumps(release))
    write(tmp_path / "1" / "current" / "release.json", "{")
    write(tmp_path / "2" / "current" / "release.json", "[]")
    write(tmp_path / "3" / "current" / "release.json", '{"port": 1}')
    (tmp_path / "10" / "out").mkdir(parents=True)
    (tmp_path / "11").mkdir()
    (tmp_path / "11" / "current").symlink_to("../../releases/gone")
    (tmp_path / "0.kept-by-someone").mkdir()
    found = gpu_topology.read_releases(tmp_path)
    assert found == {"0": release, "1": {}, "2": {}, "3": {}, "10": {}, "11": {}}


def test_this_machine() -> None:
    answer = run_module(gpu_topology.main, {})
    assert answer["changed"] is False
    topology = answer["topology"]
    assert topology["cpus"]
    assert topology["memory_bytes"] > 0
    assert {cpu for node in topology["numa_nodes"] for cpu in node["cpus"]} <= set(topology["cpus"])


def test_what_cannot_be_read_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_topology, "_read", lambda path: "")
    answer = run_module(gpu_topology.main, {})
    assert answer["failed"] is True
    assert (
        answer["msg"]
        == "the node's topology could not be read: no 'Cpus_allowed_list:' line in the process status text"
    )
