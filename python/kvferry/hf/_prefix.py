# SPDX-License-Identifier: Apache-2.0
"""PrefixCache: blocks of prompts are loaded, or computed in one way only, and stored."""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from .._kvferry import MAX_BLOCKS, Completion, Error, LimitError, RefusedError, Space, Store
from .._kvferry import Queue as Batches
from . import _model as models
from ._memory import QUANTISED, Memory, Recorder, Shape, Shapes, check, kept, view_of

logger = logging.getLogger("kvferry")

MAX_BATCHES = 64  # rows whose blocks are loaded at the same time
PROBE_TOKENS = 18  # computed once: 16, and then 2 that attend to them
SPACES = 8  # states of a model (adapters on and off) that are remembered
# Arguments of generate that Transformers takes beside those of GenerationConfig and of the model.
GENERATE_ARGUMENTS = {
    *("inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria"),
    *("prefix_allowed_tokens_fn", "synced_gpus", "streamer", "tokenizer", "use_model_defaults"),
}


@dataclass
class Counters:
    """What became of the tokens of prompts, since the PrefixCache was made."""

    prompt_tokens: int = 0
    """Without padding."""
    loaded_tokens: int = 0
    """In blocks that came from the store, or from another prompt of the same batch."""
    computed_tokens: int = 0
    """In blocks that were computed. What follows the last whole block is not counted: it is always computed."""
    stored_blocks: int = 0
    """Accepted by the store's backlog, or known to be there."""
    bypassed: int = 0
    """Calls of generate that went to the model alone; `PrefixCache.why` has the last reason."""


@dataclass
class Row:
    """One prompt of a batch."""

    tokens: array[int]
    padding: int
    num_blocks: int
    keys: bytes

    def end(self, num_blocks: int, block_tokens: int) -> int:
        """The column after this many blocks."""
        return self.padding + num_blocks * block_tokens


@dataclass
class Run:
    """Consecutive blocks of a row that a space has."""

    space: Space
    first: int
    num: int


@dataclass
class State:
    """The model as it is now: its blocks' names and shapes."""

    computed: Space
    """Blocks that `prefill` computed, all in the same way."""
    given: Space
    """Blocks of caches that a caller filled and saved."""
    shapes: Shapes


class PrefixCache:
    """Loads the KV of a prompt's whole blocks from a store, and stores what it computes.

    model: a decoder-only model of Transformers 5 (or a PEFT model around one), in eval mode, on one device.
    store: where blocks are; it stays the caller's to close.
    block_tokens: tokens of a block. A prompt is computed in pieces of this many tokens: smaller blocks match more of a
    prompt, larger ones compute faster on a GPU.
    identity: what else changes what the model computes, as names and values of your own, such as hooks.
    weights: a name of the weights that you vouch for, such as the digest of their file. None = a hash of their bytes in
    memory, which takes a second for each GB or two.
    secret, previous_secret: a tenant's, as of kvferry.Space.
    timeout: seconds that a load may take; None = as long as computing took the last time (before: 10), but at least 1.
    What has not arrived then is computed.

    A block is named by everything that changes its bytes: versions, class, config, weights, dtype, attention
    implementation, adapters, kind of processor, settings of torch, and what the model computes for a few tokens. The
    model may change between calls (adapters, weights that were trained or merged): each call looks again.

    Raises RefusedError, with the reason, for models that are not proven: with an encoder, quantised or compiled, on
    several devices, in training mode, with hooks, with rope that depends on the prompt's length, or with other layers
    than full and sliding attention.

    Not for several threads at once, as a model is not."""

    def __init__(
        self,
        model: Any,
        store: Store,
        *,
        block_tokens: int = 256,
        identity: Mapping[str, str] | None = None,
        weights: str | None = None,
        secret: bytes | None = None,
        previous_secret: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.block_tokens = block_tokens
        self.counters = Counters()
        self.why: str | None = None
        """Why the last call of generate went to the model alone; None if it did not."""
        self._identity = dict(identity or {})
        self._weights = weights
        self._secrets = {"secret": secret, "previous_secret": previous_secret}
        self._timeout = timeout
        self._pace: float | None = None  # seconds that computing a block took
        self._hashed: OrderedDict[str, str] = OrderedDict()
        self._states: OrderedDict[str, State] = OrderedDict()
        self._lock = threading.Lock()
        self._state()

    @property
    def fields(self) -> dict[str, str]:
        """All that names a block of the model as it is now. Raises RefusedError."""
        return self._state().computed.fields

    # ---- calls

    def load(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, cache: Any = None
    ) -> tuple[Any, int]:
        """A cache with the leading blocks that are stored, and its number of columns.

        input_ids: [rows, tokens], or [tokens]. attention_mask: the same shape, zeros for padding on the left; None = no
        padding. cache: an empty DynamicCache or StaticCache to load into; None = a new DynamicCache.
        At least the last token of each prompt is left to compute: model(input_ids[:, n:], past_key_values=cache). In a
        batch n is what all rows have: padding counts.
        A store that is down, or a block that is damaged, is a smaller n. What the model then computes has the rounding
        of a prompt that was cut at n. `prefill` and `generate` always cut at the same places, so that their results do
        not depend on the store.
        Raises RefusedError (inputs, a cache or a model that is not proven), LimitError (shapes that do not fit)."""
        state, rows = self._begin(input_ids, attention_mask)
        cache = self._empty_cache(state, cache)
        runs = self._longest(state, rows)
        room = max(row.end(run.num, self.block_tokens) for row, run in zip(rows, runs, strict=True))
        memory = Memory(state.shapes, len(rows), room, self._device, cache)
        return cache, self._finish(memory, cache, rows, self._load(memory, rows, runs))

    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, cache: Any = None
    ) -> tuple[Any, int]:
        """As `load`, but what is not stored is computed, block by block, and stored.

        Neither n nor one bit of the cache depends on the store. The arguments and errors are those of `load`."""
        state, rows = self._begin(input_ids, attention_mask)
        cache = self._empty_cache(state, cache)
        memory = Memory(state.shapes, len(rows), max(self._end(row) for row in rows), self._device, cache)
        sources = self._shared(rows)
        firsts = [len(source) for source in sources]
        stored = self._match(state.computed, rows, firsts)
        runs = [Run(state.computed, first, num) for first, num in zip(firsts, stored, strict=True)]
        loaded = self._load(memory, rows, runs)
        for index, row in enumerate(rows):
            self._take_shared(memory, rows, index, sources[index])
            self._compute(state, memory, index, row, firsts[index] + loaded[index])
        return cache, self._finish(memory, cache, rows, [row.num_blocks for row in rows])

    def save(self, input_ids: torch.Tensor, cache: Any, attention_mask: torch.Tensor | None = None) -> int:
        """Stores the whole blocks of a cache that you filled, for `load`; returns their number.

        `generate` and `prefill` do not use them: a prompt that was computed in other pieces may have other last bits.
        Rows with padding are not stored: the cache does not tell at which positions the model saw their tokens.
        The memory is copied before this returns; `Store.flush` waits for the writers. The arguments are as for `load`.
        Raises RefusedError (a sliding layer that has dropped tokens, a cache that is not proven), LimitError."""
        state, rows = self._begin(input_ids, attention_mask, leave=0)
        check(cache)
        tensors, columns = kept(cache), int(cache.get_seq_length())
        if any(tensor.shape[0] != len(rows) for tensor in tensors):
            raise LimitError(f"the cache has another number of rows than input_ids, which has {len(rows)}")
        saved = 0
        for index, row in enumerate(rows):
            num = min(row.num_blocks, columns // self.block_tokens)
            if num > 0 and row.padding == 0:
                view = view_of(tensors, index, 0, num, self.block_tokens)
                saved += self._save(state.given, row, view, 0, num)
        return saved

    def generate(self, inputs: torch.Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """In place of model.generate, with its arguments and result.

        What can't be done with the store is done without it: `why` tells the reason, which is logged once."""
        if generation_config is not None:
            kwargs["generation_config"] = generation_config
        bypass = self._bypass(inputs, kwargs)
        if bypass is None:
            try:
                return self._generate(inputs, kwargs)
            except Error as error:
                bypass = str(error)
        if bypass != self.why:
            logger.warning("generate goes to the model alone: %s", bypass)
        self.why = bypass
        self.counters.bypassed += 1
        return self.model.generate(inputs, **kwargs)

    # ---- generate

    def _bypass(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> str | None:
        """Why these arguments of generate are for the model alone."""
        config, arguments = self._generation(kwargs)
        others = {name for name, value in arguments.items() if value is not None} - GENERATE_ARGUMENTS
        ids = kwargs.get("input_ids", inputs)
        if others:
            return f"the arguments {', '.join(sorted(others))} may change what the model computes for the prompt"
        if ids is None:
            return "there are no input_ids"
        if config.use_cache is False:
            return "use_cache is False"
        if config.cache_implementation == "quantized":
            return QUANTISED
        if config.cache_implementation not in (None, "dynamic", "static"):
            return f"cache_implementation={config.cache_implementation!r} is not proven"
        if config.prefill_chunk_size is not None:
            return "prefill_chunk_size computes the prompt in pieces of its own"
        if config.output_hidden_states or config.output_attentions:
            return "there are no hidden states and attentions of tokens that are loaded"
        if (
            config.prompt_lookup_num_tokens is not None
            or config.assistant_early_exit is not None
            or config.token_healing
        ):
            return "assisted decoding and token healing are not proven"
        if max(config.num_beams or 1, config.num_return_sequences or 1) > 1 and config.cache_implementation == "static":
            return "several beams or sequences in a static cache are not proven"
        pad = config.pad_token_id
        if kwargs.get("attention_mask") is None and pad is not None and bool((ids == pad).any()):
            return "the prompt has padding and there is no attention_mask"
        return None

    def _generation(self, kwargs: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
        """The settings of this call, and the arguments that are none. As generate does it, the model's own settings
        fill what the given ones leave open."""
        config = copy.deepcopy(kwargs.get("generation_config") or self.model.generation_config)
        for name, value in self.model.generation_config.to_dict().items():
            if getattr(config, name, None) is None:
                setattr(config, name, value)
        return config, config.update(**{name: value for name, value in kwargs.items() if name != "generation_config"})

    def _generate(self, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> Any:
        config, _ = self._generation(kwargs)
        kwargs = dict(kwargs)
        ids = kwargs.pop("input_ids", inputs)
        cache, num = self.prefill(ids, kwargs.get("attention_mask"), cache=self._cache_for(config, ids))
        self.why = None
        copies = max(config.num_beams or 1, config.num_return_sequences or 1)
        if copies > 1 and num > 0:
            cache.batch_repeat_interleave(copies)
        if config.cache_implementation is not None:
            kwargs["cache_implementation"] = None  # the cache is given
        return self.model.generate(ids, past_key_values=cache, **kwargs)

    def _cache_for(self, config: GenerationConfig, ids: torch.Tensor) -> Any:
        if config.cache_implementation != "static":
            return None
        num, new, length = ids.shape[1], config.max_new_tokens, config.max_length
        if new is not None:
            length = num + new
        elif length is None or length <= num:
            length = num + 20  # what generate takes for a length that nobody has chosen
        return StaticCache(config=self._text_config, max_cache_len=max(length - 1, config.max_cache_len or 0, num))

    # ---- prompts

    def _begin(self, input_ids: torch.Tensor, mask: torch.Tensor | None, leave: int = 1) -> tuple[State, list[Row]]:
        if not isinstance(input_ids, torch.Tensor):
            raise TypeError(f"input_ids must be a tensor, not {type(input_ids).__name__}")
        state, shape = self._state(), list(input_ids.shape)
        ids = input_ids.unsqueeze(0) if input_ids.dim() == 1 else input_ids
        if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
            raise LimitError(f"input_ids is [rows, tokens] of integers, not {shape} of {input_ids.dtype}")
        padding = self._padding(ids, mask)
        return state, [self._row(state, tokens, pad, leave) for tokens, pad in zip(ids.tolist(), padding, strict=True)]

    def _row(self, state: State, tokens: list[int], padding: int, leave: int) -> Row:
        own = array("I", tokens[padding:])
        num = (len(own) - leave) // self.block_tokens
        return Row(own, padding, num, state.computed.chain(own[: num * self.block_tokens]) if num else b"")

    @staticmethod
    def _padding(ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
        """Tokens of padding on the left of each row."""
        if mask is None:
            return [0] * ids.shape[0]
        mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
        if mask.shape != ids.shape:
            raise LimitError(f"attention_mask is {list(mask.shape)} and input_ids {list(ids.shape)}")
        padding = [int(pad) for pad in (ids.shape[1] - mask.to(torch.long).sum(dim=1)).tolist()]
        expected = torch.arange(ids.shape[1]) >= torch.tensor(padding).unsqueeze(1)
        if not torch.equal(mask.to("cpu", torch.long), expected.to(torch.long)) or ids.shape[1] in padding:
            raise RefusedError(
                'attention_mask has zeros elsewhere than on the left: set tokenizer.padding_side = "left"'
            )
        return padding

    def _empty_cache(self, state: State, cache: Any) -> Any:
        if cache is None:
            cache = DynamicCache(config=self._text_config)
        check(cache)
        if len(cache.layers) != len(state.shapes):
            raise LimitError(
                f"the cache has {len(cache.layers)} layers, the model {len(state.shapes)}: give it config="
            )
        if int(cache.get_seq_length()) != 0:
            raise LimitError(f"the cache holds {int(cache.get_seq_length())} tokens already: give an empty one")
        return cache

    def _end(self, row: Row) -> int:
        return row.end(row.num_blocks, self.block_tokens)

    # ---- blocks

    def _shared(self, rows: list[Row]) -> list[list[tuple[int, int]]]:
        """For each row its leading blocks that rows before it have too: the row and the number of each."""
        seen: dict[bytes, tuple[int, int]] = {}
        shared = []
        for index, row in enumerate(rows):
            names = [row.keys[at : at + 32] for at in range(0, len(row.keys), 32)]
            first = next((block for block, name in enumerate(names) if name not in seen), len(names))
            shared.append([seen[name] for name in names[:first]])
            seen.update((name, (index, block)) for block, name in enumerate(names[first:], first))
        return shared

    def _take_shared(self, memory: Memory, rows: list[Row], index: int, sources: list[tuple[int, int]]) -> None:
        size = self.block_tokens
        for block, (other, number) in enumerate(sources):
            memory.copy(index, rows[index].end(block, size), other, rows[other].end(number, size), size)
        self.counters.loaded_tokens += len(sources) * size

    def _match(self, space: Space, rows: list[Row], firsts: list[int]) -> list[int]:
        """How many blocks of each row are stored, from a number on: one question for all rows."""
        parts = [row.keys[32 * first :] for row, first in zip(rows, firsts, strict=True)]
        keys = b"".join(parts)
        pieces = [keys[at : at + 32 * MAX_BLOCKS] for at in range(0, len(keys), 32 * MAX_BLOCKS)]
        try:
            found = [one.why is None for piece in pieces for one in space.find(piece, self._patience(len(piece) // 32))]
        except Error as error:
            logger.warning("the store is not used: %s", error)
            return [0] * len(rows)
        answers = iter(found)
        of_rows = [[next(answers) for _ in range(len(part) // 32)] for part in parts]
        return [(*row, False).index(False) for row in of_rows]

    def _patience(self, num: int) -> float | None:
        """What the store may take for blocks: as long as computing them."""
        return self._timeout if self._timeout is not None or self._pace is None else max(1.0, num * self._pace)

    def _longest(self, state: State, rows: list[Row]) -> list[Run]:
        """From the space that has more of the prompt; `prefill`'s if they have the same."""
        firsts = [0] * len(rows)
        found = [self._match(space, rows, firsts) for space in (state.computed, state.given)]
        return [
            Run(state.computed, 0, computed) if computed >= given else Run(state.given, 0, given)
            for computed, given in zip(*found, strict=True)
        ]

    def _load(self, memory: Memory, rows: list[Row], runs: list[Run]) -> list[int]:
        """Loads blocks of all rows at once, straight into the cache's memory; returns how many of each are there."""
        loaded = self._read(memory, rows, runs)
        for index, (row, run) in enumerate(zip(rows, runs, strict=True)):
            done, end = run.first + loaded[index], run.first + run.num
            self.counters.loaded_tokens += loaded[index] * self.block_tokens
            if done < end:
                run.space.forget(row.keys[32 * done : 32 * end])  # what is computed now replaces them
                memory.clear(index, row.end(done, self.block_tokens), row.end(end, self.block_tokens))
        return loaded

    def _read(self, memory: Memory, rows: list[Row], runs: list[Run]) -> list[int]:
        loaded = [0] * len(rows)
        wanted = [index for index, run in enumerate(runs) if run.num > 0]
        if not wanted:
            return loaded
        timeout = self._patience(sum(run.num for run in runs))
        tickets: dict[int, int] = {}
        try:
            with Batches(self.store, min(len(wanted), MAX_BATCHES)) as batches:  # at its end nobody uses the memory
                for index in wanted:
                    while (ticket := self._submit(batches, memory, index, rows[index], runs[index], timeout)) is None:
                        self._reap(batches, tickets, loaded)
                    tickets[ticket] = index
                while tickets:
                    self._reap(batches, tickets, loaded)
        except Error as error:
            logger.warning("the store is not used: %s", error)
        return loaded

    def _submit(
        self, batches: Batches, memory: Memory, index: int, row: Row, run: Run, timeout: float | None
    ) -> int | None:
        start, end = run.first * self.block_tokens, (run.first + run.num) * self.block_tokens
        with memory.view(index, row.padding + start, run.num, self.block_tokens) as view:
            return batches.submit_load(
                run.space,
                row.keys[32 * run.first : 32 * (run.first + run.num)],
                view,
                slots=range(run.num),
                tokens=row.tokens[start:end],
                first_token=start,
                timeout=timeout,
            )

    @staticmethod
    def _reap(batches: Batches, tickets: dict[int, int], loaded: list[int]) -> None:
        batches.wait()
        done: Completion
        for done in batches.reap():
            loaded[tickets.pop(done.ticket)] = done.num_ok
            missed = len(done.reasons) - done.num_ok
            if missed > 0:
                logger.info(
                    "%d of %d blocks could not be loaded: %s", missed, len(done.reasons), done.reasons[done.num_ok]
                )

    def _compute(self, state: State, memory: Memory, index: int, row: Row, first: int) -> None:
        """Computes and stores the blocks from number ``first`` on: of one prompt alone, one at a time.

        Kernels round differently for other numbers of rows, so only this makes a block a function of its tokens."""
        if first == row.num_blocks:
            return
        size, at, start = self.block_tokens, row.end(first, self.block_tokens), time.monotonic()
        cache = Recorder(self._text_config, lambda layer, keys, values: memory.write(layer, index, at, keys, values))
        if first > 0:
            memory.fill(cache, slice(index, index + 1), row.padding, at)
        with memory.view(index, row.padding, row.num_blocks, size) as view:
            for block in range(first, row.num_blocks):
                at = row.end(block, size)
                self._forward([row.tokens[block * size : (block + 1) * size].tolist()], cache)
                self._save(state.computed, row, view, block, 1)
        self._pace = (time.monotonic() - start) / (row.num_blocks - first)
        self.counters.computed_tokens += (row.num_blocks - first) * size

    def _save(self, space: Space, row: Row, view: Any, first: int, num: int) -> int:
        start, end = first * self.block_tokens, (first + num) * self.block_tokens
        keys, slots = row.keys[32 * first : 32 * (first + num)], range(first, first + num)
        try:
            done = space.save(keys, view, slots=slots, tokens=row.tokens[start:end], first_token=start)
        except Error as error:
            logger.warning("the store is not used: %s", error)
            return 0
        self.counters.stored_blocks += done.num_ok
        return done.num_ok

    def _finish(self, memory: Memory, cache: Any, rows: list[Row], blocks: list[int]) -> int:
        """Hands the columns that all rows have to the cache."""
        self.counters.prompt_tokens += sum(len(row.tokens) for row in rows)
        columns = min(row.end(num, self.block_tokens) for row, num in zip(rows, blocks, strict=True))
        for index, row in enumerate(rows):
            memory.clear(index, 0, row.padding)
        if columns > 0:
            memory.fill(cache, slice(None), 0, columns)
        return columns

    # ---- the model

    @property
    def _device(self) -> torch.device:
        device: torch.device = models.base_of(self.model).device
        return device

    @property
    def _text_config(self) -> Any:
        return models.base_of(self.model).config.get_text_config(decoder=True)

    def _forward(self, tokens: list[list[int]], cache: Any) -> None:
        can_keep = "logits_to_keep" in inspect.signature(models.base_of(self.model).forward).parameters
        keep = {"logits_to_keep": 1} if can_keep else {}
        with torch.no_grad():
            ids = torch.tensor(tokens, device=self._device)
            self.model(input_ids=ids, past_key_values=cache, use_cache=True, **keep)

    def _state(self) -> State:
        """Names the model as it is now. Hashes and computes only what is new."""
        why = models.refusal(self.model, self._identity)
        if why is not None:
            raise RefusedError(f"blocks of this model can't be reused: {why}")
        with self._lock, torch.no_grad():
            tensors = models.tensors_in_use(self.model)
            marks = self._weights or models.marks_of(tensors)
            settings = models.settings_of(self.model)
            name = models.short([marks, settings, models.numbers_of(self.model)])  # the probe shows what these change
            if name not in self._states:
                self._states[name] = self._new_state(settings, self._weights or self._hash(marks, tensors))
                while len(self._states) > SPACES:
                    self._states.popitem(last=False)
            self._states.move_to_end(name)
            return self._states[name]

    def _hash(self, marks: str, tensors: list[tuple[str, torch.Tensor]]) -> str:
        if marks not in self._hashed:
            self._hashed[marks] = models.hash_weights(tensors)
            while len(self._hashed) > SPACES:
                self._hashed.popitem(last=False)
        return self._hashed[marks]

    def _new_state(self, settings: dict[str, str], weights: str) -> State:
        shapes, probe = self._probe()
        fields = {
            **settings,
            "model": weights,
            "kv": "L K|V H T D: " + models.short([(str(k), str(v)) for k, v in shapes]) + f" {shapes[0][0]}",
            "layers": str(len(shapes)),
            "probe": probe,
            **{f"own.{name}": value for name, value in self._identity.items()},
        }
        return State(self._space(fields, "block by block"), self._space(fields, "by the caller"), shapes)

    def _space(self, fields: dict[str, str], how: str) -> Space:
        return Space(self.store, {**fields, "computed": how}, block_tokens=self.block_tokens, **self._secrets)

    def _probe(self) -> tuple[Shapes, str]:
        """Shapes of all layers, and the digest of what the model computes for a few tokens, which shows also what no
        setting tells. Raises RefusedError for layers that are not proven, or whose keys depend on later tokens."""
        vocabulary = int(self._text_config.vocab_size)
        ids = [(7919 * i + 1) % vocabulary for i in range(PROBE_TOKENS)]
        steps, whole = self._record([ids[:-2], ids[-2:]]), self._record([ids])
        if not steps or not all(steps):
            raise RefusedError("blocks of this model can't be reused: not all layers use the cache that they are given")
        digest = hashlib.sha256()
        for tensor in (tensor for layer in steps for pair in layer for tensor in pair):
            digest.update(models.digest_of(tensor))
        for layer, (stepwise, (at_once, *_)) in enumerate(zip(steps, whole, strict=True)):
            for tensor, other in zip(stepwise[0], at_once, strict=True):
                if not nearly_equal(tensor, other[:, :, : tensor.shape[2]]):
                    raise RefusedError(f"blocks of this model can't be reused: layer {layer} depends on later tokens")
        return [(Shape.of(layer[0][0]), Shape.of(layer[0][1])) for layer in steps], digest.hexdigest()

    def _record(self, pieces: list[list[int]]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        """Keys and values of each layer, for each piece."""
        layers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        cache = Recorder(
            self._text_config,
            lambda layer, keys, values: layers.setdefault(layer, []).append((keys.clone(), values.clone())),
        )
        check(cache)
        for piece in pieces:
            self._forward([piece], cache)
        return [layers.get(layer, []) for layer in range(len(cache.layers))]


def nearly_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Up to rounding: far nearer than two values that depend on different tokens."""
    tolerance = 1e-3 if tensor.dtype == torch.float32 else 3e-2
    difference = (tensor.float() - other.float()).norm()
    return bool(difference <= tolerance * other.float().norm())
