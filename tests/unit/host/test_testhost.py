"""What testhost.py takes from the machine, decided without touching it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest
import testhost
from hypothesis import given
from hypothesis import strategies as st
from testhost import AptSource, Machine, PipSettings

DEB822 = """\
# the distribution
Types: deb
# an old mirror
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb deb-src
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: https://vendor.example/node
Suites: nodistro
Components: main
Signed-By: /usr/share/keyrings/vendor.gpg

Types: deb
URIs: https://vendor.example/other
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm-backports bookworm
Components: main
"""


def test_only_the_distributions_own_sources_are_taken() -> None:
    assert testhost.select_sources(testhost.parse_deb822(DEB822), "bookworm", "bookworm") == [
        AptSource("http://mirror.example/debian", "bookworm", ("main",)),
        AptSource("http://mirror.example/debian", "bookworm-updates", ("main",)),
        AptSource("http://mirror.example/debian-security", "bookworm-security", ("main",)),
    ]


def test_suites_follow_the_node_release_when_the_machine_is_newer() -> None:
    stanzas = [{"types": "deb", "uris": "http://m/debian", "suites": "trixie trixie-updates", "components": "main"}]
    assert [source.suite for source in testhost.select_sources(stanzas, "trixie", "bookworm")] == [
        "bookworm",
        "bookworm-updates",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("deb http://m/debian bookworm main contrib", "deb http://m/debian bookworm main"),
        (
            "deb [ arch=amd64 trusted=yes ] http://m/debian bookworm main # ours",
            "deb [trusted=yes] http://m/debian bookworm main",
        ),
        ("deb [signed-by=/etc/apt/vendor.gpg] http://m/debian bookworm main", None),
        ("deb https://vendor.example/linux bookworm stable", None),
        ("deb-src http://m/debian bookworm main", None),
        ("# deb http://m/debian bookworm main", None),
        ("", None),
    ],
)
def test_list_lines(line: str, expected: str | None) -> None:
    stanza = testhost.parse_list_line(line)
    found = testhost.select_sources([stanza] if stanza else [], "bookworm", "bookworm")
    assert [source.line() for source in found] == ([expected] if expected else [])


def test_source_files_of_both_kinds_are_read_and_disabled_ones_are_not(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text("deb http://a/debian bookworm main\n")
    (parts / "b.sources").write_text("Types: deb\nURIs: http://b/debian\nSuites: bookworm\nComponents: main\n")
    (parts / "c.list.disabled").write_text("deb http://c/debian bookworm main\n")
    found = testhost.select_sources(testhost.read_apt_stanzas(tmp_path), "bookworm", "bookworm")
    assert [source.uri for source in found] == ["http://a/debian", "http://b/debian"]


@given(st.text())
def test_any_apt_text_gives_a_result(text: str) -> None:
    testhost.select_sources(testhost.parse_deb822(text), "bookworm", "bookworm")
    for line in text.splitlines():
        testhost.parse_list_line(line)


def test_apt_conf_keeps_how_mirrors_are_reached_and_nothing_else() -> None:
    dump = (
        'APT::Architecture "amd64";\n'
        'Acquire::http::Proxy "http://proxy.example:3128";\n'
        'Acquire::https::CAInfo "/etc/ssl/certs/ca-certificates.crt";\n'
        'Acquire::http::Timeout "";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::GzipIndexes "true";\n'
    )
    assert testhost.select_apt_conf(dump, {"https_proxy": "http://env.example:1", "http_proxy": "http://ignored"}) == [
        'Acquire::http::Proxy "http://proxy.example:3128";',
        'Acquire::https::CAInfo "/etc/ssl/certs/ca-certificates.crt";',
        'Acquire::Check-Valid-Until "false";',
        'Acquire::https::Proxy "http://env.example:1";',
    ]


def test_pip_config_environment_wins_and_noise_is_ignored() -> None:
    listing = (
        ":env:.default-timeout='180'\n"
        ":env:.index-url='https://env.example/simple'\n"
        "global.index-url='https://file.example/simple'\n"
        "global.cert='/etc/ssl/certs/ca-certificates.crt'\n"
        "not a setting\n"
        "global.broken='unterminated\n"
    )
    config = testhost.parse_pip_config(listing)
    assert config["index-url"] == "https://env.example/simple"
    assert config["timeout"] == "180"
    assert config["cert"] == "/etc/ssl/certs/ca-certificates.crt"
    assert "broken" not in config


@given(st.text())
def test_any_pip_listing_gives_a_result(text: str) -> None:
    testhost.select_pip_settings(testhost.parse_pip_config(text))


def test_pip_settings_for_a_node(tmp_path: Path) -> None:
    cert = tmp_path / "corporate.pem"
    cert.write_text("certificate")
    settings = testhost.select_pip_settings(
        {
            "index-url": "https://index.example/simple",
            "extra-index-url": "file:///srv/simple https://more.example/simple",
            "find-links": f"{tmp_path} /nowhere https://links.example/",
            "constraint": "/etc/constraints.txt",
            "timeout": "30",
            "cert": str(cert),
        }
    )
    assert settings.conf == (
        "[global]\n"
        "index-url = https://index.example/simple\n"
        "extra-index-url = https://more.example/simple\n"
        "timeout = 30\n"
        "cert = /etc/ssl/certs/ca-certificates.crt\n"
        "find-links = /srv/wheels https://links.example/\n"
    )
    assert settings.wheel_dirs == (str(tmp_path),)
    assert settings.ca_file == str(cert)


def test_no_pip_settings_no_file() -> None:
    assert testhost.select_pip_settings({}) == PipSettings("", (), None)


MACHINE = Machine(
    sources=(AptSource("http://m/debian", "bookworm", ("main",)),),
    apt_conf=('Acquire::Check-Date "false";',),
    certificates=(("local.crt", b"one"),),
    pip=PipSettings("[global]\ntimeout = 1\n", (), None),
)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(MACHINE, sources=(AptSource("http://other/debian", "bookworm", ("main",)),)),
        dataclasses.replace(MACHINE, apt_conf=()),
        dataclasses.replace(MACHINE, certificates=(("local.crt", b"two"),)),
        dataclasses.replace(MACHINE, pip=PipSettings("[global]\ntimeout = 2\n", (), None)),
    ],
)
def test_every_input_of_the_image_changes_its_key(other: Machine) -> None:
    assert testhost.image_key(other) != testhost.image_key(MACHINE)


def test_the_key_is_the_same_in_another_process_and_without_the_wheel_folders() -> None:
    wheels = dataclasses.replace(MACHINE, pip=dataclasses.replace(MACHINE.pip, wheel_dirs=("/some/folder",)))
    assert testhost.image_key(wheels) == testhost.image_key(MACHINE)


@pytest.mark.parametrize("text", ["8080", "0:1", "1:70000", "127.0.0.1:1:2", "a:b", ""])
def test_bad_publish_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="HOST:CONTAINER"):
        testhost.parse_publish(text)


@pytest.mark.parametrize("text", ["relative:/dst", "/src", "/src:dst", "/a:/b:rw"])
def test_bad_volume_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="absolute"):
        testhost.parse_volume(text)


@pytest.mark.parametrize("text", ["", "-x", "a b", "../a"])
def test_bad_name_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="node name"):
        testhost.parse_name(text)


def test_a_node_publishes_on_loopback_alone_and_gets_wheel_folders_read_only() -> None:
    spec = testhost.NodeSpec("n", ("2222:22",), ("/a:/b:ro",))
    argv = testhost.run_argv(spec, "image:key", ["/wheels", "/more"])
    assert [argv[i + 1] for i, arg in enumerate(argv) if arg == "-p"] == ["127.0.0.1:2222:22"]
    volumes = [argv[i + 1] for i, arg in enumerate(argv) if arg == "-v"]
    assert volumes[1:] == [
        "n-containers:/var/lib/containers",
        "/a:/b:ro",
        "/wheels:/srv/wheels:ro",
        "/more:/srv/wheels-2:ro",
    ]
    assert argv[-2:] == ["image:key", "/lib/systemd/systemd"]


def test_the_order_of_ports_and_volumes_does_not_make_another_node() -> None:
    one = testhost.NodeSpec("n", ("1:1", "2:2"), ("/a:/b", "/c:/d"))
    two = testhost.NodeSpec("n", ("2:2", "1:1"), ("/c:/d", "/a:/b"))
    assert one.fingerprint() == two.fingerprint()


def test_installing_can_be_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTHOST_INSTALL", "no")
    with pytest.raises(testhost.HostError, match="TESTHOST_INSTALL=no forbids to install it: apt-get install docker"):
        testhost.install(["docker.io"], "no Docker engine on this machine")


def test_installing_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESTHOST_INSTALL", raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(testhost.HostError, match="run as root, or install it yourself: apt-get install docker"):
        testhost.install(["docker.io"], "no Docker engine on this machine")


def test_a_pid_file_that_names_another_process_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "docker.pid"
    monkeypatch.setattr(testhost, "DOCKER_PID", pid_file)
    assert testhost.daemon_pid() is None
    pid_file.write_text("1\n")
    assert testhost.daemon_pid() is None
    pid_file.write_text("not a number")
    assert testhost.daemon_pid() is None


def test_a_live_process_is_told_from_a_zombie_and_from_another_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = subprocess.Popen(["sleep", "60"])
    pid_file.write_text(f"{child.pid}\n")
    assert testhost.alive(pid_file, "sleep") == child.pid
    assert testhost.alive(pid_file, "dockerd") is None
    os.kill(child.pid, signal.SIGKILL)
    # wait for its end and leave it a zombie
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert testhost.alive(pid_file, "sleep") is None
    child.wait()


def test_a_failed_command_says_which_and_how() -> None:
    with pytest.raises(testhost.HostError, match="`sh -c 'echo why >&2; exit 3'` failed with 3: why"):
        testhost.checked(["sh", "-c", "echo why >&2; exit 3"])
    with pytest.raises(testhost.HostError, match="gave no result within"):
        testhost.checked(["sleep", "5"], timeout=0.1)


@pytest.mark.parametrize(
    ("running", "up"),
    [(["vllm-replica@0.service"], True), (["vllm-replica@0.service", "ssh.service"], False), ([], False)],
)
def test_a_node_whose_replicas_still_load_is_up(running: list[str], up: bool) -> None:
    jobs = "".join(f"{number} {unit} start running\n" for number, unit in enumerate(running, 7))
    assert testhost.waits_for_replicas(f"1 multi-user.target start waiting\n{jobs}") is up
