# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager with tensors of torch, and caches of Transformers. Runs where they are (make setup-engines)."""

from __future__ import annotations

import pytest

import kvferry
from kvferry import KVCacheManager

torch = pytest.importorskip("torch")


@pytest.fixture
def manager(any_url):
    with KVCacheManager(url=any_url, arrays="torch") as manager:
        yield manager


@pytest.fixture(params=["mem", "file", "unix"])
def any_url(request):
    if request.param == "mem":
        return "mem:"
    if request.param == "file":
        return request.getfixturevalue("folder_url")
    return request.getfixturevalue("redis").unix_url


def random(shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a, b):
    assert isinstance(a, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int64", "bool", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_come_back(manager, name):
    k, v = random((2, 3, 5, 4), getattr(torch, name)), random((2, 3, 7, 4), getattr(torch, name), 2)
    manager.save_kv_cache("s", k, v)
    assert manager.store.session_look("s").k_dtype == name
    keys, values = manager.load_kv_cache("s")
    same(keys, k)
    same(values, v)
    keys.zero_()  # writable, and its own
    same(manager.load_kv_cache("s")[0], k)
    into = torch.empty_like(k), torch.empty_like(v)
    assert manager.load_kv_cache("s", into=into)[0] is into[0]
    same(into[0], k)
    same(into[1], v)


def test_tensors_and_arrays_are_exchanged():
    numpy = pytest.importorskip("numpy")
    with KVCacheManager(url="mem:") as manager:
        manager.save_kv_cache("s", random((3, 4), torch.float16), numpy.zeros((2, 2), "float32"))
        keys, values = manager.load_kv_cache("s")
        assert isinstance(keys, numpy.ndarray) and keys.tobytes() == random((3, 4), torch.float16).numpy().tobytes()
        same(manager.load_kv_cache("s", arrays="torch")[1], torch.zeros((2, 2)))
        into = torch.empty((3, 4), dtype=torch.float16), numpy.empty((2, 2), "float32")
        manager.load_kv_cache("s", into=into)
        same(into[0], random((3, 4), torch.float16))


def test_what_is_not_contiguous_or_is_trained(manager):
    k = random((4, 6))
    manager.save_kv_cache("s", k.T, k[:, ::2])
    keys, values = manager.load_kv_cache("s")
    same(keys, k.T.contiguous())
    same(values, k[:, ::2].contiguous())
    manager.save_kv_cache("s", k.requires_grad_(), torch.complex(k, k).conj())
    keys, values = manager.load_kv_cache("s")
    same(keys, k.detach())
    same(values, torch.complex(k, k).conj().resolve_conj().detach())
    manager.save_kv_cache("s", torch.empty((0, 3)), torch.tensor(2.0))
    same(manager.load_kv_cache("s")[0], torch.empty((0, 3)))


@pytest.mark.parametrize(
    ("into", "says"),
    [
        (lambda: random((6, 4)).T, "not contiguous"),
        (lambda: torch.empty((4, 6), device="meta"), "is on meta"),
        (lambda: torch.empty((4, 6), dtype=torch.int32), "float32, not int32"),
    ],
)
def test_tensors_that_nothing_can_be_read_into(manager, into, says):
    manager.save_kv_cache("s", random((4, 6)), random((4, 6)))
    with pytest.raises(TypeError, match=says):
        manager.load_kv_cache("s", into=(into(), torch.empty((4, 6))))
    with pytest.raises(kvferry.LimitError, match="96 and 96"):
        manager.load_kv_cache("s", into=(torch.empty((4, 5)), torch.empty((4, 6))))


def test_tensors_that_have_no_plain_memory(manager):
    with pytest.raises(TypeError, match="sparse"):
        manager.save_kv_cache("s", random((4, 6)).to_sparse(), random((4, 6)))
    with pytest.raises(TypeError, match="quantised"):
        manager.save_kv_cache("s", torch.quantize_per_tensor(random((4, 6)), 0.1, 0, torch.qint8), random((4, 6)))
    with pytest.raises(TypeError, match=r"view\(torch.uint8\)"):
        manager.save_kv_cache("s", torch.zeros((4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), random((4, 6)))


def test_lazy_views_are_stored_as_they_look(manager):
    complex_ = torch.complex(random((3, 4)).float(), random((3, 4)).float())
    for lazy in (complex_.conj(), complex_.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        manager.save_kv_cache("s", lazy, lazy)
        assert torch.equal(manager.load_kv_cache("s")[0], lazy)
        with pytest.raises(TypeError, match="lazy"):
            manager.load_kv_cache("s", into=(lazy, lazy))


def test_a_dtype_of_another_version(manager):
    manager.store.session_save("s", b"1234", b"1234", dtype="float3_mine", shape=(2,))
    with pytest.raises(TypeError, match="float3_mine"):
        manager.load_kv_cache("s")


# ---- caches of Transformers


@pytest.fixture
def cache():
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    for layer in range(3):
        cache.update(
            random((1, 2, 5, 4), torch.bfloat16, layer), random((1, 2, 5, 4), torch.bfloat16, 9 + layer), layer
        )
    return cache


def test_a_dynamic_cache(manager, cache):
    manager.save_kv_cache("s", past_key_values=cache)
    info = manager.store.session_look("s")
    assert (info.num_tokens, info.k_shape, info.k_dtype) == (5, (3, 1, 2, 5, 4), "bfloat16")
    keys, values = manager.load_kv_cache("s")
    same(keys, torch.stack([layer.keys for layer in cache.layers]))
    same(values, torch.stack([layer.values for layer in cache.layers]))
    again = type(cache)(list(zip(keys, values, strict=True)))
    for mine, theirs in zip(again.layers, cache.layers, strict=True):
        same(mine.keys, theirs.keys)
        same(mine.values, theirs.values)
    for layer in again.layers:
        layer.keys.zero_()
    manager.load_kv_cache("s", into=again)
    same(again.layers[2].keys, cache.layers[2].keys)


def test_caches_that_are_more_than_their_tensors(manager, cache):
    from transformers import DynamicCache, StaticCache
    from transformers.models.llama import LlamaConfig

    with pytest.raises(TypeError, match=r"no layers|run the model first"):
        manager.save_kv_cache("s", past_key_values=DynamicCache())
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=8)
    static = StaticCache(config=config, max_cache_len=16)
    static.update(random((1, 2, 5, 4)), random((1, 2, 5, 4)), 0)
    with pytest.raises(TypeError, match=r"PrefixCache"):
        manager.save_kv_cache("s", past_key_values=static)
    assert not manager.exists("s")
