# SPDX-License-Identifier: Apache-2.0
"""The options of `kv_connector_extra_config`, and what is written about them and about each transfer."""

import json
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvferry._adapter import seconds, urls_of

log = logging.getLogger("vllm.kvferry")  # below "vllm", whose handlers and level vLLM sets


@dataclass(frozen=True)
class Settings:
    """Checked values of all options. Times are seconds."""

    store: tuple[str, ...]
    """URLs of the store, fastest first: a string or a list (docs/stores.md)."""
    secret_files: str | None = None
    """A file with the secret that seals all records, or two as "NEW:OLD" (docs/security.md)."""
    lookup_timeout: float = 0.25
    """How long a request may wait at most for the answer to what is stored of it."""
    load_timeout: float = 30.0
    """How long a load may take at most."""
    patience: float | None = None
    """What a load may cost at most if its blocks arrive too late. None: 3 % of the time that computing them takes."""
    save_timeout: float = 10.0
    """How long a save may take before its blocks are dropped."""
    staging_bytes: int = 1 << 30
    """Of pinned host memory in each worker, through which blocks go where the pages are a GPU's. A power of two, as
    torch pins no other sizes."""
    trace: str | None = None
    """A file to which every lookup, load and save is appended as a line of JSON."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Settings":
        """Raises ValueError: an option that does not exist, or a value that can't be."""
        names = [f.name for f in fields(cls)]
        for name in options:
            if name not in names:
                raise ValueError(f"kvferry has no option {name!r}; its options are {', '.join(names)}")
        values = dict(options)
        values["store"] = urls_of(values.get("store"))
        values.setdefault("secret_files", os.environ.get("KVFERRY_SECRET_FILE"))
        for name in ("lookup_timeout", "load_timeout", "save_timeout", "patience"):
            if values.get(name) is not None:
                values[name] = seconds(name, values[name])
        for name in ("secret_files", "trace"):
            if not isinstance(values.get(name), (str, type(None))):
                raise ValueError(f"kvferry: the option {name!r} is a path, not {values[name]!r}")
        size = values.get("staging_bytes", 1)
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"kvferry: staging_bytes is a number of bytes, not {size!r}")
        return cls(**values)


def without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.split('//')[0]}//...@{tail}" if at else url


class Trace:
    """Appends lines of JSON to a file. Several processes write to it: a line is one write."""

    def __init__(self, path: str | None, half: str) -> None:
        self._file = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115
        self._half = half

    def __call__(self, event: str, **values: Any) -> None:
        if self._file is not None:
            line = {"time": time.time(), "half": self._half, "event": event, **values}
            self._file.write(json.dumps(line).encode() + b"\n")


def share_handlers() -> None:
    """The messages of the library go where vLLM's go, unless the program has decided otherwise."""
    ours = logging.getLogger("kvferry")
    if not ours.handlers:
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
