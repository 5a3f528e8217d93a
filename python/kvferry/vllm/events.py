# SPDX-License-Identifier: Apache-2.0
"""KV events: tells those who route requests which blocks the store has (`--kv-events-config`), in vLLM's own messages.

The workers report what became of each move, and the scheduler, which knows the tokens, makes the events. A block is
announced when all ranks have stored it, and taken back when a load does not find it, or finds it damaged."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvferry.vllm.messages import Move, Outcome

GONE = ("absent", "checksum", "truncated", "version", "other-tokens", "other-space")
"""Reasons for which a block is not in the store, or not as it should be."""


@dataclass(slots=True)
class Saving:
    move: Move
    parent: bytes | None
    lora: Any
    ranks: Counter[int]
    """How many ranks have stored a block, by its index in the move."""
    ended: int = 0


class Announcer:
    """In the scheduler's process. Does nothing, and keeps nothing, unless the engine publishes events."""

    def __init__(self, *, is_on: bool, ranks: int, block_tokens: int) -> None:
        self._is_on, self._ranks, self._block = is_on, ranks, block_tokens
        self._numbers = count(1)
        self._savings: dict[int, Saving] = {}
        self._events: list[KVCacheEvent] = []

    def expect(self, move: Move, parent: bytes | None, lora: Any) -> None:
        """A save that the workers are told to do. parent: the hash of the block before it."""
        if self._is_on:
            move.number = next(self._numbers)
            self._savings[move.number] = Saving(move, parent, lora, Counter())

    def expect_load(self, move: Move) -> None:
        if self._is_on:
            move.number = next(self._numbers)

    def note(self, outcomes: Iterable[Outcome]) -> None:
        """What the workers report. A load's outcome names the first block that it did not find."""
        for outcome in outcomes:
            if outcome.gone:
                hashes = [maybe_convert_block_hash(BlockHash(hash_)) for hash_ in outcome.gone]
                self._events.append(BlockRemoved(hashes, MEDIUM_STORAGE, 0))
            saving = self._savings.get(outcome.number)
            if saving is not None:
                saving.ranks.update(outcome.stored)
                saving.ended += 1
                if saving.ended == self._ranks:
                    del self._savings[outcome.number]
                    self._events += [self._stored(saving, first, end) for first, end in self._runs(saving)]

    def forget(self) -> None:
        """What is being saved is of a space that nobody looks into any more."""
        self._savings.clear()

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def _runs(self, saving: Saving) -> Iterator[tuple[int, int]]:
        """First and end of each run of blocks that all ranks have stored."""
        first = 0
        for i in range(len(saving.move.hashes) + 1):
            if i == len(saving.move.hashes) or saving.ranks[i] < self._ranks:
                if first < i:
                    yield first, i
                first = i + 1

    def _stored(self, saving: Saving, first: int, end: int) -> BlockStored:
        move, lora = saving.move, saving.lora
        parent = move.hashes[first - 1] if first > 0 else saving.parent
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(BlockHash(hash_)) for hash_ in move.hashes[first:end]],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
            token_ids=move.tokens[first * self._block : end * self._block].tolist(),
            block_size=self._block,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora else None,
            group_idx=0,
        )
