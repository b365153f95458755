"""What the engines of a run directory have in shared memory, as plain data: what ``--json`` prints.

Every segment is mapped read-only and read once.  The node runs on meanwhile: what is read from
different segments need not fit together to the last block.  Numbers that are too wide for
JavaScript (epochs, hashes, fingerprints) are hexadecimal text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshm.replica.index_layout import Entry
from kvshm.replica.index_reader import ReplicaReader
from kvshm.rundir import list_coordinators
from kvshm.shm.layout import SlotState
from kvshm.shm.segment import INDEX_KIND, TABLE_KIND, SegmentName
from kvshm.shm.slot_table import Slot, SlotTableView

from .chains import find_chains
from .fetching import EngineSegments, coordinator_runs, fetch_all, slots_in_use

Json = dict[str, Any]
TAG_BYTES = 8
_NOBODY = dict.fromkeys(("engine", "epoch", "pid", "alive"))


@dataclass(frozen=True)
class Filters:
    """What to show; the default is all engines and, of their blocks, the leased ones."""

    engine: str | None = None
    """Name, pid or epoch (hexadecimal) of an engine."""
    block_hash: str | None = None
    """Hexadecimal beginning of a block's hash: list matching blocks, leased or not."""
    leased: bool = False
    """Nothing but leased blocks."""
    entries: bool = False
    """List every block in use and every replica entry."""

    @property
    def replica_entries(self) -> bool:
        return self.entries or self.block_hash is not None

    @property
    def narrow(self) -> bool:
        """Whether an engine without such a block is left out."""
        return self.leased or self.block_hash is not None

    def name(self, engine: Mapping[str, Any]) -> bool:
        """Whether this engine is asked for."""
        known = (engine.get("engine"), str(engine.get("pid")), f"0x{engine['epoch']}")
        return self.engine is None or self.engine in (*known, engine["epoch"])

    @property
    def prefix(self) -> str:
        """What the hash of a block that is asked for begins with."""
        return (self.block_hash or "").lower()


def build_report(run_dir: Path, namespace: str | None, filters: Filters) -> Json:
    """Return what the engines of a namespace (None: of all) hand out: one element per namespace.

    An engine that ends meanwhile is left out; what cannot be read is noted with the reason.
    Changes nothing.  Blocks for some seconds at most if engines stand still.  Raises OSError if
    there is no such directory.
    """
    with fetch_all(run_dir, namespace) as found:
        named = list_coordinators(run_dir, namespace)
        coordinated = {name for name in named if coordinator_runs(run_dir, name)}
        return {
            "namespaces": [
                {
                    "namespace": space,
                    "coordinator": space in coordinated,
                    **_namespace([one for one in found if one.namespace == space], filters),
                }
                for space in sorted(coordinated | {one.namespace for one in found})
            ]
        }


def _namespace(fetched: list[EngineSegments], filters: Filters) -> Json:
    tables, replicas = [], []
    for one in fetched:
        if one.table is not None:
            with one.recording_problems(TABLE_KIND):
                slots = dict(slots_in_use(one.table))
                tables.append((_engine(one.name(TABLE_KIND), one.table, slots), slots))
        if one.replica is not None:
            with one.recording_problems(INDEX_KIND):
                replicas.append(_replica(one.name(INDEX_KIND), one.replica, filters))
    holders = _holders([engine for engine, _ in tables])
    # Those that share stand together.
    tables.sort(key=lambda found: [found[0][key] for key in ("fingerprint", "engine", "epoch")])
    for engine, slots in tables:
        _fill(engine, slots, holders, filters)
    return {
        "engines": [
            engine
            for engine, _ in tables
            if filters.name(engine) and (engine["blocks"] or not filters.narrow)
        ],
        "replicas": [
            replica
            for replica in replicas
            if filters.name(replica)
            and not filters.leased
            and (replica["entries"] or not filters.narrow)
        ],
        "unreadable": [
            {"segment": problem.segment, "problem": problem.text}
            for one in fetched
            if filters.name({"epoch": f"{one.epoch:016x}"})
            for problem in one.problems
        ],
        "ended": [
            ended
            for one in fetched
            if one.ended
            and filters.name(ended := {"epoch": f"{one.epoch:016x}", "socket": str(one.path)})
        ],
    }


# -- engines


def _engine(name: SegmentName, table: SlotTableView, slots: Mapping[int, Slot]) -> Json:
    """All that is said of one engine but its blocks and chains, which depend on the filters."""
    return {
        "engine": table.engine,
        "segment": str(name),
        "epoch": f"{table.epoch:016x}",
        "pid": table.pid,
        "alive": not table.owner_died,
        "died": table.died,
        "model": table.model,
        "fingerprint": table.fingerprint.hex(),
        "block_size": table.block_size,
        "num_blocks": table.num_blocks,
        "states": _states(table.num_blocks, slots),
        "lease_bit": _bit(table.lease_bit),
        "heartbeat": table.heartbeat,
        "leases_taken": table.leases_taken,
        "retired": table.retired,
        "life": [_life(table.life(rank), table.epoch) for rank in range(table.num_ranks)],
        "created_ns": table.created_ns,
        "blocks": [],
        "chains": [],
        "counters": {label: n for label, n in table.counters.snapshot().items() if n},
        "errors": [error._asdict() for error in table.errors()],
        "problems": table.check_integrity(),
    }


def _fill(
    engine: Json, slots: Mapping[int, Slot], holders: dict[int, Json], asked: Filters
) -> None:
    """Add the blocks and chains that are asked for; with ``leased`` nothing but blocks is."""
    engine["blocks"] = list(_blocks(slots, holders, asked))
    if asked.leased:
        engine |= {"counters": {}, "errors": []}
        return
    found = find_chains(slots, lambda _, slot: slot.block_hash.hex().startswith(asked.prefix))
    engine["chains"] = [
        {
            "tip": chain.tip,
            "block_hash": chain.slot.block_hash.hex(),
            "depth": chain.slot.depth,
            "length": chain.length,
            "complete": chain.complete,
        }
        for chain in found
    ]


def _states(num_blocks: int, slots: Mapping[int, Slot]) -> dict[str, int]:
    counts = Counter(slot.state for slot in slots.values())
    return {
        "empty": num_blocks - len(slots),
        "ready": counts[SlotState.READY],
        "draining": counts[SlotState.DRAINING],
        "leased": sum(1 for slot in slots.values() if slot.leases),
    }


def _bit(lease_bit: int) -> int | None:
    return None if lease_bit < 0 else lease_bit


def _life(word: int, epoch: int) -> str:
    """A rank's life word: "valid", "ended", or, where it is neither, its value."""
    return {epoch: "valid", 0: "ended"}.get(word, f"{word:016x}")


def _holders(engines: list[Json]) -> dict[int, Json]:
    """Lease bit -> the engine of the namespace whose table says that the bit is its own, a living
    engine before a dead one."""
    return {
        engine["lease_bit"]: {"bit": engine["lease_bit"], **{key: engine[key] for key in _NOBODY}}
        for engine in sorted(engines, key=lambda engine: bool(engine["alive"]))
        if engine["lease_bit"] is not None
    }


def _blocks(slots: Mapping[int, Slot], holders: dict[int, Json], asked: Filters) -> Iterator[Json]:
    only_leased = asked.leased or not asked.replica_entries
    for block, slot in slots.items():
        block_hash = slot.block_hash.hex()
        if block_hash.startswith(asked.prefix) and (slot.leases or not only_leased):
            bits = (bit for bit in range(slot.leases.bit_length()) if slot.leases >> bit & 1)
            yield {
                "block_id": block,
                "block_hash": block_hash,
                "generation": slot.generation,
                "state": slot.state.name.lower(),
                "depth": slot.depth,
                "published_ms": slot.published_ms,
                "references": slot.leases.bit_count(),
                "holders": [holders.get(bit, {"bit": bit, **_NOBODY}) for bit in bits],
            }


# -- replicas


def _replica(name: SegmentName, reader: ReplicaReader, filters: Filters) -> Json:
    entries = list(reader.entries()) if filters.replica_entries else []
    header, rows = reader.header, reader.rows()
    epochs = {row.row: f"{row.epoch:016x}" for row in rows}
    return {
        "engine": name.engine,
        "segment": str(name),
        "epoch": f"{name.epoch:016x}",
        "pid": header.pid,
        "capacity": reader.capacity,
        "count": reader.count,
        "rows": [
            {
                "engine": row.name,
                "epoch": epochs[row.row],
                "state": row.state.name.lower(),
                "num_blocks": row.num_blocks,
                "entries": row.entries,
                "lease_bit": _bit(row.lease_bit),
            }
            for row in rows
        ],
        "entries": [
            {
                "hash_prefix": _tag(entry),
                "epoch": epochs.get(entry.row),
                "block_id": entry.block_id,
                "generation": entry.generation,
                "depth": entry.depth,
            }
            for entry in entries
            if _tag(entry).startswith(filters.prefix[: 2 * TAG_BYTES])
        ],
    }


def _tag(entry: Entry) -> str:
    """The first 8 bytes of the block's hash, in the hash's own order."""
    return entry.tag.to_bytes(TAG_BYTES, "little").hex()
