# SPDX-License-Identifier: Apache-2.0
"""Keeps the engine safe from faults of our own: after one, kvferry is off, and the engine computes."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def never_fails(otherwise: Any) -> Callable[[F], F]:
    """A method that returns `otherwise()` while kvferry is off, and turns it off instead of raising. Its object has
    `_is_on`, and `_turn_off(where)`, which clears it."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_on:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self._turn_off(method.__name__)
            return otherwise()

        return guarded  # type: ignore[return-value]

    return decorate


def nothing() -> None:
    return None
