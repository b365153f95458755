"""How an engine's blocks are made up: what another engine needs to join with the same fingerprint
without computing anything."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import NamedTuple

from kvshm._node.protocol import EngineInfo
from kvshm._shm.table_header import TableHeader
from kvshm.interfaces import Region

_LINE = 64
"""Bytes of a cache line."""
_PAGE = mmap.PAGESIZE


class EngineLayout(NamedTuple):
    """What an engine says of itself (``Reader.layout``)."""

    fingerprint: str
    """Engines with the same one share; hexadecimal."""
    fields: Mapping[str, str]
    """What the fingerprint is a digest of."""
    model: str
    """``Identity.model``."""
    block_size: int
    """Tokens for each key."""
    transport: str
    """Which one shares its memory: ``posix_shm``, ``cuda_ipc``."""
    block_bytes: tuple[tuple[int, ...], ...]
    """For each rank the bytes of one block in each region."""

    @property
    def stride(self) -> int:
        """Bytes that a block of all ranks takes: whole pages, each region on cache lines of its
        own."""
        return _rounded(sum(_rounded(n, _LINE) for part in self.block_bytes for n in part), _PAGE)

    def regions(self, num_blocks: int) -> tuple[list[Region], ...]:
        """Return for each rank where its regions lie in a memory of ``num_blocks`` times
        ``stride`` bytes, if the bytes of each block lie together."""
        at, stride, ranks = 0, self.stride, []
        for sizes in self.block_bytes:
            ranks.append(list[Region]())
            for size in sizes:
                ranks[-1].append(Region(at, stride, size, num_blocks))
                at += _rounded(size, _LINE)
        return tuple(ranks)

    def places(self, block: int) -> list[list[slice]]:
        """Return for each rank and region where one block lies in such a memory."""
        return [
            [slice(at := r.offset + block * r.stride, at + r.block_bytes) for r in rank]
            for rank in self.regions(block + 1)
        ]


def layout_of(table: TableHeader, info: EngineInfo) -> EngineLayout | None:
    """Return what an engine's table and its entry in the roster say; None if that cannot be."""
    parts = tuple(tuple(r.block_bytes for r in rank.memory.regions) for rank in info.ranks)
    if not parts or any(min(part, default=0) <= 0 for part in parts):
        return None
    transport = info.ranks[0].memory.transport
    return EngineLayout(
        table.fingerprint.hex(), info.fields, table.model, table.block_size, transport, parts
    )


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
