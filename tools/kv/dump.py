"""``kvshm kv dump``: writes the published blocks of a running engine to a file.

No lease is taken, so the engine never waits for a dump; blocks that it reuses meanwhile are left
out and counted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy

from kvshm._base.ids import BlockId, Rank
from kvshm._base.log import engine_name
from kvshm._base.rundir import rank_socket
from kvshm._base.syncpoints import SyncPoint, sync_point
from kvshm._node.protocol import EngineInfo
from kvshm._shm.available_memory import check_available
from kvshm._shm.layout import BlockRecord, pack_records, unpack_records
from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import CorruptSegment, KvshmError, TransportError
from kvshm.interfaces import CopyState, MemoryDescriptor, SupportsAllocate, load_transport

from ..node.reader import NodeReader
from ..options import NoSuchEngine, select
from .block_file import TAG_BYTES, BlockFileError, BlockKey, Description, packed_regions
from .roster import ask_for

HOST_MEMORY = "posix_shm"
BATCH_BYTES = 64 << 20
"""Of blocks that are copied before they are re-checked: few, so that few are lost."""
BATCH_BLOCKS = 64


class NothingToDump(KvshmError):
    """There is no engine, or not one, or it has no such blocks; says which."""


@dataclass(frozen=True)
class Wanted:
    engine: str | None = None
    """Name, pid or epoch (hexadecimal); None: the only one there is."""
    model: str | None = None
    keys: Sequence[str] = ()
    """Beginnings of keys in hexadecimal: only these blocks and all before them."""
    limit: int | None = None


@dataclass
class Dump:
    what: Description
    arrays: list[list[Any]]
    changed: int = 0


def read_engine(run_dir: Path, namespace: str, wanted: Wanted) -> Dump:
    """Read the wanted blocks.  Changes nothing in the engine.  Raises KvshmError or OSError."""
    with NodeReader(run_dir, namespace) as reader:
        mapped = [one for space in reader.map_segments() for one in space.engines]
        try:
            table = _choose([one.table for one in mapped if one.table is not None], wanted)
        except NoSuchEngine:
            select(reader.read(), wanted.engine)
            why = f"engine {wanted.engine} does not answer, has ended or shares nothing"
            raise NothingToDump(f"{why}: see kvshm status") from None
        info = ask_for(run_dir, namespace, table)
        with closing(_Reader(run_dir, namespace, table, info)) as memory:
            # Last: an engine that reuses blocks all the time has others a moment later.
            blocks = _select(_published(table), wanted)
            if not blocks:
                raise NothingToDump(f"engine {_name(table)} has published no such block")
            return memory.read_all(blocks)


# -- which engine, which blocks


def _name(table: SlotTableView) -> str:
    return engine_name(table.epoch, table.engine, table.pid)


def _choose(tables: Sequence[SlotTableView], wanted: Wanted) -> SlotTableView:
    living = [table for table in tables if not table.retired and not table.died]
    chosen = [
        table
        for table in living
        if wanted.engine in (None, table.engine, str(table.pid), f"{table.epoch:016x}")
        and wanted.model in (None, table.model)
    ]
    if len(chosen) == 1:
        return chosen[0]
    if not chosen and wanted.engine is not None and wanted.model is None:
        raise NoSuchEngine(wanted.engine, [_name(table) for table in living])
    there = "; ".join(f"{_name(table)} of model {table.model}" for table in living) or "none"
    what = "no engine is" if not chosen else "several engines are"
    raise NothingToDump(f"{what} meant; name one with --engine: {there}")


class _Block(NamedTuple):
    record: BlockRecord
    what: BlockKey


def _published(table: SlotTableView) -> list[_Block]:
    found: dict[tuple[bytes, int], _Block] = {}
    for record in unpack_records(table.scan()):
        try:
            slot = table.slot(record.block_id)
        except CorruptSegment:
            continue
        # If the slot was reused since, this is another block's parent; the re-check finds out.
        parent = slot.parent_tag.to_bytes(TAG_BYTES, "little")
        what = BlockKey(bytes(record.block_hash), parent, record.depth, record.group)
        found.setdefault((what.key, what.group), _Block(record, what))
    return list(found.values())


def _select(blocks: list[_Block], wanted: Wanted) -> list[_Block]:
    """The wanted blocks, those nearest to the beginning of their prompts first."""
    if wanted.keys:
        named = [b for b in blocks if b.what.key.hex().startswith(tuple(wanted.keys))]
        blocks = list(_with_blocks_before(named, blocks))
    blocks.sort(key=lambda block: (block.what.depth, block.what.key, block.what.group))
    return blocks[: wanted.limit]


def _with_blocks_before(named: list[_Block], blocks: list[_Block]) -> Iterator[_Block]:
    by_place = {_place(block.what): block for block in blocks}
    while named:
        block = named.pop()
        if by_place.pop(_place(block.what), None) is not None:
            yield block
            parent = by_place.get(_place_before(block.what))
            named += [] if parent is None else [parent]


def _place(block: BlockKey) -> tuple[int, bytes, int]:
    """What a successor says of the block before it."""
    return block.group, block.key[:TAG_BYTES], block.depth


def _place_before(block: BlockKey) -> tuple[int, bytes, int]:
    return block.group, block.parent, block.depth - 1


# -- their bytes


class _RankReader:
    """One rank's memory, and room for the blocks that are copied out of it."""

    def __init__(self, memory: MemoryDescriptor, socket_path: Path, batch: int) -> None:
        if memory.transport != HOST_MEMORY:
            raise TransportError(
                f"its KV cache is {memory.transport} memory: a dump reads host memory only"
            )
        transport = load_transport(HOST_MEMORY)
        own, end = packed_regions([region.block_bytes for region in memory.regions], batch)
        self._regions, self._batch = own, batch
        self._memory = cast(SupportsAllocate, transport).allocate(end)
        self._bytes = numpy.frombuffer(self._memory.buffer, numpy.uint8)
        self._transport = transport(
            memory=self._memory,
            regions=own,
            rank=memory.rank,
            socket_path=socket_path,
            fault=None,
        )
        self._attachment = self._transport.attach(memory)

    def copy(self, blocks: list[BlockId]) -> bool:
        """Copy the blocks into the first rows; returns whether all arrived."""
        targets = [BlockId(row) for row in range(len(blocks))]
        copy = self._attachment.begin_copy(blocks, targets, lambda: True)
        return bool(copy.poll() is CopyState.DONE)

    def rows(self, region: int) -> Any:
        where = self._regions[region]
        end = where.offset + where.block_bytes * self._batch
        return self._bytes[where.offset : end].reshape(self._batch, where.block_bytes)

    def checksums(self, rows: list[BlockId]) -> list[int]:
        return list(self._transport.checksum(rows))

    def close(self) -> None:
        self._transport.close()
        self._memory.close()


@dataclass
class _Read:
    arrays: list[list[Any]]
    checksums: list[list[int]]
    blocks: list[BlockKey] = field(default_factory=list)


class _Reader:
    def __init__(
        self, run_dir: Path, namespace: str, table: SlotTableView, info: EngineInfo
    ) -> None:
        """Attaches the memory of every rank.  Raises KvshmError."""
        memories = [rank.memory for rank in info.ranks]
        if len(memories) != table.num_ranks:
            raise BlockFileError(f"engine {_name(table)} has described {len(memories)} ranks")
        self._table, self._info = table, info
        self._sizes = [[region.block_bytes for region in memory.regions] for memory in memories]
        each = max(1, *(memory.block_bytes for memory in memories))
        self._batch = max(1, min(BATCH_BLOCKS, BATCH_BYTES // each))
        process = secrets.token_hex(4)
        with ExitStack() as undo:
            self._ranks: list[_RankReader] = []
            for memory in memories:
                path = rank_socket(run_dir, namespace, process, memory.rank)
                self._ranks.append(
                    undo.enter_context(closing(_RankReader(memory, path, self._batch)))
                )
            self._undo = undo.pop_all()

    def read_all(self, blocks: Sequence[_Block]) -> Dump:
        """Read the blocks, batch by batch.  Raises KvshmError."""
        count = len(blocks)
        _check_memory(count * sum(map(sum, self._sizes)), count)
        arrays: list[list[Any]] = [
            [numpy.empty((count, n), numpy.uint8) for n in s] for s in self._sizes
        ]
        read = _Read(arrays, [[] for _ in self._ranks])
        for first in range(0, count, self._batch):
            self._read(blocks[first : first + self._batch], read)
        kept = len(read.blocks)
        if not kept:
            raise NothingToDump(
                f"all {count} blocks were reused while they were read, or the engine ended"
            )
        what = Description(
            fingerprint=self._info.fingerprint,
            fields=self._info.fields,
            engine=self._table.engine,
            model=self._table.model,
            block_size=self._table.block_size,
            regions=self._sizes,
            blocks=read.blocks,
            checksums=read.checksums,
        )
        return Dump(what, [[array[:kept] for array in rank] for rank in arrays], count - kept)

    def _read(self, blocks: Sequence[_Block], read: _Read) -> None:
        """Copy a batch, then keep those blocks that no rank's re-check rejects."""
        ids = [block.record.block_id for block in blocks]
        arrived = sum(rank.copy(ids) for rank in self._ranks) == len(self._ranks)
        sync_point(SyncPoint.COPIED)
        records = pack_records(block.record for block in blocks)
        good = numpy.full(len(blocks), arrived)
        for rank in range(len(self._ranks)):
            good &= self._table.recheck(Rank(rank), records)
        first, kept = len(read.blocks), numpy.flatnonzero(good)
        for rank, arrays in enumerate(read.arrays):
            for region, array in enumerate(arrays):
                array[first : first + len(kept)] = self._ranks[rank].rows(region)[kept]
            read.checksums[rank] += self._ranks[rank].checksums([BlockId(int(r)) for r in kept])
        read.blocks += [blocks[place].what for place in kept]

    def close(self) -> None:
        self._undo.close()


def _check_memory(nbytes: int, count: int) -> None:
    try:
        check_available(nbytes)
    except OSError as exc:
        raise BlockFileError(
            f"{count} blocks need {nbytes} bytes of memory, {exc.strerror}; take fewer with --limit"
        ) from exc


def parse_keys(text: str) -> list[str]:
    """Return the keys of a list with commas, or of ``@file``.  Raises ValueError or OSError."""
    if text.startswith("@"):
        text = ",".join(Path(os.fspath(text[1:])).read_text().split())
    keys = [key.strip().lower().removeprefix("0x") for key in text.split(",") if key.strip()]
    for key in keys:
        int(key, 16)
    if not keys:
        raise ValueError("no key is named")
    return keys
