"""Places where the engines' key may have got to: a real process's command line, a cache's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_node_accept import secrecy

KEY = "sk-test-0000"


def test_a_command_line_that_has_it_is_named_and_the_key_is_not_said() -> None:
    """Cases VLLM-16."""
    process = subprocess.Popen([sys.executable, "-c", "input()", "--api-key", KEY], stdin=subprocess.PIPE)
    try:
        found = secrecy.key_kept(KEY, secrecy.command_lines())
    finally:
        process.communicate(b"\n")
    assert (found.verdict, found.seen) == ("fail", f"it is in the command line of process {process.pid}")
    assert KEY not in found.wanted + found.remedy


def test_without_it_all_places_are_counted() -> None:
    found = secrecy.key_kept(KEY, [("a", b"x"), ("b", b"sk-test-000")])
    assert (found.verdict, found.seen) == ("pass", "2 places looked at")


def test_of_many_places_three_are_named() -> None:
    found = secrecy.key_kept(KEY, [(str(number), KEY.encode()) for number in range(5)])
    assert found.seen == "it is in 0, 1, 2 and 2 more"


def test_a_caches_texts(tmp_path: Path) -> None:
    """Cases VLLM-15: a file of JSON below the cache of compiled code."""
    deep = tmp_path / "0/vllm/torch_compile_cache/ab12/rank_0_0"
    deep.mkdir(parents=True)
    factors = deep / "cache_key_factors.json"
    factors.write_text(f'{{"env": {{"VLLM_API_KEY": "{KEY}"}}}}')
    # Neither another replica's, nor compiled code, nor a link that leads nowhere.
    (tmp_path / "1").mkdir()
    (tmp_path / "1/cache_key_factors.json").write_text(KEY)
    (deep / "kernel.so").write_bytes(KEY.encode() + bytes(secrecy.TEXT_BYTES))
    os.symlink("nowhere", deep / "dangling")
    texts = dict(secrecy.cached_texts(0, tmp_path))
    assert list(texts) == [str(factors)]
    assert secrecy.key_kept(KEY, texts.items()).seen == f"it is in {factors}"
    assert not list(secrecy.cached_texts(2, tmp_path))
