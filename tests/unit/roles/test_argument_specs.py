"""Every role's argument_specs say the same as its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
# A role takes something once it has tasks; roles/kernels has only files so far.
ROLES = sorted(path.parent.name for path in (ROOT / "roles").glob("*/tasks"))


def load(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def defaults(role: str) -> dict[str, Any]:
    return load(ROOT / "roles" / role / "defaults" / "main.yml")


def entry_points(role: str) -> dict[str, dict[str, Any]]:
    specs = load(ROOT / "roles" / role / "meta" / "argument_specs.yml").get("argument_specs", {})
    return {name: spec.get("options", {}) for name, spec in specs.items()}


def all_options(role: str) -> dict[str, dict[str, Any]]:
    return {name: option for options in entry_points(role).values() for name, option in options.items()}


def undocumented(options: dict[str, dict[str, Any]], path: str = "") -> list[str]:
    """Options, nested ones too, that lack a type or a description."""
    found = []
    for name, option in options.items():
        here = f"{path}{name}"
        found += [f"{here}: no {key}" for key in ("type", "description") if not option.get(key)]
        found += undocumented(option.get("options", {}), f"{here}.")
    return found


def test_there_are_roles() -> None:
    assert ROLES


@pytest.mark.parametrize("role", ROLES)
def test_the_role_says_what_it_takes(role: str) -> None:
    assert "main" in entry_points(role), f"roles/{role}/meta/argument_specs.yml has no `main`"


@pytest.mark.parametrize("role", ROLES)
def test_every_option_has_type_and_description(role: str) -> None:
    assert undocumented(all_options(role)) == []


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_an_option_of_main(role: str) -> None:
    assert sorted(set(defaults(role)) - set(entry_points(role).get("main", {}))) == []


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_the_same_in_both_files(role: str) -> None:
    """Also in the direction spec -> defaults: a default that only the spec names is never applied by Ansible."""
    documented = {name: option["default"] for name, option in all_options(role).items() if "default" in option}
    assert documented == {name: value for name, value in defaults(role).items() if name in documented}
    optional = {name for name, option in entry_points(role).get("main", {}).items() if not option.get("required")}
    assert sorted(set(defaults(role)) & optional - set(documented)) == [], (
        "default in defaults/main.yml, none in the spec"
    )


@pytest.mark.parametrize("role", ROLES)
def test_a_required_option_has_no_default(role: str) -> None:
    required = {name for name, option in all_options(role).items() if option.get("required")}
    assert sorted(required & set(defaults(role))) == []


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_roles_name(role: str) -> None:
    names = set(defaults(role)) | set(all_options(role)) | set(load(ROOT / "roles" / role / "vars" / "main.yml"))
    assert sorted(name for name in names if not name.startswith((f"{role}_", f"_{role}_", f"__{role}_"))) == []
