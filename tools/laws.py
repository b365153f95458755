"""What must hold of everything kvshm keeps in shared memory.  Pure.

A violation is only a suspicion while the node runs: segments are read one after the other,
and what one look finds may be a change half done.  check.py looks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvshm.records import SlotState, table_bytes
from kvshm.segment import SegmentName, is_dead

from .snapshot import LeaseOwner, LeaseTableSnapshot, TableSnapshot

SOON = 0.5
"""Seconds after which no change is half done any more."""
AFTER_A_SWEEP = 10.0
"""Seconds after which a living coordinator has noticed a death, or been restarted and joined
again, and has swept."""


class Violation(NamedTuple):
    """A law that does not hold at one place."""

    segment: str
    place: str
    law: str
    patience: float = SOON
    """Seconds for which it has to stay before it is one."""

    def __str__(self) -> str:
        return f"{self.segment}: {self.place}: {self.law}"


def stated(name: SegmentName, texts: list[str], patience: float = SOON) -> Iterator[Violation]:
    """Violations from the words of a ``check_integrity``: ``place: law``, or of the header."""
    for text in texts:
        place, colon, law = text.partition(": ")
        yield Violation(str(name), *((place, law) if colon else ("header", text)), patience)


# -- slot tables


def of_table(table: TableSnapshot, nbytes: int) -> Iterator[Violation]:
    """Laws of one slot table: its slots and life words, what it says it is, and who made it."""
    yield from stated(table.name, table.problems)
    said = (table.epoch, table.engine)
    named = (table.name.epoch, table.name.engine)
    if said != named:
        yield _header(table, f"says epoch {said[0]:016x}, engine {said[1]!r}; its name does not")
    needed = table_bytes(table.num_blocks, len(table.life))
    if needed != nbytes:
        sizes = f"{table.num_blocks} blocks of {len(table.life)} ranks"
        yield _header(table, f"says {sizes}, that is {needed} bytes, of {nbytes}")
    if not table.alive:
        yield from _of_dead(table)


def _header(table: TableSnapshot, law: str, patience: float = SOON) -> Violation:
    return Violation(str(table.name), "header", law, patience)


def _of_dead(table: TableSnapshot) -> Iterator[Violation]:
    """What a dead engine showed the others is withdrawn by the coordinator."""
    dead = f"its engine (pid {table.identity.pid}) is dead"
    for rank, word in enumerate(table.life):
        if word:
            yield _header(table, f"life of rank {rank} goes on, but {dead}", AFTER_A_SWEEP)
    ready = [block for block, slot in table.slots.items() if slot.state is SlotState.READY]
    for block in ready:
        yield Violation(str(table.name), f"slot {block}", f"READY, but {dead}", AFTER_A_SWEEP)


# -- the lease table


def of_leases(leases: LeaseTableSnapshot) -> Iterator[Violation]:
    """Laws of a lease table: no epoch holds two bits; the dead hold none for long, if there
    is a coordinator."""
    bits: dict[int, int] = {}
    for owner in leases.owners:
        other = bits.setdefault(owner.epoch, owner.bit)
        if other != owner.bit:
            law = f"held by epoch {owner.epoch:016x}, which holds bit {other}, too"
            yield Violation(str(leases.name), f"bit {owner.bit}", law)
        if leases.alive and not owner.alive:
            law = f"held by pid {owner.identity.pid}, which is dead"
            yield Violation(str(leases.name), f"bit {owner.bit}", law, AFTER_A_SWEEP)


# -- what has to agree across segments


def between(tables: list[TableSnapshot], leases: LeaseTableSnapshot | None) -> Iterator[Violation]:
    """Laws across one namespace: each lease in a slot has a holder, each bit has one."""
    owners = {owner.bit: owner for owner in leases.owners} if leases else {}
    claims: dict[int, list[TableSnapshot]] = {}
    for table in tables:
        if table.lease_bit >= 0 and table.alive and not table.retired:
            claims.setdefault(table.lease_bit, []).append(table)
    for table in tables:
        yield from _held_by_nobody(table, owners, claims, leases is not None and leases.alive)
    for bit, claimants in claims.items():
        for table in claimants[1:]:
            law = f"claims lease bit {bit}, and so does {claimants[0].name}"
            yield _header(table, law, AFTER_A_SWEEP)
        if leases is not None and all(
            bit not in owners or owners[bit].identity != table.identity for table in claimants
        ):
            law = f"claims lease bit {bit}, which the lease table does not give it"
            yield _header(claimants[0], law, AFTER_A_SWEEP)


def without_coordinator(
    tables: list[TableSnapshot], leases: LeaseTableSnapshot | None
) -> str | None:
    """What to say of a namespace whose engines have no coordinator: no law is broken, but they
    learn of nobody new.  None if one runs, or may run in another pid namespace."""
    living = [table for table in tables if table.alive and not table.retired]
    if not living or (leases is not None and not is_dead(leases.identity)):
        return None
    namespace = living[0].name.namespace
    return (
        f"namespace {namespace}: no coordinator runs; engines that wait for one: {len(living)}; "
        f"start kvshm-coordinator --namespace {namespace} with the engines' KVSHM_RUN_DIR"
    )


def _held_by_nobody(
    table: TableSnapshot,
    owners: dict[int, LeaseOwner],
    claims: dict[int, list[TableSnapshot]],
    swept: bool,
) -> Iterator[Violation]:
    for block, slot in table.slots.items():
        for bit in (bit for bit in range(slot.leases.bit_length()) if slot.leases >> bit & 1):
            owner = owners.get(bit)
            if owner is None and bit not in claims:
                law = f"leased by bit {bit}, which nobody holds"
            elif owner is not None and swept and not owner.alive:
                law = f"leased by bit {bit}, whose holder (pid {owner.identity.pid}) is dead"
            else:
                continue
            yield Violation(str(table.name), f"slot {block}", law, AFTER_A_SWEEP)
