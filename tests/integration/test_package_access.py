"""A site with its own certificate authority, proxy and mirrors."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from nodes import Node

PREPARE = "playbooks/prepare.yml"
PASSWORD = "proxy-pass-7f3a"
# Holds apt's lock as unattended-upgrades does on a machine that was just installed.
HOLD_LOCK = (
    "import fcntl, time; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); time.sleep(20)"
)
TRY_LOCK = "import fcntl; f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"


@pytest.fixture(scope="module")
def bare(node: Callable[[str], Node]) -> Node:
    return node("access")


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "site-ca.crt"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=site test CA"]
    subprocess.run([*argv, "-keyout", str(tmp_path / "key"), "-out", str(path)], check=True, capture_output=True)
    return path


def test_the_sites_ways_are_used_and_its_secrets_kept(bare: Node, certificate: Path) -> None:
    bare.ssh("systemd-run --quiet --unit proxy /usr/bin/python3 -m http.server --bind 127.0.0.1 3128")
    extra = {
        "package_access_ca_certificates": [str(certificate)],
        "package_access_proxy": f"http://site:{PASSWORD}@127.0.0.1:3128",
        "package_access_pip_config": {"index-url": "https://pypi.example/simple"},
    }
    play = bare.playbook("-vvv", "--diff", extra=extra, playbook=PREPARE)
    # The stand-in for a proxy refuses everything, which shows that apt went to it.
    assert play.rc == 2
    assert "GET http" in bare.ssh("journalctl -u proxy -o cat")
    assert PASSWORD not in play.output
    assert bare.run(f"grep -rl {PASSWORD} /etc --include='*' -s").stdout.split() == [
        "/etc/apt/apt.conf.d/90gpu-node-proxy",
        "/etc/gpu-node/proxy.env",
    ]
    for path in ("/etc/apt/apt.conf.d/90gpu-node-proxy", "/etc/gpu-node/proxy.env", "/etc/pip.conf"):
        assert bare.ssh(f"stat -c '%a %U' {path}").strip() == "600 root"
    assert "index-url = https://pypi.example/simple" in bare.ssh("cat /etc/pip.conf")
    text = certificate.read_text().splitlines()[1]
    assert bare.run(f"grep -qF '{text}' /etc/ssl/certs/ca-certificates.crt").returncode == 0


@pytest.mark.full
def test_without_the_proxy_and_with_apt_locked_for_a_while_the_node_is_prepared(bare: Node) -> None:
    sources = bare.ssh("cat /etc/apt/sources.list")
    bare.ssh(f'systemd-run --quiet --unit lock /usr/bin/python3 -c "{HOLD_LOCK}"')
    # Without a lock that really is held, this would test nothing.
    bare.ssh(f'for i in $(seq 50); do python3 -c "{TRY_LOCK}" 2>/dev/null || exit 0; sleep 0.1; done; exit 1')
    extra = {"package_access_apt_sources": "# the site's own\n" + sources}
    first = bare.playbook(extra=extra, playbook=PREPARE)
    assert first.rc == 0, first.tail()
    assert bare.run("ls /etc/apt/apt.conf.d/90gpu-node-proxy /etc/gpu-node/proxy.env").stdout == ""
    assert bare.ssh("head -1 /etc/apt/sources.list").strip() == "# the site's own"
    second = bare.playbook(extra=extra, playbook=PREPARE)
    assert (second.rc, second.changed) == (0, 0), second.tail()
