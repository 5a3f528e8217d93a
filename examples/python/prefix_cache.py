#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A prompt of a Transformers model computed once.

usage: prefix_cache.py [URL [MODEL]]        the URL of a store; without it redis://localhost:6379/0

Run it twice, or on two machines of one kind: the second one loads what the first has stored. MODEL is a folder or a
name that Transformers knows; without it the model is a toy with random weights, and the prompt is of random tokens.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import kvferry
from kvferry.hf import PrefixCache

QUESTION = "What may a program not do to the model while it answers?"


def toy():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(3, 512, (1, 600))}


def real(name):
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompt = f"{PrefixCache.__doc__}\n\n{QUESTION}"
    return AutoModelForCausalLM.from_pretrained(name).eval(), tokenizer(prompt, return_tensors="pt")


def main():
    if sys.argv[1:] == ["--help"]:
        print(__doc__)
        return
    url = sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0"
    model, inputs = real(sys.argv[2]) if len(sys.argv) > 2 else toy()
    with kvferry.Store(url) as store:
        prefix = PrefixCache(model, store, block_tokens=128)
        answer = prefix.generate(**inputs, max_new_tokens=8, do_sample=False)  # in place of model.generate
        print(f"{prefix.counters.loaded_tokens} tokens loaded, {prefix.counters.computed_tokens} computed")
        print(answer[0, -8:].tolist())

        # The same in the program's own hands: the cache, and the tokens that are left to compute.
        cache, num = prefix.prefill(inputs["input_ids"])
        with torch.no_grad():
            logits = model(inputs["input_ids"][:, num:], past_key_values=cache, use_cache=True).logits
        print(f"{num} tokens in the cache, next token {int(logits[0, -1].argmax())}")


main()
