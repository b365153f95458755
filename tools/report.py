"""What a snapshot says, as plain data for JSON and for the table.  Pure.

Numbers that are too wide for JavaScript (epochs, hashes, fingerprints) are hexadecimal text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvshm.index_layout import Entry
from kvshm.records import SlotState
from kvshm.segment import SegmentName
from kvshm.slots import Slot

from .chains import Chain, find_chains
from .holders import Holders
from .snapshot import ReplicaSnapshot, Snapshot, TableSnapshot

Json = dict[str, Any]


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


def describe(taken: Snapshot, filters: Filters) -> Json:
    """Return the snapshot as a tree of dicts and lists: one element per namespace."""
    return {
        "namespaces": [_namespace(taken.only(name), name, filters) for name in taken.namespaces]
    }


def _namespace(part: Snapshot, namespace: str, filters: Filters) -> Json:
    holders = Holders(part)
    # Those that share stand together.
    tables = sorted(part.tables, key=lambda table: (table.fingerprint, table.name))
    engines = [_engine(t, holders, filters) for t in tables if _is_asked(t.name, t.pid, filters)]
    replicas = [_replica(r, filters) for r in part.replicas if _is_asked(r.name, r.pid, filters)]
    unreadable = [broken for broken in part.unreadable if _is_epoch(broken.epoch, filters)]
    ended = [ended for ended in part.ended if _is_epoch(ended.epoch, filters)]
    narrow = filters.leased or filters.block_hash is not None
    return {
        "namespace": namespace,
        "coordinator": bool(part.coordinated),
        "engines": [engine for engine in engines if engine["blocks"] or not narrow],
        "replicas": [
            replica
            for replica in replicas
            if not filters.leased and (replica["entries"] or not narrow)
        ],
        "unreadable": [{"segment": b.segment, "problem": b.problem} for b in unreadable],
        "ended": [{"epoch": f"{e.epoch:016x}", "socket": str(e.path)} for e in ended],
    }


def _is_asked(name: SegmentName, pid: int, filters: Filters) -> bool:
    return filters.engine in (name.engine, str(pid)) or _is_epoch(name.epoch, filters)


def _is_epoch(epoch: int, filters: Filters) -> bool:
    wanted = filters.engine
    return wanted is None or wanted.removeprefix("0x") == f"{epoch:016x}"


# -- engines


def _engine(table: TableSnapshot, holders: Holders, filters: Filters) -> Json:
    return {
        "engine": table.engine,
        "segment": str(table.name),
        "epoch": f"{table.name.epoch:016x}",
        "pid": table.pid,
        "alive": table.alive,
        "died": table.died,
        "model": table.model,
        "fingerprint": table.fingerprint.hex(),
        "block_size": table.block_size,
        "num_blocks": table.num_blocks,
        "states": _states(table),
        "lease_bit": None if table.lease_bit < 0 else table.lease_bit,
        "heartbeat": table.heartbeat,
        "leases_taken": table.leases_taken,
        "retired": table.retired,
        "life": [_life(word, table.name.epoch) for word in table.life],
        "created_ns": table.created_ns,
        "blocks": list(_blocks(table, holders, filters)),
        **_rest(table, filters),
    }


def _rest(table: TableSnapshot, filters: Filters) -> Json:
    """Everything of an engine that is not asked for with ``leased``."""
    chains = find_chains(table.slots, _hash_matches(filters.block_hash))
    shown: Json = {
        "chains": [_chain(chain) for chain in chains],
        "counters": {label: count for label, count in table.counters.items() if count},
        "errors": [error._asdict() for error in table.errors],
    }
    if filters.leased:
        shown = {name: type(empty)() for name, empty in shown.items()}
    return {**shown, "problems": table.problems}


def _states(table: TableSnapshot) -> dict[str, int]:
    counts = Counter(slot.state for slot in table.slots.values())
    return {
        "empty": table.num_blocks - len(table.slots),
        "ready": counts[SlotState.READY],
        "draining": counts[SlotState.DRAINING],
        "leased": sum(1 for slot in table.slots.values() if slot.leases),
    }


def _life(word: int, epoch: int) -> str:
    """A rank's life word: "valid", "ended", or, where it is neither, its value."""
    return {epoch: "valid", 0: "ended"}.get(word, f"{word:016x}")


def _hash_matches(prefix: str | None) -> Callable[[int, Slot], bool]:
    wanted = (prefix or "").lower()
    return lambda block, slot: slot.block_hash.hex().startswith(wanted)


def _blocks(table: TableSnapshot, holders: Holders, filters: Filters) -> Iterator[Json]:
    matches = _hash_matches(filters.block_hash)
    only_leased = filters.leased or not (filters.entries or filters.block_hash)
    for block, slot in table.slots.items():
        if matches(block, slot) and (slot.leases or not only_leased):
            yield {
                "block_id": block,
                "block_hash": slot.block_hash.hex(),
                "generation": slot.generation,
                "state": slot.state.name.lower(),
                "depth": slot.depth,
                "published_ms": slot.published_ms,
                "references": slot.leases.bit_count(),
                "holders": holders.of(slot.leases),
            }


def _chain(chain: Chain) -> Json:
    return {
        "tip": chain.tip,
        "block_hash": chain.slot.block_hash.hex(),
        "depth": chain.slot.depth,
        "length": chain.length,
        "complete": chain.complete,
    }


# -- replicas


def _replica(replica: ReplicaSnapshot, filters: Filters) -> Json:
    epochs = {row.row: f"{row.epoch:016x}" for row in replica.rows}
    listed = filters.entries or filters.block_hash is not None
    return {
        "engine": replica.name.engine,
        "segment": str(replica.name),
        "epoch": f"{replica.name.epoch:016x}",
        "pid": replica.pid,
        "capacity": replica.capacity,
        "count": replica.count,
        "rows": [
            {
                "engine": row.name,
                "epoch": epochs[row.row],
                "state": row.state.name.lower(),
                "num_blocks": row.num_blocks,
                "entries": row.entries,
                "lease_bit": None if row.lease_bit < 0 else row.lease_bit,
            }
            for row in replica.rows
        ],
        "entries": [
            _entry(entry, epochs.get(entry.row))
            for entry in replica.entries
            if listed and _tag_matches(entry, filters.block_hash)
        ],
    }


def _tag(entry: Entry) -> str:
    """The first 8 bytes of the block's hash, in the hash's own order."""
    return entry.tag.to_bytes(8, "little").hex()


def _tag_matches(entry: Entry, prefix: str | None) -> bool:
    wanted = (prefix or "").lower()
    return _tag(entry).startswith(wanted[:16])


def _entry(entry: Entry, epoch: str | None) -> Json:
    return {
        "hash_prefix": _tag(entry),
        "epoch": epoch,
        "block_id": entry.block_id,
        "generation": entry.generation,
        "depth": entry.depth,
    }
