"""What an importer checks and measures before a peer's memory counts as reachable."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Sequence

from kvshm._base.ids import BlockId
from kvshm._base.log import logger
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState

from ..log_lines import TransportLine
from .copy_stream import CopyStream
from .driver import CudaError, Driver, RegionRow, RegionTable, Route, Stream, write
from .export import PROBE_BYTES, probe_epoch

_log = logger(__name__)

_MEASURED_FRAGMENTS = 64
_MEASURED_BYTES = 64 << 20
_REPEATS = 3
_MEASURED_ROUTES = (Route.KERNEL, Route.BATCH)


class Prober:
    """Reads probes and measures routes, on a stream of its own that waits for no other stream.
    Any thread; one at a time."""

    def __init__(self, driver: Driver, programs: int, *, spare_model: bool = False) -> None:
        """``spare_model``: prefer the copy engines, whatever takes less time: another process's
        model has the multiprocessors."""
        self._driver = driver
        self._routes = (Route.BATCH,) if spare_model else _MEASURED_ROUTES
        self._lock = threading.Lock()
        self._chosen: dict[tuple[str, int], Route] = {}
        self.stream = driver.new_stream()
        try:
            self._copies = CopyStream(driver, self.stream, programs)
        except BaseException:
            driver.free_stream(self.stream)
            raise

    def prepare(self) -> None:
        self._copies.prepare(RegionTable((RegionRow(0, 0, 0, 0, PROBE_BYTES),), 0))
        self._copies.prepare_buffers(1)

    def read(self, probe: int, route: Route, checksum: int) -> int:
        """Copy a peer's probe by the route of its blocks; return the epoch that the peer serves.
        Blocks.  Raises TransportError if the bytes are not the probe's."""
        driver = self._driver
        with self._lock:
            scratch, host = driver.allocate(PROBE_BYTES), driver.host_allocate(PROBE_BYTES)
            try:
                self._copy(RegionRow(probe, scratch, 0, 0, PROBE_BYTES), route, 1)
                driver.copy(host.address, scratch, PROBE_BYTES, self.stream)
                driver.synchronize(self.stream)
                return probe_epoch(bytes(host.view), checksum)
            finally:
                driver.host_free(host)
                driver.free(scratch)

    def _copy(self, row: RegionRow, route: Route, blocks: int) -> float:
        """Copy blocks 0, 1, ... onto blocks 0, 1, ... and wait; return the seconds it took."""
        ids = [BlockId(block) for block in range(blocks)]
        table = upload(self._driver, [row], self.stream, route)
        try:
            begun = time.perf_counter()
            copy = self._copies.begin(table, ids, ids, lambda: None, late_writers=False)
            self._driver.synchronize(self._copies.stream)
            seconds = time.perf_counter() - begun
            if copy.poll() is not CopyState.DONE:
                raise TransportError("the peer's memory cannot be read")
            return seconds
        finally:
            self._driver.free(table.address)

    def choose(self, row: RegionRow, num_blocks: int, device: str) -> Route:
        """Return the route, kernel or copy engines, for fragments of ``row``'s size from
        ``device``: the faster one of those allowed; measured once per size.  Blocks for
        milliseconds; writes only to scratch."""
        with self._lock:
            key = (device, row.block_bytes)
            if key not in self._chosen:
                self._chosen[key] = self._measure(row, num_blocks, device)
            return self._chosen[key]

    def _measure(self, row: RegionRow, num_blocks: int, device: str) -> Route:
        fit = max(1, _MEASURED_BYTES // row.block_bytes)
        blocks = min(_MEASURED_FRAGMENTS, num_blocks, fit)
        scratch = self._driver.allocate(blocks * row.block_bytes)
        try:
            into = row._replace(target=scratch, target_stride=row.block_bytes)
            seconds = {route: self._fastest(into, route, blocks) for route in self._routes}
        finally:
            self._driver.free(scratch)
        best = min(seconds, key=lambda route: seconds[route])
        best = Route.KERNEL if math.isinf(seconds[best]) else best
        text = ", ".join(f"{route.value} {s * 1e6:.0f} us" for route, s in seconds.items())
        _log.line(TransportLine.FRAGMENTS, blocks, row.block_bytes, device, text)
        return best

    def _fastest(self, row: RegionRow, route: Route, blocks: int) -> float:
        """The shortest of several measurements; infinite if the driver has no batched copies."""
        try:
            return min(self._copy(row, route, blocks) for _ in range(_REPEATS))
        except CudaError as exc:
            if route is Route.KERNEL:
                raise
            _log.line(TransportLine.NO_BATCHED_COPIES, exc)
            return math.inf

    def close(self) -> None:
        """Raises CudaError."""
        self._copies.close()
        self._driver.free_stream(self.stream)


def upload(
    driver: Driver, rows: Sequence[RegionRow], stream: Stream, route: Route = Route.KERNEL
) -> RegionTable:
    """Put a table of regions into device memory; the caller frees its address."""
    packed = array("q", [number for row in rows for number in row]).tobytes()
    address = driver.allocate(len(packed))
    write(driver, address, packed, stream)
    return RegionTable(tuple(rows), address, route)
