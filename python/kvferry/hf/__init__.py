# SPDX-License-Identifier: Apache-2.0
"""Prefill once, anywhere, for Hugging Face Transformers 5: a prompt's KV comes from a store instead of being computed.

    import kvferry
    from kvferry.hf import PrefixCache

    store = kvferry.Store("redis://localhost")
    prefix = PrefixCache(model, store)
    output = prefix.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=100)  # in place of model.generate

docs/python.md tells what is stored, what names it, and what is refused.
"""

import transformers

if not transformers.__version__.startswith("5."):
    raise ImportError(
        f"kvferry.hf needs Transformers 5, and this is {transformers.__version__}: pip install -U transformers"
    )

from ._prefix import Counters, PrefixCache

__all__ = ["Counters", "PrefixCache"]
