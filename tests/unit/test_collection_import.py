"""The collection that plain pytest imports is this checkout, also where another one is installed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "plugins" / "module_utils").glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_module_utils_come_from_the_checkout(name: str) -> None:
    module = importlib.import_module(f"ansible_collections.serving.gpu_node.plugins.module_utils.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / "plugins" / "module_utils" / f"{name}.py"
