# SPDX-License-Identifier: Apache-2.0
"""Whole caches of many layers as lists of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from . import _arrays

Layers: TypeAlias = Any
"""A Cache of Transformers, a sequence of (keys, values) by layer, or a pair of arrays whose first axis is the layer."""

_WANTED = "a Cache of Transformers, a sequence of (keys, values) by layer, or a pair of arrays (keys, values)"


def keys_and_values(cache: Layers, name: str) -> tuple[Any, Any]:
    """The keys and the values of a cache: an array each, or a list of arrays each, one for every layer."""
    if hasattr(cache, "layers") and hasattr(cache, "get_seq_length"):
        pairs = [_pair_of_layer(cache, i, name) for i in range(len(cache.layers))]
    elif isinstance(cache, Sequence) and len(cache) == 2 and all(map(_arrays.is_array, cache)):
        return cache[0], cache[1]
    elif isinstance(cache, Sequence) and not _arrays.is_array(cache) and not isinstance(cache, str):
        pairs = [_pair(layer, i, name) for i, layer in enumerate(cache)]
    else:
        raise TypeError(f"{name} must be {_WANTED}, not {type(cache).__name__}")
    if not pairs:
        raise TypeError(f"{name} has no layers: {_WANTED} is expected")
    return [keys for keys, _ in pairs], [values for _, values in pairs]


def num_tokens(cache: Layers) -> int:
    """The number of tokens in a cache, if it tells; 0 = unknown."""
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


def _pair(layer: Any, i: int, name: str) -> tuple[Any, Any]:
    if not isinstance(layer, Sequence) or len(layer) != 2 or not all(map(_arrays.is_array, layer)):
        raise TypeError(f"{name}: layer {i} is no pair (keys, values) of arrays")
    return layer[0], layer[1]


def _pair_of_layer(cache: Any, i: int, name: str) -> tuple[Any, Any]:
    layer = cache.layers[i]
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or callable(keys):
        raise TypeError(f"{name}: layer {i} ({type(layer).__name__}) has no keys and values: run the model first")
    if getattr(layer, "is_sliding", False) or int(cache.get_seq_length(i)) != keys.shape[-2]:
        raise TypeError(
            f"{name}: layer {i} ({type(layer).__name__}) is more than its keys and values: use kvferry.hf.PrefixCache"
        )
    return keys, values
