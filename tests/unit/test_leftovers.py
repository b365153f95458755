"""kvshm.leftovers: what clearing up leaves to the living, and in which order it removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshm.leftovers import clear
from kvshm.rundir import peers_file
from kvshm.segment import Identity, identity_of
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import Epoch, Fingerprint, Rank


def table_of(namespace: str, epoch: int, owner: Identity) -> SlotTable:
    spec = TableSpec(namespace, "e", 8, 16, 1, Fingerprint(bytes(32)))
    table = SlotTable.create(spec, Epoch(epoch), owner)
    table.set_life(Rank(0))
    return table


@pytest.fixture
def dead() -> Identity:
    """A process that had this one's number before."""
    here = identity_of()
    return here._replace(start_time=here.start_time - 1)


def test_the_lists_of_the_living_stay(namespace: str, tmp_path: Path, dead: Identity) -> None:
    tables = [table_of(namespace, 1, dead), table_of(namespace, 2, identity_of())]
    lists = [peers_file(tmp_path, namespace, Epoch(epoch)) for epoch in (1, 2)]
    for path in lists:
        path.write_bytes(b"")
    clear(tmp_path, namespace)
    assert [path.exists() for path in lists] == [False, True]
    tables[1].unlink()
    for table in tables:
        table.close()


def test_the_life_of_the_dead_ends_before_its_table_is_unlinked(
    namespace: str, tmp_path: Path, dead: Identity
) -> None:
    """Who has the table mapped would else go on to read memory that nobody keeps."""
    table = table_of(namespace, 1, dead)
    assert table.life(Rank(0)) == table.epoch
    assert table.name in clear(tmp_path, namespace).removed
    assert table.life(Rank(0)) == 0
    table.close()
