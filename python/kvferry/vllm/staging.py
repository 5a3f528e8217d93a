# SPDX-License-Identifier: Apache-2.0
"""The engine's pages in a device's memory: blocks go through a pool of pinned host memory, by torch's own copies on two
streams of our own, one for loads and one for saves.

What is ordered by what, and never by waiting for the whole device:

- A save's stream waits for what the engine has computed so far, gathers the pages into a bounce buffer on the device,
  and copies that to the pool. When the copy has ended, a thread hands the pool's memory to the queue of the store.
- Before the engine writes a page anew, its stream waits until the page is gathered. That is much sooner than the save.
- A load goes from the store into the pool. What has arrived is copied to the device and scattered into the pages, on a
  stream that waits for what the engine did with these pages before. Later parts of it arrive from the store meanwhile.
- A load has ended, and its part of the pool is free, when its copies have."""

import heapq
import queue
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import kvferry
from kvferry.vllm.settings import log

PART_BYTES = 32 << 20  # blocks that are copied at once: the size of each of the two bounce buffers on the device
TICK = 0.001  # seconds: the end of a copy is looked for this often
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # copies by index are fastest in large words


def streams_of(device: torch.device) -> Any:
    """torch's module with the streams and events of a device. None: its memory is the CPU's."""
    return None if device.type == "cpu" else torch.get_device_module(device)


# ---- layouts


def by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer's pages, as a view: the block first, and in it the order of memory. Raises ValueError.

    The block is the first axis, or the second one of (2, blocks, ...). Kernels may have smaller blocks than the engine,
    which are then consecutive on this axis."""
    _, split = _split(cache, num_blocks)
    ordered = split.permute(0, *_inner_axes(split))
    if ordered.stride(-1) != 1:
        raise ValueError(f"kvferry: numbers of the pages {tuple(cache.shape)} have gaps, strides {cache.stride()}")
    return ordered.flatten(1) if ordered[0].is_contiguous() else ordered


def _split(cache: torch.Tensor, num_blocks: int) -> tuple[int, torch.Tensor]:
    """The axis of the blocks, and a view with that axis first, and then the blocks of the kernels."""
    axes = [i for i in range(min(2, cache.dim())) if cache.shape[i] % num_blocks == 0 and cache.shape[i] > 0]
    if len(axes) != 1:
        raise ValueError(f"kvferry: which axis of {tuple(cache.shape)} has the {num_blocks} blocks is not clear")
    return axes[0], cache.unflatten(axes[0], (num_blocks, -1)).movedim(axes[0], 0)


def _inner_axes(split: torch.Tensor) -> list[int]:
    """All but the first, in the order of memory."""
    return sorted(range(1, split.dim()), key=lambda i: (-split.stride(i), split.shape[i]))


def layout_of(cache: torch.Tensor, num_blocks: int) -> list[Any]:
    """What the bytes of a layer's page mean: the same for any number of blocks."""
    axis, split = _split(cache, num_blocks)
    return [str(cache.dtype), axis, list(split.shape[1:]), _inner_axes(split)]


def word_of(pages: torch.Tensor) -> torch.dtype:
    """The largest word that these pages are made of."""
    size = pages.element_size()
    edges = [pages.shape[-1], pages.storage_offset(), *pages.stride()[:-1]]
    return next(word for word in WORDS if all(edge * size % word.itemsize == 0 for edge in edges))


def distinct(caches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Layers may share the cache of another one."""
    return list({cache.data_ptr(): cache for cache in caches}.values())


def runs(slots: list[int]) -> list[tuple[int, int, int]]:
    """(first slot, first index, number) of slots that follow each other."""
    found: list[tuple[int, int, int]] = []
    for i, slot in enumerate(slots):
        if found and found[-1][0] + found[-1][2] == slot:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((slot, i, 1))
    return found


# ---- what is under way


@dataclass(slots=True, eq=False)
class Part:
    """Blocks of a batch that are copied at once."""

    batch: "Batch"
    first: int  # of its blocks, within the batch
    slots: "array[int]"  # pages
    room: list[int] = field(default_factory=list)  # slots of the pool
    copied: Any = None  # event: the copy has ended
    gathered: Any = None  # event: a save does not read the pages any more
    index: Any = None  # the pages, in host memory until the copy has read them
    inner: int | None = None  # ticket of the store's queue
    reasons: list[str | None] | None = None  # of its blocks, when the store is done with it


@dataclass(slots=True, eq=False)
class Batch:
    """What has a ticket."""

    ticket: int
    op: str
    space: kvferry.Space
    keys: bytes
    tokens: "array[int]"
    first_token: int
    deadline: float
    patience: float | None
    reasons: list[str | None]
    parts: list[Part] = field(default_factory=list)
    left: int = 0  # parts that have not ended
    written: Any = None  # event: what the engine did before with the pages of a load
    is_cancelled: bool = False


class DevicePages:
    """Called by the engine's thread. One more thread waits for the copies of saves."""

    reads_in_place = False

    def __init__(
        self, store_queue: kvferry.Queue, caches: list[torch.Tensor], num_blocks: int, streams: Any, pool_bytes: int
    ) -> None:
        """caches: one for each layer. Raises ValueError: they are not as expected, or the pool can't be had."""
        pages = [by_block(cache, num_blocks) for cache in distinct(caches)]
        word = min((word_of(layer) for layer in pages), key=lambda w: w.itemsize)
        self._layers = [layer.view(word) for layer in pages]
        self.layout = [layout_of(cache, num_blocks) for cache in caches]
        self._queue, self._streams, self.num_slots = store_queue, streams, num_blocks
        self.slot_bytes = sum(layer[0].numel() for layer in self._layers) * word.itemsize
        num_room = pool_bytes // self.slot_bytes
        if num_room < 2:
            raise ValueError(
                f"kvferry: staging_bytes {pool_bytes} is less than two blocks of {self.slot_bytes} bytes; set it to "
                f"at least {2 * self.slot_bytes}, better to those of a few prompts"
            )
        self._part = max(1, min(PART_BYTES // self.slot_bytes, num_room // 4))
        self.device = device = pages[0].device
        self._host = self._pinned(num_room, self.slot_bytes)
        region = (self._host.data_ptr(), self.slot_bytes, self.slot_bytes, 0, 1)
        self._view = kvferry.View([region], num_room, owner=self._host)
        self._room = list(range(num_room))  # a heap: neighbours are copied at once
        self._room_of_saves = num_room // 2
        self._lanes = {
            op: Lane(streams.Stream(device=device), device, self._part, self._host) for op in ("load", "save")
        }
        self._lock = threading.Lock()  # of everything below, and of the room
        self._last_ticket = 0
        self._batches: dict[int, Batch] = {}
        self._inner: dict[int, Part] = {}  # by ticket of the store's queue
        self._waiting: list[Part] = []  # of loads, for room
        self._landing: list[Part] = []  # of loads, for the end of their copies
        self._gathering: list[Part] = []  # of saves, for the end of their reads
        self._done: list[kvferry.Completion] = []
        self._copying: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._submit_saves, name="kvferry-staging", daemon=True)
        self._thread.start()

    def _pinned(self, num: int, size: int) -> torch.Tensor:
        try:
            return torch.empty((num, size), dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
        except RuntimeError as error:
            raise ValueError(
                f"kvferry: {num * size} bytes of host memory can't be pinned ({error}); set staging_bytes to less"
            ) from error

    # ---- loads

    def load(
        self,
        space: kvferry.Space,
        keys: bytes,
        slots: "array[int]",
        *,
        tokens: "array[int]",
        first_token: int,
        timeout: float,
        patience: float,
    ) -> int | None:
        with self._lock:
            batch = self._batch("load", space, keys, slots, tokens, first_token, timeout, patience)
            batch.written = self._computed()
            batch.parts = [Part(batch, i, slots[i : i + self._part]) for i in range(0, len(slots), self._part)]
            batch.left = len(batch.parts)
            self._waiting += batch.parts
            self._begin_loads()
            return batch.ticket

    def _begin_loads(self) -> None:
        """As many as there is room for, in their order. Those that are not wanted any more end without it."""
        now = time.monotonic()
        for part in [part for part in self._waiting if part.batch.is_cancelled or part.batch.deadline <= now]:
            self._waiting.remove(part)
            self._end(part, ["budget"] * len(part.slots))
        while self._waiting and len(self._room) >= len(self._waiting[0].slots):
            part = self._waiting[0]
            self._take_room(part, len(part.slots))
            part.inner = self._queue.submit_load(
                part.batch.space,
                into=self._view,
                arrivals=True,
                timeout=part.batch.deadline - now,
                patience=part.batch.patience,
                **self._of_part(part),
            )
            if part.inner is None:  # the queue is full: later
                self._free_room(part)
                return
            self._inner[part.inner] = self._waiting.pop(0)

    def _scatter(self, part: Part) -> None:
        """From the pool into the pages: the leading blocks that have arrived."""
        assert part.reasons is not None
        num = next((i for i, reason in enumerate(part.reasons) if reason is not None), len(part.slots))
        lane = self._lanes["load"]

        def copy() -> None:
            lane.stream.wait_event(part.batch.written)
            for slot, first, count in runs(part.room[:num]):
                lane.bounce[first : first + count].copy_(self._host[slot : slot + count], non_blocking=True)
            index = lane.point_at(part, num)
            for layer, words in zip(self._layers, lane.words(self._layers, num), strict=True):
                layer.index_copy_(0, index, words)

        self._copy(lane, part, copy)
        self._landing.append(part)

    # ---- saves

    def save(
        self,
        space: kvferry.Space,
        keys: bytes,
        slots: "array[int]",
        *,
        tokens: "array[int]",
        first_token: int,
        timeout: float,
    ) -> int | None:
        """Takes a copy of the leading blocks that there is room for. The others are "full"."""
        with self._lock:
            num = min(len(slots), len(self._room), self._room_of_saves)
            if num == 0:
                return None
            batch = self._batch("save", space, keys, slots, tokens, first_token, timeout, None)
            batch.reasons[num:] = ["full"] * (len(slots) - num)
            batch.parts = [Part(batch, i, slots[i : min(i + self._part, num)]) for i in range(0, num, self._part)]
            batch.left = len(batch.parts)
            computed = self._computed()
            for part in batch.parts:
                self._take_room(part, len(part.slots))
                self._room_of_saves -= len(part.slots)
                self._gather(part, computed)
                self._copying.put(part)
            return batch.ticket

    def _gather(self, part: Part, computed: Any) -> None:
        """From the pages into the pool."""
        lane, num = self._lanes["save"], len(part.slots)
        part.gathered = self._streams.Event()

        def copy() -> None:
            lane.stream.wait_event(computed)
            index = lane.point_at(part, num)
            for layer, words in zip(self._layers, lane.words(self._layers, num), strict=True):
                torch.index_select(layer, 0, index, out=words)
            part.gathered.record(lane.stream)
            for slot, first, count in runs(part.room):
                self._host[slot : slot + count].copy_(lane.bounce[first : first + count], non_blocking=True)

        self._gathering.append(part)
        self._copy(lane, part, copy)

    def _submit_saves(self) -> None:
        """The thread's: what was copied goes to the store."""
        while (part := self._copying.get()) is not None:
            failed = _raises(part.copied.synchronize)
            with self._lock:
                why = part.batch.reasons[part.first] or ("copy" if failed else self._submit_save(part))
                if why is not None:
                    self._room_of_saves += len(part.slots)
                    self._end(part, [why] * len(part.slots), keeps_room=failed)

    def _submit_save(self, part: Part) -> str | None:
        """Why it could not be, or None."""
        time_left = part.batch.deadline - time.monotonic()
        if part.batch.is_cancelled or time_left <= 0:
            return "budget"
        try:
            more = self._of_part(part)
            part.inner = self._queue.submit_save(part.batch.space, source=self._view, timeout=time_left, **more)
        except kvferry.ClosedError:
            return "closed"
        if part.inner is None:
            return "full"
        self._inner[part.inner] = part
        return None

    def fence(self, slots: "array[int]", timeout: float) -> bool:
        """The engine's stream waits for what gathers these pages; this thread does not."""
        wanted = set(slots)
        with self._lock:
            self._gathering = [part for part in self._gathering if not _is_past(part.gathered)]
            for part in self._gathering:
                if wanted.intersection(part.slots):
                    self._streams.current_stream().wait_event(part.gathered)
        return True

    # ---- both

    def _batch(
        self,
        op: str,
        space: kvferry.Space,
        keys: bytes,
        slots: "array[int]",
        tokens: "array[int]",
        first_token: int,
        timeout: float,
        patience: float | None,
    ) -> Batch:
        self._last_ticket += 1
        end, reasons = time.monotonic() + timeout, [None] * len(slots)
        batch = Batch(self._last_ticket, op, space, keys, tokens, first_token, end, patience, [*reasons])
        self._batches[batch.ticket] = batch
        return batch

    def _computed(self) -> Any:
        """An event: all that the engine has begun so far."""
        event = self._streams.Event()
        event.record(self._streams.current_stream())
        return event

    def _of_part(self, part: Part) -> dict[str, Any]:
        batch, block = part.batch, len(part.batch.tokens) // len(part.batch.reasons)
        first, end = part.first, part.first + len(part.slots)
        return {
            "keys": batch.keys[first * kvferry.KEY_BYTES : end * kvferry.KEY_BYTES],
            "slots": array("q", part.room),
            "tokens": batch.tokens[first * block : end * block],
            "first_token": batch.first_token + first * block,
        }

    def _copy(self, lane: "Lane", part: Part, copy: Callable[[], None]) -> None:
        """The event is recorded even after a fault: copies may have begun. It raises if that fails as well."""
        part.copied = self._streams.Event(blocking=True)  # who waits for it leaves the core to others
        try:
            with torch.inference_mode(), self._streams.stream(lane.stream):
                copy()
        except RuntimeError as error:
            log.warning("kvferry: blocks were not copied between device and host: %s", error)
            part.reasons = [*["copy"] * len(part.slots)]
            if part.batch.op == "save":
                part.batch.reasons[part.first : part.first + len(part.slots)] = part.reasons
                part.gathered.record(lane.stream)
        part.copied.record(lane.stream)

    def cancel(self, ticket: int) -> None:
        with self._lock:
            batch = self._batches.get(ticket)
            if batch is not None:
                batch.is_cancelled = True
                for part in batch.parts:
                    if part.inner is not None:
                        self._queue.cancel(part.inner)

    def arrived(self, ticket: int) -> int | None:
        with self._lock:
            batch = self._batches.get(ticket)
            return None if batch is None else sum(self._arrived_of(part) for part in batch.parts)

    def _arrived_of(self, part: Part) -> int:
        if part.reasons is not None:
            return part.reasons.count(None)
        flags = None if part.inner is None else self._queue.arrived(part.inner)
        return 0 if flags is None else flags[1].count(1)

    def reap(self) -> list[kvferry.Completion]:
        with self._lock:
            for done in self._queue.reap():
                self._take(self._inner.pop(done.ticket), done)
            landing, self._landing = self._landing, []
            for part in landing:
                self._land(part)
            self._begin_loads()
            done_now, self._done = self._done, []
            return done_now

    def _take(self, part: Part, done: kvferry.Completion) -> None:
        part.reasons = list(done.reasons)
        if part.batch.op == "load":
            self._scatter(part)
        else:
            self._room_of_saves += len(part.slots)
            self._end(part, part.reasons)

    def _land(self, part: Part) -> None:
        assert part.reasons is not None
        try:
            if part.copied.query():
                self._end(part, part.reasons)
            else:
                self._landing.append(part)
        except RuntimeError as error:
            log.warning("kvferry: blocks were not copied to the device: %s", error)
            self._end(part, ["copy"] * len(part.slots), keeps_room=True)

    def _end(self, part: Part, reasons: list[str | None], *, keeps_room: bool = False) -> None:
        """keeps_room: a copy may still be under way in it, so nobody else gets it."""
        batch, num = part.batch, len(part.slots)
        batch.reasons[part.first : part.first + num] = reasons
        part.reasons = reasons
        if not keeps_room:
            self._free_room(part)
        batch.left -= 1
        if batch.left == 0:
            del self._batches[batch.ticket]
            num_ok = batch.reasons.count(None)
            self._done.append(kvferry.Completion((batch.ticket, batch.op, num_ok, tuple(batch.reasons), None)))

    def _take_room(self, part: Part, num: int) -> None:
        part.room = [heapq.heappop(self._room) for _ in range(num)]

    def _free_room(self, part: Part) -> None:
        for slot in part.room:
            heapq.heappush(self._room, slot)
        part.room = []

    def wait(self, timeout: float) -> None:
        self._queue.wait(min(timeout, TICK))

    def close(self) -> None:
        self._queue.close()
        self._copying.put(None)
        self._thread.join()
        for lane in self._lanes.values():
            _raises(lane.stream.synchronize)  # ours, not the device


class Lane:
    """A stream, and the memory on the device that its copies go through, one part after the other."""

    def __init__(self, stream: Any, device: torch.device, num: int, host: torch.Tensor) -> None:
        self.stream, self._is_pinned = stream, host.is_pinned()
        self.bounce = torch.empty((num, host.shape[1]), dtype=torch.uint8, device=device)
        self._index = torch.empty(num, dtype=torch.int64, device=device)

    def point_at(self, part: Part, num: int) -> torch.Tensor:
        """The pages of the part's leading blocks, on the device."""
        part.index = torch.tensor(list(part.slots[:num]), dtype=torch.int64, pin_memory=self._is_pinned)
        self._index[:num].copy_(part.index, non_blocking=True)
        return self._index[:num]

    def words(self, layers: list[torch.Tensor], num: int) -> list[torch.Tensor]:
        """The bounce buffer's first `num` blocks, layer by layer, as the pages are shaped."""
        shaped, first = [], 0
        for layer in layers:
            size = layer[0].numel() * layer.element_size()
            words = self.bounce[:num, first : first + size].view(layer.dtype)
            shaped.append(words.unflatten(1, layer.shape[1:]))
            first += size
        return shaped


def _is_past(event: Any) -> bool:
    try:
        return bool(event.query())
    except RuntimeError:  # the device has failed: nothing runs on it
        return True


def _raises(wait: Callable[[], None]) -> bool:
    try:
        wait()
    except RuntimeError as error:
        log.warning("kvferry: the device has failed: %s", error)
        return True
    return False
