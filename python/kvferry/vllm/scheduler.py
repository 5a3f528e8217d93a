# SPDX-License-Identifier: Apache-2.0
"""The half in the scheduler's process: asks what is stored, and says what each step loads and saves."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kvferry
from kvferry.vllm import media
from kvferry.vllm.events import Announcer
from kvferry.vllm.identity import Adapters
from kvferry.vllm.influence import Facts
from kvferry.vllm.messages import Move, Report, Step, interleave, keys_of
from kvferry.vllm.plan import Planner
from kvferry.vllm.settings import Settings, Trace, log

WAIT = 0.002  # seconds: what a step may wait for answers, so that a store nearby answers within the step
IDLE_WAIT = 0.005  # seconds: what a step that computes nothing waits for them, instead of spinning
MAX_LOOKUPS = 4  # of one request, between two preemptions
# What a lookup says of a block that is not there, or has something else in its place. Other reasons are the store's.
NO_RECORD = ("absent", "other-tokens", "other-space", "checksum", "truncated", "version")


@dataclass(slots=True)
class Lookup:
    """The question how many blocks are stored from block `first` on."""

    first: int
    num: int
    started: float
    end: int | None = None
    """The first block that is not stored. None: there is no answer yet."""
    tier: int = 0
    """The slowest tier that has some of the blocks."""


@dataclass(slots=True)
class Tracked:
    """A request from its arrival to its end."""

    request: Any
    suffix: bytes
    media: list[media.Media]
    saved: int = 0
    """Blocks that some step was told to save."""
    lookup: Lookup | None = None
    lookups: int = 0
    preemptions: int = 0
    offered: int = 0
    """The block from which on the last answer offered to load."""
    failed: bool = False
    """A load has failed: the request computes. Asking again would fail again."""
    outdated: int | None = None
    """What the engine had computed at its last change of weights, by the number of preemptions until then: it is not
    saved, nor what builds on it. After another preemption all is computed anew."""


class Scheduler:
    """States of a request: looked up (once a scheduling, bounded), loading (the engine waits for the workers' report),
    computing (each step saves the blocks that it completes). Nothing here waits for more than WAIT."""

    def __init__(
        self,
        store: kvferry.Store,
        fields: Callable[[str, Sequence[Facts]], dict[str, str]],
        settings: Settings,
        planner: Planner,
        *,
        block_tokens: int,
        hash_tokens: int,
        ranks: int,
        loads: bool = True,
        saves: bool = True,
        shares_prefixes: bool = True,
        publishes: bool = False,
    ) -> None:
        """fields: those of the space, for an epoch and the machines of all ranks. hash_tokens: what one of the engine's
        hashes stands for; the last one in a block names it. shares_prefixes: the engine finds loaded blocks for other
        requests. publishes: the engine publishes KV events."""
        self._store, self._fields, self._settings = store, fields, settings
        self._block, self._ratio, self._ranks = block_tokens, block_tokens // hash_tokens, ranks
        self._loads, self._saves, self._shares = loads, saves, shares_prefixes
        self._queue = kvferry.Queue(store, 1024)
        self.announcer = Announcer(is_on=publishes, ranks=ranks, block_tokens=block_tokens)
        self._adapters, self._trace = Adapters(), Trace(settings.trace, "scheduler")
        self._planner = planner
        self._requests: dict[str, Tracked] = {}
        self._asked: dict[int, tuple[str, Lookup]] = {}  # by ticket
        self._loading: dict[str, bytes] = {}  # by request: the first hash that it loads
        self._lacking: set[bytes] = set()  # hashes that a lookup did not find, until a step saves them
        self._next = Step()
        self.promised: dict[str, array[int]] = {}
        """Pages by request: the engine waits for their load, and no step has begun it yet."""
        self._wait_left = WAIT
        self._machines: Sequence[Facts] = ()
        self._opened: kvferry.Space | None = None
        self._has_warned = False

    def meet(self, machines: Sequence[Facts]) -> None:
        """The workers have said what they compute with: from now on blocks have names. Raises ValueError or
        kvferry.Error: the engine can't be identified."""
        self._machines = machines
        self._open("")

    def _open(self, epoch: str) -> None:
        fields = self._fields(epoch, self._machines)
        self._opened = kvferry.Space(self._store, fields, block_tokens=self._block)
        self._next.fields = fields

    @property
    def _space(self) -> kvferry.Space:
        assert self._opened is not None, "no worker has said what it computes with"
        return self._opened

    # ---- a request

    def begin(self, request: Any) -> None:
        if self._opened is None:
            self._warn_of_silent_workers()
            return
        suffix, content = self._adapters.suffix(request), media.content_of(request)
        if suffix is not None and content is not None:
            self._requests[request.request_id] = Tracked(request, suffix, content)

    def _warn_of_silent_workers(self) -> None:
        if not self._has_warned:
            log.error("kvferry is off: vLLM has not passed on what the workers compute with. A connector around this "
                      "one must hand on set_xfer_handshake_metadata.")  # fmt: skip
        self._has_warned = True

    def end(self, request_id: str) -> None:
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._lacking.difference_update(map(bytes, tracked.request.block_hashes))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens after the first `computed` ones can be loaded; (None, False): ask again."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.failed or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        first = computed // self._block
        # At least one token is computed, and a call has at most MAX_BLOCKS keys.
        last = min((request.num_tokens - 1) // self._block, first + kvferry.MAX_BLOCKS // self._ranks)
        if first >= last or self._is_store_too_slow(tracked, last - first):
            return 0, False
        if self._is_loaded_by_another(tracked, first):
            return None, False
        end = self._stored_end(tracked, first, last)
        if end is None:
            return None, False
        num = max(0, min(end, last) - first)
        if num > 0 and self._is_store_too_slow(tracked, num):
            return 0, False
        tracked.offered = first
        return num * self._block, num > 0

    def _is_store_too_slow(self, tracked: Tracked, num: int) -> bool:
        """With the option `patience` each request tries."""
        tier = tracked.lookup.tier if tracked.lookup is not None else 0
        if self._settings.patience is not None or self._planner.plan(num, tier).kind != "compute":
            return False
        self._trace("left", request=tracked.request.request_id, why="too slow")
        return True

    def _is_loaded_by_another(self, tracked: Tracked, first: int) -> bool:
        """Then the engine has the block in a moment, and needs no second copy."""
        mine = tracked.request.request_id
        wanted = self._hash(tracked.request, first)
        return self._shares and any(wanted == hash_ and mine != of for of, hash_ in self._loading.items())

    def allocated(self, request: Any, slots: list[int], num_tokens: int) -> None:
        """The engine has pages for the blocks that were offered: `slots` are those of the whole request."""
        if num_tokens == 0:
            return
        num = num_tokens // self._block
        tracked = self._requests[request.request_id]
        first = tracked.offered
        self.promised[request.request_id] = array("q", slots[first : first + num])
        move = self._move(tracked, first, first + num, slots)
        move.timeout = self._settings.load_timeout
        plan = self._planner.plan(num, tracked.lookup.tier if tracked.lookup is not None else 0)
        move.patience = self._settings.patience or self._planner.patience(plan)
        move.block_seconds = plan.compute_seconds / num or None
        self.announcer.expect_load(move)
        self._next.loads.append(move)
        self._next.fence.extend(move.slots)
        self._loading[request.request_id] = move.hashes[0]

    # ---- lookups

    def _stored_end(self, tracked: Tracked, first: int, last: int) -> int | None:
        if tracked.preemptions != tracked.request.num_preemptions:
            tracked.preemptions, tracked.lookups, tracked.lookup = tracked.request.num_preemptions, 0, None
        lookup = tracked.lookup
        if lookup is None or not lookup.first <= first:
            lookup = tracked.lookup = self._ask(tracked, first, last)
        if lookup.end is None:
            self._await_answers()
        return lookup.end

    def _ask(self, tracked: Tracked, first: int, last: int) -> Lookup:
        lookup = Lookup(first, last - first, time.monotonic())
        tracked.lookups += 1
        keys = self._keys(tracked, first, last) if tracked.lookups <= MAX_LOOKUPS else b""
        timeout = self._settings.lookup_timeout
        if self._settings.patience is None:
            timeout = self._planner.lookup_time(lookup.num * self._block, timeout)
        ticket = self._queue.submit_match(self._space, keys, timeout=timeout) if keys else None
        if ticket is None:
            lookup.end = first
        else:
            self._asked[ticket] = (tracked.request.request_id, lookup)
        return lookup

    def _keys(self, tracked: Tracked, first: int, last: int) -> bytes:
        names = self._names(tracked, first, self._hashes(tracked.request, first, last))
        return interleave([keys_of(self._space, names, tracked.suffix, rank) for rank in range(self._ranks)])

    def _await_answers(self) -> None:
        if self._asked and self._wait_left > 0:
            before = time.monotonic()
            self._queue.wait(self._wait_left)
            self._wait_left -= time.monotonic() - before
        self._take_answers()

    def _take_answers(self) -> None:
        for done in self._queue.reap():
            request_id, lookup = self._asked.pop(done.ticket)
            lookup.end = lookup.first + done.num_ok // self._ranks
            self._note_lacking(request_id, lookup, done.reasons)
            lookup.tier = max((found.tier for found in (done.found or ())[: done.num_ok]), default=0)
            why = next((reason for reason in done.reasons if reason is not None), None)
            took = time.monotonic() - lookup.started
            num = lookup.end - lookup.first
            self._trace(
                "lookup", request=request_id, first=lookup.first, of=lookup.num, stored=num, why=why, seconds=took
            )

    def _note_lacking(self, request_id: str, lookup: Lookup, reasons: tuple[str | None, ...]) -> None:
        """The workers have handles of the store of their own, which may still know what the store has lost."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            hashes = self._hashes(tracked.request, lookup.first, lookup.first + lookup.num)
            self._lacking.update(hashes[i // self._ranks] for i, reason in enumerate(reasons) if reason in NO_RECORD)

    # ---- a step

    def step(self, output: Any) -> Step:
        """What the workers have to do in the step that `output` describes."""
        step = self._next
        step.num_tokens = output.total_num_scheduled_tokens
        self._next = Step(fields=step.fields)
        self._add_new_pages(step, output)
        if self._saves:
            self._add_saves(step, output)
        if step.num_tokens == 0 and self._asked:
            self._queue.wait(IDLE_WAIT)
        self._take_answers()
        self._wait_left = WAIT
        self.promised = {}
        return step

    def _add_new_pages(self, step: Step, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            step.fence.extend(new.block_ids[0][new.num_computed_tokens // self._block :])
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks is not None:
                # The list of a resumed request is all of its pages. That of another is what it got anew.
                skip = computed // self._block if request_id in cached.resumed_req_ids else 0
                step.fence.extend(blocks[0][skip:])

    def _add_saves(self, step: Step, output: Any) -> None:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                whole = min(computed[request_id] + num, len(tracked.request.block_hashes) * self._hash_tokens())
                self._save_up_to(step, output, tracked, whole // self._block)

    def _save_up_to(self, step: Step, output: Any, tracked: Tracked, end: int) -> None:
        """Blocks from the beginning of the prompt on, also those that the engine had: known ones cost nothing."""
        if end > tracked.saved == 0 and tracked.suffix != self._adapters.suffix(tracked.request):
            self.end(tracked.request.request_id)  # its adapter's files have changed before they were used
            return
        end = min(end, tracked.saved + kvferry.MAX_BLOCKS)
        if end > tracked.saved and tracked.outdated != tracked.request.num_preemptions:
            slots = output.kv_connector_block_state.get_block_ids(tracked.request.request_id)[0]
            move = self._move(tracked, tracked.saved, end, slots)
            move.lacking = [i for i, hash_ in enumerate(move.hashes) if hash_ in self._lacking]
            self._lacking.difference_update(move.hashes)
            parent = self._hash(tracked.request, tracked.saved - 1) if tracked.saved > 0 else None
            self.announcer.expect(move, parent, tracked.request.lora_request)
            step.saves.append(move)
            tracked.saved = end

    def finished(self, output: Any) -> None:
        """What the workers report of a step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._take_report(report)
        for request_id in output.finished_recving or ():
            self._loading.pop(request_id, None)

    def _take_report(self, report: Report) -> None:
        self._planner.note_step(report.num_tokens, report.seconds)
        self.announcer.note(report.outcomes)
        if report.links:
            self._planner.note_links(report.links)
        for request_id in report.failed:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.failed = True
                tracked.saved = 0  # what was damaged is computed and saved anew

    def forget(self, epoch: str) -> None:
        """What was computed so far is not valid any more, such as after a change of the weights."""
        if self._opened is None:
            return
        self._open(epoch)
        self.announcer.forget()
        for tracked in self._requests.values():
            tracked.lookup, tracked.saved = None, 0
            if tracked.request.num_computed_tokens > 0:  # vLLM lets it go on with what it has
                tracked.outdated = tracked.request.num_preemptions

    def close(self) -> None:
        self._store.close()

    # ---- blocks of a request

    def _hash_tokens(self) -> int:
        return self._block // self._ratio

    def _hash(self, request: Any, block: int) -> bytes:
        return bytes(request.block_hashes[(block + 1) * self._ratio - 1])

    def _hashes(self, request: Any, first: int, end: int) -> list[bytes]:
        """The engine may hash units smaller than a block. The hash of the last unit names the block."""
        return [bytes(h) for h in request.block_hashes[self._ratio - 1 :: self._ratio][first:end]]

    def _names(self, tracked: Tracked, first: int, hashes: list[bytes]) -> list[bytes]:
        return media.names_of(hashes, tracked.media, first, self._block) if tracked.media else hashes

    def _move(self, tracked: Tracked, first: int, end: int, slots: list[int]) -> Move:
        hashes = self._hashes(tracked.request, first, end)
        return Move(
            request=tracked.request.request_id,
            hashes=hashes,
            names=self._names(tracked, first, hashes),
            suffix=tracked.suffix,
            slots=array("q", slots[first:end]),
            tokens=array("I", tracked.request.all_token_ids[first * self._block : end * self._block]),
            first_token=first * self._block,
            timeout=self._settings.save_timeout,
        )
