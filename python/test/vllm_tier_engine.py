# SPDX-License-Identifier: Apache-2.0
"""The engine of vllm_engine.py with vLLM's own offloading connector and its tiers, of which the last is KvferryTier.

Scheduler's half, managers, primary tier and keys are vLLM's; only its copies between GPU and CPU are ours
(vllm_memcpy.py). Without a URL it has no secondary tier: what each case is compared with."""

import secrets
from types import SimpleNamespace

import torch
from conftest import until
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus
from vllm_engine import BLOCK, FIELDS, LAYERS, ROW, SHA, SLOTS, Engine

from kvferry.vllm import identity

CHUNKS = 32  # of the primary tier


def configs(extra, *, tp=1, rank=0, engine_id="", dtype=torch.float32, block=BLOCK, slots=SLOTS):
    """As much of VllmConfig as vLLM's offloading reads, and a whole KVCacheConfig."""
    transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id=engine_id, kv_role="kv_both")
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        kv_events_config=None,
        lora_config=None,
        speculative_config=None,
        use_v2_model_runner=False,
        attention_config=SimpleNamespace(hisparse_config=None),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            model="toy", revision=None, dtype=dtype, use_mla=False, is_multimodal_model=False, model_weights="",
            get_total_num_kv_heads=lambda: tp,
        ),
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256", enable_prefix_caching=True, cache_dtype="auto",
            kv_cache_layout="LBHNC", prefix_cache_retention_interval=None, block_size=block, prefix_match_unit=None,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=1, prefill_context_parallel_size=1,
            decode_context_parallel_size=1, world_size=tp, rank=rank, data_parallel_index=0, data_parallel_size=1,
            data_parallel_rank_local=None, distributed_executor_backend="mp", nnodes_within_dp=1,
            cp_kv_cache_interleave_size=1, enable_expert_parallel=False,
        ),
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=ROW // 2, dtype=dtype)
    group = KVCacheGroupSpec(layer_names=[f"model.layers.{i}.attn" for i in range(LAYERS)], kv_cache_spec=spec)
    return config, KVCacheConfig(
        num_blocks=slots, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout="LBHNC"
    )


def offload_of(extra=None, **kind):
    """The configuration of an engine, and what of it vLLM gives to the tiers."""
    config, kv_config = configs(extra or {}, engine_id="engine", **kind)
    return config, build_offloading_config(config, kv_config)


def name_without_files(monkeypatch, model=FIELDS["model"]):
    """The part of the identity that vLLM's model and device decide."""
    monkeypatch.setattr(
        identity, "_fields_of_model", lambda c, epoch, machines, by_ranks: {"model": model, "epoch": epoch}
    )
    monkeypatch.setattr(identity, "_attention", lambda c, block, head: "attention")


class TierEngine(Engine):
    """model: names it, as it has no files here. more: options of the tier. extra: those of vLLM's offloading."""

    def __init__(self, monkeypatch, url, *, model=FIELDS["model"], tp=1, chunks=CHUNKS, extra=None, **more):
        kind = {name: more.pop(name) for name in ("dtype", "block", "slots") if name in more}
        name_without_files(monkeypatch, model)
        tier = {"type": "KvferryTier", "module_path": "kvferry.vllm", "store": url, "lookup_timeout": 30.0,
                "patience": 20.0, **more}  # fmt: skip
        extra = {
            "spec_name": "MemcpyTieringSpec",
            "spec_module_path": "vllm_memcpy",
            "cpu_bytes_to_use": chunks * 4096 * (1 if tp * LAYERS * BLOCK * ROW * 4 <= 4096 else 2),
            "secondary_tiers": [tier] if url else [],
            **(extra or {}),
        }
        engine_id = secrets.token_hex(8)
        self.region = f"/dev/shm/vllm_offload_{engine_id}.mmap"

        def connector(role, rank):
            config, kv_config = configs(extra, tp=tp, rank=rank, engine_id=engine_id, **kind)
            return OffloadingConnector(config, role, kv_config)

        block, dtype, slots = kind.get("block", BLOCK), kind.get("dtype", torch.float32), kind.get("slots", SLOTS)
        self.workers = [connector(KVConnectorRole.WORKER, rank) for rank in range(tp)]
        self.pages = []
        for worker in self.workers:
            pages = {f"model.layers.{i}.attn": torch.zeros(slots, 1, block, ROW, dtype=dtype) for i in range(LAYERS)}
            worker.register_kv_caches(pages)
            self.pages.append(pages)
        try:
            self.scheduler = connector(KVConnectorRole.SCHEDULER, 0)
        except Exception:
            for worker in self.workers:
                worker.shutdown()
            raise
        self.manager = self.scheduler.connector_scheduler.manager
        self.tier = self.manager.secondary_tiers[0] if self.manager.secondary_tiers else None
        self.hasher = get_request_block_hasher(block, SHA)
        self.free, self.slots, self.told = list(range(1, slots)), {}, {}
        self.finished, self.arrived, self.count = set(), {}, 0
        self.ended = set()
        build = self.scheduler.build_connector_meta
        self.scheduler.build_connector_meta = lambda output: build(self._with_ended(output))

    def close(self):
        """As the engine's processes do at their end. Once."""
        for connector in (self.scheduler, *self.workers):
            connector.shutdown()
        self.close = lambda: None

    def _with_ended(self, output):
        output.finished_req_ids, self.ended = self.ended, set()
        return output

    # ---- requests

    def end(self, request, free=True, status=RequestStatus.FINISHED_STOPPED):
        request.status = status
        super().end(request, free)
        self.ended.add(request.request_id)
        self.step({})

    def ask(self, request, computed=0):
        answers = []

        def is_answered():
            answers.append(self.scheduler.get_num_new_matched_tokens(request, computed))
            return answers[-1][0] is not None or not self.step({})

        until(is_answered, "the tier answers")
        num, is_async = answers[-1]
        assert is_async == (num > 0), "the engine must not wait for nothing"
        return num

    def allocate(self, request, num_tokens, external):
        own = self.slots.setdefault(request.request_id, [])
        while len(own) * BLOCK < num_tokens:
            own.append(self.free.pop(0))
        blocks = [SimpleNamespace(block_id=slot, is_null=False, block_hash=None) for slot in own]
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=(blocks,)), external)
        return own

    def step(self, scheduled, new=()):
        for request, (computed, _) in scheduled.items():
            request.num_computed_tokens = computed
        return super().step(scheduled, new)

    def load(self, request, computed=0, steps=2000):
        """As in vLLM, a token is always left to compute."""
        return min(super().load(request, computed, steps), request.num_tokens - 1)

    def settle(self):
        until(lambda: self.step({}) and not self.scheduler.has_pending_push_work(), "the saves end")

    def answer(self, ids, **more):
        """A whole request: how many of its tokens were loaded, and the KV of its blocks then."""
        request = self.request(ids, **more)
        loaded = self.load(request)
        self.prefill(request, loaded)
        pages = self.pages_of(request)
        self.settle()
        self.end(request)
        return loaded, pages

    def pages_of(self, request):
        slots = self.slots[request.request_id][: request.num_tokens // BLOCK]
        return torch.stack([torch.stack([cache[slots] for cache in pages.values()]) for pages in self.pages])

    def stats(self):
        """vLLM's counters of the tier, since they were asked for last."""
        stats = self.scheduler.get_kv_connector_stats()
        return {} if stats is None else stats.reduce()
