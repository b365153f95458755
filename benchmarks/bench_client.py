"""What a busy scheduler loses to the thread that hears of other engines' blocks, and how soon they
are known.

    .venv/bin/python benchmarks/bench_client.py [--rounds 30] [--hz 100] [--records 8]
    .venv/bin/python benchmarks/bench_client.py --crowd --hz 1000 --records 192 [--blocks 125000]

Eight engines without a model (a real slot table, replica and client each, and a real coordinator)
send ``--hz`` times a second a batch of ``--records`` records.  A ninth one's main thread runs a
loop in Python that never rests, as no scheduler is worse; it sends as much itself.  In turns of a
second the others send, or are silent.  It stands on core 0 and everybody else on core 1.
With ``--crowd`` the eight are one process, which listens to nobody and so can send more than eight
whole engines on one core.

lost_percent     of the wall's time, what that thread stood still for want of the GIL, or what the
                 client's thread ran if that was longer, and what libzmq's threads ran: by /proc's
                 schedstat, which tells waiting for a core from waiting for the GIL, so that other
                 programs on the machine hardly count
client_percent   of the wall's time, what the client's thread ran: where there is a core for each
                 thread, the scheduler loses no more than that
libzmq_percent   of the wall's time, what libzmq's threads ran, which need no GIL
wakeups_per_second  how often the client's thread woke up
records_heard_per_second  what was applied to its replica, of what was offered; ns_per_record of the
                 client's thread
known_ms         from a batch's sending until a lookup of the busy thread names it, in whole ms;
                 up to 60 ms of it a batch waits at its sender, and up to 50 in the coordinator
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from event_traffic import (
    BLOCKS,
    ENGINES,
    NAP_SECONDS,
    answer,
    batches,
    end,
    engine,
    mark,
    num_peers,
    start,
    start_coordinator,
    tell,
)
from measurement import end_what_is_started, percentiles, report

from kvshm._engine.scheduler_half import SchedulerHalf
from kvshm._shm.layout import RECORD_BYTES, unpack_records
from kvshm._shm.statistics import BAD_MESSAGES, EVENTS_DROPPED, RESYNCS

TURN_SECONDS = 1.0
SETTLE_SECONDS = 0.3
LOOKED_FOR = 64
"""Marks that are looked for in turn: one may be overwritten before it is seen."""
CHUNK = 200
"""Loop turns between two looks at the clock, about 10 us."""


class Turn(NamedTuple):
    """Of the busy engine: in percent of the time on the wall, and per second."""

    lost: float
    client: float
    libzmq: float
    wakeups: float
    heard: float


@dataclass(frozen=True)
class Ran:
    """Nanoseconds that this process's threads ran, and that the main one waited for a core."""

    wall: int
    main: int
    queued: int
    libzmq: int
    client: int

    @classmethod
    def now(cls) -> Ran:
        ran = {"main": 0, "libzmq": 0, "client": 0}
        queued = 0
        for task in Path("/proc/self/task").iterdir():
            running, waiting, _ = map(int, (task / "schedstat").read_text().split())
            name = (task / "comm").read_text()
            if int(task.name) == os.getpid():
                ran["main"], queued = running, waiting
            else:
                ran["libzmq" if name.startswith("ZMQ") else "client"] += running
        return cls(wall=time.monotonic_ns(), queued=queued, **ran)

    def since(self, before: Ran) -> tuple[float, float, float]:
        """Percent of the time in between: lost, the client's thread's, libzmq's."""
        wall, client = self.wall - before.wall, self.client - before.client
        libzmq = self.libzmq - before.libzmq
        stood = wall - (self.main - before.main) - (self.queued - before.queued)
        parts = max(stood, client) + libzmq, client, libzmq
        lost, client_part, libzmq_part = (part / wall * 100 for part in parts)
        return lost, client_part, libzmq_part


class Busy:
    """The engine whose scheduler never rests."""

    def __init__(self, cache: SchedulerHalf, hz: float, records: int) -> None:
        self._cache, self._hz = cache, hz
        self._own = batches("busy", records)
        self._next_mark = self._heard = self._looks = self._wakeups = 0
        self.known_ms: list[float] = []

        assert cache.epoch_state is not None
        self._peers = cache.epoch_state.peers
        self._apply = self._peers.apply_events
        self._peers.apply_events = self._count  # type: ignore[method-assign]  # the same, counted
        session = cache._client._session
        assert session is not None
        self._wait = session.wait
        session.wait = self._count_wait  # type: ignore[method-assign]  # likewise

    def _count(self, batches: Sequence[tuple[int, bytes]]) -> None:
        self._heard += sum(len(records) for _, records in batches) // RECORD_BYTES
        self._apply(batches)

    def _count_wait(self) -> Collection[object]:
        self._wakeups += 1
        return self._wait()

    def turn(self, seconds: float, sending: bool) -> Turn:
        begin = due = time.monotonic()
        before, heard, wakeups = Ran.now(), self._heard, self._wakeups
        while (now := time.monotonic()) < begin + seconds:
            for _ in range(CHUNK):
                pass
            self._look(now)
            if sending and now >= due:
                due += 1 / self._hz
                self._cache._client.send_events(next(self._own))
        ran, took = Ran.now().since(before), time.monotonic() - begin
        return Turn(*ran, (self._wakeups - wakeups) / took, (self._heard - heard) / took)

    def _look(self, now: float) -> None:
        self._looks += 1
        number = self._next_mark + self._looks % LOOKED_FOR
        for run in self._peers.lookup([mark(number)], 0, 1):
            (record,) = unpack_records(run.records)
            self.known_ms.append(now * 1000 % 2**32 - record.generation)
            self._next_mark = number + 1


def start_senders(cache: SchedulerHalf, options: argparse.Namespace) -> list[subprocess.Popen[str]]:
    load = "--hz", options.hz, "--records", options.records, "--blocks", options.blocks
    if not options.crowd:
        return [start("--sender", f"e{number}", *load) for number in range(ENGINES)]
    assert cache.table is not None
    return [start("--deaf", cache.table.fingerprint.hex(), *load)]


def distributions(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """Of turns with traffic."""
    return {
        "lost_percent": percentiles([turn.lost for turn in turns]),
        "client_percent": percentiles([turn.client for turn in turns]),
        "libzmq_percent": percentiles([turn.libzmq for turn in turns]),
        "wakeups_per_second": percentiles([turn.wakeups for turn in turns]),
        "records_heard_per_second": percentiles([turn.heard for turn in turns]),
        "ns_per_record": percentiles([1e7 * turn.client / max(1.0, turn.heard) for turn in turns]),
    }


def measure(
    processes: list[subprocess.Popen[Any]], options: argparse.Namespace
) -> dict[str, object]:
    cache = engine("busy", core=0, peers=0)
    senders = start_senders(cache, options)
    processes += senders
    for sender in senders:
        answer(sender)  # it is ready
    while num_peers(cache) < ENGINES:
        time.sleep(NAP_SECONDS)
    busy = Busy(cache, options.hz, options.records)
    quiet: list[Turn] = []
    loud: list[Turn] = []
    for _ in range(options.rounds):
        quiet.append(busy.turn(TURN_SECONDS, sending=False))
        for sender in senders:
            tell(sender, TURN_SECONDS + 2 * SETTLE_SECONDS)
        busy.turn(SETTLE_SECONDS, sending=True)
        loud.append(busy.turn(TURN_SECONDS, sending=True))
        busy.turn(2 * SETTLE_SECONDS, sending=False)
        for sender in senders:
            answer(sender)
    counted = cache.table.counters if cache.table is not None else None
    assert counted is not None
    found = {
        "engines": ENGINES, "hz": options.hz, "records": options.records,
        "blocks": options.blocks, "crowd": options.crowd,
        "records_per_second": ENGINES * options.hz * options.records,
        **distributions(loud), "lost_percent_quiet": percentiles([turn.lost for turn in quiet]),
        "known_ms": percentiles(busy.known_ms),
        "resyncs": counted.read(RESYNCS), "bad_messages": counted.read(BAD_MESSAGES),
        "dropped": counted.read(EVENTS_DROPPED),
    }  # fmt: skip
    cache.close()
    return found


def main() -> None:
    """Command line: print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--hz", type=float, default=100, help="batches a second of each engine")
    parser.add_argument("--records", type=int, default=8, help="records in each batch")
    parser.add_argument(
        "--crowd", action="store_true", help="all senders in one process, which hear nothing"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of each engine that sends")
    options = parser.parse_args()
    if options.rounds < 2 or not 1 <= options.records < options.blocks or not options.hz > 0:
        parser.error("wanted at least 2 rounds, some hz, and fewer records than --blocks")
    with ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-"))
        os.environ.update(KVSHM_RUN_DIR=run_dir, KVSHM_NAMESPACE=f"bench-{os.getpid()}")
        end_what_is_started()
        processes: list[subprocess.Popen[Any]] = [start_coordinator(core=1)]
        stack.callback(end, processes)
        found = measure(processes, options)
    report("client", **found)


if __name__ == "__main__":
    main()
