# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: with it, the names "KvferryConnector" and "KvferryTier" need no module
path."""

import contextlib


def register() -> None:
    """Registers the connector and the tier. vLLM calls this in each of its processes, in some of them twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector("KvferryConnector", "kvferry.vllm", "KvferryConnector")
    with contextlib.suppress(ImportError, ValueError):  # older versions have no such tiers
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier("KvferryTier", "kvferry.vllm", "KvferryTier")
