# SPDX-License-Identifier: Apache-2.0
"""KvferryClient: what LMCache's L2 adapter "native_plugin" calls, with the interface of LMCache's native clients.

One queue of kvferry does everything. LMCache calls `submit_batch_*` from any thread, and `drain_completions` from one
that watches `event_fd()`."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

from kvferry._adapter import Misses, Options, version_of, warn_of_version
from kvferry._kvferry import Completion, Queue, Space

log = logging.getLogger("kvferry.lmcache")

Report: TypeAlias = tuple[int, bool, str, list[bool] | None]
"""The id of a batch, whether it succeeded, what went wrong, and for each key whether it is there (a save: None)."""

TESTED = "0.5.6"
QUEUE_DEPTH = 4096
NOT = {"load": "not loaded", "save": "not saved", "match": "not looked up", "remove": "not removed"}


@dataclass(frozen=True, kw_only=True)
class ClientOptions(Options):
    """The options in "adapter_params". Times are seconds."""

    model: str
    """Which weights: a revision, a hash. LMCache's keys have only the model's name, which others may have."""
    kv: str
    """The dtype and the layout of the KV cache, such as "bfloat16": LMCache's keys have neither."""


class KvferryClient:
    """A native client of LMCache: batches are submitted, and their completions drained.

    A store that is down, slow or full makes misses of loads and lookups, and failures of saves; nothing raises because
    of it. Every batch ends within its timeout. A record that is damaged, of another length, or of other ``model`` and
    ``kv`` is a miss.

    Raises ValueError (options), kvferry.ConfigError (a URL, a password)."""

    def __init__(self, **options: object) -> None:
        warn_of_version(log, "LMCache", version_of("lmcache"), TESTED)
        self.options = ClientOptions.of(options)
        self._misses = Misses(log)
        self.store = self.options.open()
        fields = {"engine": f"lmcache-l2 {version_of('lmcache')}", "model": self.options.model, "kv": self.options.kv}
        self._space = Space(self.store, fields, block_tokens=1)  # the tokens of a chunk are not known here
        self._queue = Queue(self.store, QUEUE_DEPTH)
        # Batches that never got into the queue end here. Their ids are negative: the queue's tickets are not.
        self._refused: deque[Report] = deque()
        self._ids = count(-1, -1)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._queue.fileno(), select.EPOLLIN)
        self._poll.register(self._wake, select.EPOLLIN)
        urls = ", ".join(tier.url for tier in self.store.tiers())
        log.info("kvferry is on: L2 of LMCache %s, store %s", version_of("lmcache"), urls)

    def event_fd(self) -> int:
        """A descriptor that is readable while completions wait. Belongs to the client."""
        return self._poll.fileno()

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Reads whole values into the buffers, which are the client's until the completion. Returns its id.

        Raises ValueError: not one buffer for each key."""
        options = self.options
        return self._submit(
            keys,
            buffers,
            lambda: self._queue.submit_load(
                self._space,
                self._keys(keys),
                buffers,
                each=True,
                timeout=options.load_timeout,
                patience=options.patience,
            ),
        )

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> int:
        """Writes values straight from the buffers, which are the client's until the completion. Returns its id.

        Raises ValueError: not one buffer for each key."""
        options = self.options
        return self._submit(
            keys,
            buffers,
            lambda: self._queue.submit_save(
                self._space,
                self._keys(keys),
                buffers,
                may_lend=options.may_lend,
                timeout=options.save_timeout,
                patience=options.patience,
            ),
        )

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Asks for all keys in one round trip. Returns the id of the completion."""
        timeout = self.options.lookup_timeout
        return self._submit(
            keys,
            keys,
            lambda: self._queue.submit_match(self._space, self._keys(keys), each=True, timeout=timeout),
        )

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Removes the keys from every tier. Returns the id of the completion."""
        return self._submit(
            keys,
            keys,
            lambda: self._queue.submit_remove(self._space, self._keys(keys), timeout=self.options.save_timeout),
        )

    def drain_completions(self) -> list[Report]:
        """Takes what is complete, without waiting."""
        reports: list[Report] = []
        if self._queue.closed:
            return reports
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._refused:
            reports.append(self._refused.popleft())
        while completions := self._queue.reap(64):
            reports += map(self._report, completions)
        return reports

    def close(self) -> None:
        """Waits for batches under way, each of which has its timeout, and closes the store."""
        if self._queue.closed:
            return
        self._queue.close()
        self.store.close()
        self._poll.close()
        os.close(self._wake)

    def _keys(self, keys: Sequence[str]) -> bytes:
        return self._space.keys_of([key.encode(errors="surrogatepass") for key in keys])

    def _submit(self, keys: Sequence[str], buffers: Sequence[object], submit: Callable[[], int | None]) -> int:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: one for each is needed")
        ticket = submit() if keys else None
        return ticket if ticket is not None else self._refuse(len(keys))

    def _refuse(self, num: int) -> int:
        """Ends a batch that is empty, or for which the queue has no room, as if nothing were stored."""
        number = next(self._ids)
        self._misses.note("not moved", ["full"] * num)
        self._refused.append((number, num == 0, "" if num == 0 else "full", [False] * num))
        os.eventfd_write(self._wake, 1)
        return number

    def _report(self, done: Completion) -> Report:
        reasons = [f.why for f in done.found or ()] if done.op == "match" else done.reasons
        each = [why is None for why in reasons]
        if not all(each):
            self._misses.note(NOT[done.op], reasons)
        if done.op == "remove":  # what has been evicted is gone as well
            each = [why is None or why == "absent" for why in reasons]
        if done.op != "save":
            return done.ticket, True, "", each
        why = next((why for why in reasons if why is not None), None)
        return done.ticket, why is None, why or "", None
