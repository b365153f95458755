"""Which memory the nodes of this process share: no block belongs to two of them.

A block that two nodes publish or load into is checked by neither for what the other one does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvshm.errors import MisuseError
from kvshm.interfaces import Region

from .arguments import overlap
from .membership import Membership


class _Claim(NamedTuple):
    node: weakref.ref[Membership]
    regions: Sequence[Region]
    """By address."""


_claims: tuple[_Claim, ...] = ()
"""Replaced as a whole, so that no lock is needed, which a fork could leave locked."""


def check_unclaimed(regions: Sequence[Region]) -> None:
    """Raise MisuseError if a node that is not closed has some of these bytes."""
    for ref, claimed in _claims:
        if (node := ref()) is None or not node._shares:
            continue
        if any(overlap(one, other) for one in regions for other in claimed):
            raise MisuseError(
                f"node {node.name} of this process has these blocks already; join() once for each "
                "memory, and close() that node before another one takes its place"
            )


def claim(node: Membership, regions: Sequence[Region]) -> None:
    """These blocks are the node's, until it is closed."""
    global _claims
    living = [one for one in _claims if (other := one.node()) is not None and other._shares]
    _claims = (*living, _Claim(weakref.ref(node), regions))


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
