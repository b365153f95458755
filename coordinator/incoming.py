"""Receives messages part by part, and keeps no more parts than a valid message has: libzmq keeps
all parts of a message until the last is there."""

from __future__ import annotations

import zmq

KEPT = 2
"""The sender's identity, and the frame."""


class MessageReader:
    """One socket's messages.  Used by one thread."""

    def __init__(self) -> None:
        self._router: zmq.Socket[bytes] | None = None
        self._kept: list[zmq.Frame] = []
        self._num_parts = 0

    def receive(self, router: zmq.Socket[bytes]) -> tuple[list[zmq.Frame], int] | None:
        """Take the next part off ``router``; after the last part return the first parts of the
        message and the number of its parts.  An unfinished message of another socket is dropped.
        Raises Again."""
        if router is not self._router:
            self._router, self._kept, self._num_parts = router, [], 0
        part = router.recv(zmq.NOBLOCK, copy=False)
        self._num_parts += 1
        if self._num_parts <= KEPT:
            self._kept.append(part)
        if part.more:
            return None
        message = self._kept, self._num_parts
        self._kept, self._num_parts = [], 0
        return message
