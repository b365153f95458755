"""What has arrived at a socket, beside a scheduler that never rests."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from kvshm.errors import ProtocolError

READABLE = int(zmq.POLLIN)  # as an enum it takes longer to compare than to ask for
MAX_RECEIVED = 1000
"""Frames taken from one socket before timers are looked after."""


def received(socket: zmq.Socket[bytes]) -> Iterator[bytes | ProtocolError]:
    """Yield the messages of a socket that is readable, an error for one of several frames.

    Each ``recv`` gives up the GIL, which a busy thread gives back only after its switch interval:
    so none is called in vain.
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
