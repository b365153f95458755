"""Samples in Prometheus' formats, as prometheus_client writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    generate_latest,
    write_to_textfile,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from kvshm.errors import ConfigError

from .definitions import METRICS, Kind
from .samples import Buckets, Samples

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of ``as_text``."""
_FAMILIES = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


class _Collector:
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        for name, series in self._samples.items():
            metric = METRICS[name]
            family = _FAMILIES[metric.kind](name, metric.help, labels=metric.labels)
            for labels, value in series.items():
                if isinstance(value, Buckets):
                    bounds = [(floatToGoString(bound), n) for bound, n in value.cumulated]
                    family.add_metric(labels, buckets=bounds, sum_value=value.total)
                else:
                    family.add_metric(labels, value)
            yield family


def registry_of(samples: Samples) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Collector(samples))
    return registry


def as_text(samples: Samples) -> str:
    return str(generate_latest(registry_of(samples)).decode())


def write_file(samples: Samples, path: Path) -> None:
    """Replace a file, or make it, at once.  Raises ConfigError or OSError."""
    if os.path.lexists(path) and not (path.is_file() and not path.is_symlink()):
        raise ConfigError(f"--output={path}: it is no regular file, and would be replaced by one")
    if not path.parent.is_dir():
        raise ConfigError(f"--output={path}: there is no directory {path.parent}")
    write_to_textfile(str(path), registry_of(samples))
