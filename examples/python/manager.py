#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keys and values by session id, in Redis or any other store.

usage: manager.py [URL]        the URL of a store; without it redis://localhost:6379/0

Saves a session of four layers, loads it in one piece and into arrays that are there already, and deletes it.
"""

import sys

import numpy as np

import kvferry

LAYERS, HEADS, WIDTH = 4, 2, 8


def forward(num_tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stands for a model: the keys and values of each layer, of shape (heads, tokens, width)."""
    rng = np.random.default_rng(1)
    shape = HEADS, num_tokens, WIDTH
    return [(rng.random(shape).astype(np.float16), rng.random(shape).astype(np.float16)) for _ in range(LAYERS)]


def main() -> None:
    if sys.argv[1:] == ["--help"]:
        print(__doc__)
        return
    url = sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0"
    with kvferry.KVCacheManager(url=url, ttl=600) as manager:
        cache = forward(num_tokens=12)
        manager.save_kv_cache("user:42", past_key_values=cache, num_tokens=12, layout="LHTD")  # nothing is stacked
        print(f"{manager.ttl('user:42'):.0f} s to live")

        keys, values = manager.load_kv_cache("user:42")  # (None, None): there is no such session
        print(f"loaded {keys.shape} {keys.dtype}; the same: {np.array_equal(keys[3], cache[3][0])}")

        ready = [(np.empty_like(k), np.empty_like(v)) for k, v in cache]
        manager.load_kv_cache("user:42", into=ready)  # straight into arrays of your own
        print(f"layer 2 in its place: {np.array_equal(ready[2][1], values[2])}")

        manager.delete("user:42")
        print(f"deleted: {manager.load_kv_cache('user:42') == (None, None)}")


main()
