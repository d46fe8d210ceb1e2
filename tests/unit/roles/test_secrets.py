"""No task hands a secret over by `environment`: it would stand on the command line, and in the output of -vvv."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(
    [
        *(ROOT / "roles").glob("*/tasks/**/*.yml"),
        *(ROOT / "roles").glob("*/handlers/*.yml"),
        *(ROOT / "playbooks").glob("*.yml"),
    ]
)
# A proxy's URL holds its password.
SECRET = re.compile(r"proxy|secret|passw|token|key|credential", re.IGNORECASE)


def environments(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if "environment" in value:
            yield value["environment"]
        for part in value.values():
            yield from environments(part)
    elif isinstance(value, list):
        for part in value:
            yield from environments(part)


def secrets(text: str) -> list[str]:
    return [name for given in environments(yaml.safe_load(text)) for name in SECRET.findall(json.dumps(given))]


def test_a_secret_is_found() -> None:
    assert secrets("[{block: [{environment: {LC_ALL: C, hub: '{{ model_weights_hub_token }}'}}]}]") == ["token"]
    assert secrets('[{environment: "{{ {} if package_access_proxy else {} }}"}]') == ["proxy"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_secret_goes_by_the_environment(path: Path) -> None:
    assert secrets(path.read_text()) == []
