# SPDX-License-Identifier: Apache-2.0
"""Load or compute: what is worth loading, and how long a load may go on.

The decision is that of the library (kvferry.Pace, kvferry/plan.h). Here is what vLLM adds: which of its steps say how
fast it is, what is remembered of a store, and the account of a load. A load begins with a small part of what computing
its blocks takes. Each block that arrives adds a little less than what computing that block takes, and the time that
passes is subtracted. When the account is empty the load is given up: what has arrived is used, and the rest is
computed. So at any rate of the store the request takes at most that small part longer."""

import time
from collections import deque
from collections.abc import Sequence

import kvferry

MARGIN = 0.8  # of the compute time: what a load must take less than, since the pace is measured on a busy machine
SHARE = 0.03  # of the compute time: what an answer to a lookup is waited for
LEAST_LOAD = 0.05  # seconds
LEAST_LOOKUP = 0.04  # seconds
GUESS = 1.0  # seconds: while the pace of the engine is not known, what a load may go on without a new block
SMALLEST = 64  # tokens: smaller steps say little about the pace
STEPS = 4  # of each size: the last ones count
MEMORY = 10.0  # seconds: how long what a load has shown of the store is remembered

UNKNOWN = kvferry.Link((0.0, 0.0, False))


class Planner:
    """Of one engine: its pace, and the store's link as the workers have seen it last.

    The pace is that of the fastest of the last steps. The first step of an engine is many times slower, and other
    programs take turns: all of that makes a step look slower than computing is, and nothing makes it look faster."""

    def __init__(self, block_tokens: int, block_bytes: int, batch_tokens: int) -> None:
        """block_bytes: of one rank. batch_tokens: of the engine's largest step."""
        self._block, self._bytes, self._batch = block_tokens, block_bytes, batch_tokens
        self._last: dict[int, deque[tuple[float, int]]] = {}  # seconds a token, tokens; by the size as a power of two
        self.pace = kvferry.Pace()
        self._links: Sequence[kvferry.Link] = ()
        self._noted = 0.0

    def note_step(self, num_tokens: int, seconds: float) -> None:
        if num_tokens < SMALLEST:
            return
        steps = self._last.setdefault(num_tokens.bit_length(), deque(maxlen=STEPS))
        steps.append((seconds / num_tokens, num_tokens))
        self.pace = kvferry.Pace()
        for per_token, num in map(min, self._last.values()):
            self.pace.note(num, per_token * num)

    def note_links(self, links: Sequence[kvferry.Link]) -> None:
        """What the loads of the workers have measured, tier by tier."""
        self._links, self._noted = links, time.monotonic()

    def _link(self, tier: int) -> kvferry.Link:
        """So many requests do not each pay for the same slow store, and it is tried anew after a while."""
        is_known = tier < len(self._links) and time.monotonic() - self._noted < MEMORY
        return self._links[tier] if is_known else UNKNOWN

    def plan(self, num_blocks: int, tier: int) -> kvferry.Plan:
        """tier: the slowest that has some of the blocks. vLLM computes nothing of a request while it loads: so a gap
        is loaded whole, or not at all."""
        return self.pace.decide(
            num_blocks,
            block_bytes=int(self._bytes / MARGIN),
            block_tokens=self._block,
            batch_tokens=self._batch,
            link=self._link(tier),
            whole=True,
        )

    def lookup_time(self, num_tokens: int, most: float) -> float:
        """Seconds that the answer to a lookup is worth."""
        compute = self.pace.seconds(num_tokens, self._batch)
        return min(most, max(LEAST_LOOKUP, SHARE * compute)) if compute > 0 else most

    def patience(self, plan: kvferry.Plan) -> float:
        return max(LEAST_LOAD, plan.patience) if plan.compute_seconds > 0 else GUESS


def slowest(links: Sequence[kvferry.Link], others: Sequence[kvferry.Link]) -> list[kvferry.Link]:
    """Tier by tier the slower one of two ranks, as far as it is known."""
    if not links or not others:
        return list(links or others)
    return [max(pair, key=lambda link: (link.silent, 1 / link.bytes_per_s if link.bytes_per_s else 0.0))
            for pair in zip(links, others, strict=True)]  # fmt: skip


class Account:
    """Of one load, from its submission on."""

    def __init__(self, patience: float, block_seconds: float | None) -> None:
        """block_seconds: what computing a block takes. None: not known, and each arrival fills the account anew."""
        self._patience, self._block = patience, block_seconds
        self._left, self._seen, self._last = patience, 0, time.monotonic()

    def is_empty(self, arrived: int) -> bool:
        """arrived: how many blocks are there by now."""
        now, new = time.monotonic(), arrived - self._seen
        self._left -= now - self._last
        if self._block is None:
            self._left = self._patience if new > 0 else self._left
        else:
            self._left += new * MARGIN * self._block
        self._seen, self._last = arrived, now
        return self._left <= 0
