"""Shared memory of the engines of a run directory as plain data: what ``--json`` prints.

Segments are read one after the other.  Numbers too wide for JavaScript are hexadecimal text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshm._base.ids import Epoch
from kvshm._replica.index_layout import Entry, tag_in_group
from kvshm._replica.index_reader import ReplicaReader
from kvshm._shm.layout import SlotState
from kvshm._shm.segment import INDEX_KIND, TABLE_KIND, SegmentName
from kvshm._shm.slot_table import Slot, SlotTableView
from kvshm._shm.table_header import seconds_left

from .chains import find_chains
from .node.mapped import MappedEngine, lease_bits, slots_in_use
from .node.reader import NodeReader
from .node.reading import read_header
from .output import Json

TAG_BYTES = 8
_Held = Mapping[Epoch, Mapping[int, Slot]]
_UNKNOWN = dict.fromkeys(("engine", "epoch", "pid", "alive"))


@dataclass(frozen=True)
class Filters:
    """What to show.  The default is all engines and their leased blocks."""

    engine: str | None = None
    block_hash: str = ""
    """Beginning of block hashes, in lower-case hexadecimal: list these blocks, leased or not."""
    leased: bool = False
    entries: bool = False

    @property
    def replica_entries(self) -> bool:
        return self.entries or self.block_hash != ""

    @property
    def narrow(self) -> bool:
        """Whether engines without a matching block are left out."""
        return self.leased or self.block_hash != ""

    @property
    def selective(self) -> bool:
        """Whether any engine may be left out."""
        return self.narrow or self.engine is not None

    def selects(self, engine: Mapping[str, Any]) -> bool:
        known = (engine.get("engine"), str(engine.get("pid")), f"0x{engine['epoch']}")
        return self.engine is None or self.engine in (*known, engine["epoch"])


def build_report(run_dir: Path, namespace: str | None, filters: Filters) -> Json:
    """Return what the engines of a namespace (None: of all) hand out, or why not.  Blocks for some
    seconds at most if engines are stopped."""
    with NodeReader(run_dir, namespace) as reader:
        return {
            "namespaces": [
                {
                    "namespace": space.name,
                    "coordinator": space.coordinated,
                    **_namespace(space.engines, filters),
                }
                for space in reader.map_segments()
            ]
        }


def _namespace(mapped: list[MappedEngine], filters: Filters) -> Json:
    tables, replicas, held = [], [], dict[Epoch, Mapping[int, Slot]]()
    for one in mapped:
        if one.table is not None:
            with one.recording_problems(TABLE_KIND):
                held[one.epoch] = slots = dict(slots_in_use(one.table))
                tables.append((_engine(one.name(TABLE_KIND), one.table, slots), slots))
    for one in mapped:
        if one.replica is not None:
            with one.recording_problems(INDEX_KIND):
                replicas.append(_replica(one.name(INDEX_KIND), one.replica, filters, held))
    holders = _holders([engine for engine, _ in tables])
    # Engines that share with each other are neighbours in the report.
    tables.sort(key=lambda found: [found[0][key] for key in ("fingerprint", "engine", "epoch")])
    for engine, slots in tables:
        _fill(engine, slots, holders, filters)
    selected = [one for one in mapped if filters.selects({"epoch": f"{one.epoch:016x}"})]
    return {
        "engines": [
            engine
            for engine, _ in tables
            if filters.selects(engine) and (engine["blocks"] or not filters.narrow)
        ],
        "replicas": [
            replica
            for replica in replicas
            if filters.selects(replica)
            and not filters.leased
            and (replica["entries"] or not filters.narrow)
        ],
        "unreadable": [
            {"segment": problem.segment, "problem": problem.text}
            for one in selected
            for problem in one.problems.values()
        ],
        "ended": [
            {"epoch": f"{one.epoch:016x}", "socket": str(one.path)} for one in selected if one.ended
        ],
    }


# -- engines


def _engine(name: SegmentName, table: SlotTableView, slots: Mapping[int, Slot]) -> Json:
    header = read_header(name.namespace, table)
    return {
        "engine": header.name,
        "segment": str(name),
        "epoch": f"{header.epoch:016x}",
        "pid": header.pid,
        "alive": not header.owner_died,
        "died": header.died,
        "model": header.model,
        "keeps": header.keeps,
        "fingerprint": header.fingerprint,
        "block_size": header.block_size,
        "num_blocks": table.num_blocks,
        "states": _states(table.num_blocks, slots, table.now),
        "lease_bit": header.lease_bit,
        "heartbeat": header.heartbeat,
        "leases_taken": table.leases_taken,
        "retired": header.retired,
        "life": [_life(table.life(rank), table.epoch) for rank in range(table.num_ranks)],
        "created_ns": header.created_ns,
        "age_seconds": table.age_seconds,
        "blocks": [],
        "chains": [],
        "counters": {label: n for label, n in header.counters.items() if n},
        "errors": [e._asdict() | {"about": [*e.about]} for e in table.errors()],
        "problems": table.check_integrity(),
    }


def _fill(
    engine: Json, slots: Mapping[int, Slot], holders: dict[int, Json], asked: Filters
) -> None:
    engine["blocks"] = list(_blocks(slots, holders, asked, engine["age_seconds"]))
    if asked.leased:
        engine |= {"counters": {}, "errors": []}
        return
    found = find_chains(slots, lambda _, slot: slot.block_hash.hex().startswith(asked.block_hash))
    engine["chains"] = [chain._asdict() for chain in found]


def _states(num_blocks: int, slots: Mapping[int, Slot], now: int) -> dict[str, int]:
    counts = Counter(slot.state for slot in slots.values())
    return {
        "empty": num_blocks - len(slots),
        "ready": counts[SlotState.READY],
        "draining": counts[SlotState.DRAINING],
        "leased": sum(1 for slot in slots.values() if slot.leases),
        "held": sum(1 for slot in slots.values() if _held_for(slot, now)),
    }


def _held_for(slot: Slot, now: int) -> int:
    return seconds_left(slot.held_until, now) if slot.state is SlotState.READY else 0


def _life(word: int, epoch: int) -> str:
    return {epoch: "valid", 0: "ended"}.get(word, f"{word:016x}")


def _holders(engines: list[Json]) -> dict[int, Json]:
    """Lease bit -> the engine whose table claims that bit; a living engine takes precedence."""
    return {
        engine["lease_bit"]: {"bit": engine["lease_bit"], **{key: engine[key] for key in _UNKNOWN}}
        for engine in sorted(engines, key=lambda engine: bool(engine["alive"]))
        if engine["lease_bit"] is not None
    }


def _blocks(
    slots: Mapping[int, Slot], holders: dict[int, Json], asked: Filters, now: int
) -> Iterator[Json]:
    only_leased = asked.leased or not asked.replica_entries
    for block, slot in slots.items():
        block_hash = slot.block_hash.hex()
        if block_hash.startswith(asked.block_hash) and (slot.leases or not only_leased):
            yield {
                "block_id": block,
                "block_hash": block_hash,
                "generation": slot.generation,
                "state": slot.state.name.lower(),
                "depth": slot.depth,
                "group": slot.group,
                "published_ms": slot.published_ms,
                "held_seconds": _held_for(slot, now),
                "references": slot.leases.bit_count(),
                "holders": [holders.get(bit, {"bit": bit, **_UNKNOWN}) for bit in lease_bits(slot)],
            }


# -- replicas


def _replica(name: SegmentName, reader: ReplicaReader, filters: Filters, held: _Held) -> Json:
    header, rows = reader.header, reader.rows()
    entries = reader.entries() if filters.replica_entries else ()
    epochs = {row.row: row.epoch for row in rows}
    shown = (_entry(entry, epochs.get(entry.row), held) for entry in entries)
    asked = filters.block_hash[: 2 * TAG_BYTES]
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
                "epoch": f"{row.epoch:016x}",
                "state": row.state.name.lower(),
                "num_blocks": row.num_blocks,
                "entries": row.entries,
                "lease_bit": row.lease_bit if row.lease_bit >= 0 else None,
            }
            for row in rows
        ],
        "entries": [entry for entry in shown if entry["hash_prefix"].startswith(asked)],
    }


def _entry(entry: Entry, epoch: Epoch | None, held: _Held) -> Json:
    """An entry does not say in which group and how deep in its chain the block is; its owner's slot
    does."""
    prefix, depth, group = entry.tag.to_bytes(TAG_BYTES, "little"), None, None
    slot = held.get(epoch, {}).get(entry.block_id) if epoch is not None else None
    if slot is not None and tag_in_group(slot.block_hash, slot.group) == entry.tag:
        prefix, depth, group = slot.block_hash[:TAG_BYTES], slot.depth, slot.group
    return {
        "hash_prefix": prefix.hex(),
        "epoch": None if epoch is None else f"{epoch:016x}",
        "block_id": entry.block_id,
        "generation": entry.generation,
        "depth": depth,
        "group": group,
    }
