"""Whether the growth of a replica's index stops anybody.

    .venv/bin/python benchmarks/bench_growth.py [--entries 4000000] [--batch 4096]

One thread, as an engine's client, applies events until the index has so many entries; it grows from
65,536 entries on.  Another one, as the scheduler, calls without a pause what a scheduler calls: a
lookup of 64 hashes, ``has_heard``, and now and then ``forget``.  Each has a core.

stall_ms   how long one round of the scheduler's calls took, what it stood still for want of the GIL
           included, what it waited for its core not (by /proc's schedstat, as other programs run):
           while the index grew, between two growths, and before anything was applied
grown_ms   how long each growth took; so long the client's thread, and nobody else, waits
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from measurement import percentiles, report

from kvshm._base.ids import Epoch, LeaseBit
from kvshm._replica.index import Replica
from kvshm._shm.layout import RecordKind, pack_records

INITIAL = 1 << 16
"""Entries of an engine's index at first."""
LOOKED_UP = 64
FORGET_EVERY = 1000
CALM_SECONDS = 2.0
LONG_SECONDS = 0.0005
"""Of a round that takes as long, it is asked how long of it the thread waited for its core."""


@dataclass
class Seen:
    """What the two threads have noted: begin and end, in seconds of one clock, and of rounds how
    much of it the thread did not wait for its core."""

    rounds: list[tuple[float, float, float]] = field(default_factory=list)
    growths: list[tuple[float, float]] = field(default_factory=list)
    capacities: list[int] = field(default_factory=list)


def batches(entries: int, size: int) -> list[bytes]:
    """Publishes of so many blocks of one engine, in batches."""
    dice = random.Random(0)
    return [
        pack_records(
            (dice.randbytes(32), block, 1, 0, RecordKind.PUBLISH, 0)
            for block in range(first, min(first + size, entries))
        )
        for first in range(0, entries, size)
    ]


def watch_growth(replica: Replica, seen: Seen) -> None:
    """Have each growth noted."""
    enlarge = replica._enlarge

    def noting() -> None:
        begin = time.monotonic()
        enlarge()
        seen.growths.append((begin, time.monotonic()))
        seen.capacities.append(replica.capacity)

    replica._enlarge = noting  # type: ignore[method-assign]  # the same, noted


def call_on(replica: Replica, row: int, hashes: list[bytes], over: threading.Event) -> Seen:
    """The scheduler's rounds until ``over``; the rest of them is that of the clock."""
    seen, number, queue = Seen(), 0, Queue()
    stale = pack_records([(hashes[0], 0, 0, 0, RecordKind.PUBLISH, 0)])
    before = time.monotonic()
    while not over.is_set():
        replica.lookup(hashes, 0, LOOKED_UP, 1 << row)
        replica.has_heard(row, number, 1)
        if number % FORGET_EVERY == 0:
            replica.forget(row, Epoch(7), stale)
        number += 1
        now = time.monotonic()
        took = now - before
        if took > LONG_SECONDS or number % FORGET_EVERY == 0:
            took = max(0.0, took - queue.waited())
        seen.rounds.append((before, now, took))
        before = time.monotonic()
    return seen


class Queue:
    """How long the calling thread has waited for its core."""

    def __init__(self) -> None:
        self._path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._seen = 0.0
        self.waited()

    def waited(self) -> float:
        """Seconds since the last call."""
        before, self._seen = self._seen, int(self._path.read_text().split()[1]) / 1e9
        return self._seen - before


def stalls(
    rounds: list[tuple[float, float, float]], growths: list[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """How long rounds took, in milliseconds: those that overlap a growth, and the others."""
    during: list[float] = []
    between: list[float] = []
    left = iter([*growths, (float("inf"), float("inf"))])
    begin, end = next(left)
    for started, ended, took in rounds:
        while end < started:
            begin, end = next(left)
        overlaps = started <= end and ended >= begin
        (during if overlaps else between).append(1000 * took)
    return during, between


def main() -> None:
    """Command line: print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entries", type=int, default=4_000_000)
    parser.add_argument("--batch", type=int, default=4096, help="records applied in one call")
    options = parser.parse_args()
    if options.entries < 2 * INITIAL or options.batch < 1:
        parser.error(f"the index grows from {INITIAL} entries on: wanted twice as many at least")
    gc.disable()  # it would look at millions of rounds
    cores = sorted(os.sched_getaffinity(0))
    replica = Replica.create("bench", "growth", Epoch(1), INITIAL)
    row = replica.add_row(Epoch(7), "peer", options.entries, LeaseBit(0))
    made = batches(options.entries, options.batch)
    hashes = [made[0][at : at + 32] for at in range(0, 48 * LOOKED_UP, 48)]
    seen, over = Seen(), threading.Event()
    watch_growth(replica, seen)

    def apply_all() -> None:
        os.sched_setaffinity(threading.get_native_id(), {cores[-1]})
        time.sleep(CALM_SECONDS)  # rounds to compare with
        applied.append(time.monotonic())
        for batch in made:
            replica.apply_all([(row, batch)])
        applied.append(time.monotonic())
        over.set()

    applied: list[float] = []
    writer = threading.Thread(target=apply_all)
    writer.start()
    os.sched_setaffinity(threading.get_native_id(), {cores[0]})
    rounds = call_on(replica, row, hashes, over).rounds
    writer.join()
    calm = [1000 * took for _, end, took in rounds if end < applied[0]]
    during, between = stalls([r for r in rounds if r[1] >= applied[0]], seen.growths)
    report(
        "growth", entries=replica.count, capacities=seen.capacities, unit="ms",
        stall_ms={"growing": percentiles(during), "applying": percentiles(between),
                  "alone": percentiles(calm)},
        longest_ms=round(max(during + between), 3),
        grown_ms=[round(1000 * (end - begin), 2) for begin, end in seen.growths],
        records_per_second=round(replica.count / (applied[1] - applied[0])),
        switch_interval_ms=1000 * sys.getswitchinterval(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
