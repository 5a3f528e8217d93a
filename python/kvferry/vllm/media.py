# SPDX-License-Identifier: Apache-2.0
"""What a request's images, sounds and videos are: hashes of what the model is given of them.

The engine's hashes have the identifier of each. A client may choose it, as a UUID, alone or hashed with the options of
the processor: it can't be told from a hash of the content, and means something else to another client of the store."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Media:
    """One item of a prompt."""

    offset: int
    """The token at which it begins."""
    digest: bytes


def content_of(request: Any) -> list[Media] | None:
    """In the order of the prompt. None: the content of one is not here, leave the request alone."""
    items = []
    for feature in sorted(request.mm_features or (), key=lambda feature: feature.mm_position.offset):
        digest = _digest(feature.data.get_data()) if feature.data is not None else None
        if digest is None:
            return None
        items.append(Media(feature.mm_position.offset, digest))
    return items


def names_of(hashes: list[bytes], items: list[Media], first: int, block_tokens: int) -> list[bytes]:
    """The hashes of consecutive blocks, from block `first` on, each with the items that begin before its end."""
    names = []
    for block, hash_ in enumerate(hashes, first):
        seen = b"".join(item.digest for item in items if item.offset < (block + 1) * block_tokens)
        names.append(hashlib.sha256(hash_ + seen).digest() if seen else hash_)
    return names


def _digest(data: Any) -> bytes | None:
    """None: there is something in it that is not known here."""
    digest = hashlib.sha256()
    return digest.digest() if _update(digest, data) else None


def _update(digest: Any, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return True
    if isinstance(value, (bool, int, float, str)):
        digest.update(f"{value!r}\n".encode())
        return True
    if isinstance(value, dict):
        return all(_update(digest, f"{key}:") and _update(digest, value[key]) for key in sorted(value))
    if isinstance(value, (list, tuple)):
        digest.update(f"{len(value)} items\n".encode())
        return bool(value) and all(_update(digest, each) for each in value)
    return False
