"""The message that is being received.  Of one in millions of parts, which libzmq keeps until the
last of them is there, no more is taken than a message of the protocol has."""

from __future__ import annotations

import zmq

KEPT = 2
"""The sender's identity, and the frame."""


class Incoming:
    """One socket's messages.  Used by one thread."""

    def __init__(self) -> None:
        self._router: zmq.Socket[bytes] | None = None
        self._kept: list[zmq.Frame] = []
        self._num_parts = 0

    def receive(self, router: zmq.Socket[bytes]) -> tuple[list[zmq.Frame], int] | None:
        """Take the next part off ``router``; once it is the last one return how the message begins,
        and of how many parts it is.  What was begun by another socket is dropped.  Raises Again."""
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
