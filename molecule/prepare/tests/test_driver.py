"""The driver on a node without GPUs: built, pinned, held; what cannot work is refused and changes nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

PROJECT = Path(__file__).resolve().parents[3]
Converge = Callable[..., Any]

KERNEL = "6.1.0-50-amd64"
OTHER_KERNEL = "6.1.0-47-amd64"
MODULE = "nvidia-current-open"


def installed_version(host: Host) -> str:
    return host.package("nvidia-open-kernel-dkms").version.partition("-")[0]


def everything(host: Host) -> str:
    """What a refusal must not change: packages, holds, and apt's files."""
    return host.check_output(
        "dpkg-query -W; apt-mark showhold; "
        "find /etc/apt /etc/modprobe.d /etc/systemd/system -type f -exec sha256sum {} +"
    )


# --- what is there -------------------------------------------------------------------------------------------


def test_the_module_is_installed_for_the_wanted_kernel(host: Host) -> None:
    status = host.check_output("dkms status")
    assert f"{MODULE}/{installed_version(host)}, {KERNEL}, x86_64: installed" in status
    assert host.check_output("modinfo -k %s -F license %s", KERNEL, MODULE) == "Dual MIT/GPL"
    assert host.check_output("modinfo -k %s -F version %s", KERNEL, MODULE) == installed_version(host)


def test_the_module_is_signed_with_the_given_key(host: Host) -> None:
    assert host.check_output("modinfo -k %s -F signer %s", KERNEL, MODULE) == "Test module signing"


def test_the_signing_key_is_roots_alone(host: Host) -> None:
    key = host.file("/etc/gpu-node/secrets/mok/mok.key")
    assert oct(key.mode) == oct(0o600)
    secret = (PROJECT / ".demo/prepare/mok.key").read_text().splitlines()[5]
    assert secret in key.content_string
    assert secret not in host.check_output("journalctl --all --no-pager")


def test_it_is_not_loaded_here(host: Host) -> None:
    assert not host.file("/proc/driver/nvidia/version").exists


def test_the_node_stays_healthy(host: Host) -> None:
    assert host.check_output("systemctl is-system-running") == "running"
    assert host.service("nvidia-persistenced").is_enabled
    assert host.service("gpu-node-limits").is_enabled


def test_nouveau_stays_away_and_the_options_have_the_modules_names(host: Host) -> None:
    options = host.check_output("modprobe --showconfig")
    assert "blacklist nouveau" in options
    assert f"options {MODULE.replace('-', '_')}_uvm uvm_disable_hmm=1" in options


def test_limits_are_written_for_the_boot(host: Host) -> None:
    limits = json.loads(host.file("/etc/gpu-node/gpu-limits.json").content_string)
    assert limits["power_limits_w"] == {"0000:38:00.0": 400}


def test_the_source_is_verified_with_the_distributions_key(host: Host) -> None:
    source = host.file("/etc/apt/sources.list.d/gpu-node-nvidia.sources")
    assert "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg" in source.content_string
    assert oct(source.mode) == oct(0o644)


def test_unattended_upgrades_leave_it_alone(host: Host) -> None:
    names = host.check_output("apt-config dump Unattended-Upgrade::Package-Blacklist").splitlines()
    for package in ("nvidia-", "libnvidia-", "libcuda", "firmware-nvidia-", "linux-image-", "linux-headers-"):
        # once: one role has the list
        assert names.count(f'Unattended-Upgrade::Package-Blacklist:: "{package}";') == 1


@pytest.fixture
def newer_package(host: Host) -> Iterator[str]:
    """A source with a newer package of the driver."""
    host.check_output(
        "mkdir -p /srv/newer/p/DEBIAN && cd /srv/newer && printf 'Package: nvidia-smi\\nVersion: 999.1-1\\n"
        "Architecture: amd64\\nMaintainer: t <t@example.com>\\nDescription: t\\n' >p/DEBIAN/control && "
        "dpkg-deb --build p nvidia-smi_999.1-1_amd64.deb && dpkg-scanpackages . >Packages && "
        "echo 'deb [trusted=yes] file:/srv/newer ./' >/etc/apt/sources.list.d/newer.list && apt-get update"
    )
    yield "nvidia-smi"
    host.check_output("rm -r /etc/apt/sources.list.d/newer.list /srv/newer && apt-get update")


def test_the_hold_survives_an_upgrade(host: Host, newer_package: str) -> None:
    assert f"Inst {newer_package} " not in host.check_output("apt-get -s dist-upgrade")
    host.check_output("apt-mark unhold %s", newer_package)
    try:
        # otherwise the line above would prove nothing
        assert f"Inst {newer_package} " in host.check_output("apt-get -s dist-upgrade")
    finally:
        host.check_output("apt-mark hold %s", newer_package)


def test_a_dry_run_on_the_converged_node_changes_nothing(converge: Converge) -> None:
    play = converge("--check", "--diff")
    assert play.rc == 0, play.output
    assert play.changed == 0, play.output


# --- what is refused -----------------------------------------------------------------------------------------

KEY = str(PROJECT / "tests/unit/plugins/fixtures/openpgp/ed25519.asc")
MIRROR = {
    "nvidia_driver_source": "mirror",
    "nvidia_driver_version": "590.48.01",
    "nvidia_driver_mirror_url": "file:/srv/nowhere/",
    "nvidia_driver_repository_key": KEY,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        pytest.param(
            {"nvidia_driver_kernels": ["6.1.0-999-amd64"]},
            ["headers of kernel 6.1.0-999-amd64", "linux-headers-6.1.0-999-amd64"],
            id="headers",
        ),
        pytest.param(
            {"nvidia_driver_version": "550.99.01"},
            ["nvidia_driver_version 550.99.01 is not in the package source", "535.261.03"],
            id="version",
        ),
        pytest.param({"nvidia_driver_version": "595.71.05"}, ["known to be bad", "Xid 8"], id="bad"),
        pytest.param(
            {**MIRROR, "nvidia_driver_key_fingerprint": "A" * 40}, ["has the fingerprint", "A" * 40], id="key"
        ),
        pytest.param({**MIRROR, "nvidia_driver_repository_key": ""}, ["nvidia_driver_repository_key"], id="no key"),
        pytest.param(
            {"nvidia_driver_power_limits_w": {"gpu0": 400}}, ["'gpu0' is neither a GPU's UUID nor"], id="limit"
        ),
        pytest.param(
            {"nvidia_driver_mok_certificate": ""}, ["only one of nvidia_driver_mok_key and"], id="half a signature"
        ),
    ],
)
def test_what_cannot_work_is_refused_and_changes_nothing(
    host: Host, converge: Converge, variables: dict[str, Any], words: list[str]
) -> None:
    before = everything(host)
    play = converge(**variables)
    assert play.rc == 2, play.output
    assert play.changed == 0, play.output
    for word in ("Nothing was changed.", *words):
        assert word in play.words, play.output
    assert everything(host) == before


# A mirror like NVIDIA's: one flat folder, signed. Its packages are empty, so they are tried and not installed.
MAKE_MIRROR = r"""
set -eu
export GNUPGHOME=/root/mirror-keys DEBIAN_FRONTEND=noninteractive
apt-get install -y --no-install-recommends gpg gpg-agent apt-utils >/dev/null
mkdir -p -m 700 $GNUPGHOME
mkdir -p /srv/mirror && cd /srv/mirror
gpg --batch --quiet --passphrase '' --quick-gen-key 'Mirror <mirror@example.com>' ed25519 sign never
for version in 590.48.01-1 595.58.03-1; do
    for name in nvidia-kernel-open-dkms nvidia-driver-cuda nvidia-modprobe nvidia-persistenced; do
        mkdir -p build/DEBIAN
        printf 'Package: %s\nVersion: %s\nArchitecture: amd64\nMaintainer: m <m@example.com>\nDescription: m\n' \
            $name $version >build/DEBIAN/control
        dpkg-deb --build build ${name}_${version}_amd64.deb >/dev/null
    done
done
rm -r build
apt-ftparchive packages . >Packages
apt-ftparchive release . >Release
gpg --batch --yes --clearsign --output InRelease Release
gpg --armor --export >key.asc
gpg --with-colons --list-keys | awk -F: '/^fpr/ {print $10}' >fingerprint
"""


@pytest.fixture(scope="module")
def mirror(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The variables of a mirror that the node can read."""
    host.check_output(f"bash -c {shlex.quote(MAKE_MIRROR)}")
    key = tmp_path_factory.mktemp("mirror") / "key.asc"
    key.write_text(host.file("/srv/mirror/key.asc").content_string)
    yield {
        "nvidia_driver_source": "mirror",
        "nvidia_driver_version": "590.48.01",
        "nvidia_driver_mirror_url": "file:/srv/mirror/",
        "nvidia_driver_repository_key": str(key),
        "nvidia_driver_key_fingerprint": host.file("/srv/mirror/fingerprint").content_string.strip(),
    }
    host.check_output("rm -r /srv/mirror /root/mirror-keys")


@pytest.mark.full
def test_a_signed_mirror_is_taken_in_the_exact_version(host: Host, converge: Converge, mirror: dict[str, Any]) -> None:
    before = everything(host)
    play = converge("--check", "--diff", **mirror)
    assert play.rc == 0, play.output
    for word in (
        "nvidia-kernel-open-dkms=590.48.01-1",
        "nvidia-driver-cuda=590.48.01-1",
        "Signed-By: /etc/apt/keyrings/gpu-node-nvidia.asc",
        "Pin: version 590.48.01*",
    ):
        assert word in play.words, play.output
    assert everything(host) == before


@pytest.mark.full
def test_a_version_that_the_mirror_lacks_is_refused_with_what_it_has(
    converge: Converge, mirror: dict[str, Any]
) -> None:
    play = converge(**{**mirror, "nvidia_driver_version": "590.44.01"})
    assert play.rc == 2, play.output
    assert "590.44.01 is not in the package source" in play.words, play.output
    assert "595.58.03, 590.48.01" in play.words, play.output


@pytest.mark.full
def test_a_mirror_that_another_key_signed_is_refused(host: Host, converge: Converge, mirror: dict[str, Any]) -> None:
    before = everything(host)
    other = {
        "nvidia_driver_repository_key": KEY,
        # what gpg --show-keys says of it
        "nvidia_driver_key_fingerprint": "C2924BF071DA18244FE3B81E6F13B23E11B83E56",
    }
    play = converge(**{**mirror, **other})
    assert play.rc == 2, play.output
    assert "the package source cannot be read" in play.words, play.output
    assert everything(host) == before


@pytest.mark.full
def test_a_driver_that_is_only_verified_is_told_and_left(host: Host, converge: Converge) -> None:
    before = everything(host)
    play = converge(nvidia_driver_manage=False)
    assert play.rc == 0, play.output
    assert play.changed == 0, play.output
    version = installed_version(host)
    assert f"found packages {version}, loaded none, libraries {version}" in play.words, play.output
    assert "Nothing would have been installed; nvidia_driver_manage is false" in play.words, play.output
    play = converge(nvidia_driver_manage=False, nvidia_driver_version="550.163.01")
    assert play.rc == 0, play.output
    assert f"wanted 550.163.01. Would have installed it from distribution for {KERNEL}" in play.words, play.output
    assert everything(host) == before


def interrupt(host: Host) -> None:
    """Leave a package half installed."""
    host.check_output(
        "cd /root && apt-get download nvidia-smi && dpkg --unpack nvidia-smi_*.deb && rm nvidia-smi_*.deb"
    )
    assert status(host) == "unpacked"


def status(host: Host) -> str:
    return str(host.check_output("dpkg-query -W -f '${db:Status-Status}' nvidia-smi"))


def test_an_interrupted_installation_is_continued(host: Host, converge: Converge) -> None:
    interrupt(host)
    play = converge()
    assert play.rc == 0, play.output
    assert status(host) == "installed"


@pytest.mark.full
def test_who_holds_apts_lock_too_long_is_told_and_the_next_run_waits(
    host: Host, converge: Converge, apt_lock: Callable[[int], int]
) -> None:
    interrupt(host)
    pid = apt_lock(600)
    play = converge(nvidia_driver_apt_lock_timeout_s=5)
    assert play.rc == 2, play.output
    assert f"Process {pid} (/usr/bin/python3 -c import fcntl" in play.words, play.output
    assert "holds apt's lock: let it end, or stop it." in play.words, play.output
    assert status(host) == "unpacked"
    apt_lock(90)
    play = converge()
    assert play.rc == 0, play.output
    assert status(host) == "installed"


def test_a_build_without_headers_is_told_with_what_dkms_says(host: Host, converge: Converge) -> None:
    common = OTHER_KERNEL.replace("amd64", "common")
    hook = "/etc/kernel/header_postinst.d/dkms"
    # without the hook that builds at once, which takes minutes
    host.check_output("chmod -x %s && apt-get install -y linux-headers-%s && chmod +x %s", hook, OTHER_KERNEL, hook)
    host.check_output("rm /lib/modules/%s/build", OTHER_KERNEL)
    try:
        play = converge(nvidia_driver_kernels=[KERNEL, OTHER_KERNEL])
        assert play.rc == 2, play.output
        for word in (
            f"DKMS did not install the NVIDIA module {installed_version(host)} for {OTHER_KERNEL} (state `added`)",
            f"kernel headers for kernel {OTHER_KERNEL} cannot be found",
            "`installed` is needed",
        ):
            assert word in play.words, play.output
        # Line by line, as DKMS said it (before it, Ansible shows the task's own source).
        assert "\\n" not in play.output.partition("fatal: ")[2], play.output
        # what was there before still is
        assert f", {KERNEL}, x86_64: installed" in host.check_output("dkms status")
    finally:
        host.check_output("apt-get purge -y linux-headers-%s linux-headers-%s", OTHER_KERNEL, common)
    play = converge()
    assert play.rc == 0, play.output
    assert play.changed == 0, play.output
