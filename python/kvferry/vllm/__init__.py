# SPDX-License-Identifier: Apache-2.0
"""kvferry for vLLM: KV blocks that outlive the engine, shared by all engines with one store (docs/vllm.md).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_connector_extra_config": {"store": ["redis://127.0.0.1:6379"]}}'

The modules, from the top: `connector` is what vLLM calls; `scheduler` and `worker` are its two halves, which live in
different processes; `messages` is what they tell each other; `tier` is the secondary tier of vLLM's own offloading;
`identity` decides what may be shared with whom; `plugin` registers the short names."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.vllm.connector import KvferryConnector
    from kvferry.vllm.tier import KvferryTier

__all__ = ["KvferryConnector", "KvferryTier"]


def __getattr__(name: str) -> Any:
    """Imports vLLM's classes when one of ours is asked for: vLLM's plugins are loaded before some of them can be."""
    if name == "KvferryConnector":
        from kvferry.vllm.connector import KvferryConnector

        return KvferryConnector
    if name == "KvferryTier":
        from kvferry.vllm.tier import KvferryTier

        return KvferryTier
    raise AttributeError(f"module 'kvferry.vllm' has no attribute {name!r}")
