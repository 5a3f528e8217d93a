# SPDX-License-Identifier: Apache-2.0
"""Small models of real classes with fixed seeds: like GPT-2, like Llama, like Gemma 3 (sliding windows)."""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 512
WINDOW = 50  # of the sliding layers; neither a multiple of a block nor smaller than one
KINDS = ("gpt2", "llama", "gemma")


def _gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=1024, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def llama_config(**settings: object) -> transformers.LlamaConfig:
    common = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    }  # fmt: skip
    return transformers.LlamaConfig(**{**common, **settings})


def _llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(llama_config())


def _gemma() -> transformers.PreTrainedModel:
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=1024, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def make(kind: str, dtype: str) -> transformers.PreTrainedModel:
    """The same weights in every process."""
    torch.manual_seed(7)
    model = {"gpt2": _gpt2, "llama": _llama, "gemma": _gemma}[kind]()
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
