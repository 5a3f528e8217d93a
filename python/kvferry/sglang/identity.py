# SPDX-License-Identifier: Apache-2.0
"""What may be shared with whom: the fields of a pool's space, and the ranks in its keys."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch

from kvferry._adapter import Options, version_of
from kvferry._weights import folder_digest, model_folder

log = logging.getLogger("kvferry.sglang")

TESTED = "0.5.23"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IGNORED = _names("""
    base_gpu_id gpu_id_step random_seed mlx_enable_sampling watchdog_timeout soft_watchdog_timeout sleep_on_idle
    use_ray custom_sigquit_handler numa_node gc_threshold decoupled_spec_bind_endpoint
    decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role disaggregation_mode
    disaggregation_decode_allocation_policy disaggregation_transfer_backend disaggregation_enable_kv_checksum
    disaggregation_bootstrap_port disaggregation_ib_device disaggregation_decode_enable_radix_cache
    disaggregation_decode_enable_offload_kvcache disaggregation_decode_retraction_backup
    num_reserved_decode_tokens disaggregation_decode_extra_slots disaggregation_decode_polling_interval
    enable_pd_role_switch optimistic_prefill_attempts encoder_transfer_backend encoder_urls
    encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder enable_pdmux
    pdmux_config_path sm_group_num disaggregation_decode_host_receive_threshold enable_response_store
    tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
    skip_tokenizer_init host port fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode
    grpc_port grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args skip_server_warmup warmups
    enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile ssl_certfile
    ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name weight_version
    chat_template trust_request_chat_template hf_chat_template_name completion_template file_storage_path
    enable_cache_report return_input_ids return_output_ids reasoning_parser default_chat_template_kwargs
    strip_thinking_cache enable_strict_thinking tool_call_parser tool_server sampling_defaults
    asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params allow_auto_truncate
    stream_interval batch_notify_size stream_response_default_include_usage incremental_streaming_output
    enable_streaming_session constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
    constrained_json_max_whitespace_cnt enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
    dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode log_level
    log_level_http log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port
    enable_mfu_metrics enable_metrics_for_all_schedulers load_snapshot_publish_interval
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels
    bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
    generation_tokens_buckets gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging
    kv_events_config load_publish_endpoint enable_forward_pass_metrics forward_pass_metrics_worker_id
    forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint otlp_service_name
    export_metrics_to_file export_metrics_to_file_dir stat_loggers kv_canary kv_canary_real_data
    kv_canary_sweep_interval debug_tensor_dump_output_folder debug_tensor_dump_layers
    debug_tensor_dump_input_file msprobe_dump_config radix_eviction_policy _radix_eviction_policy_explicitly_set
    radix_eviction_policy_config disable_radix_cache enable_session_radix_cache radix_cache_backend
    enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction
    hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
    hicache_storage_prefetch_policy hicache_storage_backend_extra_config
    hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
    enable_unified_cache_external_linker unified_cache_external_linker_backend
    unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache lmcache_config_file
    enable_flexkv flexkv_config_file mem_fraction_static max_queued_requests max_total_tokens
    prefill_decode_interval prefill_decode_interval_min_bs schedule_policy enable_priority_scheduling
    disable_priority_preemption default_priority_value abort_on_priority_when_disabled
    schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy
    schedule_conservativeness swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set
    prefill_only_disable_kv_cache disable_overlap_schedule scheduler_recv_interval max_mamba_cache_size
    mamba_full_memory_ratio enable_prefill_delayer prefill_delayer_max_delay_passes
    prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
    prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
    min_free_slots_delay model_path revision download_dir is_embedding startup_weight_load_mode
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    weight_loader_drop_cache_after_load engine_info_bootstrap_port
    remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports weight_cache_socket weight_cache_timeout
    checkpoint_engine_wait_weights_before_ready model_checksum nccl_port dist_timeout dist_init_addr
    gated_launch_port node_rank dp_size load_balance_method ep_join_rank_offset tp_size pp_size dcp_size
    attn_cp_size nnodes lora_paths max_loaded_loras lora_eviction_policy lora_drain_wait_threshold
    enable_lora_overlap_loading lora_strict_loading enable_memory_saver enable_weights_cpu_backup
    enable_draft_weights_cpu_backup enable_custom_logit_processor enable_watermark watermark_config
    watermark_key watermark_key_b watermark_context_window watermark_mixing_probability
    watermark_max_probability watermark_default_enabled watermark_enforce_all enable_return_hidden_states
    return_hidden_states_mode sampling_mask_max_tokens disable_outlines_disk_cache
    enable_broadcast_mm_inputs_process mm_processor_worker_num mm_io_worker_num allowed_media_domains
    media_url_max_file_size_mb mm_preprocess_cache_size_mb limit_mm_data_per_request enable_mm_global_cache
    mm_global_cache_backend mm_feature_transport
""")
"""Settings of the server without influence on a page: places, addresses, logs, the HTTP server, the order and the room
of requests; and the ranks, which are a field of their own. All others count, and those that a new version adds."""

VARIABLES = re.compile(
    r"SGLANG_(?!(.*_)?(LOG|LOGS|LOGGING|DIR|PATH|PORT|HOST|IP|TIMEOUT|TEST|PROFILE|PROFILER|METRICS|INTERVAL|API_KEY|"
    r"HICACHE|MOONCAKE|NIXL)(_|$))"
)
"""Variables of SGLang that count."""

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
    if getattr(config, "dcp_size", 1) > 1:
        raise ValueError("kvferry does not support decode context parallelism: its ranks have other tokens of a page")
    return {
        "engine": f"sglang {version()} torch {torch.__version__} {_device()}",
        "model": model,
        "kv": f"{type(pool).__name__} {pool.dtype} {pool.layout} page {pool.page_size}"
        f" layers {getattr(pool, 'start_layer', 0)}-{getattr(pool, 'end_layer', '')}"
        f" bytes {page_bytes(pool)} {getattr(pool, 'storage_format_tag', None)}",
        "pool": name,
        "compute": _settings(),
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


def _settings() -> str:
    """A hash of all settings and variables of the server that count. The log has them at the level DEBUG."""
    args = server_args()
    if dataclasses.is_dataclass(args):
        names = [field.name for field in dataclasses.fields(args)]
    else:
        names = list(getattr(args, "__struct_fields__", None) or ([] if args is None else vars(args)))
    counting = {name: getattr(args, name, None) for name in names if name not in IGNORED and not name.startswith("_")}
    counting["variables"] = {k: v for k, v in os.environ.items() if VARIABLES.match(k)}
    text = json.dumps(counting, sort_keys=True, default=_plain)
    log.debug("kvferry names its pages by the settings %s", text)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Of a setting that JSON does not have."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    fields = getattr(value, "__struct_fields__", None) or getattr(value, "__dict__", None)
    return {name: getattr(value, name) for name in fields} if fields else str(type(value))


def _device() -> str:
    """Kernels round differently on other devices."""
    return str(torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability())


def _tensor_parallel(config: Any, pool: Any, name: str) -> str:
    return "tp any" if is_replicated(config, pool, name) else f"tp {config.tp_size}"
