# SPDX-License-Identifier: Apache-2.0
"""The half in each worker's process: moves blocks between the engine's pages and the store."""

import time
from array import array
from dataclasses import dataclass
from typing import Any

import kvferry
from kvferry.vllm import influence, staging
from kvferry.vllm.events import GONE
from kvferry.vllm.messages import Move, Outcome, Report, Step
from kvferry.vllm.metrics import Counters
from kvferry.vllm.pages import HostPages, Pages
from kvferry.vllm.plan import SMALLEST, Account
from kvferry.vllm.settings import Settings, Trace, log

IDLE_WAIT = 0.005  # seconds: what a step that computes nothing waits for loads, so that they have the core
LEAST_PATIENCE = 0.1  # seconds: a busy machine needs this much for any answer
SLOW_SAVE = 1.0  # seconds: while a save has been under way for longer, no other is begun: the store is slow
DRAIN = 3.0  # seconds: what the end of the engine waits for saves; vLLM kills its processes after 5


@dataclass(slots=True)
class Flight:
    """A batch under way."""

    move: Move
    is_load: bool
    started: float
    account: Account | None = None
    is_given_up: bool = False


class Worker:
    """Loads go into pages that the engine has set aside for them. Saves are of pages of whole blocks; before the engine
    writes such a page anew, `before_step` sees to it that nobody reads it any more. How they go is that of the pages:
    straight (pages.py), or through pinned memory where the pages are a device's (staging.py)."""

    def __init__(
        self,
        store: kvferry.Store,
        settings: Settings,
        *,
        block_tokens: int,
        rank: int,
        layers: list[str],
        num_blocks: int,
    ) -> None:
        self._store, self._settings = store, settings
        self._block, self._rank, self._layers, self._num_blocks = block_tokens, rank, layers, num_blocks
        self._queue = kvferry.Queue(store, 1024)
        self._trace, self.counters = Trace(settings.trace, f"worker {rank}"), Counters()
        self._flights: dict[int, Flight] = {}  # by ticket
        self._registered: Pages | None = None
        self._loaded: set[str] = set()  # requests whose load has ended since the last step
        self._bad: set[int] = set()  # pages that it has left without their block
        self._failed: set[str] = set()
        self._idle = False
        self._began = 0.0  # when the engine began to compute the step
        self._computed: tuple[int, float] = (0, 0.0)  # tokens and seconds of the last step, until they are reported
        self._has_loaded = False  # since the last report
        self._outcomes: list[Outcome] = []  # of the next report
        self._fields: dict[str, str] = {}
        self._opened: kvferry.Space | None = None

    @property
    def _space(self) -> kvferry.Space:
        assert self._opened is not None, "the scheduler has not named the space yet"
        return self._opened

    def register(self, caches: dict[str, Any]) -> None:
        """Takes the engine's pages. Raises ValueError: they are not as expected."""
        missing = [name for name in self._layers if name not in caches]
        if missing:
            raise ValueError(f"kvferry: the engine has no KV cache of its own for {missing}")
        ours = [caches[name] for name in self._layers]
        streams = staging.streams_of(ours[0].device)
        if streams is None:
            self._registered = HostPages(self._queue, caches, self._layers)
        else:
            self._registered = staging.DevicePages(
                self._queue, ours, self._num_blocks, streams, self._settings.staging_bytes
            )
        self._trace("pages", slots=self._pages.num_slots, slot_bytes=self._pages.slot_bytes)

    @property
    def _pages(self) -> Pages:
        assert self._registered is not None, "vLLM has not registered its KV caches"
        return self._registered

    def accelerator(self, config: Any) -> influence.Facts:
        """What a device computes with, and how its pages lie. Empty: the pages are the CPU's."""
        pages = self._registered
        if not isinstance(pages, staging.DevicePages):
            return {}
        return influence.accelerator(config, pages.device, self._layers, pages.layout)

    # ---- a step, in the order of the engine's calls

    def before_step(self, step: Step) -> None:
        if step.fields and step.fields != self._fields:
            self._fields = step.fields
            self._opened = kvferry.Space(self._store, step.fields, block_tokens=self._block)
        self._fence(step)
        self._began = time.monotonic()

    def _fence(self, step: Step) -> None:
        """The last moment before the step's new pages are written. Saves that still read them end first: they have
        deadlines, and those that have not begun are dropped."""
        saves = [(ticket, f) for ticket, f in self._flights.items() if not f.is_load]
        if not saves or not (step.fence or step.is_last):
            return
        fenced = set(step.fence).union(*[f.move.slots for _, f in saves] if step.is_last else [])
        reading = [(ticket, fenced.intersection(f.move.slots)) for ticket, f in saves]
        slots = sorted(set().union(*[shared for _, shared in reading]))
        if not slots:
            return
        began = time.monotonic()
        for ticket, shared in reading:
            if shared and self._pages.reads_in_place:
                self._pages.cancel(ticket)
        while not self._pages.fence(array("q", slots), timeout=self._settings.save_timeout):
            log.warning("kvferry: a save still reads pages that the engine wants to write; waiting for it")
        self._trace("fence", slots=len(slots), seconds=time.monotonic() - began)

    def start_loads(self, step: Step) -> None:
        for move in step.loads:
            if not self._submit_load(move):
                self._end_load(move, 0, "full")

    def refuse_loads(self, step: Step) -> None:
        """Reports all loads of a step as missing, instead of doing them. The engine waits for each."""
        for request, slots in [*step.stranded.items(), *((move.request, move.slots) for move in step.loads)]:
            self._bad.update(slots)
            self._failed.add(request)
            self._loaded.add(request)

    def _submit_load(self, move: Move) -> bool:
        ticket = self._pages.load(
            self._space,
            move.keys(self._space, self._rank),
            move.slots,
            tokens=move.tokens,
            first_token=move.first_token,
            timeout=move.timeout,
            patience=max(LEAST_PATIENCE, move.patience / 2),  # a silent server is tried twice
        )
        account = Account(move.patience, move.block_seconds)
        return self._took_off(ticket, Flight(move, True, time.monotonic(), account))

    def start_saves(self, step: Step) -> None:
        if step.num_tokens >= SMALLEST:
            self._computed = (step.num_tokens, time.monotonic() - self._began)
        is_slow = self._is_saving_slowly()
        for move in step.saves:
            keys = move.keys(self._space, self._rank)
            self._space.forget(b"".join(keys[i * kvferry.KEY_BYTES :][: kvferry.KEY_BYTES] for i in move.lacking))
            if is_slow:
                self._shed(move)
                continue
            ticket = self._pages.save(
                self._space,
                keys,
                move.slots,
                tokens=move.tokens,
                first_token=move.first_token,
                timeout=move.timeout,
            )
            if not self._took_off(ticket, Flight(move, False, time.monotonic())):
                self._shed(move)
        self._idle = step.num_tokens == 0

    def _is_saving_slowly(self) -> bool:
        """Saves read the engine's memory and take its cores. A store that does not keep up gets them one at a time."""
        now = time.monotonic()
        return any(not f.is_load and now - f.started > SLOW_SAVE for f in self._flights.values())

    def _shed(self, move: Move) -> None:
        """Another request with these blocks saves them."""
        self._trace("shed", request=move.request, of=len(move.slots))
        self.counters.add("save_failures", len(move.slots))
        if move.number:
            self._outcomes.append(Outcome(move.number))

    def _took_off(self, ticket: int | None, flight: Flight) -> bool:
        if ticket is not None:
            self._flights[ticket] = flight
        return ticket is not None

    def finished_loads(self) -> set[str]:
        """Requests whose load has ended, well or not. Waits a moment if there is nothing else to do."""
        end = time.monotonic() + (IDLE_WAIT if self._idle else 0)
        self._land_all()
        while (
            not self._loaded and any(f.is_load for f in self._flights.values()) and (left := end - time.monotonic()) > 0
        ):
            self._pages.wait(left)
            self._land_all()
        self._give_up_late_loads()
        return self.take_loaded()

    def _give_up_late_loads(self) -> None:
        for ticket, flight in self._flights.items():
            arrived = self._pages.arrived(ticket) if flight.is_load and not flight.is_given_up else None
            if arrived is not None and flight.account is not None and flight.account.is_empty(arrived):
                self._pages.cancel(ticket)
                flight.is_given_up = True

    def take_loaded(self) -> set[str]:
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_bad_pages(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def take_report(self) -> Report | None:
        failed, self._failed = self._failed, set()
        (num_tokens, seconds), self._computed = self._computed, (0, 0.0)
        tiers = range(self._store.num_tiers) if self._has_loaded else ()
        self._has_loaded = False
        links = [self._store.link(tier) for tier in tiers]
        outcomes, self._outcomes = self._outcomes, []
        is_empty = not (failed or num_tokens or links or outcomes)
        return None if is_empty else Report(failed, num_tokens, seconds, links, outcomes)

    # ---- completions

    def _land_all(self) -> None:
        for done in self._registered.reap() if self._registered is not None else ():
            self._land(self._flights.pop(done.ticket), done)

    def _land(self, flight: Flight, done: kvferry.Completion) -> None:
        move, took = flight.move, time.monotonic() - flight.started
        first_bad, why = next(((i, r) for i, r in enumerate(done.reasons) if r is not None), (len(move.slots), None))
        num_ok = first_bad if flight.is_load else done.num_ok
        self._note(flight, num_ok, why, took)
        self._keep_outcome(flight, done, num_ok, why)
        if flight.is_load:
            self._has_loaded = True
            self._end_load(move, num_ok, "too late" if flight.is_given_up else why)

    def _keep_outcome(self, flight: Flight, done: kvferry.Completion, num_ok: int, why: str | None) -> None:
        move = flight.move
        if move.number and not flight.is_load:
            self._outcomes.append(Outcome(move.number, stored=[i for i, r in enumerate(done.reasons) if r is None]))
        elif move.number and why in GONE:
            self._outcomes.append(Outcome(move.number, gone=move.hashes[num_ok : num_ok + 1]))

    def _end_load(self, move: Move, num_ok: int, why: str | None) -> None:
        missing = len(move.slots) - num_ok
        if missing > 0:
            log.warning("kvferry: %d blocks were not loaded (%s); the engine computes them", missing, why)
            self.counters.add("load_failures", missing)
            self._bad.update(move.slots[num_ok:])
            self._failed.add(move.request)
        self._loaded.add(move.request)

    def _note(self, flight: Flight, num_ok: int, why: str | None, took: float) -> None:
        op, num, first = "load" if flight.is_load else "save", len(flight.move.slots), flight.move.first_token
        num_bytes = num_ok * self._pages.slot_bytes
        values = {"first": first // self._block, "of": num, "ok": num_ok, "why": why, "bytes": num_bytes}
        more = {"given_up": flight.is_given_up} if flight.is_load else {}
        self._trace(op, request=flight.move.request, **values, seconds=took, **more)
        if flight.is_load:
            self.counters.add("loaded_blocks", num_ok)
            self.counters.add("loaded_bytes", num_bytes)
            self.counters.add("load_seconds", took)
        else:
            self.counters.add("saved_blocks", num_ok)
            self.counters.add("saved_bytes", num_bytes)
            self.counters.add("save_failures", num - num_ok)

    # ---- the end

    def give_up(self) -> None:
        """After a fault of ours: waits until nothing touches the pages any more, and reports what was to be loaded as
        missing."""
        self._close_pages()
        for flight in self._flights.values():
            if flight.is_load:
                self._bad.update(flight.move.slots)
                self._failed.add(flight.move.request)
                self._loaded.add(flight.move.request)
        self._flights.clear()

    def close(self) -> None:
        end = time.monotonic() + DRAIN
        while self._flights and time.monotonic() < end:
            self._pages.wait(max(0.0, end - time.monotonic()))
            self._land_all()
        for ticket in self._flights:
            self._pages.cancel(ticket)
        self._close_pages()
        self._store.close()

    def _close_pages(self) -> None:
        (self._registered or self._queue).close()
