"""The module `fetch_text`: through the proxy that it is given, and never with its password in what it says."""

from __future__ import annotations

import base64
import http.server
import os
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
from ansible_collections.serving.gpu_node.plugins.modules import fetch_text

from tests.unit.plugins.module_runner import run_module

PASSWORD = "s3cret"


class Proxy(http.server.BaseHTTPRequestHandler):
    """Has one text, and keeps who asked."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Proxy-Authorization", ""))
        found = self.path.endswith("/key")
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(b"the key")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ})
    Proxy.seen.clear()
    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://site:{PASSWORD}@127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_text_comes_through_the_proxy(proxy: str) -> None:
    answer = run_module(fetch_text.main, {"url": "http://keys.invalid/key", "proxy": proxy, "timeout": 5}, check=True)
    assert answer["content"] == "the key"
    assert Proxy.seen == ["Basic " + base64.b64encode(f"site:{PASSWORD}".encode()).decode()]
    assert PASSWORD not in str(answer)


@pytest.mark.parametrize("path", ["http://keys.invalid/none", "https://keys.invalid/key"])
def test_what_cannot_be_fetched_is_said_without_the_password(proxy: str, path: str) -> None:
    answer = run_module(fetch_text.main, {"url": path, "proxy": proxy, "timeout": 5})
    assert answer["msg"].startswith(f"{path} cannot be fetched: ")
    assert "package_access_proxy" in answer["msg"]
    assert PASSWORD not in str(answer)
