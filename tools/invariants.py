"""Invariants: what must hold of everything kvshm keeps in shared memory.  Reads only.

While the node runs, a violation is only suspected: a read may meet a change half done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvshm._shm.layout import table_bytes
from kvshm._shm.slot_table import SlotTableView

from .node.mapped import lease_bits, slots_in_use

SOON = 0.5
"""Seconds after which every change is complete."""
AFTER_SWEEP = 10.0
"""Seconds within which a coordinator sweeps after a death, even if it is restarted."""


class Violation(NamedTuple):
    segment: str
    place: str
    found: str
    patience: float = SOON
    """Seconds for which the finding must last before it counts as a violation."""

    def __str__(self) -> str:
        return f"{self.segment}: {self.place}: {self.found}"


def as_violations(segment: str, texts: list[str], patience: float = SOON) -> Iterator[Violation]:
    """Turn texts of ``check_integrity``, ``place: found`` or ``found`` (in the header)."""
    for text in texts:
        place, colon, found = text.partition(": ")
        yield Violation(segment, *((place, found) if colon else ("header", text)), patience)


# -- slot tables


def table_violations(name: str, table: SlotTableView) -> Iterator[Violation]:
    """Yield the violations within one slot table."""
    yield from as_violations(name, table.check_integrity())
    needed = table_bytes(table.num_blocks, table.num_ranks)
    if needed != table.nbytes:
        sizes = f"{table.num_blocks} blocks of {table.num_ranks} ranks"
        yield Violation(name, "header", f"says {sizes}, that is {needed} bytes, of {table.nbytes}")


# -- across tables


def cross_table_violations(tables: Mapping[str, SlotTableView], swept: bool) -> Iterator[Violation]:
    """Yield lease bits that two engines of a namespace claim and, if ``swept`` (a coordinator runs
    and all tables are known), leases without a holder."""
    claims = {name: table.lease_bit for name, table in tables.items() if table.lease_bit >= 0}
    if swept:
        for name, table in tables.items():
            yield from _unheld_leases(name, table, set(claims.values()))
    first: dict[int, str] = {}
    for name, bit in claims.items():
        if tables[name].died or tables[name].retired:
            continue
        if (holder := first.setdefault(bit, name)) != name:
            found = f"claims lease bit {bit}, and so does {holder}"
            yield Violation(name, "header", found, AFTER_SWEEP)


def _unheld_leases(name: str, table: SlotTableView, held: Collection[int]) -> Iterator[Violation]:
    for block, slot in slots_in_use(table):
        for bit in lease_bits(slot):
            if bit not in held:
                found = f"leased by bit {bit}, which no engine holds"
                yield Violation(name, f"slot {block}", found, AFTER_SWEEP)


def no_coordinator_warnings(namespace: str, tables: Iterable[SlotTableView]) -> Iterator[str]:
    """Yield a warning if engines of a namespace wait for a coordinator."""
    if living := sum(not table.owner_died and not table.retired for table in tables):
        yield (
            f"namespace {namespace}: no coordinator runs; engines that wait for one: {living}; "
            f"start kvshm-coordinator --namespace {namespace} with the engines' KVSHM_RUN_DIR"
        )
