# SPDX-License-Identifier: Apache-2.0
"""Load or compute: how long a load may go on, so that it never costs much more than computing.

The rule is that of kvferry/plan.h, for an engine that loads first and then computes. A load has an account of seconds.
It begins with a small part of what computing its blocks takes. Each block that arrives adds what computing that block
takes, and the time that passes is subtracted. When the account is empty the load is given up: what has arrived is used,
and the rest is computed. So at any rate of the store the request takes at most that small part longer."""

import time

SHARE = 0.03  # of the compute time: what an account begins with, and what an answer to a lookup is waited for
LEAST_LOAD = 0.05  # seconds
LEAST_LOOKUP = 0.04  # seconds
GUESS = 1.0  # seconds: while the pace of the engine is not known, what a load may go on without a new block
SMALLEST = 64  # tokens: smaller steps say little about the pace


class Pace:
    """Measures how long the engine takes for a token of a prompt."""

    def __init__(self) -> None:
        self._tokens = 0
        self._began = 0.0
        self.seconds_per_token: float | None = None

    def begin(self, num_tokens: int) -> None:
        self._tokens, self._began = num_tokens, time.monotonic()

    def end(self) -> None:
        if self._tokens >= SMALLEST:
            last = (time.monotonic() - self._began) / self._tokens
            known = self.seconds_per_token
            self.seconds_per_token = last if known is None else 0.5 * known + 0.5 * last
        self._tokens = 0

    def compute_time(self, num_tokens: int) -> float | None:
        return None if self.seconds_per_token is None else num_tokens * self.seconds_per_token

    def lookup_time(self, num_tokens: int, most: float) -> float:
        compute = self.compute_time(num_tokens)
        return most if compute is None else min(most, max(LEAST_LOOKUP, SHARE * compute))

    def patience(self, num_tokens: int) -> float:
        compute = self.compute_time(num_tokens)
        return GUESS if compute is None else max(LEAST_LOAD, SHARE * compute)


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
            self._left += new * self._block
        self._seen, self._last = arrived, now
        return self._left <= 0
