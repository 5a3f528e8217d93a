# SPDX-License-Identifier: Apache-2.0
"""The secondary tier of vLLM's own KV offloading: vLLM moves chunks between the GPU and its primary tier in the CPU's
memory, and KvferryTier moves them between that memory and a store (docs/vllm.md).

All of it runs in the scheduler's process. A chunk is a row of the primary tier: the pages of all layers and all ranks.
vLLM keeps a row for us from the submission of a job until its result, so no fence of our own is needed: a result is
given only when nobody touches the rows any more."""

import secrets
import sys
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import kvferry
from kvferry.vllm import identity
from kvferry.vllm.answers import Answers, Asked
from kvferry.vllm.guard import never_fails, nothing
from kvferry.vllm.plan import GUESS, Account
from kvferry.vllm.region import unlink_region
from kvferry.vllm.settings import Settings, Trace, log, share_handlers, without_password

SAVING_SHARE = 0.5  # of the rows of the primary tier: what several saves keep from vLLM at most
IDLE_STEP = 0.004  # seconds: a shorter step has computed nothing
IDLE_WAIT = 0.005  # seconds: what such a step waits for completions, instead of spinning
MOST_WAIT = 0.05  # seconds: what all steps together wait for one batch
DRAIN = 3.0  # seconds: what the end of the engine waits for saves; vLLM kills its processes after 5


@dataclass(slots=True)
class Flight:
    """A batch under way: a job of vLLM, or (job None) a question what is stored."""

    op: str
    job: TransferJob | None
    asked: dict[bytes, Asked]
    keys: list[bytes]
    started: float
    account: Account | None = None
    is_given_up: bool = False


class KvferryTier(SecondaryTierManager):
    """docs/vllm.md has the options. Raises ValueError at start: an option is wrong, or this engine is refused;
    kvferry.Error: the store's URL is wrong, or the model can't be identified."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        share_handlers()
        self.locality = None if locality is None else Locality(locality)
        self._settings = Settings.of(options)
        self._config, self._offload = _engine_config(), offloading_spec.config
        why = identity.tier_refusal(self._config)
        if why is not None:
            raise ValueError(f"kvferry does not support {why}. To start without it, leave out this secondary tier.")
        self._is_on = not identity.has_random_hashes(self._config)
        if not self._is_on:
            log.warning(identity.RANDOM_HASHES, self._config.cache_config.prefix_caching_hash_algo)
        changed = identity.changed_files(self._config)
        if changed is not None:
            log.warning("kvferry is off: %s.", changed)
            self._is_on = False
        identity.warn_of_version()
        self._publishes = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] = []
        self._trace = Trace(self._settings.trace, "tier")
        self._answers = Answers()
        self._flights: dict[int, Flight] = {}  # by ticket
        self._results: list[JobResult] = []
        self._saving = 0  # rows that saves keep
        self._requests: set[str] = set()
        self._outdated: set[str] = set()
        """Requests that had computed something at a change of the weights: what builds on it is not saved."""
        self._step_ended, self._wait_left = 0.0, 0.0
        self._open_store(primary_kv_view)
        self._open_space("")
        region = getattr(offloading_spec, "_scheduler_mmap", None)
        if region is not None:
            unlink_region(region.mmap_path, self._offload.parallel.world_size)
        log.info("kvferry tier is on: %d chunks of %d bytes, %s", self._view.num_slots, self._view.slot_bytes,
                 ", ".join(map(without_password, self._settings.store)))  # fmt: skip

    def _open_store(self, rows: memoryview) -> None:
        self._store = kvferry.Store(self._settings.store, secret_files=self._settings.secret_files, drain=1.0)
        self._queue = kvferry.Queue(self._store, 1024)
        memory = np.asarray(rows)  # of this function only: vLLM gives the memory back while nobody else holds it
        base, row = memory.__array_interface__["data"][0], self.block_size_bytes
        self._view = kvferry.View([(base, row, row, 0, 1)], memory.shape[0], owner=rows)

    def _open_space(self, epoch: str) -> None:
        fields = identity.tier_fields_of(self._config, self._offload, self.block_size_bytes, epoch)
        block = self._offload.cache.blocks_per_chunk * min(g.tokens_per_block for g in self._offload.groups)
        self._space = kvferry.Space(self._store, fields, block_tokens=block)

    def _turn_off(self, where: str) -> None:
        log.exception("kvferry is off: a fault of its own in the tier's %s. Please report it. The engine goes on with "
                      "its other tiers.", where)  # fmt: skip
        self._is_on = False
        self._queue.close()  # returns when nothing touches the rows any more
        for flight in self._flights.values():
            if flight.job is not None:
                self._results.append(JobResult(flight.job.job_id, False))
        self._flights.clear()

    # ---- requests and lookups

    @never_fails(RequestOffloadingContext)
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    @never_fails(nothing)
    def on_request_finished(self, req_context: Any) -> None:
        self._answers.end(req_context.req_id)
        self._requests.discard(req_context.req_id)
        self._outdated.discard(req_context.req_id)

    @never_fails(lambda: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return self._answers.of(key, req_context.req_id)

    @never_fails(nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """All keys that are new in this step are one question."""
        while asked := self._answers.take_new(kvferry.MAX_BLOCKS):
            self._ask(asked)
        self._give_up_late_loads()
        self._let_arrive()

    def _ask(self, asked: dict[bytes, Asked]) -> None:
        keys = list(asked)
        ticket = self._queue.submit_match(
            self._space, self._space.keys_of(keys), each=True, timeout=self._settings.lookup_timeout
        )
        flight = Flight("lookup", None, asked, keys, time.monotonic())
        if not self._took_off(ticket, flight):
            self._answer(flight, ["full"] * len(keys))

    def _let_arrive(self) -> None:
        """A step without anything to compute waits a moment, so that loads and saves have the core."""
        began = time.monotonic()
        if self._flights and began - self._step_ended < IDLE_STEP and self._wait_left > 0:
            self._queue.wait(min(IDLE_WAIT, self._wait_left))
            self._wait_left -= time.monotonic() - began
        self._step_ended = time.monotonic()

    # ---- jobs

    def submit_load(self, job_metadata: TransferJob) -> None:
        if not self._submit_load(job_metadata):
            self._results.append(JobResult(job_metadata.job_id, False))

    def submit_store(self, job_metadata: TransferJob) -> None:
        if not self._submit_save(job_metadata):
            self._results.append(JobResult(job_metadata.job_id, False))

    @never_fails(lambda: False)
    def _submit_load(self, job: TransferJob) -> bool:
        keys, patience = list(job.keys), self._settings.patience or GUESS
        ticket = None
        if len(keys) <= kvferry.MAX_BLOCKS:
            ticket = self._queue.submit_load(
                self._space,
                self._space.keys_of(keys),
                self._view,
                slots=array("q", map(int, job.chunk_ids)),
                arrivals=True,
                timeout=self._settings.load_timeout,
                patience=patience / 2,  # a silent server is tried twice
            )
        if not self._took_off(ticket, Flight("load", job, {}, keys, time.monotonic(), Account(patience, None))):
            self._answers.miss(keys)
            return False
        return True

    @never_fails(lambda: False)
    def _submit_save(self, job: TransferJob) -> bool:
        keys = list(job.keys)
        if job.req_context.req_id in self._outdated or not self._may_save(len(keys)):
            return False
        ticket = self._queue.submit_save(
            self._space,
            self._space.keys_of(keys),
            self._view,
            slots=array("q", map(int, job.chunk_ids)),
            timeout=self._settings.save_timeout,
        )
        return self._took_off(ticket, Flight("save", job, {}, keys, time.monotonic()))

    def _may_save(self, num: int) -> bool:
        is_too_much = self._saving > 0 and self._saving + num > SAVING_SHARE * self._view.num_slots
        return num <= kvferry.MAX_BLOCKS and not is_too_much

    def _took_off(self, ticket: int | None, flight: Flight) -> bool:
        if ticket is None:
            return False
        self._flights[ticket] = flight
        self._saving += len(flight.keys) if flight.op == "save" else 0
        self._wait_left = MOST_WAIT
        return True

    def _give_up_late_loads(self) -> None:
        for ticket, flight in self._flights.items():
            arrived = self._queue.arrived(ticket) if flight.account and not flight.is_given_up else None
            if arrived is not None and flight.account is not None and flight.account.is_empty(arrived[1].count(1)):
                self._queue.cancel(ticket)
                flight.is_given_up = True

    # ---- completions

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._land_all()
        results, self._results = self._results, []
        return results

    @never_fails(nothing)
    def _land_all(self) -> None:
        while completions := self._queue.reap():
            for done in completions:
                self._land(self._flights.pop(done.ticket), done)

    def _land(self, flight: Flight, done: kvferry.Completion) -> None:
        took = time.monotonic() - flight.started
        why = next((reason for reason in done.reasons if reason is not None), None)
        num_ok = sum(reason is None for reason in done.reasons)
        self._trace(flight.op, of=len(flight.keys), ok=num_ok, why=why, seconds=took)
        if flight.job is None:
            self._answer(flight, done.reasons)
            return
        good = [key for key, reason in zip(flight.keys, done.reasons, strict=True) if reason is None]
        if flight.op == "save":
            self._saving -= len(flight.keys)
            self._publish(good)
        else:
            self._answers.loaded(good)
        if flight.op == "load" and num_ok < len(flight.keys):
            log.warning("kvferry: %d chunks were not loaded (%s); the engine computes them", len(flight.keys) - num_ok,
                        "too late" if flight.is_given_up else why)  # fmt: skip
            self._answers.miss(set(flight.keys).difference(good))
        is_whole = num_ok == len(flight.keys)
        self._results.append(
            JobResult(
                flight.job.job_id,
                is_whole,
                successful_keys=good if flight.op == "load" and good and not is_whole else None,
                transfer_time=took,
                transfer_bytes=num_ok * self._view.slot_bytes,
            )
        )

    def _answer(self, flight: Flight, reasons: Iterable[str | None]) -> None:
        for asked, reason in zip(flight.asked.values(), reasons, strict=True):
            asked.answer = LookupResult.HIT if reason is None else LookupResult.MISS

    def has_pending_work(self) -> bool:
        return bool(self._flights) or bool(self._results)

    # ---- events

    def _publish(self, keys: list[Any]) -> None:
        if self._publishes and keys:
            self._events.append(OffloadingEvent(keys, self.medium, removed=False, locality=self.locality))

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    # ---- the end

    def drain_jobs(self) -> None:
        """vLLM calls this before it forgets what it has computed, such as after a change of the weights: from then on
        nothing is found that was stored before, and requests that run on save nothing more."""
        self._end_flights(cancel=True)
        self._forget()

    @never_fails(nothing)
    def _forget(self) -> None:
        self._open_space(secrets.token_hex(8))
        self._answers.clear()
        self._outdated |= self._requests

    @never_fails(nothing)
    def _end_flights(self, *, cancel: bool, within: float | None = None) -> None:
        """Each batch has its deadline. cancel: what has not begun does not begin."""
        end = None if within is None else time.monotonic() + within
        for ticket in self._flights if cancel else ():
            self._queue.cancel(ticket)
        self._land_all()
        while self._flights and (end is None or time.monotonic() < end):
            self._queue.wait(None if end is None else max(0.0, end - time.monotonic()))
            self._land_all()

    def shutdown(self) -> None:
        self._end_flights(cancel=False, within=DRAIN)
        self._end_flights(cancel=True, within=0.0)
        self._is_on = False
        self._queue.close()
        self._view.close()
        self._store.close()


def _engine_config() -> Any:
    """vLLM's whole configuration. A tier is given only a part, which does not tell the revision of the model, its
    quantization or the algorithm of the hashes. So it is taken from the caller that makes the tier. Raises
    RuntimeError: no caller has it."""
    config = get_current_vllm_config_or_none()
    frame: Any = sys._getframe(1)
    while config is None and frame is not None:
        config, frame = frame.f_locals.get("vllm_config"), frame.f_back
    if config is None:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__} does not tell kvferry {kvferry.__version__} its configuration, which names the "
            f"model. Use vLLM {', '.join(identity.TESTED)}, or a newer kvferry."
        )
    return config
