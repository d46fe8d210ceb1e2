"""The module `gpu_topology`, on made-up /proc and /sys trees and on this machine."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.topology import (
    TopologyError,
    format_cpu_list,
    parse_cpu_list,
    usable_numa_nodes,
)
from ansible_collections.serving.gpu_node.plugins.modules import gpu_topology

from tests.unit.plugins.module_runner import run_module

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
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


class FakeNode:
    """Made-up /sys and /proc of a node, and an nvidia-smi."""

    def __init__(self, root: Path, cpus: str, allowed: str = "") -> None:
        self.sys, self.proc, self.bin = root / "sys", root / "proc", root / "bin"
        write(self.sys / "devices/system/cpu/online", cpus + "\n")
        write(self.proc / "1/status", f"Name:\tsystemd\nCpus_allowed_list:\t{allowed or cpus}\n")
        write(self.proc / "meminfo", "MemTotal:       1048576 kB\n")

    def add_socket(self, number: int, nodes: dict[int, str], siblings: Callable[[int], str] | None = None) -> None:
        for node, cpus in nodes.items():
            add_node(self.sys / "devices/system/node", node, cpus, 1024)
            for cpu in parse_cpu_list(cpus):
                folder = self.sys / f"devices/system/cpu/cpu{cpu}/topology"
                write(folder / "physical_package_id", f"{number}\n")
                write(folder / "thread_siblings_list", (siblings(cpu) if siblings else str(cpu)) + "\n")

    def add_gpu(self, path: str, numa_node: str = "0", device: str = "0x2bb5") -> str:
        """Add a card below the host bridge that the path begins with."""
        folder = self.sys / "devices" / path
        for name, text in {"vendor": "0x10de", "class": "0x030200", "device": device, "numa_node": numa_node}.items():
            write(folder / name, text + "\n")
        link = self.sys / "bus/pci/devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder.name

    def add_driver(self, addresses: list[str], version: str = "590.48.01") -> None:
        write(
            self.proc / "driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (x)\n",
        )
        for number, address in enumerate(addresses, 1):
            text = (
                f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid(number)}\nDevice Minor: \t {number}\nGPU Excluded:\t No\n"
            )
            write(self.proc / "driver/nvidia/gpus" / address / "information", text)

    def add_nvidia_smi(self, query: str, matrix: str = "", query_rc: int = 0, matrix_rc: int = 0) -> None:
        """One that prints these texts, and writes down how it was called."""
        write(self.bin / "query", query)
        write(self.bin / "matrix", matrix)
        self.write_nvidia_smi(
            f'echo "$@" >> {self.bin}/calls\n'
            f"if [ $1 = topo ]; then cat {self.bin}/matrix; exit {matrix_rc}; fi\n"
            f"cat {self.bin}/query; exit {query_rc}\n"
        )

    def write_nvidia_smi(self, script: str) -> None:
        write(self.bin / "nvidia-smi", "#!/bin/sh\n" + script)
        (self.bin / "nvidia-smi").chmod(stat.S_IRWXU)

    def calls(self) -> list[str]:
        return (self.bin / "calls").read_text().splitlines() if (self.bin / "calls").exists() else []

    def read(self) -> dict[str, Any]:
        command = self.bin / "nvidia-smi"
        return gpu_topology.read_hardware(self.sys, self.proc, str(command) if command.exists() else None)


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012x}"


def query_row(address: str, number: int, memory: str = "97887", mig: str = "Disabled") -> str:
    return f"0000{address.upper()}, {uuid(number)}, NVIDIA H200, {memory}, {mig}\n"


def two_sockets(root: Path) -> FakeNode:
    """Two sockets of 64 CPUs, each with two switches of two cards: what `topo_8x_rtxpro6000d_pix_node_sys` shows."""
    node = FakeNode(root, "0-127")
    siblings = "{0},{1}".format
    node.add_socket(0, {0: "0-31,64-95"}, lambda cpu: siblings(cpu % 64, cpu % 64 + 64))
    node.add_socket(1, {1: "32-63,96-127"}, lambda cpu: siblings(cpu % 64, cpu % 64 + 64))
    for number in range(8):
        switch = 0x10 + 0x20 * (number // 2)
        port = number % 2
        node.add_gpu(
            f"pci0000:{switch:02x}/0000:{switch:02x}:01.0/0000:{switch + 1:02x}:00.0/0000:{switch + 2:02x}:0{port}.0/"
            f"0000:{switch + 3 + port:02x}:00.0",
            numa_node=str(number // 4),
        )
    return node


def test_a_bare_node_without_a_driver(tmp_path: Path) -> None:
    node = two_sockets(tmp_path)
    # it would load the driver
    node.add_nvidia_smi("")
    topology = node.read()
    assert node.calls() == []
    assert topology["schema"] == 1
    assert topology["driver"] == {"version": "", "open": None}
    assert topology["warnings"] == []
    assert topology["cpus"] == list(range(128))
    assert topology["memory_bytes"] == 2**30
    assert [(item["id"], item["socket"], format_cpu_list(item["cpus"])) for item in topology["numa_nodes"]] == [
        (0, 0, "0-31,64-95"),
        (1, 1, "32-63,96-127"),
    ]
    assert topology["cores"] == [[cpu, cpu + 64] for cpu in range(64)]
    addresses = [gpu["pci_address"] for gpu in topology["gpus"]]
    assert addresses == [f"0000:{bus:02x}:00.0" for bus in (0x13, 0x14, 0x33, 0x34, 0x53, 0x54, 0x73, 0x74)]
    assert [gpu["numa_node"] for gpu in topology["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert topology["gpus"][0] == {
        "pci_address": "0000:13:00.0",
        "device_id": "0x2bb5",
        "numa_node": 0,
        "uuid": "",
        "model": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "memory_mib": None,
        "mig": None,
    }
    place = {address: number for number, address in enumerate(addresses)}
    links = {(place[one], place[other]): kind for one, other, kind in topology["links"]}
    assert {pair for pair, kind in links.items() if kind == "PIX"} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert {pair for pair, kind in links.items() if kind == "NODE"} == {
        (0, 2), (0, 3), (1, 2), (1, 3), (4, 6), (4, 7), (5, 6), (5, 7)
    }  # fmt: skip
    assert sum(kind == "SYS" for kind in links.values()) == 16


def test_the_driver_of_that_node_agrees_with_sysfs(tmp_path: Path) -> None:
    node = two_sockets(tmp_path)
    bare = node.read()
    addresses = [gpu["pci_address"] for gpu in bare["gpus"]]
    node.add_driver(addresses)
    node.add_nvidia_smi(
        "".join(query_row(address, number) for number, address in enumerate(addresses, 1)),
        (FIXTURES / "topo_8x_rtxpro6000d_pix_node_sys.txt").read_text(),
    )
    topology = node.read()
    assert topology["warnings"] == []
    assert topology["links"] == bare["links"]
    assert topology["numa_nodes"] == bare["numa_nodes"]
    assert topology["driver"] == {"version": "590.48.01", "open": True}
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(number) for number in range(1, 9)]
    assert {(gpu["model"], gpu["memory_mib"], gpu["mig"]) for gpu in topology["gpus"]} == {
        ("NVIDIA H200", 97887, False)
    }
    assert node.calls() == [
        "--query-gpu=pci.bus_id,uuid,name,memory.total,mig.mode.current --format=csv,noheader,nounits",
        "topo -m",
    ]


def virtual_machine(root: Path) -> FakeNode:
    """The virtual machine of `topo_2x_h200_vm`: two cards on the root bus, and no NUMA node of theirs."""
    node = FakeNode(root, "0-31")
    node.add_socket(0, {0: "0-31"})
    for bus in ("06", "07"):
        node.add_gpu(f"pci0000:00/0000:00:{bus}.0", numa_node="-1", device="0x2335")
    return node


def test_a_virtual_machine_with_nvlink(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    assert node.read()["links"] == [["0000:00:06.0", "0000:00:07.0", "PHB"]]
    node.add_driver(["0000:00:06.0", "0000:00:07.0"], "580.159.04")
    answer = query_row("0000:00:06.0", 1, "143771") + query_row("0000:00:07.0", 2, "143771")
    node.add_nvidia_smi(answer, (FIXTURES / "topo_2x_h200_vm.txt").read_text())
    topology = node.read()
    assert topology["links"] == [["0000:00:06.0", "0000:00:07.0", "NV18"]]
    assert [gpu["numa_node"] for gpu in topology["gpus"]] == [None, None]
    assert [gpu["memory_mib"] for gpu in topology["gpus"]] == [143771, 143771]
    assert len(topology["warnings"]) == 1
    assert "sysfs does not tell the NUMA node and nvidia-smi says 0" in topology["warnings"][0]


@pytest.mark.parametrize(
    ("query", "rc", "words"),
    [
        ("", 9, "failed with exit status 9: it said nothing"),
        ("No devices were found\n", 6, "exit status 6: No devices were found"),
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n",
            18,
            "exit status 18: Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("\x00\x01 not a table\n", 0, "nvidia-smi says: "),
    ],
)
def test_uuids_come_from_the_driver_when_nvidia_smi_fails(tmp_path: Path, query: str, rc: int, words: str) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    node.add_nvidia_smi(query, query_rc=rc)
    topology = node.read()
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), uuid(2)]
    assert len(topology["warnings"]) == 1
    assert words in topology["warnings"][0]
    # no second question to one that cannot answer
    assert len(node.calls()) == 1


def test_without_nvidia_smi(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    topology = node.read()
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), uuid(2)]
    assert topology["warnings"] == ["nvidia-smi is not on this node: memory, MIG mode and NVLink are unknown"]


def test_an_nvidia_smi_that_cannot_be_started(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    node.write_nvidia_smi("")
    (node.bin / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    topology = node.read()
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), uuid(2)]
    assert len(topology["warnings"]) == 1
    assert "could not be started" in topology["warnings"][0]


def test_an_nvidia_smi_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_topology, "NVIDIA_SMI_SECONDS", 0.2)
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    # the sleep outlives the shell and keeps its output open
    node.write_nvidia_smi("sleep 60\n")
    start = time.monotonic()
    topology = node.read()
    assert time.monotonic() - start < 20
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), uuid(2)]
    assert len(topology["warnings"]) == 1
    assert "did not answer in 0.2 s" in topology["warnings"][0]


def test_a_matrix_that_is_none_is_told(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    answer = query_row("0000:00:06.0", 1) + query_row("0000:00:07.0", 2)
    node.add_nvidia_smi(answer, (FIXTURES / "p2p_2x_h200_vm.txt").read_text())
    topology = node.read()
    assert topology["links"] == [["0000:00:06.0", "0000:00:07.0", "PHB"]]
    assert len(topology["warnings"]) == 1
    assert topology["warnings"][0].startswith("nvidia-smi topo -m: ")
    node.add_nvidia_smi(answer, "", matrix_rc=3)
    assert node.read()["warnings"] == ["nvidia-smi topo -m failed with exit status 3: it said nothing"]


def test_a_card_that_fell_off_the_bus(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    complaint = "Unable to determine the device handle for GPU0000:00:07.0: Unknown Error\n"
    node.add_nvidia_smi(query_row("0000:00:06.0", 1) + complaint, query_rc=15)
    topology = node.read()
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), ""]
    assert any("exit status 15: Unable to determine" in warning for warning in topology["warnings"])
    assert any(warning.startswith("0000:00:07.0: ") for warning in topology["warnings"])


def test_a_card_that_the_driver_does_not_have(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0"])
    topology = node.read()
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), ""]
    assert any(warning.startswith("0000:00:07.0: ") for warning in topology["warnings"])


def test_mig_instances_are_seen_without_nvidia_smi(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    # by the driver's own number of the card
    write(node.proc / "driver/nvidia/capabilities/gpu2/mig/gi3/access", "")
    write(node.proc / "driver/nvidia/capabilities/mig/config", "")
    assert [gpu["mig"] for gpu in node.read()["gpus"]] == [None, True]


def test_a_driver_with_an_unreadable_version_is_a_driver(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0", "0000:00:07.0"])
    write(node.proc / "driver/nvidia/version", "none of your business\n")
    topology = node.read()
    assert topology["driver"] == {"version": "unknown", "open": None}
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), uuid(2)]
    assert "version could not be read" in topology["warnings"][0]


@pytest.mark.parametrize("name", ["device", "numa_node", "vendor", "class"])
def test_one_file_that_cannot_be_read_costs_one_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    node = two_sockets(tmp_path)
    read, bad = gpu_topology._read, node.sys / "bus/pci/devices/0000:14:00.0" / name

    def fail(path: Path) -> str:
        if path == bad:
            raise OSError(5, "Input/output error")
        return read(path)

    monkeypatch.setattr(gpu_topology, "_read", fail)
    topology = node.read()
    assert topology["warnings"] == [
        f"0000:14:00.0: {name} could not be read (Input/output error); it counts as unknown"
    ]
    cards = {gpu["pci_address"]: gpu for gpu in topology["gpus"]}
    assert len(cards) == (7 if name in ("vendor", "class") else 8)
    assert cards["0000:13:00.0"]["device_id"] == "0x2bb5"
    if name == "device":
        assert (cards["0000:14:00.0"]["device_id"], cards["0000:14:00.0"]["numa_node"]) == ("", 0)
    if name == "numa_node":
        assert (cards["0000:14:00.0"]["device_id"], cards["0000:14:00.0"]["numa_node"]) == ("0x2bb5", None)


def test_one_page_of_the_driver_that_cannot_be_read(tmp_path: Path) -> None:
    node = virtual_machine(tmp_path)
    node.add_driver(["0000:00:06.0"])
    (node.proc / "driver/nvidia/gpus/0000:00:07.0").mkdir()
    topology = node.read()
    assert [gpu["uuid"] for gpu in topology["gpus"]] == [uuid(1), ""]
    assert any("0000:00:07.0: the driver's information could not be read" in text for text in topology["warnings"])


@pytest.mark.parametrize("count", range(17))
def test_no_gpu_to_sixteen(tmp_path: Path, count: int) -> None:
    node = FakeNode(tmp_path, "0-7")
    node.add_socket(0, {0: "0-7"})
    for number in range(count):
        node.add_gpu(f"pci0000:{number:02x}/0000:{number:02x}:01.0/0000:{0x40 + number:02x}:00.0")
    topology = node.read()
    assert len(topology["gpus"]) == count
    assert len(topology["links"]) == count * (count - 1) // 2
    assert {kind for _, _, kind in topology["links"]} <= {"NODE"}


def test_a_small_card_of_another_kind_is_told_by_its_number(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, "0-7")
    for bus in range(0x10, 0x90, 0x10):
        node.add_gpu(f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0")
    node.add_gpu("pci0000:c0/0000:c0:01.0/0000:c1:00.0", device="0x1eb8")
    gpus = node.read()["gpus"]
    assert [gpu["device_id"] for gpu in gpus] == ["0x2bb5"] * 8 + ["0x1eb8"]
    assert gpus[8]["pci_address"] == "0000:c1:00.0"


def lscpu_nodes(name: str) -> dict[int, str]:
    """The NUMA nodes that lscpu showed on a machine."""
    lines = (FIXTURES / f"{name}.txt").read_text().splitlines()
    pairs = [line.split(":") for line in lines if line.startswith("NUMA node") and "CPU(s)" in line]
    return {int(left.split()[1].removeprefix("node")): right.strip() for left, right in pairs}


def test_cpus_dealt_to_eight_nodes_in_turn(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, "0-63")
    nodes = lscpu_nodes("lscpu_dell_interleaved_8_nodes")
    # even nodes are on one socket, by their CPUs' numbers
    node.add_socket(0, {number: nodes[number] for number in range(4)})
    node.add_socket(1, {number: nodes[number] for number in range(4, 8)})
    found = {item["id"]: item for item in node.read()["numa_nodes"]}
    assert found[0]["cpus"] == [0, 8, 16, 24, 32, 40, 48, 56]
    assert found[4]["cpus"] == [1, 9, 17, 25, 33, 41, 49, 57]
    assert [found[number]["socket"] for number in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_eight_nodes_of_two_cores_each(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, "0-31")
    nodes = lscpu_nodes("lscpu_8_nodes_epyc7251_pairs")
    for socket in range(2):
        node.add_socket(
            socket,
            {number: nodes[number] for number in range(4 * socket, 4 * socket + 4)},
            lambda cpu: f"{cpu % 16},{cpu % 16 + 16}",
        )
    topology = node.read()
    assert [item["cpus"] for item in topology["numa_nodes"]][7] == [14, 15, 30, 31]
    assert topology["cores"] == [[cpu, cpu + 16] for cpu in range(16)]


def test_sparse_node_numbers_and_512_cpus(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, "0-511")
    node.add_socket(0, {0: "0-127,256-383"})
    node.add_socket(1, {8: "128-255,384-511", 252: ""})
    topology = node.read()
    assert [(item["id"], item["socket"], len(item["cpus"])) for item in topology["numa_nodes"]] == [
        (0, 0, 256),
        (8, 1, 256),
    ]
    assert len(topology["cores"]) == 512


def test_cpus_that_are_allowed_and_not_there(tmp_path: Path) -> None:
    # a virtual machine that can be given 128 CPUs and has 4, one of them kept from services
    node = FakeNode(tmp_path, "0-3", allowed="1-127")
    assert node.read()["cpus"] == [1, 2, 3]


def test_what_a_container_hides_is_unknown(tmp_path: Path) -> None:
    write(tmp_path / "proc/1/status", "Cpus_allowed_list:\t0-3\n")
    write(tmp_path / "proc/meminfo", "MemTotal: 1024 kB\n")
    topology = gpu_topology.read_hardware(tmp_path / "sys", tmp_path / "proc", None)
    assert (topology["cpus"], topology["cores"], topology["numa_nodes"]) == ([0, 1, 2, 3], [], [])
    add_node(tmp_path / "sys/devices/system/node", 0, "0-3", 1024)
    assert gpu_topology.read_hardware(tmp_path / "sys", tmp_path / "proc", None)["numa_nodes"] == [
        {"id": 0, "cpus": [0, 1, 2, 3], "memory_bytes": 2**20, "socket": None}
    ]


def test_a_virtual_machine_whose_every_cpu_is_a_socket(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, "0-1")
    for number in range(2):
        node.add_socket(number, {0: str(number)})
    write(node.sys / "devices/system/node/node0/cpulist", "0-1\n")
    assert node.read()["numa_nodes"][0]["socket"] is None


def test_this_machine() -> None:
    answer = run_module(gpu_topology.main, {})
    assert answer["changed"] is False
    topology = answer["topology"]
    assert topology["cpus"]
    assert topology["memory_bytes"] > 0
    assert {cpu for node in topology["numa_nodes"] for cpu in node["cpus"]} <= set(topology["cpus"])
    documented = yaml.safe_load(gpu_topology.RETURN)["topology"]["contains"]
    assert set(topology) == set(documented)


def test_what_cannot_be_read_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_topology, "_read", lambda path: "")
    answer = run_module(gpu_topology.main, {})
    assert answer["failed"] is True
    assert (
        answer["msg"]
        == "the node's topology could not be read: no 'Cpus_allowed_list:' line in the process status text"
    )
