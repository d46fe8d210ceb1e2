"""quality.yml on a node that serves: the embedded model knows nothing, so what is proven is the way there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nodes import Node

pytestmark = pytest.mark.full
QUALITY = "playbooks/quality.yml"
# The harness is 760 MB; a node has it once.
GSM8K = [{"question": "What is 40 + 3?", "answer": "40 + 3 = 43\n#### 43"}] * 2
HUMANEVAL = {
    "task_id": "own/0",
    "prompt": "def add(a, b):\n",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}


@pytest.fixture(scope="module")
def quality(served: Node, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs quality.yml; return code, and each check's verdict with what it says."""
    folder = tmp_path_factory.mktemp("quality")
    # Nested in a container, a namespace of its own has settings that cannot be written.
    served.ssh("test -s /etc/containers/containers.conf || "
               "printf '[containers]\\ndefault_sysctls = []\\n' >/etc/containers/containers.conf")  # fmt: skip

    def ask(*checks: str, **more: Any) -> tuple[int, dict[str, tuple[str, str]]]:
        short = {"quality_limit": 6, "quality_max_tokens": 64, "quality_agreement_tokens": 32, "quality_at_once": 4}
        extra = {"quality_checks": list(checks), "quality_report_dir": str(folder), **short, **more}
        file = Path(folder / "quality.json")
        file.unlink(missing_ok=True)
        play = served.playbook(playbook=QUALITY, extra=extra)
        assert file.exists(), play.tail(60)
        report = json.loads(file.read_text())
        return play.rc, {check["id"]: (check["verdict"], check["seen"] or check["why"]) for check in report["checks"]}

    return ask


def test_the_small_set_and_the_agreement_of_two_runs(quality: Any, served: Node) -> None:
    rc, found = quality("problems", "tasks", "agreement", quality_label="one")
    assert rc == 0
    # No figure to hold random weights against: not run, never a pass.
    assert found["problems"][0] == found["tasks"][0] == "not run"
    assert "of 6 right" in found["tasks"][1]
    assert found["agreement"][0] == "pass"
    rc, found = quality("agreement", quality_label="two", quality_compare_with="one")
    assert (rc, found["agreement"][0]) == (0, "pass")
    compare = "PYTHONPATH=/var/lib/gpu-node/quality/program python3 -m gpu_node_quality compare one two"
    assert "6 of 6 answers the same" in served.ssh(compare)


def test_an_operators_minimum_fails_the_play(quality: Any) -> None:
    rc, found = quality("problems", quality_minimum={"problems": 0.9})
    assert rc != 0
    assert found["problems"][0] == "fail"


def test_the_container_for_code_lets_nothing_out(quality: Any, served: Node) -> None:
    quality("tasks")
    program = """
import json
from gpu_node_quality import sandbox
image = json.load(open("/var/lib/gpu-node/replicas/0/current/release.json"))["image"]["ref"]
sandbox.prove(image)
tries = {
    "right": "x = 1", "key": "open('/etc/gpu-node/secrets/engine.env')", "write": "open('/tmp/x', 'w')",
    "network": "import socket; socket.create_connection(('127.0.0.1', 8000), 3)",
    "memory": "x = bytearray(2 << 30)", "forks": "import os\\nfor _ in range(200): os.fork() or os._exit(0)\\n",
    "early": "import sys; sys.exit(0)", "user": "import os; assert os.getuid() == 0",
}
print(json.dumps({name: sandbox.run(image, code, "assert True").ok for name, code in tries.items()}))
"""
    command = "PYTHONPATH=/var/lib/gpu-node/quality/program python3 -"
    found = json.loads(served.ssh(command, stdin=program, timeout=300).splitlines()[-1])
    assert found.pop("right") is True
    # Forks that end at once may pass under the limit of processes; they harm nobody.
    found.pop("forks")
    assert set(found.values()) == {False}, found


def test_the_harness_asks_with_files_of_the_node(quality: Any, served: Node) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in GSM8K)
    served.ssh("cat >/srv/gsm8k.jsonl", stdin=lines)
    served.ssh("cat >/srv/humaneval.jsonl", stdin=json.dumps(HUMANEVAL) + "\n")
    data = {"gsm8k": "/srv/gsm8k.jsonl", "humaneval": "/srv/humaneval.jsonl"}
    rc, found = quality("gsm8k", "humaneval", quality_data=data, quality_count={"gsm8k": 2, "humaneval": 1})
    assert rc == 0, found
    assert "of 2 right" in found["gsm8k"][1]
    assert "of 1 right" in found["humaneval"][1]
