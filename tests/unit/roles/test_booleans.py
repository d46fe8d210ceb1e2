"""Options of type bool are used as booleans, also where they come as text: `-e nvidia_driver_manage=false`, INI files.

ansible-core 2.18 does not convert them by argument_specs and takes the text `false` for true; 2.19 refuses a text as
a condition in the middle of a run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from jinja2 import nodes

ROOT = Path(__file__).resolve().parents[3]
BOOL = ("bool", "ansible.builtin.bool")
CONDITIONS = ("when", "that", "until", "failed_when", "changed_when")
FOLDERS = ("tasks", "vars", "handlers", "templates")
FILES = sorted(
    path
    for path in [*(ROOT / "roles").rglob("*.yml"), *(ROOT / "roles").rglob("*.j2"), *(ROOT / "playbooks").glob("*.yml")]
    if path.parent.name in FOLDERS or path.parent == ROOT / "playbooks"
)


@functools.cache
def bool_options() -> frozenset[str]:
    specs = [yaml.safe_load(path.read_text()) for path in (ROOT / "roles").glob("*/meta/argument_specs.yml")]
    points = [point for spec in specs for point in spec["argument_specs"].values()]
    options = [item for point in points for item in point.get("options", {}).items()]
    return frozenset(name for name, option in options if option.get("type") == "bool")


def templates(value: Any, condition: bool = False) -> Iterator[str]:
    """Every text of a YAML file that Ansible evaluates, conditions as expressions."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from templates(part, key in CONDITIONS)
    elif isinstance(value, list):
        for part in value:
            yield from templates(part, condition)
    elif isinstance(value, str):
        yield f"{{{{ {value} }}}}" if condition and "{{" not in value else value


def bare(node: nodes.Node, options: Collection[str]) -> Iterator[str]:
    """The options that a template uses without the filter `bool`; a default may stand between."""
    if isinstance(node, nodes.Filter) and node.name in BOOL:
        inner = node.node
        while isinstance(inner, nodes.Filter) and inner.name in ("default", "d"):
            for argument in inner.args:
                yield from bare(argument, options)
            inner = inner.node
        if inner is not None and not isinstance(inner, nodes.Name):
            yield from bare(inner, options)
    elif isinstance(node, nodes.Test) and node.name in ("defined", "undefined"):
        return
    elif isinstance(node, nodes.Name) and node.name in options:
        yield node.name
    else:
        for child in node.iter_child_nodes():
            yield from bare(child, options)


def bare_in(text: str, options: Collection[str]) -> list[str]:
    # Filters and tests of Ansible are only names to the parser.
    return sorted(set(bare(jinja2.Environment().parse(text), options)))


def test_there_are_options_to_look_for() -> None:
    assert {"nvidia_driver_manage", "host_settings_reboot_allowed", "rollout_back"} <= bool_options()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{{ a }}", ["a"]),
        ("{{ not a }}", ["a"]),
        ("{{ not a | bool }}", []),
        ("{{ 'x' if a else b | bool }}", ["a"]),
        ("{{ f(a) or {'k': b} }}", ["a", "b"]),
        ("{{ (a and b) | bool }}", ["a", "b"]),
        ("{{ a | default(other.b) | bool }}", []),
        ("{{ a | default(b) | bool }}", ["b"]),
        ("{{ a is defined and 'b' }}", []),
    ],
)
def test_a_bare_option_is_found(text: str, found: list[str]) -> None:
    assert bare_in(text, {"a", "b"}) == found


def test_conditions_are_looked_at() -> None:
    tasks = [{"when": ["x", "not a"], "block": [{"ansible.builtin.assert": {"that": "b"}, "name": "a {{ x }}"}]}]
    assert [name for text in templates(tasks) for name in bare_in(text, {"a", "b"})] == ["a", "b"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_role_uses_an_option_of_type_bool_as_it_comes(path: Path) -> None:
    text = path.read_text()
    options = bool_options()
    if not re.search("|".join(options), text):
        return
    texts = [text] if path.suffix == ".j2" else templates(yaml.safe_load(text))
    found = {name for part in texts for name in bare_in(part, options)}
    assert sorted(found) == [], "give it the filter bool"
