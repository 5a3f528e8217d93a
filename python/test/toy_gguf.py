# SPDX-License-Identifier: Apache-2.0
"""Writes tiny models with random weights as GGUF files, and LoRA adapters for them: each byte of a text is a token."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

EMBD, HEADS, FFN = 64, 2, 128
LAYERS = {"llama": 2, "gemma3": 6}
SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = SPECIAL + [f"<0x{i:02X}>" for i in range(256)]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    assert isinstance(value, list)
    kind = {str: STRING, int: I32, float: F32}[type(value[0])]
    items = b"".join(_string(v) if kind == STRING else struct.pack("<i" if kind == I32 else "<f", v) for v in value)
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + items


def _write(path: Path, meta: dict[str, object], tensors: dict[str, np.ndarray]) -> Path:
    tensors = {name: array.astype("<f4") for name, array in tensors.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    head += b"".join(_string(key) + _value(value) for key, value in meta.items())
    offset = 0
    for name, array in tensors.items():
        head += _string(name) + struct.pack("<I", array.ndim)
        head += b"".join(struct.pack("<Q", n) for n in reversed(array.shape)) + struct.pack("<IQ", 0, offset)
        offset += (array.nbytes + 31) // 32 * 32
    head = head.ljust((len(head) + 31) // 32 * 32, b"\0")
    body = b"".join(a.tobytes().ljust((a.nbytes + 31) // 32 * 32, b"\0") for a in tensors.values())
    path.write_bytes(head + body)
    return path


def write_model(path: Path, seed: int = 1, arch: str = "llama", window: int = 0) -> Path:
    """arch: "llama", or "gemma3" with a sliding window."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape)

    meta: dict[str, object] = {
        "general.architecture": arch,
        f"{arch}.context_length": 4096,
        f"{arch}.embedding_length": EMBD,
        f"{arch}.block_count": LAYERS[arch],
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": EMBD // HEADS,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [0.0] * len(TOKENS),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": CHAT,
    }
    if window > 0:
        meta[f"{arch}.attention.sliding_window"] = window
        meta[f"{arch}.attention.key_length"] = meta[f"{arch}.attention.value_length"] = EMBD // HEADS
    tensors = {"token_embd.weight": random(len(TOKENS), EMBD), "output_norm.weight": np.ones(EMBD)}
    for i in range(LAYERS[arch]):
        b = f"blk.{i}."
        for name in ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if arch == "gemma3" else []):
            tensors[f"{b}{name}.weight"] = np.ones(EMBD)
        for name in ["attn_q_norm", "attn_k_norm"] if arch == "gemma3" else []:
            tensors[f"{b}{name}.weight"] = np.ones(EMBD // HEADS)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"{b}{name}.weight"] = random(EMBD, EMBD)
        tensors[f"{b}ffn_gate.weight"] = random(FFN, EMBD)
        tensors[f"{b}ffn_up.weight"] = random(FFN, EMBD)
        tensors[f"{b}ffn_down.weight"] = random(EMBD, FFN)
    return _write(path, meta, tensors)


def write_lora(path: Path, seed: int = 1) -> Path:
    rng = np.random.default_rng(seed)
    meta: dict[str, object] = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    tensors = {}
    for i in range(LAYERS["llama"]):
        tensors[f"blk.{i}.attn_v.weight.lora_a"] = rng.normal(0, 0.3, (4, EMBD))
        tensors[f"blk.{i}.attn_v.weight.lora_b"] = rng.normal(0, 0.3, (EMBD, 4))
    return _write(path, meta, tensors)
