"""The kernels on a real node: built in a real container, checked in one, and what the plan makes of the report.

Podman, the role, the program and the build script are the product's own; the compilers and torch are stand-ins
(tests/doubles/compilers), and the GPUs are a file. The slow test takes the real nvcc and torch's real headers.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import image_cache
import pytest
from nodes import Node, Play
from testhost import ROOT
from torch_cache import torch_folder

TOOLS = ROOT / "tests" / "doubles" / "compilers" / "tool"
PACKAGES = "usr/local/lib/python3.11/dist-packages"
RESULTS = "/var/lib/gpu-node/kernels"
CONTEXT = "/var/lib/gpu-node/build/kernels"
TRIES = "/srv/tries"
REPORTS = "/var/lib/gpu-node/qualification"
UUID = "GPU-00000000-0000-0000-0000-000000000001"
CDI = f"""\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - name: {UUID}
    containerEdits: {{deviceNodes: [{{path: /dev/nvidia0, hostPath: /dev/null}}]}}
"""
# What runs on a card is what the test writes into a file.
NVIDIA_SMI = """\
#!/bin/sh
cat /srv/compute-apps
"""
TORCH = """\
class Tensor: pass
class cuda:
    @staticmethod
    def is_available(): return False
"""
# A node in a container may not set what Podman sets in a network of a container's own.
PREPARE = f"""\
set -e
mkdir -p /etc/containers /etc/cdi /srv/plain/root/usr /srv/tools/root/usr/local/bin /srv/tools/root/{PACKAGES}/torch
printf '[containers]\\ndefault_sysctls = []\\n' >/etc/containers/containers.conf
cd /srv/plain/root && mkdir -p tmp proc sys dev etc root run var
cp -a /bin /lib /lib64 . && cp -a /usr/bin /usr/lib /usr/lib64 usr/
apt-get -qq update && apt-get -qq install -y --no-install-recommends podman crun >/dev/null 2>&1
cd /srv/tools/root && cat >usr/local/bin/nvcc && chmod 0755 usr/local/bin/nvcc
for name in cc c++ c++filt nm; do ln -s nvcc usr/local/bin/$name; done
cd {PACKAGES}/torch
echo "__version__ = '2.11.0+cpu'" >version.py
mkdir -p include/torch/csrc/stable && touch include/torch/csrc/stable/library.h
cp -r {image_cache.MOUNT}/vllm-0.33.0/. /srv/tools/root/{PACKAGES}
"""


def make_image(node: Node, name: str, base: str = "scratch", cuda: str = "/usr/local") -> None:
    """Build an image from /srv/NAME/root over another."""
    text = f"FROM {base}\nCOPY root/ /\nENV PATH=/usr/local/bin:/usr/bin:/bin CUDA_HOME={cuda}\n"
    node.ssh(f"cat >/srv/{name}/Containerfile", stdin=text)
    node.ssh(f"podman build --quiet --isolation chroot --tag localhost/{name} /srv/{name}", timeout=180)


@pytest.fixture(scope="module")
def node(node: Callable[[str], Node]) -> Node:
    """A node with Podman, an image without compilers, a base of vLLM with stand-ins, and a card that only CDI knows."""
    subprocess.run([sys.executable, str(ROOT / "tests/engine/fetch_vllm.py")], check=True, capture_output=True)
    one = node("kernels")
    if one.run("podman image exists localhost/tools").returncode != 0:
        one.ssh(PREPARE, stdin=TOOLS.read_text(), timeout=300)
        one.ssh(f"cat >/srv/tools/root/{PACKAGES}/torch/__init__.py", stdin=TORCH)
        make_image(one, "plain")
        make_image(one, "tools", "localhost/plain")
    # Of an earlier run, where nodes are kept.
    one.ssh(
        "rm -rf /var/lib/gpu-node /srv/real;"
        "podman images --quiet localhost/gpu-node/vllm-cuda | xargs --no-run-if-empty podman rmi --force"
    )
    one.ssh("cat >/etc/cdi/test.yaml", stdin=CDI)
    one.ssh(
        "cat >/usr/local/bin/nvidia-smi && chmod 0755 /usr/local/bin/nvidia-smi && : >/srv/compute-apps",
        stdin=NVIDIA_SMI,
    )
    return one


def digest(node: Node, name: str) -> str:
    return node.ssh(f"podman image inspect --format 'localhost/{name}@{{{{.Digest}}}}' localhost/{name}").strip()


def play(node: Node, tasks: list[dict[str, Any]], *args: str, before: list[Any] | None = None, **more: Any) -> Any:
    """Start some entry points of roles, as on a node of profile 8x that has Podman."""
    one = {"name": "kernels", "hosts": "gpu_nodes", "gather_facts": False, "become": True, "tasks": tasks}
    file = node.folder / "kernels.yml"
    file.write_text(json.dumps([*(before or []), one]))
    extra = {"package_access_apt_ready": True, "serving_image_archive": "", "serving_image_free_gib": 1, **more}
    return node.start_playbook(*args, playbook=str(file), extra=extra)


def role(name: str, tasks_from: str = "main") -> dict[str, Any]:
    return {"ansible.builtin.include_role": {"name": f"serving.gpu_node.{name}", "tasks_from": tasks_from}}


def profile_image() -> dict[str, Any]:
    return {
        "name": "localhost/gpu-node/vllm-cuda",
        "base": "",
        "containerfile": "Containerfile.cuda",
        "package": "vllm",
        "version": "0.33.0",
    }


def start_image(node: Node, base: str, *args: str, **more: Any) -> Any:
    """The role that makes the image, kernels and all."""
    plan = {"profile": "8x", "device": "cuda", "image": profile_image(), "artifacts": {}, "kernels": {"wanted": {}}}
    variables = {
        "serving_plan_result": plan,
        "serving_image_base": digest(node, base),
        "container_runtime_podman": {"stat": {"exists": True}},
    }
    return play(node, [role("serving_image")], *args, **{**variables, **more})


def image(node: Node, base: str, *args: str, timeout: float = 180, **more: Any) -> Play:
    done: Play = start_image(node, base, *args, **more).finish(timeout)
    return done


def said(done: Play) -> str:
    """The output on one line: errors are wrapped."""
    return " ".join(done.output.replace("\\n", " ").split())


def tags(node: Node) -> list[str]:
    return node.ssh("podman images --format '{{.Tag}}' localhost/gpu-node/vllm-cuda").split()


def results(node: Node) -> dict[str, dict[str, Any]]:
    """What counts as built, by key; all that lies there must count."""
    names = node.ssh(f"ls -A {RESULTS} 2>/dev/null || true").split()
    folders = [name for name in names if not name.endswith(".log")]
    return {name: json.loads(node.ssh(f"cat {RESULTS}/{name}/result.json")) for name in folders}


def test_a_dry_run_on_a_bare_node_is_clean(node: Node) -> None:
    done = image(node, "tools", "--check", "--diff")
    assert done.rc == 0, done.tail()
    assert done.changed > 0
    assert node.run("test -e /var/lib/gpu-node").returncode == 1


def test_an_image_that_can_change_is_refused(node: Node) -> None:
    done = image(node, "tools", kernels_image="localhost/tools:latest")
    assert done.rc == 2 and done.changed == 0
    assert "Nothing was changed. kernels_image: localhost/tools:latest has no digest" in said(done)


def test_without_a_wheel_where_none_may_be_built(node: Node) -> None:
    done = image(node, "tools", kernels_manage=False)
    assert done.rc == 2
    assert "kernels_manage is false and /var/lib/gpu-node/kernels/" in said(done)
    assert results(node) == {} and tags(node) == []


@pytest.fixture(scope="module")
def built(node: Node) -> dict[str, Any]:
    """What the role says of the wheel: interrupted in the middle of compiling, then run again."""
    started = start_image(node, "tools")
    started.wait_for("step 2 of 3", 60)
    node.ssh("podman kill gpu-node-kernels-build; systemctl kill --signal=KILL gpu-node-kernels-build")
    stopped = started.finish(60)
    assert stopped.rc == 2, stopped.tail()
    names = node.ssh(f"ls -A {RESULTS}").split()
    assert not [name for name in names if not name.startswith(".work-") and not name.endswith(".log")], names
    done = image(node, "tools")
    assert done.rc == 0, done.tail()
    assert node.run("podman ps --all --quiet").stdout == ""
    ((key, result),) = results(node).items()
    assert result["key"].startswith(key)
    return {**result, "folder": f"{RESULTS}/{key}"}


def test_the_wheel_is_whole(node: Node, built: dict[str, Any]) -> None:
    wheel = f"{built['folder']}/{built['wheel']}"
    assert node.ssh(f"sha256sum {wheel}").split()[0] == built["sha256"]
    assert built["libraries"]["libds41k_idx.so"]["arches"] == ["sm_90a", "sm_120a"]
    assert built["libraries"]["libds41k_idx.so"]["nvcc"] == "13.0.88"
    code = (
        "import importlib.metadata as m, sys; sys.path.insert(0, sys.argv[1]); d = m.distribution('ds41k');"
        "print(d.version, [p.value for p in d.entry_points], all(f.locate().exists() for f in d.files))"
    )
    answer = node.ssh(
        f'rm -rf /srv/unpacked && python3 -m zipfile -e {wheel} /srv/unpacked && python3 -c "{code}" /srv/unpacked'
    )
    assert answer.split() == ["0.1.0", "['ds41k.plugin:register']", "True"]


@pytest.mark.parametrize("args", [(), pytest.param(("--check", "--diff"), marks=pytest.mark.full)])
def test_the_second_run_builds_nothing(node: Node, built: dict[str, Any], args: tuple[str, ...]) -> None:
    done = image(node, "tools", *args)
    assert (done.rc, done.changed) == (0, 0), done.tail()


def attempt(node: Node, **changes: Any) -> subprocess.CompletedProcess[str]:
    """The job of the build itself, with another request, into a folder of its own."""
    request = json.loads(node.ssh(f"cat {CONTEXT}/build.json"))
    changed = {**request, "result": f"{TRIES}/{len(changes)}", **changes}
    node.ssh(f"mkdir -p {TRIES} && cat >/srv/build.json", stdin=json.dumps(changed))
    return node.run(f"PYTHONPATH={CONTEXT}/program python3 -m gpu_node_kernels build /srv/build.json", timeout=120)


def refused(node: Node, done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why; nothing is left that could count."""
    assert done.returncode == 1, done.stdout
    assert not [name for name in node.ssh(f"ls -A {TRIES}").split() if not name.endswith(".log")]
    (line,) = done.stderr.splitlines()
    assert "Traceback" not in line
    return line


def test_an_image_without_nvcc_is_one_clear_error_and_leaves_nothing(node: Node, built: dict[str, Any]) -> None:
    plain = digest(node, "plain")
    line = refused(node, attempt(node, image=plain))
    assert f"the kernels could not be built in {plain}: build: error: no nvcc in /usr/local/bin/nvcc" in line
    assert "name one that has them (kernels_image)" in line


@pytest.mark.full
def test_an_image_that_cannot_be_had_is_one_clear_error(node: Node, built: dict[str, Any]) -> None:
    gone = f"localhost:9/none@sha256:{'0' * 64}"
    assert f"{gone} could not be pulled" in refused(node, attempt(node, image=gone))


def test_too_little_disk_is_one_clear_error(node: Node, built: dict[str, Any]) -> None:
    node.ssh(f"mkdir -p {TRIES} && mount -t tmpfs -o size=100m tmpfs {TRIES}")
    try:
        line = refused(node, attempt(node))
    finally:
        node.ssh(f"umount {TRIES}")
    assert f"too little disk for kernels: {TRIES} has 0.10 GiB free, 1 GiB are needed" in line


@pytest.mark.full
def test_the_same_inputs_give_the_same_bytes(node: Node, built: dict[str, Any]) -> None:
    done = attempt(node)
    assert done.returncode == 0, done.stderr
    assert node.ssh(f"sha256sum {TRIES}/0/{built['wheel']}").split()[0] == built["sha256"]
    node.ssh(f"rm -rf {TRIES}")


@pytest.fixture(scope="module")
def checked(node: Node, built: dict[str, Any]) -> str:
    """The id of the serving image, which has the wheel in it."""
    (tag,) = tags(node)
    text = node.ssh(f"podman image inspect localhost/gpu-node/vllm-cuda:{tag}")
    found: dict[str, Any] = json.loads(text)[0]
    # Its name is of what the wheel is made of, so another node knows it without building one.
    assert found["Labels"]["io.github.gpu-node.image.wheel"] == f"ds41k={built['key']}"
    return str(found["Id"])


def qualify(node: Node, identity: str, *args: str, **overrides: Any) -> Play:
    """The plan of eight cards, the check, and the plan made of what it found."""
    digests = {"model": "a" * 64, "drafter": "c" * 64}
    made = {
        "serving_image_result": {"ref": identity, "id": identity, "recipe": "own"},
        "model_weights_result": {"digests": digests},
        "kernels_result": {"key": "k1"},
    }
    tasks = [{"ansible.builtin.set_fact": made}, role("kernels", "qualify"), role("serving_plan", "resolve")]
    source = {"type": "path", "path": "/srv/weights"}
    done: Play = play(
        node,
        tasks,
        *args,
        before=[{"import_playbook": str(ROOT / "playbooks" / "plan.yml")}],
        topology_file=str(ROOT / "inventories" / "topologies" / "8x.yml"),
        serving_plan_profile="8x",
        serving_plan_save_dir="",
        serving_plan_sources={"model": source, "drafter": source},
        serving_plan_overrides=overrides,
    ).finish(120)
    return done


def stored(node: Node) -> dict[str, Any]:
    (name,) = node.ssh(f"ls {REPORTS}").split()
    report: dict[str, Any] = json.loads(node.ssh(f"cat {REPORTS}/{name}"))
    return {**report, "file": f"{REPORTS}/{name}"}


def test_a_dry_run_before_the_first_check_shows_the_plan_as_wanted(node: Node, checked: str) -> None:
    done = qualify(node, checked, "--check")
    assert done.rc == 0, done.tail()
    assert "chunked_indexer (DS41_IDX_CHUNK): wanted on; to be checked first; on" in done.output
    assert node.run(f"test -e {REPORTS}").returncode == 1


def test_without_a_gpu_it_is_not_qualified_and_that_is_no_failure(node: Node, checked: str) -> None:
    done = qualify(node, checked, max_model_len=524288)
    assert done.rc == 0, done.tail()
    why = "not qualified: torch sees no CUDA GPU here"
    assert f"chunked_indexer (DS41_IDX_CHUNK): wanted on; {why}; off" in done.output
    assert f"warning: candidate_kernels: off: {why}" in said(done)
    report = stored(node)
    assert (report["image"], report["kernels"], report["driver"]) == (checked, "k1", "590.48.01")
    assert report["report"] == {"kernels": {}, "not_qualified": "torch sees no CUDA GPU here"}


def test_the_whole_window_is_refused_without_a_report(node: Node, checked: str) -> None:
    """And the check is made again, since its reason may be gone: the answer is the same, so nothing has changed."""
    done = qualify(node, checked)
    assert (done.rc, done.changed) == (2, 0), done.tail()
    assert "is the same as before" in done.output
    assert "the chunked indexer, and that is off: not qualified: torch sees no CUDA GPU here" in said(done)
    assert "Set MAX_MODEL_LEN=524288" in said(done)


def test_while_the_gpus_are_in_use_it_says_what_to_do(node: Node, checked: str) -> None:
    cards = [line for line in (ROOT / "inventories/topologies/8x.yml").read_text().split() if line.startswith("GPU-")]
    node.ssh("cat >/srv/compute-apps", stdin="".join(f"{card.rstrip('}')}, 77, vllm\n" for card in cards))
    try:
        done = qualify(node, checked, max_model_len=524288)
    finally:
        node.ssh(": >/srv/compute-apps")
    assert (done.rc, done.changed) == (0, 0), done.tail()
    text = said(done)
    assert "is in use (process 77 (vllm) computes on it); a run while one is free checks it" in text
    assert "systemctl stop vllm-replica@N" in text


def test_a_good_report_turns_the_switches_on_and_is_not_made_again(node: Node, checked: str) -> None:
    report = stored(node)
    shapes = [{"rows": 1024, "length": 2048, "speedup": 1.4}]
    good = {"correct": True, "faster": True, "failures": [], "shapes": shapes}
    kernels = {name: good for name in ("rowtopk", "cand_blocks", "chunks")}
    kernels["cand_topk"] = {**good, "shapes": [{**shapes[0], "speedup": 0.9}]}
    file = report.pop("file")
    node.ssh(f"cat >{file}", stdin=json.dumps({**report, "report": {"kernels": kernels}}))
    done = qualify(node, checked)
    assert (done.rc, done.changed) == (0, 0), done.tail()
    assert "chunked_indexer (DS41_IDX_CHUNK): wanted on; correct; on" in done.output
    assert "length_aware_topk (DS41_ROWTOPK): wanted on; correct and faster; on" in done.output
    assert "cand_topk is slower than what it replaces" in done.output
    assert "DS41_IDX_CHUNK=1 DS41_ROWTOPK=1 DS41_CAND=0" in said(done)
    assert stored(node)["file"] == file


@pytest.mark.full
def test_the_real_compilers_make_the_real_library(node: Node) -> None:
    """nvcc and torch's headers of this machine, in an image with Debian's own C++ compiler."""
    home = Path("/usr/local/cuda")
    if not (home / "bin" / "nvcc").exists():
        pytest.skip("no nvcc in /usr/local/cuda here")
    torch = torch_folder()
    cuda = image_cache.CACHE / "cuda"
    if not cuda.exists():
        partial = cuda.with_name(".cuda")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(["cp", "-rL", str(home), str(partial)], check=True)
        partial.rename(cuda)
    folder, seen = f"{PACKAGES}/torch", f"{image_cache.MOUNT}/{torch.name}/torch"
    node.ssh(
        f"""set -e
apt-get -qq install -y --no-install-recommends g++ >/dev/null 2>&1
mkdir -p /srv/real/root/usr/local && cd /srv/real/root && mkdir -p {folder}
cp -a /usr/bin /usr/lib /usr/include usr/ && mkdir -p etc && cp -a /etc/alternatives etc/
cp -r {image_cache.MOUNT}/cuda usr/local/cuda
cp -r {image_cache.MOUNT}/vllm-0.33.0/. {PACKAGES}
cp -r {seen}/include {seen}/version.py {folder} && touch {folder}/__init__.py
""",
        timeout=300,
    )
    make_image(node, "real", "localhost/plain", "/usr/local/cuda")
    done = image(node, "real", timeout=400)
    assert done.rc == 0, done.tail()
    (result,) = [one for one in results(node).values() if one["image"] == digest(node, "real")]
    library = result["libraries"]["libds41k_idx.so"]
    assert library["arches"] == ["sm_90a", "sm_120a"]
    assert library["kernels"] and all(kernel["spilled_bytes"] == 0 for kernel in library["kernels"])
