# SPDX-License-Identifier: Apache-2.0
"""The part of vLLM that calls a connector, small enough for tests of seconds: vLLM's own requests, block hashes and
messages, with a pool of pages and a "model" whose KV of a token is a number made from all tokens up to it.

`Engine.run(ids)` goes through the steps of scheduler and worker in vLLM's order (engines' `schedule`, then the model
runner's), so that what a connector gets wrong shows as a wrong number in a page."""

import hashlib
from types import SimpleNamespace

import torch
from conftest import until
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvferry.vllm import identity
from kvferry.vllm.connector import KvferryConnector
from kvferry.vllm.messages import Machine

BLOCK, LAYERS, SLOTS, ROW = 4, 3, 64, 8
SHA = get_hash_fn_by_name("sha256")
init_none_hash(SHA)
# The model's part of the space is known without files: what identifies them has tests of its own.
FIELDS = {"engine": "test", "model": "0" * 64, "kv": "f32"}


def expected(ids, block):
    """The KV of a block: for each layer and token a row that all tokens before it change."""
    rows = []
    for layer in range(LAYERS):
        for end in range(block * BLOCK + 1, (block + 1) * BLOCK + 1):
            digest = hashlib.sha256(repr((layer, list(ids[:end]))).encode()).digest()
            rows.append(list(digest[:ROW]))
    return torch.tensor(rows, dtype=torch.float32).reshape(LAYERS, BLOCK * ROW)


def configs(options, *, role="kv_both", hash_tokens=BLOCK, tp=1, rank=0, events=True, **cache):
    """As much of VllmConfig and KVCacheConfig as the connector reads."""
    layers = [f"model.layers.{i}.attn" for i in range(LAYERS)]
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    transfer = SimpleNamespace(kv_role=role, kv_connector_extra_config=options, kv_load_failure_policy="fail",
                               is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer")  # fmt: skip
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(runner_type="generate", model="", revision=None, model_weights=""),
        cache_config=SimpleNamespace(**{"prefix_caching_hash_algo": "sha256", "enable_prefix_caching": True, **cache}),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=1, rank=rank, local_world_size=tp
        ),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        speculative_config=None,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=layers)]
    return config, SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBHNC", hash_block_size=hash_tokens,
                                   num_blocks=SLOTS)  # fmt: skip


class Engine:
    """One engine: a connector of each role, pages, and the requests that are there."""

    def __init__(
        self,
        monkeypatch,
        url,
        *,
        fields=FIELDS,
        tp=1,
        hash_tokens=BLOCK,
        role="kv_both",
        machine=lambda rank: {},
        events=True,
        **options,
    ):
        """machine: what each rank says that it computes with."""

        def fields_of(config, kv_config, epoch, machines):
            return {**fields, "machines": repr(machines), **({"epoch": epoch} if epoch else {})}

        monkeypatch.setattr(identity, "fields_of", fields_of)
        options = {"store": url, "lookup_timeout": 5.0, "patience": 20.0, **options}

        def make(which, rank):
            config, kv_config = configs(options, role=role, hash_tokens=hash_tokens, tp=tp, rank=rank, events=events)
            return KvferryConnector(config, which, kv_config)

        self.workers = [make(KVConnectorRole.WORKER, rank) for rank in range(tp)]
        self.pages = [self.new_pages() for _ in range(tp)]
        for worker, pages in zip(self.workers, self.pages, strict=True):
            worker.register_kv_caches(pages)
        self.scheduler = make(KVConnectorRole.SCHEDULER, 0)
        said = {(0, rank): Machine(machine(rank)) for rank in range(tp)}
        self.scheduler.set_xfer_handshake_metadata_pp_aware(said)
        self.hasher = get_request_block_hasher(hash_tokens, SHA)
        self.free = list(range(SLOTS))
        self.slots = {}
        self.told = {}  # by request: how many of its pages the workers know of
        self.finished = set()
        self.arrived = {}  # by request: how many ranks have reported its load
        self.count = 0

    def new_pages(self):
        return {f"model.layers.{i}.attn": torch.zeros(SLOTS, 1, BLOCK, ROW) for i in range(LAYERS)}

    def page(self, cache, slot):
        """A view of the numbers of a block, in one layer."""
        return cache[slot]

    def close(self):
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()

    # ---- requests

    def request(self, ids, salt=None, lora=None, images=None):
        self.count += 1
        request = Request(f"r{self.count}", list(ids), SamplingParams(max_tokens=8), None, block_hasher=self.hasher,
                          cache_salt=salt, lora_request=lora, mm_features=images)  # fmt: skip
        self.scheduler.on_new_request(request)
        return request

    def end(self, request, free=True):
        self.scheduler.request_finished_all_groups(request, (self.slots.get(request.request_id, []),))
        self.finished.add(request.request_id)
        if free:
            self.free += self.slots.pop(request.request_id, [])

    # ---- what vLLM's scheduler does

    def ask(self, request, computed=0, steps=200):
        """get_num_new_matched_tokens, again after empty steps as long as it wants."""
        for _ in range(steps):
            num, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
            if num is not None:
                assert is_async == (num > 0), "the engine must not wait for nothing"
                assert computed + num < request.num_tokens, "a token must be left to compute"
                return num
            self.step({})
        raise AssertionError("the connector never answers")

    def allocate(self, request, num_tokens, external):
        own = self.slots.setdefault(request.request_id, [])
        while len(own) * BLOCK < num_tokens:
            own.append(self.free.pop(0))
        blocks = SimpleNamespace(get_block_ids=lambda: (list(own),))
        self.scheduler.update_state_after_alloc(request, blocks, external)
        return own

    def step(self, scheduled, new=()):
        """One step. `scheduled`: (computed, number of tokens) by request; those in `new` are new to the workers."""
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {r.request_id: num for r, (_, num) in scheduled.items()}
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        cached = CachedRequestData.make_empty()
        for request, (computed, _) in scheduled.items():
            if request in new:
                request.num_computed_tokens = computed
                output.scheduled_new_reqs.append(
                    NewRequestData.from_request(request, (list(self.slots[request.request_id]),))
                )
            else:
                cached.req_ids.append(request.request_id)
                cached.num_computed_tokens.append(computed)
                new_pages = self.slots[request.request_id][self.told[request.request_id] :]
                cached.new_block_ids.append((list(new_pages),) if new_pages else None)
            self.told[request.request_id] = len(self.slots[request.request_id])
        output.scheduled_cached_reqs = cached
        output.kv_connector_block_state = KVConnectorBlockState(
            req_ids=set(output.num_scheduled_tokens), resolve_block_ids=lambda r: (list(self.slots[r]),),
            boundary_state_offloads={})  # fmt: skip
        meta = self.scheduler.build_connector_meta(output)
        outputs = [self._work(rank, meta, scheduled) for rank in range(len(self.workers))]
        return self._aggregate(outputs)

    def _work(self, rank, meta, scheduled):
        """The model runner's calls, in its order."""
        worker = self.workers[rank]
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        for request, (computed, num) in scheduled.items():
            self.compute(rank, request, computed, num)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(self.finished)
        output = KVConnectorOutput(finished_recving=results.finished_recving)
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.get_kv_connector_stats()
        worker.clear_connector_metadata()
        return output

    def _aggregate(self, outputs):
        total = KVConnectorOutput(finished_recving=set())
        for output in outputs:
            total.invalid_block_ids |= output.invalid_block_ids
            if output.kv_connector_worker_meta is not None:
                known = total.kv_connector_worker_meta
                total.kv_connector_worker_meta = (
                    known.aggregate(output.kv_connector_worker_meta) if known else output.kv_connector_worker_meta
                )
            for request in output.finished_recving:
                self.arrived[request] = self.arrived.get(request, 0) + 1
                if self.arrived[request] == len(outputs):
                    del self.arrived[request]
                    total.finished_recving.add(request)
        self.scheduler.update_connector_output(total)
        return total

    # ---- the model

    def compute(self, rank, request, computed, num):
        ids, own = request.all_token_ids, self.slots[request.request_id]
        for block in range(computed // BLOCK, (computed + num) // BLOCK):
            rows = expected([rank, *ids], block) if rank else expected(ids, block)
            for layer, cache in enumerate(self.pages[rank].values()):
                self.write(self.page(cache, own[block]), rows[layer])

    def write(self, page, row):
        page.copy_(row.reshape(page.shape))

    def check(self, request, blocks):
        """The pages of these blocks have the KV of the request's tokens."""
        for rank, pages in enumerate(self.pages):
            for block in blocks:
                ids = [rank, *request.all_token_ids] if rank else request.all_token_ids
                rows, slot = expected(ids, block), self.slots[request.request_id][block]
                for layer, cache in enumerate(pages.values()):
                    page = self.page(cache, slot).flatten()
                    assert torch.equal(page.cpu(), rows[layer]), f"block {block} is wrong in layer {layer}"

    # ---- a whole request

    def load(self, request, computed=0, steps=2000):
        """Asks, loads and waits. Returns the tokens that are there then: the engine's rule for failed blocks."""
        external = self.ask(request, computed)
        if external == 0:
            return computed
        own = self.allocate(request, computed + external, external)
        bad, done = set(), False
        for _ in range(steps):
            output = self.step({})
            bad |= output.invalid_block_ids
            if request.request_id in output.finished_recving:
                done = True
                break
        assert done, "the connector never ends the load"
        good = next((i for i, slot in enumerate(own) if slot in bad), len(own))
        return good * BLOCK

    def prefill(self, request, computed=0, chunk=None):
        """Computes and saves what is left, in steps of `chunk` tokens, each after the saves of the one before: what is
        saved too early is saved wrong."""
        self.allocate(request, request.num_tokens, 0)
        new = [request]
        while computed < request.num_tokens:
            num = min(chunk or request.num_tokens, request.num_tokens - computed)
            self.step({request: (computed, num)}, new)
            computed, new = computed + num, []
            if chunk is not None:
                self.settle()

    def run(self, ids, chunk=None, **more):
        """A request from its arrival to its end. Returns how many of its tokens were loaded."""
        request = self.request(ids, **more)
        loaded = self.load(request)
        self.check(request, range(loaded // BLOCK))
        self.prefill(request, loaded, chunk)
        self.check(request, range(len(ids) // BLOCK))
        self.settle()
        self.end(request)
        return loaded

    def settle(self):
        """Empty steps until all saves have ended."""
        until(lambda: self.step({}) and not any(c._worker._flights for c in self.workers), "the saves end")
