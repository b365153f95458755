"""What callers give: checked, and refused with what to give instead, before anything is done."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import astuple

from kvshm._base.ids import HASH_BYTES
from kvshm._engine.groups import Group
from kvshm._shm.layout import ENGINE_NAME_BYTES, MAX_BLOCKS
from kvshm.errors import MisuseError
from kvshm.interfaces import MAX_REGIONS, Region

MAX_GROUPS = 1 << 16
"""As many as a block's record can name."""

T = TypeVar("T")


def listed(what: str, given: Iterable[T]) -> list[T]:
    """Return what was given as a list.  Raises MisuseError."""
    if isinstance(given, str | bytes):
        raise MisuseError(f"{what} is {given!r}; give a list of them")
    try:
        return list(given)
    except TypeError:
        raise MisuseError(f"{what} is {given!r}; give a list of them") from None


def whole(what: str, given: Any, least: int | None = None) -> int:
    """Return a whole number of any kind, numpy's included, as an int.  Raises MisuseError for
    anything else, and for less than ``least``."""
    with suppress(TypeError):
        if least is None or operator.index(given) >= least:
            return operator.index(given)
    more = "" if least is None else f", {least} or more"
    raise MisuseError(f"{what} is {given!r}; give a whole number{more}")


def checked_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys as a list.  Raises MisuseError unless all have the bytes of a key."""
    given = listed("keys", keys)
    for key in given:
        if not isinstance(key, bytes) or len(key) != HASH_BYTES:
            raise MisuseError(f"{key!r} is not a key; keys() and prefix_keys() make them")
    return given


def checked_start(start: int, most: int) -> int:
    """Return the index of a first block.  Raises MisuseError."""
    if not 0 <= (first := whole("start", start)) <= most:
        raise MisuseError(f"start is {start!r}; give an index among the {most} keys, not tokens")
    return first


def checked_name(given: str | None) -> str:
    """Return an engine's name, made of the program's and its pid unless one is given.  Raises
    MisuseError."""
    name = given or f"{Path(sys.argv[0]).stem[:40] or 'python'}-{os.getpid()}"
    if not isinstance(name, str):
        raise MisuseError(f"name is {name!r}; give text")
    if not name.isprintable() or len(name.encode()) > ENGINE_NAME_BYTES:
        raise MisuseError(
            f"name {name!r} is not printable, or has over {ENGINE_NAME_BYTES} bytes; shorten it"
        )
    return name


def checked_regions(regions: Sequence[Region], memory: Any) -> list[Region]:
    """Return the regions, which lie in the memory and share no byte as far as can be seen.  Raises
    MisuseError."""
    given = [_region(number, region) for number, region in enumerate(listed("regions", regions))]
    if not 0 < len(given) <= MAX_REGIONS:
        raise MisuseError(f"{len(given)} regions; give 1 to {MAX_REGIONS}")
    _check_memory(given, memory)
    for number, region in enumerate(given):
        for other in given[:number]:
            if overlap(region, other):
                raise MisuseError(
                    f"region {number} has bytes of another one: {region}, {other}; give each block "
                    "bytes of its own"
                )
    if not 0 < (num_blocks := min(region.num_blocks for region in given)) <= MAX_BLOCKS:
        raise MisuseError(f"the regions have {num_blocks} blocks; give 1 to {MAX_BLOCKS}")
    return given


def _region(number: int, region: Any) -> Region:
    """The region, of Python's own whole numbers."""
    if not isinstance(region, Region):
        raise MisuseError(f"region {number} is {region!r}; give a Region")
    return Region(*(whole(f"a number of region {number}", n) for n in astuple(region)))


def _group(number: int, group: Any) -> Group:
    """The group, of Python's own whole numbers: the fingerprint spells them."""
    if not isinstance(group, Group):
        raise MisuseError(f"group {number} is {group!r}; give a Group")
    if not isinstance(group.state, bool):
        raise MisuseError(f"group {number} has the state {group.state!r}; give True or False")
    own, size, scale, window, chunk, ahead = (
        whole(f"a number of group {number}", n) for n in dataclasses.astuple(group)[:-1]
    )
    return Group(own, size, scale, window, chunk, ahead, group.state)


def overlap(one: Region, other: Region) -> bool:
    """Whether two regions certainly share bytes.  False where their strides differ."""
    if one.handle != other.handle or one.stride != other.stride:
        return False
    near = (one.offset - other.offset) % one.stride
    apart = other.block_bytes <= near <= one.stride - one.block_bytes
    first, last = max(one.offset, other.offset), min(end_of(one), end_of(other))
    return not apart and first < last


def end_of(region: Region) -> int:
    """Return where it ends, in bytes from the start of the memory."""
    return region.offset + (region.num_blocks - 1) * region.stride + region.block_bytes


def _check_memory(regions: Sequence[Region], memory: Any) -> None:
    """Raise MisuseError unless every region lies in its memory."""
    memories = list(memory) if isinstance(memory, list | tuple) else [memory]
    for number, region in enumerate(regions):
        apart = 0 < region.block_bytes <= region.stride
        if not apart or region.offset < 0 or not 0 <= region.handle < len(memories):
            raise MisuseError(
                f"region {number} is impossible: {region}; give an offset of 0 or more, a stride "
                "of at least a block's bytes, and as `handle` the index of its memory"
            )
        where = memories[region.handle]
        nbytes = len(where) if isinstance(where, bytearray) else getattr(where, "nbytes", None)
        if not isinstance(nbytes, int):
            raise MisuseError(
                f"memory {region.handle} is {where!r}; give what allocate() "
                "returned, or the tensors of the cache"
            )
        if end_of(region) > nbytes:
            raise MisuseError(
                f"region {number} ends at byte {end_of(region)}, its memory at {nbytes}; give "
                "fewer blocks, or more memory"
            )


def checked_block_size(block_size: int) -> int:
    """Return the tokens of a block.  Raises MisuseError."""
    if not 0 < (tokens := whole("block_size", block_size)) < 1 << 32:
        raise MisuseError(f"block_size is {block_size!r}; give the tokens of a block, 1 or more")
    return tokens


def checked_seconds(what: str, given: Any, remedy: str = "give seconds") -> float:
    """Return seconds as a number.  Raises MisuseError."""
    try:
        seconds = math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise MisuseError(f"{what} is {given!r}; {remedy}")
    return seconds


def checked_groups(groups: Sequence[Group] | None, block_size: int) -> Sequence[Group]:
    """Return the KV cache groups, one of full attention unless some are given.  Raises
    MisuseError."""
    given = [Group(0, block_size)] if groups is None else listed("groups", groups)
    given = [_group(number, group) for number, group in enumerate(given)]
    for number, group in enumerate(given):
        scaled = group.scale > 0 and group.block_size == group.scale * block_size
        if group.number != number or not scaled:
            raise MisuseError(
                f"group {number} is {group}; number the groups from 0, and give each `scale` keys "
                f"of {block_size} tokens per block"
            )
        kinds = sum(map(bool, (group.window, group.chunk, group.state)))
        ahead_of_state = group.state and group.ahead
        if min(group.window, group.chunk, group.ahead) < 0 or kinds > 1 or ahead_of_state:
            raise MisuseError(
                f"group {number} is {group}; give a window, a chunk or a state (which has nothing "
                f"ahead), or none of them for full attention"
            )
    if len(given) == 1 and given[0].scale != 1:
        raise MisuseError(f"the only group is {given[0]}; give it one key for each block")
    if not 0 < len(given) <= MAX_GROUPS:
        raise MisuseError(
            f"{len(given)} groups; give 1 to {MAX_GROUPS}, or none for one of full attention"
        )
    return given
