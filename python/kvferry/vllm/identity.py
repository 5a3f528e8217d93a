# SPDX-License-Identifier: Apache-2.0
"""What may be shared with whom: the fields of the space, and everything that is refused because it is not proven."""

import os
from collections.abc import Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import vllm
import vllm.envs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

import kvferry
from kvferry._weights import changed_at, folder_digest, model_folder
from kvferry.vllm import influence
from kvferry.vllm.settings import log

TESTED = ("0.32.0", "0.31.0")
# The weights are those of the files in the model's folder.
FILE_FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "fastsafetensors")
RANDOM_HASHES = (
    "kvferry is off: no other process computes the same block hashes with %s; use --prefix-caching-hash-algo sha256, "
    "or set PYTHONHASHSEED"
)
# The kinds of rope whose factors do not depend on the longest prompt that the engine takes.
PLAIN_ROPE = ("default", "linear", "llama3", "yarn", "mrope")


def refusal(config: Any, kv_config: Any) -> str | None:
    """Why blocks of this engine can't be stored by the connector, or None."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    checks = (
        (
            not (current_platform.is_cpu() or current_platform.is_cuda()),
            f"the platform {current_platform.device_type} (only the CPU and CUDA)",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "context parallelism"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "context parallelism"),
        (transfer.kv_role is None, "a configuration without kv_role"),
        (config.speculative_config is not None, "speculative decoding (not proven yet)"),
    )
    return next((what for wrong, what in checks if wrong), None) or _refused_model(config) or _refused_layers(kv_config)


def tier_refusal(config: Any) -> str | None:
    """Why chunks of this engine can't be stored by the secondary tier, or None."""
    unnamed = "the tier is given keys without requests, and can't tell whose they are"
    checks = (
        (config.lora_config is not None, f"LoRA adapters: {unnamed}. Use KvferryConnector"),
        (config.speculative_config is not None, "speculative decoding (not proven yet)"),
        (config.model_config.is_multimodal_model, f"models with images: {unnamed}. Use KvferryConnector"),
    )
    return next((what for wrong, what in checks if wrong), None) or _refused_model(config)


def _refused_model(config: Any) -> str | None:
    load_format = str(getattr(config.load_config.load_format, "value", config.load_config.load_format))
    checks = (
        (load_format not in FILE_FORMATS, f"the load format {load_format}: its weights are not those of files"),
        (bool(getattr(config.model_config, "model_weights", "")), "weights that are not in the model's folder"),
        (
            _has_foreign_code(config.model_config),
            "code of a model that is not in its own files, or of another revision",
        ),
        (_has_foreign_weights(config.model_config), "weights that are not in the model's own folder"),
        (getattr(config.cache_config, "kv_sharing_fast_prefill", False), "kv_sharing_fast_prefill"),
        (
            getattr(config.cache_config, "calculate_kv_scales", False),
            "KV scales that are computed while the engine runs",
        ),
    )
    return next((what for wrong, what in checks if wrong), None) or influence.refused_variable(os.environ)


def _has_foreign_code(model: Any) -> bool:
    """The model's own files are hashed, code included. Those of another repository or revision are not."""
    if not getattr(model, "trust_remote_code", False):
        return False
    sources = (getattr(getattr(model, "hf_config", None), "auto_map", None) or {}).values()
    names = [name for source in sources for name in (source if isinstance(source, (list, tuple)) else [source])]
    owners = {str(name).split("--")[0] for name in names if "--" in str(name)}
    return bool(owners - {model.model}) or getattr(model, "code_revision", None) not in (None, model.revision)


def _has_foreign_weights(model: Any) -> bool:
    """Parts of some models with sound are models of their own: their configuration names them (Ultravox), or they are
    in a folder in the model's (Kimi-Audio)."""
    config = getattr(model, "hf_config", None)
    names = {} if config is None else vars(config)
    return names.get("model_type") == "kimi_audio" or any(n.endswith("_model_id") and v for n, v in names.items())


def changed_files(config: Any) -> str | None:
    """Why the engine can't be named by the files of its model, or None. It has read them before anybody asks: if one
    has changed since its process began, it may have read what was there before."""
    model = config.model_config
    if not os.path.isdir(model.model) or changed_at(model.model) < psutil.Process().create_time():
        return None  # files of the hub's cache are named by their content
    return f"a file in {model.model} has changed since the engine began to start. Start it again"


def _refused_layers(kv_config: Any) -> str | None:
    groups, layout = kv_config.kv_cache_groups, layout_of(kv_config)
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    known = (FullAttentionSpec,) if current_platform.is_cpu() else (FullAttentionSpec, MLAAttentionSpec)
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in known:
        return f"layers of the kinds {kinds} (only one group of full attention is proven)"
    if groups[0].kv_cache_spec.sliding_window is not None:
        return "a sliding window"
    if current_platform.is_cpu() and layout != "LBHNC":  # staging.py takes any layout of a device
        return f"the KV cache layout {layout}"
    return None


def has_random_hashes(config: Any) -> bool:
    """Whether other processes compute other hashes of the same tokens."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    return not algorithm.startswith("sha256") and os.environ.get("PYTHONHASHSEED") is None


def warn_of_platform() -> None:
    if not current_platform.is_cpu():
        log.warning(
            "kvferry on %s: tested with a stand-in for the device, and with no GPU yet (docs/vllm.md). Compare answers "
            "with those of an engine without it before you rely on it",
            current_platform.get_device_name(),
        )


def warn_of_threads(config: Any) -> None:
    """vLLM leaves one more core of each rank idle as soon as there is any kv_transfer_config."""
    if not current_platform.is_cpu() or vllm.envs.VLLM_CPU_OMP_THREADS_BIND != "auto":
        return
    if vllm.envs.VLLM_CPU_NUM_OF_RESERVED_CPU is None:
        log.warning(
            "kvferry: vLLM computes with %d threads less, because it keeps cores free for any connector. Set "
            "VLLM_CPU_NUM_OF_RESERVED_CPU=%d to have as many as without one",
            config.parallel_config.local_world_size,
            config.parallel_config.local_world_size,
        )


def warn_of_version() -> None:
    if vllm.__version__.split("+")[0] not in TESTED:
        log.warning("kvferry is tested with vLLM %s; this is %s", ", ".join(TESTED), vllm.__version__)


def layout_of(kv_config: Any) -> str:
    return str(getattr(kv_config, "kv_cache_layout", None) or "LBHNC")


def fields_of(config: Any, kv_config: Any, epoch: str = "", machines: Sequence[influence.Facts] = ()) -> dict[str, str]:
    """The fields of the space of the connector: whatever changes a block's bytes. machines: what each rank computes
    with. epoch: other than "" since the engine was told to forget what it has computed. Raises ValueError or
    kvferry.RefusedError: the model can't be identified."""
    parallel = config.parallel_config
    group = kv_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    own = {
        "engine": _engine(config, spec.block_size, spec.head_size),
        "kv": f"{spec.dtype} {config.cache_config.cache_dtype} {layout_of(kv_config)} {len(group.layer_names)} layers"
        f" {spec.num_kv_heads}x{spec.head_size}+{spec.head_size_v} page {spec.page_size_bytes}",
        "parallel": f"tp {parallel.tensor_parallel_size} dp {parallel.data_parallel_size}"
        f" ep {parallel.enable_expert_parallel}",
    }
    return own | _fields_of_model(config, epoch, machines, by_ranks=True)


def tier_fields_of(config: Any, offload: Any, row_bytes: int, epoch: str = "") -> dict[str, str]:
    """The fields of the space of the secondary tier: whatever changes the bytes of a chunk, which is a row with the
    pages of all layers of all ranks. offload: vLLM's OffloadingConfig. Raises as fields_of does."""
    groups = [(g.group_id, g.tokens_per_block, g.layer_names) for g in offload.groups]
    own = {
        "engine": "offload " + _engine(config, min(g.tokens_per_block for g in offload.groups), None),
        "kv": f"{offload.model.dtype} {config.cache_config.cache_dtype} {offload.kv_cache_layout} row {row_bytes}"
        f" of {offload.cache.blocks_per_chunk} blocks, hashes of {offload.cache.tokens_per_hash} tokens",
        "groups": influence.digest(influence.plain(groups)),
        "parallel": _layout_of_ranks(offload) + f" dp {offload.parallel.data_parallel_size}"
        f" ep {config.parallel_config.enable_expert_parallel}",
    }
    return own | _fields_of_model(config, epoch, [influence.machine()], by_ranks=not _is_agnostic(offload))


def _is_agnostic(offload: Any) -> bool:
    """Whether vLLM vouches for one layout whatever the number of ranks."""
    return bool(offload.canonical_layout and offload.parallel.is_parallelism_agnostic)


def _layout_of_ranks(offload: Any) -> str:
    """How the pages of the ranks lie in a row. vLLM's canonical layout has the pages of the whole model, whatever the
    number of ranks, where it vouches for it. Without it a row has one part for each rank, with all of its layers, which
    is another order of bytes for each number of ranks."""
    parallel = offload.parallel
    if _is_agnostic(offload):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

        return f"canonical {canonical_format_id(offload.kv_cache_layout)}"
    ranks = f"tp {parallel.tp_size} pp {parallel.pp_size} pcp {parallel.pcp_size} dcp {parallel.dcp_size}"
    return f"{ranks} canonical {offload.canonical_layout} replicated {offload.replicated_layout}"


def _fields_of_model(config: Any, epoch: str, machines: Sequence[influence.Facts], *, by_ranks: bool) -> dict[str, str]:
    """What the connector and the tier name alike. by_ranks: the number of ranks changes the bytes."""
    model, settings = config.model_config, influence.settings(config, by_ranks=by_ranks)
    folder = model_folder(model.model, model.revision, getattr(config.load_config, "download_dir", None))
    names = {
        "model": f"sha256:{folder_digest(folder, log)}",
        "hash": f"{config.cache_config.prefix_caching_hash_algo} seed {os.environ.get('PYTHONHASHSEED', 'default')}",
        "compute": f"{model.dtype} {model.quantization} {model.model_impl} eager {model.enforce_eager}"
        f" lora {config.lora_config is not None} {_longest(model)}",
        "config": influence.digest(influence.plain(_without_names(model.hf_config.to_dict()))),
        "settings": influence.digest(settings),
    }
    machine = _common(machines)
    for what, text in (("settings", settings), *machine.items()):
        log.debug("kvferry names its blocks by %s: %s", what, text)
    names |= {f"machine.{what}": influence.digest(text) for what, text in machine.items()}
    return names | ({"epoch": epoch} if epoch else {})


def _common(machines: Sequence[influence.Facts]) -> influence.Facts:
    """The facts of all ranks: one text where they agree, as they do on one machine."""
    names = sorted({name for facts in machines for name in facts})
    return {name: " | ".join(_once([facts.get(name, "") for facts in machines])) for name in names}


def _once(texts: list[str]) -> list[str]:
    return texts[:1] if len(set(texts)) == 1 else texts


def _engine(config: Any, block_size: int, head_size: int | None) -> str:
    return f"vllm {vllm.__version__} torch {torch.__version__} {_attention(config, block_size, head_size)}"


def _attention(config: Any, block_size: int, head_size: int | None) -> str:
    """The CPU's pages are arranged for its instructions: those of one kind of CPU mean nothing to another. A GPU's are
    those of its kernels, which vLLM chooses by the device. head_size: None = the model's."""
    if not current_platform.is_cpu():
        attention = influence.plain(getattr(config, "attention_config", None))
        return f"{current_platform.get_device_name()} {influence.digest(attention)}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, head_size = config.model_config, head_size or config.model_config.get_head_size()
    isa = _get_attn_isa(model.dtype, block_size, head_size, config.cache_config.cache_dtype)
    return f"cpu_attn {isa} {torch.backends.cpu.get_cpu_capability()}"


def _longest(model: Any) -> str:
    """Some kinds of rope choose their factors by the longest prompt that the engine takes."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {str(rope.get("rope_type", "default"))} if "rope_type" in rope or not rope else {"unknown"}
    return "" if kinds <= set(PLAIN_ROPE) else f"max_model_len {model.max_model_len}"


def _without_names(config: dict[str, Any]) -> dict[str, Any]:
    """Where the model lies and who wrote its configuration changes nothing."""
    return {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}


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
        return b"" if request.lora_request is None else self._adapter(request.lora_request)

    def _adapter(self, lora: Any) -> bytes | None:
        name = (lora.lora_int_id, lora.lora_path)
        known = None if getattr(lora, "load_inplace", False) else self._digests.get(name)
        if known == b"":
            return None
        try:
            digest = bytes.fromhex(folder_digest(model_folder(lora.lora_path), log))
            if known is not None and digest != known:
                raise ValueError("its files have changed while it is loaded")
        except (OSError, ValueError, kvferry.Error) as error:
            log.warning("kvferry: requests of the LoRA adapter %s are not stored: %s", lora.lora_name, error)
            digest = b""
        self._digests[name] = digest
        return digest or None
