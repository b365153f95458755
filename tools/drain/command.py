"""``kvshm drain``: its command line, and what it does to engines."""

from __future__ import annotations

import argparse
import select as descriptors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from kvshm._api.engine_layout import layout_of
from kvshm._node.segment_server import SegmentClient
from kvshm._shm.layout import MAX_HOLD_SECONDS, unpack_records
from kvshm._shm.slot_table import PeerSlotTable, SlotTableView
from kvshm.errors import CorruptSegment, KvshmError

from ..node.reader import NodeReader
from ..node.reading import EngineReading, NodeReading
from ..node.whereabouts import ancestors
from ..options import add_place, find_place, number, parse_size, select
from ..output import EXIT_FAILED, Json, clean, show
from ..signals import ending_signals
from .progress import End, Found, Holder, Limits, Name, Progress, bar, decide, find, size

HELP = "before an engine is stopped: have keepers copy what it alone has"
LEAST_PAUSE, PAUSES_PER_LOOK = 0.1, 5
"""Between two looks, which read the tables of all engines."""

_WHY = {
    End.KEPT: "nothing is lost when it is stopped",
    End.NO_KEEPER: "there is no keeper (kvshm keeper): they are lost when it is stopped",
    End.STALLED: "keepers take no more: they are full, or cannot copy",
    End.SECONDS: "the time was over (--seconds)",
    End.BYTES: "enough was copied (--bytes)",
    End.GONE: "the engine has ended, or reset its cache",
    End.INTERRUPTED: "interrupted",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Put an engine into drain: it imports nothing from now on, and keepers copy what no other "
        "engine has, the blocks that were used most first. Requests go on. Run it before the "
        "engine is stopped, once its router sends it no more requests. Without a keeper there is "
        "nothing to copy to, and the command says what will be lost."
    )
    parser.epilog = (
        "exit status: 0 nothing is lost when it is stopped; 1 something would be, or the engine "
        "cannot be drained; 2 wrong command line or setting; 4 no engine has that name"
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "engine",
        nargs="?",
        metavar="NAME|PID|EPOCH",
        help="also the pid of a server, for all its engines; an epoch is hexadecimal",
    )
    which.add_argument(
        "--here", action="store_true", help="all engines of this container (pid namespace)"
    )
    add(
        "--seconds",
        type=number(float, lambda s: 0 < s < MAX_HOLD_SECONDS, "above 0, below an hour"),
        default=30.0,
        metavar="S",
        help="for how long keepers may copy (30)",
    )
    add("--bytes", type=parse_size, metavar="SIZE", help="about how much they may copy, as 4G")
    add("--undo", action="store_true", help="let the engine import again")
    add("--json", action="store_true", help="as JSON")
    add_place(parser, "only this namespace (default: $KVSHM_NAMESPACE, else all; '': all)")


def run(asked: argparse.Namespace) -> int:
    run_dir, namespace = find_place(asked)
    with ExitStack() as stack:
        reader = stack.enter_context(NodeReader(run_dir, namespace))
        engines = _chosen(reader.read(), asked.engine, asked.here)
        drains = [stack.enter_context(closing(_Drain(reader, run_dir, e))) for e in engines]
        if asked.undo:
            for drain in drains:
                drain.table.end_drain()
            found = [drain.about() for drain in drains]
            _say(asked, found, lambda row: f"{row['engine']} imports again")
            return 0
        with ending_signals() as ended:
            _drain(drains, Limits(asked.seconds, asked.bytes), ended, quiet=asked.json)
    _say(asked, [drain.as_json() for drain in drains], _line)
    return 0 if all(drain.end is End.KEPT for drain in drains) else EXIT_FAILED


def _chosen(reading: NodeReading, engine: str | None, here: bool) -> list[EngineReading]:
    """The engines that are meant.  Raises KvshmError if there is none, or if it is not clear."""
    if found := _of_server(reading, engine or ""):
        return found
    chosen = select(reading, engine, here=here)
    living = [each for each in chosen.engines if each.is_readable]
    found = [each for each in living if not each.keeps]
    if not found:
        reasons = [why for space in chosen.namespaces for why in space.unreadable.values()]
        reasons += [record.reason for space in chosen.namespaces for record in space.declined]
        if living:
            reasons.append("it is a keeper: what it keeps goes with it")
        where = "in this container" if here else "that could be drained"
        raise KvshmError("; ".join(reasons) or f"there is no engine {where}")
    if engine is not None and len(found) > 1:
        names = ", ".join(f"{each.epoch:016x} in {each.namespace}" for each in found)
        raise KvshmError(f"several engines are called {engine!r}: {names}; name one by its epoch")
    return found


def _of_server(reading: NodeReading, pid: str) -> list[EngineReading]:
    """The engines that a process has started: the pid that people know is that of a server."""
    return [
        each
        for each in reading.engines
        if pid.isdecimal() and each.is_readable and not each.keeps
        if each.pid_here and int(pid) in ancestors(each.pid_here)
    ]


class _Drain:
    """One engine in drain."""

    def __init__(self, reader: NodeReader, run_dir: Path, engine: EngineReading) -> None:
        """Raises KvshmError if the engine does not answer."""
        self._reader, self._engine = reader, engine
        segments = SegmentClient(run_dir, engine.namespace)
        self.table: PeerSlotTable = segments.peer_table(engine.epoch)
        with_info = segments.info(engine.epoch)
        layout = layout_of(self.table, with_info)
        self._block_bytes = layout.stride if layout is not None else 0
        self.end: End | None = None
        self._began = self._grew = self._seconds = 0.0
        self._alone = set[Name]()
        """All blocks that were found to be alone, now or before."""
        self._kept: int = 0
        """How many of these a keeper has now."""
        self._found = Found(frozenset(), frozenset(), 0)

    def begin(self, seconds: float, now: float) -> None:
        self._began = self._grew = now
        self.table.put_in_drain(round(seconds) or 1)

    def look(self, limits: Limits, now: float) -> None:
        """See how far it is; it may have ended then."""
        gone = self.table.owner_died or self.table.retired or not self.table.alive
        if not gone:
            self._found = find(_names(self.table), self._others())
            self._alone |= self._found.alone
        kept = len(self._alone & self._found.kept)
        if kept > self._kept:
            self._kept, self._grew = kept, now
        self._seconds = now - self._began
        progress = Progress(
            left=len(self._found.alone),
            kept_bytes=kept * self._block_bytes,
            keepers=self._found.keepers,
            seconds=self._seconds,
            rested=now - self._grew,
            gone=gone,
        )
        self.finish(decide(progress, limits))

    def finish(self, end: End | None) -> None:
        """It stays in drain, but nothing more is copied."""
        if end is not None and self.end is None:
            self.end = end
            self.table.put_in_drain(0)

    def _others(self) -> Iterator[Holder]:
        for space in self._reader.map_segments():
            for each in space.engines if space.name == self._engine.namespace else ():
                table = each.table
                if table is None or table.epoch == self.table.epoch or not _is_alive(table):
                    continue
                if table.fingerprint == self.table.fingerprint:
                    yield Holder(_names(table), table.keeps, table.in_drain)

    # -- what is said of it

    def about(self) -> Json:
        engine = self._engine
        return {"engine": engine.label, "epoch": f"{engine.epoch:016x}", "pid": engine.pid}

    def as_json(self) -> Json:
        left = len(self._found.alone)
        return {
            **self.about(),
            "end": self.end,
            "alone": len(self._alone),
            "kept": self._kept,
            "kept_bytes": self._kept * self._block_bytes,
            "left": left,
            "left_bytes": left * self._block_bytes,
            "seconds": round(self._seconds, 3),
        }

    def bar(self) -> str:
        done = self._kept, self._kept + len(self._found.alone)
        return f"{self._engine.label} {bar(*done)} {size(done[0] * self._block_bytes)}"

    def close(self) -> None:
        self.table.close()


def _say(asked: argparse.Namespace, found: list[Json], line: Callable[[Json], str]) -> None:
    show(found, lambda: (clean(line(row)) for row in found), as_json=asked.json)


def _line(found: Json) -> str:
    kept, left = size(found["kept_bytes"]), size(found["left_bytes"])
    copied = f"{found['kept']} blocks ({kept}) were copied in {found['seconds']:.1f} s"
    lost = f", {found['left']} ({left}) only this engine has" if found["left"] else ""
    return f"{found['engine']}: {copied}{lost}: {_WHY[found['end']]}"


def _drain(
    drains: Sequence[_Drain],
    limits: Limits,
    ended: socket.socket,
    quiet: bool,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Drain engines side by side."""
    signals = descriptors.poll()
    signals.register(ended, descriptors.POLLIN)
    for drain in drains:
        drain.begin(limits.seconds, clock())
    while going := [drain for drain in drains if drain.end is None]:
        began = clock()
        for drain in going:
            drain.look(limits, began)
        if not quiet:
            _show_bars(drains)
        pause = max(LEAST_PAUSE, PAUSES_PER_LOOK * (clock() - began))
        if any(d.end is None for d in drains) and signals.poll(1000 * pause):
            for drain in drains:
                drain.finish(End.INTERRUPTED)


def _show_bars(drains: Sequence[_Drain]) -> None:
    """One line on a terminal, written over and over."""
    if sys.stderr.isatty():
        going = [drain.bar() for drain in drains if drain.end is None]
        print(f"\r\033[K{clean(', '.join(going))}", end="", file=sys.stderr, flush=True)


def _names(table: SlotTableView) -> set[Name]:
    """The blocks that others can read; none of a table that contradicts itself."""
    try:
        return {(key, group) for key, _, _, _, _, group in unpack_records(table.scan())}
    except CorruptSegment:
        return set()


def _is_alive(table: SlotTableView) -> bool:
    return table.alive and not (table.died or table.retired)
