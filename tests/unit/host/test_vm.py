"""What the virtual machine is made of, decided without making it."""

from __future__ import annotations

from pathlib import Path

import pytest
import testhost
import vm
from testhost import AptSource, HostError, Machine, PipSettings

MACHINE = Machine(
    (AptSource("http://mirror.example/debian", "trixie", ("main",)),),
    (),
    (("site.crt", b"pem"),),
    PipSettings("", (), None),
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "STATE", tmp_path)
    monkeypatch.setattr(vm, "VMS", tmp_path / "vm")
    (tmp_path / "id_ed25519.pub").write_text("ssh-ed25519 AAAA\n")
    (tmp_path / "vm").mkdir()


def test_every_numa_node_has_two_cpus_and_its_own_memory() -> None:
    argv = vm.qemu_argv(Path("/state/one"), 2299)
    assert [argv[place + 1] for place, word in enumerate(argv) if word in ("-object", "-numa")] == [
        "memory-backend-ram,id=memory0,size=2G",
        "node,nodeid=0,cpus=0-1,memdev=memory0",
        "memory-backend-ram,id=memory1,size=2G",
        "node,nodeid=1,cpus=2-3,memdev=memory1",
    ]
    assert "user,id=net,hostfwd=tcp:127.0.0.1:2299-:22" in argv
    assert "kvm" not in " ".join(argv)


def test_the_machines_sources_certificates_and_key_go_into_the_disk() -> None:
    files = vm.overlay_files(MACHINE)
    assert files["etc/apt/sources.list"] == b"deb http://mirror.example/debian trixie main\n"
    assert files["usr/local/share/ca-certificates/site.crt"] == b"pem"
    assert files["root/.ssh/authorized_keys"] == b"ssh-ed25519 AAAA\n"
    assert b"ssh-keygen -A" not in files["etc/systemd/system/ssh.service.d/node.conf"]
    packages = next(word for word in vm.bootstrap_argv(MACHINE, Path("o"), Path("r")) if word.startswith("--include="))
    assert not {"python3-apt", "podman", "nginx"} & set(packages.removeprefix("--include=").split(","))


def test_the_bios_starts_grub_and_grub_goes_by_the_guests_own_configuration(tmp_path: Path) -> None:
    argv = vm.qemu_argv(Path("/state/one"), 2299)
    # What qemu itself gave a kernel, no update-grub in the guest could change.
    assert not {"-kernel", "-initrd", "-append"} & set(argv)
    assert "ide-hd,drive=boot,bootindex=0" in argv
    files = vm.overlay_files(MACHINE)
    assert b"/boot/grub/grub.cfg" in files["boot/grub/search.cfg"]
    assert vm.KERNEL_LINE.encode() in files["boot/grub/grub.cfg"]
    assert f'GRUB_CMDLINE_LINUX="{vm.KERNEL_LINE}"'.encode() in files["etc/default/grub"]
    (tmp_path / "usr/lib/grub/i386-pc").mkdir(parents=True)
    (tmp_path / "boot/grub").mkdir(parents=True)
    (tmp_path / "usr/lib/grub/i386-pc/boot.img").write_bytes(b"B" * 512)
    (tmp_path / "boot/grub/core.img").write_bytes(b"C" * 700)
    disk = vm.boot_disk(tmp_path)
    # The boot sector loads what begins in the next one.
    assert disk[:512] == b"B" * 512
    assert disk[512:1212] == b"C" * 700
    assert len(disk) % 512 == 0


def test_a_mirror_without_the_release_is_named_with_apts_own_words() -> None:
    log = (
        "I: automatically chosen mode: root\n"
        "Err:1 http://mirror.example/debian trixie Release\n"
        "  404  Not Found\n"
        "E: apt-get update failed\n"
        "I: main() received signal PIPE: waiting for setup...\n"
    )
    assert vm.bootstrap_problem(log) == "Err:1 http://mirror.example/debian trixie Release"
    assert vm.bootstrap_problem("") == "no output"


def test_a_pid_file_of_another_process_is_no_running_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vm/one"
    assert vm.running(folder) is None
    # Alive and of that name, but not with this machine's disk.
    monkeypatch.setattr(testhost, "alive", lambda path, command: 1)
    assert vm.running(folder) is None


def test_a_disk_is_roots_to_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HostError, match="run as root"):
        vm.build_image(MACHINE, tmp_path / "image")


def test_down_of_what_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    vm.down("nothing")
    assert "there is no nothing" in capsys.readouterr().out
