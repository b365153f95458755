"""A slot table for tests that play several processes on one mapping."""

from __future__ import annotations

from kvshm.own_slots import OwnSlotTable
from kvshm.slots import PeerSlotTable, RosterSlotTable


class AnyTable(OwnSlotTable, PeerSlotTable, RosterSlotTable):
    """May do what its engine, an importer and the coordinator may.  No process has it so."""
