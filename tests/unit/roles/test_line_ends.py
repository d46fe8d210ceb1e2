"""Messages of several lines have real line ends: Ansible gives Jinja a `\\n` of a YAML block as two characters."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.yaml.loader import AnsibleLoader

from tests.unit.plugins.playbooks import run_playbook

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(
    path
    for folder in ("roles/*/tasks", "roles/*/handlers", "roles/*/vars", "roles/*/defaults", "playbooks")
    for path in ROOT.glob(f"{folder}/*.yml")
)


def texts(value: Any) -> Iterator[str]:
    """Every text in a YAML document."""
    if isinstance(value, dict):
        for part in value.values():
            yield from texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)
    elif isinstance(value, str):
        yield value


def test_there_are_files() -> None:
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_no_expression_has_a_line_end_that_stays_two_characters(path: Path) -> None:
    document = yaml.load(path.read_text(), AnsibleLoader)
    wrong = [text for text in texts(document) if re.search(r"\{\{(?:(?!\}\}).)*\\n", text, re.DOTALL)]
    assert wrong == []


def told(tmp_path: Path, role: str, tasks: str, **variables: Any) -> list[str]:
    """Run a role's tasks here, which are to fail; return the lines of the message."""
    play = {
        "hosts": "here",
        "gather_facts": False,
        "tasks": [
            {
                "block": [{"ansible.builtin.include_role": {"name": f"serving.gpu_node.{role}", "tasks_from": tasks}}],
                "rescue": [
                    {
                        "ansible.builtin.copy": {
                            "content": "{{ {'msg': ansible_failed_result.msg} | to_json }}",
                            "dest": str(tmp_path / "told.json"),
                            "mode": "0600",
                        }
                    }
                ],
            }
        ],
        "vars": variables,
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play], sort_keys=False))
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": local}}}))
    _, output = run_playbook(tmp_path, tmp_path / "hosts.yml", tmp_path / "play.yml")
    assert (tmp_path / "told.json").exists(), output
    message: str = json.loads((tmp_path / "told.json").read_text())["msg"]
    assert "\\n" not in message
    return message.splitlines()


READ = {
    "host": {
        "os": {"id": "debian", "version_id": "12", "codename": "bookworm", "name": "Debian"},
        "kernel": {"release": "6.1.0-50-amd64", "installed": ["6.1.0-50-amd64"], "headers": []},
    }
}


def test_a_build_that_failed_is_told_line_by_line(tmp_path: Path) -> None:
    log = tmp_path / "make.log"
    log.write_text("nv-pci.c:223:9: error: too few arguments\nmake: *** [Makefile:137: modules] Error 2\n")
    failure = {"msg": "apt failed", "stdout": f"Error! Bad return status\nConsult {log} for more.", "stderr": "E: Sub"}
    lines = told(
        tmp_path,
        "nvidia_driver",
        "explain",
        _nvidia_driver_failure=failure,
        _nvidia_driver_build_failed=True,
        __nvidia_driver_read=READ,
    )
    assert "  nv-pci.c:223:9: error: too few arguments" in lines
    assert "  make: *** [Makefile:137: modules] Error 2" in lines


def test_packages_that_were_not_installed_are_told_line_by_line(tmp_path: Path) -> None:
    failure = {"msg": "apt failed", "stderr": "E: You don't have enough free space in /var/cache/apt/archives/."}
    lines = told(
        tmp_path,
        "nvidia_driver",
        "explain",
        _nvidia_driver_failure=failure,
        _nvidia_driver_build_failed=False,
        __nvidia_driver_read=READ,
    )
    assert lines[:2] == ["The packages were not installed:", f"  {failure['stderr']}"]
    assert lines[2].startswith("Free space on that disk.")


def test_a_missing_specification_is_told_line_by_line(tmp_path: Path) -> None:
    lines = told(
        tmp_path,
        "container_runtime",
        "make_specification",
        _container_runtime_gpus={"uuids": ["GPU-00000000-0000-0000-0000-0000000000ff"]},
        container_runtime_manage=False,
    )
    assert lines[0] == "Containers on here would not get the plan's GPUs:"
    assert lines[1].startswith("- ")
    assert lines[-1].startswith("Would have made the specification anew")
