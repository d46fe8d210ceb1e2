"""The script that runs at every boot, on a root folder of its own with real files for registers."""

from __future__ import annotations

import importlib.util
import json
import struct
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "roles/host_settings/files/host_settings.py"
ROOT_PORT, UPSTREAM, DOWNSTREAM, GPU = "0000:30:01.0", "0000:31:00.0", "0000:32:00.0", "0000:33:00.0"
# ReqRedir and CmpltRedir are bits 2 and 3 of the ACS control register (PCI Express Base, 7.7.11).
SOURCE_VALIDATION, REQUEST, COMPLETION, UPSTREAM_FORWARDING = 0x1, 0x4, 0x8, 0x10


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_settings_boot", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_space(control: int | None) -> bytes:
    """4 KiB with error reporting at 0x100 and, with a control value, ACS after it at 0x148."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | (0x148 if control is not None else 0) << 20)
    if control is not None:
        struct.pack_into("<IHH", space, 0x148, 0x000D | 1 << 16, 0x5F, control)
    return bytes(space)


def control_of(root: Path, port: str) -> int:
    space = (root / "sys/bus/pci/devices" / port / "config").read_bytes()
    return int(struct.unpack_from("<H", space, 0x14E)[0])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A GPU below a switch, an NVMe disk beside it, two cpufreq policies, huge pages for everybody."""
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    top = tmp_path / "sys/devices/pci0000:30"
    ways = {
        ROOT_PORT: top / ROOT_PORT,
        UPSTREAM: top / ROOT_PORT / UPSTREAM,
        DOWNSTREAM: top / ROOT_PORT / UPSTREAM / DOWNSTREAM,
        GPU: top / ROOT_PORT / UPSTREAM / DOWNSTREAM / GPU,
        "0000:30:03.0": top / "0000:30:03.0",
        "0000:39:00.0": top / "0000:30:03.0/0000:39:00.0",
    }
    controls = {
        ROOT_PORT: SOURCE_VALIDATION | REQUEST | COMPLETION | UPSTREAM_FORWARDING,
        DOWNSTREAM: REQUEST,
        "0000:30:03.0": REQUEST | COMPLETION,
    }
    for address, folder in ways.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config").write_bytes(config_space(controls.get(address)))
        (folder / "vendor").write_text("0x10de\n" if address == GPU else "0x1022\n")
        (folder / "class").write_text("0x030200\n" if address == GPU else "0x060400\n")
        (bus / address).symlink_to(folder)
    for policy in ("policy0", "policy1"):
        folder = tmp_path / "sys/devices/system/cpu/cpufreq" / policy
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text("schedutil\n")
        (folder / "scaling_available_governors").write_text("performance schedutil\n")
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("[always] madvise never\n")
    want(tmp_path, acs_redirect="off", cpu_governor="performance", transparent_hugepages="madvise")
    return tmp_path


def want(root: Path, **settings: str) -> None:
    (root / "etc/gpu-node").mkdir(parents=True, exist_ok=True)
    (root / "etc/gpu-node/host-settings.json").write_text(json.dumps(settings))


def governors(root: Path) -> list[str]:
    return [path.read_text().strip() for path in sorted(root.glob("sys/devices/system/cpu/cpufreq/*/scaling_governor"))]


def test_everything_is_set_and_a_second_run_changes_nothing(
    script: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--root", str(root)]) == 0
    told = capsys.readouterr().out
    assert governors(root) == ["performance", "performance"]
    assert (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text() == "madvise"
    # Only the two bits go, and only on the way to the GPU.
    assert control_of(root, ROOT_PORT) == SOURCE_VALIDATION | UPSTREAM_FORWARDING
    assert control_of(root, DOWNSTREAM) == 0
    assert control_of(root, "0000:30:03.0") == REQUEST | COMPLETION
    assert "always, now madvise" in told
    assert ROOT_PORT in told
    assert DOWNSTREAM in told
    assert UPSTREAM not in told
    assert script.main(["--root", str(root)]) == 0
    assert capsys.readouterr().out == "everything is as wanted\n"


def test_check_says_what_differs_and_changes_nothing(
    script: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--check", "--root", str(root)]) == 1
    told = capsys.readouterr().out
    assert "schedutil" in told
    assert "always, wanted madvise" in told
    assert ROOT_PORT in told
    assert governors(root) == ["schedutil", "schedutil"]
    assert control_of(root, ROOT_PORT) & REQUEST
    script.main(["--root", str(root)])
    assert script.main(["--check", "--root", str(root)]) == 0


def test_what_is_not_asked_for_stays(script: ModuleType, root: Path) -> None:
    want(root, transparent_hugepages="madvise")
    assert script.main(["--root", str(root)]) == 0
    assert governors(root) == ["schedutil", "schedutil"]
    assert control_of(root, ROOT_PORT) & REQUEST


def test_a_governor_that_the_driver_lacks_is_left_alone(script: ModuleType, root: Path) -> None:
    want(root, cpu_governor="ondemand")
    assert script.main(["--root", str(root)]) == 0
    assert governors(root) == ["schedutil", "schedutil"]


def test_a_register_that_nobody_may_write_is_named(
    script: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.pwrite", refuse)
    assert script.main(["--root", str(root)]) == 1
    told = capsys.readouterr().err
    assert ROOT_PORT in told
    assert "lockdown" in told
    # The rest is done all the same.
    assert governors(root) == ["performance", "performance"]


def test_a_bit_that_does_not_go_is_a_failure(
    script: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.pwrite", lambda *_: 2)
    assert script.main(["--root", str(root)]) == 1
    assert f"ACS at {DOWNSTREAM}" in capsys.readouterr().err


def test_a_cut_or_circular_configuration_space_redirects_nothing(script: ModuleType) -> None:
    assert script.acs_control(config_space(REQUEST)[:64]) is None
    assert script.acs_control(b"\xff" * 4096) is None
    circle = bytearray(4096)
    struct.pack_into("<I", circle, 0x100, 0x0001 | 1 << 16 | 0x100 << 20)
    assert script.acs_control(bytes(circle)) is None


def test_a_configuration_that_is_none_is_named(
    script: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "etc/gpu-node/host-settings.json").write_text("{")
    assert script.main(["--root", str(root)]) == 1
    assert "host-settings.json" in capsys.readouterr().err
