"""Wrong copies on purpose: what the oracle tests and ``make demo BREAK=1`` switch on.

A check that has never failed proves nothing.  These faults are real wrong copies, made
where a bug of a transport would make them, so that everything above must notice.  They are
chosen by an argument of the transport, never by its own choice; None is the normal way.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvshm.config import Fault
from kvshm.errors import TransportError
from kvshm.ids import BlockId

WRONG_BLOCK = Fault.WRONG_BLOCK
"""Each target gets the block meant for the first one, the first the second's (a plan of a single
block: the neighbouring slot).  No mere exchange: attention does not ask for the order of blocks,
and a model would give the same answer but for rounding."""
SHIFT = Fault.SHIFT
"""Each target gets the slot after its source, the peer's last slot wrapping to slot 0."""
ZERO = Fault.ZERO
"""Each target gets zeros."""


def check_fault(fault: str | None) -> None:
    """Raise TransportError for an unknown fault."""
    if fault is not None and fault not in tuple(Fault):
        raise TransportError(f"no fault {fault!r}; there are {', '.join(Fault)}")


def misdirect(source: Sequence[BlockId], num_blocks: int, fault: str | None) -> Sequence[BlockId]:
    """Return the blocks that ``fault`` reads in place of ``source``."""
    if fault == SHIFT or (fault == WRONG_BLOCK and len(source) == 1):
        return [BlockId((block + 1) % num_blocks) for block in source]
    if fault == WRONG_BLOCK:
        return [source[1], *[source[0]] * (len(source) - 1)]
    return source
