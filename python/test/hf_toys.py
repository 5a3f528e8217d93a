# SPDX-License-Identifier: Apache-2.0
"""Small models of real classes with fixed seeds: like GPT-2, like Llama, like Gemma 3 (sliding windows)."""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 512
WINDOW = 50  # of the sliding layers; neither a multiple of a block nor smaller than one
KINDS = ("gpt2", "llama", "gemma")
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# More kinds by the names of their classes: what their configurations take beside COMMON.
OTHERS = {
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Falcon": {},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "Phi3": {},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma2": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": WINDOW},
    "Mixtral": {"num_key_value_heads": 2, **MOE},
    "GptOss": {
        "num_key_value_heads": 2, "head_dim": 16, "sliding_window": WINDOW, **MOE,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "DeepseekV3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    },
}  # fmt: skip
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip


def _gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=1024, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def llama_config(**settings: object) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**COMMON, num_key_value_heads=2, **settings)


def _llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(llama_config())


def _gemma() -> transformers.PreTrainedModel:
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def _other(name: str) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **OTHERS[name]})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def make(kind: str, dtype: str) -> transformers.PreTrainedModel:
    """The same weights in every process. kind: one of KINDS or OTHERS."""
    torch.manual_seed(7)
    makers = {"gpt2": _gpt2, "llama": _llama, "gemma": _gemma}
    model = makers[kind]() if kind in makers else _other(kind)
    return model.to(getattr(torch, dtype)).eval()


def batch(rows: int, tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of several lengths, padded on the left. The last of four begins as the first."""
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, tokens // 3, tokens - 10, 5][:rows]):
        mask[row, :padding] = 0
        ids[row, :padding] = 0
    if rows == 4:
        ids[3, 5 : 5 + tokens // 2] = ids[0, : tokens // 2]
    return {"input_ids": ids, "attention_mask": mask}
