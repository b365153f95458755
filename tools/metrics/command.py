"""``kvshm metrics``: what the engines share, as metrics for Prometheus."""

from __future__ import annotations

import argparse
import sys
from math import isinf
from pathlib import Path

from kvshm.errors import ConfigError

from ..listening import DEFAULT_ADDRESS, parse_address
from ..node.reader import NodeReader
from ..options import add_selection, find_place
from ..output import show
from .definitions import METRICS
from .samples import Buckets, Samples, samples_of

HELP = "print metrics for Prometheus, or serve them"
DEFAULT_PORT = 9402


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what the engines' shared memory shows as metrics for Prometheus, write it to a "
        "file, or serve it. docs/metrics.md lists the metrics."
    )
    parser.epilog = (
        "exit status: 0, also when a signal ends it; 1 the file cannot be written, or the address "
        "not be listened on; 2 wrong command line or setting, or prometheus_client is missing"
    )
    add_selection(parser, engine=False)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--listen",
        metavar="[ADDR:]PORT",
        nargs="?",
        type=parse_address,
        const=(DEFAULT_ADDRESS, DEFAULT_PORT),
        help=f"serve them at /metrics (default: {DEFAULT_ADDRESS}:{DEFAULT_PORT})",
    )
    how.add_argument(
        "--output", metavar="FILE", type=Path, help="write them to a file, by renaming a new one"
    )


def run(asked: argparse.Namespace) -> int:
    if asked.json and (asked.listen or asked.output):
        raise ConfigError("--json prints; it does not go with --listen or --output")
    run_dir, namespace = find_place(asked)
    with NodeReader(run_dir, namespace) as reader:
        if asked.json:
            show(as_json(samples_of(reader.read())), lambda: (), as_json=True)
        else:
            _expose(asked, reader)
    return 0


def as_json(samples: Samples) -> dict[str, object]:
    return {
        name: {
            "type": str(METRICS[name].kind),
            "help": METRICS[name].help,
            "samples": [
                {"labels": dict(zip(METRICS[name].labels, labels, strict=True)), **_value(value)}
                for labels, value in series.items()
            ],
        }
        for name, series in samples.items()
    }


def _value(value: float | Buckets) -> dict[str, object]:
    if not isinstance(value, Buckets):
        return {"value": value}
    bounds = {"+Inf" if isinf(bound) else str(bound): n for bound, n in value.cumulated}
    return {"buckets": bounds, "count": value.cumulated[-1][1], "sum": value.total}


def _expose(asked: argparse.Namespace, reader: NodeReader) -> None:
    from . import exposition  # needs prometheus_client, as JSON does not

    def read() -> Samples:
        return samples_of(reader.read())

    if asked.output is not None:
        exposition.write_file(read(), asked.output)
    elif asked.listen is not None:
        from .server import MetricsServer

        try:
            MetricsServer(read, *asked.listen).serve("metrics", "/metrics")
        except UnicodeError as exc:  # of a name that cannot be one
            raise ConfigError(f"--listen={asked.listen[0]!r} is not an address") from exc
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(exposition.as_text(read()).encode())  # UTF-8 in any locale
