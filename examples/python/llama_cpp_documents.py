# SPDX-License-Identifier: Apache-2.0
"""Questions about a document, with llama-cpp-python. The document is computed once: run this twice.

usage: llama_cpp_documents.py MODEL.gguf DOCUMENT QUESTION...

The store is that of KVFERRY_STORE, or the folder ~/.cache/kvferry/store."""

import sys
import time

from llama_cpp import Llama

import kvferry.llama_cpp

if len(sys.argv) < 4:
    sys.exit(__doc__)
model, document, *questions = sys.argv[1:]
llm = Llama(model, n_ctx=4096, flash_attn=True, verbose=False)
cache = kvferry.llama_cpp.KvferryCache()
llm.set_cache(cache)  # at once, so that the first question does not wait for it

with open(document, encoding="utf-8") as file:
    text = file.read()

for question in questions:
    # What all questions share comes first: a prefix is what can be found again.
    messages = [
        {"role": "system", "content": f"Answer from this document:\n{text}"},
        {"role": "user", "content": question},
    ]
    begin = time.perf_counter()
    stream = llm.create_chat_completion(messages, max_tokens=64, temperature=0.0, stream=True)
    next(stream)  # the role
    answer = next(stream)["choices"][0]["delta"].get("content", "")
    first = time.perf_counter() - begin
    for part in stream:
        answer += part["choices"][0]["delta"].get("content", "")
    did = cache.report
    print(f"{question}\n{answer.strip()}\n[{did['loaded_tokens']} of {did['num_tokens']} tokens from the store, "
          f"{did['resident_tokens']} still in the context; first token after {first:.2f} s]\n")  # fmt: skip

cache.close()  # the end of the process does it too
