# SPDX-License-Identifier: Apache-2.0
"""kvferry for SGLang: pages of the hierarchical cache (HiCache) in a store of kvferry (docs/sglang.md).

    --enable-hierarchical-cache --hicache-mem-layout page_first --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvferry", "module_path": "kvferry.sglang",
        "class_name": "KvferryHiCache", "interface_v1": 1, "kvferry": {"store": ["redis://127.0.0.1:6379"]}}'

`backend` is what SGLang calls; `identity` decides what may be shared with whom."""

from kvferry.sglang.backend import KvferryHiCache

__all__ = ["KvferryHiCache"]
