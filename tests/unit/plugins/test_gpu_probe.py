"""The probe container: what it is started as, what it sees, and what is said of that."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils import gpu_look
from ansible_collections.serving.gpu_node.plugins.module_utils.probe import look_problems, start_problem
from ansible_collections.serving.gpu_node.plugins.modules import gpu_probe
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plugins.module_runner import run_module

FIRST = "GPU-00000000-0000-0000-0000-000000000010"
SECOND = "GPU-00000000-0000-0000-0000-000000000011"
NODES = {"/dev/nvidia0": [195, 0], "/dev/nvidiactl": [195, 255], "/dev/nvidia-uvm": [511, 0]}
DOUBLE = Path(__file__).resolve().parents[2] / "doubles" / "container_toolkit" / "libcuda.c"


def look(**changes: Any) -> dict[str, Any]:
    nodes = {path: {"device": numbers, "error": ""} for path, numbers in NODES.items()}
    return {"nodes": nodes, "cuda": {"error": "", "uuids": [FIRST]}} | changes


def said(seen: dict[str, Any], uuids: list[str] | None = None) -> list[str]:
    return look_problems(seen, NODES, uuids or [FIRST], "at its start")


def test_exactly_the_wanted_gpu() -> None:
    assert said(look()) == []


def test_a_node_that_is_missing() -> None:
    seen = look()
    del seen["nodes"]["/dev/nvidia-uvm"]
    assert said(seen) == ["at its start the container does not have /dev/nvidia-uvm"]


def test_another_gpus_node() -> None:
    seen = look()
    seen["nodes"]["/dev/nvidia7"] = {"device": [195, 7], "error": ""}
    assert said(seen) == ["at its start the container has /dev/nvidia7 as well, a GPU that is not one of its own"]


def test_nodes_that_are_no_gpus_may_be_there() -> None:
    seen = look()
    seen["nodes"]["/dev/nvidia-caps/nvidia-cap1"] = {"device": [240, 1], "error": ""}
    assert said(seen) == []


def test_a_gpu_that_was_taken_away() -> None:
    """What a reload of systemd does to containers whose device rules it does not know."""
    seen = look()
    seen["nodes"]["/dev/nvidia0"]["error"] = "Operation not permitted"
    problems = look_problems(seen, NODES, [FIRST], "after systemctl daemon-reload")
    assert problems == ["after systemctl daemon-reload the container cannot open /dev/nvidia0: Operation not permitted"]


def test_a_node_that_is_another_device() -> None:
    """The module of nvidia-uvm was loaded anew and has another number since."""
    seen = look()
    seen["nodes"]["/dev/nvidia-uvm"]["device"] = [510, 0]
    assert said(seen) == ["at its start the container has /dev/nvidia-uvm as device 510:0, and on the node it is 511:0"]


def test_cuda_that_does_not_start() -> None:
    seen = look(cuda={"error": "cuInit failed with error 999 (CUDA_ERROR_UNKNOWN)", "uuids": []})
    assert said(seen) == [
        "at its start the container cannot start CUDA: cuInit failed with error 999 (CUDA_ERROR_UNKNOWN)"
    ]


def test_cuda_that_finds_another_gpu() -> None:
    assert said(look(cuda={"error": "", "uuids": [SECOND]})) == [
        f"at its start the container finds no {FIRST} with CUDA",
        f"at its start the container finds {SECOND} with CUDA, which it was not given",
    ]


def test_cuda_that_was_not_asked() -> None:
    assert said(look(cuda=None)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu={SECOND}\n",
            f"Podman does not find every CDI device of {FIRST}:",
        ),
        (
            'Error: OCI runtime error: crun: {"msg":"error executing hook `/usr/bin/nvidia-cdi-hook` (exit code: 1)"}',
            "crun makes a read-only root read-only before it runs hooks",
        ),
        (
            "Error: stat /dev/nvidia1: no such file or directory\n",
            "Error: stat /dev/nvidia1: no such file or directory",
        ),
        ("", "the container did not start: nothing"),
        ("time=now level=warning msg=x\nlast line", "did not start: last line"),
    ],
)
def test_a_container_that_does_not_start(text: str, words: str) -> None:
    assert words in start_problem(text, [FIRST])


@given(st.text())
def test_any_words_of_podman(text: str) -> None:
    assert start_problem(text, [FIRST])


def test_looking_at_nodes(tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    for name, target in (("nvidia0", "/dev/null"), ("nvidiactl", "/dev/full"), ("dri/card0", "/dev/zero")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "nvidia-uvm").symlink_to("/dev/nonexistent")
    (tmp_path / "tty9").symlink_to("/dev/null")
    (tmp_path / "nvidia-notes").write_text("no device")
    found = gpu_look.look_at_nodes(tmp_path)
    assert {path: node["device"] for path, node in found.items()} == {
        "/dev/nvidia0": [1, 3],
        "/dev/nvidiactl": [1, 7],
        "/dev/dri/card0": [1, 5],
        "/dev/nvidia-uvm": [],
    }
    assert found["/dev/nvidia0"]["error"] == ""
    assert found["/dev/nvidia-uvm"]["error"] == "No such file or directory"


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The double of the driver's library, compiled here."""
    compiler = shutil.which("tcc") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(DOUBLE)], check=True)
    return str(library)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has GPUs")
def test_cuda_without_a_gpu(libcuda: str) -> None:
    assert gpu_look.ask_cuda(libcuda) == {"error": "cuInit failed with error 999 (CUDA_ERROR_UNKNOWN)", "uuids": []}


def test_a_library_that_is_not_there() -> None:
    answer = gpu_look.ask_cuda("libcuda-of-nobody.so.1")
    assert answer["uuids"] == []
    assert "libcuda-of-nobody.so.1 cannot be loaded" in answer["error"]


def test_each_line_is_answered_by_the_text_that_the_container_gets(libcuda: str) -> None:
    """The very command of the container, run here."""
    root = Path("/nonexistent")
    command = gpu_probe.podman_command(root, Path(sys.executable), [FIRST], True)
    program = command[command.index(str(root)) + 1 :]
    program[-1] = libcuda
    done = subprocess.run(program, input=b"look\nlook\n", capture_output=True, check=True, timeout=60)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 2
    assert answers[0].keys() == {"nodes", "cuda"}


def test_the_container_is_confined_like_a_replicas() -> None:
    command = gpu_probe.podman_command(Path("/root"), Path("/usr/bin/python3"), [FIRST, SECOND], False)
    for option in ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--cgroups=split", "--rm"):
        assert option in command
    devices = [value for option, value in itertools.pairwise(command) if option == "--device"]
    assert devices == [f"nvidia.com/gpu={FIRST}", f"nvidia.com/gpu={SECOND}"]
    # CUDA is asked only when its library is named
    assert command[-2] == "-c"
    assert gpu_probe.podman_command(Path("/root"), Path("/x"), [FIRST], True)[-1] == "libcuda.so.1"


def test_libraries_of_a_process() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/x86_64-linux-gnu/libc.so.6\n"
        "7f01-7f02 r--p 00000000 08:01 42    /usr/lib/x86_64-linux-gnu/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 43    /usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2\n"
        "7f03-7f04 r-xp 00000000 08:01 44    /usr/bin/python3.11\n"
        "7f04-7f05 rw-p 00000000 00:00 0     [heap]\n"
        "7f05-7f06 rw-p 00000000 00:00 0 \n"
        "7f06-7f07 r--p 00000000 08:01 45    /usr/share/locale/a.so.mo/x\n"
    )
    assert gpu_probe.loaded_libraries(maps) == [
        "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
        "/usr/lib/x86_64-linux-gnu/libc.so.6",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the root takes root")
def test_the_root_has_all_that_python_needs(tmp_path: Path) -> None:
    python = Path(os.path.realpath(sys.executable))
    gpu_probe.build_root(tmp_path, python, Path("/proc/self/maps").read_text())
    assert not list(tmp_path.glob("usr/lib/**/libcuda*"))
    library = [path for path in (tmp_path / "usr/lib").rglob("libc.so.6")]
    assert library
    assert (tmp_path / str(python).lstrip("/")).exists()
    assert any(path.name.startswith("ld-") for path in (tmp_path / "lib64/").iterdir())


def test_check_mode_starts_nothing() -> None:
    answer = run_module(gpu_probe.main, {"devices": [FIRST], "nodes": {}}, check=True)
    assert (answer["changed"], answer["probed"], answer["problems"]) == (False, False, [])


def test_without_gpus_there_is_nothing_to_prove() -> None:
    answer = run_module(gpu_probe.main, {"devices": [], "nodes": {}})
    assert answer["failed"] is True
    assert "without GPUs proves nothing" in answer["msg"]


class FakeContainer:
    """Stands for the command that starts the container: a shell script that answers, or does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        for name, text in (("systemd-run", script), ("podman", "exit 0\n"), ("systemctl", 'echo "$@" >>"$0.calls"\n')):
            (self.bin / name).write_text(f"#!/bin/sh\n{text}")
            (self.bin / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        monkeypatch.setattr(gpu_probe, "build_root", lambda *_: None)
        self.calls = self.bin / "systemctl.calls"


ANSWER = json.dumps({"nodes": {"/dev/nvidia0": {"device": [1, 3], "error": ""}}, "cuda": None})
needs_var_lib = pytest.mark.skipif(not os.access("/var/lib", os.W_OK), reason="it works in /var/lib")


@needs_var_lib
def test_it_looks_before_and_after_a_reload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    container = FakeContainer(monkeypatch, tmp_path, f"while read line; do echo '{ANSWER}'; done\n")
    looks, problems = gpu_probe.probe([FIRST], {"/dev/nvidia0": "/dev/null"}, False, 20)
    assert problems == []
    assert len(looks) == 2
    assert container.calls.read_text().splitlines()[0] == "daemon-reload"


@needs_var_lib
def test_a_container_that_ends_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = f"Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu={FIRST}"
    FakeContainer(monkeypatch, tmp_path, f"echo '{text}' >&2; exit 126\n")
    looks, problems = gpu_probe.probe([FIRST], {}, False, 20)
    assert looks == []
    assert len(problems) == 1
    assert f"Podman does not find every CDI device of {FIRST}" in problems[0]


@needs_var_lib
def test_a_container_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_probe, "CLEANUP_SECONDS", 1)
    FakeContainer(monkeypatch, tmp_path, "exec sleep 60\n")
    looks, problems = gpu_probe.probe([FIRST], {}, False, 1)
    assert looks == []
    assert len(problems) == 1
    assert "did not answer in time" in problems[0]
    assert not list(Path("/var/lib").glob(".gpu-node-probe-*"))


@needs_var_lib
def test_a_gpu_that_is_lost_by_the_reload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost = ANSWER.replace('"error": ""', '"error": "Operation not permitted"')
    FakeContainer(monkeypatch, tmp_path, f"read line; echo '{ANSWER}'; read line; echo '{lost}'; read line\n")
    _, problems = gpu_probe.probe([FIRST], {"/dev/nvidia0": "/dev/null"}, False, 20)
    assert problems == ["after systemctl daemon-reload the container cannot open /dev/nvidia0: Operation not permitted"]
