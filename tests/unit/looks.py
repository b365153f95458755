"""Readings of nodes that never were, for what judges and shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import Epoch
from kvshm._shm.histograms import NO_VALUES
from kvshm._shm.progress import LoopProgress
from kvshm._shm.statistics import Counter, Histogram
from kvshm._shm.traffic import Traffic
from kvshm.tools.node.reading import Blocks, EngineReading, NamespaceReading, NodeReading

SECOND = 1_000_000_000
START_NS = 1000 * SECOND
ALL_COUNTERS = {counter.label: 0 for counter in Counter.REGISTRY.values()}
NOTHING_OBSERVED = {h.label: NO_VALUES for h in Histogram.REGISTRY.values()}


def copied(
    epoch: int,
    nbytes: int,
    path: CopyPath = CopyPath.NVLINK,
    *,
    loads: int = 1,
    seconds: float = 1.0,
    peer: str = "",
) -> Traffic:
    """What was copied from an epoch, in so much time."""
    ns = round(seconds * SECOND)
    return Traffic(peer, epoch, path, loads, 0, nbytes >> 20, nbytes, nbytes, ns, START_NS)


def engine(
    epoch: int,
    *,
    counters: Mapping[str, int] | None = None,
    traffic: Sequence[Traffic] = (),
    at: float = 0.0,
    **others: object,
) -> EngineReading:
    now = START_NS + round(at * SECOND)
    loops = ("scheduler", "client", "loads of rank 0")
    fields = {
        "namespace": "n",
        "epoch": Epoch(epoch),
        "name": f"dp{epoch}",
        "label": f"dp{epoch}",
        "pid": 100 + epoch,
        "model": "m",
        "fingerprint": "00",
        "block_size": 16,
        "answers": True,
        "owner_died": False,
        "died": False,
        "retired": False,
        "life": (True,),
        "heartbeat": 1,
        "lease_bit": 0,
        "created_ns": START_NS,
        "blocks": Blocks(100, 50, 0, 3, 40, 30),
        "counters": ALL_COUNTERS | (counters or {}),
        "histograms": NOTHING_OBSERVED,
        "traffic": tuple(traffic),
        "progress": tuple(LoopProgress(loop, 0, now, loop == "scheduler") for loop in loops),
        "coordinator_ns": now,
        "joined": True,
        "loads_since": (),
        "errors": (),
    }
    return EngineReading(**(fields | others))


def node(*engines: EngineReading, at: float = 0.0, coordinated: bool = True) -> NodeReading:
    now = START_NS + round(at * SECOND)
    names = dict.fromkeys(each.namespace for each in engines)
    spaces = tuple(
        NamespaceReading(
            name, coordinated, coordinated, now, tuple(e for e in engines if e.namespace == name)
        )
        for name in names
    )
    return NodeReading(now, spaces, now)
