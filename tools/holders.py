"""Who holds a lease: from bits in a slot's word to engines.  Pure."""

from __future__ import annotations

from typing import Any

from .snapshot import LeaseOwner, Snapshot, TableSnapshot


class Holders:
    """Lease bit -> engine within one namespace.

    The lease table decides; where it is silent (no coordinator ever ran, or it is gone), the
    slot tables of the engines that say a bit is theirs, a living engine before a dead one.
    """

    def __init__(self, namespace: Snapshot) -> None:
        self._names = {table.identity: table.engine for table in namespace.tables}
        self._owners: dict[int, dict[str, Any]] = {}
        for table in sorted(namespace.tables, key=lambda table: table.alive):
            if table.lease_bit >= 0:
                self._note(table.lease_bit, table.name.epoch, table)
        for leases in namespace.leases:
            for owner in leases.owners:
                self._note(owner.bit, owner.epoch, owner)

    def _note(self, bit: int, epoch: int, process: TableSnapshot | LeaseOwner) -> None:
        self._owners[bit] = {
            "bit": bit,
            "engine": self._names.get(process.identity),
            "epoch": f"{epoch:016x}",
            "pid": process.identity.pid,
            "alive": process.alive,
        }

    def of(self, leases: int) -> list[dict[str, Any]]:
        """The holders of a slot's leases, by bit."""
        return [self.of_bit(bit) for bit in range(leases.bit_length()) if leases >> bit & 1]

    def of_bit(self, bit: int) -> dict[str, Any]:
        """The holder of one bit; nothing but the bit is known of an unknown one."""
        nobody = {"bit": bit, "engine": None, "epoch": None, "pid": None, "alive": None}
        return self._owners.get(bit, nobody)
