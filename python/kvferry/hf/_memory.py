# SPDX-License-Identifier: Apache-2.0
"""Keys and values in memory: as the store reads and writes them, and as the caches of Transformers hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedCache,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .._kvferry import LimitError, RefusedError, View

# Only these are proven, and only as they are: another class, also one derived from them, may keep other state.
LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)

# Each full residual is quantised anew with all tokens before it. So what a layer holds for a token depends on the
# pieces in which all others came: it is no function of the tokens that name a block.
QUANTISED = "a quantised cache holds other bits for the same tokens when they come in other pieces, which is not proven"

Sink = Callable[[int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Shape:
    """One layer's keys or values: [rows, heads, tokens, width]."""

    heads: int
    width: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        return Shape(tensor.shape[1], tensor.shape[3], tensor.dtype)

    def empty(self, rows: int, tokens: int, device: torch.device) -> torch.Tensor:
        return torch.empty(rows, self.heads, tokens, self.width, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{self.heads}x{self.width} {str(self.dtype).removeprefix('torch.')}"


Shapes = list[tuple[Shape, Shape]]  # keys and values of each layer


class Recorder(DynamicCache):  # type: ignore[misc]
    """A dynamic cache that shows what each layer computes for new tokens, also what a sliding layer will not keep."""

    def __init__(self, config: Any, sink: Sink) -> None:
        super().__init__(config=config)
        self._sink = sink

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._sink(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def check(cache: Any) -> None:
    """Raises RefusedError for caches and layers that are not proven."""
    if isinstance(cache, QuantizedCache) or any(
        isinstance(layer, QuantizedLayer) for layer in getattr(cache, "layers", ())
    ):
        raise RefusedError(f"{QUANTISED}: give a DynamicCache or a StaticCache")
    if type(cache) not in (DynamicCache, StaticCache, Recorder) or getattr(cache, "offloading", False):
        kind = "offloaded " if getattr(cache, "offloading", False) else ""
        raise RefusedError(f"a {kind}{type(cache).__name__} is not proven: only DynamicCache and StaticCache are")
    for layer in cache.layers:
        if type(layer) not in LAYERS:
            raise RefusedError(
                f"layers of the kind {type(layer).__name__} are not proven, only full and sliding attention"
            )
        if getattr(layer, "record_past", False):
            raise RefusedError("a cache that records the past (assisted decoding) is not proven")


class Memory:
    """K and V of a batch in host memory, for each layer a pair of [rows, heads, room, width].

    Token t of a row with p tokens of padding is at p + t. A static cache on the CPU has its own tensors here."""

    def __init__(self, shapes: Shapes, rows: int, room: int, device: torch.device, cache: Any) -> None:
        self.device = device
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (k, v), layer in zip(shapes, cache.layers, strict=True):
            if type(layer) is StaticLayer and device.type == "cpu":
                start_static(layer, k.empty(rows, 0, device), v.empty(rows, 0, device), room)
                self.layers.append((layer.keys, layer.values))
            else:
                self.layers.append((k.empty(rows, room, torch.device("cpu")), v.empty(rows, room, torch.device("cpu"))))

    def view(self, row: int, start: int, num_blocks: int, block_tokens: int) -> View:
        """The blocks of a row as slots: one region for each layer's K and V, one run for each head."""
        return view_of([tensor for pair in self.layers for tensor in pair], row, start, num_blocks, block_tokens)

    def write(self, layer: int, row: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes new tokens of one row, [1, heads, tokens, width], from the device."""
        end = start + keys.shape[2]
        for target, source in zip(self.layers[layer], (keys, values), strict=True):
            target[row, :, start:end].copy_(source[0])

    def copy(self, row: int, start: int, other: int, other_start: int, tokens: int) -> None:
        """Gives a row the tokens of another one."""
        for pair in self.layers:
            for tensor in pair:
                tensor[row, :, start : start + tokens].copy_(tensor[other, :, other_start : other_start + tokens])

    def clear(self, row: int, start: int, end: int) -> None:
        """For padding and blocks that did not load: nobody attends to them, but zero times NaN is NaN."""
        for pair in self.layers:
            for tensor in pair:
                tensor[row, :, start:end].zero_()

    def fill(self, cache: Any, rows: slice, start: int, end: int) -> None:
        """Makes an empty cache hold the tokens from start to end."""
        for layer, pair in zip(cache.layers, self.layers, strict=True):
            keys, values = (tensor[rows, :, start:end].to(self.device) for tensor in pair)
            if type(layer) is StaticLayer and layer.keys is pair[0]:
                layer.cumulative_length.fill_(end)
            elif isinstance(layer, StaticLayer):
                layer.update(keys, values)
            else:
                fill_dynamic(layer, keys, values)


def start_static(layer: Any, keys: torch.Tensor, values: torch.Tensor, room: int) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    if layer.keys.shape[0] != keys.shape[0] or layer.max_cache_len < room:
        raise LimitError(
            f"the static cache has room for {layer.keys.shape[0]} prompts of {layer.max_cache_len} tokens: "
            f"make one for {keys.shape[0]} of {room} or more"
        )


def fill_dynamic(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """What the layer's update would keep, without its copy."""
    tokens = keys.shape[2]
    layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens
        keys, values = (tensor[:, :, -layer.sliding_window + 1 :] for tensor in (keys, values))
    layer.keys, layer.values = keys, values


def view_of(tensors: list[torch.Tensor], row: int, start: int, num_blocks: int, block_tokens: int) -> View:
    regions = []
    for tensor in tensors:
        size, (rows, heads, tokens, _) = tensor.element_size(), tensor.stride()
        address = tensor.data_ptr() + (row * rows + start * tokens) * size
        block = block_tokens * tokens * size
        regions.append((address, block, block, heads * size, tensor.shape[1]))
    return View(regions, num_blocks, tensors)


def kept(cache: Any) -> list[torch.Tensor]:
    """The K and V of a cache that somebody else filled, on the host: [rows, heads, tokens, width], dense within a head.
    Raises RefusedError if a sliding layer has dropped tokens already."""
    tensors = []
    for layer in cache.layers:
        length = int(layer.get_seq_length())
        if length > layer.keys.shape[2]:
            raise RefusedError(
                "a sliding layer has dropped tokens already: use prefill or generate, which store while they compute"
            )
        for tensor in (layer.keys, layer.values):
            host = tensor[:, :, :length].detach().cpu()
            tensors.append(host if host.stride()[2:] == (host.shape[3], 1) else host.contiguous())
    return tensors
