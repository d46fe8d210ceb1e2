#!/usr/bin/env python3
"""Write docs/settings.md from the settings themselves: run it after changing a setting or a profile."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
NO_LIMIT = 2**53
FORMS = {
    "podman_size": "a whole number and `b`, `k`, `m` or `g`",
    "vllm_size": "a number and `k`, `m`, `g`, `t` (decimal) or `K`, `M`, `G`, `T` (binary)",
    "mapping": "a mapping",
    "list": "a list",
    "flag": "true, false",
    "text": "any text",
}

PROFILES = ("8x", "2x", "cpu")
HEAD = """\
# Settings

Every setting of a node, with the value that each profile gives it. Override one in `serving_plan_overrides`, by its
name or by the name that the source recipe uses in its environment:

    serving_plan_profile: 8x
    serving_plan_overrides:
      max_num_seqs: 64
      SPEC_K: 3

A wrong name, type or value is refused before anything changes, and so is a setting that means nothing to the profile
(an empty cell). `auto` is worked out by the plan. `ansible-playbook playbooks/plan.yml` shows what a value would do.

| setting | recipe's name | unit | limits | 8x | 2x | cpu | meaning |
|---|---|---|---|---|---|---|---|
"""
FOOT = """
This page is written by `docs/make_settings.py`.
"""


def limits(setting: Any) -> str:
    """Say what values a setting takes."""
    if setting.kind in ("int", "number"):
        return (
            f"{setting.minimum} or more" if setting.maximum >= NO_LIMIT else f"{setting.minimum} to {setting.maximum}"
        )
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    return "IPv4 or IPv6" if setting.unit == "IP address" else FORMS[setting.kind]


def text(value: Any) -> str:
    """Return a value as the page shows it."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def page() -> str:
    """Return the page's text."""
    settings = runpy.run_path(str(ROOT / "plugins/module_utils/settings.py"))["SETTINGS"]
    values = {}
    for name in PROFILES:
        profile = yaml.safe_load((ROOT / f"roles/serving_plan/vars/{name}.yml").read_text())["_serving_plan_profile"]
        values[name] = profile["settings"]
    rows = ""
    for name, setting in settings.items():
        shown = (text(values[profile][name]) if name in values[profile] else "" for profile in PROFILES)
        cells = (
            f"`{name}`",
            f"`{setting.environment}`" if setting.environment else "",
            setting.unit,
            limits(setting),
            *shown,
            setting.description,
        )
        rows += "| " + " | ".join(cells) + " |\n"
    return HEAD + rows + FOOT


if __name__ == "__main__":
    (ROOT / "docs/settings.md").write_text(page(), encoding="utf-8")
