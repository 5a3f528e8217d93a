# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins`: with it, `"kv_connector": "KvferryConnector"` needs no module path."""

import contextlib


def register() -> None:
    """Registers the connector. vLLM calls this in each of its processes, in some of them twice."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector("KvferryConnector", "kvferry.vllm", "KvferryConnector")
