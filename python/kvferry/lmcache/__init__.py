# SPDX-License-Identifier: Apache-2.0
"""kvferry for LMCache: its chunks in a store of kvferry (docs/lmcache.md).

`KvferryClient` is for LMCache's multi-process mode, as an L2 adapter of the type "native_plugin"; `KvferryAdapter` is
for LMCache inside the engine, as a remote storage plugin. `client` needs nothing of LMCache; `connector` is on its base
classes."""

from typing import TYPE_CHECKING, Any

from kvferry.lmcache.client import KvferryClient

if TYPE_CHECKING:
    from kvferry.lmcache.connector import KvferryAdapter, KvferryConnector

__all__ = ["KvferryAdapter", "KvferryClient", "KvferryConnector"]


def __getattr__(name: str) -> Any:
    """Imports LMCache's base classes, and torch with them, where they are asked for."""
    if name in ("KvferryAdapter", "KvferryConnector"):
        from kvferry.lmcache import connector

        return getattr(connector, name)
    raise AttributeError(f"module 'kvferry.lmcache' has no attribute {name!r}")
