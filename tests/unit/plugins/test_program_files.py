"""The module `program_files`: one step for a program of many files, and nothing of another version stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.modules import program_files

from tests.unit.plugins.module_runner import run_module

FILES = {"tool/__init__.py": "", "tool/cli.py": "print('é')\n", "deep/er/module.py": "X = 1\n"}


def run(root: Path, files: dict[str, str] | None = None, check: bool = False) -> dict[str, Any]:
    arguments = {"path": str(root / "lib"), "files": FILES if files is None else files, "folders": ["tool", "deep"]}
    return run_module(program_files.main, arguments, check)


def found(root: Path) -> dict[str, str]:
    lib = root / "lib"
    return {path.relative_to(lib).as_posix(): path.read_text() for path in lib.rglob("*") if path.is_file()}


def test_they_are_written_once_also_an_empty_one(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert (first["changed"], sorted(first["written"])) == (True, sorted(FILES))
    assert found(tmp_path) == FILES
    second = run(tmp_path)
    assert (second["changed"], second["written"], second["removed"], second["diff"]) == (False, [], [], [])


def test_everyone_may_read_them_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run(tmp_path)
    finally:
        os.umask(before)
    lib = tmp_path / "lib"
    assert {path.stat().st_mode & 0o777 for path in [lib, *lib.rglob("*")] if path.is_dir()} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in lib.rglob("*") if path.is_file()} == {0o644}


def test_what_another_version_had_goes_and_what_is_not_the_programs_stays(tmp_path: Path) -> None:
    run(tmp_path, {**FILES, "tool/old.py": "gone = True\n"})
    other = tmp_path / "lib" / "other.py"
    other.write_text("mine\n")
    again = run(tmp_path)
    assert (again["written"], again["removed"]) == ([], ["tool/old.py"])
    assert found(tmp_path) == {**FILES, "other.py": "mine\n"}


def test_a_dry_run_says_and_does_nothing(tmp_path: Path) -> None:
    answer = run(tmp_path, check=True)
    assert (answer["changed"], sorted(answer["written"])) == (True, sorted(FILES))
    assert not (tmp_path / "lib").exists()


@pytest.mark.parametrize("blocked", ["lib", "lib/tool"])
def test_a_file_where_a_folder_has_to_be_is_named(tmp_path: Path, blocked: str) -> None:
    path = tmp_path / blocked
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    answer = run(tmp_path)
    assert answer["failed"]
    assert str(tmp_path / "lib") in answer["msg"]
