"""What must hold of everything kvshm keeps in shared memory.  Pure.

A violation is only a suspicion while the node runs: segments are read one after the other,
and what one look finds may be a change half done.  check.py looks again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from kvshm.records import table_bytes
from kvshm.segment import SegmentName

from .snapshot import TableSnapshot

SOON = 0.5
"""Seconds after which no change is half done any more."""
AFTER_A_SWEEP = 10.0
"""Seconds after which a coordinator has noticed a death, or been restarted and joined again, and
has swept."""


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


def of_table(table: TableSnapshot) -> Iterator[Violation]:
    """Laws of one slot table: its slots and life words, and what it says it is."""
    yield from stated(table.name, table.problems)
    needed = table_bytes(table.num_blocks, len(table.life))
    if needed != table.nbytes:
        sizes = f"{table.num_blocks} blocks of {len(table.life)} ranks"
        yield _header(table, f"says {sizes}, that is {needed} bytes, of {table.nbytes}")


def _header(table: TableSnapshot, law: str, patience: float = SOON) -> Violation:
    return Violation(str(table.name), "header", law, patience)


# -- what has to agree across tables


def between(tables: list[TableSnapshot], swept: bool) -> Iterator[Violation]:
    """Laws across one namespace: a bit has one holder, and, where ``swept`` (a coordinator runs,
    and all tables are known), each lease in a slot has one."""
    claims: dict[int, list[TableSnapshot]] = {}
    for table in tables:
        if table.lease_bit >= 0:
            claims.setdefault(table.lease_bit, []).append(table)
    if swept:
        for table in tables:
            yield from _held_by_nobody(table, claims.keys())
    for bit, claimants in claims.items():
        living = [table for table in claimants if not table.died and not table.retired]
        for table in living[1:]:
            law = f"claims lease bit {bit}, and so does {living[0].name}"
            yield _header(table, law, AFTER_A_SWEEP)


def _held_by_nobody(table: TableSnapshot, held: Collection[int]) -> Iterator[Violation]:
    for block, slot in table.slots.items():
        for bit in range(slot.leases.bit_length()):
            if slot.leases >> bit & 1 and bit not in held:
                law = f"leased by bit {bit}, which nobody holds"
                yield Violation(str(table.name), f"slot {block}", law, AFTER_A_SWEEP)


def without_coordinator(tables: list[TableSnapshot]) -> str | None:
    """What to say of a namespace whose engines have no coordinator: no law is broken, but they
    learn of nobody new."""
    living = [table for table in tables if table.alive and not table.retired]
    if not living:
        return None
    namespace = living[0].name.namespace
    return (
        f"namespace {namespace}: no coordinator runs; engines that wait for one: {len(living)}; "
        f"start kvshm-coordinator --namespace {namespace} with the engines' KVSHM_RUN_DIR"
    )
