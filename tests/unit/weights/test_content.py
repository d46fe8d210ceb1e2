"""What can be told wrong about files without knowing what they should be: cut shards, pointers, indexes with gaps."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from gpu_node_weights.content import content_problems
from gpu_node_weights.progress import Rate, progress_line, size_text, time_text


def safetensors(size: int = 64) -> bytes:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def problems(tmp_path: Path, files: dict[str, bytes]) -> list[str]:
    made = {}
    for name, data in files.items():
        made[name] = tmp_path / name
        made[name].parent.mkdir(parents=True, exist_ok=True)
        made[name].write_bytes(data)
    return content_problems(made)


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5000000000\n"


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": safetensors(), "config.json": b"{}", "notes.txt": b""},
        {"model.safetensors": safetensors(0)},
        {"model.safetensors.index.json": INDEX, **{f"model-{number}.safetensors": safetensors() for number in (1, 2)}},
        {f"deep/{name}": data for name, data in [("m.safetensors.index.json", INDEX)]}
        | {f"deep/model-{number}.safetensors": safetensors() for number in (1, 2)},
    ],
)
def test_what_is_in_order(tmp_path: Path, files: dict[str, bytes]) -> None:
    assert problems(tmp_path, files) == []


@pytest.mark.parametrize("cut", [1, 20, 64, 65, 120])
def test_a_shard_that_was_cut_short(tmp_path: Path, cut: int) -> None:
    whole = safetensors()
    found = problems(tmp_path, {"model-1.safetensors": whole[:-cut]})
    assert len(found) == 1
    assert found[0].startswith(f"model-1.safetensors has {len(whole) - cut} bytes")
    assert "cut short" in found[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "has 0 bytes and no safetensors header"),
        (b"\0" * 4096, "no safetensors header"),
        (b"\xff" * 4096, "no safetensors header"),
        (struct.pack("<Q", 5) + b"nojsn" + bytes(9), "a safetensors header that cannot be read"),
        (struct.pack("<Q", 2) + b"[]", "a safetensors header that cannot be read"),
        (safetensors() + b"x", "its header lists"),
        (POINTER, "is a pointer of git LFS, not the file itself; fetch it with `git lfs pull`"),
    ],
)
def test_what_is_no_shard(tmp_path: Path, data: bytes, words: str) -> None:
    found = problems(tmp_path, {"model.safetensors": data})
    assert len(found) == 1 and words in found[0]


def test_a_pointer_in_place_of_any_file(tmp_path: Path) -> None:
    assert problems(tmp_path, {"tokenizer.model": POINTER}) == [
        "tokenizer.model is a pointer of git LFS, not the file itself; fetch it with `git lfs pull`"
    ]


def test_an_index_with_a_gap(tmp_path: Path) -> None:
    files = {"model.safetensors.index.json": INDEX, "model-1.safetensors": safetensors()}
    assert problems(tmp_path, files) == [
        "model.safetensors.index.json lists files that are not there: model-2.safetensors; look at include and exclude"
    ]
    assert "is no index" in problems(tmp_path, {"model.safetensors.index.json": b"[]"})[0]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (130.2e9, "130.2 GB"),
        (510.3e9, "510.3 GB"),
        (2e12, "2.0 TB"),
    ],
)
def test_sizes(count: float, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (119, "119 s"), (900, "15 min"), (11100, "3 h 5 min")])
def test_durations(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_a_line_of_progress() -> None:
    line = progress_line("deepseek", (12, 48), (130_200_000_000, 510_300_000_000), 412e6)
    assert line == "deepseek: 12 of 48 files, 130.2 of 510.3 GB, 412.0 MB/s, 15 min left"
    assert progress_line("m", (0, 2), (0, 5_000_000), 0.0) == "m: 0 of 2 files, 0 bytes of 5.0 MB, 0 bytes/s"
    assert progress_line("m", (0, 2), (900, 5_000_000), 0.0).startswith("m: 0 of 2 files, 900 bytes of 5.0 MB")


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(10)
    assert rate.per_second() == 0
    for second in range(60):
        rate.add(100 * second if second < 30 else 3000 + 500 * (second - 30), now=float(second))
    assert rate.per_second() == pytest.approx(500)
    # fewer bytes than before (a file was thrown away) are no negative rate
    rate.add(0, now=60.0)
    assert rate.per_second() == 0
