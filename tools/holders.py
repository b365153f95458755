"""``kvshm holders``: which engine holds leases on whose blocks, and for how long."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from .node.mapped import lease_bits, slots_in_use
from .node.reader import NodeReader
from .node.reading import EngineReading, NamespaceReading, PeerReading
from .options import add_selection, find_place, select
from .output import EXIT_FAILED, Columns, Json, cleaned, note, show, table

HELP = "which engine holds leases on which blocks, and for how long"
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
    parser.description = (
        "List which engine holds leases on whose blocks. The oldest load says since when the "
        "holder has held leases at all: a load that copies takes milliseconds. Leases of an ended "
        "process are cleared by the coordinator, and by their exporter when it needs the blocks."
    )
    parser.epilog = (
        "exit status: 0, also if no engine holds a lease; 1 nothing of kvshm runs; 2 wrong command "
        "line or setting; 4 no engine has that name"
    )
    add_selection(parser)


def run(asked: argparse.Namespace) -> int:
    run_dir, namespace = find_place(asked)
    with NodeReader(run_dir, namespace) as reader:
        reading = reader.read()
        rows = [
            row
            for space in reading.namespaces
            for row in _rows(reader, space, reading.at_ns)
            if asked.engine is None or asked.engine in row["names"]
        ]
    if not rows:
        select(reading, asked.engine)  # says which engines there are, if there is none so
    for row in rows:
        del row["names"]
    show(rows, lambda: table(_COLUMNS, cleaned(rows)), as_json=asked.json)
    if not reading.namespaces:
        note(f"nothing of kvshm runs in {run_dir}")
        return EXIT_FAILED
    if not (rows or asked.json):
        note("no engine holds a lease")
    return 0


def _rows(reader: NodeReader, space: NamespaceReading, now_ns: int) -> Iterator[Json]:
    for exporter in space.engines:
        if not exporter.blocks.leased or (view := reader.table(exporter)) is None:
            continue
        leases, draining = Counter[int](), Counter[int]()
        for _, slot in slots_in_use(view):
            held = lease_bits(slot)
            leases.update(held)
            draining.update(held if slot.state.name == "DRAINING" else [])
        for bit, number in sorted(leases.items()):
            holder = _about(bit, space, now_ns)
            names = (*exporter.names, *holder.pop("names"))
            yield holder | {
                "exporter": exporter.label,
                "leases": number,
                "draining": draining[bit],
                "names": names,
            }


def _about(bit: int, space: NamespaceReading, now_ns: int) -> Json:
    """A holder is an engine whose table is known, one that only other engines know, or neither."""
    with_bit = [e for e in space.engines if e.lease_bit == bit]
    if with_bit:
        return _of_engine(bit, min(with_bit, key=lambda e: e.owner_died), now_ns)
    peers = [p for p in space.known_to_peers.values() if p.lease_bit == bit]
    return _of_peer(bit, min(peers, key=lambda p: p.suspected, default=None), space)


def _of_engine(bit: int, holder: EngineReading, now_ns: int) -> Json:
    since = min(holder.loads_since, default=None) if holder.clock_known else None
    return {
        "holder": holder.label,
        "bit": bit,
        "process": "ended" if holder.owner_died else "alive",
        "pid": holder.pid,
        "epoch": f"{holder.epoch:016x}",
        "names": holder.names,
        "seconds": None if since is None else (now_ns - since) / NANOSECONDS,
    }


def _of_peer(bit: int, holder: PeerReading | None, space: NamespaceReading) -> Json:
    known: Json = {"holder": f"lease bit {bit}", "process": "unknown", "pid": None, "epoch": None}
    if holder is not None:
        known = {
            "holder": space.label_of(holder.epoch),
            "process": "alive" if holder.epoch in space.unreadable else "ended",
            "pid": space.pids_here.get(holder.epoch),
            "epoch": f"{holder.epoch:016x}",
        }
    names = () if holder is None else space.names_of(holder.epoch)
    return known | {"bit": bit, "names": names, "seconds": None}
