# SPDX-License-Identifier: Apache-2.0
"""The files of a model, and their hashes.

Hashing gigabytes takes seconds, so a hash is remembered in the user's cache folder, where the C engine for llama.cpp
keeps its own (engines/llama/model/weights.c), under everything that changes when a file's bytes do: device, inode,
size, and the times of the last write and of the last inode change, which no user can set back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from typing import TypeAlias

from ._kvferry import RefusedError

Identity: TypeAlias = tuple[int, int, int, int, int]
"""What changes when the bytes of a file do."""
Files: TypeAlias = tuple[tuple[str, Identity], ...]
"""The files of a model as they were at a time."""

SETTLED_S = 2
"""A file that was written a moment ago may be written again within the resolution of its times."""

_hashes: dict[Identity, str] = {}


def identity_of(st: os.stat_result) -> Identity:
    return st.st_dev, st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns


def files_of(path: str) -> Files | None:
    """The file at this path, or all parts of a split GGUF model, given the first. None: one can't be found."""
    paths = [path]
    split = re.fullmatch(r"(.*-)00001(-of-(\d{5})\.gguf)", path, re.DOTALL)
    if split is not None:
        paths = [f"{split[1]}{i:05}{split[2]}" for i in range(1, int(split[3]) + 1)]
    try:
        return tuple((p, identity_of(os.stat(p))) for p in paths)
    except OSError:
        return None


def hash_of(files: Files) -> str:
    """64 hex digits: the SHA-256 of a file, or of the hashes of all parts. Raises RefusedError if the files are no
    longer what they were, or can't be read."""
    hashes = [file_hash(path) for path, _ in files]
    if files_of(files[0][0]) != files:
        raise RefusedError(f"the file has changed since it was loaded: {files[0][0]}")
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def file_hash(path: str) -> str:
    """64 hex digits: the SHA-256 of a file. Raises RefusedError if it changes meanwhile, or can't be read."""
    try:
        with open(path, "rb") as file:
            identity = identity_of(os.fstat(file.fileno()))
            digest = _hashes.get(identity) or _recall(identity)
            if digest is None:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if identity_of(os.fstat(file.fileno())) != identity:
                    raise RefusedError(f"the file changed while it was read to identify it: {path}")
                _remember(identity, digest)
            _hashes[identity] = digest
            return digest
    except OSError as error:
        raise RefusedError(f"the file can't be read to identify it: {path}: {error.strerror}") from error


def cache_folder() -> str:
    """Of the user, for all programs."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return cache if cache.startswith("/") else os.path.expanduser("~/.cache")


def _memo_path(identity: Identity) -> str:
    dev, ino, size, mtime, ctime = identity
    text = f"{dev} {ino} {size} {mtime // 10**9}.{mtime % 10**9:09} {ctime // 10**9}.{ctime % 10**9:09}"
    return os.path.join(cache_folder(), "kvferry", "hashes", hashlib.sha256(text.encode()).hexdigest())


def _recall(identity: Identity) -> str | None:
    with contextlib.suppress(OSError), open(_memo_path(identity), encoding="ascii", errors="replace") as memo:
        line = memo.readline(80).rstrip("\n")
        return line if re.fullmatch("[0-9a-f]{64}", line) else None
    return None


def _remember(identity: Identity, digest: str) -> None:
    """Written under a temporary name and renamed, so that nobody reads half of it."""
    if time.time() - identity[4] / 1e9 <= SETTLED_S:
        return
    path = _memo_path(identity)
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        aside = f"{path}.{os.getpid()}.py"
        with open(aside, "w", encoding="ascii") as out:
            out.write(digest + "\n")
        os.replace(aside, path)
