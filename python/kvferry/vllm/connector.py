# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM calls. It makes one of the two halves, hands each call on to it, and keeps the engine safe from
our own faults: after one, kvferry is off, and the engine computes."""

import functools
import secrets
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

import kvferry
from kvferry.vllm import identity, influence
from kvferry.vllm.guard import never_fails, nothing
from kvferry.vllm.messages import Machine, Report, Step
from kvferry.vllm.metrics import PromMetrics, Stats
from kvferry.vllm.plan import Planner
from kvferry.vllm.scheduler import Scheduler
from kvferry.vllm.settings import Settings, log, share_handlers, without_password
from kvferry.vllm.worker import Worker

# What this connector overrides. A version of vLLM that has dropped one of them does not call it any more.
HOOKS = (
    "bind_connector_metadata", "build_connector_meta", "build_connector_worker_meta", "clear_connector_metadata",
    "get_block_ids_with_load_errors", "get_finished", "get_handshake_metadata", "get_kv_connector_stats",
    "get_num_new_matched_tokens", "handle_preemptions", "on_new_request", "register_kv_caches", "request_finished",
    "requires_kv_delivery", "reset_cache", "save_kv_layer", "set_xfer_handshake_metadata", "shutdown", "start_load_kv",
    "take_events", "update_connector_output", "update_state_after_alloc", "wait_for_layer_load", "wait_for_save",
)  # fmt: skip


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """docs/vllm.md has the options. Raises ValueError at start: an option is wrong, or this engine is not proven."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _require_hooks()
        share_handlers()
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._is_on = self._may_run(vllm_config, kv_cache_config)
        if self._is_on:
            self._start(vllm_config, role, kv_cache_config)

    def _may_run(self, config: Any, kv_config: Any) -> bool:
        if config.model_config.runner_type == "pooling":
            log.info("kvferry is off: a pooling model computes no KV to keep")
            return False
        if identity.has_random_hashes(config):
            log.warning(identity.RANDOM_HASHES, config.cache_config.prefix_caching_hash_algo)
            return False
        why = identity.refusal(config, kv_config)
        if why is not None:
            raise ValueError(f"kvferry does not support {why}. To start without it, leave out --kv-transfer-config.")
        return True

    def _start(self, config: Any, role: KVConnectorRole, kv_config: Any) -> None:
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        settings = Settings.of(transfer.kv_connector_extra_config)
        transfer.kv_load_failure_policy = "recompute"  # a block that can't be loaded is no failure of a request
        store = kvferry.Store(settings.store, secret_files=settings.secret_files, drain=1.0)
        group = kv_config.kv_cache_groups[0]
        block = group.kv_cache_spec.block_size
        if role == KVConnectorRole.SCHEDULER:
            identity.warn_of_version()
            identity.warn_of_platform()
            identity.warn_of_threads(config)
            self._scheduler = Scheduler(
                store,
                functools.partial(identity.fields_of, config, kv_config),
                settings,
                Planner(
                    block,
                    len(group.layer_names) * group.kv_cache_spec.page_size_bytes,
                    config.scheduler_config.max_num_batched_tokens,
                ),
                block_tokens=block,
                hash_tokens=getattr(kv_config, "hash_block_size", None) or block,  # vLLM 0.31 hashes whole blocks
                ranks=parallel.tensor_parallel_size,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                shares_prefixes=config.cache_config.enable_prefix_caching,
                publishes=bool(config.kv_events_config and config.kv_events_config.enable_kv_cache_events),
            )
            log.info("kvferry is on: blocks of %d tokens, %s", block, ", ".join(map(without_password, settings.store)))
        else:
            self._worker = Worker(
                store,
                settings,
                block_tokens=block,
                rank=parallel.rank % parallel.tensor_parallel_size,
                layers=list(group.layer_names),
                num_blocks=kv_config.num_blocks,
            )

    def _turn_off(self, where: str) -> None:
        log.exception(
            "kvferry is off: a fault of its own in %s. Please report it. The engine computes without it.", where
        )
        self._is_on = False
        if self._worker is not None:
            self._worker.give_up()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is lost is a miss later

    # ---- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Raises at start: the engine can't be identified."""
        why = identity.changed_files(self._vllm_config)
        if why is not None:
            log.warning("kvferry is off: %s.", why)
            self._is_on = False
        if self._is_on and self._scheduler is not None:
            self._scheduler.meet([metadata[rank].facts for rank in sorted(metadata)])

    @never_fails(nothing)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.begin(request)

    @never_fails(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens) if self._scheduler else (0, False)

    @never_fails(nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step = self._build_step(scheduler_output)
        if step is None:
            step = Step(is_last=True, stranded=self._scheduler.promised if self._scheduler else {})
            if self._scheduler:
                self._scheduler.promised = {}
        return step

    @never_fails(nothing)
    def _build_step(self, scheduler_output: Any) -> Step | None:
        return self._scheduler.step(scheduler_output) if self._scheduler else None

    @never_fails(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.finished(connector_output)
            report = connector_output.kv_connector_worker_meta
            if isinstance(report, Report) and report.is_off:
                log.warning("kvferry is off: it is off in a worker, and no block is whole without that worker's part")
                self._is_on = False

    @never_fails(tuple)
    def take_events(self) -> Iterable[Any]:
        """What the store has got and lost, as vLLM's KV events (medium "STORAGE")."""
        return self._scheduler.announcer.take() if self._scheduler else ()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @never_fails(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.end(request.request_id)
        return False, None  # the fence before the next use of its pages is enough

    @never_fails(lambda: True)
    def reset_cache(self) -> bool:
        """vLLM asks for this after a change of the weights: what was stored before is not found any more."""
        if self._scheduler is not None:
            self._scheduler.forget(secrets.token_hex(8))
        return True

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._is_on and self._worker is not None:
            self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> Machine | None:
        if not self._is_on or self._worker is None:
            return None
        return Machine(influence.machine() | self._worker.accelerator(self._vllm_config))

    @never_fails(nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None:
            self._worker.before_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._start_loads()
            if not self._is_on or self._step().stranded:
                self._worker.refuse_loads(self._step())

    @never_fails(nothing)
    def _start_loads(self) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # a request waits until all of its layers are loaded

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # blocks are saved with all of their layers, after the step

    @never_fails(nothing)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._finished_loads() or None

    def _finished_loads(self) -> set[str]:
        """Also when kvferry is off: the engine waits for what it has begun."""
        if self._worker is None:
            return set()
        try:
            return self._worker.finished_loads() if self._is_on else self._worker.take_loaded()
        except Exception:
            self._turn_off("get_finished")
            return self._worker.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_pages() if self._worker else set()

    def build_connector_worker_meta(self) -> Any:
        if self._worker is None or self._is_on:
            return self._worker.take_report() if self._worker else None
        return Report(is_off=True)

    def get_kv_connector_stats(self) -> Stats | None:
        return self._worker.counters.take() if self._worker else None

    def _step(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step

    # ---- both

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @never_fails(nothing)
    def shutdown(self) -> None:
        half = self._scheduler or self._worker
        self._is_on = False
        if half is not None:
            half.close()


def _require_hooks() -> None:
    missing = [name for name in HOOKS if not hasattr(KVConnectorBase_V1, name)]
    if missing:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} does not have {', '.join(missing)} any more, which kvferry {kvferry.__version__} "
            f"needs. Use vLLM {', '.join(identity.TESTED)}, or a newer kvferry."
        )
