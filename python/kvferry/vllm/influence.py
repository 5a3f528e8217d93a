# SPDX-License-Identifier: Apache-2.0
"""What of an engine decides the bytes of a block: its settings, its environment and its machine.

Everything counts unless it is listed here as without influence. So a setting that a new version of vLLM adds names
other blocks, and costs misses at most. docs/vllm-identity.md lists all variables, and a test compares it with vLLM."""

import dataclasses
import enum
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED_CONFIGS = _names("""
    structured_outputs_config observability_config logging_config profiler_config kv_transfer_config kv_events_config
    ec_transfer_config ec_manager_config reasoning_config watermark_config weight_transfer_config aux_output_config
    instance_id shutdown_timeout
""")  # fmt: skip
"""Parts of the configuration that act before the first layer or after the last one, or on the process only."""

IGNORED_FIELDS = {
    # The files of the model, and what is computed from config.json, are fields of their own (identity.fields_of).
    "model_config": _names("""
        model tokenizer tokenizer_mode tokenizer_revision seed hf_config hf_text_config hf_config_path hf_overrides
        allowed_local_media_path allowed_media_domains revision max_model_len spec_target_max_model_len max_logprobs
        logprobs_mode use_fp64_gumbel return_sampling_mask skip_tokenizer_init served_model_name config_format hf_token
        generation_config override_generation_config logits_processors io_processor_plugin renderer_num_workers
        pooler_config
    """),
    "cache_config": _names("""
        gpu_memory_utilization is_attention_free num_gpu_blocks_override num_gpu_blocks num_cpu_blocks
        kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes enable_prefix_caching
        prefix_cache_retention_interval user_specified_block_size _block_size_resolved kv_offloading_size
        kv_offloading_backend
    """),
    "parallel_config": _names("""
        data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_master_ip
        data_parallel_rpc_port data_parallel_master_port data_parallel_backend data_parallel_external_lb
        data_parallel_hybrid_lb max_parallel_loading_workers ray_workers_use_nsight ray_runtime_env placement_group
        master_addr master_port node_rank rank numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
        distributed_timeout_seconds cpu_distributed_timeout_seconds _data_parallel_master_port_list _coord_store_port
        data_parallel_index _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config
    """),
    "scheduler_config": _names("""
        runner_type max_num_queued_reqs max_num_queued_tokens watermark scheduler_reserve_full_isl
        stream_interval
    """),
    "compilation_config": _names("""
        debug_dump_path cache_dir compile_cache_save_format enabled_custom_ops disabled_custom_ops traced_files
        compilation_time encoder_compilation_time static_forward_context static_all_moe_layers local_cache_dir
    """),
    "load_config": _names("""
        download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        use_tqdm_on_load pt_load_map_location
    """),
    "lora_config": frozenset(["max_cpu_loras"]),
}  # fmt: skip
"""Fields without influence. All other fields count, and those that a new version adds."""

IGNORED_VARIABLES = _names("""
    MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
    VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE
    VERBOSE VLLM_SKIP_VERSION_SUFFIX
    VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH
    VLLM_RPC_BASE_PATH VLLM_DEBUG_DUMP_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_MODEL_REDIRECT_PATH
    VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
    VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CPU_KVCACHE_SPACE
    VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT
    VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT
    VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_EC_SIDE_CHANNEL_HOST
    VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_STORE_TIER_LOG
    VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
    MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES
    VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
    VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS LOCAL_RANK CUDA_VISIBLE_DEVICES
    VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL
    VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE
    VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX
    VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL VLLM_LOG_BATCHSIZE_INTERVAL
    VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_DISABLE_LOG_LOGO
    VLLM_DEBUG_WORKSPACE VLLM_DEBUG_MFU_METRICS VLLM_GC_DEBUG VLLM_PROCESS_NAME_PREFIX
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING
    VLLM_ENGINE_READY_TIMEOUT_S VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH
    VLLM_RUST_FRONTEND_PATH VLLM_USE_FASTOKENS VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_MSGPACK_ZERO_COPY_THRESHOLD
    VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_MQ_MAX_CHUNK_BYTES_MB
    VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
    VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE
    VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_ENFORCE_STRICT_TOOL_CALLING
    VLLM_XGRAMMAR_CACHE_MB VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_V1_USE_OUTLINES_CACHE
    VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING
    VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE
    VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES
    VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT
    VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES
    VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_IMAGE_PIXELS VLLM_MEDIA_CONNECTOR
    VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD VLLM_FASTSAFETENSORS_QUEUE_SIZE
    VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_COMPUTE_NANS_IN_LOGITS
    VLLM_RAISE_ON_LOGIT_NANS VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_GPU_SYNC_CHECK
    VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU LD_LIBRARY_PATH CUDA_HOME VLLM_PLUGINS
""")
"""Variables of vLLM without influence on a block: build, paths, addresses, credentials, logs, the server, the sampler.
VLLM_CPU_OMP_THREADS_BIND acts through the number of threads and VLLM_PLUGINS through the plugins, which both count."""

REFUSED_VARIABLES = {
    "VLLM_TEST_FORCE_LOAD_FORMAT": "the weights are not those of files",
    "VLLM_USE_MODELSCOPE": "the files of the model are not looked up there",
}
"""Variables of vLLM with which no engine starts, and why."""

LIBRARIES = re.compile(r"(ONEDNN|DNNL|MKL|OMP|KMP|GOMP|BLIS|OPENBLAS|ATEN|TORCH|TORCHINDUCTOR|TORCHDYNAMO|TRITON)_")
"""Variables of the libraries that compute."""
IGNORED_LIBRARY = re.compile(
    r"(.*_(VERBOSE|LOGS?|DEBUG|TRACE|CACHE_DIR|DUMP_DIR|AFFINITY|PLACES|BIND|NUM_THREADS|WAIT_POLICY|BLOCKTIME|TPAUSE|"
    r"STACKSIZE|COMPILE_THREADS|DISPLAY_ENV|SHOW_CPP_STACKTRACES)|TORCH_(HOME|NCCL_.*|DISTRIBUTED_.*|ELASTIC_.*))"
)
"""Those of them that only log, cache or place threads. The number of threads counts by itself."""

PACKAGES = (
    "transformers", "compressed-tensors", "triton", "triton-cpu", "zentorch", "intel-extension-for-pytorch",
    "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "flash-attn", "flash-attn-3", "flash-mla",
    "deep-gemm", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
"""Packages that vLLM computes with, where they are installed."""

Facts = dict[str, str]


RANKS = _names("tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size world_size nnodes")


def settings(config: Any, *, by_ranks: bool = True) -> str:
    """All settings of the engine that count, as JSON. The same in each process of each engine with these settings.
    by_ranks: so does the number of ranks."""
    parts = {}
    for name, part in _fields(config):
        if name == "quant_config":  # made from the model's files and model_config
            parts[name] = _name(type(part))
        elif name not in IGNORED_CONFIGS:
            ranks = RANKS if name == "parallel_config" and not by_ranks else frozenset()
            parts[name] = _without(part, IGNORED_FIELDS.get(name, frozenset()) | ranks)
    return json.dumps(parts, sort_keys=True)


def variables(environment: Mapping[str, str]) -> str:
    """The variables that are set and count, one a line: those of vLLM, and those of the libraries."""
    import vllm.envs

    known = set(vllm.envs.environment_variables) - IGNORED_VARIABLES
    lines = [f"{k}={v}" for k, v in environment.items() if (k in known or _is_of_library(k)) and v != ""]
    return "\n".join(sorted(lines))


def refused_variable(environment: Mapping[str, str]) -> str | None:
    """Why the engine is refused because of a variable, or None."""
    for name, why in REFUSED_VARIABLES.items():
        if environment.get(name, "").strip().lower() not in ("", "0", "false"):
            return f"the variable {name}: {why}"
    return None


def _is_of_library(name: str) -> bool:
    return LIBRARIES.match(name) is not None and IGNORED_LIBRARY.fullmatch(name) is None


def machine() -> Facts:
    """What this process computes with: its threads, processor, libraries and plugins, and torch's switches. To be asked
    in the process of a worker, whose threads compute."""
    preloaded = sorted(os.path.basename(path) for path in re.split("[: ]", os.environ.get("LD_PRELOAD", "")) if path)
    return {
        "threads": str(torch.get_num_threads()),
        "processor": processor(),
        "device": str(current_platform.get_device_name()),
        "torch": _torch_switches(),
        "build": f"{vllm.__version__} {getattr(vllm, '__commit__', '')} {torch.__config__.show()}",
        "packages": " ".join(_packages()),
        "plugins": " ".join(_plugins()),
        "preload": " ".join(preloaded),
        "variables": variables(os.environ),
    }


def accelerator(config: Any, device: torch.device, layers: Iterable[str], layout: Any) -> Facts:
    """What a worker on a device computes with besides `machine`: kernels, and the order of their sums, are chosen by
    the kind of device, the number of its processors and the versions of its libraries. layout: of its pages, as the
    attention backend wants them."""
    kind = torch.get_device_module(device).get_device_properties(device)
    names = ("name", "major", "minor", "multi_processor_count", "warp_size", "gcnArchName")
    versions = [torch.version.cuda, torch.version.hip, torch.backends.cudnn.version(), _driver()]
    return {
        "accelerator": json.dumps({name: getattr(kind, name, None) for name in names}),
        "accelerator.versions": " ".join(map(str, versions)),
        "attention": " ".join(_backends(config, layers)),
        "pages": json.dumps(layout),
    }


def _driver() -> str:
    """It compiles kernels for devices that are newer than a library."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _backends(config: Any, layers: Iterable[str]) -> list[str]:
    """Which vLLM has chosen in this process for each of these layers."""
    known = config.compilation_config.static_forward_context
    return sorted({_name(known[name].get_attn_backend()) for name in layers})


def _torch_switches() -> str:
    """Some of them are attributes of one version only."""
    names = (
        "backends.fp32_precision", "backends.mkldnn.enabled", "backends.mkldnn.deterministic",
        "backends.mkldnn.allow_tf32", "backends.mkldnn.fp32_precision", "backends.mkldnn.matmul.fp32_precision",
        "backends.mkldnn.conv.fp32_precision", "backends.cuda.matmul.allow_tf32", "backends.cudnn.allow_tf32",
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    )  # fmt: skip
    values = {name: str(_attribute(torch, name)) for name in names} | {
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "dtype": str(torch.get_default_dtype()),
        "subnormals": str(torch.tensor(1e-40, dtype=torch.float32).mul(1.0).item() != 0.0),
    }
    return json.dumps(values, sort_keys=True)


def _attribute(of: Any, path: str) -> Any:
    for name in path.split("."):
        of = getattr(of, name, None)
    return of


def processor() -> str:
    """The kind of processor, what torch uses of it, and the sizes of its caches: libraries choose their kernels, and
    the order of their sums, by all of these."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        text = ""
    facts = dict(re.findall(r"^([^\t\n:]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    isa = sorted(f for f in flags if re.match("avx|amx|fma|sse|f16c|bmi|sve|sme|asimd|bf16|i8mm|fphp|neon", f))
    names = [facts.get(k, "") for k in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")]
    caches = sorted(
        f"{path.parent.name}:{path.read_text().strip()}"
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    )
    return " ".join([torch.backends.cpu.get_cpu_capability(), *filter(None, names), *isa, *caches])


def _packages() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name}=={version(name)}"
        except PackageNotFoundError:
            continue


def _plugins() -> Iterator[str]:
    """Plugins may replace what computes. Ours does not."""
    import vllm.envs

    allowed = vllm.envs.VLLM_PLUGINS
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        for point in sorted(entry_points(group=group), key=lambda p: (p.name, p.value)):
            is_ours = point.value.startswith("kvferry.")
            is_vllms = point.value.startswith("vllm.")  # resolvers of LoRA adapters
            if not is_ours and not is_vllms and (allowed is None or point.name in allowed):
                yield f"{point.name}={point.value}=={point.dist.version if point.dist else ''}"


def digest(value: Any) -> str:
    """Of what JSON has."""
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---- values of a configuration, as what JSON has


def _fields(of: Any) -> list[tuple[str, Any]]:
    names = [f.name for f in dataclasses.fields(of)] if dataclasses.is_dataclass(of) else sorted(vars(of))
    return [(name, getattr(of, name, None)) for name in names]


def _without(part: Any, ignored: Iterable[str]) -> Any:
    if part is None or not (dataclasses.is_dataclass(part) or hasattr(part, "__dict__")):
        return plain(part)
    return {name: plain(value) for name, value in _fields(part) if name not in ignored}


def plain(value: Any, depth: int = 8) -> Any:
    """A value as JSON has it, without what differs from one process to the next. What has no value of its own is named
    by its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (torch.dtype, torch.device, Path)):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, type) or callable(value):
        return _name(value)
    if depth == 0:
        raise ValueError("kvferry: a setting of vLLM is nested too deeply to name the engine by it")
    if isinstance(value, Mapping):
        return {str(k): plain(v, depth - 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, depth - 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(plain(v, depth - 1), sort_keys=True) for v in value)
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return [_name(type(value)), {name: plain(v, depth - 1) for name, v in _fields(value)}]
    return _name(type(value))


def _name(of: Any) -> str:
    return f"{getattr(of, '__module__', '')}.{getattr(of, '__qualname__', type(of).__qualname__)}"
