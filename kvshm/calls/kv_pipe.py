"""The KV pipe of vLLM V0: a FIFO of tensors, or None, between two processes.

Each end has ``slots`` rows for what it sends and as many for what it has received.  Message i is
published under a key made of the pipe's name and i; the other end loads it and publishes its own
copy under a second key, which says that it was taken.  So a sender never overwrites a message that
nobody has taken, and a receiver gets all of them, in order, once.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
import time
from typing import Any

from ..api import Config, Identity, KvshmError, MisuseError
from ._rows import Rows

__all__ = ["KVPipe", "PipeTimeout"]

_HEAD = struct.Struct("<II")


class PipeTimeout(KvshmError):
    """The other end did not send, or did not take, in time: it is slow, or it has ended."""


class KVPipe:
    """One end.  ``end`` is 0 in one process and 1 in the other; a name is used by one pair of
    processes, once.  ``message_bytes``: 8, a description of some 30, and the tensor; equal at both
    ends.  One thread may send while another receives."""

    def __init__(
        self,
        name: str,
        end: int,
        *,
        slots: int = 8,
        message_bytes: int = 1 << 20,
        config: Config | None = None,
    ) -> None:
        self._name, self._end, self._slots, self._bytes = name, end, slots, message_bytes
        settings = {"slots": str(slots)}
        identity = Identity(engine="KV pipe", model=name, weights="none", settings=settings)
        self._rows = Rows(identity, 2 * slots, message_bytes, config)
        self._sent = self._received = 0
        self._all_taken: bool | None = None
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def send_tensor(self, tensor: Any, timeout: float | None = None) -> None:
        """Send a C-contiguous object with the buffer protocol (of a torch tensor, ``.numpy()``), or
        None.  Returns when it can be received; blocks while ``slots`` messages are not taken.
        Raises PipeTimeout, and MisuseError for what does not fit."""
        view = None if tensor is None else memoryview(tensor)
        what = json.dumps(None if view is None else [view.format, view.shape]).encode()
        size = 0 if view is None else view.nbytes
        if (needed := _HEAD.size + len(what) + size) > self._bytes:
            raise MisuseError(
                f"a tensor of {size} bytes needs message_bytes={needed}, and this pipe has "
                f"{self._bytes}: send it in pieces, or make both ends larger"
            )
        data = view.cast("B") if view is not None and size else b""
        with self._sending:
            if not self._taken(self._sent - self._slots, timeout):
                raise PipeTimeout(f"pipe {self._name}: {self._slots} messages are not taken")
            key, row = self._key(self._end, "sent", self._sent), self._sent % self._slots
            self._rows.publish(row, key, _HEAD.pack(len(what), size), what, data)
            self._sent += 1

    def recv_tensor(self, timeout: float | None = None) -> memoryview | None:
        """Return the next tensor, in the format and shape in which it was sent, or None if that
        was.  Blocks until it is there.  Raises PipeTimeout: then call again for the same one."""
        with self._receiving:
            row = self._slots + self._received % self._slots
            message = self._fetch(row, timeout)
            self._rows.node.publish([self._key(self._end, "taken", self._received)], [row])
            self._received += 1
        length, size = _HEAD.unpack_from(message)
        start = _HEAD.size + length
        if (what := json.loads(message[_HEAD.size : start])) is None:
            return None
        data = memoryview(message)[start : start + size]
        return data.cast(what[0], what[1]) if size else data

    def _fetch(self, row: int, timeout: float | None) -> bytes:
        key = self._key(1 - self._end, "sent", self._received)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if (message := self._rows.fetch(row, key, left)) is not None:
                return message
            if left == 0.0 or self._rows.node.refusal:
                why = self._rows.node.refusal or f"message {self._received} did not come"
                raise PipeTimeout(f"pipe {self._name}: {why}")

    def _taken(self, number: int, timeout: float | None) -> bool:
        key = self._key(1 - self._end, "taken", number)
        return number < 0 or bool(self._rows.node.wait_for([key], timeout))

    def _key(self, end: int, what: str, number: int) -> bytes:
        return hashlib.sha256(f"{self._name}\0{end}\0{what}\0{number}".encode()).digest()

    def close(self, timeout: float = 10.0) -> bool:
        """Wait until the other end has taken what was sent, for so many seconds, and end the pipe;
        return whether it has.  What was not taken is lost.  The end that received last closes
        last.  Idempotent."""
        with self._sending, self._receiving:
            if self._all_taken is None:
                self._all_taken = self._taken(self._sent - 1, timeout)
                self._rows.close()
            return self._all_taken
