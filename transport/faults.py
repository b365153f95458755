"""Deliberately wrong copies, for the oracle tests and ``make demo BREAK=1``.

These are real wrong copies, made where a bug of a transport would make them, so the layers above
must notice them.  Only an argument of the transport switches a fault on::

    wrong-block   each target gets the first target's block, and the first gets the second's (for a
                  single block: the neighbouring block).  Swapping blocks would not do: attention
                  ignores the order of blocks, so the answer would differ only by rounding.
    shift         each target gets the block after its source; after the peer's last comes block 0
    zero          each target gets zeros
"""

from __future__ import annotations

from collections.abc import Sequence

from kvshm._base.ids import BlockId
from kvshm.config import Fault
from kvshm.errors import TransportError


def check_fault(fault: str | None) -> None:
    """Raise TransportError for an unknown fault."""
    if fault is not None and fault not in tuple(Fault):
        raise TransportError(f"no fault {fault!r}; there are {', '.join(Fault)}")


def misdirect(source: Sequence[BlockId], num_blocks: int, fault: str | None) -> Sequence[BlockId]:
    """Return the blocks that ``fault`` reads in place of ``source``."""
    if fault == Fault.SHIFT or (fault == Fault.WRONG_BLOCK and len(source) == 1):
        return [BlockId((block + 1) % num_blocks) for block in source]
    if fault == Fault.WRONG_BLOCK:
        return [source[1], *[source[0]] * (len(source) - 1)]
    return source
