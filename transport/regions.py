"""Checks of region lists, which come from other processes, and iteration over their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from kvshm._base.ids import BlockId
from kvshm.errors import TransportError
from kvshm.interfaces import Region


def check_bounds(regions: Sequence[Region], sizes: Sequence[int]) -> None:
    """Raise TransportError unless every block of every region lies within its memory.
    ``sizes[handle]`` is the length in bytes of memory ``handle``."""
    if not regions:
        raise TransportError("a KV cache without regions cannot be shared")
    for number, region in enumerate(regions):
        if not 0 <= region.handle < len(sizes):
            raise TransportError(f"region {number} lies in memory {region.handle} of {len(sizes)}")
        disjoint = 1 <= region.block_bytes <= region.stride
        if region.num_blocks < 1 or region.offset < 0 or not disjoint:
            raise TransportError(f"region {number} is impossible: {region}")
        end = region.offset + (region.num_blocks - 1) * region.stride + region.block_bytes
        if end > sizes[region.handle]:
            raise TransportError(
                f"region {number} ends at byte {end}, its memory at {sizes[region.handle]}"
            )


def check_layouts(own: Sequence[Region], peer: Sequence[Region]) -> None:
    """Raise TransportError unless the lists have equal lengths and equal ``block_bytes``."""
    if len(own) != len(peer):
        raise TransportError(f"the peer's cache has {len(peer)} regions, this one {len(own)}")
    for number, (mine, theirs) in enumerate(zip(own, peer, strict=True)):
        if mine.block_bytes != theirs.block_bytes:
            raise TransportError(
                f"region {number}: a block has {theirs.block_bytes} bytes at the peer, "
                f"{mine.block_bytes} here"
            )


def count_blocks(regions: Sequence[Region]) -> int:
    return min(region.num_blocks for region in regions)


def check_blocks(blocks: Sequence[BlockId], num_blocks: int, whose: str) -> None:
    """Raise TransportError unless every id is at least 0 and below ``num_blocks``."""
    if blocks and not (min(blocks) >= 0 and max(blocks) < num_blocks):
        wrong = next(block for block in blocks if not 0 <= block < num_blocks)
        raise TransportError(f"block {wrong} is not one of {whose} {num_blocks} blocks")


def check_pairs(
    source: Sequence[BlockId], peer_blocks: int, target: Sequence[BlockId], own_blocks: int
) -> None:
    """Raise TransportError unless ``source`` and ``target`` pair up and all ids exist."""
    if len(source) != len(target):
        raise TransportError(f"{len(source)} blocks cannot be copied onto {len(target)}")
    check_blocks(source, peer_blocks, "the peer's")
    check_blocks(target, own_blocks, "this cache's")


def spans(regions: Sequence[Region], block: BlockId) -> Iterator[tuple[int, int, int]]:
    """Yield (memory handle, first byte, end) of ``block`` in each region, in order."""
    for region in regions:
        start = region.offset + block * region.stride
        yield region.handle, start, start + region.block_bytes


def block_checksum(views: Sequence[memoryview], regions: Sequence[Region], block: BlockId) -> int:
    """Return the 64-bit xxh3 of a block's bytes, all regions chained in order."""
    digest = xxhash.xxh3_64()
    for handle, start, end in spans(regions, block):
        digest.update(views[handle][start:end])
    return digest.intdigest()
