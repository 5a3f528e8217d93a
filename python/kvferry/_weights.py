# SPDX-License-Identifier: Apache-2.0
"""The files of a model, and their hashes.

Hashing gigabytes takes seconds, so a hash is remembered in the user's cache folder, where the C engine for llama.cpp
keeps its own (engines/llama/model/weights.c), under everything that changes when a file's bytes do: device, inode,
size, and the times of the last write and of the last inode change, which no user can set back."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from ._kvferry import RefusedError

Identity: TypeAlias = tuple[int, int, int, int, int]
"""What changes when the bytes of a file do."""
Files: TypeAlias = tuple[tuple[str, Identity], ...]
"""The files of a model as they were at a time."""

SETTLED_S = 2
"""A file that was written a moment ago may be written again within the resolution of its times."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Files of a model's folder that do not change what is computed from given tokens.
OTHER = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|generation_config|chat_template).*\.(json|model)|"
    r"training_args\.bin"
)
MANY_BYTES = 10**9

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


def folder_digest(folder: str, log: logging.Logger | None = None) -> str:
    """64 hex digits: a hash of all files in the folder that decide what is computed: weights, configuration, and code,
    also that in folders in it.

    Each file is hashed once, and remembered. Raises ValueError: there are no weights in it; kvferry.RefusedError: a
    file can't be read, or changes meanwhile."""
    files = sorted(_files_in(Path(folder)))
    if not any(path.suffix in WEIGHTS for path in files):
        raise ValueError(f"there are no weights in {folder} to identify the model by")
    num_bytes = sum(path.stat().st_size for path in files)
    if num_bytes >= MANY_BYTES:
        log = log or logging.getLogger("kvferry")
        log.info("kvferry: identifying the model by its %.1f GB of files, hashed once", num_bytes / 1e9)
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(file_hash, map(str, files)))
    lines = [f"{digest} {path.relative_to(folder)}\n" for digest, path in zip(hashes, files, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def changed_at(folder: str) -> float:
    """The time of the last change of one of these files, however their times were set. Raises OSError."""
    return max((path.stat().st_ctime for path in _files_in(Path(folder))), default=0.0)


def _files_in(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.iterdir() if _matters(path))
    yield from (path for path in folder.rglob("*.py") if path.parent != folder and path.is_file())


def _matters(path: Path) -> bool:
    kind = path.suffix in WEIGHTS or path.suffix in (".json", ".py", ".model")
    return kind and not OTHER.fullmatch(path.name) and path.is_file()


def model_folder(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """The folder of the model's files. A name of the Hugging Face hub is looked up in its cache, not in the network.
    cache: the folder of that cache, if it is not the usual one. Raises ValueError: they can't be found."""
    if os.path.isdir(model):
        return model
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception as error:
        raise ValueError(f"the files of {model} can't be found to identify it: {error}") from error


def is_one_of_many(model: str, folder: str) -> bool:
    """Whether the hub's cache has several revisions of the model, of which `folder` is one."""
    return not os.path.isdir(model) and len(os.listdir(os.path.dirname(folder))) > 1


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
