# SPDX-License-Identifier: Apache-2.0
"""How long a load may take: no longer than computing the same tokens would."""

import time

SMALLEST = 64  # tokens: smaller steps say little about the pace
LEAST = 0.5  # seconds: a busy machine may need this much for any load
UNKNOWN = 5.0  # seconds: a load's time while the pace is not known


class Pace:
    """Measures how long the engine takes for a token of a prompt."""

    def __init__(self) -> None:
        self._tokens = 0
        self._began = 0.0
        self._seconds_per_token = 0.0

    def begin(self, num_tokens: int) -> None:
        self._tokens, self._began = num_tokens, time.monotonic()

    def end(self) -> None:
        if self._tokens >= SMALLEST:
            last = (time.monotonic() - self._began) / self._tokens
            known = self._seconds_per_token
            self._seconds_per_token = last if known == 0.0 else 0.5 * known + 0.5 * last
        self._tokens = 0

    def compute_time(self, num_tokens: int) -> float | None:
        return num_tokens * self._seconds_per_token if self._seconds_per_token > 0.0 else None

    def load_timeout(self, num_tokens: int, most: float) -> float:
        compute = self.compute_time(num_tokens)
        return min(most, UNKNOWN if compute is None else max(LEAST, compute))

    def patience(self, num_tokens: int) -> float:
        """How long to wait for a server that has fallen silent."""
        return max(LEAST, 0.02 * (self.compute_time(num_tokens) or 0.0))
