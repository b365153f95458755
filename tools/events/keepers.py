"""Which blocks the keepers of a namespace have: these are on the node, too."""

from __future__ import annotations

from collections.abc import Callable

from kvshm.api import Reader

from .copies import KeptBlock, last_bits

LOOK_SECONDS = 1.0


class Keepers:
    """One thread at a time."""

    def __init__(self, reader: Reader, say: Callable[[str], None]) -> None:
        self._reader, self._say = reader, say
        self._num_kinds = 1

    def look(self) -> frozenset[KeptBlock]:
        """Return the blocks of all keepers; none if the namespace has engines of several kinds,
        whose blocks have equal hashes and unequal contents.  May block for seconds."""
        engines = [engine for engine in self._reader.engines() if engine.alive]
        before, self._num_kinds = self._num_kinds, len({each.fingerprint for each in engines})
        if self._num_kinds > 1:
            if before != self._num_kinds:
                self._say(
                    f"the namespace has engines of {self._num_kinds} fingerprints: what only its "
                    "keepers have is left out"
                )
            return frozenset()
        return frozenset(
            (block.group, last_bits(block.key))
            for keeper in engines
            if keeper.keeps
            for block in self._reader.list(keeper.epoch)
        )
