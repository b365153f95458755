"""Which engine owns which lease bit, and when a bit may go to another engine.  Pure.

A bit is free again only after two things: no process has a table any more under which the process
could hold leases with this bit, and all slot tables were swept.  An earlier sweep could clear the
next owner's leases, and a leave does not prove that no copy is under way.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from kvshm._base.ids import NO_LEASE_BIT
from kvshm._shm.layout import NUM_LEASE_BITS


@dataclass
class _Bit:
    owner: int = 0
    """Epoch; 0: none."""
    pid: int = 0
    """The owner's pid, from SO_PEERCRED."""
    holders: set[int] = field(default_factory=set)
    """Epochs whose processes may hold leases with this bit."""
    used: bool = False


class LeaseBits:
    """The 28 bits of one namespace."""

    def __init__(self) -> None:
        self._bits = [_Bit() for _ in range(NUM_LEASE_BITS)]

    @property
    def holders(self) -> set[int]:
        """All epochs that must end before their bits can go to other engines."""
        return set().union(*(bit.holders for bit in self._bits))

    def of_process(self, pid: int) -> set[int]:
        """The holders of one process's bits; none for a process that is not visible here (0)."""
        return set().union(*(bit.holders for bit in self._bits if bit.pid == pid != 0))

    @property
    def free(self) -> int:
        """Mask of the bits without an owner."""
        return sum(1 << n for n, bit in enumerate(self._bits) if not bit.owner)

    def grant(
        self, epoch: int, pid: int, presented: int, roster: Set[int], last_first: bool
    ) -> int:
        """Give ``epoch`` a bit: the presented bit if possible, else a bit that was never used, else
        a bit that was used and swept; -1 if there is none.

        ``roster``: epochs of the engines in the roster; a bit of the same process whose epoch is
        not in the roster is the process's own from an earlier epoch.  ``last_first``: take the
        highest bit that was never used, because other engines may yet return with theirs.
        """
        bits = self._bits
        own = [n for n, bit in enumerate(bits) if self._is_own(bit, epoch, pid, roster)]
        free = [n for n, bit in enumerate(bits) if not bit.owner]
        never_used = [n for n in free if not bits[n].used]
        if last_first:
            never_used.reverse()
        of_epoch = [n for n in own if bits[n].owner == epoch]
        preferences = [*of_epoch, *never_used, *free, *own]
        if not preferences:
            return NO_LEASE_BIT
        number = presented if presented in preferences else preferences[0]
        bit = bits[number]
        bit.owner, bit.pid, bit.used = epoch, pid, True
        bit.holders.add(epoch)
        return number

    @staticmethod
    def _is_own(bit: _Bit, epoch: int, pid: int, roster: Set[int]) -> bool:
        if bit.owner == epoch:
            return True
        # pid 0 stands for all processes that are not visible here: perhaps several.
        return bool(bit.owner and pid) and bit.pid == pid and bit.owner not in roster

    def table_unused(self, epoch: int) -> int:
        """No process has this epoch's table any more.  Returns the mask of the bits that are free
        by that; the caller has to sweep them."""
        orphans = 0
        for number, bit in enumerate(self._bits):
            if epoch in bit.holders:
                bit.holders.discard(epoch)
                if not bit.holders:
                    bit.owner = 0
                    orphans |= 1 << number
        return orphans
