"""What the coordinator is told and what it may do: the words ``decide`` is written in.

Events say what happened; actions say what the shell has to do, in the order of the list.
"""

from __future__ import annotations

from typing import NamedTuple

from kvshm.node.protocol import AnyBroadcast, Command, ForeignJoin, Join, Reply


class Sender(NamedTuple):
    """Who sent a message, as the socket tells: never taken from the payload."""

    route: bytes
    """Where an answer goes (ROUTER identity)."""
    uid: int
    pid: int
    """0: in a pid namespace that cannot be seen from here; -1: the socket did not tell."""


class Refusal(NamedTuple):
    """Why an engine gets no place in the roster, and what to do about it."""

    reason: str
    remedy: str
    retry: bool = False


# -- events


class Received(NamedTuple):
    """A message of the protocol arrived."""

    sender: Sender
    message: Command


class Garbled(NamedTuple):
    """Something arrived that is no message."""

    sender: Sender
    error: str


class Foreign(NamedTuple):
    """A Join arrived that could not be decoded: another version's, or malformed."""

    sender: Sender
    join: ForeignJoin
    error: str


class Examined(NamedTuple):
    """The answer to ``Examine``: whether the engine is what it says."""

    sender: Sender
    join: Join
    refusal: Refusal | None


class Died(NamedTuple):
    """A process of the engine has ended, or given up this epoch's table; this is certain."""

    epoch: int
    owner: bool
    """Whether it was the engine's own process, not a worker's."""
    retired: bool = False
    """Whether the engine had ended the epoch itself before: it leaves."""


class Deserted(NamedTuple):
    """No process has this epoch's table any more, so nobody gives leases of it back."""

    epoch: int


class Clock(NamedTuple):
    """About a second has passed."""


Event = Received | Garbled | Foreign | Examined | Died | Deserted | Clock

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
    """Fetch the engine's slot table and look whether it is what the Join says; ``Examined``
    follows.  From then on the table is kept, and ``Died`` and ``Deserted`` tell its end."""

    sender: Sender
    join: Join


class Forget(NamedTuple):
    """Let go of an epoch's slot table."""

    epoch: int


class SweepBits(NamedTuple):
    """Clear these lease bits in every slot table."""

    bits: int


class SweepFiles(NamedTuple):
    """Remove what the dead left in the run directory."""


class Log(NamedTuple):
    """Write one line; ``level`` is logging's."""

    level: int
    event: str
    fields: dict[str, object]


Action = Send | Publish | Examine | Forget | SweepBits | SweepFiles | Log
