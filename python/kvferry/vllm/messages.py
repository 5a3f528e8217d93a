# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half and the workers' halves tell each other, once a step. They share no memory."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

import kvferry
from kvferry.vllm.plan import slowest


@dataclass(slots=True)
class Move:
    """Consecutive blocks of one request, to be loaded into the engine's pages or saved from them."""

    request: str
    hashes: list[bytes]
    """The engine's own, one for each block: they name all tokens up to its end, and what else its KV depends on."""
    names: list[bytes]
    """The same with what the hashes leave open of images. The keys are made of them."""
    suffix: bytes
    """What the hashes leave open of the whole request: the digest of a LoRA adapter's files, or nothing."""
    slots: "array[int]"
    """For each block the number of its page in every layer."""
    tokens: "array[int]"
    first_token: int
    timeout: float
    patience: float = 0.0
    """Of a load: what it may cost if its blocks arrive too late."""
    block_seconds: float | None = None
    """What computing one of the blocks takes, if that is known."""
    lacking: list[int] = field(default_factory=list)
    """Of a save: the blocks, by their place here, that a lookup did not find. The worker may still believe that they
    are stored."""
    number: int = 0
    """Under which its outcome is reported, for KV events. 0: nobody asks."""

    def keys(self, space: kvferry.Space, rank: int) -> bytes:
        return keys_of(space, self.names, self.suffix, rank)


def keys_of(space: kvferry.Space, names: list[bytes], suffix: bytes, rank: int, group: int = 0) -> bytes:
    """Each rank has other bytes of a block, and each group of layers."""
    return space.keys_of(names, rank.to_bytes(4, "little") + group.to_bytes(4, "little") + suffix)


def interleave(keys_by_rank: list[bytes]) -> bytes:
    """Block by block the keys of all ranks, so that one lookup answers for them all."""
    if len(keys_by_rank) == 1:
        return keys_by_rank[0]
    return b"".join(key for block in zip(*map(_split, keys_by_rank), strict=True) for key in block)


def _split(keys: bytes) -> Iterator[bytes]:
    return (keys[i : i + kvferry.KEY_BYTES] for i in range(0, len(keys), kvferry.KEY_BYTES))


@dataclass
class Machine(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler, once, before the first step: what it computes with (influence.machine)."""

    facts: dict[str, str]


@dataclass
class Step(KVConnectorMetadata):
    """From the scheduler to each worker."""

    fields: dict[str, str] = field(default_factory=dict)
    """Those of the space. They change when the engine is told to forget what it has computed. Empty: unknown yet."""
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    fence: "array[int]" = field(default_factory=lambda: array("q"))
    """Pages that this step writes anew. Nobody may still read them for a save."""
    num_tokens: int = 0
    """What the step computes, of all requests."""
    stranded: "dict[str, array[int]]" = field(default_factory=dict)
    """Requests that wait for loads which were never begun, because of a fault; with their pages."""
    is_last: bool = False
    """The scheduler's half is off, so nobody says any more which pages are written anew: no save may go on."""


@dataclass(slots=True)
class Outcome:
    """What became of a move that has a number, in one worker."""

    number: int
    stored: list[int] = field(default_factory=list)
    """Of a save: the blocks that the store has now, by their index in the move."""
    gone: list[bytes] = field(default_factory=list)
    """Of a load: the hash of the block that the store does not have any more."""


@dataclass
class Report(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    failed: set[str] = field(default_factory=set)
    """Requests of which a load has ended with blocks missing."""
    num_tokens: int = 0
    """What the step has computed."""
    seconds: float = 0.0
    """How long that took."""
    links: list[kvferry.Link] = field(default_factory=list)
    """How fast the tiers of the store are, if a load has ended."""
    outcomes: list[Outcome] = field(default_factory=list)
    is_off: bool = False
    """A fault of ours has turned off a worker's half: it loads and saves nothing any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Report":
        assert isinstance(other, Report)
        return Report(
            self.failed | other.failed,
            max(self.num_tokens, other.num_tokens),
            max(self.seconds, other.seconds),
            slowest(self.links, other.links),
            self.outcomes + other.outcomes,
            self.is_off or other.is_off,
        )
