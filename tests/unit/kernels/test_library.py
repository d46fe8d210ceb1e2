"""The built library in a torch for CPUs: it loads, says what it is, and refuses the CPU clearly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCHEMAS = {
    "rowtopk": "ds41k::rowtopk(Tensor logits, Tensor lens, Tensor(a!) out, int k) -> ()",
    "cand_blocks": "ds41k::cand_blocks(Tensor logits, Tensor lens, Tensor(a!) blocks, int block_size) -> ()",
    "cand_topk": "ds41k::cand_topk(Tensor logits, Tensor lens, Tensor blocks, Tensor(a!) out, "
    "int block_size, int k) -> ()",
}


@pytest.fixture
def library(torch: Any, built: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from ds41k import library

    monkeypatch.setenv(library.FOLDER_VARIABLE, str(built))
    assert library.load() == built / library.NAME
    return library


def test_it_loads_and_has_the_schemas(torch: Any, library: ModuleType) -> None:
    for name, schema in SCHEMAS.items():
        assert str(getattr(torch.ops.ds41k, name).default._schema) == schema


def calls(torch: Any, library: ModuleType, device: str) -> list[Any]:
    logits, lens = torch.zeros((4, 9000), device=device), torch.zeros(4, dtype=torch.int32, device=device)
    out = torch.zeros((4, 512), dtype=torch.int32, device=device)
    blocks = torch.zeros((4, 2048), dtype=torch.int32, device=device)
    return [
        lambda: library.rowtopk(logits, lens, out, 512),
        lambda: library.cand_blocks(logits, lens, blocks),
        lambda: library.cand_topk(logits, lens, blocks, out, 512),
    ]


FAKES = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from ds41k import library
library.load()
with FakeTensorMode():
    logits, lens = torch.zeros((4, 9000), device="cuda"), torch.zeros(4, dtype=torch.int32, device="cuda")
    out, blocks = (torch.zeros((4, n), dtype=torch.int32, device="cuda") for n in (512, 2048))
    found = [library.rowtopk(logits, lens, out, 512), library.cand_blocks(logits, lens, blocks)]
    found.append(library.cand_topk(logits, lens, blocks, out, 512))
print(found)
"""


def test_fake_tensors_pass_through(torch_path: Path, built: Path) -> None:
    # In a Python of its own: torch's tracing does not go with what Ansible does to sys.intern.
    done = run("-c", FAKES, torch_path=torch_path, DS41K_LIBRARY_DIR=str(built))
    assert done.stdout.strip() == "[None, None, None]", done.stderr


def test_the_cpu_is_refused_with_the_operators_name(torch: Any, library: ModuleType) -> None:
    for name, call in zip(SCHEMAS, calls(torch, library, "cpu"), strict=True):
        with pytest.raises(NotImplementedError, match=f"ds41k::{name}.*'CPU' backend"):
            call()


def run(*arguments: str, torch_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    files = Path(__file__).resolve().parents[3] / "roles" / "kernels" / "files"
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{files}:{torch_path}", **environment}
    argv = [sys.executable, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=variables, check=False)


def test_a_missing_library_is_one_line_with_the_remedy(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds41k import library

    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setenv(library.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(library.LibraryError) as error:
        library.load()
    assert str(error.value) == (
        f"ds41k: {tmp_path}/libds41k_idx.so is missing: build it (build.sh), or name its folder in DS41K_LIBRARY_DIR"
    )


def test_without_a_gpu_nothing_is_qualified_and_that_is_no_failure(
    torch_path: Path, built: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    done = run("-m", "ds41k.qualify", "--json", str(report), torch_path=torch_path, DS41K_LIBRARY_DIR=str(built))
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "not qualified: torch sees no CUDA GPU here"
    assert report.read_text(encoding="utf-8").split() == (
        ["{", '"kernels":', "{},", '"not_qualified":', '"torch', "sees", "no", "CUDA", "GPU", 'here"', "}"]
    )
