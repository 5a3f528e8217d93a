# SPDX-License-Identifier: Apache-2.0
"""The conformance set (conformance.py) for kvferry.hf, as far as test_hf.py does not have it. Each answer is compared
with that of a PrefixCache whose store is empty, to the bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make setup-engines")
pytest.importorskip("transformers", reason="Transformers is not installed: make setup-engines")

import hf_toys  # noqa: E402
from conftest import until  # noqa: E402
from slow_proxy import SlowProxy  # noqa: E402
from test_hf import BLOCK, TOKENS, counted, logits, prefix_of, without_store  # noqa: E402

import kvferry  # noqa: E402

BLOCKS = TOKENS // BLOCK
BATCH = hf_toys.batch(1, TOKENS)


@pytest.fixture(scope="module")
def llama():
    torch.set_num_threads(1)
    return hf_toys.make("llama", "float32")


@pytest.fixture(scope="module")
def expected(llama):
    return without_store(llama, BATCH)


@pytest.fixture
def proxy(own_redis):
    proxy = SlowProxy(own_redis.port, None)
    yield proxy
    proxy.close()


def cut(batch, num):
    """The first `num` tokens."""
    return {name: tensor[:, :num] for name, tensor in batch.items()}


def blocks(store):
    return sorted((e for e in store.walk() if e.kind == "block"), key=lambda e: e.first_token)


def is_right(llama, url, loaded, batch=BATCH, expected=None, **options):
    """A new PrefixCache and a new store's handle give the right answer, and load so many blocks of it."""
    with kvferry.Store(url) as store:
        answer, num, _ = counted(prefix_of(llama, store, **options), batch)
        assert torch.equal(answer, without_store(llama, batch) if expected is None else expected)
        assert num == loaded * BLOCK


@pytest.mark.parametrize("num, loaded", [(-1, BLOCKS - 1), (0, BLOCKS - 1), (1, BLOCKS)])
def test_conformance_exactly_n_blocks_and_one_more_or_less(llama, folder_url, num, loaded):
    """A token is left to compute."""
    is_right(llama, folder_url, 0)
    is_right(llama, folder_url, loaded, cut(BATCH, BLOCKS * BLOCK + num))


def test_conformance_full_prompt_hit(llama, folder_url, expected):
    is_right(llama, folder_url, 0)
    is_right(llama, folder_url, BLOCKS, expected=expected)


def test_conformance_one_block_hit(llama, folder_url, expected):
    is_right(llama, folder_url, 0, cut(BATCH, BLOCK + 5))
    is_right(llama, folder_url, 1, expected=expected)


def test_conformance_miss_in_the_middle(llama, folder_url, expected):
    is_right(llama, folder_url, 0)
    with kvferry.Store(folder_url) as store:
        gone = blocks(store)[2]
        assert store.remove(gone.space, gone.key)
    is_right(llama, folder_url, 2, expected=expected)
    is_right(llama, folder_url, BLOCKS, expected=expected)


def test_conformance_record_of_another_space(llama, own_redis, expected):
    """The third block of another space, with other bytes of the same size, under the name of ours."""
    url = own_redis.unix_url
    is_right(llama, url, 0)
    with kvferry.Store(url) as store:
        ours = blocks(store)[2]
        other = prefix_of(llama, store, identity={"steering": "a"})
        counted(other, BATCH)
        wrong = next(e for e in blocks(store) if e.space != ours.space and e.first_token == ours.first_token)
    assert wrong.stored_bytes == ours.stored_bytes
    assert own_redis.command("COPY", wrong.name, ours.name, "REPLACE") == b":1\r\n"
    is_right(llama, url, 2, expected=expected)
    is_right(llama, url, BLOCKS, expected=expected)


def test_conformance_store_down_at_start(llama, own_redis, expected):
    own_redis.stop()
    with kvferry.Store(own_redis.tcp_url, drain=0) as store:
        prefix = prefix_of(llama, store)
        assert torch.equal(logits(prefix.generate, BATCH), expected)
        own_redis.start()

        def is_used():
            assert torch.equal(logits(prefix.generate, BATCH), expected)
            return prefix.counters.loaded_tokens > 0

        until(is_used, "the store is used when it is there")


def fails_at_load(llama, proxy, expected, fault, **options):
    """A fault between lookup and load."""
    is_right(llama, proxy.url, 0)
    with kvferry.Store(proxy.url, drain=0) as store:
        prefix = prefix_of(llama, store, **options)
        proxy.at_next("GET", fault)
        assert torch.equal(logits(prefix.generate, BATCH), expected)
        assert not proxy.is_armed() and prefix.why is None
        assert prefix.counters.computed_tokens > 0


def test_conformance_eviction_between_lookup_and_load(llama, own_redis, proxy, expected):
    fails_at_load(llama, proxy, expected, lambda: own_redis.command("FLUSHALL"))


def test_conformance_store_down_in_the_middle(llama, own_redis, proxy, expected):
    fails_at_load(llama, proxy, expected, own_redis.stop)
    own_redis.start()
    is_right(llama, proxy.url, 0)
    is_right(llama, proxy.url, BLOCKS, expected=expected)


def test_conformance_store_hangs_while_loading(llama, own_redis, proxy, expected):
    fails_at_load(llama, proxy, expected, own_redis.pause, timeout=1.0)
    own_redis.resume()
    is_right(llama, proxy.url, BLOCKS, expected=expected)


def test_conformance_store_slow_past_the_deadline(llama, proxy, expected):
    def slow():
        proxy.rate = 1000

    fails_at_load(llama, proxy, expected, slow, timeout=1.0)
    proxy.rate = None
    is_right(llama, proxy.url, BLOCKS, expected=expected)


def test_conformance_store_hangs_while_saving(llama, own_redis, proxy, expected):
    """The answer does not wait for the save, and other prompts go on meanwhile."""
    other = hf_toys.batch(1, TOKENS, seed=2)
    with kvferry.Store(proxy.url, drain=0) as store:
        prefix = prefix_of(llama, store)
        proxy.at_next("SET", own_redis.pause)
        assert torch.equal(logits(prefix.generate, BATCH), expected)
        until(lambda: not proxy.is_armed(), "a save is under way")
        assert torch.equal(logits(prefix.generate, other), without_store(llama, other))
        own_redis.resume()
        store.flush(60)
    with kvferry.Store(proxy.url) as store:
        counted(prefix_of(llama, store), BATCH)
    is_right(llama, proxy.url, BLOCKS, expected=expected)


def test_conformance_two_writers_of_one_key(folder_url, expected):
    """Two models and two handles of a store in two threads."""
    models = [hf_toys.make("llama", "float32") for _ in range(2)]

    def answer(model):
        with kvferry.Store(folder_url) as store:
            return logits(prefix_of(model, store).generate, BATCH)

    with ThreadPoolExecutor(2) as pool:
        for one in pool.map(answer, models):
            assert torch.equal(one, expected)
    is_right(models[0], folder_url, BLOCKS, expected=expected)


def test_conformance_sixteen_requests_over_two_rounds(llama, folder_url):
    """16 rows of a batch: four beginnings, and an end for each."""
    beginnings = hf_toys.batch(1, 4 * 3 * BLOCK, seed=3)["input_ids"].reshape(4, 3 * BLOCK)
    ends = hf_toys.batch(1, 16 * 20, seed=4)["input_ids"].reshape(16, 20)
    ids = torch.cat([beginnings.repeat(4, 1), ends], dim=1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    is_right(llama, folder_url, 12 * 3, batch)  # what one row has computed the others share
    is_right(llama, folder_url, 16 * 3, batch)
