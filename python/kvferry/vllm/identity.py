# SPDX-License-Identifier: Apache-2.0
"""What may be shared with whom: the fields of the space, and everything that is refused because it is not proven."""

import json
import os
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

import kvferry
from kvferry.vllm.settings import log
from kvferry.vllm.weights import folder_digest

TESTED = ("0.32.0",)
# The weights are those of the files in the model's folder.
FILE_FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors")
# The kinds of rope whose factors do not depend on the longest prompt that the engine takes.
PLAIN_ROPE = ("default", "linear", "llama3", "yarn", "mrope")


def refusal(config: Any, kv_config: Any) -> str | None:
    """Why blocks of this engine can't be stored, or None."""
    cache, parallel, transfer = config.cache_config, config.parallel_config, config.kv_transfer_config
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    checks = (
        (
            not current_platform.is_cpu(),
            f"the platform {current_platform.device_type} (only the CPU platform is proven)",
        ),
        (config.speculative_config is not None, "speculative decoding"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "context parallelism"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "context parallelism"),
        (load_format not in FILE_FORMATS, f"the load format {load_format}: its weights are not those of files"),
        (bool(getattr(config.model_config, "model_weights", "")), "weights that are not in the model's folder"),
        (getattr(cache, "kv_sharing_fast_prefill", False), "kv_sharing_fast_prefill"),
        (getattr(cache, "calculate_kv_scales", False), "KV scales that are computed while the engine runs"),
        (transfer.kv_role is None, "a configuration without kv_role"),
    )
    return next((what for wrong, what in checks if wrong), None) or _refused_layers(kv_config)


def _refused_layers(kv_config: Any) -> str | None:
    groups, layout = kv_config.kv_cache_groups, layout_of(kv_config)
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        return f"layers of the kinds {kinds} (only one group of full attention is proven)"
    if groups[0].kv_cache_spec.sliding_window is not None:
        return "a sliding window"
    if layout != "LBHNC":
        return f"the KV cache layout {layout}"
    return None


def has_random_hashes(config: Any) -> bool:
    """Whether other processes compute other hashes of the same tokens."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    return not algorithm.startswith("sha256") and os.environ.get("PYTHONHASHSEED") is None


def warn_of_version() -> None:
    if vllm.__version__.split("+")[0] not in TESTED:
        log.warning("kvferry is tested with vLLM %s; this is %s", ", ".join(TESTED), vllm.__version__)


def layout_of(kv_config: Any) -> str:
    return str(getattr(kv_config, "kv_cache_layout", None) or "LBHNC")


def fields_of(config: Any, kv_config: Any, epoch: str = "") -> dict[str, str]:
    """The fields of the space: whatever changes a block's bytes. Raises ValueError or
    kvferry.RefusedError: the model can't be identified."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    group = kv_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    names = {
        "engine": f"vllm {vllm.__version__} torch {torch.__version__} {_attention(model, cache, spec)}",
        "model": f"sha256:{folder_digest(_folder(model.model, model.revision))}",
        "kv": f"{spec.dtype} {cache.cache_dtype} {layout_of(kv_config)} {len(group.layer_names)} layers"
        f" {spec.num_kv_heads}x{spec.head_size}+{spec.head_size_v} page {spec.page_size_bytes}",
        "hash": f"{cache.prefix_caching_hash_algo} seed {os.environ.get('PYTHONHASHSEED', 'default')}",
        "parallel": f"tp {parallel.tensor_parallel_size} dp {parallel.data_parallel_size}"
        f" ep {parallel.enable_expert_parallel}",
        "compute": f"{model.dtype} {model.quantization} {model.model_impl} eager {model.enforce_eager}"
        f" lora {config.lora_config is not None} {_longest(model)}",
        "config": _digest(_without_names(model.hf_config.to_dict()), model.quantization_config),
    }
    return names | ({"epoch": epoch} if epoch else {})


def _attention(model: Any, cache: Any, spec: Any) -> str:
    """The CPU's pages are arranged for its instructions: those of one kind of CPU mean nothing to another."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(model.dtype, spec.block_size, spec.head_size, cache.cache_dtype)
    return f"cpu_attn {isa} {torch.backends.cpu.get_cpu_capability()}"


def _folder(model: str, revision: str | None) -> str:
    """The folder of the model's files. A name of the Hugging Face hub is looked up in its cache, not in the network."""
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise ValueError(f"the files of {model} can't be found to identify it: {error}") from error


def _longest(model: Any) -> str:
    """Some kinds of rope choose their factors by the longest prompt that the engine takes."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {str(rope.get("rope_type", "default"))} if "rope_type" in rope or not rope else {"unknown"}
    return "" if kinds <= set(PLAIN_ROPE) else f"max_model_len {model.max_model_len}"


def _without_names(config: dict[str, Any]) -> dict[str, Any]:
    """Where the model lies and who wrote its configuration changes nothing."""
    return {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}


def _digest(*values: Any) -> str:
    import hashlib

    return "sha256:" + hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


class Adapters:
    """What a request's KV depends on besides its tokens and the space, where the engine's hashes leave it open.

    The hashes have the name and the path of a LoRA adapter. Other processes may find other files there, so the key gets
    a hash of the files as well. Files that have changed since the first request may be in use or not: vLLM reads them
    again when it has dropped the adapter meanwhile."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], bytes] = {}

    def suffix(self, request: Any) -> bytes | None:
        """Bytes for the request's keys. None: its KV can't be named, leave the request alone."""
        if request.pooling_params is not None or getattr(request, "resumable", False):
            return None
        if not all(_is_hash(feature.identifier) for feature in request.mm_features):
            return None
        return b"" if request.lora_request is None else self._adapter(request.lora_request)

    def _adapter(self, lora: Any) -> bytes | None:
        name = (lora.lora_int_id, lora.lora_path)
        known = None if getattr(lora, "load_inplace", False) else self._digests.get(name)
        if known == b"":
            return None
        try:
            digest = bytes.fromhex(folder_digest(_folder(lora.lora_path, None)))
            if known is not None and digest != known:
                raise ValueError("its files have changed while it is loaded")
        except (OSError, ValueError, kvferry.Error) as error:
            log.warning("kvferry: requests of the LoRA adapter %s are not stored: %s", lora.lora_name, error)
            digest = b""
        self._digests[name] = digest
        return digest or None


def _is_hash(identifier: str) -> bool:
    """Whether an image is named by its content. Names that clients choose mean something else to others."""
    return len(identifier) == 64 and all(c in "0123456789abcdef" for c in identifier)
