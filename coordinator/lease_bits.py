"""Who holds which lease bit, and when a bit may be handed on.  Pure.

A bit is free again only when every process that could still hold leases with it has been
seen dead and all slot tables were swept: a sweep that came earlier could clear the next
owner's leases, a leave is no proof that nothing is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from kvshm.records import NUM_LEASE_BITS
from kvshm.segment import Identity
from kvshm.terms import NO_LEASE_BIT

from .actions import Owner, Process

NOBODY = Owner(0, Identity(bytes(16), 0, 0))


@dataclass
class _Bit:
    owner: Owner = NOBODY
    holders: set[Process] = field(default_factory=set)
    """Processes alive that may hold leases with this bit."""
    sweep_at: float | None = None
    """The owner was dead when the coordinator started: swept then."""

    @property
    def is_free(self) -> bool:
        return self.owner.epoch == 0

    @property
    def never_used(self) -> bool:
        return self.owner == NOBODY


class LeaseBits:
    """The 28 bits of one namespace."""

    def __init__(
        self,
        rows: Sequence[Owner],
        dead: Set[int],
        sweep_at: float,
        unknown: Set[int] = frozenset(),
    ) -> None:
        """``rows``: what the lease table says; ``dead``: bits whose owner does not live any
        more, to be swept at ``sweep_at``; ``unknown``: bits whose owner cannot be seen, which
        stay taken."""
        assert len(rows) == NUM_LEASE_BITS
        self._bits = [_Bit(owner) for owner in rows]
        for number, bit in enumerate(self._bits):
            if bit.is_free:
                continue
            if number in dead:
                bit.sweep_at = sweep_at
            elif number not in unknown:
                bit.holders = {Process(bit.owner.identity.pid, bit.owner.identity.start_time)}

    @property
    def holders(self) -> set[Process]:
        """All processes whose death has to be known before their bits can be handed on."""
        return set().union(*(bit.holders for bit in self._bits))

    def owner(self, number: int) -> Owner:
        return self._bits[number].owner

    def grant(
        self, owner: Owner, holders: Iterable[Process], presented: int, roster: Set[int]
    ) -> int:
        """Give ``owner`` a bit: the one it presents if that is possible, else one never
        used, else one used and swept; -1 if there is none.

        ``roster``: epochs of the engines that are in the roster; a bit of the same process
        whose epoch is not among them is the process's own from an earlier epoch.
        """
        for number in self._preferences(owner, presented, roster):
            bit = self._bits[number]
            bit.owner = owner
            bit.holders |= set(holders)
            return number
        return NO_LEASE_BIT

    def _preferences(self, owner: Owner, presented: int, roster: Set[int]) -> Iterable[int]:
        numbers = range(NUM_LEASE_BITS)
        own = [n for n in numbers if self._is_own(n, owner, roster)]
        free = [n for n in numbers if self._bits[n].is_free]
        if presented in own or presented in free:
            yield presented
        yield from (n for n in own if self._bits[n].owner.epoch == owner.epoch)
        yield from (n for n in free if self._bits[n].never_used)
        yield from free
        yield from own

    def _is_own(self, number: int, owner: Owner, roster: Set[int]) -> bool:
        held = self._bits[number].owner
        if held.epoch == 0 or held.identity != owner.identity:
            return False
        return held.epoch == owner.epoch or held.epoch not in roster

    def died(self, process: Process) -> list[int]:
        """Forget a dead process; return the bits that nobody alive holds any more.  They
        are to be swept, then freed."""
        orphans = []
        for number, bit in enumerate(self._bits):
            if process in bit.holders:
                bit.holders.discard(process)
                if not bit.holders:
                    orphans.append(number)
        return orphans

    def due(self, now: float) -> list[int]:
        """Return the bits of owners found dead at the start whose grace period is over."""
        return [
            n
            for n, bit in enumerate(self._bits)
            if bit.sweep_at is not None and bit.sweep_at <= now
        ]

    def free(self, number: int) -> Owner:
        """The bit was swept: it may be handed on.  Returns what to write down."""
        bit = self._bits[number]
        bit.owner = Owner(0, bit.owner.identity)
        bit.sweep_at = None
        return bit.owner
