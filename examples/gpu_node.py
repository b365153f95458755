"""Where the processes of one GPU program find each other: a run directory that they share."""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import tempfile
from pathlib import Path

from kvshm._base.ids import Epoch
from kvshm._base.rundir import engine_socket
from kvshm._node.segment_server import SegmentClient, SegmentServer
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.slot_table import PeerSlotTable

NAMESPACE = "gpu"


@functools.cache
def shared_directory() -> Path:
    """The run directory of this process and of the peers that it starts; it goes with the process
    that made it."""
    given = os.environ.get("GPU_PEER_DIR")
    if given is not None:
        return Path(given)
    made = tempfile.TemporaryDirectory(prefix="kv-")
    atexit.register(made.cleanup)
    return Path(made.name)


@functools.cache
def own_socket() -> Path:
    """Where this process's transport serves descriptors: beside its peers', which know it by name.
    Processes in several PID namespaces may have the same number, so that it would not do."""
    return shared_directory() / f"{secrets.token_hex(8)}.sock"


def hand_out(table: OwnSlotTable) -> SegmentServer:
    """Give a table to whoever asks, until the server is closed."""
    path = engine_socket(shared_directory(), NAMESPACE, table.epoch)
    return SegmentServer(path, lambda asked: table.descriptor(asked.writable))


def table_of(epoch: Epoch) -> PeerSlotTable:
    """Map the table that a peer hands out; the caller closes it."""
    return SegmentClient(shared_directory(), NAMESPACE).peer_table(epoch)
