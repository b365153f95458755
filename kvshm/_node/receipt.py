"""A receipt: names the event by which one engine shows what it has computed for a request.

Whoever passes a request on to another engine passes this on, too, and that engine waits until it
has applied the event, and with it all that the first one sent before.  The event has no number
while the request's answer is written: the client's thread gives numbers as it sends.  What it
publishes is known by then: a block, at a generation of its slot, which is published once.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from kvshm._base.ids import BlockId, Epoch, Generation

_TEXT = re.compile("([0-9a-f]{16})[.]([0-9]{1,8})[.]([0-9]{1,10})", re.ASCII)


class Receipt(NamedTuple):
    """The publication of a block by the engine of this epoch."""

    epoch: Epoch
    block: BlockId
    generation: Generation

    def __str__(self) -> str:
        """The form in which answers and requests carry it, opaque to everybody else."""
        return f"{self.epoch:016x}.{self.block}.{self.generation}"

    @classmethod
    def read(cls, text: object) -> Self | None:
        """Read that form; None for anything else."""
        if not isinstance(text, str) or (found := _TEXT.fullmatch(text)) is None:
            return None
        epoch, block, generation = int(found[1], 16), int(found[2]), int(found[3])
        if generation >= 1 << 32:
            return None
        return cls(Epoch(epoch), BlockId(block), Generation(generation))
