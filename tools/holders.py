"""``kvshm holders``: who holds leases on whose blocks, and for how long."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from .fetching import slots_in_use
from .node.reader import NodeReader
from .node.reading import EngineReading
from .options import add_selection, find_place
from .plain_text import cleaned
from .status import select
from .tables import Columns, Json, table

HELP = "who holds leases on whose blocks, and for how long"
EXIT_NONE = 1
NANOSECONDS = 1_000_000_000

_COLUMNS: Columns = {
    "holder": "holder",
    "process": "process",
    "leases": "leases",
    "on blocks of": "exporter",
    "that it waits for": "draining",
    "oldest load": lambda row: "-" if row["seconds"] is None else f"{row['seconds']:.1f} s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which engines are meant."""
    parser.description = (
        "List who holds leases on whose blocks. The oldest load says since when the holder has "
        "held leases at all: a load that copies takes milliseconds. Leases of an ended process are "
        "cleared by the coordinator, and by their exporter when it needs the blocks."
    )
    parser.epilog = (
        "exit status: 0; 1 nobody holds a lease, or there is no such engine; 2 wrong command line "
        "or setting"
    )
    add_selection(parser)


def run(asked: argparse.Namespace) -> int:
    """Print one line for each holder and exporter; return the exit status."""
    run_dir, namespace = find_place(asked)
    with NodeReader(run_dir, namespace, replicas=False) as reader:
        reading = reader.read()
        if asked.engine is not None:
            select(reading, asked.engine)  # says which engines there are, if there is none so
        rows = [
            row
            for space in reading.namespaces
            for row in _rows(reader, space.engines, reading.at_ns)
            if asked.engine is None or asked.engine in row["names"]
        ]
    for row in rows:
        del row["names"]
    if asked.json:
        print(json.dumps(rows, indent=2))
    else:
        for line in table(_COLUMNS, cleaned(rows)):
            print(line)
    return 0 if rows else EXIT_NONE


def _rows(reader: NodeReader, engines: Sequence[EngineReading], now_ns: int) -> Iterator[Json]:
    by_bit = {e.lease_bit: e for e in engines if e.lease_bit is not None and not e.owner_died}
    dead = {e.lease_bit: e for e in engines if e.lease_bit is not None and e.owner_died}
    for exporter in engines:
        if not exporter.blocks.leased or (view := reader.table(exporter)) is None:
            continue
        leases, draining = Counter[int](), Counter[int]()
        for _, slot in slots_in_use(view):
            held = [bit for bit in range(slot.leases.bit_length()) if slot.leases >> bit & 1]
            leases.update(held)
            draining.update(held if slot.state.name == "DRAINING" else [])
        for bit, number in sorted(leases.items()):
            holder = by_bit.get(bit) or dead.get(bit)
            yield _row(bit, holder, exporter, now_ns) | {
                "leases": number,
                "draining": draining[bit],
            }


def _row(bit: int, holder: EngineReading | None, exporter: EngineReading, now_ns: int) -> Json:
    since = min(holder.loads_since, default=None) if holder is not None else None
    known: Json = {"process": "unknown", "pid": None, "epoch": None, "names": [exporter.label]}
    if holder is not None:
        known = {
            "process": "ended" if holder.owner_died else "alive",
            "pid": holder.pid,
            "epoch": f"{holder.epoch:016x}",
            "names": [n for e in (holder, exporter) for n in e.names],
        }
    return {
        "holder": holder.label if holder is not None else f"lease bit {bit}",
        "bit": bit,
        **known,
        "exporter": exporter.label,
        "seconds": None if since is None else (now_ns - since) / NANOSECONDS,
    }
