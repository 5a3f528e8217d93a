# SPDX-License-Identifier: Apache-2.0
"""KvferryHiCache: the storage backend of SGLang's hierarchical cache.

SGLang calls it from its prefetch and backup threads, which an exception would end: every call answers with misses
instead. Pages go straight between the host pool and the store."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from kvferry._adapter import Misses, warn_of_version
from kvferry._kvferry import KEY_BYTES, Error, Queue, Space
from kvferry.sglang.identity import TESTED, HiCacheOptions, fields_of, log, model_of, page_bytes, suffix_of, version

T = TypeVar("T")
KV = "kv"


def never_raises(answer: Callable[..., T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A call that fails answers answer(*arguments): misses."""

    def decorate(call: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(call)
        def guarded(self: "KvferryHiCache", *args: Any, **kwargs: Any) -> T:
            try:
                return call(self, *args, **kwargs)
            except Exception:
                log.exception("kvferry: a fault of its own in %s; SGLang goes on without these pages", call.__name__)
                return answer(*args, **kwargs)

        return guarded

    return decorate


def _none_of(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_pools(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class _Pool:
    """A host pool of SGLang, and the space of its pages."""

    def __init__(self, pool: Any, space: Space, suffix: bytes) -> None:
        self.pool = pool
        self.space = space
        self._suffix = suffix
        self.page_bytes = page_bytes(pool)

    def keys(self, hashes: Sequence[str]) -> bytes:
        return self.space.keys_of([h.encode() for h in hashes], self._suffix)

    def match(self, hashes: Sequence[str], timeout: float) -> int:
        keys = self.keys(hashes)
        num = self.space.match(keys, timeout)
        self.forget(keys, num)
        return num

    def forget(self, keys: bytes, num_ok: int) -> None:
        """What is behind a gap was not asked for: nobody knows whether it is still there, so it is saved again."""
        if len(keys) > KEY_BYTES * num_ok:
            self.space.forget(keys[KEY_BYTES * num_ok :])

    def memory(self, num: int, host_indices: torch.Tensor) -> list[list[tuple[int, int]]]:
        """For each page its runs. Raises ValueError: not one page for each key."""
        if host_indices is None or len(host_indices) != num * self.pool.page_size:
            got = 0 if host_indices is None else len(host_indices)
            raise ValueError(f"{num} keys and {got} slots of {self.pool.page_size} for each page")
        addresses, sizes = self.pool.get_page_buffer_meta(host_indices)
        runs = [(int(a), int(s)) for a, s in zip(addresses, sizes, strict=True)]
        each = len(runs) // num
        return [runs[i * each : (i + 1) * each] for i in range(num)]


class KvferryHiCache(HiCacheStorage):
    """Pages in a store of kvferry.

    A store that is down, slow or full costs misses and pages that are not stored. Raises ValueError (options, a layout
    that is not proven) and kvferry.Error (a URL, a password, a model that can't be identified) when it is attached."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        if not extra.get("interface_v1"):
            log.warning('kvferry: without "interface_v1": 1 in the extra config SGLang copies each page')
        warn_of_version(log, "SGLang", version(), TESTED)
        self.config = storage_config
        self.options = HiCacheOptions.of(extra.get("kvferry") or {})
        self._model = model_of(self.options, storage_config.model_name)
        self._misses = Misses(log)
        self._pools: dict[str, _Pool] = {}
        self._metrics: dict[str, list[float]] = {}
        self._saving = threading.Lock()
        self.store = self.options.open()
        self._saves = Queue(self.store, 1)
        log.info("kvferry is on: HiCache, store %s", ", ".join(tier.url for tier in self.store.tiers()))

    # ---- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV:
            self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        fields = fields_of(self.config, pool, name, self._model, self.options)
        space = Space(self.store, fields, block_tokens=pool.page_size)
        self._pools[name] = _Pool(pool, space, suffix_of(self.config, pool, name))

    # ---- v1: pages of the KV pool, in the order of a prompt

    @never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored: one round trip."""
        pool = self._pools[KV]
        if not pool.page_bytes:  # a logical anchor: the data is in the other pools
            return len(keys)
        return pool.match(keys, self.options.lookup_timeout) if keys else 0

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]) == 1)

    @never_raises(_none_of)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Reads the leading pages that are stored straight into the host pool."""
        pool = self._pools[KV]
        return self._load(pool, keys, host_indices, each=False) if pool.page_bytes else [True] * len(keys)

    @never_raises(_none_of)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Writes pages straight from the host pool."""
        pool = self._pools[KV]
        return self._save(pool, keys, host_indices) if pool.page_bytes else [True] * len(keys)

    def _load(self, pool: _Pool, keys: Sequence[str], host_indices: torch.Tensor, each: bool) -> list[bool]:
        if not keys:
            return []
        return self._load_into(pool, keys, pool.memory(len(keys), host_indices), each, pool.pool)

    def _load_into(self, pool: _Pool, keys: Sequence[str], memory: Any, each: bool, owner: object) -> list[bool]:
        begin = time.monotonic()
        names = pool.keys(keys)
        num_ok, reasons = pool.space.load(
            names,
            memory,
            each=each,
            timeout=self.options.load_timeout,
            patience=self.options.patience,
            owner=owner,
        )
        if not each:
            pool.forget(names, num_ok)
        self._misses.note("not loaded", reasons)
        return self._told("prefetch", pool, reasons, begin)

    def _save(self, pool: _Pool, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        return self._save_from(pool, keys, pool.memory(len(keys), host_indices), pool.pool) if keys else []

    def _save_from(self, pool: _Pool, keys: Sequence[str], memory: Any, owner: object) -> list[bool]:
        """SGLang may write the memory anew once this has returned."""
        begin = time.monotonic()
        with self._saving:
            self._saves.submit_save(
                pool.space,
                pool.keys(keys),
                memory,
                may_lend=self.options.may_lend,
                timeout=self.options.save_timeout,
                patience=self.options.patience,
                owner=owner,
            )
            while not (done := self._saves.reap()):
                self._saves.wait()
        self._misses.note("not saved", done[0].reasons)
        return self._told("backup", pool, done[0].reasons, begin)

    def _told(self, what: str, pool: _Pool, reasons: Sequence[str | None], begin: float) -> list[bool]:
        """Which pages were moved; their number and rate are for SGLang's metrics."""
        moved = [why is None for why in reasons]
        if self.config.enable_storage_metrics and any(moved):
            rate = sum(moved) * pool.page_bytes / 1e9 / max(time.monotonic() - begin, 1e-9)
            self._metrics.setdefault(f"{what}_pgs", []).append(sum(moved))
            self._metrics.setdefault(f"{what}_bandwidth", []).append(rate)
        return moved

    # ---- v2: several pools (hybrid models)

    @never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix that every pool can serve; one round trip for each pool."""
        num = self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {KV: num} if num else {}
        restorable = set(range(1, num + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # a second form of the pages, which does not decide; kvferry does not look it up
            served = self._served(transfer, keys[:num])
            if served:
                hits[transfer.name] = max(served)
            restorable &= served
        result = PoolTransferResult(max(restorable, default=0), hits)
        if hasattr(result, "restorable_prefix_pages"):  # not in older versions
            result.restorable_prefix_pages = sorted(restorable)
        return result

    def _served(self, transfer: Any, keys: Sequence[str]) -> set[int]:
        """The lengths of prefixes whose pages of this pool are stored: all, or the last of them."""
        pool = self._pools[str(transfer.name)]
        found = pool.space.find(pool.keys(keys), self.options.lookup_timeout)
        is_there = [f.why is None for f in found]
        needed = len(keys)
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            needed = max(1, len(transfer.keys or ()))
        run, served = 0, set()
        for length, there in enumerate(is_there, start=1):
            run = run + 1 if there else 0
            if run >= min(needed, length):
                served.add(length)
        return served

    @never_raises(_none_of_pools)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Reads pages of several pools, each page for itself."""
        pools = self._pools
        return {t.name: self._load(pools[str(t.name)], t.keys or (), t.host_indices, each=True) for t in transfers}

    @never_raises(_none_of_pools)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Writes pages of several pools."""
        return {t.name: self._save(self._pools[str(t.name)], t.keys or (), t.host_indices) for t in transfers}

    # ---- tensors: what SGLang calls without interface_v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Fills the tensor. None: a miss."""
        return self.batch_get([key], [target_location])[0]

    @never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fills the tensors of the leading pages that are stored; None for the others."""
        moved = self._load_into(self._pools[KV], keys, memory_of(target_locations), False, target_locations)
        return [tensor if ok else None for tensor, ok in zip(target_locations, moved, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @never_raises(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """True: all are stored."""
        whole = [value.contiguous() for value in values]
        return all(self._save_from(self._pools[KV], keys, memory_of(whole), whole))

    # ---- the rest

    def clear(self) -> bool:
        """Removes the pages of this model and of engines like this one, and no others. False: the store failed."""
        try:
            for pool in self._pools.values():
                self.store.clear(pool.space.digest)
        except Error as error:
            log.warning("kvferry: the store was not cleared: %s", error)
            return False
        return True

    def get_stats(self) -> Any:
        """SGLang's metrics of the transfers since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics, self._metrics = self._metrics, {}
        return StorageMetrics(**metrics)

    def close(self) -> None:
        """Waits for what is under way, each of which has its timeout."""
        self.store.close()


def memory_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Raises ValueError: a tensor that is not in one piece."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the tensors are not contiguous")
    return [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in tensors]
