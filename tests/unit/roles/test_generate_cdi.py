"""What makes the CDI specification on the node: ours from nvidia-ctk's."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.cdi import cdi_problems, host_paths, parse_spec
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "roles" / "container_runtime" / "files" / "generate_cdi.py"
FOUND = yaml.safe_load((ROOT / "tests/unit/plugins/fixtures/cdi/two_gpus.yaml").read_text())
CODE = runpy.run_path(str(SCRIPT))
GenerateError: type[Exception] = CODE["GenerateError"]
serving_spec: Callable[..., dict[str, Any]] = CODE["serving_spec"]
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
FIRST, SECOND = (f"GPU-00000000-0000-0000-0000-0000000000{end}" for end in ("10", "11"))


def links(path: str) -> list[str]:
    """As ldconfig leaves them beside a library."""
    return [f"{path.split('.so.')[0]}.so.1"] if ".so." in path else []


def made() -> dict[str, Any]:
    return serving_spec(FOUND, links)


def paths(spec: dict[str, Any]) -> dict[str, str]:
    return {mount["containerPath"]: mount["hostPath"] for mount in spec["containerEdits"]["mounts"]}


def test_it_is_a_good_specification_for_the_same_gpus() -> None:
    spec = parse_spec("/etc/cdi/nvidia.yaml", json.dumps(made()))
    assert spec.devices.keys() == {FIRST, SECOND}
    assert spec.version == "0.5.0"
    assert cdi_problems([spec], [FIRST, SECOND], host_paths([spec]), "590.48.01", "4.3.1") == []


def test_no_hook_is_left() -> None:
    assert "hooks" in FOUND["containerEdits"]
    assert "hook" not in json.dumps(made())


def test_libraries_have_their_short_names() -> None:
    assert paths(made()) == {
        f"{LIBRARIES}/libcuda.so.590.48.01": f"{LIBRARIES}/libcuda.so.590.48.01",
        f"{LIBRARIES}/libcuda.so.1": f"{LIBRARIES}/libcuda.so.590.48.01",
        f"{LIBRARIES}/libnvidia-ml.so.590.48.01": f"{LIBRARIES}/libnvidia-ml.so.590.48.01",
        f"{LIBRARIES}/libnvidia-ml.so.1": f"{LIBRARIES}/libnvidia-ml.so.590.48.01",
        "/usr/bin/nvidia-smi": "/usr/bin/nvidia-smi",
    }


def test_sockets_of_services_are_left_out() -> None:
    assert "/run/" not in json.dumps(made())


def test_only_nodes_for_computing() -> None:
    spec = made()
    assert spec["devices"][0]["containerEdits"] == {"deviceNodes": [{"path": "/dev/nvidia0"}]}
    assert [node["path"] for node in spec["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidia-modeset",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidiactl",
    ]


def test_groups_that_older_podmans_do_not_read_are_left_out() -> None:
    """As nvidia-ctk 1.19.1 writes them, with version 0.7.0."""
    newer = json.loads(json.dumps(FOUND)) | {"cdiVersion": "0.7.0"}
    newer["devices"][0]["containerEdits"]["additionalGids"] = [44]
    newer["devices"][0]["containerEdits"]["deviceNodes"][0]["gid"] = 44
    assert serving_spec(newer, links) == made()


def test_libraries_in_a_folder_that_is_not_searched() -> None:
    """Debian's own packages keep them in a folder of the driver."""
    own = f"{LIBRARIES}/nvidia/current/libcuda.so.550.163.01"
    found = {
        "devices": FOUND["devices"],
        "containerEdits": {"mounts": [{"hostPath": own, "containerPath": own, "options": ["ro"]}]},
    }
    assert paths(serving_spec(found, links)) == {
        own: own,
        f"{LIBRARIES}/libcuda.so.550.163.01": own,
        f"{LIBRARIES}/libcuda.so.1": own,
    }


def test_links_on_the_host(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.590.48.01"
    library.write_text("")
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.590.48.01")
    (tmp_path / "libcuda.so").symlink_to("libcuda.so.1")
    (tmp_path / "libcudadebugger.so.1").symlink_to("libcuda.so.590.48.01")
    (tmp_path / "libcuda.so.580.1").write_text("of another driver")
    (tmp_path / "libcuda.so.2").symlink_to("libcuda.so.580.1")
    assert CODE["links_to"](str(library)) == [f"{tmp_path}/libcuda.so", f"{tmp_path}/libcuda.so.1"]
    assert CODE["links_to"]("/nonexistent/libcuda.so.1") == []


@pytest.mark.parametrize("devices", [[], None, [{"name": "all", "containerEdits": {}}], [{"name": "0"}]])
def test_without_a_gpu_there_is_no_specification(devices: Any) -> None:
    with pytest.raises(GenerateError, match="found no GPU"):
        serving_spec({"devices": devices}, links)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "containerEdits", "deviceNodes", "mounts", "path"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@given(JSON, JSON)
def test_any_answer_is_a_specification_or_refused(devices: Any, edits: Any) -> None:
    try:
        spec = serving_spec({"devices": devices, "containerEdits": edits}, lambda _: [])
    except GenerateError as error:
        assert str(error)
    else:
        assert spec["devices"]


class Node:
    """A folder that stands for the node: nvidia-ctk is a script, and the file lies in it."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.target = folder / "bin", folder / "cdi" / "nvidia.yaml"
        self.bin.mkdir()
        self.script = folder / "generate_cdi.py"
        self.script.write_text(SCRIPT.read_text().replace("/etc/cdi/nvidia.yaml", str(self.target)))

    def nvidia_ctk(self, generate: str) -> None:
        (self.bin / "nvidia-ctk").write_text(f'#!/bin/sh\ncase "$1" in system) exit 1;; esac\n{generate}\n')
        (self.bin / "nvidia-ctk").chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.script)],
            env={"PATH": f"{self.bin}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    (tmp_path / "found.json").write_text(json.dumps(FOUND))
    made.nvidia_ctk(f"cat {tmp_path}/found.json")
    return made


def test_it_writes_the_file_once(node: Node) -> None:
    first = node.run()
    assert first.returncode == 0, first.stderr
    assert f"{node.target} written: {FIRST}, {SECOND}" in first.stdout
    # nodes that could not be made are told, and are no reason to stop
    assert "device nodes: nvidia-ctk system create-device-nodes failed" in first.stderr
    before = node.target.stat()
    assert oct(before.st_mode & 0o777) == oct(0o644)
    assert "unchanged" in node.run().stdout
    assert node.target.stat().st_ino == before.st_ino
    assert [path.name for path in node.target.parent.iterdir()] == ["nvidia.yaml"]


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        ("echo first >&2; echo 'Driver/library version mismatch' >&2; exit 1", "Driver/library version mismatch"),
        ("echo '{'", "nvidia-ctk's answer is no JSON"),
        ("echo '[]'", "nvidia-ctk made no CDI specification"),
        ("echo '{}'", "nvidia-ctk found no GPU"),
        ("kill -9 $$", "failed with exit status -9"),
    ],
)
def test_a_failure_leaves_the_old_file(node: Node, generate: str, words: str) -> None:
    node.run()
    before = node.target.read_bytes()
    node.nvidia_ctk(generate)
    done = node.run()
    assert done.returncode == 1
    assert f"{node.target} stays as it is: " in done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert node.target.read_bytes() == before


def test_without_nvidia_ctk(node: Node) -> None:
    (node.bin / "nvidia-ctk").unlink()
    done = node.run()
    assert done.returncode == 1
    assert "nvidia-ctk could not be started: No such file or directory" in done.stderr
