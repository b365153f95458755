"""The lease table: which bit belongs to whom, kept where it outlives the coordinator.

Only the coordinator of the namespace opens it, and there is only one.  The layout is
kvshm/records.py's.
"""

from __future__ import annotations

import logging
import os
import struct

from kvshm.errors import CorruptSegment, SegmentNotFound, SegmentNotReady, VersionMismatch
from kvshm.locks import lock_segment
from kvshm.records import (
    LEASE_ROW_BYTES,
    LEASE_ROWS_OFFSET,
    LEASE_TABLE_BYTES,
    LEASE_TABLE_MAGIC,
    NUM_LEASE_BITS,
)
from kvshm.segment import (
    LEASES_KIND,
    SHM_DIRECTORY,
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

    def __init__(self, segment: Segment, lock: int) -> None:
        self._segment = segment
        self._lock = lock

    @classmethod
    def open(cls, namespace: str, identity: Identity) -> LeaseTable:
        """Open the namespace's table, or create it, and keep it locked.  One that cannot be
        read is replaced.

        Raises AlreadyRunning if another coordinator has it, SegmentError if there is no room
        or the table is another user's.
        """
        name = segment_name(namespace, LEASES_KIND, _HOLDER, 0)
        path = SHM_DIRECTORY / name
        lock = lock_segment(path, namespace)
        segment = _open(name) if lock is not None else None
        if segment is None:
            segment = Segment.create(name, LEASE_TABLE_BYTES)
            lock = lock_segment(path, namespace)
        if lock is None:
            raise SegmentNotFound(f"{name} was removed while it was being created")
        write_header(segment, LEASE_TABLE_MAGIC, LEASE_ROWS_OFFSET, 0, identity)
        return cls(segment, lock)

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
        os.close(self._lock)


def _open(name: str) -> Segment | None:
    """Map an existing table; one that cannot be read is removed."""
    try:
        segment = Segment.open(name, writable=True)
        check_header(segment, LEASE_TABLE_MAGIC)
        if segment.buffer.nbytes < LEASE_TABLE_BYTES:
            raise CorruptSegment(f"{name} has only {segment.buffer.nbytes} bytes")
        return segment
    except SegmentNotFound:
        return None
    except (SegmentNotReady, VersionMismatch, CorruptSegment) as exc:
        logfmt.write(Log(logging.WARNING, "lease-table-replaced", {"reason": exc}))
        unlink(name)
        return None


def _offset(bit: int) -> int:
    return LEASE_ROWS_OFFSET + bit * LEASE_ROW_BYTES
