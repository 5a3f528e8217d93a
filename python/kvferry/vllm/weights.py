# SPDX-License-Identifier: Apache-2.0
"""The identity of a model or an adapter: a hash of all bytes of its files.

Hashing gigabytes takes a while, so the hash of each file is remembered in the user's cache folder, under everything
that changes when its bytes do: device, inode, size, and the times of the last write and of the last inode change, which
no user can set back. engines/llama remembers GGUF files in the same place, in the same way."""

import fcntl
import hashlib
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path

from kvferry.vllm.settings import log

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Files of a model's folder that do not change what is computed from given tokens.
OTHER = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|generation_config|chat_template|training_args)"
)
SETTLED = 3.0  # seconds: a file written a moment ago may be written again within the resolution of its times


def folder_digest(folder: str) -> str:
    """A hash of all files in the folder that decide what is computed: weights, configuration, code.

    Raises ValueError: there are no weights in it, or a file can't be read or changes meanwhile."""
    files = sorted(p for p in Path(folder).iterdir() if _matters(p))
    if not any(p.suffix in WEIGHTS for p in files):
        raise ValueError(f"there are no weights in {folder} to identify the model by")
    try:
        with ThreadPoolExecutor(4) as pool:
            hashes = list(pool.map(_file_digest, files))
    except OSError as error:
        raise ValueError(f"the model can't be read to identify it: {error}") from error
    return _hex("".join(f"{digest} {p.name}\n" for digest, p in zip(hashes, files, strict=True)))


def _matters(path: Path) -> bool:
    kind = path.suffix in WEIGHTS or path.suffix in (".json", ".py", ".model")
    return kind and not OTHER.match(path.name) and path.is_file()


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        stat = os.fstat(file.fileno())
        memo = _memo_folder() / _hex(_identity(stat))
        with _Turn(memo.parent, stat):
            return _recall(memo) or _compute(file, path, stat, memo)


def _identity(s: os.stat_result) -> str:
    def nanoseconds(ns: int) -> str:
        return f"{ns // 10**9}.{ns % 10**9:09d}"

    return f"{s.st_dev} {s.st_ino} {s.st_size} {nanoseconds(s.st_mtime_ns)} {nanoseconds(s.st_ctime_ns)}"


def _memo_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if cache.startswith("/") else Path.home() / ".cache"
    return base / "kvferry" / "hashes"


class _Turn:
    """Of several ranks that want the hash of a large file, one computes it, and the others wait for that."""

    def __init__(self, folder: Path, stat: os.stat_result) -> None:
        self._fd = -1
        if stat.st_size >= 1 << 24:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = os.open(folder / f".lock-{stat.st_ino % 64}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError:
                pass  # nothing can be remembered here: each computes it

    def __enter__(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _recall(memo: Path) -> str | None:
    try:
        text = memo.read_text().strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def _compute(file: BufferedReader, path: Path, stat: os.stat_result, memo: Path) -> str:
    if stat.st_size >= 1 << 30:
        log.info("kvferry: hashing %s (%.1f GB) once, to identify the model", path, stat.st_size / 1e9)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _identity(os.stat(path)) != _identity(stat):
        raise ValueError(f"the model's file changes while it is read to identify it: {path}")
    if time.time() - stat.st_ctime > SETTLED:
        _remember(memo, digest)
    return digest


def _remember(memo: Path, digest: str) -> None:
    """Under a temporary name and renamed, so that nobody reads half of it. A failure costs one more hashing later."""
    aside = memo.with_name(f"{memo.name}.{os.getpid()}")
    try:
        memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside.write_text(digest + "\n")
        os.replace(aside, memo)
    except OSError:
        aside.unlink(missing_ok=True)
