# SPDX-License-Identifier: Apache-2.0
"""Queue: batches without waiting, with awaitables for asyncio over the queue's descriptor."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from . import _kvferry
from ._kvferry import ClosedError, Completion, Space, Store

if TYPE_CHECKING:
    import asyncio  # at run time where it is awaited: it brings ssl and more

    from typing_extensions import Buffer

    from ._kvferry import BlockMemories, Ints


class _Waiting:
    """The futures of an event loop that wait for completions of one queue.

    The loop watches a duplicate of the queue's descriptor: it stays valid until the loop itself lets go of it, whoever
    closes the queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, wake: Callable[[], None]) -> None:
        self.loop = loop
        self.fd = os.dup(fd)
        self.by_ticket: dict[int, asyncio.Future[Completion]] = {}
        self.for_room: list[asyncio.Future[None]] = []
        loop.add_reader(self.fd, wake)

    def is_idle(self) -> bool:
        return not self.by_ticket and not self.for_room

    def end_if_idle(self) -> None:
        """On the loop's thread. While the loop watches the descriptor, it keeps the queue alive."""
        if self.is_idle():
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """On the loop's thread: lets go of the descriptor, and fails what still waits."""
        if self.fd < 0:
            return
        self.loop.remove_reader(self.fd)
        os.close(self.fd)
        self.fd = -1
        waiting: list[asyncio.Future[Any]] = [*self.by_ticket.values(), *self.for_room]
        for future in waiting:
            if error is not None and not future.done():
                future.set_exception(error)

    def end_soon(self) -> None:
        """On any thread: the queue was closed."""
        import asyncio

        error = ClosedError("this Queue was closed while it was waited for")
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() is self.loop:
                self.end(error)
                return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.end, error)


def _ender(queue: Queue) -> Callable[[], None]:
    """What the C queue calls when it is closed by anybody. Does not keep the queue alive."""
    to = weakref.ref(queue)

    def end() -> None:
        queue = to()
        if queue is not None and queue._waiting is not None:
            queue._waiting.end_soon()

    return end


class Queue(_kvferry.Queue):
    """Batches without waiting.

    Either submit, watch fileno() and reap; or await load(), save(), match(), remove(), touch() in one event loop. An
    awaitable returns the Completion of its batch. When the queue is full it waits for room. When its task is cancelled,
    it cancels the batch and waits for its completion, so that nobody touches the memory after it has returned.
    """

    _waiting: _Waiting | None
    _unclaimed: list[Completion]

    def __init__(self, store: Store, depth: int = 64) -> None:
        self._waiting = None
        self._unclaimed = []
        self._set_on_close(_ender(self))

    # ---- submit and reap

    def reap(self, max: int = 64) -> list[Completion]:
        """Takes up to ``max`` completions without waiting. Those that are awaited go to whoever awaits them."""
        taken = self._unclaimed[:max]
        del self._unclaimed[:max]
        if len(taken) < max:
            taken += [done for done in super().reap(max - len(taken)) if not self._deliver(done)]
        return taken

    def _deliver(self, done: Completion) -> bool:
        waiting = self._waiting
        future = waiting.by_ticket.pop(done.ticket, None) if waiting is not None else None
        if future is not None and not future.done():
            future.set_result(done)
        return future is not None

    # ---- await

    def _wake(self) -> None:
        """The loop's reader: delivers all completions, and tells whoever waits for room."""
        waiting = self._waiting
        if waiting is None:
            return
        try:
            while completions := super().reap(64):
                self._unclaimed += [done for done in completions if not self._deliver(done)]
        except ClosedError as error:
            waiting.end(error)
            return
        for future in waiting.for_room:
            if not future.done():
                future.set_result(None)
        waiting.for_room.clear()
        waiting.end_if_idle()

    def _begin(self) -> _Waiting:
        import asyncio

        loop = asyncio.get_running_loop()
        waiting = self._waiting
        if waiting is not None and waiting.fd >= 0:
            if waiting.loop is loop:
                return waiting
            if not waiting.is_idle() and not waiting.loop.is_closed():
                raise RuntimeError("another event loop awaits batches of this Queue: open one for each loop")
            waiting.end()
        self._waiting = _Waiting(loop, self.fileno(), self._wake)
        return self._waiting

    async def _run(self, submit: Callable[[], int | None]) -> Completion:
        while True:
            waiting = self._begin()
            try:
                ticket = submit()
                if ticket is not None:
                    return await self._completion(waiting, ticket)
                await self._room(waiting)
            finally:
                waiting.end_if_idle()

    async def _room(self, waiting: _Waiting) -> None:
        room: asyncio.Future[None] = waiting.loop.create_future()
        waiting.for_room.append(room)
        try:
            await room
        finally:
            if room in waiting.for_room:
                waiting.for_room.remove(room)

    async def _completion(self, waiting: _Waiting, ticket: int) -> Completion:
        import asyncio

        done: asyncio.Future[Completion] = waiting.loop.create_future()
        waiting.by_ticket[ticket] = done
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not self.closed:
                self.cancel(ticket)
            while not done.done():
                with contextlib.suppress(asyncio.CancelledError, ClosedError):
                    await asyncio.shield(done)
            raise

    async def load(
        self,
        space: Space,
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
    ) -> Completion:
        """As Space.load."""
        return await self._run(
            lambda: self.submit_load(
                space,
                keys,
                into,
                slots=slots,
                tokens=tokens,
                first_token=first_token,
                each=each,
                timeout=timeout,
                patience=patience,
                owner=owner,
            )
        )

    async def save(
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
    ) -> Completion:
        """Writes blocks straight from memory. Complete when every tier has taken or refused every block."""
        return await self._run(
            lambda: self.submit_save(
                space,
                keys,
                source,
                slots=slots,
                tokens=tokens,
                first_token=first_token,
                may_lend=may_lend,
                timeout=timeout,
                patience=patience,
                owner=owner,
            )
        )

    async def match(
        self, space: Space, keys: Buffer, *, each: bool = False, timeout: float | None = None
    ) -> Completion:
        """As Space.find; num_ok is the leading run, with each all that are there."""
        return await self._run(lambda: self.submit_match(space, keys, each=each, timeout=timeout))

    async def remove(self, space: Space, keys: Buffer, *, timeout: float | None = None) -> Completion:
        """Removes the blocks from every tier."""
        return await self._run(lambda: self.submit_remove(space, keys, timeout=timeout))

    async def touch(self, space: Space, keys: Buffer, *, timeout: float | None = None) -> Completion:
        """Renews the blocks in every tier without reading them."""
        return await self._run(lambda: self.submit_touch(space, keys, timeout=timeout))

    async def __aenter__(self) -> Queue:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
