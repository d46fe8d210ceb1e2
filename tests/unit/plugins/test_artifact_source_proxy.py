"""The module `artifact_source` takes the node's way out, whose password no command line shows."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.serving.gpu_node.plugins.modules import artifact_source

from tests.unit.plugins.module_runner import run_module

HUB = {"type": "hub", "repository": "owner/name", "revision": "a" * 40}


class Proxy(http.server.BaseHTTPRequestHandler):
    """Refuses everything, and keeps what it was asked for and with whose password."""

    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Proxy-Authorization", "")))
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    Proxy.seen = []
    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
    for name in set(os.environ) - set(before):
        del os.environ[name]


def ask(folder: Path, text: str | None) -> str:
    file = folder / "proxy.env"
    if text is not None:
        file.write_text(text)
    arguments = {"source": HUB, "endpoint": "http://hub.invalid", "proxy_file": str(file), "timeout": 2}
    return str(run_module(artifact_source.main, arguments)["msg"])


def test_the_nodes_proxy_is_asked(proxy: http.server.HTTPServer, tmp_path: Path) -> None:
    address = f"http://user:secret@127.0.0.1:{proxy.server_address[1]}"
    message = ask(tmp_path, f"http_proxy={address}\nhttps_proxy={address}\nno_proxy=localhost\n")
    assert "answered 404" in message
    assert "secret" not in message
    ((path, authorization),) = Proxy.seen
    assert path.startswith("http://hub.invalid/api/models/owner/name/revision/aaaa")
    assert authorization.startswith("Basic ")


def test_hosts_that_need_no_proxy_are_asked_themselves(
    proxy: http.server.HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_source, "_PAUSES", ())
    address = f"http://127.0.0.1:{proxy.server_address[1]}"
    message = ask(tmp_path, f"http_proxy={address}\nno_proxy=hub.invalid\n")
    assert "cannot be reached" in message
    assert Proxy.seen == []


def test_without_that_file_nothing_is_between(
    proxy: http.server.HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_source, "_PAUSES", ())
    assert "cannot be reached" in ask(tmp_path, None)
    assert Proxy.seen == []
