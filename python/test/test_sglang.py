# SPDX-License-Identifier: Apache-2.0
"""kvferry.sglang: the conformance set, and what SGLang's hierarchical cache expects of a storage backend.

On SGLang's own base class, factory and pool methods (sglang_lab.py)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup-engines")
pytest.register_assert_rewrite("block_cases")

import sglang_lab  # noqa: E402
from block_cases import *  # noqa: E402, F403
from block_cases import BLOCK, SETTINGS, Opener, Toy, tokens  # noqa: E402
from conftest import RedisServer, until  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolTransfer  # noqa: E402
from sglang_lab import MHATokenToKVPoolHost, MLATokenToKVPoolHost, attach  # noqa: E402

import kvferry  # noqa: E402

PAGES = 256
POOLS = {"MHA": MHATokenToKVPoolHost, "MLA": MLATokenToKVPoolHost}


class SGLang(Toy):
    """Host pages and the calls of SGLang's prefetch and backup threads: batches of up to 128 pages."""

    def __init__(self, url: str, layout: str, kind: str, **settings: Any) -> None:
        s = SETTINGS | settings
        self.pool = POOLS[kind](layout, getattr(torch, s["dtype"]), s["block"], PAGES)
        super().__init__(s["block"], len(self.pool.page(0)), f"{s['model']} {s['dtype']}")
        options = {"store": url, "model": s["model"]}
        options |= {name: s[name] for name in ("load_timeout", "save_timeout")}
        self.backend = attach(self.pool, options, is_mla_model=kind == "MLA", **s.get("config", {}))
        self._free = list(range(PAGES))
        self._pages = threading.Lock()

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return self.backend.batch_exists([h.hex() for h in hashes])

    @contextlib.contextmanager
    def allocated(self, num: int):
        """The first slots of pages."""
        with self._pages:
            pages, self._free = self._free[:num], self._free[num:]
        assert len(pages) == num
        yield [page * self.block for page in pages]
        with self._pages:
            self._free += pages

    def indices(self, starts: Sequence[int]) -> torch.Tensor:
        return torch.cat([torch.arange(s, s + self.block) for s in starts] or [torch.arange(0)])

    def load(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        with self.allocated(len(hashes)) as starts:
            for start in starts:
                self.pool.set_page(start, b"\xaa" * self.block_bytes)
            moved = self.backend.batch_get_v1([h.hex() for h in hashes], self.indices(starts))
            return [self.pool.page(s) if ok else None for s, ok in zip(starts, moved, strict=True)]

    def save(self, hashes: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        with self.allocated(len(hashes)) as starts:
            for start, block in zip(starts, blocks, strict=True):
                self.pool.set_page(start, block)
            self.backend.batch_set_v1([h.hex() for h in hashes], self.indices(starts))
            for start in starts:  # the engine uses the page for something else
                self.pool.set_page(start, b"\x55" * self.block_bytes)

    def close(self) -> None:
        self.backend.close()


def make_toy(url: str, **settings: Any) -> SGLang:
    return SGLang(url, **settings)


ALL = [(layout, kind) for kind in POOLS for layout in ("page_first", "page_first_direct", "layer_first")]


@pytest.fixture(params=[("page_first", "MHA"), ("layer_first", "MLA")], ids="-".join)
def open_toy(request: pytest.FixtureRequest) -> Opener:
    layout, kind = request.param
    return Opener(make_toy, layout=layout, kind=kind)


PROMPT = tokens(6 * BLOCK + 1)


@pytest.mark.parametrize("layout,kind", ALL)
def test_every_layout_through_every_store(layout: str, kind: str, any_url: str) -> None:
    """Pages are read and written by address: what SGLang's own methods write arrives, and nothing beside it."""
    with contextlib.closing(SGLang(any_url, layout, kind)) as toy:
        assert toy.run(PROMPT) == 0
        before = [toy.pool.page(i * BLOCK) for i in range(PAGES)]
        assert toy.run(PROMPT) == 6
        assert sum(toy.pool.page(i * BLOCK) != before[i] for i in range(PAGES)) == 6


@pytest.mark.parametrize("kind", POOLS)
def test_layouts_are_apart(kind: str, redis: RedisServer) -> None:
    for layout in ("page_first", "page_first_direct", "layer_first"):
        with contextlib.closing(SGLang(redis.unix_url, layout, kind)) as toy:
            assert toy.run(PROMPT) == 0


def loads(redis: RedisServer, kind: str, **config: Any) -> int:
    with contextlib.closing(SGLang(redis.unix_url, "page_first", kind, config=config)) as toy:
        return toy.run(PROMPT)


def test_ranks_are_apart(redis: RedisServer) -> None:
    """Each has its own heads, layers or tokens of a page."""
    ranks = [{"tp_size": 2, "tp_rank": 0}, {"tp_size": 2, "tp_rank": 1}, {"tp_size": 1}]
    ranks += [{"pp_size": 2, "pp_rank": 0}, {"pp_size": 2, "pp_rank": 1}]
    ranks += [{"attn_cp_size": 2, "attn_cp_rank": 0}, {"attn_cp_size": 2, "attn_cp_rank": 1}]
    assert [loads(redis, "MHA", **rank) for rank in ranks] == [0] * len(ranks)
    assert [loads(redis, "MHA", **rank) for rank in ranks] == [6] * len(ranks)


def test_ranks_share_pages_of_mla(redis: RedisServer) -> None:
    """SGLang lets one rank write, and all read, whatever their number."""
    ranks = [{"tp_size": 4, "tp_rank": 0}, {"tp_size": 4, "tp_rank": 3}, {"tp_size": 2, "tp_rank": 1}]
    assert [loads(redis, "MLA", **rank) for rank in ranks] == [0, 6, 6]
    assert loads(redis, "MLA", pp_size=2, pp_rank=1) == 0


def test_the_files_of_the_model_name_it(redis: RedisServer, tmp_path: Path) -> None:
    def run(weights: bytes) -> int:
        (tmp_path / "model.safetensors").write_bytes(weights)
        config = {"model_name": str(tmp_path)}
        with contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA", model=None, config=config)) as toy:
            return toy.run(PROMPT)

    assert [run(b"1"), run(b"2"), run(b"1")] == [0, 0, 6]


def test_a_model_that_cannot_be_named_is_refused(redis: RedisServer) -> None:
    with pytest.raises(ValueError, match='name the weights in the option "model"'):
        SGLang(redis.unix_url, "page_first", "MHA", model=None, config={"model_name": "/nowhere"})


def test_settings_of_the_server_are_in_the_identity(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang does not tell a backend of them; they are those of its process."""
    import sys
    import types

    settings = types.SimpleNamespace(quantization=None, attention_backend="triton", load_format="auto")
    context = types.SimpleNamespace(get_server_args=lambda: settings)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    assert loads(redis, "MHA") == 0
    for name, value in (("quantization", "fp8"), ("enable_tf32_matmul", True), ("a_new_one", {"of": [1]})):
        before = dict(vars(settings))
        setattr(settings, name, value)
        assert loads(redis, "MHA") == 0, name
        vars(settings).clear()
        vars(settings).update(before)
    settings.host, settings.log_level = "10.0.0.7", "debug"
    assert loads(redis, "MHA") == 6
    monkeypatch.setenv("SGLANG_USE_SOMETHING", "1")
    assert loads(redis, "MHA") == 0


def test_the_settings_exist() -> None:
    """Their names are those of SGLang's arguments, and the backend's own options are checked."""
    from kvferry.sglang.identity import IGNORED

    fields = "".join(path.read_text() for path in (sglang_lab.FOLDER / "srt/arg_groups/fields").glob("*.py"))
    named = [*IGNORED, "load_format", "model_path", "revision"]
    assert [name for name in named if f"\n    {name}:" not in fields] == []
    assert not IGNORED & {"dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "context_length"}
    with pytest.raises(ValueError, match="kvferry has no option 'storre'"):
        attach(MHATokenToKVPoolHost("page_first", torch.float16, BLOCK, 4), {"storre": "mem:", "model": "a"})


def test_a_layout_that_is_not_proven_is_refused() -> None:
    pool = MHATokenToKVPoolHost("page_head", torch.float16, BLOCK, 4)
    with pytest.raises(ValueError, match="does not support the layout page_head"):
        attach(pool, {"store": "mem:", "model": "a"})


def test_ranks_with_other_tokens_of_a_page_are_refused() -> None:
    """Decode context parallelism: all ranks would have one key, and each has other bytes."""
    pool = MLATokenToKVPoolHost("page_first", torch.float16, BLOCK, 4)
    ranks = {"tp_size": 2, "tp_rank": 1, "dcp_size": 2, "dcp_rank": 1, "logical_page_size": 2 * BLOCK}
    with pytest.raises(ValueError, match="does not support decode context parallelism"):
        attach(pool, {"store": "mem:", "model": "a"}, is_mla_model=True, **ranks)


def test_a_fault_of_its_own_ends_no_thread_of_sglang(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(SGLang("mem:", "page_first", "MHA")) as toy:
        key, none = ["00" * 32], torch.arange(0)
        assert toy.backend.batch_get_v1(key, none) == [False]
        assert toy.backend.batch_set_v1(key, none) == [False]
        assert toy.backend.batch_exists(["not", 1]) == 0
        assert toy.backend.batch_get_v2([PoolTransfer("unknown", none, keys=key)]) == {"unknown": [False]}
        assert toy.backend.batch_exists([]) == 0
        assert toy.backend.batch_get_v1([], none) == []
    assert "a fault of its own in batch_get_v1" in caplog.text
    assert toy.backend.batch_exists(key) == 0  # closed


def test_without_interface_v1_pages_are_copied_as_sglang_does(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's controller: _generic_page_set and _generic_page_get. Both ways find each other's pages."""
    with contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA")) as toy:
        hashes = toy.hashes(PROMPT, "")
        keys, pool = [h.hex() for h in hashes], toy.pool
        with toy.allocated(6) as starts:
            for start, h in zip(starts, hashes, strict=True):
                pool.set_page(start, toy.compute(h))
            assert toy.backend.batch_set(keys, [pool.get_data_page(start) for start in starts])
            assert toy.run(PROMPT) == 6
        got = toy.backend.batch_get([*keys, "00" * 32], [pool.get_dummy_flat_data_page() for _ in range(7)])
        assert [bytes(t.view(torch.uint8).numpy()) for t in got[:6]] == [toy.compute(h) for h in hashes]
        assert got[6] is None
        assert toy.backend.get("11" * 32, pool.get_dummy_flat_data_page()) is None
        assert toy.backend.exists(keys[0]) and not toy.backend.exists("11" * 32)
        assert toy.backend.set("11" * 32, pool.get_dummy_flat_data_page()) and toy.backend.exists("11" * 32)
    config = sglang_lab.config(extra_config={"kvferry": {"store": "mem:", "model": "a"}})
    kvferry.sglang.KvferryHiCache(config, {}).close()
    assert 'without "interface_v1": 1' in caplog.text


def test_below_sglangs_injector_of_failures(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own test of backends: calls that fail at random, and late."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    with contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA")) as toy:
        assert type(toy.backend).__name__ == "HiCacheStorageFailureInjector"
        for i in range(40):
            toy.run(tokens((i % 7) * BLOCK + 1, first=i % 3))
        until(lambda: toy.run(PROMPT) == 6, "a round without a failure")


def test_metrics(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and GB/s of each transfer since the last call; SGLang's class for them needs its kernels."""
    import sys
    import types

    collector = types.SimpleNamespace(StorageMetrics=lambda **metrics: metrics)
    monkeypatch.setitem(sys.modules, "sglang.srt.observability", types.ModuleType("observability"))
    monkeypatch.setitem(sys.modules, "sglang.srt.observability.metrics_collector", collector)
    with contextlib.closing(
        SGLang(redis.unix_url, "page_first", "MHA", config={"enable_storage_metrics": True})
    ) as toy:
        toy.run(PROMPT)
        toy.run(PROMPT)
        metrics = toy.backend.get_stats()
        assert metrics["backup_pgs"] == [6] and metrics["prefetch_pgs"] == [6]
        assert len(metrics["backup_bandwidth"]) == len(metrics["prefetch_bandwidth"]) == 1
        assert toy.backend.get_stats() == {}


# ---- v2: hybrid models


def transfer(toy: SGLang, name: str, starts: Sequence[int], hashes: Sequence[bytes], **options: Any) -> PoolTransfer:
    return PoolTransfer(name, toy.indices(starts), keys=[h.hex() for h in hashes], **options)


@pytest.fixture
def hybrid(redis: RedisServer):
    """An engine with a second pool, of which SGLang needs the last page or all pages."""
    with contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA")) as toy:
        toy.side = MHATokenToKVPoolHost("page_first", torch.float16, BLOCK, PAGES)
        toy.backend.register_mem_host_pool_v2(toy.side, "swa")
        toy.backend.register_mem_host_pool_v2(toy.pool, "kv")
        yield toy


def test_v2_moves_pages_of_several_pools(hybrid: SGLang) -> None:
    hashes = hybrid.hashes(PROMPT, "")
    with hybrid.allocated(6) as starts:
        for pool, fill in ((hybrid.pool, 1), (hybrid.side, 2)):
            for start in starts:
                pool.set_page(start, bytes([fill]) * hybrid.block_bytes)
        both = [transfer(hybrid, name, starts, hashes) for name in ("kv", "swa")]
        assert hybrid.backend.batch_set_v2(both) == {"kv": [True] * 6, "swa": [True] * 6}
        for start in starts:
            hybrid.pool.set_page(start, bytes(hybrid.block_bytes))
            hybrid.side.set_page(start, bytes(hybrid.block_bytes))
        assert hybrid.backend.batch_get_v2(both) == {"kv": [True] * 6, "swa": [True] * 6}
        assert {hybrid.pool.page(s) for s in starts} == {b"\1" * hybrid.block_bytes}
        assert {hybrid.side.page(s) for s in starts} == {b"\2" * hybrid.block_bytes}


class FileBackend(HiCacheFile):
    """SGLang's, which is told the names of its files."""

    def __init__(self, kv: Sequence[str], side: Sequence[str]) -> None:
        self.config_suffix = self.tp_config_suffix = ""
        self._files = {f"{key}.bin" for key in kv} | {f"{self._get_component_key(key, 'swa')}.bin" for key in side}

    def _collect_existing_component_keys(self, *_: Any) -> set[str]:
        return self._files


@pytest.mark.parametrize(
    "policy,trailing,there,result",
    [
        (PoolHitPolicy.ALL_PAGES, 0, [1, 1, 1, 0, 1, 1], (3, 3, [1, 2, 3])),
        (PoolHitPolicy.ALL_PAGES, 0, [1] * 6, (6, 6, [1, 2, 3, 4, 5, 6])),
        (PoolHitPolicy.TRAILING_PAGES, 1, [0, 1, 0, 0, 1, 0], (5, 5, [2, 5])),
        (PoolHitPolicy.TRAILING_PAGES, 2, [1, 1, 0, 1, 1, 0], (5, 5, [1, 2, 5])),
        (PoolHitPolicy.TRAILING_PAGES, 1, [0] * 6, (0, None, [])),
        (PoolHitPolicy.BLOCK_GROUPS, 0, [0] * 6, (6, None, [1, 2, 3, 4, 5, 6])),
    ],
)
def test_v2_lookup_as_sglangs_own_backends_have_it(
    hybrid: SGLang, policy: Any, trailing: int, there: list[int], result: Any
) -> None:
    """The result is that of SGLang's file backend with the same pages (which refuses BLOCK_GROUPS)."""
    hybrid.run(PROMPT)
    hashes = hybrid.hashes(PROMPT, "")
    with hybrid.allocated(6) as starts:
        stored = [(s, h) for s, h, t in zip(starts, hashes, there, strict=True) if t]
        if stored:
            hybrid.backend.batch_set_v2([transfer(hybrid, "swa", *zip(*stored, strict=True))])
    keys = [h.hex() for h in hashes]
    asked = [PoolTransfer("swa", keys=keys[:trailing], hit_policy=policy)]
    got = hybrid.backend.batch_exists_v2(keys, asked)
    num, side, restorable = result
    assert (got.kv_hit_pages, got.extra_pool_hit_pages.get("swa"), got.restorable_prefix_pages) == (
        num,
        side,
        restorable,
    )
    if policy == PoolHitPolicy.BLOCK_GROUPS:
        return
    file = FileBackend(keys, [key for key, t in zip(keys, there, strict=True) if t])
    reference = file.batch_exists_v2(keys, asked)
    assert got.kv_hit_pages == reference.kv_hit_pages
    assert dict(got.extra_pool_hit_pages) == {str(k): v for k, v in reference.extra_pool_hit_pages.items()}
    assert got.restorable_prefix_pages == reference.restorable_prefix_pages


def test_the_state_of_mamba_belongs_to_one_rank(redis: RedisServer) -> None:
    """Of a model with MLA too: its ranks share the pages of the attention, and not the state."""

    def open_rank(rank: int) -> SGLang:
        config = {"tp_size": 2, "tp_rank": rank}
        toy = SGLang(redis.unix_url, "page_first", "MLA", config=config)
        toy.backend.register_mem_host_pool_v2(MHATokenToKVPoolHost("page_first", torch.float16, BLOCK, 4), "mamba")
        return toy

    with contextlib.closing(open_rank(0)) as first, contextlib.closing(open_rank(1)) as second:
        hashes = first.hashes(PROMPT, "")[:1]
        first.run(tokens(BLOCK + 1))
        assert second.run(tokens(BLOCK + 1)) == 1
        assert first.backend.batch_set_v2([transfer(first, "mamba", [0], hashes)]) == {"mamba": [True]}
        assert first.backend.batch_get_v2([transfer(first, "mamba", [0], hashes)]) == {"mamba": [True]}
        assert second.backend.batch_get_v2([transfer(second, "mamba", [0], hashes)]) == {"mamba": [False]}


# ---- the rest


def test_clear_removes_the_pages_of_this_engine(redis: RedisServer) -> None:
    with (
        contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA", model="b")) as other,
        contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA")) as toy,
    ):
        toy.run(PROMPT)
        other.run(PROMPT)
        assert toy.backend.clear()
        assert toy.backend.batch_exists([h.hex() for h in toy.hashes(PROMPT, "")]) == 0
        assert other.run(PROMPT) == 6
        assert toy.run(PROMPT) == 0
        until(lambda: toy.run(PROMPT) == 6, "what was cleared is stored anew")


def test_sealed_pages(redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of more than 16 bytes\n")
    secret.chmod(0o600)
    monkeypatch.setenv("KVFERRY_SECRET_FILE", str(secret))
    with contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA")) as toy:
        assert [toy.run(PROMPT), toy.run(PROMPT)] == [0, 6]
    monkeypatch.delenv("KVFERRY_SECRET_FILE")
    with contextlib.closing(SGLang(redis.unix_url, "page_first", "MHA")) as toy:
        assert toy.run(PROMPT) == 0
