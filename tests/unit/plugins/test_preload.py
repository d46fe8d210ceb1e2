"""Filters and tests are there before the first task, and Ansible takes the plugin that sees to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.plugins.playbooks import ROOT, run_playbook

# In a process of its own: here they may be there for another reason.
LOADED = """
import json, sys
from ansible.plugins.loader import init_plugin_loader
init_plugin_loader([sys.argv[1]])
from ansible_collections.serving.gpu_node.plugins.callback.preload import CallbackModule
before = set(sys.modules)
CallbackModule().v2_playbook_on_start(None)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_all_filters_of_the_collection_and_ansibles_own_are_loaded() -> None:
    argv = [sys.executable, "-c", LOADED, str(ROOT / "collections")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = json.loads(done.stdout)
    ours = "ansible_collections.serving.gpu_node.plugins.filter."
    wanted = {file.stem for file in (ROOT / "plugins/filter").glob("[a-z]*.py")}
    assert {name.removeprefix(ours) for name in loaded if name.startswith(ours)} == wanted
    for kind in ("filter", "test"):
        assert any(name.startswith(f"ansible.plugins.{kind}.core") for name in loaded)


def test_ansible_finds_it(tmp_path: Path) -> None:
    play = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [{"debug": {"msg": "here"}}]}]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    _, output = run_playbook(tmp_path, Path("localhost,"), tmp_path / "play.yml")
    assert "here" in output
    assert "unable to load" not in output and "preload" not in output
