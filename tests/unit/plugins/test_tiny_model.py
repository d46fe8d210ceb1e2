"""The generated model: the same bytes for a seed, and files that fit together."""

from __future__ import annotations

import hashlib
import json
import struct
from math import prod
from typing import Any

import pytest
from ansible_collections.serving.gpu_node.plugins.module_utils.tiny_model import (
    CONFIG,
    SPECIAL_TOKENS,
    VOCABULARY,
    model_files,
    tensor_shapes,
    tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# Of seed 0. Changes together with GENERATOR_VERSION only: nodes have it on disk under this name.
WEIGHTS_SHA256 = "bb8a8de6c30c31cd93208b95b6996134cb10d29ee315a4dc3918afa8f74c6bf1"


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return model_files(0)


def header_and_data(data: bytes) -> tuple[dict[str, Any], bytes]:
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_a_seed_gives_the_same_bytes_everywhere(files: dict[str, bytes]) -> None:
    assert hashlib.sha256(files["model.safetensors"]).hexdigest() == WEIGHTS_SHA256
    other = model_files(1)
    assert {name for name in files if files[name] != other[name]} == {"model.safetensors"}


def test_the_weights_lie_where_their_header_says(files: dict[str, bytes]) -> None:
    header, data = header_and_data(files["model.safetensors"])
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == tensor_shapes()
    end = 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert (start, stop - start) == (end, 2 * prod(entry["shape"])), name
        end = stop
    assert end == len(data)
    # readers map the file: the data begins at a multiple of 8
    assert (len(files["model.safetensors"]) - len(data)) % 8 == 0


def test_norms_are_one_and_weights_are_small_and_differ(files: dict[str, bytes]) -> None:
    header, data = header_and_data(files["model.safetensors"])

    def values(name: str) -> list[float]:
        start, stop = header[name]["data_offsets"]
        return [struct.unpack("<f", b"\0\0" + data[at : at + 2])[0] for at in range(start, stop, 2)]

    assert set(values("model.norm.weight")) == {1.0}
    gate = values("model.layers.1.mlp.gate.weight")
    assert len(set(gate)) > 100
    assert max(map(abs, gate)) < 1


def test_the_configuration_is_of_the_shape_that_the_engine_runs(files: dict[str, bytes]) -> None:
    config = json.loads(files["config.json"])
    assert config == CONFIG
    assert (config["architectures"], config["kv_lora_rank"]) == (["DeepseekV3ForCausalLM"], 512)
    assert config["qk_rope_head_dim"] == 64
    assert config["vocab_size"] == VOCABULARY


def test_the_vocabulary_is_complete() -> None:
    model = tokenizer()["model"]
    numbers = model["vocab"]
    assert sorted(numbers.values()) == list(range(VOCABULARY))
    assert [numbers[token] for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    symbols = [word for word in numbers if len(word) == 1]
    assert len(symbols) == 256
    for merge in model["merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(numbers)


def test_the_special_tokens_are_those_of_configuration_and_template(files: dict[str, bytes]) -> None:
    config = json.loads(files["tokenizer_config.json"])
    for name in ("bos", "eos", "pad"):
        assert SPECIAL_TOKENS[CONFIG[f"{name}_token_id"]] == config[f"{name}_token"]
    for role in ("user", "assistant", "system"):
        assert f"<|{role}|>" in SPECIAL_TOKENS
    assert "<|assistant|>" in config["chat_template"]


def decode(numbers: list[int]) -> bytes:
    """What byte-level BPE makes of token numbers, by the vocabulary alone."""
    model = tokenizer()["model"]
    words = {number: word for word, number in model["vocab"].items()}
    symbols = {symbol: value for value, symbol in enumerate(words[len(SPECIAL_TOKENS) + n] for n in range(256))}
    return bytes(symbols[symbol] for number in numbers for symbol in words[number])


def test_every_byte_has_its_symbol() -> None:
    first = len(SPECIAL_TOKENS)
    assert decode([first + value for value in range(256)]) == bytes(range(256))
    words = list(tokenizer()["model"]["vocab"])
    # the letters that everyone reads are themselves, and a space is the symbol that byte-level BPE gives it
    assert (words[first + ord("a")], words[first + ord(" ")]) == ("a", "\u0120")


@settings(max_examples=50)
@given(st.text())
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer()))
    assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text
