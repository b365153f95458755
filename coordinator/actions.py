"""What the coordinator is told and what it may do: the words ``decide`` is written in.

Events say what happened; actions say what the shell has to do, in the order of the list.
"""

from __future__ import annotations

from typing import NamedTuple

from kvshm.protocol import AnyBroadcast, Command, ForeignJoin, Join, Reply
from kvshm.segment import Identity


class Process(NamedTuple):
    """One process, told apart from a later one of the same pid."""

    pid: int
    start_time: int


class Peer(NamedTuple):
    """Who sent a message, as the socket tells: never taken from the payload."""

    route: bytes
    """Where an answer goes (ROUTER identity)."""
    uid: int
    pid: int
    """0: in a pid namespace that cannot be seen from here; -1: the socket did not tell."""


class Owner(NamedTuple):
    """Who holds a lease bit; epoch 0: nobody any more, but this process did."""

    epoch: int
    identity: Identity


class Refusal(NamedTuple):
    """Why an engine gets no place in the roster, and what to do about it."""

    reason: str
    remedy: str
    retry: bool = False


# -- events


class Received(NamedTuple):
    """A message of the protocol arrived."""

    peer: Peer
    message: Command


class Garbled(NamedTuple):
    """Something arrived that is no message."""

    peer: Peer
    error: str


class Foreign(NamedTuple):
    """A Join of another version of the protocol arrived, which could not be decoded."""

    peer: Peer
    join: ForeignJoin


class Examined(NamedTuple):
    """The answer to ``Examine``: whether the engine is what it says."""

    peer: Peer
    join: Join
    refusal: Refusal | None


class Died(NamedTuple):
    """A watched process has ended; this is certain."""

    process: Process


class Clock(NamedTuple):
    """About a second has passed."""


Event = Received | Garbled | Foreign | Examined | Died | Clock

# -- actions


class Send(NamedTuple):
    """Answer one engine."""

    route: bytes
    message: Reply


class Publish(NamedTuple):
    """Tell all engines of a fingerprint."""

    topic: bytes
    message: AnyBroadcast


class Examine(NamedTuple):
    """Look whether the engine's processes and slot table are visible here; ``Examined``
    follows."""

    peer: Peer
    join: Join


class Watch(NamedTuple):
    """Report the end of this process with ``Died``, also if it has ended already."""

    process: Process


class Unwatch(NamedTuple):
    process: Process


class EndLife(NamedTuple):
    """Zero the life words of a slot table: nothing can be leased or delivered any more."""

    table: str


class SweepBits(NamedTuple):
    """Clear these lease bits in every slot table of the namespace."""

    bits: int


class UnlinkEpoch(NamedTuple):
    """Remove the slot table and the rank sockets of an ended epoch."""

    table: str
    epoch: int


class SweepProcess(NamedTuple):
    """Remove every segment that the dead process owned."""

    process: Process


class SweepLeftovers(NamedTuple):
    """Remove what dead processes left behind, except that of epochs still in the roster."""

    keep: frozenset[int]


class WriteLease(NamedTuple):
    """Note in the lease table who holds a bit."""

    bit: int
    owner: Owner


class Log(NamedTuple):
    """Write one line; ``level`` is logging's."""

    level: int
    event: str
    fields: dict[str, object]


Action = (
    Send
    | Publish
    | Examine
    | Watch
    | Unwatch
    | EndLife
    | SweepBits
    | UnlinkEpoch
    | SweepProcess
    | SweepLeftovers
    | WriteLease
    | Log
)
