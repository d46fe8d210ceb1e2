#!/usr/bin/env python3
"""The end of `make demo`: the replica table, one answer through the balancer, and how to ask more."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

STATE = Path(__file__).resolve().parents[2] / ".demo"
URL = "http://127.0.0.1:8080"
SSH = ["ssh", "-F", str(STATE / "ssh_config"), "-p", "2222", "127.0.0.1"]
QUESTION = "Say hello to the two replicas."


class AskError(Exception):
    """One line for the person who called."""


def call(path: str, key: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(URL + path, headers={"Authorization": f"Bearer {key}"})
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)
    except urllib.error.HTTPError as err:
        raise AskError(f"{URL}{path} answered {err.code}: {err.read(500).decode(errors='replace').strip()}") from err
    except (OSError, ValueError) as err:
        raise AskError(f"{URL}{path} gave no answer: {err}; is the demo node up (make demo)?") from err


def ask(key: str) -> str:
    model = call("/v1/models", key)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    start = time.monotonic()
    answer = call("/v1/chat/completions", key, body)
    elapsed = time.monotonic() - start
    tokens = answer["usage"]["completion_tokens"]
    text = " ".join((answer["choices"][0]["message"]["content"] or "").split())
    print(
        f"\n> {QUESTION}\n{text[:300]}\n(the tiny model has random weights: the words mean nothing, the path is real)"
    )
    print(f"{tokens} tokens in {elapsed:.2f} s: {tokens / elapsed:.0f} tokens/s, prompt included")
    return str(model)


def curl_line(model: str) -> str:
    """Ask more, with the key kept out of every command line."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64})
    return (
        f"curl {URL}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  -H @<(sed 's/^/Authorization: Bearer /' {STATE.name}/client-key) \\\n"
        f"  -d '{body}'"
    )


def main() -> int:
    try:
        status = subprocess.run([*SSH, "gpu-node", "status"], stdin=subprocess.DEVNULL, check=False)
        if status.returncode != 0:
            raise AskError(f"`gpu-node status` on the demo node failed with {status.returncode}")
        model = ask((STATE / "client-key").read_text().strip())
    except (AskError, OSError) as err:
        print(f"demo: error: {err}", file=sys.stderr)
        return 1
    print(f"\nAsk more (bash, from this folder):\n{curl_line(model)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
