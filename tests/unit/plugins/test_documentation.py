"""What operators read: the page of settings, and what ansible-doc shows."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
MODULES = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))
# A role takes something once it has tasks.
ROLES = sorted(path.parent.name for path in (ROOT / "roles").glob("*/tasks"))


def test_the_page_of_settings_is_the_one_that_its_script_writes() -> None:
    page = runpy.run_path(str(ROOT / "docs/make_settings.py"))["page"]()
    assert (ROOT / "docs/settings.md").read_text() == page, "run docs/make_settings.py"


def ansible_doc(kind: str, names: list[str]) -> dict[str, Any]:
    """What ansible-doc says about all of them at once."""
    # Beside this Python: the one on PATH may be another Ansible.
    found = Path(sys.executable).with_name("ansible-doc")
    command = str(found) if found.exists() else shutil.which("ansible-doc")
    assert command, "ansible-doc belongs to the test environment"
    done = subprocess.run(
        [command, "--type", kind, "--json", *(f"serving.gpu_node.{name}" for name in names)],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert set(answer) == {f"serving.gpu_node.{name}" for name in names}
    return answer


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    return ansible_doc("module", MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_documented(modules: dict[str, Any], name: str) -> None:
    entry = modules[f"serving.gpu_node.{name}"]
    assert entry["doc"]["module"] == name
    assert entry["doc"]["short_description"]
    assert entry["doc"]["attributes"]["check_mode"]["support"] == "full"
    assert entry["return"]
    for task in yaml.safe_load(entry["examples"]):
        call = task[f"serving.gpu_node.{name}"] or {}
        options = entry["doc"].get("options", {})
        assert set(call) <= set(options)
        assert {option for option, spec in options.items() if spec.get("required")} <= set(call)


def collect_options(options: dict[str, Any]) -> dict[str, Any]:
    """An argument specification or a documentation's options, by what both say."""
    return {
        name: {
            "type": option.get("type", "str"),
            "required": option.get("required", False),
            "default": option.get("default"),
            "choices": option.get("choices"),
            "elements": option.get("elements"),
            "options": collect_options(option.get("options") or option.get("suboptions") or {}),
        }
        for name, option in options.items()
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_module_takes_what_its_documentation_says(
    modules: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken(Exception):  # noqa: N818 (it carries what was asked for, and is no error)
        pass

    def take(argument_spec: dict[str, Any], supports_check_mode: bool) -> None:
        raise Taken(argument_spec, supports_check_mode)

    source = runpy.run_path(str(ROOT / "plugins/modules" / f"{name}.py"))
    monkeypatch.setitem(source["main"].__globals__, "AnsibleModule", take)
    with pytest.raises(Taken) as taken:
        source["main"]()
    spec, check_mode = taken.value.args
    assert check_mode is True
    assert collect_options(spec) == collect_options(modules[f"serving.gpu_node.{name}"]["doc"].get("options", {}))


def test_every_role_is_documented() -> None:
    for name, entry in ansible_doc("role", ROLES).items():
        assert entry["entry_points"]["main"]["short_description"], name
