"""Receives the messages at a socket while the scheduler's thread is busy."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from kvshm.errors import ProtocolError

READABLE = int(zmq.POLLIN)  # to compare the enum takes longer than to read the option
MAX_RECEIVED = 1000
"""Frames taken from one socket before timers are checked."""


def received(socket: zmq.Socket[bytes]) -> Iterator[bytes | ProtocolError]:
    """Yield the messages of a readable socket; an error for a message of several frames.

    Each ``recv`` releases the GIL, which a busy thread returns only after its switch interval.
    Therefore ``recv`` is called only when a message is there.
    """
    for _ in range(MAX_RECEIVED):
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) == 1:
            yield frames[0]
        else:
            yield ProtocolError(f"message of {len(frames)} frames, wanted 1")
        if not int(socket.get(zmq.EVENTS)) & READABLE:
            return
