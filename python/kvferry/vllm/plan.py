# SPDX-License-Identifier: Apache-2.0
"""Load or compute: how long a load may go on, so that it never costs much more than computing.

The rule is that of kvferry/plan.h, for an engine that loads first and then computes. A load has an account of seconds.
It begins with a small part of what computing its blocks takes. Each block that arrives adds a little less than what
computing that block takes, and the time that passes is subtracted. When the account is empty the load is given up: what
has arrived is used, and the rest is computed. So at any rate of the store the request takes at most that small part
longer, and a load that would win nothing ends soon even if the engine is faster than it seemed."""

import math
import time
from collections import deque

SHARE = 0.03  # of the compute time: what an account begins with, and what an answer to a lookup is waited for
MARGIN = 0.8  # of the compute time: what a load must take less than, since the pace is measured on a busy machine
LEAST_LOAD = 0.05  # seconds
LEAST_LOOKUP = 0.04  # seconds
GUESS = 1.0  # seconds: while the pace of the engine is not known, what a load may go on without a new block
SMALLEST = 32  # tokens: smaller steps say little about the pace
STEPS = 4  # of each size: the last ones count
MEMORY = 10.0  # seconds: how long a store that was too slow is left alone


class Pace:
    """How long the engine takes for a token of a prompt: as long as in the fastest of its last steps.

    The first step of an engine is many times slower, a small step is slower by the token, and other programs take
    turns: all of that makes a step look slower than computing is, and nothing makes it look faster. Steps of each size
    are kept apart, so that many small ones do not displace the large one that knows better."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}  # seconds for each token, by the size of the step as a power of two
        self.seconds_per_token: float | None = None

    def note(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= SMALLEST:
            steps = self._last.setdefault(num_tokens.bit_length(), deque(maxlen=STEPS))
            steps.append(seconds / num_tokens)
            self.seconds_per_token = min(map(min, self._last.values()))

    def compute_time(self, num_tokens: int) -> float | None:
        return None if self.seconds_per_token is None else num_tokens * self.seconds_per_token

    def lookup_time(self, num_tokens: int, most: float) -> float:
        compute = self.compute_time(num_tokens)
        return most if compute is None else min(most, max(LEAST_LOOKUP, SHARE * compute))

    def patience(self, num_tokens: int) -> float:
        compute = self.compute_time(num_tokens)
        return GUESS if compute is None else max(LEAST_LOAD, SHARE * compute)


class Link:
    """How fast blocks arrive, as the last load says that was given up. The store is left alone as long as that would be
    too slow again, and is tried anew after MEMORY: so many requests do not each pay for the same slow store."""

    def __init__(self) -> None:
        self._block_seconds, self._noted = 0.0, 0.0

    def note(self, block_seconds: float) -> None:
        """What a block took to arrive; math.inf: nothing arrived."""
        self._block_seconds, self._noted = block_seconds, time.monotonic()

    def is_too_slow(self, compute_block: float | None) -> bool:
        """compute_block: what computing a block takes. None: not known."""
        is_known = self._block_seconds > 0 and time.monotonic() - self._noted < MEMORY
        return is_known and compute_block is not None and self._block_seconds > MARGIN * compute_block


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


class Rate:
    """Of one load: how fast its bytes arrive, without the round trip before the first of them."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._began = self._last = time.monotonic()
        self._bytes = 0

    def note(self, num_bytes: int) -> None:
        self._last, self._bytes = time.monotonic(), num_bytes
        if self._first is None and num_bytes > 0:
            self._first = (self._last, num_bytes)

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes take; math.inf: none have arrived."""
        since, before = self._first or (self._began, 0)
        if self._bytes == before:
            since, before = self._began, 0
        return num_bytes * (self._last - since) / (self._bytes - before) if self._bytes > before else math.inf
