# SPDX-License-Identifier: Apache-2.0
"""What the secondary tier knows of keys that vLLM asks for one by one, again in each step."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from vllm.v1.kv_offload.base import LookupResult

MOST_LOADS = 2  # of one key, while a request asks for it


@dataclass(slots=True)
class Asked:
    """A key that at least one request asks for. RETRY: there is no answer yet."""

    answer: LookupResult = LookupResult.RETRY
    requests: set[str] = field(default_factory=set)
    loads: int = 0


class Answers:
    """An answer is kept as long as a request that asked for it. Then it is asked for anew."""

    def __init__(self) -> None:
        self._asked: dict[bytes, Asked] = {}
        self._keys: dict[str, set[bytes]] = {}  # by request
        self._new: dict[bytes, Asked] = {}  # nobody has asked the store for them yet

    def of(self, key: bytes, request: str) -> LookupResult:
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = self._new[key] = Asked()
        asked.requests.add(request)
        self._keys.setdefault(request, set()).add(key)
        return asked.answer

    def take_new(self, most: int) -> dict[bytes, Asked]:
        """Up to so many keys for one question to the store, in the order in which they were asked for."""
        taken = dict(islice(self._new.items(), most))
        for key in taken:
            del self._new[key]
        return taken

    def miss(self, keys: Iterable[bytes]) -> None:
        """A load has not found them. Without this vLLM would load them again and again."""
        for key in keys:
            if key in self._asked:
                self._asked[key].answer = LookupResult.MISS

    def loaded(self, keys: Iterable[bytes]) -> None:
        """The primary tier has them now. It is asked first, so a key that is asked for again has been evicted there. A
        prompt that does not fit into it would go round like this for ever: the engine computes such a key."""
        for key in keys:
            asked = self._asked.get(key)
            if asked is not None:
                asked.loads += 1
                asked.answer = LookupResult.MISS if asked.loads >= MOST_LOADS else asked.answer

    def end(self, request: str) -> None:
        for key in self._keys.pop(request, ()):
            asked = self._asked[key]
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[key]
                self._new.pop(key, None)

    def clear(self) -> None:
        """All that was answered so far is not valid any more."""
        self._asked.clear()
        self._keys.clear()
        self._new.clear()
