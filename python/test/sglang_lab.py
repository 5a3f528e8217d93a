# SPDX-License-Identifier: Apache-2.0
"""SGLang's own classes without its CUDA libraries: the base class and the factory of storage backends, and host pools.

The package `sglang` imports its kernels when it is imported, which fails without a GPU. Its module for storage backends
needs only torch, so it is imported below an empty package. The host pools need the kernels; a pool here has the memory,
and executes those methods of SGLang's that a storage backend calls, from the source of the installed package."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch


def _folder() -> Path:
    spec = importlib.util.find_spec("sglang")  # does not import it
    if spec is None or spec.origin is None:
        pytest.skip("SGLang is not installed: make setup-engines", allow_module_level=True)
    return Path(spec.origin).parent


FOLDER = _folder()
if "sglang" not in sys.modules:
    package = types.ModuleType("sglang")
    package.__path__ = [str(FOLDER)]
    sys.modules["sglang"] = package

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

METHODS = (
    "init_kv_buffer",
    "get_page_buffer_meta",
    "get_data_page",
    "get_dummy_flat_data_page",
    "set_from_flat_data_page",
    "_storage_page_index",
)


def _methods_of(module: str, name: str) -> dict[str, Any]:
    """The methods of a class of SGLang's, compiled from its source file."""
    path = FOLDER / "srt" / "mem_cache" / "pool_host" / module
    tree = ast.parse(path.read_text())
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    body = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name in METHODS]
    found: dict[str, Any] = {
        "torch": torch,
        "Optional": Any,
        "ALLOC_MEMORY_FUNCS": {"cpu": lambda dims, dtype, **_: torch.zeros(dims, dtype=dtype)},
    }
    exec(compile(ast.Module(body, []), str(path), "exec"), found)
    return {node.name: found[node.name] for node in body}


class _HostPool:
    """What the constructor of SGLang's HostKVCache sets (pool_host/base.py)."""

    dcp_size, dcp_rank = 1, 0
    storage_format_tag = None

    def __init__(self, layout: str, dtype: torch.dtype, page_size: int, page_num: int) -> None:
        self.layout, self.dtype, self.page_size, self.page_num = layout, dtype, page_size, page_num
        self.size = page_num * page_size
        self.device, self.pin_memory, self.allocator = "cpu", False, None
        self._transfer_device = types.SimpleNamespace(type="cpu")
        self.layer_num, self.start_layer, self.end_layer = 3, 0, 3
        self.head_num, self.head_dim = 2, 8
        self.kv_cache_dim = 24
        self.kv_buffer = self.init_kv_buffer()

    @property
    def logical_page_size(self) -> int:
        return self.page_size

    def page(self, index: int) -> bytes:
        return bytes(self.get_data_page(index).view(torch.uint8).numpy())

    def set_page(self, index: int, data: bytes) -> None:
        self.set_from_flat_data_page(index, torch.frombuffer(bytearray(data), dtype=self.dtype))


class MHATokenToKVPoolHost(_HostPool):
    """Keys and values by head."""

    locals().update(_methods_of("mha.py", "MHATokenToKVPoolHost"))


class MLATokenToKVPoolHost(_HostPool):
    """Multi-head latent attention: all ranks have the same bytes."""

    locals().update(_methods_of("mla.py", "MLATokenToKVPoolHost"))


def config(**settings: Any) -> HiCacheStorageConfig:
    """A configuration as SGLang's controller makes it."""
    values = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "toy",
    }
    return HiCacheStorageConfig(**(values | settings))


def attach(pool: Any, options: dict[str, Any], **settings: Any) -> Any:
    """As SGLang's controller attaches a dynamic backend."""
    extra = {
        "backend_name": "kvferry",
        "module_path": "kvferry.sglang",
        "class_name": "KvferryHiCache",
        "interface_v1": 1,
        "kvferry": options,
    }
    backend = StorageBackendFactory.create_backend("dynamic", config(extra_config=extra, **settings), pool)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend
