"""What an engine asks of the keeper that is the node's one client of a store beyond the node.

::

    engine (DEALER)                            keeper (ROUTER, <run dir>/<namespace>.store.sock)
       | -- Wanted(number, hashes, groups) -----> |  looks what the store has of them
       | <- Coming(number, length, seconds) ----- |  fetches blocks, and publishes them
       |    sees them in its replica, as those    |
       |    of any other engine                   |
       | <- Coming(number, 0, 0) ---------------- |  instead, or later: they do not come

Neither waits for the other: an ask that nobody takes is a miss.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import zmq
from msgspec import Meta

from kvshm._base.forks import guard_forks
from kvshm._base.ids import HASH_BYTES
from kvshm._base.resources import require_descriptors
from kvshm._base.rundir import store_socket
from kvshm._node.coordinator_sockets import DESCRIPTORS
from kvshm._node.protocol import FINGERPRINT_BYTES
from kvshm.errors import KvshmError

from .groups import Group

MOST_HASHES = 8192
"""Of one ask; what is behind them is not asked for."""
MAX_ASK_BYTES = MOST_HASHES * HASH_BYTES + (1 << 14)
QUEUED = 64
"""Asks and answers that wait in each direction; further ones are dropped."""
AGAIN_SECONDS = 5.0
"""Between two looks for a keeper with a store, and after one that has not answered."""

_Word = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Epoch = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]


class Lacking(NamedTuple):
    """What a prompt's engine lacks, in hashes from the beginning of the prompt."""

    start: _Word
    """Up to here the engine has the blocks itself."""
    found: _Word
    """Up to here another engine of the node has them."""
    stop: _Word
    """The longest prefix that is of use."""


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Whether a store has what the node lacks of a prompt."""

    fingerprint: Annotated[bytes, Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
    number: _Word
    """Of the ask, among those of one engine."""
    packed: Annotated[bytes, Meta(max_length=MOST_HASHES * HASH_BYTES)]
    """The prompt's hashes from the first one on, each padded to HASH_BYTES."""
    lacking: Lacking
    groups: Annotated[tuple[Group, ...], Meta(min_length=1, max_length=64)]
    seconds: _Seconds
    """What computing them would take: blocks that come later are not wanted."""
    withdrew: _Epoch = 0
    """The epoch that this engine has withdrawn last, if that had this fingerprint; 0 if none, or
    once it is confirmed."""

    @property
    def hashes(self) -> list[bytes]:
        packed = self.packed
        return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


class Coming(msgspec.Struct, frozen=True, array_like=True):
    """What the keeper fetches because of an ask."""

    number: _Word
    length: _Word
    """The prefix that the node will have, in hashes; 0: nothing comes, or not all of it."""
    seconds: _Seconds
    """How long fetching it is estimated to take."""
    withdrew: _Epoch = 0
    """The withdrawn epoch of the ask, if no block of it comes out of the store any more."""


_encode = msgspec.msgpack.Encoder().encode
_decode_wanted = msgspec.msgpack.Decoder(Wanted).decode
_decode_coming = msgspec.msgpack.Decoder(Coming).decode


def decode_wanted(frame: bytes) -> Wanted | None:
    """Return an ask, or None for what is none."""
    try:
        wanted = _decode_wanted(frame)
    except (msgspec.DecodeError, ValueError, TypeError):
        return None
    return wanted if len(wanted.packed) % HASH_BYTES == 0 and _are_groups(wanted.groups) else None


def _are_groups(groups: Sequence[Group]) -> bool:
    numbered = [group.number for group in groups] == list(range(len(groups)))
    return numbered and all(group.scale >= 1 and group.block_size >= 1 for group in groups)


def encode(message: Wanted | Coming) -> bytes:
    return _encode(message)


class StoreAsks:
    """The engine's end.  Scheduler's thread; nothing blocks."""

    def __init__(self, run_dir: Path, namespace: str, clock: Callable[[], float]) -> None:
        self._path = store_socket(run_dir, namespace)
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._look_at = 0.0
        self._number = 0
        self._answers: dict[int, Coming | None] = {}
        """The last answer to each ask that is not forgotten."""
        self.withdrew: tuple[bytes, int] = b"", 0
        """Fingerprint and epoch of what was withdrawn last; set by any thread."""
        self._confirmed = 0
        """The epoch of which a keeper has confirmed that.  Until then each ask for the same
        fingerprint says so, since no keeper may have been there to hear of it."""
        guard_forks(self)

    @property
    def possible(self) -> bool:
        """Whether there seems to be a keeper with a store.  Takes no time, but for a look at the
        run directory now and then."""
        if self._socket is not None:
            return True
        if (now := self._clock()) < self._look_at:
            return False
        self._look_at = now + AGAIN_SECONDS
        return os.path.exists(self._path) and self._open()

    def ask(
        self,
        fingerprint: bytes,
        hashes: Sequence[bytes],
        lacking: Lacking,
        groups: tuple[Group, ...],
        seconds: float,
    ) -> int | None:
        """Ask for the blocks of these hashes (Wanted); return the ask's number.  None: it cannot be
        sent.  Only if ``possible``."""
        assert self._socket is not None
        self._number = (self._number + 1) % (1 << 32)
        packed = b"".join(each.ljust(HASH_BYTES, b"\0") for each in hashes[:MOST_HASHES])
        kind, epoch = self.withdrew
        withdrew = epoch if kind == fingerprint and epoch != self._confirmed else 0
        wanted = Wanted(fingerprint, self._number, packed, lacking, groups, seconds, withdrew)
        try:
            self._socket.send(encode(wanted), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.give_up()
            return None
        self._answers[self._number] = None
        return self._number

    def answer(self, number: int) -> Coming | None:
        """Return the last answer to an ask; None before there is one."""
        if self._socket is not None:
            self._receive(self._socket)
        return self._answers.get(number)

    def forget(self, number: int) -> None:
        """No answer to this ask is read any more."""
        self._answers.pop(number, None)

    def give_up(self) -> None:
        """The keeper does not answer: ask nothing for a while, and then anew."""
        self._close_socket()
        self._look_at = self._clock() + AGAIN_SECONDS

    def close(self) -> None:
        """Ask nothing any more."""
        self._close_socket()
        self._look_at = float("inf")
        if self._context is not None:
            self._context.term()
            self._context = None

    def forget_in_child(self) -> None:
        """libzmq's threads are the parent's."""
        self._context = self._socket = None
        self._look_at = float("inf")

    def _open(self) -> bool:
        try:
            require_descriptors(DESCRIPTORS)  # without these libzmq ends the process
            self._context = self._context or zmq.Context(io_threads=1)
            self._socket = socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, QUEUED)
            socket.setsockopt(zmq.RCVHWM, QUEUED)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_ASK_BYTES)
            socket.connect(f"ipc://{self._path}")
        except (KvshmError, zmq.ZMQError):
            self.give_up()
            return False
        return True

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        self._answers.clear()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while True:
                coming = _decode_coming(socket.recv(zmq.NOBLOCK))
                self._confirmed = coming.withdrew or self._confirmed
                if coming.number in self._answers:
                    self._answers[coming.number] = coming
        except zmq.Again:
            return
        except (zmq.ZMQError, msgspec.DecodeError):
            self.give_up()
