"""Profile 8x from the plan to an answer through the balancer, on a node that only looks as if it had eight cards.

Plan, weights, patched image, units, Podman's CDI, switch and balancer are the product's own. The cards and the engine
are stand-ins (tests/doubles/gpus, tests/doubles/engine): what this cannot show is anything that computes.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
from nodes import Node, Play
from testhost import ROOT

BASE = "localhost/vllm-openai"
PACKAGES = "usr/local/lib/python3.12/dist-packages"
KV_TOKENS = 4538321
WHEEL = "/srv/ds41k-0.1.0-py3-none-any.whl"
DOUBLES = ROOT / "tests" / "doubles"
HEADER = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
SAFETENSORS = (struct.pack("<Q", len(HEADER)) + HEADER + bytes(8)).hex()
WEIGHTS = f"import sys; sys.stdout.buffer.write(bytes.fromhex('{SAFETENSORS}'))"
PREPARE = f"""\
set -e
apt-get -qq update && apt-get -qq install -y --no-install-recommends podman crun >/dev/null 2>&1
root=/srv/base/root
mkdir -p $root/{PACKAGES} $root/usr/local/bin $root/var/lib/dpkg
mkdir $root/etc $root/tmp $root/cache $root/proc $root/sys $root/dev
cp -a /bin /lib /lib64 $root/ && cp -a /usr/bin /usr/lib /usr/lib64 $root/usr/
cp -r /srv/cache/vllm-0.33.0/. $root/{PACKAGES}
cp /var/lib/dpkg/status $root/var/lib/dpkg/status
cp -L /etc/os-release /etc/passwd /etc/group $root/etc/
cp /srv/vllm $root/usr/local/bin/vllm && chmod 0755 $root/usr/local/bin/vllm
echo '{{"kv_tokens": {KV_TOKENS}}}' >$root/etc/stand-in.json
printf 'FROM scratch\\nCOPY root/ /\\nENV PATH=/usr/local/bin:/usr/bin:/bin\\n' >/srv/base/Containerfile
podman build --quiet --isolation chroot --tag {BASE} /srv/base >/dev/null
rm -rf /srv/base
for name in model drafter; do
    mkdir -p /srv/$name
    python3 -c "{WEIGHTS}" >/srv/$name/model.safetensors
    echo '{{"architectures": ["StandIn"]}}' >/srv/$name/config.json
done
"""


@pytest.fixture(scope="module")
def node(node: Callable[[str], Node]) -> Node:
    """A node with Podman, eight cards to look at, the stand-in as vLLM's image, weights and a drafter head."""
    subprocess.run([sys.executable, str(ROOT / "tests/engine/fetch_vllm.py")], check=True, capture_output=True)
    one = node("gpus")
    if one.run("test -e /srv/drafter/config.json").returncode != 0:
        one.ssh("cat >/srv/vllm", stdin=(DOUBLES / "engine/vllm").read_text())
        one.ssh(PREPARE, timeout=400)
    one.ssh("python3 -", stdin=(DOUBLES / "gpus/stage.py").read_text())
    one.ssh(f"base64 -d >{WHEEL}", stdin=base64.b64encode(wheel()).decode())
    return one


def wheel() -> bytes:
    """Our plugin without its library, which needs a compiler for GPUs that this node has not."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for file in sorted((ROOT / "roles/kernels/files/ds41k").glob("*.py")):
            archive.writestr(zipfile.ZipInfo(f"ds41k/{file.name}"), file.read_text())
        archive.writestr(zipfile.ZipInfo("ds41k-0.1.0.dist-info/METADATA"), "Name: ds41k\nVersion: 0.1.0\n")
    return data.getvalue()


def plays() -> list[dict[str, Any]]:
    """site.yml without what makes a host of a bare server: that has scenario `prepare`."""
    runtime = [
        {"ansible.builtin.include_role": {"name": "serving.gpu_node.package_access"}},
        {"ansible.builtin.include_role": {"name": "serving.gpu_node.container_runtime", "tasks_from": "verify"}},
    ]
    host = {"name": "host", "hosts": "gpu_nodes", "gather_facts": False, "become": True, "tasks": runtime}
    after = [{"import_playbook": str(ROOT / f"playbooks/{name}.yml")} for name in ("artifacts", "serve", "verify")]
    return [{"import_playbook": str(ROOT / "playbooks/plan.yml")}, host, *after]


def run(node: Node, *args: str, **more: Any) -> Play:
    digest = node.ssh(f"podman image inspect --format '{{{{.Digest}}}}' {BASE}").strip()
    file = node.folder / "gpus.yml"
    file.write_text(json.dumps(plays()))
    extra = {
        "serving_plan_profile": "8x",
        "serving_plan_save_dir": str(node.folder),
        "serving_plan_sources": {
            "model": {"type": "path", "path": "/srv/model", "adopt": True},
            "drafter": {"type": "path", "path": "/srv/drafter"},
        },
        "serving_plan_overrides": {"chunked_indexer": True, "start_timeout": 120, "drain_timeout": 20},
        "serving_image_base": f"{BASE}@{digest}",
        "serving_image_archive": "",
        "serving_image_free_gib": 1,
        "serving_image_plugin_wheel": WHEEL,
        "container_runtime_manage": False,
        **more,
    }
    return node.playbook(*args, playbook=str(file), extra=extra, timeout=600)


@pytest.fixture(scope="module")
def served(node: Node) -> Node:
    """The node after a dry run, which must be clean on it, and the real one."""
    dry = run(node, "--check", "--diff")
    assert dry.rc == 0, dry.tail(80)
    assert node.run("test -e /var/lib/gpu-node").returncode == 1
    play = run(node)
    assert play.rc == 0, play.tail(120)
    return node


def release(node: Node, index: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.ssh(f"cat /var/lib/gpu-node/replicas/{index}/current/release.json"))
    return found


def test_two_replicas_serve_and_the_second_run_changes_nothing(served: Node) -> None:
    status = json.loads(served.ssh("gpu-node status --json"))
    assert [(one["index"], one["state"], one["out"]) for one in status] == [(0, "active", []), (1, "active", [])]
    answers = json.loads(served.ssh("gpu-node smoke --json"))
    assert len(answers) == 6 and all(one["ok"] for one in answers), answers
    again = run(served)
    assert (again.rc, again.changed) == (0, 0), again.tail(80)


@pytest.mark.full
def test_a_dry_run_on_the_serving_node_changes_nothing(served: Node) -> None:
    dry = run(served, "--check", "--diff")
    assert (dry.rc, dry.changed) == (0, 0), dry.tail(80)


@pytest.mark.parametrize("index", [0, 1])
def test_a_replica_has_its_own_cards_and_the_documents_limits(served: Node, index: int) -> None:
    cards = [f"GPU-00000000-0000-0000-0000-0000000000{bus + 80 * index}" for bus in (11, 12, 13, 14)]
    made, container = release(served, index), f"vllm-replica-{index}"
    assert made["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(cards)
    assert [one["uuid"] for one in made["gpus"]] == cards
    host = json.loads(served.ssh(f"podman container inspect {container}"))[0]["HostConfig"]
    assert host["Memory"] == 400 * 2**30
    assert host["ShmSize"] == 160 * 2**30
    assert (host["CpusetCpus"], host["CpusetMems"]) == (str(index), "0")
    inside = served.ssh(
        f"podman exec {container} sh -c 'ls /dev | grep nvidia; ls /model /drafter; printenv CUDA_VISIBLE_DEVICES; "
        'touch /usr/x 2>&1; tr "\\0" " " </proc/1/cmdline\''
    )
    # The device nodes of its four cards alone.
    assert [f"nvidia{number}" for number in range(8) if f"nvidia{number}\n" in inside] == [
        f"nvidia{number + 4 * index}" for number in range(4)
    ]
    assert "Read-only file system" in inside
    assert inside.count("model.safetensors") == 2
    assert inside.rstrip().endswith("vllm serve --config /etc/vllm/engine.yaml")


def test_the_engine_reads_the_documents_figures(served: Node) -> None:
    lines = served.ssh("cat /var/lib/gpu-node/replicas/0/current/engine.yaml").splitlines()
    told = {json.loads(name): value for name, _, value in (line.partition(": ") for line in lines)}
    assert told["kv-cache-memory-bytes"] == '"18G"'
    assert (told["max-model-len"], told["max-num-seqs"], told["max-num-batched-tokens"]) == ("1048576", "128", "16384")
    assert (told["tensor-parallel-size"], told["enable-expert-parallel"]) == ("4", "true")
    assert json.loads(told["cudagraph-capture-sizes"]) == [1, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert told["kv-offloading-size"] == "139.7"


def test_the_image_is_patched_and_its_switches_are_what_the_check_allows(served: Node) -> None:
    image = release(served, 0)["image"]
    labels = json.loads(served.ssh(f"podman image inspect {image['id']}"))[0]["Labels"]
    assert labels["io.github.gpu-node.image.patches"].startswith("0001-dsv41-sm120-page-geometry.patch=")
    environment = release(served, 0)["env"]
    # Asked for by name, so on; nothing here could be checked, so the others are off.
    assert environment["DS41_IDX_CHUNK"] == "1"
    assert (environment["DS41_ROWTOPK"], environment["DS41_CAND"], environment["DS41_XMOE"]) == ("0", "0", "0")
    (report,) = served.ssh("ls /var/lib/gpu-node/qualification/*.json").split()
    assert "not_qualified" in json.loads(served.ssh(f"cat {report}"))["report"]


def test_a_window_that_needs_the_chunked_indexer_is_refused_without_a_check_that_allows_it(served: Node) -> None:
    before = [release(served, index)["id"] for index in (0, 1)]
    play = run(served, serving_plan_overrides={"start_timeout": 120, "drain_timeout": 20})
    assert play.rc == 2
    text = " ".join(play.output.split())
    assert "cannot be completed; no replica was touched" in text
    assert "chunked_indexer" in text and "524288" in text
    assert [release(served, index)["id"] for index in (0, 1)] == before
    assert json.loads(served.ssh("gpu-node smoke --json"))[0]["ok"]


def test_a_card_that_is_gone_is_named_and_the_other_replica_serves_on(served: Node) -> None:
    cards = json.loads(served.ssh("cat /srv/gpus/cards.json"))
    served.ssh("cat >/srv/gpus/cards.json", stdin=json.dumps(cards[:-1]))
    try:
        assert served.run("systemctl restart vllm-replica@1", timeout=120).returncode != 0
        said = served.ssh("journalctl -u vllm-replica@1 -n 20 --no-pager")
        assert f"the driver does not see GPU {cards[-1]['uuid']} (0000:94:00.0)" in said
        smoke = json.loads(served.run("gpu-node smoke --json").stdout)
        assert {one["target"]: one["ok"] for one in smoke}["balancer"], smoke
    finally:
        served.ssh("cat >/srv/gpus/cards.json", stdin=json.dumps(cards))
        served.ssh("systemctl reset-failed vllm-replica@1; systemctl restart vllm-replica@1", timeout=180)
    assert all(one["ok"] for one in json.loads(served.ssh("gpu-node smoke --json")))


@pytest.mark.full
def test_profile_2x_takes_two_of_the_cards_and_retires_what_it_does_not_have(served: Node) -> None:
    wanted = ["0000:13:00.0", "0000:14:00.0"]
    play = run(
        served,
        serving_plan_profile="2x",
        serving_plan_sources={"model": {"type": "path", "path": "/srv/model", "adopt": True}},
        serving_plan_overrides={"gpus": wanted, "start_timeout": 120, "drain_timeout": 20},
        serving_image_plugin_wheel="",
    )
    assert play.rc == 0, play.tail(120)
    made = release(served, 0)
    assert [one["pci_address"] for one in made["gpus"]] == wanted
    assert made["served_model_name"] == "deepseek-v4-flash"
    assert made["drafter"] is None
    assert made["engine_args"]["attention-backend"] == "FLASHINFER_MLA_SPARSE_DSV4"
    assert served.run("test -e /var/lib/gpu-node/replicas/1").returncode == 1
    assert served.run("systemctl is-active vllm-replica@1").stdout.strip() == "inactive"
    answers = json.loads(served.ssh("gpu-node smoke --json"))
    assert all(one["ok"] for one in answers) and {one["target"] for one in answers} == {"replica 0", "balancer"}
