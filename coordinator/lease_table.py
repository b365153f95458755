"""The lease table: which bit belongs to whom, kept where it outlives the coordinator.

Only the coordinator of the namespace opens it, and there is only one.  The layout is
kvshm/records.py's.
"""

from __future__ import annotations

import logging
import struct

from kvshm.errors import CorruptSegment, SegmentNotFound, SegmentNotReady, VersionMismatch
from kvshm.records import (
    LEASE_ROW_BYTES,
    LEASE_ROWS_OFFSET,
    LEASE_TABLE_BYTES,
    LEASE_TABLE_MAGIC,
    NUM_LEASE_BITS,
)
from kvshm.segment import (
    LEASES_KIND,
    Identity,
    Segment,
    check_header,
    segment_name,
    unlink,
    write_header,
)

from . import logfmt
from .actions import Log, Owner

_ROW = struct.Struct("<QQQ16s")
_OWNER = struct.Struct("<QQ16s")
_HOLDER = "coordinator"


class LeaseTable:
    """The mapped table of one namespace."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @classmethod
    def open(cls, namespace: str, identity: Identity) -> LeaseTable:
        """Open the namespace's table, or create it.  One that cannot be read is replaced.

        Raises SegmentError if there is no room or the table is another user's.
        """
        name = segment_name(namespace, LEASES_KIND, _HOLDER, 0)
        try:
            segment = Segment.open(name, writable=True)
            check_header(segment, LEASE_TABLE_MAGIC)
            if segment.buffer.nbytes < LEASE_TABLE_BYTES:
                raise CorruptSegment(f"{name} has only {segment.buffer.nbytes} bytes")
        except SegmentNotFound:
            segment = Segment.create(name, LEASE_TABLE_BYTES)
        except (SegmentNotReady, VersionMismatch, CorruptSegment) as exc:
            logfmt.write(Log(logging.WARNING, "lease-table-replaced", {"reason": exc}))
            unlink(name)
            segment = Segment.create(name, LEASE_TABLE_BYTES)
        write_header(segment, LEASE_TABLE_MAGIC, LEASE_ROWS_OFFSET, 0, identity)
        return cls(segment)

    def rows(self) -> list[Owner]:
        """Who holds or held each bit."""
        buffer = self._segment.buffer
        rows = (_ROW.unpack_from(buffer, _offset(bit)) for bit in range(NUM_LEASE_BITS))
        return [
            Owner(epoch, Identity(boot_id, pid, start_time))
            for epoch, pid, start_time, boot_id in rows
        ]

    def write(self, bit: int, owner: Owner) -> None:
        """Note an owner.  The epoch goes in last, so a row cut short says nobody."""
        buffer, offset, identity = self._segment.buffer, _offset(bit), owner.identity
        struct.pack_into("<Q", buffer, offset, 0)
        _OWNER.pack_into(buffer, offset + 8, identity.pid, identity.start_time, identity.boot_id)
        # SYNC POINT: from here on a new coordinator knows that the bit is taken
        struct.pack_into("<Q", buffer, offset, owner.epoch)

    def close(self) -> None:
        self._segment.close()

    def unlink(self) -> None:
        self._segment.unlink()


def _offset(bit: int) -> int:
    return LEASE_ROWS_OFFSET + bit * LEASE_ROW_BYTES
