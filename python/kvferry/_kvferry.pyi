# SPDX-License-Identifier: Apache-2.0
"""The C core of kvferry, as Python sees it: stores, spaces, blocks, views, queues, sessions.

Conventions of all calls:

- Times are seconds, as float. ``timeout=None`` is the default of the call, which its text names. ``timeout=0`` does
  only what needs no waiting, where the text says so; everywhere else it is a LimitError, and so is a negative time,
  or one of more than 24 hours.
- ``keys`` are any buffer of 32 n bytes, one key after the other, as `Space.chain` returns them.
- ``tokens`` are a buffer of 32 or 64 bit integers (array.array, numpy), or a sequence of ints of 32 bits.
- ``slots`` are a buffer of 64 or 32 bit integers, or a sequence of ints.
- A *part* is memory: any contiguous buffer (bytes, bytearray, memoryview, numpy array), or a tuple ``(address,
  nbytes)`` of ints for memory without the buffer protocol, such as a torch tensor's. A *block's memory* is a part, or
  a list of parts: the payload is their concatenation.
- Whoever passes an address keeps its memory alive. ``owner=`` does that: the object is referenced until the call, or
  its batch in a queue, is over. Buffers are held for that long without asking.
- Operations on blocks never fail because of a store that is down, slow, full or corrupt. They miss, with a reason:
  "absent", "other-tokens", "other-space", "checksum", "truncated", "version", "budget", "unreachable", "server",
  "breaker", "full", "nomem", "after-gap", "closed", "slow", "settings", "stalled", "misuse" (docs/python.md explains
  them).
- A signal whose handler raises, such as Ctrl-C, ends a call of the main thread that waits for a server, at once. The
  exception leaves the call when nothing uses the caller's memory any more. `close` waits to its end, as do calls that a
  handler makes while another one waits.
- Every call that may wait releases the GIL. Any number of threads may use a Store, a Space, a View and a Queue.
- Closed objects raise ClosedError, and so do all objects of the parent in a forked child. Closing twice is fine, in any
  order: a Store closes its spaces and queues. What another thread has under way ends first; the last one out frees.
- The arguments of a call are checked before anything is done: TypeError (also for memory that is not contiguous, or
  not writable where it must be) or LimitError (a ValueError).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Self, SupportsIndex, TypeAlias, final

from typing_extensions import Buffer, disjoint_base

Part: TypeAlias = Buffer | tuple[int, int]
BlockMemory: TypeAlias = Part | list[Part] | list[Buffer] | list[tuple[int, int]]
BlockMemories: TypeAlias = (
    View | Sequence[BlockMemory] | Sequence[Buffer] | Sequence[list[Buffer]] | Sequence[tuple[int, int]]
)
Ints: TypeAlias = Buffer | Sequence[SupportsIndex]
Pieces: TypeAlias = Part | Sequence[Part] | Sequence[Buffer] | Sequence[tuple[int, int]]

VERSION: str
"""The version of the library, such as "0.3.0"."""
KEY_BYTES: Literal[32]
MAX_BLOCKS: int
"""Blocks in one call: 65536."""

# ---- exceptions

class Error(Exception):
    """Base of all exceptions of kvferry. The message says what is wrong and what to do about it."""

    status: str
    """The status of the C call: "config", "refused", "limit", "io", "closed"."""

class ConfigError(Error):
    """A URL, credentials or server settings are wrong: the operator must change something."""

class RefusedError(Error):
    """This engine, model, layout or sealed record is not proven safe to reuse, or can't be read."""

class LimitError(Error, ValueError):
    """An argument is malformed, or larger than its documented bound."""

class StoreError(Error, OSError):
    """The operating system or the server failed, in a call that cannot miss (administration, sessions)."""

class ClosedError(Error):
    """The object was closed, or belongs to the parent of this forked process."""

# ---- values

@final
class Result(tuple[int, tuple[str | None, ...]]):
    """What became of the blocks of a load or a save: ``num_ok, reasons = ...``."""

    @property
    def num_ok(self) -> int:
        """Load: the leading blocks that are loaded and verified; with each=True all that are. Save: those accepted."""
    @property
    def reasons(self) -> tuple[str | None, ...]:
        """For each block None if it is fine, or why it is not."""

@final
class Found(tuple[int, float, int, int, str | None]):
    """What a lookup found of one key."""

    @property
    def payload_bytes(self) -> int:
        """The room that a load needs."""
    @property
    def stored(self) -> float:
        """When it was stored, in seconds since 1970."""
    @property
    def num_tokens(self) -> int: ...
    @property
    def tier(self) -> int:
        """The index of the fastest tier that has it."""
    @property
    def why(self) -> str | None:
        """None: it is there. Otherwise why it is not; all other fields are then 0. "budget" means: ask again."""

@final
class Completion(tuple[int, str, int, tuple[str | None, ...], tuple[Found, ...] | None]):
    """The end of a batch of a Queue."""

    @property
    def ticket(self) -> int: ...
    @property
    def op(self) -> Literal["load", "save", "match", "remove", "touch"]: ...
    @property
    def num_ok(self) -> int:
        """Load and match: the leading run; with each or arrivals all blocks that are there. Others: the blocks that
        were written, removed, renewed."""
    @property
    def reasons(self) -> tuple[str | None, ...]:
        """For each block None if it is fine, or why it is not."""
    @property
    def found(self) -> tuple[Found, ...] | None:
        """Of a match: for each key what was found. Of others: None."""

@final
class Flushed(tuple[bool, int]):
    """What a flush has reached."""

    @property
    def done(self) -> bool:
        """False: the time ended first."""
    @property
    def unwritten(self) -> int:
        """Blocks that were accepted and could not be written after all. Each is reported by one flush."""

@final
class Entry(
    tuple[
        str,
        int,
        str,
        bytes,
        bytes,
        int,
        int,
        int,
        int,
        float,
        float | None,
        str | None,
        str,
        bytes | None,
        tuple[int, ...] | None,
    ]
):
    """One thing in a store."""

    @property
    def kind(self) -> Literal["block", "card", "session", "foreign"]: ...
    @property
    def tier(self) -> int: ...
    @property
    def name(self) -> str:
        """The store's own name: a Redis key, a file's path below the folder, a session's id ("" if it is sealed and the
        walk does not read whole values). Bytes that are not UTF-8 are surrogate escapes, as in os.fsdecode."""
    @property
    def space(self) -> bytes:
        """32 bytes: the digest of the space; zeros if it has none."""
    @property
    def key(self) -> bytes:
        """32 bytes: the key as stored (Space.stored_key); zeros if it has none."""
    @property
    def stored_bytes(self) -> int:
        """Header and payload, as stored."""
    @property
    def payload_bytes(self) -> int: ...
    @property
    def first_token(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def stored(self) -> float:
        """Seconds since 1970; 0 = unknown."""
    @property
    def ttl(self) -> float | None:
        """Time to live in seconds; inf = it stays; None = unknown."""
    @property
    def damage(self) -> str | None:
        """None, or what is wrong with it. Without whole=True only what the header shows."""
    @property
    def seal(self) -> Literal["none", "closed", "opened"]:
        """Sealed under a secret: "closed" if the store was not given it."""
    @property
    def payload(self) -> bytes | None:
        """With whole=True and key=: the payload. Otherwise None."""
    @property
    def tokens(self) -> tuple[int, ...] | None:
        """With whole=True and key=: the tokens, if the record has them. Otherwise None."""

@final
class Finding(tuple[str, int, str, str, str]):
    """One finding of the doctor."""

    @property
    def severity(self) -> Literal["fine", "note", "warning", "fatal"]: ...
    @property
    def tier(self) -> int: ...
    @property
    def code(self) -> str:
        """A stable word, such as "noeviction"."""
    @property
    def what(self) -> str:
        """What was found, with its values."""
    @property
    def mend(self) -> str:
        """How to fix it, often a command to type. Empty if nothing is wrong."""

@final
class Tier(tuple[str, bool, int | None, int | None, int | None, int, int, int, int]):
    """One tier of a store, as far as it is known without a walk. None = unknown."""

    @property
    def url(self) -> str:
        """Without the password."""
    @property
    def reachable(self) -> bool: ...
    @property
    def num_records(self) -> int | None: ...
    @property
    def used_bytes(self) -> int | None: ...
    @property
    def max_bytes(self) -> int | None: ...
    @property
    def num_servers(self) -> int: ...
    @property
    def num_open(self) -> int:
        """Servers that nobody tries for a moment, after failures."""
    @property
    def num_half_open(self) -> int: ...
    @property
    def num_refusing(self) -> int:
        """Servers that refused saves (out of memory, no disk); saves to them pause for a while."""

@final
class Link(tuple[float, float, bool]):
    """How fast a tier of a store is, by its own measurements."""

    @property
    def bytes_per_s(self) -> float:
        """The rate of all loads together; the last 300 milliseconds count most. 0 = unknown: less than 256 KiB have
        been loaded, or nothing for 10 seconds."""
    @property
    def round_trip(self) -> float:
        """The shortest time from a request to the first byte of the answer, in seconds. 0 = unknown."""
    @property
    def silent(self) -> bool:
        """Loads have been under way for 40 milliseconds or more, and nothing arrived."""

@final
class Plan(tuple[str, int, int, float, float, float]):
    """How much of a gap to load, and how much to compute. Times are seconds."""

    @property
    def kind(self) -> Literal["none", "load", "compute", "both", "try"]:
        """ "none": the gap has no blocks. "load": all of it arrives in time. "compute": nothing does. "both": compute
        the front while the rest arrives. "try": the rate is not known; wait as long as patience lasts."""
    @property
    def num_compute(self) -> int:
        """Blocks of the front to compute."""
    @property
    def num_load(self) -> int:
        """The blocks after them, to load."""
    @property
    def load_seconds(self) -> float:
        """How long these are expected to take to arrive. 0 = unknown, or nothing is loaded."""
    @property
    def compute_seconds(self) -> float:
        """How long it takes to compute all of the gap. 0 = unknown."""
    @property
    def patience(self) -> float:
        """What a load may cost at most, for an engine that begins now: 3 % of the time to compute, at least 0.01."""

@final
class SessionInfo(
    tuple[
        int,
        str | None,
        tuple[int, ...] | None,
        int,
        str | None,
        tuple[int, ...] | None,
        int,
        str | None,
        bytes | None,
        bool,
        float | None,
    ]
):
    """What is known of a session without its arrays."""

    @property
    def k_bytes(self) -> int: ...
    @property
    def k_dtype(self) -> str | None:
        """numpy's name, such as "float16" or "bfloat16"; None = unknown."""
    @property
    def k_shape(self) -> tuple[int, ...] | None: ...
    @property
    def v_bytes(self) -> int: ...
    @property
    def v_dtype(self) -> str | None: ...
    @property
    def v_shape(self) -> tuple[int, ...] | None: ...
    @property
    def num_tokens(self) -> int:
        """0 = unknown."""
    @property
    def layout(self) -> str | None: ...
    @property
    def space(self) -> bytes | None:
        """The digest of the space that the arrays belong to."""
    @property
    def has_meta(self) -> bool:
        """False: written by a plain Redis client. Only the lengths are known, and no checksum was verified."""
    @property
    def ttl(self) -> float | None:
        """Of a look: how long the session still lives, in seconds. inf: it does not expire. None: unknown, always so
        after a load."""

@final
class Session:
    """A loaded session: K and V, in memory of the library.

    ``k`` and ``v`` are writable memoryviews of bytes over that memory, without a copy: numpy.frombuffer(s.k, dtype),
    torch.frombuffer(s.k, dtype=...). Each keeps the memory alive, also after the Session and the Store are gone.
    After a load with ``into=`` both are None: the arrays are in the caller's memory."""

    @property
    def k(self) -> memoryview | None: ...
    @property
    def v(self) -> memoryview | None: ...
    @property
    def info(self) -> SessionInfo: ...

# ---- store

@final
class Store:
    """Where blocks and sessions are stored: one URL is one tier, several are tiers of one store, fastest first.

    ``mem:``, ``file:/folder``, ``redis://host:port/db``, ``redis+unix:///path.sock``, ``redis+cluster://``,
    ``redis+sentinel://``, ``rediss://`` (TLS); docs/stores.md has all with their parameters. A server that is down is
    not an error: the store opens, misses, and tries it again.

    secret, previous_secret: 16 to 1024 bytes each; all spaces without one of their own seal their records under it.
    secret_files: the same from a file, or two as "NEW:OLD". seal_sessions: sessions too, and only sealed ones load.
    drain: how long close() waits for blocks that are being written (None = 5 s, 0 drops them).
    backlog_bytes: bound of blocks that wait to be written (0 = 256 MiB). load_threads, store_threads: 0 = as many as
    the tiers can use.

    Raises ConfigError (a URL, a secret file), LimitError (a secret that is too short or too long)."""

    def __new__(
        cls,
        urls: str | Sequence[str],
        *,
        secret: Buffer | None = None,
        previous_secret: Buffer | None = None,
        secret_files: str | None = None,
        seal_sessions: bool = False,
        drain: float | None = None,
        backlog_bytes: int = 0,
        load_threads: int = 0,
        store_threads: int = 0,
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def close(self) -> None:
        """Closes the spaces and queues of the store, waits up to ``drain`` for what is being written, and frees it.
        Sessions that were loaded stay."""
    @property
    def closed(self) -> bool: ...
    @property
    def num_tiers(self) -> int: ...
    def flush(self, timeout: float | None = None) -> Flushed:
        """Waits until the blocks that were handed over before are written or given up. Default 10 s; 0 polls.

        Flushed(True, 0): every tier has them all. Flushed(True, n): n were not written; stats() has the reasons.
        Flushed(False, n): the time ended first."""
    def stats(self) -> dict[str, int | dict[str, int]]:
        """Counters since the store was opened, named as in kvferry/store.h. "misses" and "save_failures" are dicts by
        reason; reasons that did not occur are not in them."""
    def walk(
        self,
        *,
        whole: bool = False,
        space: Buffer | None = None,
        key: Buffer | None = None,
        timeout: float | None = None,
    ) -> Iterator[Entry]:
        """Iterates over every record and session of every tier, or of one space. Walks the store first, then yields.

        whole: reads and verifies whole values, not only headers. key (with space): only this record, read directly;
        with whole=True its Entry has the payload. timeout: for one step of the walk, default 5 s.
        Raises StoreError, ConfigError, LimitError (a key without a space)."""
    def describe(self, space: Buffer) -> dict[str, str] | None:
        """The fields of a space, by its digest, from the card beside its blocks. None: there is no such card.
        Raises RefusedError: the card is sealed, and the store was not given its secret."""
    def clear(self, space: Buffer | None = None) -> int:
        """Removes all records of one space, or all records and sessions of kvferry; returns their number. Touches
        nothing else. Raises StoreError, ConfigError."""
    def remove(self, space: Buffer, key: Buffer) -> bool:
        """Removes one record from all tiers, by the digest of its space and its stored key. False: no tier had it.
        Raises StoreError, ConfigError."""
    def doctor(self) -> list[Finding]:
        """What is wrong with the tiers, and how to fix it. A tier that is down is a finding."""
    def tiers(self) -> list[Tier]:
        """One Tier for each URL."""
    def link(self, tier: int = 0) -> Link:
        """How fast a tier is, as all loads of this Store have measured it. A tier beyond the last is the last one."""
    def session_save(
        self,
        id: str,
        k: Pieces,
        v: Pieces,
        *,
        dtype: str | None = None,
        shape: Sequence[int] | None = None,
        v_dtype: str | None = None,
        v_shape: Sequence[int] | None = None,
        ttl: int | None = None,
        num_tokens: int = 0,
        layout: str | None = None,
        space: Buffer | None = None,
        timeout: float | None = None,
        owner: object = None,
    ) -> None:
        """Replaces the session as a whole: a reader sees the old one or the new one. Nothing is copied.

        k, v: one part, or a sequence of parts (such as one for each layer) that are stored as one array.
        dtype: numpy's name ("float16", "bfloat16", "uint8"; at most 15 characters). shape: at most 8 dimensions; their
        product times the size of the dtype is the number of bytes. Both are of k; of v too, unless v_dtype or v_shape
        say otherwise. None = unknown. ttl: whole seconds (None = 3600). layout: a free word for the order of the axes,
        such as "LHTD". space: the digest of the space that the arrays belong to. timeout: default 30 s.
        Raises LimitError (the id, a shape that does not fit), ConfigError, StoreError."""
    def session_load(
        self,
        id: str,
        *,
        into: tuple[Pieces, Pieces] | None = None,
        raw: bool = False,
        timeout: float | None = None,
        owner: object = None,
    ) -> Session | None:
        """Loads a session. None: there is none, or it does not match its checksum (then it is damaged, or a plain
        client wrote over it). `session_look` tells which.

        into: writable memory for k and for v, of exactly their lengths (LimitError if not); what a miss leaves in it is
        undefined. raw: takes a session whose arrays do not match its meta as raw bytes (info.has_meta is False).
        timeout: default 30 s. Raises ConfigError, StoreError, LimitError."""
    def session_look(self, id: str, *, raw: bool = False, timeout: float | None = None) -> SessionInfo | None:
        """What is known of a session without reading its arrays. None: there is none. Compares no checksum.

        raw: as for session_load. Raises ConfigError, StoreError, LimitError."""
    def session_remove(self, id: str) -> bool:
        """Removes a session from all tiers. False: there was none. Raises ConfigError, StoreError, LimitError."""

# ---- space

@final
class Space:
    """An identity: everything that changes the bytes of a block, as named fields. Any difference is a miss.

    fields: names of 1 to 64 characters of a-z 0-9 . _ -, values of up to 4096 bytes. Required (RefusedError): "engine"
    (which engine, and the version of its KV format), "model" (a hash of the weights), "kv" (dtype and layout).
    block_tokens: tokens of a block, 1 to 65536; part of the identity.
    secret, previous_secret: a tenant's, 16 to 1024 bytes; None = those of the store.
    Raises RefusedError, LimitError, ClosedError."""

    def __new__(
        cls,
        store: Store,
        fields: Mapping[str, str],
        *,
        block_tokens: int = 256,
        secret: Buffer | None = None,
        previous_secret: Buffer | None = None,
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def close(self) -> None:
        """Closes the space. Batches of a queue that use it go on to their completion."""
    @property
    def closed(self) -> bool: ...
    @property
    def store(self) -> Store: ...
    @property
    def digest(self) -> bytes:
        """32 bytes: the name of the space."""
    @property
    def block_tokens(self) -> int: ...
    @property
    def fields(self) -> dict[str, str]:
        """All fields, with block_tokens."""
    def chain(self, tokens: Ints, parent: Buffer | None = None) -> bytes:
        """The keys of all whole blocks of a prompt: 32 bytes for each.

        parent: the key of the block before the first of these tokens, or a salt key; None = the beginning of a
        prompt."""
    def salt_key(self, parent: Buffer | None, salt: Buffer, /) -> bytes:
        """A parent for `chain`: what is chained from it is found only with the same salt. Separates; does not
        protect."""
    def key_of(self, engine_hash: Buffer, /) -> bytes:
        """A key from an engine's own block hash of any length."""
    def keys_of(self, engine_hashes: Sequence[Buffer], suffix: Buffer = b"") -> bytes:
        """The keys of several hashes, each followed by ``suffix`` (a rank, a group)."""
    def tail_key(self, last_block: Buffer, tokens: Ints) -> bytes:
        """The key of the tokens after the last whole block, by the key of that block (or a salt key)."""
    def state_key(self, block: Buffer, /) -> bytes:
        """The key of what an engine can't divide into blocks, as it is at the end of a block or tail."""
    def apart_key(self, key: Buffer, how: Buffer) -> bytes:
        """The key of the same tokens, computed in another way."""
    def stored_key(self, key: Buffer, /) -> bytes:
        """The key as the store sees it (Entry.key, Store.remove): the same, or with a secret its HMAC."""
    def match(self, keys: Buffer, timeout: float | None = None) -> int:
        """How many leading blocks are stored: one round trip, whatever their number. Default 10 s; 0 polls. A hint: the
        load decides. 0 also where the store did not answer in time (`find` says why)."""
    def find(self, keys: Buffer, timeout: float | None = None) -> list[Found]:
        """What is stored of each key, also after the first that is missing."""
    def load(
        self,
        keys: Buffer,
        into: BlockMemories,
        *,
        slots: Ints | None = None,
        tokens: Ints | None = None,
        first_token: int | None = None,
        each: bool = False,
        timeout: float | None = None,
        patience: float | None = None,
        owner: object = None,
    ) -> Result:
        """Reads blocks into memory, verified: header, space, key, tokens, length and checksum.

        into: a View (then slots name one slot for each key), or a sequence with the memory of each block, writable and
        of the payload's length (of another length it is "truncated"; `find` tells the length). Memory of a block that
        is not loaded is undefined.
        tokens: those of all blocks, block_tokens each: compared with the record. The last block may have fewer, as a
        tail, and the rest of a prompt, which fills no block, may follow. None = only the keys count. first_token: the
        position of the first of them in the prompt, default 0; without tokens it is compared only if it is given. Pass
        neither for keys that are not in the order of a prompt.
        each: the blocks are independent. A missing block does not end the others, and num_ok counts all that are there.
        timeout: default 10 s; 0 polls (memory tiers answer). patience: how long to wait for a server that has fallen
        silent (None = as the store does: stall_ms of its URL).
        Raises TypeError, LimitError, ClosedError, nothing else."""
    def save(
        self,
        keys: Buffer,
        source: BlockMemories,
        *,
        slots: Ints | None = None,
        tokens: Ints | None = None,
        first_token: int | None = None,
        owner: object = None,
    ) -> Result:
        """Copies blocks into the backlog, hands them to the writers and returns at once; never waits. The memory is
        free again when it returns. num_ok counts the blocks that were accepted, or that the store is known to have;
        after the first that is not accepted ("full": no room) none is. `Store.flush` waits for the writers."""
    def knows(self, key: Buffer, /) -> bool:
        """Whether the store is known to have this block: saving it would be skipped. No I/O."""
    def forget(self, keys: Buffer, /) -> None:
        """Drops what this process knows of these blocks: the next save writes them. Removes nothing. No I/O."""

# ---- view

@final
class View:
    """Memory that holds many payloads at equal distances, such as an engine's KV pool, described once.

    regions: tuples (address, slot_stride, run_bytes, run_stride, num_runs), all in bytes. The payload of slot s is,
    region by region, num_runs runs of run_bytes; run r begins at address + s * slot_stride + r * run_stride.
    owner: kept alive as long as the view; without it the caller keeps the memory alive until close() has returned.
    Raises LimitError."""

    def __new__(
        cls, regions: Sequence[tuple[int, int, int, int, int]], num_slots: int, owner: object = None
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def close(self) -> None:
        """Closes the view. Waits until no operation uses the memory."""
    @property
    def closed(self) -> bool: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int:
        """The payload of a slot."""
    def fence(self, slots: Ints, timeout: float | None = None) -> bool:
        """Waits until no operation reads or writes these slots. Default 10 s; 0 polls. False: some are still in use; do
        not give their memory to anybody else."""

# ---- queue

@disjoint_base
class Queue:
    """Batches without waiting: submit, watch fileno() with poll, select or asyncio, reap completions.

    depth: batches in the queue, 1 to 4096. A submit returns a ticket, or None when the queue is full. Memory, view and
    space of a batch are kept until its completion is reaped, or the queue is closed.
    kvferry.Queue adds awaitables for asyncio.
    Raises LimitError (the depth), StoreError (too many open files), ClosedError."""

    def __new__(cls, store: Store, depth: int = 64) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def close(self) -> None:
        """Waits for batches under way (each has its deadline) and frees the queue. Their completions are dropped."""
    @property
    def closed(self) -> bool: ...
    @property
    def store(self) -> Store: ...
    @property
    def depth(self) -> int: ...
    def __len__(self) -> int:
        """Batches that were submitted and not reaped."""
    def fileno(self) -> int:
        """A descriptor that is readable while completions wait to be reaped."""
    def submit_load(
        self,
        space: Space,
        keys: Buffer,
        into: BlockMemories,
        *,
        slots: Ints | None = None,
        tokens: Ints | None = None,
        first_token: int | None = None,
        each: bool = False,
        arrivals: bool = False,
        timeout: float | None = None,
        patience: float | None = None,
        owner: object = None,
    ) -> int | None:
        """As Space.load, without waiting. The memory is the library's until the completion.

        arrivals: arrived() tells which blocks are there already, and fileno() becomes readable after each; the blocks
        are independent then, as with each. patience: how long to wait for a server that has fallen silent (None = as
        the store does: stall_ms of its URL)."""
    def submit_save(
        self,
        space: Space,
        keys: Buffer,
        source: BlockMemories,
        *,
        slots: Ints | None = None,
        tokens: Ints | None = None,
        first_token: int | None = None,
        may_lend: bool = False,
        timeout: float | None = None,
        patience: float | None = None,
        owner: object = None,
    ) -> int | None:
        """Writes blocks straight from the caller's memory. Complete when every tier has taken or refused every block.

        may_lend: pages may be lent to a Redis server on a unix socket instead of copied, which is faster; only for
        memory that is not written to any more, or whose next contents the server may see (KVF_MAY_LEND in
        kvferry/block.h)."""
    def submit_match(
        self, space: Space, keys: Buffer, *, each: bool = False, timeout: float | None = None
    ) -> int | None:
        """As Space.find, without waiting. num_ok is the leading run; with each all that are there."""
    def submit_remove(self, space: Space, keys: Buffer, *, timeout: float | None = None) -> int | None:
        """Removes the blocks from every tier. A reason "absent": no tier had it."""
    def submit_touch(self, space: Space, keys: Buffer, *, timeout: float | None = None) -> int | None:
        """Renews the blocks in every tier without reading them: their time to live begins anew."""
    def reap(self, max: int = 64) -> list[Completion]:
        """Takes up to ``max`` completions without waiting."""
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until fileno() is readable. None = as long as it takes. False: the time ended first."""
    def cancel(self, ticket: int, /) -> None:
        """Drops blocks of a batch that have not begun. The completion still arrives. An unknown ticket is ignored."""
    def trim(self, ticket: int, num: int) -> None:
        """Drops blocks from number ``num`` on that have not begun, of a load with arrivals."""
    def arrived(self, ticket: int, /) -> tuple[int, bytes] | None:
        """Of a load with arrivals, until it is reaped: the bytes that have arrived, and for each block 0 = awaited,
        1 = here, 2 or more = missed. None for any other ticket."""

    def _set_on_close(self, on_close: Callable[[], None], /) -> None:
        """For kvferry.Queue: called when anybody closes the queue."""

def _main(argv: Sequence[bytes], /) -> int:
    """The program ``kvferry`` (docs/cli.md), without ``run``: argv[0] is its name. Returns its exit status. Once a
    process: it closes stdout."""

# ---- load or compute

@final
class Pace:
    """How long an engine takes for a token, by the size of the batch; and what to load or to compute.

    A new Pace knows nothing. kvferry/plan.h explains how it decides. Belongs to one thread at a time."""

    def __new__(cls) -> Self: ...
    def note(self, num_tokens: int, seconds: float) -> None:
        """Records a batch of tokens of prompts that took so long. The last batches count most. 0 tokens, or no time, is
        not a batch. Raises LimitError: less than 0 seconds, or more than a year."""
    def seconds(self, num_tokens: int, batch_tokens: int) -> float:
        """How long so many tokens take in batches of at most batch_tokens. A batch size that is not known takes the
        next larger known one, or else the next smaller one of 64 tokens or more. 0 if nothing is known."""
    def decide(
        self,
        num_blocks: int,
        *,
        block_bytes: int,
        block_tokens: int,
        batch_tokens: int,
        link: Link | None = None,
        whole: bool = False,
        moving: bool = False,
        impatient: bool = False,
        here_bytes: int = 0,
        other_bytes: int = 0,
        instead_blocks: int = 0,
    ) -> Plan:
        """What to do about a gap, a run of blocks that are stored and that the engine does not have, so that the
        prefill ends soonest.

        batch_tokens: of the largest batch that the engine computes. link: None or zeros = unknown. whole: the gap is
        loaded as a whole or not at all. moving: its blocks have been requested already. impatient: the patience of
        this prefill is used up. here_bytes: what has arrived of incomplete blocks. other_bytes: what must arrive
        besides. instead_blocks: with whole, how many blocks are computed if the gap is not loaded; 0 = num_blocks.

        Raises LimitError."""
