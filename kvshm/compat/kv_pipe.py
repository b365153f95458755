"""The KV pipe of vLLM V0: a FIFO of tensors, or None, between two processes.

Each end has ``slots`` rows for what it sends and as many for what it has received.  Message i is
published under a key made of the pipe's name and i; the other end loads it and publishes its own
copy under a second key, which says that it was taken.  So a sender never overwrites a message that
no receiver has taken, and a receiver gets all of them, in order, once.  One more row of the sender
has a key for the last message.  That row is never read, but the receiver holds it once it has taken
the message: that is known for an hour, also when the receiver has ended.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._api.arguments import whole
from ..api import Config, Identity, KvshmError, MisuseError
from ._rows import Rows, buffer_of
from ._slots import deadline

__all__ = ["KVPipe", "PipeTimeout"]

_HEAD = struct.Struct("<II")
_SLICE_SECONDS = 0.05
"""So soon a call that waits notices that its end is being closed."""
_HOLD_SECONDS = 3600.0
_HALF_FLOAT, _AS_RECEIVED = "e", "H"
"""No memoryview of Python 3.11 can be made of 16-bit floats."""

T = TypeVar("T")


class PipeTimeout(KvshmError):
    """The other end did not send, or did not take, in time: it is slow, or it has ended.  Or this
    end has not joined, as the message says."""


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
        if (end := whole("end", end, 0)) > 1:
            raise MisuseError(f"end is {end}; give 0 in one process and 1 in the other")
        slots, message_bytes = whole("slots", slots, 1), whole("message_bytes", message_bytes, 1)
        self._name = name
        self._end = end
        self._slots = slots
        self._bytes = message_bytes
        settings = {"slots": str(slots)}
        identity = Identity(engine="KV pipe", model=name, weights="none", settings=settings)
        self._rows = Rows(identity, 2 * slots + 1, message_bytes, config)
        self._mark = 2 * slots
        self._sent = self._received = 0
        self._all_taken: bool | None = None
        self._closing = False
        self._sending = threading.Lock()
        self._receiving = threading.Lock()

    def send_tensor(self, tensor: Any, timeout: float | None = None) -> None:
        """Send a C-contiguous object with the buffer protocol (of a torch tensor, ``.numpy()``), or
        None.  Returns when it can be received; blocks while ``slots`` messages are not taken, and
        until this end has joined.  Raises PipeTimeout, and MisuseError for what does not fit or has
        a format that a memoryview cannot have."""
        what, data = _packed(tensor)
        if (needed := _HEAD.size + len(what) + len(data)) > self._bytes:
            raise MisuseError(
                f"a tensor of {len(data)} bytes needs message_bytes={needed}, and this pipe has "
                f"{self._bytes}: send it in pieces, or make both ends larger"
            )
        until = deadline(timeout)
        with self._sending:
            self._wait(self._may_send, until, f"{self._slots} messages are not taken")
            key, row = self._key(self._end, "sent", self._sent), self._sent % self._slots
            self._rows.publish(self._mark, self._key(self._end, "mark", self._sent))
            self._rows.publish(row, key, _HEAD.pack(len(what), len(data)), what, data)
            self._sent += 1

    def recv_tensor(self, timeout: float | None = None) -> memoryview | None:
        """Return the next tensor, in the format and shape in which it was sent, or None if that
        was.  16-bit floats ("e") come as "H": ``numpy.asarray(got).view("e")``.  Blocks until it is
        there.  Raises PipeTimeout: then call again for the same one."""
        until = deadline(timeout)
        with self._receiving:
            row, number = self._slots + self._received % self._slots, self._received
            key, node = self._key(1 - self._end, "sent", number), self._rows.node
            message = self._wait(
                lambda seconds: self._rows.fetch(row, key, seconds),
                until,
                f"message {number} did not come",
            )
            tensor = _unpacked(message)
            node.hold([self._key(1 - self._end, "mark", number)], _HOLD_SECONDS)
            node.publish([self._key(self._end, "taken", number)], [row])
            self._received += 1
            return tensor

    def _wait(
        self,
        ask: Callable[[float], T | None],
        until: float,
        why: str,
        closing: bool = False,
    ) -> T:
        """Return the first true answer of ``ask``, which waits for some seconds.  Raises
        PipeTimeout, and MisuseError once this end is closed."""
        while closing or not self._closing:
            left = until - time.monotonic()
            if answer := ask(max(0.0, min(left, _SLICE_SECONDS))):
                return answer
            node = self._rows.node
            if left <= 0 or node.refusal:
                why = node.refusal or (why if node.joined else "no coordinator was found")
                raise PipeTimeout(f"pipe {self._name}: {why}")
        raise MisuseError(f"pipe {self._name} is closed: make another one, of another name")

    def _may_send(self, seconds: float) -> bool:
        return self._rows.node.wait_joined(seconds) and self._taken(
            self._sent - self._slots, seconds
        )

    def _is_all_taken(self, seconds: float) -> bool:
        """Whether the other end has taken all that was sent, perhaps before it ended."""
        ended = not self._rows.node.stats()["peers"] and self._rows.node.kept([self._mark])
        return bool(ended) or self._taken(self._sent - 1, seconds)

    def _taken(self, number: int, seconds: float) -> bool:
        key = self._key(1 - self._end, "taken", number)
        return number < 0 or bool(self._rows.node.wait_for([key], seconds))

    def _key(self, end: int, what: str, number: int) -> bytes:
        return hashlib.sha256(f"{self._name}\0{end}\0{what}\0{number}".encode()).digest()

    def close(self, timeout: float = 10.0) -> bool:
        """Wait until the other end has taken what was sent, for ``timeout`` seconds, and end the
        pipe; return whether it has.  What was not taken is lost.  Calls that another thread waits
        in raise MisuseError, as all later ones.  Idempotent."""
        until = deadline(timeout)
        self._closing = True
        with self._sending, self._receiving:
            if self._all_taken is None:
                try:
                    self._all_taken = self._wait(self._is_all_taken, until, "", closing=True)
                except PipeTimeout:
                    self._all_taken = False
                self._rows.close()
            return self._all_taken


def _packed(tensor: Any) -> tuple[bytes, bytes]:
    """A tensor's description and bytes.  Raises MisuseError for what could not be received."""
    if tensor is None:
        return b"null", b""
    view = buffer_of("tensor", tensor)
    what = _AS_RECEIVED if view.format == _HALF_FLOAT else view.format, view.shape or ()
    data = view.tobytes()
    try:
        _made(data, *what)
    except (TypeError, ValueError, struct.error):
        raise MisuseError(
            f"no memoryview of format {view.format!r} and shape {view.shape} can be made where it "
            'is received: send its bytes (of an array, .reshape(-1).view("u1"))'
        ) from None
    return json.dumps(what).encode(), data


def _unpacked(message: bytes) -> memoryview | None:
    length, size = _HEAD.unpack_from(message)
    start = _HEAD.size + length
    what = json.loads(message[_HEAD.size : start])
    return None if what is None else _made(memoryview(message)[start : start + size], *what)


def _made(data: bytes | memoryview, code: Any, shape: Sequence[int]) -> memoryview:
    """A tensor of these bytes."""
    if 0 not in shape:
        return memoryview(data).cast(code, [*shape])
    one = [1, *shape[1:]]  # cast makes none without items
    return memoryview(bytes(struct.calcsize(code) * math.prod(one))).cast(code, one)[: shape[0]]
