# SPDX-License-Identifier: Apache-2.0
"""kvferry for vLLM: KV blocks that outlive the engine, shared by all engines with one store (docs/vllm.md).

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_connector_extra_config": {"store": ["redis://127.0.0.1:6379"]}}'

The modules, from the top: `connector` is what vLLM calls; `scheduler` and `worker` are its two halves, which live in
different processes; `messages` is what they tell each other; `identity` decides what may be shared with whom; `plugin`
registers the short name."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.vllm.connector import KvferryConnector

__all__ = ["KvferryConnector"]


def __getattr__(name: str) -> Any:
    """Imports vLLM's classes when the connector is asked for: vLLM's plugins are loaded before some of them can be."""
    if name == "KvferryConnector":
        from kvferry.vllm.connector import KvferryConnector

        return KvferryConnector
    raise AttributeError(f"module 'kvferry.vllm' has no attribute {name!r}")
