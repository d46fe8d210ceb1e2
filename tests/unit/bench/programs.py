"""Programs that stand in for podman and nvidia-smi on PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Runs what the container would run, with a package `vllm` of the test's and the folders where they really are.
_PODMAN = """#!{python}
import os, re, sys
argv = sys.argv[1:]
open({log!r}, "a").write(repr(argv) + "\\n")
if "rm" in argv:
    sys.exit(0)
env = open(argv[argv.index("--env-file") + 1]).read()
os.environ["OPENAI_API_KEY"] = env.split("=", 1)[1].strip()
bench = next(value.removesuffix(":/bench") for value in argv if value.endswith(":/bench"))
levels = next(value.removesuffix(":/levels.py:ro") for value in argv if value.endswith(":/levels.py:ro"))
os.environ["BENCH"] = bench
os.environ["PYTHONPATH"] = {vllm!r}
os.execv(sys.executable, [sys.executable, "-u", levels, bench + "/jobs.json"])
"""

# `vllm bench serve`, as far as its result goes: it asks for real, one request after the other.
_VLLM = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit

def main():
    argv = sys.argv[1:]
    get = lambda name: argv[argv.index(name) + 1]
    here = lambda path: path.replace("/bench", os.environ["BENCH"])
    print("some line of the program")
    prompts = [one["conversations"][0]["value"] for one in json.load(open(here(get("--dataset-path"))))]
    count, warm, tokens = int(get("--num-prompts")), int(get("--num-warmups")), int(get("--sharegpt-output-len"))
    url = urlsplit(get("--base-url"))
    def ask(prompt):
        connection = http.client.HTTPConnection(url.hostname, url.port)
        body = {{"model": get("--model"), "messages": [{{"role": "user", "content": prompt}}], "max_tokens": tokens,
                "stream": True, "ignore_eos": "--ignore-eos" in argv, **json.loads(get("--extra-body"))}}
        connection.request("POST", "/v1/chat/completions", json.dumps(body),
                           {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}})
        text = connection.getresponse().read().decode()
        return next(json.loads(line[6:])["usage"] for line in text.splitlines() if '"usage"' in line)
    for _ in range(warm):
        ask(prompts[0])
    begin = time.perf_counter()
    usages = [ask(prompt) for prompt in prompts[:count]]
    seconds = time.perf_counter() - begin
    result = {{
        "duration": seconds, "completed": count, "failed": 0, "errors": [""] * count,
        "output_throughput": sum(one["completion_tokens"] for one in usages) / seconds,
        "output_lens": [one["completion_tokens"] for one in usages],
        "input_lens": [one["prompt_tokens"] for one in usages],
        "ttfts": [0.01 + 0.001 * at for at in range(count)], "median_tpot_ms": 2.0, "argv": argv,
    }}
    {change}
    json.dump(result, open(os.path.join(here(get("--result-dir")), get("--result-filename")), "w"))
"""


def on_path(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str = "") -> Path:
    """Put podman on PATH; `change`: a statement on `result`. Returns the file with its calls."""
    package = tmp_path / "vllm-package/vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(_VLLM.format(change=change or "pass"))
    log = tmp_path / "podman.log"
    text = _PODMAN.format(python=sys.executable, log=str(log), vllm=str(tmp_path / "vllm-package"))
    on_path(tmp_path / "bin", "podman", text, monkeypatch)
    return log


def nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str, knows_events: bool = True, dies: bool = False
) -> None:
    """Put nvidia-smi on PATH: each look prints these lines. An old one does not know clocks_event_reasons.

    dies: whether it ends by itself after its first look.
    """
    shown = "\\n".join(lines)
    refuse = (
        "" if knows_events else 'case "$*" in *clocks_event*) echo "Field is not a valid field" >&2; exit 2;; esac\n'
    )
    script = f"#!/bin/sh\n{refuse}printf '{shown}\\n'\ncase \"$*\" in *--loop-ms*) ;; *) exit 0;; esac\n"
    script += "exit 15\n" if dies else ""
    on_path(tmp_path / "bin", "nvidia-smi", script + f"while sleep 0.05; do printf '{shown}\\n'; done\n", monkeypatch)
