# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiered offloading on the CPU platform, for tests: its worker between the GPU and the primary tier refuses that
platform, so this one copies between the engine's pages and the primary tier by itself. All else is vLLM's own.

    "spec_name": "MemcpyTieringSpec", "spec_module_path": "vllm_memcpy"
"""

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):
    """Copies at once. Chunks of one block."""

    def __init__(self, spec, kv_caches):
        assert spec.blocks_per_chunk == 1
        self.region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self.refs = kv_caches.group_data_refs
        self.pages = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self.rows = [self.region.create_next_worker_view(t.page_size_bytes) for t in kv_caches.tensors]
        self.done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self.pages, src_spec, self.rows, dst_spec, src_spec.group_sizes)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self.rows, src_spec, self.pages, dst_spec, dst_spec.group_sizes)

    def _copy(self, job_id, sources, src_spec, targets, dst_spec, group_sizes):
        began, num_bytes = time.perf_counter(), 0
        pairs = iter(zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True))
        for refs, size in zip(self.refs, group_sizes, strict=True):
            for _ in range(size):
                source, target = next(pairs)
                for ref in refs:
                    targets[ref.tensor_idx][target].copy_(sources[ref.tensor_idx][source])
                    num_bytes += ref.page_size_bytes
        self.done.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - began))
        return True

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.pages, self.rows = [], []
        self.region.cleanup()


class MemcpyTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = MemcpyWorker(self, kv_caches)
        return self._worker
