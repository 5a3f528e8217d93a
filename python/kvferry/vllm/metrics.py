# SPDX-License-Identifier: Apache-2.0
"""Counters in vLLM's own interfaces: its log line "KV Transfer metrics" and its Prometheus page."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

NAMES = {
    "loaded_blocks": "Blocks that were loaded from the store into KV pages.",
    "loaded_bytes": "Bytes of these blocks.",
    "load_seconds": "Seconds from the beginning to the end of loads, of all loads together.",
    "load_failures": "Blocks that were to be loaded and were computed instead.",
    "saved_blocks": "Blocks that were written to the store, or that it was known to have.",
    "saved_bytes": "Bytes of these blocks.",
    "save_failures": "Blocks that were not written.",
}


@dataclass
class Counters:
    """What a worker has done since vLLM asked last."""

    data: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        assert name in NAMES, name
        if value:
            self.data[name] = self.data.get(name, 0) + value

    def take(self) -> "Stats | None":
        data, self.data = self.data, {}
        return Stats(data=data) if data else None


@dataclass
class Stats(KVConnectorStats):
    """The counters of one interval, of one worker or of several."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        d = self.data
        return {
            "blocks loaded": int(d.get("loaded_blocks", 0)),
            "not loaded": int(d.get("load_failures", 0)),
            "load GB/s": _rate(d.get("loaded_bytes", 0), d.get("load_seconds", 0)),
            "blocks saved": int(d.get("saved_blocks", 0)),
            "not saved": int(d.get("save_failures", 0)),
        }

    def is_empty(self) -> bool:
        return not self.data


def _rate(num_bytes: float, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 2) if seconds > 0 else 0.0


class PromMetrics(KVConnectorPromMetrics):
    """vllm:kvferry_NAME_total, one for each of NAMES."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in NAMES.items():
            counter = types[Counter](name=f"vllm:kvferry_{name}", documentation=text, labelnames=labels)
            self._counters[name] = {engine: counter.labels(*own) for engine, own in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)
