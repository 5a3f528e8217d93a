# SPDX-License-Identifier: Apache-2.0
"""kvferry: prefill once, anywhere. Moves KV blocks between LLM engines and a store: Redis or Valkey, a folder, memory.

    with kvferry.Store("redis://localhost") as store:
        space = kvferry.Space(store, {"engine": "mine-1", "model": sha256_of_the_weights, "kv": "f16 LHTD"})
        keys = space.chain(tokens)
        num = space.load(keys, memory, tokens=tokens).num_ok
        ...  # compute the rest
        space.save(keys[32 * num :], memory[num:], tokens=tokens[256 * num :], first_token=256 * num)  # what is new

docs/python.md has five minutes for each way in.
"""

import sys

if "t" in sys.abiflags:
    raise ImportError("kvferry does not support free-threaded Python: use a build with the GIL")

from ._kvferry import (
    KEY_BYTES,
    MAX_BLOCKS,
    ClosedError,
    Completion,
    ConfigError,
    Entry,
    Error,
    Finding,
    Flushed,
    Found,
    LimitError,
    Link,
    Pace,
    Plan,
    RefusedError,
    Result,
    Session,
    SessionInfo,
    Space,
    Store,
    StoreError,
    Tier,
    View,
)
from ._kvferry import VERSION as __version__
from .manager import KVCacheManager
from .queue import Queue

__all__ = [
    "KEY_BYTES",
    "MAX_BLOCKS",
    "ClosedError",
    "Completion",
    "ConfigError",
    "Entry",
    "Error",
    "Finding",
    "Flushed",
    "Found",
    "KVCacheManager",
    "LimitError",
    "Link",
    "Pace",
    "Plan",
    "Queue",
    "RefusedError",
    "Result",
    "Session",
    "SessionInfo",
    "Space",
    "Store",
    "StoreError",
    "Tier",
    "View",
    "__version__",
]
