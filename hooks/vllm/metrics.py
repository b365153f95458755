"""kvshm's metrics in vLLM: how much was really loaded.

vLLM's own ``vllm:external_prefix_cache_hits`` counts an import when its blocks are allocated,
before it is known whether they arrive.  The metrics here count a load when it has ended.

::

    scheduler's process                      API server
    LoadPlanner.take_results -> LoadStats -> vLLM's SchedulerStats -> LoadMetrics -> /metrics
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvshm.halves import LoadResult

METRICS = {
    "imported_tokens": "Prompt tokens imported from other engines, without those of lost blocks.",
    "imported_blocks": "KV cache blocks that imports have filled.",
    "loads": "Imports that have ended, successful or not.",
    "failed_loads": "Imports that lost at least one block, which was then computed.",
}
"""The counters; vLLM shows each as ``vllm:kvshm_<name>_total``."""


@dataclass
class LoadStats(KVConnectorStats):
    """Sums over the loads that have ended since the last LoadStats: a number for each of METRICS.
    vLLM sends ``data`` from its engines to its API servers."""

    @classmethod
    def of(cls, ended: Sequence[LoadResult], block_size: int) -> LoadStats:
        """Return the sums of these loads.  ``block_size``: tokens per hash."""
        blocks = sum(load.num_blocks for load in ended)
        length = sum(load.length for load in ended)
        failed = sum(load.failed for load in ended)
        sums = {"imported_blocks": blocks, "loads": len(ended), "failed_loads": failed}
        return cls({"imported_tokens": length * block_size, **sums})

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvshm {name.replace('_', ' ')}": number for name, number in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class LoadMetrics(KVConnectorPromMetrics):
    """The counters of all engines of an API server, each engine with its labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:kvshm_{name}", text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in METRICS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            if (counters := self._counters.get(name)) is not None:
                counters[engine_idx].inc(number)
