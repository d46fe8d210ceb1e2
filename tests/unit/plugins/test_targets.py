"""The nodes as balancers and routers take them: the files, and the playbook that asks no node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.serving.gpu_node.plugins.filter.targets import balancer_endpoint
from ansible_collections.serving.gpu_node.plugins.module_utils.targets import target_files

from tests.unit.plugins.playbooks import ROOT, run_playbook
from tests.unit.plugins.samples import cpu_profile


def node(name: str, address: str, **more: Any) -> dict[str, Any]:
    return {"node": name, "address": address, "port": 8080, "model": "tiny", "announce": 10, **more}


def slices(text: str) -> list[dict[str, Any]]:
    return [part for part in yaml.safe_load_all(text) if part and part["kind"] == "EndpointSlice"]


def test_haproxy_sees_that_a_node_leaves_before_it_has_left() -> None:
    text = target_files([node("n1", "10.0.0.1", announce=2), node("n2", "10.0.0.2")])["haproxy.cfg"]
    # two looks within the two seconds
    assert "check inter 500ms fall 2" in text
    assert "option httpchk GET /health" in text
    assert "option redispatch" in text
    assert "option http-no-delay" in text
    assert "server n1 10.0.0.1:8080" in text


@pytest.mark.parametrize(("announce", "every"), [(600, 2000), (0, 2000), (1, 250)])
def test_haproxy_looks_neither_too_often_nor_too_seldom(announce: int, every: int) -> None:
    text = target_files([node("n1", "10.0.0.1", announce=announce)])["haproxy.cfg"]
    assert f"inter {every}ms" in text


def test_models_are_kept_apart() -> None:
    files = target_files([node("n1", "10.0.0.1"), node("n2", "10.0.0.2", model="DeepSeek V4.1")])
    assert "backend gpu-nodes-tiny\n" in files["haproxy.cfg"]
    assert "backend gpu-nodes-deepseek-v4-1\n" in files["haproxy.cfg"]
    assert files["vllm-router.args"].splitlines() == [
        "--worker-urls http://10.0.0.1:8080 --policy consistent_hash",
        "--worker-urls http://10.0.0.2:8080 --policy consistent_hash",
    ]
    assert [one["model"] for one in json.loads(files["targets.json"])] == ["tiny", "DeepSeek V4.1"]


def test_a_slice_has_addresses_of_one_kind_and_one_port() -> None:
    files = target_files(
        [node("n1", "10.0.0.1"), node("n2", "10.0.0.2", port=9000), node("n3", "fd00::3"), node("n4", "n4.example")]
    )
    found = slices(files["kubernetes.yml"])
    assert [(one["addressType"], one["ports"][0]["port"]) for one in found] == [
        ("IPv4", 8080),
        ("IPv4", 9000),
        ("IPv6", 8080),
    ]
    assert [end["addresses"] for one in found for end in one["endpoints"]] == [["10.0.0.1"], ["10.0.0.2"], ["fd00::3"]]
    assert "targets_address): n4" in files["kubernetes.yml"]
    service = next(iter(part for part in yaml.safe_load_all(files["kubernetes.yml"]) if part))
    assert "selector" not in service["spec"]
    assert {one["metadata"]["labels"]["kubernetes.io/service-name"] for one in found} == {service["metadata"]["name"]}
    assert "http://[fd00::3]:8080" in files["vllm-router.args"]
    assert "server n3 [fd00::3]:8080" in files["haproxy.cfg"]


def test_where_a_node_listens_is_in_its_settings() -> None:
    found = balancer_endpoint(cpu_profile(), {"balancer_address": "0.0.0.0", "balancer_port": 9000})
    assert found == {"listen": "0.0.0.0", "port": 9000, "model": "tiny", "announce": 2, "loopback": False}
    assert balancer_endpoint(cpu_profile(), {})["loopback"] is True
    with pytest.raises(AnsibleFilterError, match="balancer_prt"):
        balancer_endpoint(cpu_profile(), {"balancer_prt": 1})


def test_the_playbook_needs_no_node(tmp_path: Path) -> None:
    def hosts(overrides: dict[str, Any]) -> None:
        group = {
            "hosts": {"n1": {"ansible_host": "192.0.2.1"}, "n2": {"targets_address": "192.0.2.22"}},
            "vars": {"serving_plan_overrides": overrides},
        }
        (tmp_path / "hosts.json").write_text(json.dumps({"gpu_nodes": group}))

    def run() -> tuple[dict[str, dict[str, int]], str]:
        return run_playbook(tmp_path, tmp_path / "hosts.json", ROOT / "playbooks/targets.yml")

    hosts({"balancer_address": "0.0.0.0"})
    counts, output = run()
    assert counts["n1"]["failed"] == 0, output
    written = json.loads((tmp_path / "targets/targets.json").read_text())
    assert [one["url"] for one in written] == ["http://192.0.2.1:8080", "http://192.0.2.22:8080"]
    assert run()[0]["n1"]["changed"] == 0
    hosts({})
    assert "listens on 127.0.0.1, which only the node itself reaches" in run()[1]
