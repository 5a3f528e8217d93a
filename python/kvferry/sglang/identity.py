# SPDX-License-Identifier: Apache-2.0
"""What may be shared with whom: the fields of a pool's space, and the ranks in its keys."""

import contextlib
import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch

from kvferry._adapter import Options, version_of
from kvferry._weights import folder_digest, model_folder

log = logging.getLogger("kvferry.sglang")

TESTED = "0.5.23"
# Settings of the server that change what is computed from given tokens and weights. A backend is not told of them.
SETTINGS = (
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "attention_backend",
    "prefill_attention_backend",
    "context_length",
    "speculative_algorithm",
)
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
# Pools whose contents the ranks of a model with MLA do not share, unless the pool is one of MLA itself.
OF_ONE_RANK = ("mamba", "draft", "draft_swa")
REPLICATED = ("MLA", "DeepSeekV4")


@dataclass(frozen=True, kw_only=True)
class HiCacheOptions(Options):
    """The options "kvferry" in SGLang's extra config. Times are seconds."""

    model: str | None = None
    """Which weights: a revision, a hash. None: all bytes of the model's files are hashed."""
    identity: str = ""
    """What else changes KV, and neither the files nor the settings of the server show."""


def server_args() -> Any:
    """The settings of the server in this process. None: there are none (a test, a tool)."""
    context = sys.modules.get("sglang.srt.runtime_context")
    if context is None:
        return None
    with contextlib.suppress(ValueError):  # they are not set
        return context.get_server_args()
    return None


def version() -> str:
    return str(getattr(sys.modules.get("sglang.version"), "__version__", "")) or version_of("sglang")


def model_of(options: HiCacheOptions, name: str | None) -> str:
    """What names the weights. Raises ValueError, kvferry.RefusedError: they can't be identified."""
    if options.model:
        return options.model
    args = server_args()
    if getattr(args, "load_format", "auto") == "dummy":
        raise ValueError('kvferry does not support the load format dummy; or name the weights in the option "model"')
    path, revision = getattr(args, "model_path", None) or name, getattr(args, "revision", None)
    if not path:
        raise ValueError('SGLang does not say which model it is; name the weights in the option "model"')
    try:
        return f"sha256:{folder_digest(model_folder(path, revision), log)}"
    except ValueError as error:
        raise ValueError(f'{error}; or name the weights in the option "model"') from error


def fields_of(config: Any, pool: Any, name: str, model: str, options: HiCacheOptions) -> dict[str, str]:
    """The fields of the space of a pool: whatever changes a page's bytes. Raises ValueError: an unproven layout."""
    if pool.layout not in LAYOUTS:
        raise ValueError(f"kvferry does not support the layout {pool.layout}; --hicache-mem-layout page_first is fine")
    settings = {s: getattr(server_args(), s, None) for s in SETTINGS}
    return {
        "engine": f"sglang {version()} torch {torch.__version__} {_device()}",
        "model": model,
        "kv": f"{type(pool).__name__} {pool.dtype} {pool.layout} page {pool.page_size}"
        f" layers {getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', '')}"
        f" bytes {page_bytes(pool)} {getattr(pool, 'storage_format_tag', None)}",
        "pool": name,
        "compute": " ".join(f"{s}={v}" for s, v in settings.items()),
        "parallel": f"{_tensor_parallel(config, pool, name)} pp {config.pp_size} cp {config.attn_cp_size}",
        **({"identity": options.identity} if options.identity else {}),
    }


def suffix_of(config: Any, pool: Any, name: str) -> bytes:
    """Follows the hash of a page in its key: which part of the page this rank has."""
    tp = "all" if is_replicated(config, pool, name) else config.tp_rank
    return f"/tp{tp}/pp{config.pp_rank}/cp{config.attn_cp_rank}".encode()


def is_replicated(config: Any, pool: Any, name: str) -> bool:
    """Whether all tensor-parallel ranks have the same bytes: MLA. SGLang lets one of them write."""
    return bool(config.is_mla_model) and (
        name not in OF_ONE_RANK or any(kind in type(pool).__name__ for kind in REPLICATED)
    )


def page_bytes(pool: Any) -> int:
    """The bytes of a page: 0 if it has none (a logical anchor, whose data is in other pools)."""
    _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size)) or ((), ())
    return sum(sizes)


def _device() -> str:
    """Kernels round differently on other devices."""
    return str(torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability())


def _tensor_parallel(config: Any, pool: Any, name: str) -> str:
    return "tp any" if is_replicated(config, pool, name) else f"tp {config.tp_size}"
