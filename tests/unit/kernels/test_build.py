"""Building the kernel libraries: what comes out, when nothing is to do, and each error in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from ds41k import build

from tests.unit.kernels.support import build_sh

NAME = "libds41k_idx.so"
TOOLS = build.Toolchain(Path("/cuda/bin/nvcc"), "13.0.88", "c++ 12.2.0", Path("/torch"), "2.13.0+cpu")
SPILLS = """
__global__ void __launch_bounds__(1024, 2) many_registers(const float* in, float* out) {
  float kept[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) kept[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i * 1024 + threadIdx.x] = kept[i] * kept[(i * 7 + 3) % 64];
}
"""


def manifest(folder: Path) -> dict[str, object]:
    entry = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))[NAME]
    assert isinstance(entry, dict)
    return entry


def fat_binary(library: Path) -> Counter[tuple[str, int]]:
    """Count what a fat binary holds: ("machine code" or "ptx", architecture)."""
    data, found, at = library.read_bytes(), Counter[tuple[str, int]](), 0
    magic = struct.pack("<I", 0xBA55ED50)
    while (at := data.find(magic, at)) >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            found[({1: "ptx", 2: "machine code"}.get(kind, str(kind)), arch)] += 1
            entry += entry_header + entry_size
        at = max(end, at + 4)
    return found


def test_both_architectures_are_built_and_nothing_spills(built: Path) -> None:
    entry = manifest(built)
    assert entry["arches"] == ["sm_90a", "sm_120a"]
    assert entry["sha256"] == hashlib.sha256((built / NAME).read_bytes()).hexdigest()
    assert entry["sources"] == build.source_hash(build.LIBRARIES["idx"])
    kernels = entry["kernels"]
    assert isinstance(kernels, list) and all(kernel["spilled_bytes"] == 0 for kernel in kernels)
    assert all(16 <= kernel["registers"] <= 64 for kernel in kernels)
    names = {arch: {kernel["name"] for kernel in kernels if kernel["arch"] == arch} for arch in build.ARCHES}
    assert names["sm_90a"] == names["sm_120a"]
    assert {name.split("<")[0].split("::")[-1] for name in names["sm_90a"]} == {"select_rows", "select_candidates"}


def test_the_library_holds_machine_code_alone(built: Path) -> None:
    found = fat_binary(built / NAME)
    assert {key for key in found} == {("machine code", 90), ("machine code", 120)}, found


def test_the_library_exports_nothing_and_needs_no_cuda_library(built: Path) -> None:
    def output(*argv: str) -> str:
        return subprocess.run([*argv, str(built / NAME)], capture_output=True, text=True, check=True).stdout

    assert output("nm", "-D", "--defined-only").strip() == ""
    dynamic = output("readelf", "-d")
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert not [name for name in needed if "cuda" in name or "c10" in name]


def test_a_second_build_builds_nothing(built: Path, torch_path: Path, nvcc: Path) -> None:
    before = (built / NAME).stat().st_mtime_ns
    arguments = ("all", "--arch", "both", "--out", str(built))
    done = build_sh(*arguments, torch_path=torch_path, CUDA_HOME=str(nvcc.parents[1]))
    assert done.returncode == 0 and "up to date" in done.stdout, done.stdout + done.stderr
    assert (built / NAME).stat().st_mtime_ns == before


@pytest.fixture
def sources(tmp_path: Path) -> build.Library:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "kernels.cu").write_text("// kernels\n", encoding="utf-8")
    (folder / "shared.cuh").write_text("// shared\n", encoding="utf-8")
    return build.Library(NAME, folder)


def test_the_key_changes_exactly_when_an_input_does(sources: build.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    arches = build.ARCHES
    first = build.key_of(sources, TOOLS, arches)
    moved = sources.folder.with_name("elsewhere")
    sources.folder.rename(moved)
    sources = dataclasses.replace(sources, folder=moved)
    elsewhere = dataclasses.replace(TOOLS, nvcc=Path("/opt/nvcc"), torch=Path("/opt/torch"))
    os.utime(moved / "kernels.cu", (1, 1))
    assert build.key_of(sources, elsewhere, arches) == first

    keys = {first}

    def changed(library: build.Library = sources, tools: build.Toolchain = TOOLS, of: tuple[str, ...] = arches) -> None:
        key = build.key_of(library, tools, of)
        assert key not in keys
        keys.add(key)

    changed(tools=dataclasses.replace(TOOLS, nvcc_version="13.1.0"))
    changed(tools=dataclasses.replace(TOOLS, host_compiler="c++ 13.0.0"))
    changed(tools=dataclasses.replace(TOOLS, torch_version="2.14.0"))
    changed(of=("sm_120a",))
    changed(library=dataclasses.replace(sources, name="libother.so"))
    (moved / "kernels.cu").write_text("// kernels.\n", encoding="utf-8")
    changed()
    (moved / "shared.cuh").rename(moved / "common.cuh")
    changed()
    (moved / "more.cuh").write_text("", encoding="utf-8")
    changed()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-G"))
    changed()


def test_a_damaged_library_or_manifest_is_not_up_to_date(built: Path, tmp_path: Path) -> None:
    library = build.LIBRARIES["idx"]
    key = str(manifest(built)["key"])
    for name in (NAME, "manifest.json"):
        (tmp_path / name).write_bytes((built / name).read_bytes())
    assert build.up_to_date(tmp_path, library, key)
    assert not build.up_to_date(tmp_path, library, key[:-1] + "x")
    with (tmp_path / NAME).open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    assert not build.up_to_date(tmp_path, library, key)
    (tmp_path / NAME).write_bytes((built / NAME).read_bytes())
    (tmp_path / "manifest.json").write_text("{", encoding="utf-8")
    assert not build.up_to_date(tmp_path, library, key)


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("build: error: "), text
    return lines[0]


def test_a_missing_nvcc_is_one_line(
    torch_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(torch_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(build, "DEFAULT_CUDA", tmp_path / "other")
    assert build.main(["8x", "--out", str(tmp_path / "out")]) == 1
    line = one_line(capsys.readouterr().err)
    assert f"no nvcc in {tmp_path}/cuda/bin/nvcc, {tmp_path}/other/bin/nvcc" in line and "nvidia-cuda-nvcc" in line


def test_nvcc_of_the_pip_packages_is_found_beside_the_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.5, V13.5.37'\n", encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(build, "DEFAULT_CUDA", tmp_path / "none")
    assert build.find_nvcc(build.ask_python(sys.executable)["nvcc"]) == (nvcc, "13.5.37")


def test_an_nvcc_that_is_too_old_is_one_line(torch_path: Path, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n", encoding="utf-8")
    nvcc.chmod(0o755)
    done = build_sh("8x", "--out", str(tmp_path / "out"), torch_path=torch_path, CUDA_HOME=str(tmp_path))
    assert done.returncode == 1
    assert f"{nvcc} is 12.8.93, which does not know sm_120a: nvcc 12.9 or newer" in one_line(done.stderr)


def test_a_python_without_torch_or_with_an_old_one_is_one_line(tmp_path: Path, nvcc: Path) -> None:
    home = str(nvcc.parents[1])
    done = build_sh("8x", "--out", str(tmp_path / "out"), torch_path=tmp_path, CUDA_HOME=home)
    assert done.returncode == 1 and "has no torch, whose headers are needed" in one_line(done.stderr)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.10.1+cpu'\n", encoding="utf-8")
    done = build_sh("8x", "--out", str(tmp_path / "out"), torch_path=tmp_path, CUDA_HOME=home)
    assert done.returncode == 1 and "torch 2.10.1+cpu" in (line := one_line(done.stderr)) and "2.11 or newer" in line


def real_tools(torch_path: Path, nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> build.Toolchain:
    monkeypatch.setenv("PYTHONPATH", str(torch_path))
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    return build.find_toolchain(sys.executable)


def test_a_kernel_that_spills_is_refused_and_the_old_library_stays(
    torch_path: Path, nvcc: Path, sources: build.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = real_tools(torch_path, nvcc, monkeypatch)
    out = tmp_path / "out"
    out.mkdir()
    (out / NAME).write_text("older", encoding="utf-8")
    (sources.folder / "kernels.cu").write_text(SPILLS, encoding="utf-8")
    with pytest.raises(build.BuildError, match=r"many_registers\(.*\) for sm_90a spills \d+ bytes .*the limit is 0"):
        build.build(sources, tools, ("sm_90a",), out)
    assert sorted(path.name for path in out.iterdir()) == [NAME]
    assert (out / NAME).read_text(encoding="utf-8") == "older"


def test_the_same_inputs_give_the_same_bytes(
    torch_path: Path, nvcc: Path, sources: build.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that every node's library is the same one; each build has another process number and temporary folder."""
    tools = real_tools(torch_path, nvcc, monkeypatch)
    (sources.folder / "kernels.cu").write_text("__global__ void one(int* out) { *out = 1; }\n", encoding="utf-8")
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert build.build(sources, tools, ("sm_90a",), tmp_path / name)
        made.append((tmp_path / name / NAME).read_bytes())
    assert made[0] == made[1]


def test_a_source_that_does_not_compile_is_one_line(
    torch_path: Path, nvcc: Path, sources: build.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = real_tools(torch_path, nvcc, monkeypatch)
    (sources.folder / "kernels.cu").write_text("__global__ void broken() { nothing(); }\n", encoding="utf-8")
    with pytest.raises(build.BuildError) as error:
        build.build(sources, tools, ("sm_90a",), tmp_path)
    assert "kernels.cu of libds41k_idx.so does not compile" in str(error.value) and "nothing" in str(error.value)
    assert "\n" not in str(error.value)


def test_gates_see_output_that_has_changed_and_symbols_that_leave(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no kernel for sm_120a"):
        build.check_kernels([{"name": "k", "arch": "sm_90a", "registers": 9, "spilled_bytes": 0}], build.ARCHES)
    (tmp_path / "open.c").write_text("int ds41k_open(void) { return 1; }\n", encoding="utf-8")
    library = tmp_path / "libopen.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "open.c"), "-o", str(library)], check=True)
    with pytest.raises(build.BuildError, match="exports 1 symbols, ds41k_open among them"):
        build.check_exports(library)


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        ("12.0\n12.0\n", ("sm_120a",)),
        ("9.0\n", ("sm_90a",)),
        ("12.0\n9.0\n", ("sm_90a", "sm_120a")),
        ("8.6\n", build.ARCHES),
        ("", build.ARCHES),
    ],
)
def test_auto_goes_by_the_gpus(
    capabilities: str, wanted: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert build.choose_arches("auto") == wanted


def test_auto_takes_both_where_no_driver_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.choose_arches("auto") == build.ARCHES
    assert build.choose_arches("sm_90a") == ("sm_90a",)


def test_wrong_usage_is_exit_code_2(torch_path: Path) -> None:
    assert build_sh("9x", torch_path=torch_path).returncode == 2
    assert build_sh("8x", "--arch", "sm_75", torch_path=torch_path).returncode == 2
