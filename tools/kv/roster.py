"""Asks the coordinator how the KV memory of a running engine is reached.

Only engines see the roster.  So this process joins as one that only imports, and leaves.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import closing, suppress
from pathlib import Path

import zmq

from kvshm._base.fingerprint import FIELDS
from kvshm._base.ids import Epoch
from kvshm._base.rundir import command_endpoint, engine_socket, start_command
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    EngineInfo,
    Join,
    Joined,
    Leave,
    Message,
    RankInfo,
    Refused,
    decode_reply,
    encode,
)
from kvshm._node.segment_server import SegmentServer
from kvshm._shm.descriptors import Request
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
from kvshm._shm.segment import TABLE_KIND
from kvshm._shm.slot_table import SlotTableView
from kvshm.errors import KvshmError, SegmentNotFound
from kvshm.interfaces import MemoryDescriptor, Region
from kvshm.version import __version__

REPLY_SECONDS = 5.0
RETRY_SECONDS = 0.2
LINGER_MS = 500
_UNKNOWN = "unknown to kvshm kv dump"
"""What engines of other fingerprints see of this process's fields."""


class NotInRoster(KvshmError):
    """The coordinator does not say where the engine's blocks lie; names the reason."""


def ask_for(run_dir: Path, namespace: str, engine: SlotTableView) -> EngineInfo:
    """Return the roster's entry for an engine within REPLY_SECONDS.  Raises KvshmError."""
    epoch, name = Epoch(secrets.randbits(64) | 1), f"kv-dump-{os.getpid()}"
    spec = TableSpec(namespace, name, 1, engine.block_size, 1, engine.fingerprint)
    with closing(OwnSlotTable.create(spec, epoch)) as table:
        table.begin_pulse(None)

        def find(wanted: Request) -> int:
            if wanted.kind != TABLE_KIND or wanted.epoch != epoch:
                raise SegmentNotFound(f"epoch {epoch:016x} is served here, and no replica")
            return table.descriptor(wanted.writable)

        memory = MemoryDescriptor("none", epoch, 0, [Region(0, 1, 1, 1)])
        info = EngineInfo(
            epoch=epoch,
            name=name,
            pid=os.getpid(),
            fingerprint=engine.fingerprint,
            fields=dict.fromkeys(FIELDS, _UNKNOWN),
            num_blocks=1,
            ranks=[RankInfo(os.getpid(), memory)],
            imports_only=True,
            kvshm_version=__version__,
        )
        with closing(SegmentServer(engine_socket(run_dir, namespace, epoch), find)):
            joined = _join(run_dir, namespace, info)
    for found in joined.roster:
        if found.epoch == engine.epoch:
            return found
    raise NotInRoster(f"engine {engine.engine} has not joined yet; try again")


def _join(run_dir: Path, namespace: str, info: EngineInfo) -> Joined:
    """Join, and leave whatever the answer is."""
    with zmq.Context(io_threads=1) as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # without a coordinator nothing is queued
        socket.connect(command_endpoint(run_dir, namespace))
        until, reason = time.monotonic() + REPLY_SECONDS, "it does not answer"
        try:
            while (left := until - time.monotonic()) > 0:
                reply = _ask(socket, Join(protocol=PROTOCOL_VERSION, engine=info), left)
                if isinstance(reply, Joined):
                    return reply
                if isinstance(reply, Refused):
                    reason = f"it refuses: {reply.reason}; {reply.remedy}"
                    if not reply.retry:
                        break
                    time.sleep(RETRY_SECONDS)
        finally:
            with suppress(zmq.Again):  # there is no coordinator
                socket.send(encode(Leave(epoch=info.epoch)), zmq.NOBLOCK)
    start = start_command(run_dir, namespace)
    raise NotInRoster(f"the coordinator ({start}) is needed, and {reason}")


def _ask(socket: zmq.Socket[bytes], message: Message, seconds: float) -> object:
    """Send a message and return the reply to it; None if there is none in time."""
    milliseconds = max(1, int(1000 * seconds))
    if not socket.poll(milliseconds, zmq.POLLOUT):
        return None
    socket.send(encode(message))
    return decode_reply(socket.recv()) if socket.poll(milliseconds, zmq.POLLIN) else None
