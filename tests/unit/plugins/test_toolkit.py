"""Versions of the container toolkit: refused, chosen, read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.serving.gpu_node.plugins.module_utils.toolkit import (
    parse_madison,
    parse_version,
    select_version,
    toolkit_problem,
)
from hypothesis import given
from hypothesis import strategies as st

ROLE = Path(__file__).resolve().parents[3] / "roles" / "container_runtime"
KNOWN: list[dict[str, Any]] = yaml.safe_load((ROLE / "vars/main.yml").read_text())["_container_runtime_toolkit_known"]
MADISON = """\
nvidia-container-toolkit-base |   1.20.1-1 | https://nvidia.github.io/libnvidia-container/stable/deb/amd64  Packages
nvidia-container-toolkit-base |   1.18.2-1 | https://nvidia.github.io/libnvidia-container/stable/deb/amd64  Packages
nvidia-container-toolkit-base |   1.18.2-1 | https://mirror.example.com/deb  Packages
nvidia-container-toolkit-base |   1.18.20-1 | https://mirror.example.com/deb  Packages
"""


def test_the_default_is_known_to_be_good() -> None:
    version = yaml.safe_load((ROLE / "defaults/main.yml").read_text())["container_runtime_toolkit_version"]
    assert version in [entry["version"] for entry in KNOWN if entry["good"]]


@pytest.mark.parametrize("version", ["1.19.1", "1.20.0", "1.17.7", "1.16.2", "1.9.0"])
def test_versions_known_to_be_bad(version: str) -> None:
    problem = toolkit_problem(version, "", KNOWN)
    assert problem.startswith(f"nvidia-container-toolkit {version} is known to be bad: ")
    assert "https://github.com/" in problem
    assert "known to be good: 1.18.2" in problem


@pytest.mark.parametrize("version", ["1.18.2", "1.19.0", "1.17.8", "1.20.1", "2.0.0", ""])
def test_versions_that_are_not_refused(version: str) -> None:
    assert toolkit_problem(version, "", KNOWN) == ""


def test_what_holds_for_older_podmans_alone() -> None:
    known = [{"version": "1.19.0 and newer", "good": False, "why": "x", "source": "y", "podman_below": "5.0"}]
    assert toolkit_problem("1.21.3", "4.9.3", known)
    assert toolkit_problem("1.21.3", "5.0.0", known) == ""
    assert toolkit_problem("1.21.3", "", known) == ""
    assert toolkit_problem("1.18.9", "4.9.3", known) == ""


def test_every_entry_says_why_and_where_from() -> None:
    for entry in KNOWN:
        assert entry["why"]
        assert entry["source"].startswith("https://")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVIDIA Container Toolkit CLI version 1.18.2\ncommit: 1a2b3c\n", "1.18.2"),
        ("1.19.0~rc.1-1", "1.19.0"),
        ("", ""),
        ("version unknown", ""),
    ],
)
def test_reading_a_version(text: str, version: str) -> None:
    assert parse_version(text) == version


def test_choosing_a_version() -> None:
    assert parse_madison(MADISON) == ["1.20.1-1", "1.18.2-1", "1.18.20-1"]
    assert select_version(MADISON, "1.18.2")["version"] == "1.18.2-1"
    assert select_version(MADISON, "")["version"] == "1.20.1-1"
    assert select_version(MADISON, "9.9.9") == {"version": "", "available": ["1.20.1-1", "1.18.2-1", "1.18.20-1"]}
    assert select_version("", "1.18.2") == {"version": "", "available": []}


@given(st.text(), st.text())
def test_any_text(text: str, wanted: str) -> None:
    assert select_version(text, wanted)["version"] in ["", *parse_madison(text)]
    assert isinstance(toolkit_problem(text, wanted, KNOWN), str)
    parse_version(text)
