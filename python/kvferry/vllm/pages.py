# SPDX-License-Identifier: Apache-2.0
"""The engine's pages in the CPU's memory: blocks are loaded straight into them and saved straight from them."""

from array import array
from typing import Any, Protocol

import kvferry


class Pages(Protocol):
    """How a worker moves blocks. A move has a ticket; its completion is reaped. None for a ticket: there is no room."""

    @property
    def reads_in_place(self) -> bool:
        """A save reads the pages until it ends. Otherwise a copy of them is taken at once."""

    @property
    def num_slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
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
    ) -> int | None: ...
    def save(
        self,
        space: kvferry.Space,
        keys: bytes,
        slots: "array[int]",
        *,
        tokens: "array[int]",
        first_token: int,
        timeout: float,
    ) -> int | None: ...
    def cancel(self, ticket: int) -> None: ...
    def arrived(self, ticket: int) -> int | None:
        """Blocks of a load that are there already."""

    def reap(self) -> list[kvferry.Completion]: ...
    def wait(self, timeout: float) -> None:
        """Until something may have changed, or for less."""

    def fence(self, slots: "array[int]", timeout: float) -> bool:
        """What the engine does from now on may write these pages. False: not yet, a save still reads them."""

    def close(self) -> None:
        """Waits until nothing touches the pages any more. What was not reaped is dropped."""


class HostPages:
    reads_in_place = True

    def __init__(self, queue: kvferry.Queue, caches: dict[str, Any], layers: list[str]) -> None:
        """Raises ValueError: they are not as expected."""
        regions: dict[int, tuple[int, int, int, int, int]] = {}
        num_slots = {cache.shape[0] for cache in caches.values()}
        if len(num_slots) != 1:
            raise ValueError(f"kvferry: the engine has KV caches of different sizes, {sorted(num_slots)}")
        for name in layers:
            cache = caches[name]
            if cache.device.type != "cpu" or not cache[0].is_contiguous():
                raise ValueError(f"kvferry: the pages of {name} are not in one piece in the CPU's memory")
            page = cache[0].numel() * cache.element_size()
            regions[cache.data_ptr()] = (cache.data_ptr(), cache.stride(0) * cache.element_size(), page, 0, 1)
        self._queue, self._view = queue, kvferry.View(list(regions.values()), num_slots.pop(), owner=caches)

    @property
    def num_slots(self) -> int:
        return self._view.num_slots

    @property
    def slot_bytes(self) -> int:
        return self._view.slot_bytes

    def load(self, space: kvferry.Space, keys: bytes, slots: "array[int]", **more: Any) -> int | None:
        return self._queue.submit_load(space, keys, self._view, slots=slots, arrivals=True, **more)

    def save(self, space: kvferry.Space, keys: bytes, slots: "array[int]", **more: Any) -> int | None:
        return self._queue.submit_save(space, keys, self._view, slots=slots, **more)

    def cancel(self, ticket: int) -> None:
        self._queue.cancel(ticket)

    def arrived(self, ticket: int) -> int | None:
        arrived = self._queue.arrived(ticket)
        return None if arrived is None else arrived[1].count(1)

    def reap(self) -> list[kvferry.Completion]:
        return self._queue.reap()

    def wait(self, timeout: float) -> None:
        self._queue.wait(timeout)

    def fence(self, slots: "array[int]", timeout: float) -> bool:
        return self._view.fence(slots, timeout=timeout)

    def close(self) -> None:
        self._queue.close()
