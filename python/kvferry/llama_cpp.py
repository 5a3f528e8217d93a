# SPDX-License-Identifier: Apache-2.0
"""llama-cpp-python with a store: prompts are computed once, and not again in another process or on another machine.

    import kvferry.llama_cpp                                    # before the Llama is made
    llm = llama_cpp.Llama("model.gguf", n_ctx=8192)             # its prompts are kept in $KVFERRY_STORE
    llm.set_cache(kvferry.llama_cpp.KvferryCache("redis://cache"))    # or in a store of your choice

Importing this module is enough: each `Llama` that is made afterwards has a `KvferryCache` of the store in KVFERRY_STORE
(several URLs with spaces between), or of ~/.cache/kvferry/store. KVFERRY_TENANT, KVFERRY_SECRET_FILE,
KVFERRY_BLOCK_TOKENS, KVFERRY_PORTABLE and KVFERRY_BUDGET_MS mean what they mean for `kvferry exec`. `Llama.set_cache`
replaces the cache, and `set_cache(None)` switches it off.

    python -m kvferry.llama_cpp --model model.gguf              # is python -m llama_cpp.server, with the store

There are two ways, and each Llama takes the first that its libllama and its settings allow:

- **engine**: kvferry's engine for llama.cpp works in the context itself. Blocks are those of `kvferry run` and of
  llama-server under `kvferry exec`, so all of them share a store. For that each context gets one more sequence than it
  was asked for, and a unified cache. This takes the llama.cpp that kvferry was built with.
- **states**: with any other llama.cpp, the state of the sequence is stored as it is, and loaded where the same
  libraries run the same model with the same settings.

A cache never makes a completion fail: a store that is down, slow or corrupt is a miss. docs/llama-cpp-python.md tells
the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
import json
import logging
import os
import re
import secrets
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import llama_cpp
import numpy as np
from llama_cpp import Llama
from llama_cpp import llama_cpp as lib
from llama_cpp.llama_cache import BaseLlamaCache

from . import _kvferry
from ._kvferry import Error, RefusedError, Space, Store
from ._weights import cache_folder, file_hash, files_of, hash_of

__all__ = ["KvferryCache"]

log = logging.getLogger("kvferry")

LlamaEngine: Any = getattr(_kvferry, "LlamaEngine", None)
"""None: this build of kvferry has no engine for llama.cpp."""

MAX_SEQUENCES = 256
"""Of llama.cpp, for a context."""
HASH_WAIT = 2.0
"""Seconds that a prompt waits for the hash of a model that is not known yet. Its prompts are computed until it is."""
FEW_TOKENS = 64
"""What leaves fewer than this to compute is not worth a lookup: the smallest block."""

LOOKUP_S = 1.0
"""The longest time that a prompt waits for the lookup of states."""

Tokens: TypeAlias = Any
"""A numpy array of int32."""
NONE: Tokens = np.empty(0, dtype=np.intc)


# ---- the cache


class KvferryCache(BaseLlamaCache):  # type: ignore[misc]  # its types are not followed
    """A cache for `Llama.set_cache` in a kvferry store.

    store: a Store, a URL or several, fastest first; None = those in KVFERRY_STORE, or the folder
    ~/.cache/kvferry/store. A Store that is passed stays open on `close`. Raises ConfigError: a URL is wrong.
    secret, previous_secret: see Store; for the blocks of this cache alone. tenant: separate blocks for this name.
    block_tokens: a power of two from 64 to 4096; 0 = a record is near 1 MiB. Who shares blocks uses the same.
    portable: share blocks between kinds of CPU (engine only).
    timeout: of the lookup and load of one prompt, in seconds; None = 10.

    One cache may serve several Llamas, of any models. It works where `Llama.generate` begins a prompt, so completions,
    chats and `generate` itself use it, and a Llama copies no state after a completion. Hence a KvferryCache is False in
    `if llm.cache`, and its items are not read and written one by one.

    report: what was done with the last prompt, a dict. how: "engine", "states" or "none". why: the reason for "none";
    otherwise why loading ended, or None. num_tokens, resident_tokens (still in the context), loaded_tokens (from the
    store), computed_tokens. With the engine also what kvf_llama_report has, times in seconds (match_s, load_s ...)."""

    def __init__(
        self,
        store: Store | str | Sequence[str] | None = None,
        *,
        secret: bytes | None = None,
        previous_secret: bytes | None = None,
        tenant: str | None = None,
        block_tokens: int = 0,
        portable: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(0)
        self._closer: weakref.finalize[[], KvferryCache] | None = None
        if isinstance(store, Store):
            self._store = store
        else:
            secret_files = os.environ.get("KVFERRY_SECRET_FILE") or None
            self._store = Store(_default_urls() if store is None else store, secret_files=secret_files)
            self._closer = weakref.finalize(self, self._store.close)  # also at the end of the process
        self._secrets = {"secret": secret, "previous_secret": previous_secret}
        self._tenant = tenant
        self._block_tokens = block_tokens
        self._portable = portable
        self._timeout = timeout
        self.report: dict[str, Any] = {}

    @property
    def store(self) -> Store:
        """The store of this cache."""
        return self._store

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until what was saved is written. False: it was not, in time (default 10 s), or a block was lost."""
        done, unwritten = self._store.flush(timeout)
        return done and unwritten == 0

    def close(self) -> None:
        """Waits up to 5 s for blocks that are being written, and closes the store if it was opened here. The end of the
        process does the same."""
        if self._closer is not None:
            self._closer()

    # -- what BaseLlamaCache asks for

    @property
    def cache_size(self) -> int:
        """Bytes of the store that are known to be in use, by everything that is in it."""
        return sum(tier.used_bytes or 0 for tier in self._store.tiers())

    def __bool__(self) -> bool:
        """False, for `Llama._create_completion`: otherwise it would look here for a state, and copy its whole state
        after each completion. `Llama.generate` uses this cache instead."""
        return False

    def __contains__(self, key: Sequence[int]) -> bool:
        return False

    def __getitem__(self, key: Sequence[int]) -> Any:
        raise KeyError("a KvferryCache loads straight into the context, when Llama.generate begins")

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        pass

    # -- a prompt

    def _bring(self, llm: Llama, tokens: Sequence[int]) -> None:
        """Makes the context hold the prompt, as far as that is worth it. Whatever fails, the Llama computes all.

        Raises RuntimeError where another thread is in the same Llama: its context is for one thread at a time."""
        inside: threading.Lock = llm.__dict__.setdefault("_kvferry_inside", threading.Lock())
        if not inside.acquire(blocking=False):
            raise RuntimeError("this Llama computes on another thread: use a lock, or one Llama for each thread")
        try:
            self._bring_alone(llm, tokens)
        finally:
            inside.release()

    def _bring_alone(self, llm: Llama, tokens: Sequence[int]) -> None:
        self.report = {"how": "none", "num_tokens": len(tokens)}
        try:
            way = self._way(llm)
            _keep_windows(llm, np.asarray(tokens, dtype=np.intc))
            self.report |= {"how": way.name} | way.bring(llm, np.asarray(tokens, dtype=np.intc))
        except Exception as error:
            _drop(llm)
            self.report |= {"why": str(error)}
            log.warning(
                "llama_cpp: the prompt is computed without the store: %s", error, exc_info=not isinstance(error, Error)
            )
        except BaseException:
            _drop(llm)
            raise
        if llm.verbose:
            print(f"KvferryCache: {self.report}", file=sys.stderr)

    def _way(self, llm: Llama) -> _Way:
        way: _Way | None = llm.__dict__.get("_kvferry_way")
        if way is None or way.cache is not self or way.is_over(llm):
            if way is not None:
                way.close()
            way = self._new_way(llm)
            llm.__dict__["_kvferry_way"] = way
        return way

    def _new_way(self, llm: Llama) -> _Way:
        why = _unfit(llm)
        if why is not None:
            return _Nothing(self, why)
        if not _identified(llm):
            return _Nothing(self, "the model is still being hashed", HASH_WAIT)
        if llm._logits_all:
            # Rows of tokens that are loaded stay as they are, and logprobs are computed of all rows.
            llm.scores = np.zeros(llm.scores.shape, dtype=np.single)
        for kind in (_Engine, _States):
            try:
                return kind(self, llm)
            except Exception as error:
                why = str(error)
                log.info("llama_cpp: not by %s: %s", kind.name, error, exc_info=not isinstance(error, Error))
        log.warning("llama_cpp: nothing is loaded or stored for this Llama: %s", why)
        return _Nothing(self, why or "")


def _default_urls() -> list[str]:
    folder = "".join(c if c not in "%?#" else f"%{ord(c):02X}" for c in cache_folder())
    return os.environ.get("KVFERRY_STORE", "").split() or [f"file:{folder}/kvferry/store"]


# ---- what a Llama holds


def _common(a: Tokens, b: Tokens) -> int:
    """The length of their common prefix."""
    num = min(len(a), len(b))
    differs = np.flatnonzero(a[:num] != b[:num])
    return int(differs[0]) if len(differs) else num


def _held(llm: Llama, tokens: Tokens) -> int:
    """How many of the first tokens the context holds."""
    return _common(llm.input_ids[: llm.n_tokens], tokens)


def _set(llm: Llama, tokens: Tokens, *, computed: bool) -> None:
    """The context holds exactly these tokens. computed: the logits of the last one are ready, so `generate` samples."""
    num = len(tokens)
    llm.input_ids[:num] = tokens
    llm.n_tokens = num
    llm._requires_eval = not computed
    if computed and num <= len(llm.scores) and llm._logits_all:
        row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm._n_vocab,))
        llm.scores[num - 1, :] = row


def _keep_windows(llm: Llama, tokens: Tokens) -> None:
    """A sliding window can't go back: what lay before it is gone, which llama.cpp does not tell the Llama."""
    slides = lib.llama_model_n_swa(llm.model) > 0 and not llm.context_params.swa_full
    if slides and _held(llm, tokens) < llm.n_tokens:
        _drop(llm)
        llm._ctx.kv_cache_seq_rm(0, -1, -1)


def _drop(llm: Llama) -> None:
    """It is unknown what the context holds: the next evaluation begins anew."""
    llm.reset()


def _unfit(llm: Llama) -> str | None:
    """None: its prompts can be kept."""
    if llm.__dict__.get("_kvferry_files") is None:
        return "this Llama was made before kvferry.llama_cpp was imported, so its file is not proven to be its model"
    if llm.context_params.embeddings:
        return "it computes embeddings"
    if _adapters_set.get(llm._ctx.ctx, 0) != (1 if llm.lora_path else 0):
        return "its adapters were changed by hand, and it is not known which are in use"
    if files_of(llm.model_path) != llm.__dict__["_kvferry_files"]:
        return f"its file has changed since it was loaded: {llm.model_path}"
    return None


# ---- the ways


class _Way:
    """How the prompts of one Llama are kept."""

    name = "none"

    def __init__(self, cache: KvferryCache) -> None:
        self.cache = cache
        self.cold = NONE  # tokens in the context that this way has computed or loaded

    def is_over(self, llm: Llama) -> bool:
        """What it was made for has changed."""
        return _adapters_set.get(llm._ctx.ctx, 0) != (1 if llm.lora_path else 0)

    def bring(self, llm: Llama, tokens: Tokens) -> dict[str, Any]:
        raise NotImplementedError

    def _keep_cold(self, held: Tokens) -> None:
        """Only these tokens stay in the context. What follows is computed anew, maybe not by this way."""
        self.cold = self.cold[: _common(self.cold, held)]

    def close(self) -> None:
        pass


class _Nothing(_Way):
    """Nothing is loaded or stored, for a reason that stays, or for some seconds."""

    def __init__(self, cache: KvferryCache, why: str, seconds: float = float("inf")) -> None:
        super().__init__(cache)
        self.why = why
        self.end = time.monotonic() + seconds

    def is_over(self, llm: Llama) -> bool:
        return time.monotonic() >= self.end

    def bring(self, llm: Llama, tokens: Tokens) -> dict[str, Any]:
        return {"why": self.why}


class _Engine(_Way):
    """kvferry's engine in the context itself."""

    name = "engine"

    def __init__(self, cache: KvferryCache, llm: Llama) -> None:
        super().__init__(cache)
        if not _takes_engine():
            raise RefusedError("kvferry was built without llama.cpp, or with another one than llama-cpp-python brings")
        if not hasattr(llm, "_requires_eval"):
            raise RefusedError("this version of llama-cpp-python always evaluates a token before it samples")
        self.engine = LlamaEngine(
            cache.store,
            library=lib._lib._handle,
            context=_address(llm._ctx.ctx),
            weights=hash_of(llm.__dict__["_kvferry_files"]),
            model_params=memoryview(llm.model_params).cast("B"),
            context_params=memoryview(llm.context_params).cast("B"),
            scratch=llm.context_params.n_seq_max - 1,
            adapters=_adapters(llm),
            tenant=cache._tenant,
            block_tokens=cache._block_tokens,
            portable=cache._portable,
            timeout=cache._timeout,
            **cache._secrets,
        )
        llm._requires_eval = True  # the probe has replaced the last logits
        llm._stack.callback(self.close)  # before the context is freed

    def close(self) -> None:
        self.engine.close()

    def bring(self, llm: Llama, tokens: Tokens) -> dict[str, Any]:
        if not self._is_worth_it(llm, tokens):
            held = _held(llm, tokens)
            return {"resident_tokens": held, "loaded_tokens": 0, "computed_tokens": len(tokens) - held}
        report: dict[str, Any] = self.engine.prefill(tokens)
        self.cold = tokens[: self.engine.cut(len(tokens))].copy()
        _set(llm, tokens, computed=True)
        return report

    def _is_worth_it(self, llm: Llama, tokens: Tokens) -> bool:
        """The engine drops what the Llama holds after the last whole block that was computed from an empty context (an
        answer, other tokens in the middle of a block), and computes it again, because only that is stored. That is
        right if there are few such tokens beside new ones, or if more is stored than the Llama holds. Otherwise the
        Llama goes on from what it holds, as it does without a cache."""
        held = _held(llm, tokens)
        self._keep_cold(tokens[:held])
        new = len(tokens) - held
        again = held - self.engine.cut(1 + len(self.cold))
        if self.engine.cut(len(tokens)) == 0 or new == 0:
            return False
        if again * 16 <= new or again <= min(new, 16):
            return True
        return new >= FEW_TOKENS and self.engine.stored(tokens[:-1]) >= held + FEW_TOKENS


class _States(_Way):
    """The state of sequence 0 after the whole prompt but its last token, as llama.cpp exports it.

    Records of a state: pieces of at most PIECE bytes under random keys, and heads, which name them. Where a state can
    be cut (plain attention), every whole block of its prompt has a head, so another prompt finds the longest prefix
    that they share. Other models find a state at the end of the last whole block, or of the whole prompt.

    Only states that were computed from an empty context are stored. Whole blocks are computed in batches that are
    multiples of 64 tokens, the rest of the prompt alone, and its last token alone (by the Llama), with a hit and
    without, so the answer is the same. A loaded window takes other cells than a computed one, and sums round by their
    order, so a computed one is put there too."""

    name = "states"
    PIECE = 4 << 20
    HEAD = struct.Struct("<IQ16s")  # tokens, bytes, and the name of the pieces
    BLOCK = 64

    def __init__(self, cache: KvferryCache, llm: Llama) -> None:
        super().__init__(cache)
        if llm.n_batch % self.BLOCK != 0 or llm.context_params.n_ubatch % self.BLOCK != 0:
            raise RefusedError(f"n_batch and n_ubatch must be multiples of {self.BLOCK}")
        self.space = Space(cache.store, _fields(cache, llm), block_tokens=self.BLOCK, **cache._secrets)
        self.can_cut = not (
            lib.llama_model_is_recurrent(llm.model)
            or lib.llama_model_is_hybrid(llm.model)
            or lib.llama_model_n_swa(llm.model) > 0
        )
        self.most_bytes = _most_state_bytes(llm)
        self.seconds_per_token = 0.0  # of a computed prompt; 0 = not known

    def close(self) -> None:
        self.space.close()

    def bring(self, llm: Llama, tokens: Tokens) -> dict[str, Any]:
        num, held = len(tokens), _held(llm, tokens)
        self._keep_cold(tokens[:held])
        cold = self._floor(len(self.cold)) if self.can_cut else 0
        loaded = 0
        if num - held >= FEW_TOKENS:
            keys = self._keys(tokens)
            loaded = self._load(llm, tokens, keys, held)
            held = _held(llm, tokens)  # nothing, if a state was not taken
            if loaded > 0 or (held - cold) * 16 <= num - held:
                held = self._go_on(llm, tokens, keys, loaded or min(cold, held))
        return {"resident_tokens": held - loaded, "loaded_tokens": loaded, "computed_tokens": num - held}

    def _go_on(self, llm: Llama, tokens: Tokens, keys: dict[int, bytes], have: int) -> int:
        """Computes everything but the last token from the first `have` on, and saves. Returns where it began."""
        have = _cut(llm, have)
        most = len(tokens) - 1
        begin = time.monotonic()
        for end in (self._floor(most), most):
            if llm.n_tokens < end:
                llm.eval(tokens[llm.n_tokens : end].tolist())
                if end == most or not self.can_cut:
                    state = self._export(llm)
                    if most - have >= FEW_TOKENS:
                        self._save(keys if self.can_cut else {end: keys[end]}, end, state)
                    if not self.can_cut and not self._import(llm, end, state):
                        raise RefusedError("llama.cpp did not take back the state of its sequence")
        self.cold = tokens[:most].copy()
        if most - have >= FEW_TOKENS:
            self.seconds_per_token = (time.monotonic() - begin) / (most - have)
        return have

    def _floor(self, num: int) -> int:
        return num // self.BLOCK * self.BLOCK

    def _keys(self, tokens: Tokens) -> dict[int, bytes]:
        """By position: where a state may be stored, the ends of whole blocks and of all but the last token."""
        most = len(tokens) - 1
        chain = self.space.chain(tokens[:most])
        keys = {(i + 1) * self.BLOCK: chain[32 * i : 32 * i + 32] for i in range(len(chain) // 32)}
        if most % self.BLOCK != 0:
            last = keys.get(self._floor(most)) or self.space.salt_key(None, b"short")
            keys[most] = self.space.tail_key(last, tokens[self._floor(most) : most])
        return {position: self.space.state_key(key) for position, key in keys.items()}

    # -- loading

    def _load(self, llm: Llama, tokens: Tokens, keys: dict[int, bytes], held: int) -> int:
        """Loads the longest stored prefix that is clearly longer than what is held; returns its length, or 0."""
        wanted = {position: key for position, key in keys.items() if position >= held + FEW_TOKENS}
        found = self.space.find(b"".join(wanted.values()), self._budget(LOOKUP_S)) if wanted else []
        there = [position for position, f in zip(wanted, found, strict=True) if f.why is None]
        for position in sorted(there, reverse=True)[:2]:
            read = self._read(wanted[position], self._budget(position * self.seconds_per_token))
            if read is not None and self._take(llm, *read, position):
                _set(llm, tokens[:position], computed=False)
                return int(position)
        return 0

    def _budget(self, seconds: float) -> float | None:
        """At most that long, and at most the time that the cache was given. 0: not known."""
        most = self.cache._timeout
        return most if seconds == 0 else max(0.001, seconds if most is None else min(seconds, most))

    def _read(self, key: bytes, budget: float | None) -> tuple[int, bytearray] | None:
        """A state, and its tokens. Takes no longer than computing them would."""
        head = bytearray(self.HEAD.size)
        if self.space.load(key, [head], timeout=budget).num_ok != 1:
            return None
        num, num_bytes, name = self.HEAD.unpack(head)
        if num_bytes > self.most_bytes:
            return None
        state = bytearray(num_bytes)
        pieces = self._pieces(state)
        _, reasons = self.space.load(self._piece_keys(name, num_bytes), pieces, timeout=budget)
        if any(reasons):
            if any(reason in ("absent", "checksum", "truncated") for reason in reasons):
                self._remove(key)
            return None
        return num, state

    def _take(self, llm: Llama, num: int, state: bytearray, position: int) -> bool:
        """The context holds the first tokens of a state, up to a position."""
        if num < position or (num > position and not self.can_cut) or not self._import(llm, num, state):
            return False
        if num > position and not llm._ctx.kv_cache_seq_rm(0, position, -1):
            _drop(llm)
            return False
        return True

    def _remove(self, key: bytes) -> None:
        """A head whose pieces are gone would stay in the way of the next one."""
        self.space.forget(key)
        with contextlib.suppress(Error):
            self.cache.store.remove(self.space.digest, self.space.stored_key(key))

    def _import(self, llm: Llama, num: int, state: bytearray) -> bool:
        """The sequence becomes a state of that many tokens. One that llama.cpp does not take leaves it empty."""
        llm._ctx.kv_cache_seq_rm(0, -1, -1)
        taken = lib.llama_state_seq_set_data(llm.ctx, (ctypes.c_uint8 * len(state)).from_buffer(state), len(state), 0)
        if taken == len(state) and lib.llama_memory_seq_pos_max(llm._ctx.memory, 0) == num - 1:
            return True
        _drop(llm)
        llm._ctx.kv_cache_seq_rm(0, -1, -1)
        return False

    # -- saving

    def _export(self, llm: Llama) -> bytearray:
        state = bytearray(lib.llama_state_seq_get_size(llm.ctx, 0))
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if lib.llama_state_seq_get_data(llm.ctx, buffer, len(state), 0) != len(state):
            raise RefusedError("llama.cpp can't export its sequence")
        return state

    def _save(self, keys: dict[int, bytes], num: int, state: bytearray) -> None:
        name = secrets.token_bytes(16)
        pieces = self._pieces(state)
        if self.space.save(self._piece_keys(name, len(state)), pieces).num_ok == len(pieces):
            head = self.HEAD.pack(num, len(state), name)
            self.space.save(b"".join(keys.values()), [head] * len(keys))

    def _pieces(self, state: bytearray) -> list[memoryview]:
        whole = memoryview(state)
        return [whole[i : i + self.PIECE] for i in range(0, len(whole), self.PIECE)]

    def _piece_keys(self, name: bytes, num_bytes: int) -> bytes:
        num = -(-num_bytes // self.PIECE)
        return self.space.keys_of([name + i.to_bytes(4, "little") for i in range(num)])


def _most_state_bytes(llm: Llama) -> int:
    """A bound for the state of a full context: a record that names a longer one is wrong."""
    row = 2 * 4 * (lib.llama_model_n_embd(llm.model) + 64)  # K and V as float32, if no head is shared
    return int(2 * llm.n_ctx() * lib.llama_model_n_layer(llm.model) * row + (1 << 30))


def _cut(llm: Llama, num: int) -> int:
    """Drops all but the first tokens of the context. Returns how many are left: none, where a state can't be cut."""
    if num < llm.n_tokens and not (num > 0 and llm._ctx.kv_cache_seq_rm(0, num, -1)):
        _drop(llm)
        return 0
    llm.n_tokens = num
    llm._requires_eval = True
    return num


# ---- what computes: the fields of a space of states


def _fields(cache: KvferryCache, llm: Llama) -> dict[str, str]:
    """Everything that may change the bytes of a state, or what a model computes after it."""
    context = _scalars(llm.context_params)
    for harmless in ("no_perf", "n_seq_max", "kv_unified"):
        context.pop(harmless, None)
    fields = {
        "engine": f"llama-cpp-python {llama_cpp.__version__} state",
        "model": "sha256:" + hash_of(llm.__dict__["_kvferry_files"]),
        "kv": f"k={context['type_k']} v={context['type_v']}",
        "context": _digest(context),
        "loaded": _digest(_scalars(llm.model_params) | {"overrides": llm.kv_overrides, "split": llm.tensor_split}),
        "batch": f"{llm.n_batch} {min(llm.n_batch, llm.context_params.n_ubatch)}",
        "adapters": _adapters(llm) or "none",
        "build": _build(),
    }
    if cache._tenant:
        fields["tenant"] = _digest(cache._tenant)
    return fields


def _digest(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _scalars(params: ctypes.Structure) -> dict[str, Any]:
    """All numbers of a struct, and which of its pointers are set."""
    values = {}
    for name, *_ in params._fields_:
        value = getattr(params, name)
        values[name] = value if isinstance(value, (bool, int, float)) else bool(value)
    return values


@functools.cache
def _build() -> str:
    """The libraries of llama.cpp in this process, byte for byte, what they say of the CPU, and the settings of ggml."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    libraries = sorted(
        (os.path.basename(path), file_hash(path))
        for path in mapped
        if re.match(r"lib(llama|ggml)", os.path.basename(path))
    )
    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith(("GGML_", "LLAMA_ATTN")))
    return _digest([libraries, lib.llama_print_system_info().decode(), settings, os.uname().machine, _cpu()])


def _cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
        for line in info:
            if line.startswith(("flags", "Features")):
                return line
    return "unknown"


def _adapters(llm: Llama) -> str | None:
    """As the shim of llama-server names them (engines/llama/shim/adapters.c)."""
    if not llm.lora_path or llm.lora_scale == 0:
        return None
    scale = np.float32(llm.lora_scale)
    return f"lora={file_hash(llm.lora_path)}*{float(scale):.9g} "


# ---- files of models


def _hash_aside(llm: Llama) -> threading.Thread:
    """Hashes the model's files for the memory of hashes, so that no prompt waits for it."""

    def hash_all(paths: list[str]) -> None:
        for path in paths:
            with contextlib.suppress(Error):
                file_hash(path)

    paths = [path for path, _ in llm.__dict__["_kvferry_files"]]
    thread = threading.Thread(target=hash_all, args=(paths,), name="kvferry-hash", daemon=True)
    thread.start()
    return thread


def _identified(llm: Llama) -> bool:
    thread = llm.__dict__.get("_kvferry_hasher")
    if thread is None:
        thread = llm.__dict__["_kvferry_hasher"] = _hash_aside(llm)
        thread.join(HASH_WAIT)
    return not thread.is_alive()


# ---- in front of llama-cpp-python

_adapters_set: dict[int | None, int] = {}
"""How often adapters of a context were set."""


def _address(pointer: Any) -> int:
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


def _layout(params: type[ctypes.Structure]) -> dict[str, int]:
    return {name: getattr(params, name).offset for name, *_ in params._fields_}


@functools.cache
def _is_engine_of(engine: Any) -> bool:
    return engine is not None and bool(
        engine.takes(lib._lib._handle, _layout(lib.llama_model_params), _layout(lib.llama_context_params))
    )


def _takes_engine() -> bool:
    """Whether contexts of this libllama are made for the engine."""
    return _is_engine_of(LlamaEngine)


def _init_from_model(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Each context gets one more sequence, for the engine's imports and exports, in the same cells."""

    @functools.wraps(plain)
    def init_from_model(model: Any, params: Any) -> Any:
        if not _takes_engine() or params.embeddings or params.n_seq_max >= MAX_SEQUENCES:
            return plain(model, params)
        before = params.n_seq_max, params.kv_unified, params.n_outputs_max
        if params.n_seq_max > 1 and not params.kv_unified:
            return plain(model, params)
        params.n_seq_max = max(1, params.n_seq_max) + 1
        params.kv_unified = True
        if 0 < params.n_outputs_max < params.n_seq_max:
            params.n_outputs_max = params.n_seq_max
        ctx = plain(model, params)
        if not ctx:
            params.n_seq_max, params.kv_unified, params.n_outputs_max = before
            ctx = plain(model, params)
        return ctx

    return init_from_model


def _counting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def set_adapters(ctx: Any, *args: Any) -> Any:
        _adapters_set[ctx] = _adapters_set.get(ctx, 0) + 1
        return plain(ctx, *args)

    return set_adapters


def _forgetting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def free(ctx: Any) -> Any:
        _adapters_set.pop(ctx, None)
        return plain(ctx)

    return free


def _init(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: Llama, model_path: str, *args: Any, **kwargs: Any) -> None:
        files = files_of(model_path)
        plain(self, model_path, *args, **kwargs)
        self.__dict__["_kvferry_files"] = files
        if self.cache is None and not self.context_params.embeddings:
            self.cache = _default_cache()

    return init


_default: list[KvferryCache] = []


def _cache_of_environment() -> KvferryCache:
    """With the variables that `kvferry exec` has for llama-server."""
    env = os.environ
    milliseconds = int(env.get("KVFERRY_BUDGET_MS") or 0)
    return KvferryCache(
        tenant=env.get("KVFERRY_TENANT") or None,
        block_tokens=int(env.get("KVFERRY_BLOCK_TOKENS") or 0),
        portable=env.get("KVFERRY_PORTABLE", "0") not in ("", "0"),
        timeout=milliseconds / 1000 if milliseconds > 0 else None,
    )


def _default_cache() -> KvferryCache | None:
    """One for all Llamas of the process."""
    if not _default or _default[0].store.closed:
        try:
            _default[:] = [_cache_of_environment()]
        except (Error, ValueError) as error:
            log.warning("llama_cpp: no store, so nothing is loaded or stored: %s", error)
            return None
    return _default[0]


def _set_cache(plain: Callable[..., None]) -> Callable[..., None]:
    """Attaches at once, so that the first prompt does not wait for it."""

    @functools.wraps(plain)
    def set_cache(self: Llama, cache: BaseLlamaCache | None) -> None:
        plain(self, cache)
        if isinstance(cache, KvferryCache):
            cache._way(self)

    return set_cache


def _forgetful(plain: Callable[..., None]) -> Callable[..., None]:
    """Of a method after which something else computes what the context holds."""

    @functools.wraps(plain)
    def forget(self: Llama, *args: Any) -> None:
        plain(self, *args)
        way: _Way | None = self.__dict__.get("_kvferry_way")
        if way is not None:
            way.cold = NONE

    return forget


def _generate(plain: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def generate(self: Llama, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Iterator[int]:
        tokens = list(tokens)
        if isinstance(self.cache, KvferryCache) and tokens:
            call = signature.bind(self, tokens, *args, **kwargs).arguments
            if call.get("reset", True):
                self.cache._bring(self, tokens)
        yield from plain(self, tokens, *args, **kwargs)

    return generate


def _create_completion(plain: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Scores of every token of the prompt are known only if all of it is computed."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def create_completion(self: Llama, *args: Any, **kwargs: Any) -> Iterator[Any]:
        call = signature.bind(self, *args, **kwargs).arguments
        if not (isinstance(self.cache, KvferryCache) and call.get("echo") and call.get("logprobs") is not None):
            yield from plain(self, *args, **kwargs)
            return
        cache, self.cache = self.cache, None
        self.reset()
        try:
            yield from plain(self, *args, **kwargs)
        finally:
            self.cache = cache

    return create_completion


def _install() -> None:
    """Puts the store in front of the classes of llama-cpp-python."""
    lib.llama_init_from_model = _init_from_model(lib.llama_init_from_model)
    for name in ("llama_set_adapters_lora", "llama_set_adapter_cvec"):
        setattr(lib, name, _counting(getattr(lib, name)))
        if hasattr(llama_cpp, name):
            setattr(llama_cpp, name, getattr(lib, name))
    lib.llama_free = _forgetting(lib.llama_free)
    Llama.__init__ = _init(Llama.__init__)
    Llama.set_cache = _set_cache(Llama.set_cache)
    Llama.reset = _forgetful(Llama.reset)
    Llama.load_state = _forgetful(Llama.load_state)
    Llama.generate = _generate(Llama.generate)
    Llama._create_completion = _create_completion(Llama._create_completion)


if __name__ == "__main__":
    importlib.import_module("kvferry.llama_cpp")  # by its name: here it is __main__
    importlib.import_module("llama_cpp.server.__main__").main()
else:
    _install()
