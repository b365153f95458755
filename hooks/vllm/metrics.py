"""kvshm's metrics in vLLM: where prompts came from, and what imports have brought.

They count an import when it has ended; ``vllm:external_prefix_cache_hits`` counts it before it is
known whether its blocks arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvshm.halves import (
    IMPORT_TIMES_TEXT,
    IMPORTED_BLOCKS,
    IMPORTED_TOKENS,
    LOADS_FAILED,
    PROMPT_TOKENS_TEXT,
    LoadResult,
)

from .imports.prompt_tokens import Sources

METRICS = {
    "imported_tokens": IMPORTED_TOKENS.meaning,
    "imported_blocks": IMPORTED_BLOCKS.meaning,
    "imported_bytes": "Bytes of these blocks, summed over ranks.",
    "loads": "Imports that have ended, successful or not.",
    "failed_loads": LOADS_FAILED.meaning,
}
"""The counters without labels of their own; vLLM shows each as ``vllm:kvshm_<name>_total``."""
PROMPTS, TIMES = "prompt_tokens", "import_seconds"
SOURCES = ("local", "peer", "computed")
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

Data: TypeAlias = dict[str, Any]
"""Numbers by name, lists of numbers, or dicts of either: their sum is that of each."""


@dataclass
class LoadStats(KVConnectorStats):
    """What has happened since the last LoadStats: METRICS and times by path if imports have ended,
    prompt tokens by source if requests were scheduled.  vLLM sends ``data`` to its API servers."""

    @classmethod
    def of(cls, ended: Sequence[LoadResult], prompts: Sources, block_size: int) -> LoadStats:
        """Return the sums of these loads and prompts.  ``block_size``: tokens per hash."""
        data: Data = {}
        if ended:
            data["imported_tokens"] = sum(load.length for load in ended) * block_size
            data["imported_blocks"] = sum(load.num_blocks for load in ended)
            data["imported_bytes"] = sum(load.nbytes for load in ended)
            data["loads"] = len(ended)
            data["failed_loads"] = sum(load.failed for load in ended)
        taken = [load.taken for load in ended if load.taken is not None]
        if taken:
            data[TIMES] = {str(path): [s for p, s in taken if p is path] for path, _ in taken}
        counted = {source: getattr(prompts, source) for source in SOURCES}
        if any(counted.values()):
            data[PROMPTS] = counted
        return cls(data)

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data.update(_sum(self.data, other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """vLLM logs these as ``name=value``, in one line for all connectors; the first has kvshm's
        name."""
        shown: dict[str, int | float] = {}
        if prompts := self.data.get(PROMPTS):
            shown["prompt tokens"] = sum(prompts.values())
            shown["from own cache"] = prompts["local"]
            shown["from other engines"] = prompts["peer"]
            shown["computed"] = prompts["computed"]
        if loads := self.data.get("loads"):
            shown["imports"] = loads
            shown["failed"] = self.data["failed_loads"]
            shown["MB"] = round(self.data["imported_bytes"] / 1e6, 1)
        if times := self.data.get(TIMES):
            shown["slowest ms"] = round(max(map(max, times.values())) * 1e3, 1)
        first = next(iter(shown), "")
        return {f"kvshm {name}" if name == first else name: shown[name] for name in shown}

    def is_empty(self) -> bool:
        return not self.data


def _sum(one: Any, other: Any) -> Any:
    """The sum of two Data, or of two values in them; changes neither."""
    if not isinstance(one, dict):
        return one + other
    names = {**one, **other}
    both = one.keys() & other.keys()
    return {n: _sum(one[n], other[n]) if n in both else value for n, value in names.items()}


class LoadMetrics(KVConnectorPromMetrics):
    """The metrics of all engines of an API server, each engine with its labels."""

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
        prompts = self._counter_cls(
            f"vllm:kvshm_{PROMPTS}", PROMPT_TOKENS_TEXT, labelnames=[*labelnames, "source"]
        )
        self._prompts = {
            (engine, source): prompts.labels(*values, source)
            for engine, values in per_engine_labelvalues.items()
            for source in SOURCES
        }
        self._times = self._histogram_cls(
            f"vllm:kvshm_{TIMES}",
            IMPORT_TIMES_TEXT,
            buckets=BUCKETS,
            labelnames=[*labelnames, "path"],
        )

    def observe(self, transfer_stats_data: Data, engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            if (counters := self._counters.get(name)) is not None:
                counters[engine_idx].inc(number)
        for source, number in transfer_stats_data.get(PROMPTS, {}).items():
            self._prompts[engine_idx, source].inc(number)
        for path, times in transfer_stats_data.get(TIMES, {}).items():
            histogram = self._times.labels(*self.per_engine_labelvalues[engine_idx], path)
            for seconds in times:
                histogram.observe(seconds)
