"""Which memory the nodes of this process share: no block belongs to two of them.

A block that two nodes publish or load into is checked by neither for what the other one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from kvshm.errors import MisuseError
from kvshm.interfaces import Region

from .arguments import end_of, overlap
from .block_node import BlockNode

N = TypeVar("N", bound=BlockNode)


class Claim:
    """Regions that one node has, or is about to have."""

    def __init__(self, regions: Sequence[Region], apart: bool) -> None:
        """``regions``: by address.  Raises MisuseError if another node that is not closed has some
        of these bytes; unless ``apart``, only if that one is.  Of two threads at once at least one
        is refused."""
        self._regions = regions
        self._apart = apart
        self._node: weakref.ref[BlockNode] | None = None
        _claims.append(self)  # first: what another thread does meanwhile sees it
        for other in [one for one in _claims if one is not self]:
            if not other._counts():
                with suppress(ValueError):  # another thread has
                    _claims.remove(other)
            elif self._meets(other):
                self.give_up()
                raise MisuseError(
                    f"{other._owner()} of this process has these blocks already; join() once for "
                    "each memory, and close() that node before another one takes its place"
                )

    def belong_to(self, node: BlockNode) -> None:
        """The regions are the node's, until it is closed."""
        self._node = weakref.ref(node)

    def give_up(self) -> None:
        """There will be no node."""
        self._regions = ()

    def _counts(self) -> bool:
        if self._node is None:
            return bool(self._regions)
        return (node := self._node()) is not None and node._shares

    def _owner(self) -> str:
        node = self._node() if self._node is not None else None
        return f"node {node.name}" if node is not None else "another node"

    def _meets(self, other: Claim) -> bool:
        if not (self._apart or other._apart):
            return False
        return any(_may_overlap(one, its) for one in self._regions for its in other._regions)


_claims: list[Claim] = []
"""No lock guards it, which a fork could leave locked: it is changed in place, which is atomic."""


def claimed(regions: Sequence[Region], make: Callable[[], N], *, apart: bool = True) -> N:
    """Return the node that ``make`` makes, which owns these regions from now on: alone, or unless
    ``apart`` with others of which this holds.  Raises what ``make`` raises, and MisuseError if
    another node has some of their bytes."""
    claim = Claim(regions, apart)
    try:
        node = make()
    except BaseException:
        claim.give_up()
        raise
    claim.belong_to(node)
    return node


def _may_overlap(one: Region, other: Region) -> bool:
    """Whether two regions may share bytes: certainly, or their strides differ and they cross."""
    if one.stride == other.stride:
        return overlap(one, other)
    return max(one.offset, other.offset) < min(end_of(one), end_of(other))


def by_address(regions: Sequence[Region], memory: Any) -> list[Region]:
    """Return the regions as parts of the address space; without those in memory that does not say
    where it lies."""
    memories = list(memory) if isinstance(memory, list | tuple) else [memory]
    starts = [_address(one) for one in memories]
    return [
        replace(region, offset=start + region.offset, handle=0)
        for region in regions
        if (start := starts[region.handle]) is not None
    ]


def _address(memory: Any) -> int | None:
    """Where it lies, as ``allocate`` and tensors say it."""
    if isinstance(address := getattr(memory, "address", None), int):
        return address
    pointer = getattr(memory, "data_ptr", None)
    return int(pointer()) if callable(pointer) else None
