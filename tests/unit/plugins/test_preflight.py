"""The checks before any change, on made-up machines: a good one, each fault alone, several at once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.filter.preflight import preflight_report
from ansible_collections.serving.gpu_node.plugins.module_utils.plan import PlanError, build_plan
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight import (
    CHECK_NAMES,
    accept,
    check_host,
    check_inventory,
    check_plan,
    describe_report,
    failure_lines,
    make_report,
    wanted_of,
)
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_gpu import GPU_CHECKS
from ansible_collections.serving.gpu_node.plugins.module_utils.preflight_host import HOST_CHECKS
from ansible_collections.serving.gpu_node.plugins.module_utils.topology_file import load_topology
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins import host_fixtures
from tests.unit.plugins.samples import REVISION, ROOT, SOURCES, gpu, listener, numa_node, profile, topology

CASES = sorted(path.parent.name for path in host_fixtures.HOSTS.glob("*/files.txt"))
KNOWN_DRIVERS = yaml.safe_load((ROOT / "roles/nvidia_driver/vars/main.yml").read_text())["_nvidia_driver_known"]
TOOLKITS = yaml.safe_load((ROOT / "roles/container_runtime/vars/main.yml").read_text())
KNOWN_TOOLKITS = TOOLKITS["_container_runtime_toolkit_known"]
OVERRIDES: dict[str, Any] = {"drafter": "code"}
Found = dict[str, str]
# The defaults of the role serving_image, and a base that is pinned.
IMAGE: dict[str, Any] = {
    "recipe": "auto",
    "base": f"docker.io/vllm/vllm-openai@sha256:{'a' * 64}",
    **dict.fromkeys(("prebuilt", "archive", "plugin_wheel", "registry"), ""),
    "allow_tag": False,
}


def variables(**more: Any) -> dict[str, Any]:
    """What the roles' variables say by default."""
    driver = {"manage": True, "version": "590.48.01", "kernels": [], "signed": False, "reboot_allowed": False}
    usual: dict[str, Any] = {
        "os": {"debian": ["12", "13"], "ubuntu": ["24.04"]},
        "podman": "4.3",
        "runtime_manage": True,
        "toolkit": {"version": "1.18.2", "known": KNOWN_TOOLKITS},
        "driver": {**driver, "bad_allowed": False, "known": KNOWN_DRIVERS},
        "kernel_parameters": [],
        "storage": "/var/lib/containers",
        "image_gib": 100,
        "serving": False,
        "space_gib": {},
    }
    return {**usual, **more, "driver": {**usual["driver"], **more.get("driver", {})}}


def adopted(**more: Any) -> dict[str, Any]:
    """The same, where nothing of driver and runtime may be changed."""
    return variables(runtime_manage=False, driver={"manage": False, **more})


def judge(
    root: Path,
    asked: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
    free_gib: int = 2000,
    name: str = "8x",
) -> list[Found]:
    """Read a machine and check it as the role does."""
    asked = asked or variables()
    read = host_fixtures.read_topology(root)
    try:
        plan, problems = build_plan(profile(name), overrides or {}, read, False, SOURCES[name]), list[str]()
    except PlanError as error:
        plan, problems = {}, error.problems
    wanted = wanted_of(profile(name), overrides or {}, SOURCES[name], asked)
    inventory = check_inventory(profile(name), overrides or {}, SOURCES[name], IMAGE)
    host = host_fixtures.read_host(root, free_gib)
    checks: list[Found] = preflight_report(inventory, host, read, {"plan": plan, "problems": problems}, wanted, [])[
        "checks"
    ]
    return checks


def bad(checks: list[Found]) -> set[tuple[str, str]]:
    """Name and level of what is not right, but for the plan's own words and what the topology warns of."""
    return {(item["check"], item["level"]) for item in checks if item["level"] != "ok"} - {
        ("plan", "failure"),
        ("topology", "warning"),
    }


def text(checks: list[Found], name: str) -> str:
    return "\n".join(
        f"{item['seen']} | {item['wanted']} | {item['remedy']}" for item in checks if item["check"] == name
    )


def test_a_good_machine_has_nothing_to_say(tmp_path: Path) -> None:
    checks = judge(host_fixtures.lay_out("good-8x", tmp_path))
    assert [item for item in checks if item["level"] != "ok"] == []
    assert {item["check"] for item in checks} == {*CHECK_NAMES, "inventory", "plan"}
    assert [item["remedy"] for item in checks if item["remedy"]] == []


# What is seen, what level it has when the roles may change the node and when they may only verify, and words of it.
FAULTS: list[tuple[str, set[tuple[str, str]], set[tuple[str, str]], dict[str, list[str]]]] = [
    (
        "drv-01-proprietary",
        {("driver", "warning"), ("driver_flavour", "failure"), ("driver_libraries", "failure")}
        | {("gpus_of_driver", "warning"), ("cdi", "warning")},
        {("driver", "failure"), ("driver_flavour", "failure"), ("driver_libraries", "failure")}
        | {("gpus_of_driver", "failure"), ("cdi", "failure")},
        {
            "driver": ["580.126.09 is loaded: the proprietary module finds no Blackwell card"],
            "driver_flavour": ["580.126.09 is loaded as a proprietary module", "-open ones and reboot"],
        },
    ),
    (
        "drv-02-only-added",
        {("driver_module", "warning")},
        {("driver", "failure"), ("driver_module", "failure")},
        {"driver_module": ["6.8.0-45-generic: nvidia/595.58.03 added, no headers"]},
    ),
    (
        "drv-02-server",
        {("driver_module", "warning")},
        {("driver", "failure"), ("driver_module", "failure")},
        {"driver_module": ["6.8.0-45-generic: nvidia-srv/580.95.05 added"]},
    ),
    (
        "drv-02-next-kernel",
        {("kernel", "warning"), ("driver_module", "warning")},
        {("kernel", "warning"), ("driver_module", "failure")},
        {
            "kernel": ["6.8.0-45-generic | the newest installed one, 6.8.0-101-generic"],
            "driver_module": ["6.8.0-45-generic: installed", "6.8.0-101-generic: not built, no headers"],
        },
    ),
    (
        "drv-04-mismatch",
        {("driver", "warning"), ("driver_libraries", "failure"), ("cdi", "warning")},
        {("driver", "warning"), ("driver_libraries", "failure"), ("cdi", "failure")},
        {"driver_libraries": ["module 580.159.03, libraries 580.173", "reboot"]},
    ),
    (
        "drv-04-unheld",
        {("unattended_upgrades", "warning")},
        {("unattended_upgrades", "warning")},
        {"unattended_upgrades": ["on, and may change nvidia-dkms-open", "hold"]},
    ),
    (
        "drv-07-known-bad",
        {("driver", "warning"), ("cdi", "warning")},
        {("driver", "failure"), ("cdi", "failure")},
        {"driver": ["595.71.05 is loaded: Xid 8"]},
    ),
    (
        "drv-10-iommu",
        {("iommu", "warning")},
        {("iommu", "warning")},
        {
            "iommu": [
                "translated | off or passthrough | copies between cards",
                "amd_iommu=off / intel_iommu=off",
                "topo -p2p",
            ]
        },
    ),
    (
        "drv-10-acs",
        {("acs", "warning")},
        {("acs", "warning")},
        {"acs": ["redirect on 0000:60:01.0", "root ports and on switches' downstream ports"]},
    ),
    (
        "drv-12-acs-override",
        {("kernel_parameters", "failure")},
        {("kernel_parameters", "failure")},
        {"kernel_parameters": ["pcie_acs_override=downstream,multifunction", "patched kernel", "setpci on root ports"]},
    ),
    (
        "drv-16-secure-boot",
        {("secure_boot", "failure")},
        {("driver", "failure"), ("secure_boot", "warning")},
        {"secure_boot": ["on |"]},
    ),
    ("ctr-03-hook", {("gpu_access", "failure")}, {("gpu_access", "failure")}, {"gpu_access": ["oci-nvidia-hook.json"]}),
    (
        "ctr-03-docker-mode",
        {("gpu_access", "warning"), ("docker", "warning")},
        {("gpu_access", "warning"), ("docker", "warning")},
        {"gpu_access": ["mode = cdi", "--gpus fails in this mode"]},
    ),
    (
        "ctr-04-toolkit",
        {("toolkit", "warning")},
        {("toolkit", "failure")},
        {"toolkit": ["nvidia-container-toolkit 1.19.1 is known to be bad: CUDA does not start in containers"]},
    ),
    (
        "ctr-10-docker",
        {("docker", "warning")},
        {("docker", "warning")},
        # One that is held says nothing of the other.
        {"docker": ["containerd.io may be upgraded unattended", "in Docker stop: apt-mark hold containerd.io"]},
    ),
    ("cdi-stale", {("cdi", "warning")}, {("cdi", "failure")}, {"cdi": ["libcuda.so.590.48.01"]}),
    (
        "cdi-partial",
        {("cdi", "warning")},
        {("cdi", "failure")},
        {"cdi": ["no CDI device GPU-00000000-0000-0000-0000-000000000008 for 0000:e1:00.0"]},
    ),
    (
        "link-narrow",
        {("pcie_width", "failure")},
        {("pcie_width", "failure")},
        {"pcie_width": ["0000:21:00.0 x8 of x16", "reseat the card or riser"]},
    ),
    (
        "link-idle",
        {("pcie_speed", "warning")},
        {("pcie_speed", "warning")},
        {"pcie_speed": ["idle: 0000:01:00.0 2.5 of 32 GT/s", "acceptance measures it under load"]},
    ),
    (
        "bar1-small",
        {("bar1", "failure")},
        {("bar1", "failure")},
        {"bar1": ["0000:21:00.0 256 MiB", "Resizable BAR"]},
    ),
    (
        "bar1-unmapped",
        {("bar1", "failure")},
        {("bar1", "failure")},
        {"bar1": ["the firmware gave no room to 0000:21:00.0", "Above 4G Decoding"]},
    ),
    (
        "card-gone",
        {("gpus", "failure")},
        {("gpus", "failure")},
        {"gpus": ["7 on PCI", "8 that the profile is made for"]},
    ),
    (
        "card-lost-by-driver",
        {("gpus_of_driver", "failure")},
        {("gpus_of_driver", "failure")},
        {"gpus_of_driver": ["7; without 0000:a1:00.0", "Xid"]},
    ),
    (
        "card-vfio",
        {("card_driver", "failure")},
        {("card_driver", "failure")},
        {"card_driver": ["0000:a1:00.0: vfio-pci"]},
    ),
    (
        "nouveau",
        {("card_driver", "warning")},
        {("card_driver", "failure"), ("driver", "failure")},
        {"card_driver": ["nouveau is loaded"]},
    ),
    (
        "nvidia-blacklisted",
        {("kernel_parameters", "failure")},
        {("kernel_parameters", "failure")},
        {"kernel_parameters": ["modprobe.blacklist=nouveau,nvidia"]},
    ),
    (
        "numa-balancing",
        {("numa_balancing", "warning")},
        {("numa_balancing", "warning")},
        {"numa_balancing": ["on | off"]},
    ),
    ("clock", {("time", "warning")}, {("time", "warning")}, {"time": ["not synchronized"]}),
    (
        "memory-module",
        {("memory", "warning")},
        {("memory", "warning")},
        {"memory": ["node 0: 720.0 GiB, node 1: 480.0 GiB", "NUMA node 1: 480.0 GiB | 400.0 GiB for 1 replica"]},
    ),
    # That it is too little for what they need is the plan's to say.
    ("memory-short", {("memory", "warning")}, {("memory", "warning")}, {"memory": ["800.0 GiB for 2 replicas"]}),
    (
        "memory-in-use",
        {("memory", "failure")},
        {("memory", "failure")},
        {"memory": ["NUMA node 1: 372.0 GiB not in use | 388.7 GiB, which 1 replica will take", "numastat -m"]},
    ),
    (
        "half-installed",
        {("packages", "warning")},
        {("packages", "warning")},
        {"packages": ["nvidia-dkms-open", "dpkg --configure -a"]},
    ),
    (
        "reboot-pending",
        {("reboot", "warning")},
        {("reboot", "warning")},
        {"reboot": ["asked for by linux-base, linux-image-6.8.0-101-generic |"]},
    ),
    ("old-podman", {("podman", "failure")}, {("podman", "failure")}, {"podman": ["3.4.4 | 4.3 or newer"]}),
    (
        "unsupported-os",
        {("os", "failure")},
        {("os", "failure")},
        {"os": ["Ubuntu 22.04.5 LTS | debian 12, 13 or ubuntu 24.04"]},
    ),
    (
        "port-in-use",
        {("ports", "failure")},
        {("ports", "failure")},
        {"ports": ["port 8001, wanted for replica 1, is in use by process 77 (python3) on 127.0.0.1"]},
    ),
    (
        "bare-8x",
        set(),
        {("driver", "failure"), ("podman", "failure"), ("toolkit", "failure")},
        {"driver": ["none loaded"], "podman": ["none"], "toolkit": ["none"]},
    ),
    (
        "several",
        {("pcie_width", "failure"), ("kernel_parameters", "failure"), ("iommu", "warning"), ("podman", "failure")}
        | {("time", "warning"), ("toolkit", "warning"), ("os", "failure")},
        {("pcie_width", "failure"), ("kernel_parameters", "failure"), ("iommu", "warning"), ("podman", "failure")}
        | {("time", "warning"), ("toolkit", "failure"), ("os", "failure")},
        {"pcie_width": ["x4 of x16"], "os": ["Rocky Linux 9.4"]},
    ),
]


def test_every_machine_has_its_test() -> None:
    assert sorted(["good-8x", *(name for name, *_ in FAULTS)]) == CASES


@pytest.mark.parametrize(("name", "managed", "verified", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_and_nothing_else(
    tmp_path: Path,
    name: str,
    managed: set[tuple[str, str]],
    verified: set[tuple[str, str]],
    words: dict[str, list[str]],
) -> None:
    root = host_fixtures.lay_out(name, tmp_path)
    checks = judge(root)
    assert bad(checks) == managed
    for check, phrases in words.items():
        for phrase in phrases:
            assert phrase in text(checks, check)
    assert all(item["remedy"] for item in checks if item["level"] != "ok")
    assert bad(judge(root, adopted())) == verified


def test_every_check_fails_or_warns_on_some_machine_and_is_good_on_the_good_one() -> None:
    shown = {check for _, managed, verified, _ in FAULTS for check, _ in managed | verified}
    # A full disk, a held lock and readings that disagree are made by tests of their own below.
    assert {*CHECK_NAMES} - shown == {"space", "apt_lock", "topology"}


def test_memory_that_the_nodes_own_replicas_hold_is_no_fault(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("memory-in-use", tmp_path)
    read, host = host_fixtures.read_topology(root), host_fixtures.read_host(root)
    plan = build_plan(profile("8x"), {}, read, False, SOURCES["8x"])
    wanted = wanted_of(profile("8x"), {}, SOURCES["8x"], variables())

    def levels(releases: dict[str, Any], free: Any = host["free_memory"]) -> list[str]:
        found = check_host({**host, "free_memory": free}, {**read, "releases": releases}, plan, wanted)
        return [item["level"] for item in found if item["check"] == "memory"]

    assert levels({}) == ["ok", "ok", "failure"]
    assert levels({"0": {}}) == ["ok", "ok"]
    # nor is what nobody can tell
    assert levels({}, {"machine": 1, "nodes": {"0": 2**40, "1": None}}) == ["ok", "ok"]


def test_caps_beyond_the_memory_are_a_warning_as_in_the_plan(tmp_path: Path) -> None:
    """One socket with 790 GiB takes two replicas that need 388.7 GiB each; their caps are 800 GiB together."""
    cards = [gpu(number, 0) for number in range(8)]
    node = topology([numa_node(0, [*range(64)], 790, socket=0)], gpus=cards)
    plan = build_plan(profile("8x"), {}, node, False, SOURCES["8x"])
    (warning,) = plan["warnings"]
    assert warning.startswith("container_memory: the caps of replica 0 and replica 1")
    found = check_host({}, node, plan, wanted_of(profile("8x"), {}, SOURCES["8x"], variables()))
    (memory,) = [item for item in found if item["check"] == "memory"]
    assert (memory["level"], memory["seen"]) == ("warning", "NUMA node 0: 790.0 GiB")
    assert memory["wanted"] == "800.0 GiB for 2 replicas"


def test_a_packs_recipe_without_a_pack_is_refused() -> None:
    sources = {**SOURCES["8x"], "pack": {"type": "path", "path": "/srv/pack"}}
    (found,) = check_inventory(profile("8x"), {}, SOURCES["8x"], {**IMAGE, "recipe": "pack"})
    assert (found["check"], found["level"]) == ("sources", "failure")
    assert found["seen"].startswith("serving_image_recipe: pack needs a pack") and "sources.pack" in found["remedy"]
    with_pack = check_inventory(profile("8x"), {}, sources, {**IMAGE, "recipe": "pack"})
    assert [check["level"] for check in with_pack] == ["ok"]


def test_an_image_that_may_change_is_refused_before_driver_and_weights() -> None:
    """As the profile has it the base is a tag, and an operator who has filled in nothing of it learns that first."""
    (found,) = check_inventory(profile("8x"), {}, SOURCES["8x"], {**IMAGE, "base": ""})
    assert (found["check"], found["level"]) == ("image", "failure")
    assert found["seen"].startswith("serving_image_base: docker.io/vllm/vllm-openai:v0.33.0 has the tag v0.33.0")
    assert "skopeo inspect" in found["remedy"] and "serving_image_allow_tag" in found["remedy"]
    good: list[dict[str, Any]] = [
        {"allow_tag": True},
        {"prebuilt": f"registry.example/vllm@sha256:{'b' * 64}"},
        {"base": "", "recipe": "pack"},
    ]
    pack = {**SOURCES["8x"], "pack": {"type": "path", "path": "/srv/pack"}}
    for given_variables in good:
        image = {**IMAGE, "base": "", **given_variables}
        (found,) = check_inventory(profile("8x"), {}, pack if "recipe" in given_variables else SOURCES["8x"], image)
        assert found["level"] == "ok", found
    # a pack's recipe is the default where there is a pack, and the demo's image has no base
    assert check_inventory(profile("8x"), {}, pack, {**IMAGE, "base": ""})[0]["level"] == "ok"
    assert check_inventory(profile("cpu"), {}, {}, {**IMAGE, "base": ""})[0]["level"] == "ok"
    (found,) = check_inventory(profile("8x"), {}, SOURCES["8x"], {**IMAGE, "plugin_wheel": "ds41k.whl"})
    assert "serving_image_plugin_wheel" in found["seen"]


def test_a_locked_apt_names_who_holds_it(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("good-8x", tmp_path)
    host_fixtures.lock(root, "/var/lib/dpkg/lock-frontend", 4711, "/usr/bin/python3 /usr/bin/unattended-upgrade")
    checks = judge(root)
    assert bad(checks) == {("apt_lock", "warning")}
    assert "process 4711 (/usr/bin/python3 /usr/bin/unattended-upgrade)" in text(checks, "apt_lock")


def test_a_lock_of_another_file_with_the_same_number_is_none(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("good-8x", tmp_path)
    host_fixtures.lock(root, "/var/lib/dpkg/lock-frontend", 4711, "a database")
    (root / "proc/4711/fd/4").unlink()
    (root / "proc/4711/fd/4").symlink_to("/srv/database/lock")
    assert bad(judge(root)) == set()


def test_another_module_of_nvidias_is_not_the_driver(tmp_path: Path) -> None:
    """A driver that the distribution built has nothing in DKMS, and GPUDirect Storage has."""
    root = host_fixtures.lay_out("good-8x", tmp_path)
    (root / ".commands/dkms status").write_text("nvidia-fs/2.26.6, 6.8.0-31-generic, x86_64: installed\n")
    assert bad(judge(root, adopted())) == set()
    assert "nothing of DKMS" in text(judge(root, adopted()), "driver_module")


def test_a_small_disk_is_named_with_what_is_missing(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("good-8x", tmp_path)
    checks = judge(root, free_gib=300)
    assert bad(checks) == {("space", "failure")}
    # All three folders are on one disk. 4 cards x (91,629 MiB - 18 GiB) = 285.9 GiB, and tables of 189 GiB.
    assert "300.0 GiB free | 579.9 GiB free" in text(checks, "space")
    assert "474.9 GiB for the model" in text(checks, "space")
    assert "279.9 GiB are missing" in text(checks, "space")
    assert bad(judge(root, variables(space_gib={"model": 190, "image": None, "state": None}), free_gib=300)) == set()


def test_what_is_fetched_already_takes_no_more_room() -> None:
    wanted = wanted_of(profile("2x"), {}, SOURCES["2x"], variables(serving=True))
    # The document's 81 GiB a card, on two cards.
    assert [(item["folder"], item["bytes"] // 2**30) for item in wanted["space"]] == [
        ("/var/lib/gpu-node", 5),
        ("/var/lib/gpu-node/artifacts/deepseek-v4-flash-0731", 162),
    ]
    there = {"free_bytes": 100 * 2**30, "total_bytes": 400 * 2**30, "device": 7}
    for used, level in ((0, "failure"), (70 * 2**30, "ok")):
        host = {"space": {item["folder"]: {**there, "used_bytes": used} for item in wanted["space"]}}
        (found,) = [item for item in check_host(host, topology(), {}, wanted) if item["check"] == "space"]
        assert found["level"] == level


def test_folders_on_disks_of_their_own_are_not_added_up() -> None:
    wanted = wanted_of(profile("2x"), {}, SOURCES["2x"], variables())
    space = {
        item["folder"]: {"free_bytes": 170 * 2**30, "total_bytes": 2**40, "device": number, "used_bytes": 0}
        for number, item in enumerate(wanted["space"])
    }
    found = [item for item in check_host({"space": space}, topology(), {}, wanted) if item["check"] == "space"]
    assert [item["level"] for item in found] == ["ok", "ok", "ok"]


def test_weights_of_an_adopted_folder_take_no_room() -> None:
    model = {"type": "path", "path": "/srv/model"}
    room = {
        adopt: [item["for"] for item in wanted_of(profile("2x"), {}, {"model": source}, variables())["space"]]
        for adopt, source in ((True, {**model, "adopt": True}), (False, model))
    }
    assert room[True] == ["releases, caches and logs", "the engine's image"]
    # Otherwise the files are copied from there.
    assert room[False] == [*room[True], "the model"]


def test_readings_that_disagree_are_warnings(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("good-8x", tmp_path)
    information = root / "proc/driver/nvidia/gpus/0000:21:00.0/information"
    information.write_text(information.read_text().replace("000000000002", "000000000009"))
    assert ("topology", "warning") in {(item["check"], item["level"]) for item in judge(root)}


# --- keys and consent


def test_secure_boot_with_keys_or_with_a_driver_that_runs_is_fine(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("drv-16-secure-boot", tmp_path / "bare")
    assert bad(judge(root, variables(driver={"signed": True}))) == set()
    running = host_fixtures.lay_out("good-8x", tmp_path / "running")
    flag = running / "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    flag.write_bytes(bytes([6, 0, 0, 0, 1]))
    assert bad(judge(running)) == set()
    # Another version would have to be built, and nobody could sign it.
    assert ("secure_boot", "failure") in bad(judge(running, variables(driver={"version": "590.60.01"})))


def test_secure_boot_that_cannot_be_told_is_a_warning(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("drv-16-secure-boot", tmp_path)
    for file in (root / "sys/firmware/efi/efivars").iterdir():
        file.unlink()
    assert bad(judge(root)) == {("secure_boot", "warning")}


def test_signatures_that_the_kernel_insists_on_count_as_secure_boot(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("bare-8x", tmp_path)
    (root / "proc/cmdline").write_text("ro iommu=pt module.sig_enforce=1\n")
    assert bad(judge(root)) == {("secure_boot", "failure")}


def test_a_mismatch_that_the_driver_role_may_reboot_for_is_a_warning(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("drv-04-mismatch", tmp_path)
    assert ("driver_libraries", "warning") in bad(judge(root, variables(driver={"reboot_allowed": True})))


@pytest.mark.parametrize(("allowed", "level"), [(False, "failure"), (True, "warning")])
def test_a_known_bad_version_is_refused_unless_it_is_asked_for_knowingly(
    tmp_path: Path, allowed: bool, level: str
) -> None:
    root = host_fixtures.lay_out("bare-8x", tmp_path)
    checks = judge(root, variables(driver={"version": "595.71.05-1", "bad_allowed": allowed}))
    assert ("driver", level) in bad(checks)
    assert "595.71.05-1 is asked for: Xid 8" in text(checks, "driver")


def test_the_proprietary_modules_fault_is_not_the_open_ones(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("bare-8x", tmp_path)
    assert bad(judge(root, variables(driver={"version": "580.126.09"}))) == set()


def test_a_known_bad_toolkit_is_refused(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("bare-8x", tmp_path)
    checks = judge(root, variables(toolkit={"version": "1.19.1-1", "known": KNOWN_TOOLKITS}))
    assert bad(checks) == {("toolkit", "failure")}
    assert "known to be good: 1.18.2, 1.19.0" in text(checks, "toolkit")


def test_a_parameter_that_host_settings_would_add_is_refused_as_well(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("good-8x", tmp_path)
    checks = judge(root, variables(kernel_parameters=["pcie_acs_override=downstream"]))
    assert bad(checks) == {("kernel_parameters", "failure")}
    assert "host_settings: pcie_acs_override=downstream" in text(checks, "kernel_parameters")


def test_the_module_for_named_kernels_alone(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("drv-02-next-kernel", tmp_path)
    assert bad(judge(root, adopted(kernels=["6.8.0-45-generic"]))) == {("kernel", "warning")}


def test_an_old_drivers_build_does_not_count_for_the_new_one(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("good-8x", tmp_path)
    status = "nvidia/580.95.05, 6.8.0-45-generic, x86_64: installed\nnvidia/590.48.01: added\n"
    (root / ".commands/dkms status").write_text(status)
    checks = judge(root, adopted())
    assert bad(checks) == {("driver_module", "failure")}
    assert "6.8.0-45-generic: nvidia/590.48.01 added" in text(checks, "driver_module")


def test_a_small_bar1_hurts_no_card_that_serves_alone(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("bar1-small", tmp_path)
    read = host_fixtures.read_topology(root)
    wanted = wanted_of(profile("2x"), {"tensor_parallel_size": 1, "replicas": 2}, SOURCES["2x"], variables())
    found = check_host(host_fixtures.read_host(root), read, {}, wanted)
    assert {(item["check"], item["level"]) for item in found if item["check"] == "bar1"} == {("bar1", "warning")}


def test_only_the_plans_cards_are_judged(tmp_path: Path) -> None:
    """A spare card in a narrow slot is nobody's business."""
    root = host_fixtures.lay_out("link-narrow", tmp_path)
    cards = [f"0000:{bus}:00.0" for bus in ("81", "a1", "c1", "e1")]
    assert bad(judge(root, overrides={"replicas": 1, "gpus": cards})) == set()
    assert ("pcie_width", "failure") in bad(
        judge(root, overrides={"replicas": 1, "gpus": ["0000:21:00.0", *cards[1:]]})
    )


def test_a_named_card_that_is_gone(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("card-gone", tmp_path)
    cards = [f"0000:{bus}:00.0" for bus in ("81", "a1", "c1", "e1")]
    checks = judge(root, overrides={"replicas": 1, "gpus": cards})
    assert bad(checks) == {("gpus", "failure")}
    assert "3 on PCI: 0000:81:00.0" in text(checks, "gpus")
    assert "not there: 0000:a1:00.0" in text(checks, "gpus")


# --- the other profile, and what nobody can tell


def test_the_cpu_profile_asks_nothing_of_gpus(tmp_path: Path) -> None:
    checks = judge(host_fixtures.lay_out("several", tmp_path), name="cpu")
    assert {item["check"] for item in checks} == {*HOST_CHECKS, "inventory", "plan"}
    assert not {item["check"] for item in checks} & {*GPU_CHECKS}


def test_a_machine_without_gpus_fails_for_8x_and_passes_for_cpu(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("bare-8x", tmp_path)
    for device in (root / "sys/bus/pci/devices").iterdir():
        device.unlink()
    checks = judge(root)
    assert {("gpus", "failure"), ("plan", "failure")} <= {(item["check"], item["level"]) for item in checks}
    assert "0 on PCI: none | 8 that the profile is made for" in text(checks, "gpus")
    assert bad(judge(root, name="cpu")) == set()


def test_a_container_is_not_asked_for_what_is_its_hosts(tmp_path: Path) -> None:
    root = host_fixtures.lay_out("drv-02-next-kernel", tmp_path)
    (root / "run/systemd").mkdir(parents=True)
    (root / "run/systemd/container").write_text("docker")
    (root / ".commands/timedatectl show -p NTPSynchronized --value").unlink()
    assert bad(judge(root, name="cpu")) == set()


UNTOLD: dict[str, Any] = {
    "os": None,
    "kernel": None,
    "secure_boot": None,
    "space": None,
    "nvidia": None,
    "numa_balancing": None,
    "acs_redirect": None,
    "iommu": None,
    "gpus": None,
    "podman": None,
    "time_synchronized": None,
}


def test_nothing_told_is_no_traceback_and_no_failure_but_the_system(tmp_path: Path) -> None:
    wanted = wanted_of(profile("8x"), {}, SOURCES["8x"], variables())
    read = host_fixtures.read_topology(host_fixtures.lay_out("good-8x", tmp_path))
    for host in ({}, UNTOLD):
        levels = {item["check"]: item["level"] for item in check_host(host, read, {}, wanted)}
        assert [name for name, level in levels.items() if level == "failure"] == ["os"]
        assert {name for name, level in levels.items() if level == "warning"} == {
            "space",
            "time",
            "iommu",
            "acs",
            "secure_boot",
            "cdi",
        }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    root = host_fixtures.lay_out("good-8x", tmp_path_factory.mktemp("good"))
    yield host_fixtures.read_host(root), host_fixtures.read_topology(root)


PROFILE_8X = wanted_of(profile("8x"), {}, SOURCES["8x"], variables())


@given(data=st.data())
def test_any_part_may_be_missing(good: tuple[dict[str, Any], dict[str, Any]], data: st.DataObject) -> None:
    host = copy.deepcopy(good[0])
    for part in data.draw(st.sets(st.sampled_from(sorted(host)))):
        host[part] = data.draw(st.sampled_from([None, "absent"]))
        if host[part] == "absent":
            del host[part]
    for part in data.draw(st.sets(st.sampled_from(sorted(good[0]["nvidia"])))):
        if host.get("nvidia"):
            host["nvidia"][part] = None
    wanted = {**PROFILE_8X, **data.draw(st.sampled_from([variables(), adopted()]))}
    checks = check_host(host, good[1], {}, wanted)
    assert all(set(item) == {"check", "level", "seen", "wanted", "remedy"} for item in checks)
    assert all(bool(item["remedy"]) == (item["level"] != "ok") for item in checks)


def test_a_virtual_machine_with_one_card() -> None:
    """Read on one: an H200, driver 580.159.04, no ports above the card, BAR1 as region 2."""
    host = json.loads((host_fixtures.HOSTS / "read_1x_h200_vm.json").read_text())
    assert host["gpus"][0]["bar1_bytes"] == 256 * 2**30
    read = load_topology((host_fixtures.HOSTS.parent / "topology/read_1x_h200_vm.json").read_text())
    asked = {"tensor_parallel_size": 1, "gpus": ["0000:00:06.0"]}
    wanted = wanted_of(profile("2x"), asked, SOURCES["2x"], adopted(version="580.159.04"))
    levels = {item["check"]: item["level"] for item in check_host(host, {"listeners": [], **read}, {}, wanted)}
    gpu_checks = ("gpus", "gpus_of_driver", "bar1", "iommu", "acs", "pcie_width", "pcie_speed", "card_driver", "driver")
    assert {name: levels[name] for name in gpu_checks} == dict.fromkeys(gpu_checks, "ok")
    assert (levels["driver_libraries"], levels["driver_flavour"], levels["secure_boot"]) == ("ok", "ok", "ok")
    # nothing to give the card to a container with
    assert (levels["podman"], levels["toolkit"], levels["cdi"]) == ("failure", "failure", "failure")


# --- inventory, plan, acceptance, report


def test_settings_and_sources_are_told_without_a_node() -> None:
    checks = check_inventory(
        profile("2x"), {"max_model_length": 1, "replicas": "two"}, {"model": {"revision": "main"}, "modell": {}}, IMAGE
    )
    found = "\n".join(failure_lines({"checks": checks}))
    assert "unknown setting 'max_model_length'" in found
    assert "replicas" in found
    assert "revision 'main' is no commit" in found
    assert "40 hex digits" in found
    assert "unknown artifact 'modell'" in found


def test_a_revision_that_is_not_filled_in_is_a_failure() -> None:
    (check,) = check_inventory(profile("2x"), {}, {}, IMAGE)
    assert check["level"] == "failure"
    assert "model: revision of the source of type hub is empty" in check["seen"]
    (check,) = check_inventory(profile("2x"), {}, SOURCES["2x"], IMAGE)
    assert check["level"] == "ok"


@pytest.mark.parametrize(("group", "name"), [("flash_8x", "8x"), ("flash_2x", "2x"), ("fleet", "8x")])
def test_the_example_inventory_names_all_that_has_to_be_filled_in(group: str, name: str) -> None:
    folder = ROOT / "inventories/example/group_vars"
    told = {
        **yaml.safe_load((folder / "gpu_nodes/main.yml").read_text()),
        **yaml.safe_load((folder / f"{group}.yml").read_text()),
    }
    sources, image = told["serving_plan_sources"], {**IMAGE, "base": told["serving_image_base"]}
    empty = [text for source in sources.values() for text in source.values()].count("")
    found = check_inventory(profile(name), told.get("serving_plan_overrides", {}), sources, image)
    assert [item["check"] for item in found] == ["sources"] * empty + ["image"]
    filled = {key: {**source, **REVISION} if "revision" in source else source for key, source in sources.items()}
    (found_then,) = check_inventory(profile(name), {}, filled, IMAGE)
    assert found_then["level"] == "ok"


def test_what_a_check_says_already_the_plan_does_not_repeat() -> None:
    busy = topology(listeners=[listener(8001)])
    wanted = wanted_of(profile("cpu"), {}, {}, variables())
    checks = check_host({}, busy, {}, wanted)
    (ports,) = [item for item in checks if item["check"] == "ports"]
    with pytest.raises(PlanError) as caught:
        build_plan(profile("cpu"), {}, busy, False, {})
    assert f"{ports['seen']}; {ports['remedy']}" in caught.value.problems
    assert check_plan(caught.value.problems, checks) == []
    (other,) = check_plan(["something else; do this"], checks)
    assert (other["seen"], other["remedy"]) == ("something else", "do this")


def test_an_accepted_failure_is_a_warning(tmp_path: Path) -> None:
    checks = judge(host_fixtures.lay_out("link-narrow", tmp_path))
    assert make_report(accept(checks, ["pcie_width"]))["passed"]
    assert not make_report(accept(checks, ["bar1"]))["passed"]
    (narrow,) = [item for item in accept(checks, ["pcie_width"]) if item["check"] == "pcie_width"]
    assert "accepted by preflight_accepted" in narrow["remedy"]


def test_an_unknown_name_or_the_plan_cannot_be_accepted() -> None:
    plan = check_plan(["it cannot work; change it"], [])
    found = accept(plan, ["plan", "pcie_with"])
    assert [item["level"] for item in found] == ["failure"] * 3
    assert "the nearest one is 'pcie_width'" in found[-1]["remedy"]


def test_the_table_shows_everything_once(tmp_path: Path) -> None:
    told = make_report(judge(host_fixtures.lay_out("several", tmp_path)))
    lines = describe_report(told)
    assert max(map(len, lines)) <= 132
    assert lines[-1].startswith(f"{len(told['checks'])} checks: {told['failures']} failed, {told['warnings']} with a")
    assert sum(line.startswith("FAIL") for line in lines) == told["failures"]
    assert sum(line.startswith("WARN") for line in lines) == told["warnings"]
    flat = " ".join(" ".join(lines).split())
    assert "-> reseat the card or riser" in flat
    failed = failure_lines(told)
    assert len(failed) == told["failures"]
    assert any("pcie_width: 0000:21:00.0 x4 of x16 (wanted: the card's full width); reseat" in line for line in failed)
    assert not told["passed"]


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(st.lists(st.tuples(st.sampled_from(["ok", "warning", "failure"]), WORDS, WORDS, WORDS), max_size=5))
def test_any_text_fits_the_table(rows: list[tuple[str, str, str, str]]) -> None:
    checks = [
        {"check": "space", "level": level, "seen": seen, "wanted": wanted, "remedy": remedy}
        for level, seen, wanted, remedy in rows
    ]
    lines = describe_report(make_report(checks))
    assert len(lines) >= len(rows) + 2
