# Copyright: the gpu_node authors
# MIT License (see LICENSE)
"""A tiny model with DeepSeek-V3's architecture (MLA and MoE) and random weights, for serving without a GPU.

The same seed gives the same bytes everywhere, so the artifact has one digest. It needs nothing but Python: a node that
is being set up has no machine-learning packages.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

# Part of the artifact's source: raised whenever the bytes change.
GENERATOR_VERSION = 1
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")
VOCABULARY = 512

# kv_lora_rank 512 and qk_rope_head_dim 64 are the only MLA shape that vLLM's AVX2 kernel was compiled for.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _byte_symbols() -> list[str]:
    """Return the printable symbol that byte-level BPE uses for each of the 256 bytes (the GPT-2 convention)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {value: chr(value) for value in printable}
    spare = 256
    for value in range(256):
        if value not in symbols:
            symbols[value] = chr(spare)
            spare += 1
    return [symbols[value] for value in range(256)]


def tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE tokenizer of :data:`VOCABULARY` tokens in the ``tokenizer.json`` format."""
    symbols = _byte_symbols()
    space = symbols[32]
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pairs = [(space, letter) for letter in letters] + [(a, b) for a in letters for b in letters]
    merges = pairs[: VOCABULARY - len(SPECIAL_TOKENS) - len(symbols)]
    words = [*SPECIAL_TOKENS, *symbols, *(a + b for a, b in merges)]
    added = [
        {"id": number, "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for number, token in enumerate(SPECIAL_TOKENS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its checkpoint name."""
    c = CONFIG
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}

    def mlp(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (width, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)

    for layer in range(c["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        attention = f"{base}.self_attn"
        shapes[f"{base}.input_layernorm.weight"] = (hidden,)
        shapes[f"{base}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{attention}.q_a_proj.weight"] = (c["q_lora_rank"], hidden)
        shapes[f"{attention}.q_a_layernorm.weight"] = (c["q_lora_rank"],)
        shapes[f"{attention}.q_b_proj.weight"] = (heads * head, c["q_lora_rank"])
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (c["kv_lora_rank"],)
        shapes[f"{attention}.kv_b_proj.weight"] = (
            heads * (c["qk_nope_head_dim"] + c["v_head_dim"]),
            c["kv_lora_rank"],
        )
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * c["v_head_dim"])
        if layer < c["first_k_dense_replace"]:
            mlp(f"{base}.mlp", c["intermediate_size"])
            continue
        shapes[f"{base}.mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        shapes[f"{base}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        mlp(f"{base}.mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
        for expert in range(c["n_routed_experts"]):
            mlp(f"{base}.mlp.experts.{expert}", c["moe_intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (VOCABULARY, hidden)
    return shapes


def _bfloat16(value: float) -> bytes:
    """Return the two bytes of a number cut to bfloat16: the upper half of its float32."""
    return struct.pack("<f", value)[2:]


def weights(seed: int) -> bytes:
    """Return a ``safetensors`` file of bfloat16 weights: norms of one, the others uniform and scaled by their width."""
    generator = random.Random(seed)
    # 4,096 levels are enough for random weights, and drawing bytes from a table is fast in plain Python.
    levels = [_bfloat16((index - 2047.5) / 2048) for index in range(4096)]
    header: dict[str, Any] = {}
    data = bytearray()
    for name, shape in tensor_shapes().items():
        count = 1
        for size in shape:
            count *= size
        start = len(data)
        if "norm" in name:
            data += _bfloat16(1.0) * count
        elif len(shape) == 1:
            data += _bfloat16(0.0) * count
        else:
            scale = (3.0 / shape[-1]) ** 0.5
            scaled = [_bfloat16(struct.unpack("<f", b"\0\0" + level)[0] * scale) for level in levels]
            data += b"".join(generator.choices(scaled, k=count))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def model_files(seed: int) -> dict[str, bytes]:
    """Return the model folder's files by name."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "chat_template": _TEMPLATE,
    }
    documents: dict[str, Any] = {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": config,
    }
    files = {name: (json.dumps(value, indent=1) + "\n").encode() for name, value in documents.items()}
    files["model.safetensors"] = weights(seed)
    return files
