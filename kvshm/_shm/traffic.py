"""The traffic of one engine: one row per peer and path in the header of the importer's slot table,
which its scheduler writes and tools read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from kvshm._base.copy_path import PATHS, CopyPath
from kvshm._base.ids import Epoch

from .layout import NUM_TRAFFIC_ROWS, TRAFFIC_OFFSET, TRAFFIC_ROW_BYTES
from .segment import Segment

NAME_BYTES = 32
_ROW = struct.Struct(f"<{NAME_BYTES}sQQQQQQQQQ24x")
assert _ROW.size == TRAFFIC_ROW_BYTES


class Traffic(NamedTuple):
    """What one engine has copied from one peer on one path, since its epoch began."""

    peer: str
    """Name of the peer, cut to NAME_BYTES."""
    peer_epoch: int
    path: CopyPath
    loads: int
    failed: int
    """Loads of which the peer's part had at least one block to recompute."""
    blocks: int
    nbytes: int
    timed_bytes: int
    """Those of ``nbytes`` whose time is known: not of copies that waited for others."""
    timed_ns: int
    """How long they took: of a load with several peers each gets its share by bytes."""
    last_ns: int
    """CLOCK_MONOTONIC when the last of them ended."""


class TrafficValues:
    """Reads the traffic in one slot table."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def read(self) -> list[Traffic]:
        """The rows in use; not read at one moment.  Leaves out rows that cannot be decoded."""
        end = TRAFFIC_OFFSET + NUM_TRAFFIC_ROWS * TRAFFIC_ROW_BYTES
        rows = _ROW.iter_unpack(self._segment.buffer[TRAFFIC_OFFSET:end])
        return [
            Traffic(name.rstrip(b"\0").decode("utf-8", "replace"), epoch, PATHS[path], *counts)
            for name, epoch, path, *counts in rows
            if epoch and path < len(PATHS)
        ]


class OwnTraffic(TrafficValues):
    """Writes the traffic of the own slot table.  One thread, the scheduler's."""

    def __init__(self, segment: Segment, clock: Callable[[], int]) -> None:
        super().__init__(segment)
        self._clock = clock
        self._rows: dict[tuple[int, CopyPath], list[int]] = {}

    def add(
        self,
        peer: str,
        peer_epoch: Epoch,
        path: CopyPath | None,
        *,
        loads: int = 0,
        failed: int = 0,
        blocks: int = 0,
        nbytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Add to the row of a peer and path.  ``peer``: its name, empty if that is not known;
        ``path``: None if nothing was copied; ``seconds``: how long the bytes took, 0 if that is not
        known.  Without a free row, the row that was used least recently is given up."""
        if path is None:
            path = next((p for e, p in self._rows if e == peer_epoch), CopyPath.OTHER)
        row = self._rows.get((peer_epoch, path)) or self._take_row(peer_epoch, path)
        timed = nbytes if seconds > 0 else 0
        added = (loads, failed, blocks, nbytes, timed, round(seconds * 1e9))
        row[1:7] = [old + new for old, new in zip(row[1:7], added, strict=True)]
        row[7] = self._clock()
        buffer, offset = self._segment.buffer, TRAFFIC_OFFSET + TRAFFIC_ROW_BYTES * row[0]
        name = peer.encode()[:NAME_BYTES] or buffer[offset : offset + NAME_BYTES].tobytes()
        _ROW.pack_into(buffer, offset, name, peer_epoch, PATHS.index(path), *row[1:])

    def _take_row(self, peer_epoch: Epoch, path: CopyPath) -> list[int]:
        place = len(self._rows)
        if place == NUM_TRAFFIC_ROWS:
            oldest = min(self._rows, key=lambda key: self._rows[key][7])
            place = self._rows.pop(oldest)[0]
        offset = TRAFFIC_OFFSET + TRAFFIC_ROW_BYTES * place
        self._segment.buffer[offset : offset + NAME_BYTES] = bytes(NAME_BYTES)
        self._rows[peer_epoch, path] = row = [place, *([0] * 7)]
        return row
