"""CDI specifications: what a container gets, and every way in which a file gives it something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils import cdi
from ansible_collections.serving.gpu_node.plugins.module_utils.cdi import (
    CdiError,
    CdiSpec,
    cdi_problems,
    driver_versions,
    expected_nodes,
    has_cuda,
    host_paths,
    parse_spec,
    parse_specs,
    unreadable_by,
    wanted_gpus,
)
from ansible_collections.serving.gpu_node.plugins.modules import cdi_spec
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_runner import run_module

TEXT = (Path(__file__).parent / "fixtures" / "cdi" / "two_gpus.yaml").read_text()
ETC, RUN = "/etc/cdi/nvidia.yaml", "/run/cdi/nvidia.yaml"
FIRST = "GPU-00000000-0000-0000-0000-000000000010"
SECOND = "GPU-00000000-0000-0000-0000-000000000011"
DRIVER = "590.48.01"
CUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.590.48.01"
Change = Callable[[dict[str, Any]], None]


def made(change: Change | None = None) -> str:
    """The good specification, changed."""
    value: dict[str, Any] = yaml.safe_load(TEXT)
    if change:
        change(value)
    return json.dumps(value)


def problems_of(
    texts: dict[str, str],
    devices: list[str] | None = None,
    missing: set[str] | None = None,
    driver: str = DRIVER,
    podman: str = "4.3.1",
) -> list[str]:
    specs, malformed = parse_specs(texts)
    wanted = [FIRST, SECOND] if devices is None else devices
    return malformed + cdi_problems(specs, wanted, host_paths(specs) - (missing or set()), driver, podman)


def one(problems: list[str]) -> str:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_good_specification() -> None:
    assert problems_of({ETC: TEXT}) == []
    assert problems_of({ETC: made()}, devices=[]) == []


def test_what_a_container_gets() -> None:
    specs, _ = parse_specs({ETC: TEXT})
    assert expected_nodes(specs, [SECOND]).keys() == {
        "/dev/nvidia1",
        "/dev/dri/card2",
        "/dev/dri/renderD129",
        "/dev/nvidia-modeset",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidiactl",
    }
    assert has_cuda(specs, [SECOND])
    assert not has_cuda(specs, ["GPU-of-another-node"])
    assert driver_versions(specs[0]) == [DRIVER]
    assert {"/usr/bin/nvidia-cdi-hook", CUDA, "/dev/nvidia0"} <= host_paths(specs)


def test_a_node_under_another_name() -> None:
    def rename(value: dict[str, Any]) -> None:
        value["devices"][0]["containerEdits"]["deviceNodes"][0]["hostPath"] = "/dev/null"

    specs, _ = parse_specs({ETC: made(rename)})
    assert expected_nodes(specs, [FIRST])["/dev/nvidia0"] == "/dev/null"


def test_no_specification_at_all() -> None:
    problem = one(problems_of({}))
    assert problem.startswith("/etc/cdi and /run/cdi have no device of the kind nvidia.com/gpu; ")
    assert "systemctl start gpu-node-cdi.service" in problem


def test_a_specification_without_devices() -> None:
    problem = one(problems_of({ETC: made(lambda value: value.update(devices=[]))}))
    assert problem.startswith(f"{ETC} has no device of the kind nvidia.com/gpu")


def test_a_gpu_that_is_missing_is_named() -> None:
    absent = "GPU-00000000-0000-0000-0000-0000000000ff"
    problem = one(problems_of({ETC: TEXT}, [FIRST, absent]))
    assert problem.startswith(f"there is no nvidia.com/gpu={absent} in {ETC}, which has {FIRST}, {SECOND}, all")
    assert "nvidia-smi -L" in problem


def test_devices_named_by_number() -> None:
    def number(value: dict[str, Any]) -> None:
        for index, device in enumerate(value["devices"][:2]):
            device["name"] = str(index)

    problems = problems_of({ETC: made(number)})
    assert [problem.split(" in ")[0] for problem in problems] == [
        f"there is no nvidia.com/gpu={FIRST}",
        f"there is no nvidia.com/gpu={SECOND}",
    ]
    assert "not named by UUID" in problems[0]


def test_libraries_that_are_gone_are_stale() -> None:
    gone = {CUDA, "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.590.48.01"}
    problem = one(problems_of({ETC: TEXT}, missing=gone))
    assert problem.startswith(f"{ETC} is stale: it mounts {CUDA}, ")
    assert "which do not exist" in problem
    assert "gpu-node-cdi.service" in problem


def test_a_socket_that_is_gone_is_stale() -> None:
    """A driver upgraded under running containers: the next start fails on the persistence daemon's socket."""
    problem = one(problems_of({ETC: TEXT}, missing={"/run/nvidia-persistenced/socket"}))
    assert "/run/nvidia-persistenced/socket, which does not exist" in problem


def test_only_what_a_wanted_device_brings_must_exist() -> None:
    assert problems_of({ETC: TEXT}, [FIRST], missing={"/dev/nvidia1"}) == []
    problem = one(problems_of({ETC: TEXT}, [SECOND], missing={"/dev/nvidia1"}))
    assert "gives device nodes that do not exist: /dev/nvidia1;" in problem


def test_a_hook_that_is_gone() -> None:
    problem = one(problems_of({ETC: TEXT}, missing={"/usr/bin/nvidia-cdi-hook"}))
    assert "runs /usr/bin/nvidia-cdi-hook, which does not exist; install nvidia-container-toolkit-base" in problem


def test_many_missing_files_are_counted() -> None:
    def more(value: dict[str, Any]) -> None:
        value["containerEdits"]["mounts"] += [
            {"hostPath": f"/gone/{number}", "containerPath": "/x"} for number in range(9)
        ]

    problem = one(problems_of({ETC: made(more)}, missing={f"/gone/{number}" for number in range(9)}))
    assert "/gone/0, /gone/1, /gone/2 and 6 more" in problem


def test_libraries_of_another_driver_than_the_loaded_one() -> None:
    problem = one(problems_of({ETC: TEXT}, driver="590.99.99"))
    assert "the libraries of driver 590.48.01, and 590.99.99 is loaded" in problem
    assert "reboot" in problem


def test_libraries_of_two_drivers() -> None:
    def mix(value: dict[str, Any]) -> None:
        value["containerEdits"]["mounts"][1]["hostPath"] = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.126.09"

    problem = one(problems_of({ETC: made(mix)}))
    assert "drivers 580.126.09 and 590.48.01" in problem


def test_an_unknown_driver_is_not_compared() -> None:
    assert problems_of({ETC: TEXT}, driver="") == []


@pytest.mark.parametrize("node", ["/dev/nvidiactl", "/dev/nvidia-uvm"])
def test_a_specification_without_a_control_node_is_partial(node: str) -> None:
    """As one is that was made before nvidia-uvm was loaded."""

    def drop(value: dict[str, Any]) -> None:
        edits = value["containerEdits"]
        edits["deviceNodes"] = [item for item in edits["deviceNodes"] if item["path"] != node]

    problems = problems_of({ETC: made(drop)})
    assert [problem.split(";")[0] for problem in problems] == [
        f"{ETC} is partial: nvidia.com/gpu={device} comes without {node}" for device in (FIRST, SECOND)
    ]
    assert "nvidia-modprobe" in problems[0]


def test_a_specification_without_the_cards_node_is_partial() -> None:
    def drop(value: dict[str, Any]) -> None:
        del value["devices"][1]["containerEdits"]["deviceNodes"][0]

    assert f"nvidia.com/gpu={SECOND} comes without the card's own /dev/nvidiaN" in one(problems_of({ETC: made(drop)}))


def test_a_specification_without_cuda_is_partial() -> None:
    def drop(value: dict[str, Any]) -> None:
        del value["containerEdits"]["mounts"][0]

    assert "comes without the library libcuda.so" in problems_of({ETC: made(drop)}, [FIRST])[0]


def test_two_gpus_that_are_one_node() -> None:
    def same(value: dict[str, Any]) -> None:
        value["devices"][1]["containerEdits"]["deviceNodes"][0]["path"] = "/dev/nvidia0"

    assert f"gives /dev/nvidia0 for {FIRST} and {SECOND}" in one(problems_of({ETC: made(same)}))


# nvidia-ctk's usual names: by number, by UUID, and all of them together.
def usual_names(value: dict[str, Any]) -> None:
    cards = [device for device in value["devices"] if device["name"].startswith("GPU-")]
    value["devices"] += [{**card, "name": str(number)} for number, card in enumerate(cards)]
    value["devices"].append({**cards[0], "name": "MIG-00000000-0000-0000-0000-000000000009"})


@pytest.mark.parametrize("asked", [[], [FIRST, SECOND]])
def test_further_names_of_the_same_cards_are_no_problem(asked: list[str]) -> None:
    assert problems_of({ETC: made(usual_names)}, asked) == []


def test_a_second_file_without_names_by_uuid_takes_nothing_away() -> None:
    def numbered(value: dict[str, Any]) -> None:
        usual_names(value)
        value["devices"] = [device for device in value["devices"] if not device["name"].startswith("GPU-")]

    assert problems_of({ETC: made(usual_names), RUN: made(numbered)}) == []


def test_two_folders_claim_the_same_devices() -> None:
    problem = one(problems_of({ETC: TEXT, RUN: TEXT}))
    assert problem.startswith(f"{ETC} and {RUN} both have {FIRST}, {SECOND}: Podman takes that of {RUN}")


def test_the_later_folders_devices_are_what_counts() -> None:
    def stale(value: dict[str, Any]) -> None:
        value["containerEdits"]["mounts"][0]["hostPath"] = "/gone/libcuda.so.580.126.09"

    problems = problems_of({ETC: TEXT, RUN: made(stale)}, missing={"/gone/libcuda.so.580.126.09"})
    assert any(problem.startswith(f"{RUN} is stale: it mounts /gone") for problem in problems)
    assert not any(problem.startswith(f"{ETC} is") for problem in problems)


def test_two_files_of_one_folder_claim_the_same_devices() -> None:
    problem = one(problems_of({"/etc/cdi/a.json": TEXT, ETC: TEXT}))
    assert "both have" in problem
    assert "Podman takes neither" in problem


def test_another_kinds_specification_is_nobodys_business() -> None:
    other = made(lambda value: value.update(kind="example.com/net"))
    assert problems_of({ETC: TEXT, "/etc/cdi/net.yaml": other, "/etc/cdi/broken.yaml": ":"}) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("- 1", "the file is no mapping"),
        ("a: [", "it is neither JSON nor YAML"),
        ("{}", "it is empty"),
        ("kind: nvidia.com/gpu", "it has no cdiVersion"),
        ("cdiVersion: 0.5.0\nkind: gpu", "it has no kind"),
        ("cdiVersion: 0.5\nkind: nvidia.com/gpu", "it has no cdiVersion"),
        ("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: 5", "devices is no list of mappings"),
        ("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{}]", "a device has no name"),
        ("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: a}, {name: a}]", "it has the device a twice"),
        (
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits: {deviceNodes: [{}]}",
            "a device node of the file has no path",
        ),
    ],
)
def test_what_is_no_specification_is_told(text: str, words: str) -> None:
    problems = problems_of({ETC: text})
    assert problems[0].startswith(f"{ETC} is no CDI specification: {words}")


def test_yaml_without_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cdi, "yaml", None)
    with pytest.raises(CdiError, match="python3-yaml"):
        parse_spec(ETC, TEXT)
    assert parse_spec(ETC, made()).devices.keys() == {FIRST, SECOND, "all"}


@pytest.mark.parametrize(
    ("podman", "version", "unreadable"),
    [
        # tried with Debian 12's Podman
        ("4.3.1", "0.5.0", False),
        ("4.3.1", "0.6.0", True),
        ("4.3.1", "0.7.0", True),
        # Ubuntu 24.04's: additionalGids, which 0.7.0 brought, is an unknown field
        ("4.9.3", "0.5.0", False),
        ("4.9.3", "0.7.0", True),
        ("5.4.2", "0.7.0", False),
        ("", "0.7.0", False),
    ],
)
def test_versions_that_podman_passes_over(podman: str, version: str, unreadable: bool) -> None:
    assert unreadable_by(podman, version) is unreadable
    problems = problems_of({ETC: made(lambda value: value.update(cdiVersion=version))}, podman=podman)
    assert bool(problems) is unreadable
    if unreadable:
        assert f"of CDI version {version}, which Podman {podman} does not read" in one(problems)


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "path", "hostPath", "containerEdits", "deviceNodes", "mounts", "hooks", "devices", "kind"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def settle(text: str) -> CdiSpec | None:
    """Any text is a specification or is refused with a reason, and a specification can be checked."""
    try:
        spec = parse_spec(ETC, text)
    except CdiError as error:
        assert str(error)
        return None
    for existing in (host_paths([spec]), set[str]()):
        assert all(isinstance(problem, str) and problem for problem in cdi_problems([spec], [FIRST], existing, DRIVER))
    return spec


@given(st.text() | st.text(alphabet="{}[]:,-&*!|>'\"\n ab0"))
def test_any_text(text: str) -> None:
    settle(text)


@given(VALUES, VALUES)
def test_any_values_in_the_right_places(devices: Any, edits: Any) -> None:
    value = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": edits}
    settle(json.dumps(value))


def test_the_uuids_of_a_plans_gpus() -> None:
    plan = {
        "replicas": [
            {
                "gpus": [
                    {"pci_address": "0000:38:00.0", "uuid": "auto"},
                    {"pci_address": "0000:49:00.0", "uuid": "GPU-b"},
                ]
            },
            {"gpus": [{"pci_address": "0000:5a:00.0", "uuid": "auto"}]},
        ]
    }
    nothing = wanted_gpus(plan, [])
    assert nothing == {"uuids": ["GPU-b"], "waiting": ["0000:38:00.0", "0000:5a:00.0"]}
    now = [
        {"pci_address": "0000:38:00.0", "uuid": "GPU-a"},
        # swapped since the plan was made
        {"pci_address": "0000:49:00.0", "uuid": "GPU-new"},
        {"pci_address": "0000:5a:00.0", "uuid": ""},
        {"pci_address": "0000:ff:00.0", "uuid": "GPU-not-planned"},
    ]
    assert wanted_gpus(plan, now) == {"uuids": ["GPU-a", "GPU-new"], "waiting": ["0000:5a:00.0"]}


def test_the_module_reads_the_folders(tmp_path: Path) -> None:
    def local(value: dict[str, Any]) -> None:
        for mount in value["containerEdits"]["mounts"]:
            mount["hostPath"] = f"{tmp_path}{mount['hostPath']}"

    etc, run = tmp_path / "etc", tmp_path / "run"
    etc.mkdir()
    (etc / "nvidia.yaml").write_text(made(local))
    (etc / "notes.txt").write_text("not one")
    (etc / "folder.json").mkdir()
    answer = cdi_spec.check([FIRST], [str(etc), str(run)], "4.3.1", tmp_path / "proc")
    assert answer["names"] == [FIRST, SECOND, "all"]
    assert "/dev/nvidia0" in answer["nodes"]
    assert any("is stale: it mounts" in problem for problem in answer["problems"])
    assert answer["driver_version"] == ""


def test_the_module_compares_with_the_loaded_driver(tmp_path: Path) -> None:
    version = tmp_path / "driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\n"
    )
    (tmp_path / "nvidia.yaml").write_text(TEXT)
    answer = cdi_spec.check([], [str(tmp_path)], "", tmp_path)
    assert answer["driver_version"] == "580.159.04"
    assert any("driver 590.48.01, and 580.159.04 is loaded" in problem for problem in answer["problems"])


def test_the_module_on_this_machine() -> None:
    answer = run_module(cdi_spec.main, {"folders": ["/nonexistent"]})
    assert answer["changed"] is False
    assert answer["names"] == []
    assert len(answer["problems"]) == 1
    assert answer["cuda"] is False
