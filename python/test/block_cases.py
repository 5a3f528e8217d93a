# SPDX-License-Identifier: Apache-2.0
"""The conformance set (conformance.py) for adapters that an engine hands hashes and memory to: SGLang's and LMCache's.

Their engines do not run here. `Toy` is the part of one that matters: it looks up the blocks of a prompt, loads the
leading ones, computes the others and saves them, through the engine's own classes where these import. A test file
takes over these tests with `from block_cases import *` and defines the fixture `open_toy`: a function of the store's
URL (and of the settings in SETTINGS) that opens a Toy."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import importlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import RedisServer, until
from slow_proxy import SlowProxy

import kvferry

BLOCK = 16
"""Tokens of a block."""
SETTINGS = {"model": "a", "dtype": "float16", "block": BLOCK, "load_timeout": 10.0, "save_timeout": 10.0}


def tokens(num: int, first: int = 1) -> list[int]:
    """A prompt. Another `first` makes another one from the first token on."""
    return [first, *range(1000, 1000 + num - 1)]


class Toy(abc.ABC):
    """An engine whose KV is a function of the tokens: what it should be is known without the store."""

    def __init__(self, block: int, block_bytes: int, seed: str) -> None:
        self.block = block
        self.block_bytes = block_bytes
        self.seed = seed
        """What else KV depends on: the model, the dtype."""
        self.loaded = 0
        """Blocks that were loaded, of all prompts."""
        self.between: Callable[[], object] = lambda: None
        """Happens between a lookup and its load."""
        self._lock = threading.Lock()

    @abc.abstractmethod
    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are stored."""

    @abc.abstractmethod
    def load(self, hashes: Sequence[bytes]) -> list[bytes | None]:
        """The blocks that are loaded, and None for each other one."""

    @abc.abstractmethod
    def save(self, hashes: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        """Returns when the engine may use the memory of the blocks again, and they are stored or given up."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def hashes(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        """A chain over whole blocks, as both engines have it: each names all tokens before it."""
        chain, last = [], hashlib.sha256(salt.encode()).digest() if salt else b""
        for i in range(len(prompt) // self.block):
            block = prompt[i * self.block : (i + 1) * self.block]
            last = hashlib.sha256(last + b"".join(t.to_bytes(4, "little") for t in block)).digest()
            chain.append(last)
        return chain

    def compute(self, hash_: bytes) -> bytes:
        return hashlib.shake_128(hash_ + self.seed.encode()).digest(self.block_bytes)

    def run(self, prompt: Sequence[int], salt: str = "", left: int = 1) -> int:
        """Serves a prompt: its KV is as computed, whatever the store does. `left` tokens at least are computed.
        Returns how many blocks were loaded."""
        hashes = self.hashes(prompt, salt)[: (len(prompt) - left) // self.block]
        num = self.lookup(hashes)
        self.between()
        blocks = self.load(hashes[:num])
        num = blocks.index(None) if None in blocks else len(blocks)
        kv = blocks[:num] + [self.compute(h) for h in hashes[num:]]
        assert kv == [self.compute(h) for h in hashes], "KV that the engine would not have computed"
        self.save(hashes[num:], [self.compute(h) for h in hashes[num:]])
        with self._lock:
            self.loaded += num
        return num


class Opener:
    """Opens toys. `settings` are those of the last one, which a process can be given."""

    def __init__(self, make: Callable[..., Toy], **settings: Any) -> None:
        self._make, self._base = make, settings
        self.settings: dict[str, Any] = {}

    def __call__(self, url: str, **settings: Any) -> Toy:
        self.settings = self._base | {"url": url} | settings
        return self._make(**self.settings)


@pytest.fixture
def proxied(own_redis: RedisServer) -> Iterator[SlowProxy]:
    """A proxy before `own_redis`, at full speed."""
    proxy = SlowProxy(own_redis.port, None)
    yield proxy
    proxy.close()


def keys_in(server: RedisServer) -> set[str]:
    """The server's keys of all blocks."""
    with kvferry.Store(server.unix_url) as store:
        return {entry.name for entry in store.walk() if entry.kind == "block"}


def save_one_by_one(toy: Toy, server: RedisServer, num: int) -> list[str]:
    """Saves the blocks of a prompt, and returns the server's keys of them, in order."""
    keys: list[str] = []
    for i in range(1, num + 1):
        toy.run(tokens(i * BLOCK + 1))
        keys += keys_in(server) - set(keys)
        assert len(keys) == i
    return keys


# ---- hits and misses


def test_conformance_full_prompt_hit(open_toy: Opener, redis: RedisServer) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        prompt = tokens(4 * BLOCK)
        assert toy.run(prompt, left=0) == 0
        assert toy.run(prompt, left=0) == 4  # the store has them all, and says so
        assert toy.run(prompt) == 3  # the engine leaves a token to compute


def test_conformance_one_block_hit(open_toy: Opener, redis: RedisServer) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        toy.run(tokens(BLOCK + 1))
        assert toy.run(tokens(5 * BLOCK)) == 1


def test_conformance_miss_in_the_middle(open_toy: Opener, redis: RedisServer) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        redis.command("DEL", save_one_by_one(toy, redis, 4)[2])
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        assert toy.run(tokens(4 * BLOCK + 1)) == 2
        assert toy.run(tokens(4 * BLOCK + 1)) == 4  # what was computed is stored anew


def test_conformance_exactly_n_blocks_and_one_more_or_less(open_toy: Opener, redis: RedisServer) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        toy.run(tokens(3 * BLOCK + 2))
        assert [toy.run(tokens(3 * BLOCK + more), left=0) for more in (-1, 0, 1)] == [2, 3, 3]
        assert [toy.run(tokens(3 * BLOCK + more)) for more in (-1, 0, 1)] == [2, 2, 3]


def test_conformance_corrupt_record(open_toy: Opener, redis: RedisServer) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        key = save_one_by_one(toy, redis, 3)[1]
        redis.command("SETRANGE", key, "700", b"\x5a\xa5\x5a\xa5")
        prompt = tokens(3 * BLOCK + 1)
        assert toy.run(prompt) == 1
        assert toy.run(prompt) == 3  # stored anew


def test_conformance_record_of_another_space(open_toy: Opener, redis: RedisServer) -> None:
    prompt = tokens(BLOCK + 1)
    with contextlib.closing(open_toy(redis.unix_url, model="another")) as other:
        other.run(prompt)
        (its,) = keys_in(redis)
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        assert toy.run(prompt) == 0  # it is named otherwise
        (mine,) = keys_in(redis) - {its}
        assert redis.command("COPY", its, mine, "REPLACE") == b":1\r\n"
        assert toy.run(prompt) == 0  # and says so itself
        assert toy.run(prompt) == 1


def test_conformance_eviction_between_lookup_and_load(open_toy: Opener, redis: RedisServer) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        toy.run(prompt)
        toy.between = lambda: redis.command("FLUSHALL")
        assert toy.run(prompt) == 0
        toy.between = lambda: None
        assert toy.run(prompt) == 4


def test_conformance_restart_with_another_dtype(open_toy: Opener, redis: RedisServer) -> None:
    prompt = tokens(4 * BLOCK + 1)
    for dtype in ("float16", "bfloat16"):  # of the same length
        with contextlib.closing(open_toy(redis.unix_url, dtype=dtype)) as toy:
            assert toy.run(prompt) == 0
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        assert toy.run(prompt) == 4


def test_conformance_restart_with_another_block_size(open_toy: Opener, redis: RedisServer) -> None:
    prompt = tokens(4 * BLOCK + 1)
    for block in (BLOCK, 2 * BLOCK):
        with contextlib.closing(open_toy(redis.unix_url, block=block)) as toy:
            assert toy.run(prompt) == 0
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        assert toy.run(prompt) == 4


def test_conformance_salt_apart(open_toy: Opener, redis: RedisServer) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        assert [toy.run(prompt, salt) for salt in ("", "tenant", "", "tenant", "other")] == [0, 0, 4, 4, 0]


def test_conformance_lora_on_and_off(open_toy: Opener, redis: RedisServer) -> None:
    """Both engines put the adapter into the hash of the first block, as they do with a salt."""
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        assert [toy.run(prompt, lora) for lora in ("lora-1", "", "lora-1")] == [0, 0, 4]


# ---- servers that are down, slow, silent


def loads_again(toy: Toy, prompt: Sequence[int], num: int) -> None:
    until(lambda: toy.run(prompt) == num, f"{num} blocks are loaded")


def test_conformance_store_down_at_start(open_toy: Opener, own_redis: RedisServer) -> None:
    own_redis.stop()
    with contextlib.closing(open_toy(own_redis.tcp_url)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        assert toy.run(prompt) == 0
        own_redis.start()
        loads_again(toy, prompt, 4)


def test_conformance_store_down_in_the_middle(open_toy: Opener, own_redis: RedisServer, proxied: SlowProxy) -> None:
    with contextlib.closing(open_toy(proxied.url)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        toy.run(prompt)
        toy.between = lambda: proxied.at_next("GET", own_redis.stop)
        assert toy.run(prompt) == 0
        toy.between = lambda: None
        assert not proxied.is_armed()
        own_redis.start()
        loads_again(toy, prompt, 4)


def test_conformance_store_slow_past_the_deadline(open_toy: Opener, own_redis: RedisServer, proxied: SlowProxy) -> None:
    with contextlib.closing(open_toy(proxied.url, load_timeout=0.3)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        toy.run(prompt)
        toy.between = lambda: setattr(proxied, "rate", 200)
        assert toy.run(prompt) == 0
        toy.between, proxied.rate = (lambda: None), None
        loads_again(toy, prompt, 4)


def test_conformance_store_hangs_while_loading(open_toy: Opener, own_redis: RedisServer, proxied: SlowProxy) -> None:
    with contextlib.closing(open_toy(proxied.url, load_timeout=0.5, save_timeout=0.5)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        toy.run(prompt)
        toy.between = lambda: proxied.at_next("GET", own_redis.pause)
        assert toy.run(prompt) == 0
        assert not proxied.is_armed()
        own_redis.resume()
        toy.between = lambda: None
        loads_again(toy, prompt, 4)


def test_conformance_store_hangs_while_saving(open_toy: Opener, own_redis: RedisServer, proxied: SlowProxy) -> None:
    with contextlib.closing(open_toy(proxied.url, load_timeout=0.5, save_timeout=0.5)) as toy:
        prompt = tokens(4 * BLOCK + 1)
        proxied.at_next("SET", own_redis.pause)
        assert toy.run(prompt) == 0
        assert not proxied.is_armed()
        own_redis.resume()
        loads_again(toy, prompt, 4)


# ---- several at once


def test_conformance_two_writers_of_one_key(open_toy: Opener, redis: RedisServer) -> None:
    prompt = tokens(8 * BLOCK + 1)
    toys = [open_toy(redis.unix_url) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda toy: toy.run(prompt), toys))
    for toy in toys:
        toy.close()
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        assert toy.run(prompt) == 8


def _run_elsewhere(module: str, settings: dict[str, Any]) -> None:
    toy = importlib.import_module(module).make_toy(**settings)
    assert toy.run(tokens(4 * BLOCK + 1)) == 0
    toy.close()


def test_conformance_two_processes_on_one_store(
    open_toy: Opener, redis: RedisServer, request: pytest.FixtureRequest
) -> None:
    with contextlib.closing(open_toy(redis.unix_url)) as toy:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_run_elsewhere, args=(request.module.__name__, open_toy.settings))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert toy.run(tokens(4 * BLOCK + 1)) == 4


def test_conformance_sixteen_requests_over_two_rounds(open_toy: Opener, redis: RedisServer) -> None:
    prompts = [tokens(3 * BLOCK, first=i % 4) + [i] * (2 * BLOCK + 1) for i in range(16)]
    with contextlib.closing(open_toy(redis.unix_url)) as toy, ThreadPoolExecutor(16) as pool:
        list(pool.map(toy.run, prompts))
        assert list(pool.map(toy.run, prompts)) == [5] * 16
