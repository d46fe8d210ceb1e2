"""A bundle: everything in it is hashed, and what was changed, lost or added is named before it is used."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "roles" / "bundle" / "files" / "bundle.py"
CODE = runpy.run_path(str(SCRIPT))
seal: Callable[[Path], int] = CODE["seal"]
installed: Callable[[str], list[tuple[str, str, str]]] = CODE["installed"]
file_name: Callable[..., str] = CODE["file_name"]
stanza: Callable[..., str] = CODE["stanza"]


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "verify", str(folder)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    for name in ("artifacts/m/d/model.safetensors", "image.tar", "packages/a_1_all.deb", "vars.yml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}\n")
    assert seal(folder) == 4
    return folder


def test_a_whole_one_is_verified(bundle: Path) -> None:
    done = verify(bundle)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("4 files as they were\n")


def test_every_difference_is_named(bundle: Path) -> None:
    image = bundle / "image.tar"
    image.write_text(image.read_text().replace("this", "that"))
    (bundle / "vars.yml").write_text("short")
    (bundle / "packages/a_1_all.deb").unlink()
    (bundle / "packages/evil.deb").write_text("x")
    done = verify(bundle)
    assert done.returncode == 1
    for problem in (
        "image.tar has SHA-256",
        "vars.yml has 5 bytes, not 17",
        "packages/a_1_all.deb is missing",
        "packages/evil.deb does not belong to it",
    ):
        assert f"error: {problem}" in done.stdout
    assert done.stderr.strip().endswith("4 files are not what they were; copy it again")


@pytest.mark.parametrize("text", [None, "{", "{}", "[]"])
def test_an_unfinished_one_is_refused(bundle: Path, text: str | None) -> None:
    (bundle / "bundle.json").unlink()
    if text is not None:
        (bundle / "bundle.json").write_text(text)
    done = verify(bundle)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {bundle}/bundle.json")
    assert "Traceback" not in done.stderr


def test_a_wrong_call_says_how_it_is_called() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "pack"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: bundle.py make | verify PATH\n")


def test_packages_are_those_that_the_node_has_in_its_versions() -> None:
    listing = "ii \tnginx\tamd64\t1.22-1\nii \tbash\tamd64\t5.2\nrc \told\tall\t1\n"
    assert installed(listing) == [("nginx", "amd64", "1.22-1"), ("bash", "amd64", "5.2")]
    assert file_name("podman", "amd64", "1:4.3+ds1-8") == "podman_1%3a4.3+ds1-8_amd64.deb"


def test_a_package_is_listed_as_apt_reads_it() -> None:
    text: Any = stanza("Package: a\nVersion: 1\n", "a_1_all.deb", 7, "f" * 64)
    assert text.splitlines() == [
        "Package: a",
        "Version: 1",
        "Filename: ./a_1_all.deb",
        "Size: 7",
        f"SHA256: {'f' * 64}",
    ]
