#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An engine of your own: loads what is stored of a prompt, computes the rest, and saves it.

usage: engine.py [URL]        the URL of a store; without it memory, which ends with the process

The "engine" is a loop that computes rows of numbers, token by token, where each row depends on all before it, as KV
does. Run it twice with a folder (file:/tmp/store): the second process loads what the first one has computed.
"""

from __future__ import annotations

import array
import hashlib
import sys
import time

import kvferry

BLOCK_TOKENS = 64
ROW = 512  # floats of KV for one token


def compute(kv: memoryview, tokens: list[int], begin: int) -> None:
    """Fills the rows from `begin` on. A row depends on its token and on the row before."""
    for i in range(begin, len(tokens)):
        before = kv[(i - 1) * ROW : i * ROW].tobytes() if i > 0 else b""
        state = hashlib.sha256(before + tokens[i].to_bytes(4, "little")).digest()
        kv[i * ROW : (i + 1) * ROW] = memoryview(state * (ROW * 4 // 32)).cast("f")


def prefill(space: kvferry.Space, tokens: list[int]) -> tuple[memoryview, int]:
    """The KV of a prompt, and how many of its tokens were loaded."""
    kv = memoryview(array.array("f", bytes(len(tokens) * ROW * 4)))
    keys = space.chain(tokens)  # 32 bytes for each whole block
    num = len(keys) // kvferry.KEY_BYTES
    blocks = [kv[i * BLOCK_TOKENS * ROW : (i + 1) * BLOCK_TOKENS * ROW] for i in range(num)]
    whole = tokens[: num * BLOCK_TOKENS]

    loaded = space.load(keys, blocks, tokens=whole).num_ok  # straight into `kv`, verified
    begin = loaded * BLOCK_TOKENS
    compute(kv, tokens, begin)
    space.save(keys[loaded * kvferry.KEY_BYTES :], blocks[loaded:], tokens=whole[begin:], first_token=begin)
    return kv, begin


def main() -> None:
    if sys.argv[1:] == ["--help"]:
        print(__doc__)
        return
    url = sys.argv[1] if len(sys.argv) > 1 else "mem:"
    weights = hashlib.sha256(b"the weights of this model").hexdigest()
    prompt = [i * 7 % 32000 for i in range(1000)]
    with kvferry.Store(url) as store:
        # Everything that changes the bytes of a block is a field: any difference is a miss.
        fields = {"engine": "example-1", "model": weights, "kv": f"f32 {ROW}"}
        with kvferry.Space(store, fields, block_tokens=BLOCK_TOKENS) as space:
            start = time.perf_counter()
            kv, loaded = prefill(space, prompt)
            took = time.perf_counter() - start
            print(f"{loaded} of {len(prompt)} tokens loaded, {took * 1e3:.1f} ms")
            print(f"KV {hashlib.sha256(kv).hexdigest()}")
            done, unwritten = store.flush()
            if not done or unwritten:
                print(f"{unwritten} blocks were not written: {store.stats()['save_failures']}", file=sys.stderr)


if __name__ == "__main__":
    main()
