"""A peer's KV cache in GPU memory, mapped by this rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvshm._base.copy_path import CopyPath
from kvshm._base.ids import BlockId, Epoch
from kvshm.errors import TransportError
from kvshm.interfaces import MemoryDescriptor

from ..regions import count_blocks
from .copy_stream import CudaCopy, LaunchedWork
from .driver import RegionTable
from .mappings import PeerMapping

if TYPE_CHECKING:
    from .transport import CudaIpcTransport


class CudaAttachment:
    """A peer rank's memory that this GPU can reach (kvshm.interfaces.Attachment)."""

    ended = False
    """The attachment keeps no connection: the importer watches the exporter's process itself."""

    def __init__(
        self,
        own: CudaIpcTransport,
        descriptor: MemoryDescriptor,
        table: RegionTable,
        mappings: list[PeerMapping],
        keep: object,
        path: CopyPath,
    ) -> None:
        self.epoch = Epoch(descriptor.epoch)
        self.route = table.route
        self.path = path
        self._own = own
        self._table = table
        self._mappings = mappings
        self._keep = keep
        self._num_blocks = count_blocks(descriptor.regions)
        self._lock = threading.Lock()
        self._users = 1
        """Users of the memory: the attachment until it is closed, and its copies."""
        self._closed = False

    def begin_copy(
        self,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        keep_going: Callable[[], bool] | None = None,
        after: LaunchedWork | None = None,
    ) -> CudaCopy:
        own = self._own
        blocks = own.blocks_to_read(source, self._num_blocks, target)
        with self._lock:
            if self._closed:
                raise TransportError(f"the attachment to epoch {self.epoch:016x} is closed")
            self._users += 1
        try:
            return own.copy_stream.begin(
                self._table, blocks, target, self._drop_user, own.late_writers, after
            )
        except BaseException:
            self._drop_user()
            raise

    def _drop_user(self) -> None:
        """Have the closing thread unmap the memory after its last user."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._keep = None
        self._own.unmap_later(self._mappings, self._table.address)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._drop_user()
