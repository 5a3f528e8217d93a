# SPDX-License-Identifier: Apache-2.0
"""What the adapters of engines share: options, the store that they name, messages that do not flood a log."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ._kvferry import Store

T = TypeVar("T", bound="Options")

AT_MOST_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Checked values of the options that all adapters have. Times are seconds."""

    store: tuple[str, ...]
    """URLs of the store, fastest first: a string or a list (docs/stores.md). Without it: KVFERRY_STORE."""
    secret_files: str | None = None
    """A file with the secret that seals all records, or two as "NEW:OLD". Without it: KVFERRY_SECRET_FILE."""
    ttl: int | None = None
    """Seconds that a record lives in stores whose URL does not say it. None: as each kind of store does."""
    lookup_timeout: float = 1.0
    """How long a lookup may take at most."""
    load_timeout: float = 10.0
    """How long a load may take at most."""
    save_timeout: float = 10.0
    """How long a save may take before its blocks are dropped."""
    patience: float = 1.0
    """How long to wait for a server that has fallen silent."""
    may_lend: bool = True
    """Pages are lent to a server on a unix socket instead of copied (Queue.submit_save). After a save that failed, that
    server may see what the engine has put there since: KV that it is given anyway, if it is not sealed."""

    @classmethod
    def of(cls: type[T], options: Mapping[str, Any]) -> T:
        """Raises ValueError: an option that does not exist or is missing, or a value that can't be."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise ValueError(f"kvferry has no option {name!r}; its options are {', '.join(known)}")
        values = dict(options)
        values["store"] = urls_of(values.get("store"))
        values.setdefault("secret_files", os.environ.get("KVFERRY_SECRET_FILE"))
        for name, field in known.items():
            if field.type == "float" and name in values:
                values[name] = seconds(name, values[name])
            elif field.default is dataclasses.MISSING and name not in values:
                raise ValueError(f"kvferry needs the option {name!r}")
        return cls(**values)

    def open(self) -> Store:
        """Raises kvferry.ConfigError (a URL, a secret file, a password). A server that is down is not an error."""
        return Store([self._with_ttl(url) for url in self.store], secret_files=self.secret_files)

    def _with_ttl(self, url: str) -> str:
        if self.ttl is None or "ttl=" in url or url.startswith("mem:"):
            return url
        return f"{url}{'&' if '?' in url else '?'}ttl={self.ttl}"


def urls_of(value: Any) -> tuple[str, ...]:
    """The URLs of the option "store", or of KVFERRY_STORE. Raises ValueError: there are none."""
    urls = value if value else os.environ.get("KVFERRY_STORE", "").split()
    urls = [urls] if isinstance(urls, str) else urls
    if not urls or not isinstance(urls, (list, tuple)) or not all(isinstance(url, str) for url in urls):
        raise ValueError(
            'kvferry needs the option "store": a URL, or a list of URLs, such as ["redis://127.0.0.1:6379"]; '
            "or the environment variable KVFERRY_STORE"
        )
    return tuple(urls)


def seconds(name: str, value: Any) -> float:
    """Raises ValueError: it is no number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 3600:
        raise ValueError(f"kvferry: the option {name!r} is a number of seconds above 0 and up to 3600, not {value!r}")
    return float(value)


def version_of(package: str) -> str:
    """ "": it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def warn_of_version(log: logging.Logger, engine: str, found: str, tested: str) -> None:
    """Another version is tried."""
    if found.split("+")[0] != tested:
        log.warning("kvferry is tested with %s %s; this is %s", engine, tested, found or "unknown")


class Misses:
    """Blocks that were not loaded or not saved, by reason. The log has a line of each kind at most every 10 seconds.

    Any number of threads may use it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._waiting: dict[str, Counter[str]] = {}
        self._said: dict[str, float] = {}

    def note(self, what: str, reasons: Iterable[str | None]) -> None:
        """what: such as "not loaded". A reason None is no miss, and "absent" is not worth a line."""
        missed = Counter(why for why in reasons if why is not None and why not in ("absent", "after-gap"))
        if not missed:
            return
        with self._lock:
            waiting = self._waiting.setdefault(what, Counter())
            waiting.update(missed)
            if time.monotonic() - self._said.get(what, -AT_MOST_EVERY_S) < AT_MOST_EVERY_S:
                return
            self._said[what] = time.monotonic()
            self._waiting[what] = Counter()
        reasons_text = ", ".join(f"{why}: {num}" for why, num in waiting.most_common())
        self._log.warning("kvferry: %d blocks were %s (%s)", waiting.total(), what, reasons_text)
