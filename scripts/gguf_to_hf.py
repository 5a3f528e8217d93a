#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF model of the Llama kind as a folder that Transformers and vLLM load. Needs torch, gguf and safetensors.

usage: gguf_to_hf.py MODEL.gguf FOLDER

The weights are dequantised to bfloat16; the tokenizer and the chat template come from the file.
"""
import json
import os
import sys

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # GGUF's type of tokens like <|im_start|>


def hf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def halves_apart(weight, heads):
    """llama.cpp rotates neighbouring pairs of rows, Transformers the two halves of a head: back to the latter's order."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight.shape)


def weights(reader, heads, kv_heads):
    heads_of = {"attn_q": heads, "attn_k": kv_heads}
    out = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        if rotated := heads_of.get(tensor.name.split(".")[-2]):
            values = halves_apart(values, rotated)
        out[hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    return out


def config(field, tied):
    width, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": width, "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"), "num_attention_heads": heads, "head_dim": width // heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "vocab_size": field("llama.vocab_size"), "tie_word_embeddings": tied, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"), "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def tokenizer(field):
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    special = [{"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False} for i, token in enumerate(tokens) if types[i] == CONTROL_TOKEN]
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": field("tokenizer.ggml.merges")},
    }


def tokenizer_config(field):
    tokens = field("tokenizer.ggml.tokens")
    named = {f"{name}_token": tokens[field(f"tokenizer.ggml.{key}_token_id")]
             for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "model_max_length": field("llama.context_length"), "chat_template": field("tokenizer.chat_template"), **named}


def main():
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    source, folder = sys.argv[1:]
    reader = GGUFReader(source)

    def field(name):
        if name not in reader.fields:
            sys.exit(f"gguf_to_hf: {source} has no field {name}: only models of the Llama kind can be converted")
        return reader.fields[name].contents()

    tensors = weights(reader, field("llama.attention.head_count"), field("llama.attention.head_count_kv"))
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    for name, content in (("config", config(field, "lm_head.weight" not in tensors)), ("tokenizer", tokenizer(field)),
                          ("tokenizer_config", tokenizer_config(field))):
        with open(f"{folder}/{name}.json", "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=1)


main()
