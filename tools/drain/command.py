"""``kvshm drain``: its command line, and what it says."""

from __future__ import annotations

import argparse
import select as descriptors
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from kvshm._shm.layout import MAX_HOLD_SECONDS
from kvshm.errors import KvshmError

from ..node.reader import NodeReader
from ..node.reading import EngineReading, NodeReading
from ..node.whereabouts import ancestors
from ..options import add_place, find_place, number, parse_size
from ..output import EXIT_FAILED, Json, clean, show
from ..signals import ending_signals
from .bars import line, size
from .choice import Chosen, Unreachable, choose
from .engine import Drain, failed
from .progress import End, Limits, pause_after
from .watch import Watch

HELP = "before an engine is stopped: have keepers copy what it alone has"
EXIT_UNDONE = 3
MOST_ASKED = 2
"""Engines for the size of a block: one that hangs takes its time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Put an engine into drain: it imports nothing from now on, and keepers copy what no other "
        "engine has, the blocks that were used most first. Requests go on. Run it before the "
        "engine is stopped, once its router sends it no more requests. Without a keeper there is "
        "nothing to copy to, and the command says what will be lost."
    )
    parser.epilog = (
        "exit status: 0 nothing is lost when it is stopped; 1 something would be, or an engine "
        "cannot be drained; 2 wrong command line or setting; 3 it was undone meanwhile (--undo); "
        "4 no engine has that name"
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "engine",
        nargs="?",
        metavar="NAME|PID|EPOCH",
        help="an engine's name, its epoch (hexadecimal), or else a pid: of a server for all its "
        "engines, or of an engine",
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
        reading = reader.read()
        chosen = choose(reading, asked.engine, asked.here, ancestors)
        opening = _Opening(stack, run_dir, reading, chosen)
        if asked.undo:
            return _undo(asked, opening)
        with ending_signals() as ended:
            _drain(opening, Watch(reader), Limits(asked.seconds, asked.bytes), ended, asked.json)
        found = [drain.as_json() for drain in opening.drains]
    found += map(failed, opening.unreachable)
    _say(asked, found, _line)
    return _status([each["end"] for each in found])


class _Opening:
    """Opens the tables of engines, and notes of which there is none."""

    def __init__(
        self, stack: ExitStack, run_dir: Path, reading: NodeReading, chosen: Chosen
    ) -> None:
        self._stack, self._run_dir, self._reading = stack, run_dir, reading
        self._chosen = chosen.engines
        self.drains: list[Drain] = []
        self.unreachable = list(chosen.unreachable)

    def open(self, then: Callable[[Drain], None]) -> None:
        """Those that answer first: the others take their time."""
        for engine in sorted(self._chosen, key=lambda each: not each.answers):
            try:
                drain = self._stack.enter_context(closing(self._open(engine)))
            except KvshmError as exc:
                lost = Unreachable(engine.label, engine.epoch, engine.pid, str(exc))
                self.unreachable.append(lost)
            else:
                self.drains.append(drain)
                then(drain)

    def _open(self, engine: EngineReading) -> Drain:
        alike = [e for e in self._reading.engines if e.fingerprint == engine.fingerprint]
        own_first = sorted(alike, key=lambda each: each.epoch != engine.epoch)
        answering = [e.epoch for e in own_first if e.answers and e.namespace == engine.namespace]
        return Drain(self._run_dir, engine, answering[:MOST_ASKED])


def _undo(asked: argparse.Namespace, opening: _Opening) -> int:
    opening.open(lambda drain: drain.table.end_drain())
    found = [drain.about() for drain in opening.drains]
    lost = [failed(each) for each in opening.unreachable]
    texts = {each["epoch"]: f"not undone: {each['why']}" for each in lost}
    _say(
        asked,
        found + lost,
        lambda row: f"{row['engine']} {texts.get(row['epoch'], 'imports again')}",
    )
    return EXIT_FAILED if lost else 0


def _status(ends: Sequence[End]) -> int:
    if set(ends) <= {End.KEPT}:
        return 0
    return EXIT_UNDONE if set(ends) <= {End.KEPT, End.UNDONE} else EXIT_FAILED


def _say(asked: argparse.Namespace, found: list[Json], line: Callable[[Json], str]) -> None:
    show(found, lambda: (clean(line(row)) for row in found), as_json=asked.json)


def _line(found: Json) -> str:
    if found["end"] is End.FAILED:
        return f"{found['engine']} is not in drain: {found['why']}"
    kept, left = size(found["kept_bytes"]), size(found["left_bytes"])
    copied = f"{found['kept']} blocks ({kept}) were copied in {found['seconds']:.1f} s"
    lost = f", {found['left']} ({left}) only this engine has" if found["left"] else ""
    return f"{found['engine']}: {copied}{lost}: {found['why']}"


def _drain(
    opening: _Opening,
    watch: Watch,
    limits: Limits,
    ended: socket.socket,
    quiet: bool,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Drain engines side by side."""
    signals = descriptors.poll()
    signals.register(ended, descriptors.POLLIN)
    begun = clock()
    opening.open(lambda drain: drain.begin(limits.seconds, clock()))
    while going := [drain for drain in opening.drains if drain.end is None]:
        began = clock()
        watch.look({drain.kind for drain in going}, began)
        for drain in going:
            drain.look(watch, limits, began)
        if not quiet:
            _show_bars(opening.drains)
        pause = pause_after(clock() - began, begun + limits.seconds - clock())
        if any(d.end is None for d in going) and signals.poll(1000 * pause):
            for drain in going:
                drain.finish(End.INTERRUPTED)
    if not quiet:
        _show_bars(())


def _show_bars(drains: Sequence[Drain]) -> None:
    """One line on a terminal, written over and over; none at the end."""
    if sys.stderr.isatty():
        parts = [drain.part() for drain in drains if drain.end is None]
        text = line(parts, shutil.get_terminal_size().columns) if parts else ""
        print(f"\r\033[K{clean(text)}", end="", file=sys.stderr, flush=True)
