# SPDX-License-Identifier: Apache-2.0
"""The identity of a model or an adapter: a hash of all bytes of its files."""

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry._weights import file_hash
from kvferry.vllm.settings import log

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Files of a model's folder that do not change what is computed from given tokens.
OTHER = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|generation_config|chat_template|training_args)"
)
MANY_BYTES = 10**9


def folder_digest(folder: str) -> str:
    """64 hex digits: a hash of all files in the folder that decide what is computed: weights, configuration, code.

    Each file is hashed once, and remembered. Raises ValueError: there are no weights in it; kvferry.RefusedError: a
    file can't be read, or changes meanwhile."""
    files = sorted(path for path in Path(folder).iterdir() if _matters(path))
    if not any(path.suffix in WEIGHTS for path in files):
        raise ValueError(f"there are no weights in {folder} to identify the model by")
    num_bytes = sum(path.stat().st_size for path in files)
    if num_bytes >= MANY_BYTES:
        log.info("kvferry: identifying the model by its %.1f GB of files, hashed once", num_bytes / 1e9)
    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(file_hash, map(str, files)))
    lines = [f"{digest} {path.name}\n" for digest, path in zip(hashes, files, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _matters(path: Path) -> bool:
    kind = path.suffix in WEIGHTS or path.suffix in (".json", ".py", ".model")
    return kind and not OTHER.match(path.name) and path.is_file()
