# SPDX-License-Identifier: Apache-2.0
"""kvferry.llama_cpp: the answer with a hit is that of a cold run, token by token and logit by logit, whatever happens
to the store; and what is not the same model with the same settings is a miss. On toy models, with the real libllama."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_gguf
from conftest import RedisServer, free_port, until

import kvferry

llama_cpp = pytest.importorskip("llama_cpp", reason="KVF_LLAMA_PYTHON and LLAMA_CPP_LIB_PATH name llama-cpp-python")
np = pytest.importorskip("numpy")

from llama_cpp import Llama, LlamaRAMCache  # noqa: E402

import kvferry.llama_cpp  # noqa: E402
from kvferry.llama_cpp import KvferryCache  # noqa: E402

pytestmark = pytest.mark.skipif(kvferry.llama_cpp.LlamaEngine is None, reason="built without llama.cpp")

TEXT = "The-quick-brown-fox-jumps-over-the-lazy-dog,-and-the-dog-sleeps-on.-"
PROMPT = TEXT * 8  # of bytes, which are tokens: 544
ANSWER = 16


class Toys:
    """Models in a folder, written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plain = toy_gguf.write_model(folder / "plain.gguf")
        self.other = toy_gguf.write_model(folder / "other.gguf", seed=2)
        self.windows = toy_gguf.write_model(folder / "windows.gguf", arch="gemma3", window=128)
        self.lora = toy_gguf.write_lora(folder / "lora.gguf")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a Llama, with a KvferryCache of its own for `url`, or none; closes both."""
    with contextlib.ExitStack() as stack:

        def make(path: Path, url: str | None, *, cache: dict[str, Any] | None = None, **kwargs: Any) -> Any:
            settings = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False} | kwargs
            llm = Llama(str(path), **settings)
            stack.callback(llm.close)
            llm.set_cache(None)
            if url is not None:
                kept = KvferryCache(url, **({"block_tokens": 64} | (cache or {})))
                stack.callback(kept.close)
                llm.set_cache(kept)
            return llm

        yield make


def answer(llm: Any, prompt: str, num: int = ANSWER) -> tuple[list[int], bytes]:
    """The first tokens, and the logits that the first of them was chosen from."""
    tokens: list[int] = []
    logits = b""
    for token in llm.generate(llm.tokenize(prompt.encode(), add_bos=False), temp=0.0):
        if not tokens:
            row = llm._ctx.get_logits_ith(-1)
            logits = bytes((ctypes.c_float * llm.n_vocab()).from_address(ctypes.addressof(row.contents)))
        tokens.append(token)
        if len(tokens) == num:
            break
    return tokens, logits


def hit(llm: Any) -> int:
    """Tokens that the last prompt found in the store. The engine may compute some of them while others arrive."""
    report = llm.cache.report
    return int(report.get("stored_tokens", report["loaded_tokens"]))


TRIES = 20


def warm_run(make: Make, path: Path, url: str, num: int, ask: Callable[[Any], Any], **kwargs: Any) -> Any:
    """What ask(llm) returns, of a new Llama that finds `num` tokens in the store. On a busy machine the store may
    answer so late that the engine has begun to compute: then another one asks."""
    for _ in range(TRIES):
        llm = make(path, url, **kwargs)
        got = ask(llm)
        if hit(llm) >= num:
            break
    assert hit(llm) == num
    return got


def flushed(llm: Any) -> dict[str, Any]:
    assert llm.cache.flush(60)
    return dict(llm.cache.report)


WAYS = ["engine", "states"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With kvferry's engine, and as with another libllama than it was built with."""
    if request.param == "states":
        monkeypatch.setattr(kvferry.llama_cpp, "LlamaEngine", None)
    return str(request.param)


# ---- a hit is what a cold run is


@pytest.mark.parametrize("kwargs", [{}, {"flash_attn": True}, {"logits_all": True}, {"n_batch": 128, "n_ubatch": 64}])
def test_the_same_prompt(toys: Toys, make: Make, folder_url: str, way: str, kwargs: dict[str, Any]) -> None:
    cold_llm = make(toys.plain, folder_url, **kwargs)
    cold = answer(cold_llm, PROMPT)
    report = flushed(cold_llm)
    assert report["how"] == way and report["loaded_tokens"] == 0 and report["computed_tokens"] == len(PROMPT)
    warm = warm_run(make, toys.plain, folder_url, len(PROMPT) - 1, lambda llm: answer(llm, PROMPT), **kwargs)
    assert warm == cold
    plain = answer(make(toys.plain, None, **kwargs), PROMPT)
    assert np.allclose(np.frombuffer(plain[1], "f4"), np.frombuffer(warm[1], "f4"), atol=1e-3)
    assert plain[0] == warm[0]


@pytest.mark.parametrize("kwargs", [{"swa_full": True}, {"swa_full": False}])
def test_sliding_windows(toys: Toys, make: Make, folder_url: str, way: str, kwargs: dict[str, Any]) -> None:
    cold_llm = make(toys.windows, folder_url, **kwargs)
    cold = answer(cold_llm, PROMPT)
    assert flushed(cold_llm)["how"] == way
    warm = warm_run(make, toys.windows, folder_url, len(PROMPT) - 1, lambda llm: answer(llm, PROMPT), **kwargs)
    assert warm == cold
    shorter = answer(make(toys.windows, "mem:", **kwargs), PROMPT[:300])
    assert answer(cold_llm, PROMPT[:300])[0] == shorter[0]


def test_a_window_does_not_go_back(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    """The rows of a sliding window that lie before it are gone, so a Llama must not cut its context there."""
    settings = {"swa_full": False, "n_ctx": 2048, "n_batch": 64, "n_ubatch": 64}
    llm = make(toys.windows, folder_url, **settings)
    for prompt in (PROMPT * 3, PROMPT[:300], PROMPT):
        tokens, logits = answer(llm, prompt)
        cold = answer(make(toys.windows, "mem:", **settings), prompt)
        assert tokens == cold[0]
        assert np.allclose(np.frombuffer(logits, "f4"), np.frombuffer(cold[1], "f4"), atol=1e-2)


@pytest.mark.parametrize("at", [70, 300, 530])
def test_an_edited_prompt_loads_what_is_before_the_edit(
    toys: Toys, make: Make, folder_url: str, way: str, at: int
) -> None:
    llm = make(toys.plain, folder_url)
    answer(llm, PROMPT)
    flushed(llm)
    edited = PROMPT[:at] + "#" + PROMPT[at + 1 :]
    warm = warm_run(make, toys.plain, folder_url, at // 64 * 64, lambda llm: answer(llm, edited))
    assert warm == answer(make(toys.plain, "mem:"), edited)


def test_a_longer_and_a_shorter_prompt(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    llm = make(toys.plain, folder_url)
    answer(llm, PROMPT)
    flushed(llm)
    for prompt in (PROMPT + TEXT * 2, PROMPT[:400]):
        num = min(len(prompt) - 1, len(PROMPT)) // 64 * 64
        got = warm_run(make, toys.plain, folder_url, num, lambda llm, prompt=prompt: answer(llm, prompt))
        assert got == answer(make(toys.plain, "mem:"), prompt)


def test_short_prompts_are_left_alone(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    llm, plain = make(toys.plain, folder_url), make(toys.plain, None)
    for prompt in ("a", "fox", TEXT[:63]):
        assert answer(llm, prompt) == answer(plain, prompt)
        assert llm.cache.report["loaded_tokens"] == 0


def test_many_prompts_in_one_llama(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    """Each answer is that of a Llama that starts from nothing, whatever was in the context before."""
    prompts = [PROMPT, PROMPT[:200] + "and-then-" + PROMPT[200:], "something-else.-" * 30, PROMPT, TEXT, PROMPT[:-3]]
    cold = []
    for prompt in prompts:
        cold.append(answer(make(toys.plain, "mem:"), prompt))
    for _ in range(2):
        llm = make(toys.plain, folder_url)
        got = [answer(llm, prompt) for prompt in prompts]
        assert [g[0] for g in got] == [c[0] for c in cold]
        flushed(llm)


def test_what_the_llama_holds_is_not_computed_again(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    """A chat in one Llama goes on from its answer, as without a cache."""
    llm, plain = make(toys.plain, folder_url), make(toys.plain, None)
    text = PROMPT
    for turn in range(3):
        tokens, _ = answer(llm, text, 24)
        assert tokens == answer(plain, text, 24)[0]
        if turn > 0:
            assert llm.cache.report["computed_tokens"] <= 16 + 24
            assert llm.cache.report["resident_tokens"] >= len(text) - 16 - 24
        text += llm.detokenize(tokens).decode("latin-1").encode("ascii", "replace").decode() + "go-on,-dog.-"


def test_what_was_computed_after_other_tokens_is_not_stored(
    toys: Toys, make: Make, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Llama computes the end of its first prompt a second time, after others, in steps too short for the store."""
    monkeypatch.setattr(kvferry.llama_cpp, "LlamaEngine", None)
    llm = make(toys.plain, folder_url)
    for prompt in (PROMPT[:194], PROMPT[:100] + "?" * 60, PROMPT[:160], PROMPT[:194], PROMPT):
        answer(llm, prompt, 1)
    flushed(llm)
    later = make(toys.plain, folder_url)
    answer(later, PROMPT)
    assert hit(later) == 192, "what the first prompt has stored"


# ---- completions and chats


def complete(llm: Any, **kwargs: Any) -> dict[str, Any]:
    result: dict[str, Any] = llm.create_completion(**({"max_tokens": ANSWER, "temperature": 0.0} | kwargs))
    return result


def test_chat_completions(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    system = {"role": "system", "content": TEXT * 4}
    first = [system, {"role": "user", "content": "Does the dog sleep?"}]
    llm = make(toys.plain, folder_url)
    cold = llm.create_chat_completion(first, max_tokens=ANSWER, temperature=0.0)
    flushed(llm)
    warm = warm_run(
        make, toys.plain, folder_url, cold["usage"]["prompt_tokens"] - 1,
        lambda llm: llm.create_chat_completion(first, max_tokens=ANSWER, temperature=0.0),
    )  # fmt: skip
    assert warm["choices"] == cold["choices"] and warm["usage"] == cold["usage"]
    other = [system, {"role": "user", "content": "And what does the fox do?"}]
    asked = make(toys.plain, folder_url)
    again = asked.create_chat_completion(other, max_tokens=ANSWER, temperature=0.0)
    assert asked.cache.report["how"] == way
    want = make(toys.plain, "mem:").create_chat_completion(other, max_tokens=ANSWER, temperature=0.0)
    assert again["choices"] == want["choices"]


def test_streams_that_are_left_early(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    llm = make(toys.plain, folder_url)
    stream = llm.create_completion(PROMPT, max_tokens=50, temperature=0.0, stream=True)
    next(stream)
    stream.close()
    assert complete(llm, prompt=PROMPT)["choices"] == complete(make(toys.plain, "mem:"), prompt=PROMPT)["choices"]


def test_sampling_with_a_seed(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    llm = make(toys.plain, folder_url)
    cold = complete(llm, prompt=PROMPT, temperature=1.0, seed=7)
    flushed(llm)
    warm = complete(make(toys.plain, folder_url), prompt=PROMPT, temperature=1.0, seed=7)
    assert warm["choices"] == cold["choices"]


def close_logprobs(a: Any, b: Any) -> bool:
    assert a["tokens"] == b["tokens"] and a["text_offset"] == b["text_offset"]
    pairs = zip(a["token_logprobs"], b["token_logprobs"], strict=True)
    return all(x is y is None or abs(x - y) < 1e-2 for x, y in pairs)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("echo", [False, True])
def test_logprobs(toys: Toys, make: Make, folder_url: str, way: str, echo: bool) -> None:
    """With echo they are of the whole prompt, so all of it is computed."""
    want = complete(make(toys.plain, None, logits_all=True), prompt=PROMPT, logprobs=2, echo=echo)
    for asked_before in (False, True, False):
        llm = make(toys.plain, folder_url, logits_all=True)
        if asked_before:
            complete(llm, prompt=PROMPT)
        got = complete(llm, prompt=PROMPT, logprobs=2, echo=echo)
        assert close_logprobs(got["choices"][0]["logprobs"], want["choices"][0]["logprobs"])
        assert got["choices"][0]["text"] == want["choices"][0]["text"]
        assert isinstance(llm.cache, KvferryCache)
        flushed(llm)


def test_states_of_the_program(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    llm = make(toys.plain, folder_url)
    first = answer(llm, PROMPT)
    state = llm.save_state()
    answer(llm, "something-else.-" * 20)
    llm.load_state(state)
    assert answer(llm, PROMPT)[0] == first[0]
    assert answer(llm, PROMPT + TEXT)[0] == answer(make(toys.plain, "mem:"), PROMPT + TEXT)[0]


def test_speculative_decoding(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    want = complete(make(toys.plain, None), prompt=PROMPT)
    for _ in range(2):
        llm = make(toys.plain, folder_url, logits_all=True, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4))
        assert complete(llm, prompt=PROMPT)["choices"][0]["text"] == want["choices"][0]["text"]
        flushed(llm)


# ---- identity


def loads(make: Make, path: Path, url: str, num: int, **kwargs: Any) -> None:
    """It finds that many tokens, and the answer is the right one."""
    got = warm_run(make, path, url, num, lambda llm: answer(llm, PROMPT), **kwargs)
    assert got == answer(make(path, "mem:", **kwargs), PROMPT)


def test_another_model_of_the_same_shape(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    loads(make, toys.plain, folder_url, 0)
    loads(make, toys.other, folder_url, 0)


def test_a_model_that_was_replaced(toys: Toys, make: Make, folder_url: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(toys.plain.read_bytes())
    llm = make(path, None)
    aside = tmp_path / "aside.gguf"
    aside.write_bytes(toys.other.read_bytes())
    os.replace(aside, path)
    cache = KvferryCache(folder_url, block_tokens=64)
    llm.set_cache(cache)
    assert answer(llm, PROMPT)[0] == answer(make(toys.plain, None), PROMPT)[0]
    assert cache.report["how"] == "none" and "changed" in cache.report["why"]
    cache.close()


OTHERS = [
    {"rope_freq_base": 5000.0},
    {"rope_freq_scale": 0.5},
    {"flash_attn": True},
    {"type_k": 8},  # q8_0
    {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-2}},
    {"cache": {"tenant": "somebody else"}},
    {"cache": {"secret": b"0123456789abcdef"}},
]


@pytest.mark.parametrize("kwargs", OTHERS, ids=[str(*k) for k in OTHERS])
def test_other_settings_are_a_miss(toys: Toys, make: Make, folder_url: str, way: str, kwargs: dict[str, Any]) -> None:
    loads(make, toys.plain, folder_url, 0)
    loads(make, toys.plain, folder_url, 0, **kwargs)


@pytest.mark.parametrize("kwargs", [{"n_ctx": 2048}, {"n_threads": 2}, {"n_batch": 64}, {"use_mmap": False}])
def test_settings_that_change_no_kv_are_a_hit(toys: Toys, make: Make, folder_url: str, kwargs: dict[str, Any]) -> None:
    loads(make, toys.plain, folder_url, 0)
    loads(make, toys.plain, folder_url, len(PROMPT) - 1, **kwargs)


def test_lora_is_part_of_the_identity(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    lora = {"lora_path": str(toys.lora)}
    loads(make, toys.plain, folder_url, 0)
    loads(make, toys.plain, folder_url, 0, **lora)
    loads(make, toys.plain, folder_url, 0, **lora, lora_scale=0.5)
    loads(make, toys.plain, folder_url, len(PROMPT) - 1, **lora)


def test_adapters_that_are_changed_by_hand(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    """It is not known then what computes."""
    llm = make(toys.plain, folder_url)
    before = answer(llm, PROMPT)[0]
    flushed(llm)
    adapter = llama_cpp.llama_adapter_lora_init(llm.model, str(toys.lora).encode())
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    llama_cpp.llama_cpp.llama_set_adapters_lora(llm.ctx, adapters, 1, (ctypes.c_float * 1)(1.0))
    llm.reset()
    after = answer(llm, PROMPT)[0]
    assert llm.cache.report["how"] == "none" and "adapters" in llm.cache.report["why"]
    assert after != before
    assert after == answer(make(toys.plain, None, lora_path=str(toys.lora)), PROMPT)[0]


def test_no_cache_for_embeddings(toys: Toys, make: Make, folder_url: str) -> None:
    llm = make(toys.plain, folder_url, embedding=True)
    assert len(llm.embed("The fox")) > 0
    assert llm.context_params.n_seq_max > 2


# ---- faults of the store


def records(url: str) -> list[Path]:
    folder = Path(url.removeprefix("file:"))
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size > 200]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def exchange(paths: list[Path]) -> None:
    bodies = [path.read_bytes() for path in paths]
    for path, body in zip(paths, bodies[1:] + bodies[:1], strict=True):
        path.write_bytes(body)


@pytest.mark.parametrize("fault", ["flip", "truncate", "exchange", "one"])
def test_records_that_are_not_what_they_should_be(
    toys: Toys, make: Make, folder_url: str, way: str, fault: str
) -> None:
    llm = make(toys.plain, folder_url)
    cold = answer(llm, PROMPT)
    flushed(llm)
    paths = records(folder_url)
    assert paths
    if fault == "exchange":
        exchange(paths)
    elif fault == "one":
        flip(paths[len(paths) // 2])
    else:
        for path in paths:
            (flip if fault == "flip" else truncate)(path)
    warm_llm = make(toys.plain, folder_url)
    assert answer(warm_llm, PROMPT) == cold
    if fault != "one":
        assert warm_llm.cache.report["loaded_tokens"] == 0
    flushed(warm_llm)
    assert answer(make(toys.plain, folder_url), PROMPT) == cold


def test_a_store_that_is_down(toys: Toys, make: Make, own_redis: RedisServer, way: str) -> None:
    cold = answer(make(toys.plain, "mem:"), PROMPT)
    llm = make(toys.plain, own_redis.tcp_url)
    assert answer(llm, PROMPT) == cold
    flushed(llm)
    own_redis.stop()
    for _ in range(2):
        assert answer(make(toys.plain, own_redis.tcp_url, cache={"timeout": 1.0}), PROMPT) == cold
    assert answer(llm, PROMPT[:500])[0] == answer(make(toys.plain, None), PROMPT[:500])[0]


def test_a_store_that_hangs(toys: Toys, make: Make, own_redis: RedisServer, way: str) -> None:
    llm = make(toys.plain, own_redis.tcp_url)
    cold = answer(llm, PROMPT)
    flushed(llm)
    own_redis.pause()
    hung = make(toys.plain, own_redis.tcp_url, cache={"timeout": 1.0})
    assert answer(hung, PROMPT) == cold
    assert hung.cache.report["loaded_tokens"] == 0
    own_redis.resume()
    assert answer(make(toys.plain, own_redis.tcp_url), PROMPT) == cold


def test_a_store_that_is_closed(toys: Toys, make: Make, way: str) -> None:
    with kvferry.Store("mem:") as store:
        llm = make(toys.plain, None)
        llm.set_cache(KvferryCache(store, block_tokens=64))
        cold = answer(llm, PROMPT)
    llm.reset()
    assert answer(llm, PROMPT)[0] == cold[0]
    assert llm.cache.report["how"] == "none" and "closed" in llm.cache.report["why"]


@pytest.mark.parametrize("longer", [0, 100])
def test_a_state_that_llama_cpp_does_not_take(
    toys: Toys, make: Make, folder_url: str, monkeypatch: pytest.MonkeyPatch, longer: int
) -> None:
    """Whatever the context held before is gone then."""
    monkeypatch.setattr(kvferry.llama_cpp, "LlamaEngine", None)
    llm = make(toys.plain, folder_url)
    cold = answer(llm, PROMPT + TEXT[:longer])
    flushed(llm)
    warm_llm = make(toys.plain, folder_url)
    answer(warm_llm, PROMPT[:300])
    lib = llama_cpp.llama_cpp
    monkeypatch.setattr(lib, "llama_state_seq_set_data", lambda *_: 0)
    assert answer(warm_llm, PROMPT + TEXT[:longer]) == cold
    assert warm_llm.cache.report["loaded_tokens"] == warm_llm.cache.report["resident_tokens"] == 0


def test_pieces_of_a_state_that_are_gone(
    toys: Toys, make: Make, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is computed, and stored again, so the next one finds it."""
    monkeypatch.setattr(kvferry.llama_cpp, "LlamaEngine", None)
    llm = make(toys.plain, folder_url)
    cold = answer(llm, PROMPT)
    flushed(llm)
    for path in records(folder_url):
        if path.stat().st_size > 100_000:
            path.unlink()
    for loaded in (0, len(PROMPT) - 1):
        again = make(toys.plain, folder_url)
        assert answer(again, PROMPT) == cold
        assert again.cache.report["loaded_tokens"] == loaded
        flushed(again)


@pytest.mark.parametrize("url", ["unix", "tcp", "file"])
def test_every_kind_of_store(toys: Toys, make: Make, redis: RedisServer, folder_url: str, way: str, url: str) -> None:
    where = {"unix": redis.unix_url, "tcp": redis.tcp_url, "file": folder_url}[url]
    llm = make(toys.plain, where)
    cold = answer(llm, PROMPT)
    flushed(llm)
    assert warm_run(make, toys.plain, where, len(PROMPT) - 1, lambda llm: answer(llm, PROMPT)) == cold


# ---- the interface


def test_one_cache_for_several_llamas(toys: Toys, make: Make, folder_url: str, way: str) -> None:
    with contextlib.closing(KvferryCache(folder_url, block_tokens=64)) as cache:
        llms = [make(path, None) for path in (toys.plain, toys.plain, toys.other)]
        for llm in llms:
            llm.set_cache(cache)
        first = answer(llms[0], PROMPT)
        assert cache.flush(60)
        assert answer(llms[1], PROMPT) == first
        assert cache.report["how"] == way
        assert answer(llms[2], PROMPT) == answer(make(toys.other, "mem:"), PROMPT)
        assert answer(llms[0], PROMPT)[0] == first[0]
        assert cache.cache_size > 0


def test_it_takes_the_place_of_their_caches_and_gives_it_back(toys: Toys, make: Make, folder_url: str) -> None:
    llm = make(toys.plain, folder_url)
    want = complete(llm, prompt=PROMPT)["choices"]
    llm.set_cache(LlamaRAMCache())
    assert complete(llm, prompt=PROMPT)["choices"] == want
    llm.set_cache(None)
    assert complete(llm, prompt=PROMPT)["choices"] == want


def test_a_wrong_url(toys: Toys) -> None:
    with pytest.raises(kvferry.ConfigError):
        KvferryCache("nonsense://here")


def test_another_libllama_is_not_taken() -> None:
    takes = kvferry.llama_cpp.LlamaEngine.takes
    lib = llama_cpp.llama_cpp
    model = kvferry.llama_cpp._layout(lib.llama_model_params)
    context = kvferry.llama_cpp._layout(lib.llama_context_params)
    assert takes(lib._lib._handle, model, context)
    assert not takes(lib._lib._handle, model | {"kv_overrides": model["kv_overrides"] + 8}, context)
    assert not takes(lib._lib._handle, model, context | {"type_k": context["type_v"]})
    assert not takes(lib._lib._handle, model, {})
    assert not takes(ctypes.CDLL(None)._handle, model, context)
    assert not takes(0, model, context)


def test_an_interrupt_ends_a_prefill(toys: Toys, make: Make) -> None:
    """As Ctrl-C does: the exception of the handler leaves the call, and the next prompt is answered as ever."""
    llm = make(toys.plain, "mem:", n_ctx=4096, n_batch=64, n_ubatch=64)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # it hits a prefill, or what is around it
            while True:
                answer(llm, PROMPT * 7, 1)
                llm.reset()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert answer(llm, PROMPT) == answer(make(toys.plain, "mem:"), PROMPT)


def test_a_context_is_for_one_thread(toys: Toys, make: Make) -> None:
    """A second thread in the same context is refused, before it has touched anything."""
    llm = make(toys.plain, "mem:", n_ctx=4096, n_batch=64, n_ubatch=64)
    answer(llm, PROMPT, 1)
    engine = llm.__dict__["_kvferry_way"].engine
    tokens = [list(PROMPT.encode()) * 4, list(PROMPT[::-1].encode()) * 4]
    refused = threading.Event()
    errors: list[BaseException] = []

    def work(prompt: list[int]) -> None:
        try:
            while not refused.is_set():
                try:
                    assert engine.prefill(prompt)["num_tokens"] == len(prompt)
                    engine.cut(len(prompt))
                except RuntimeError as error:
                    assert "one thread at a time" in str(error)
                    refused.set()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in tokens]
    for thread in threads:
        thread.start()
    until(lambda: refused.is_set() or errors, "a second thread is refused")
    for thread in threads:
        thread.join()
    assert not errors
    llm.reset()
    with llm.__dict__["_kvferry_inside"], pytest.raises(RuntimeError, match="another thread"):
        answer(llm, PROMPT, 1)
    assert answer(llm, PROMPT) == answer(make(toys.plain, "mem:"), PROMPT)


def test_an_interrupt_ends_a_lookup(toys: Toys, make: Make, own_redis: RedisServer) -> None:
    """Ctrl-C while the store is silent: the wait for it ends, and the exception leaves the call."""
    llm = make(toys.plain, own_redis.unix_url, n_ctx=4096)
    first = answer(llm, PROMPT)
    own_redis.pause()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            while True:
                llm.reset()
                answer(llm, PROMPT, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        own_redis.resume()
    assert answer(llm, PROMPT) == first


# ---- other processes

CHILD = """
import json, sys
import kvferry.llama_cpp
from llama_cpp import Llama
path, prompt, block_tokens = sys.argv[1:4]
llm = Llama(path, n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
if int(block_tokens) > 0:
    llm.set_cache(kvferry.llama_cpp.KvferryCache(block_tokens=int(block_tokens)))
text = llm.create_completion(prompt, max_tokens=16, temperature=0.0)["choices"][0]["text"]
llm.cache.flush(60)
print(json.dumps({"text": text, **llm.cache.report}))
"""


def start(code: str, *args: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    got: dict[str, Any] = json.loads(out.splitlines()[-1])
    return got


def test_processes_share_a_store(toys: Toys, redis: RedisServer) -> None:
    def child() -> subprocess.Popen[str]:
        return start(CHILD, str(toys.plain), PROMPT, "64", KVFERRY_STORE=redis.unix_url)

    both = [child(), child()]
    first, second = [result(process) for process in both]
    assert first["text"] == second["text"]
    found = 0
    for _ in range(TRIES):
        third = result(child())
        assert third["text"] == first["text"]
        found = third["stored_tokens"]
        if found == len(PROMPT) - 1:
            break
    assert found == len(PROMPT) - 1


def test_what_is_saved_is_written_at_the_end_of_the_process(toys: Toys, folder_url: str) -> None:
    code = CHILD.replace("llm.cache.flush(60)\n", "")
    results = [result(start(code, str(toys.plain), PROMPT, "64", KVFERRY_STORE=folder_url)) for _ in range(2)]
    assert results[1]["text"] == results[0]["text"]
    assert records(folder_url)


def test_the_import_is_enough(toys: Toys, folder_url: str) -> None:
    prompt = PROMPT[:200]
    for loaded in (0, len(prompt) - 1):
        # "states" has blocks of 64 tokens whatever the size of a record
        code = CHILD.replace("from llama_cpp import", "kvferry.llama_cpp.LlamaEngine = None\nfrom llama_cpp import")
        got = result(start(code, str(toys.plain), prompt, "0", KVFERRY_STORE=folder_url))
        assert got["how"] == "states" and got["loaded_tokens"] == loaded


LATE = """
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
import json, kvferry.llama_cpp
cache = kvferry.llama_cpp.KvferryCache(sys.argv[2], block_tokens=64)
llm.set_cache(cache)
text = llm.create_completion(sys.argv[3], max_tokens=16, temperature=0.0)["choices"][0]["text"]
print(json.dumps({"text": text, **cache.report}))
"""


def test_a_llama_from_before_the_import(toys: Toys, make: Make, folder_url: str) -> None:
    got = result(start(LATE, str(toys.plain), folder_url, PROMPT))
    assert got["how"] == "none" and "imported" in got["why"]
    assert got["text"] == complete(make(toys.plain, None), prompt=PROMPT)["choices"][0]["text"]


def test_blocks_are_those_of_llama_server(make: Make, folder_url: str, tmp_path: Path) -> None:
    """With its default settings, but that Llama switches flash attention off unless told."""
    program, server = os.environ.get("KVFERRY", ""), os.environ.get("KVF_LLAMA_SERVER", "")
    model = Path(os.environ.get("KVF_MODEL", ""))
    if not (os.access(program, os.X_OK) and os.access(server, os.X_OK) and model.is_file()):
        pytest.skip("KVFERRY names the program kvferry, KVF_LLAMA_SERVER llama-server, and KVF_MODEL a model")
    llm = make(model, None, flash_attn=True)
    tokens = llm.tokenize((TEXT * 8).encode())
    port = free_port()
    command = [program, "exec", "--store", folder_url, "--", server, "-m", str(model), "-c", "1024", "-t", "1"]
    with open(tmp_path / "server.log", "wb") as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
    try:

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            try:
                return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60).status == 200)
            except OSError:
                return False

        until(answers, "llama-server answers", 300)
        said = post(f"http://127.0.0.1:{port}/completion", prompt=tokens, n_predict=8, temperature=0.0)
    finally:
        process.terminate()
        process.wait(60)
    text = warm_run(
        make, model, folder_url, len(tokens) - 1,
        lambda llm: complete(llm, prompt=tokens, max_tokens=8)["choices"][0]["text"],
        cache={"block_tokens": 0}, flash_attn=True,
    )  # fmt: skip
    assert text == said["content"]


def test_the_example(folder_url: str, tmp_path: Path) -> None:
    model = Path(os.environ.get("KVF_MODEL", ""))
    if not model.is_file():
        pytest.skip("KVF_MODEL names a model")
    document = tmp_path / "document.txt"
    document.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    example = Path(__file__).parents[2] / "examples" / "python" / "llama_cpp_documents.py"
    command = [sys.executable, str(example), str(model), str(document), "What does the fox do?"]
    said = []
    for _ in range(2):
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"KVFERRY_STORE": folder_url, "GOMP_SPINCOUNT": "100"},
        )
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout.splitlines())
    assert said[0][0] == said[1][0] == "What does the fox do?" and said[0][1] == said[1][1] != ""
    loaded = [int(lines[-2].removeprefix("[").split(" of ")[0]) for lines in said]
    assert loaded[0] == 0 and loaded[1] > 0


# ---- their server

IN_FRONT = {
    "program": ["-m", "kvferry.llama_cpp"],
    "import": ["-c", "import kvferry.llama_cpp, runpy; runpy.run_module('llama_cpp.server', run_name='__main__')"],
}


@contextlib.contextmanager
def serving(command: list[str], folder: Path, *args: str, **env: str) -> Iterator[tuple[str, Path]]:
    """python -m llama_cpp.server, which has answered: its URL and its stderr. Stopped as a service manager does it."""
    port = free_port()
    said = folder / f"server-{port}.log"
    with open(said, "wb") as log:
        words = [sys.executable, *command, "--port", str(port), "--n_ctx", "1024", "--n_threads", "1", *args]
        process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | env)
    try:
        url = f"http://localhost:{port}/v1"

        def answers() -> bool:
            assert process.poll() is None, said.read_text()
            try:
                return bool(urllib.request.urlopen(f"{url}/models", timeout=60).status == 200)
            except OSError:
                return False

        until(answers, "llama_cpp.server answers", 120)
        yield url, said
    finally:
        process.terminate()
        process.wait(60)


def post(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        got: dict[str, Any] = json.load(reply)
    return got


@pytest.mark.parametrize("front", list(IN_FRONT))
def test_their_server(toys: Toys, make: Make, redis: RedisServer, tmp_path: Path, front: str) -> None:
    pytest.importorskip("fastapi")
    ask = {"max_tokens": ANSWER, "temperature": 0.0, "stream": False}
    chat = [{"role": "user", "content": PROMPT}]
    env = {"KVFERRY_STORE": redis.unix_url, "KVFERRY_BLOCK_TOKENS": "64"}
    texts = []
    for _ in range(4):
        with serving(IN_FRONT[front], tmp_path, "--model", str(toys.plain), **env) as (url, said):
            texts.append(post(f"{url}/completions", prompt=PROMPT, **ask)["choices"][0]["text"])
            texts.append(post(f"{url}/chat/completions", messages=chat, **ask)["choices"][0]["message"]["content"])
        reports = [line for line in said.read_text().splitlines() if line.startswith("KvferryCache: ")]
        assert len(reports) == 2 and "'how': 'engine'" in reports[0]
        found = [int(report.split("'stored_tokens': ")[1].split(",")[0]) for report in reports]
        if found[0] == len(PROMPT) - 1 and found[1] > len(PROMPT):
            break
    assert found[0] == len(PROMPT) - 1 and found[1] > len(PROMPT)
    assert texts[:2] == texts[-2:]
    llm = make(toys.plain, "mem:", logits_all=True)
    assert complete(llm, prompt=PROMPT)["choices"][0]["text"] == texts[0]


@pytest.mark.parametrize("flash", ["off", "auto"])
def test_blocks_are_those_of_kvferry_run(make: Make, folder_url: str, tmp_path: Path, flash: str) -> None:
    program, model = os.environ.get("KVFERRY", ""), Path(os.environ.get("KVF_MODEL", ""))
    if not os.access(program, os.X_OK) or not model.is_file():
        pytest.skip("KVFERRY names the program kvferry, built with llama.cpp, and KVF_MODEL a model")
    text = tmp_path / "prompt.txt"
    text.write_text(TEXT * 8)
    command = [program, "run", "--store", folder_url, "-m", str(model), "--raw", "-f", str(text), "-n", "1",
               "--threads", "1", "--flash-attn", flash, "--json"]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["saved_blocks"] > 0
    report = warm_run(
        make, model, folder_url, said["prompt_tokens"] - 1,
        lambda llm: answer(llm, text.read_text(), 1) and llm.cache.report,
        cache={"block_tokens": 0}, flash_attn=flash != "off",
    )  # fmt: skip
    assert report["how"] == "engine" and report["num_tokens"] == said["prompt_tokens"]
