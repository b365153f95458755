"""Who holds a lease: from bits in a slot's word to engines.  Pure."""

from __future__ import annotations

from typing import Any

from .snapshot import Snapshot, TableSnapshot


class Holders:
    """Lease bit -> engine within one namespace: the one whose table says that the bit is its own,
    a living engine before a dead one."""

    def __init__(self, namespace: Snapshot) -> None:
        self._owners: dict[int, dict[str, Any]] = {}
        for table in sorted(namespace.tables, key=lambda table: table.alive):
            if table.lease_bit >= 0:
                self._owners[table.lease_bit] = _holder(table)

    def of(self, leases: int) -> list[dict[str, Any]]:
        """The holders of a slot's leases, by bit; of an unknown one only the bit is known."""
        bits = (bit for bit in range(leases.bit_length()) if leases >> bit & 1)
        return [self._owners.get(bit, {"bit": bit, **_NOBODY}) for bit in bits]


_NOBODY = dict.fromkeys(("engine", "epoch", "pid", "alive"))


def _holder(table: TableSnapshot) -> dict[str, Any]:
    return {
        "bit": table.lease_bit,
        "engine": table.engine,
        "epoch": f"{table.epoch:016x}",
        "pid": table.pid,
        "alive": table.alive,
    }
