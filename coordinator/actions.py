"""What ``decide`` takes and returns: inputs and, for the shell in their order, actions."""

from __future__ import annotations

from typing import NamedTuple

from kvshm._node.protocol import AnyBroadcast, Command, ForeignJoin, Join, Reply

from .log_lines import Event


class Sender(NamedTuple):
    """The process that sent a message, as the socket tells: never taken from the payload."""

    route: bytes
    uid: int
    pid: int
    """0: a process in a pid namespace that is not visible here; -1: the socket did not tell."""


class Refusal(NamedTuple):
    """Why an engine gets no place in the roster, and what to do about it."""

    reason: str
    remedy: str
    retry: bool = False
    code: str = ""


# -- inputs


class EngineMessage(NamedTuple):
    """A message of the protocol arrived."""

    sender: Sender
    message: Command


class BadMessage(NamedTuple):
    """A message arrived that cannot be decoded."""

    sender: Sender
    error: str
    join: ForeignJoin | None = None
    """What is known of the message if it is a Join: of another version, or malformed."""


class CheckResult(NamedTuple):
    """The result of ``CheckTable``: whether the engine is what its Join says."""

    sender: Sender
    join: Join
    refusal: Refusal | None


class ProcessDeath(NamedTuple):
    """A process of the engine has certainly ended, or has given up the table of this epoch."""

    epoch: int
    owner: bool
    """Whether it was the engine's own process, not a worker's."""
    retired: bool = False
    """Whether the engine had retired the table before: then the engine leaves."""


class TableUnused(NamedTuple):
    """No process has the table of this epoch any more, so none returns leases on it."""

    epoch: int


class ClockTick(NamedTuple):
    """About a second has passed."""


Input = EngineMessage | BadMessage | CheckResult | ProcessDeath | TableUnused | ClockTick

# -- actions


class SendReply(NamedTuple):
    route: bytes
    message: Reply


class SendBroadcast(NamedTuple):
    """Tell all engines of a fingerprint."""

    topic: bytes
    message: AnyBroadcast
    awaited: bool = False
    """Whether an engine waits for this message: it waits for others a shorter time."""


class CheckTable(NamedTuple):
    """Fetch the engine's slot table and compare it with the Join; ``CheckResult`` follows.
    From then on the table is kept, and ``ProcessDeath`` and ``TableUnused`` tell its end."""

    sender: Sender
    join: Join


class ReleaseTable(NamedTuple):
    epoch: int


class SweepBits(NamedTuple):
    bits: int


class SweepFiles(NamedTuple):
    """Remove the files of dead processes from the run directory."""


class Log(NamedTuple):
    event: Event
    fields: dict[str, object]


Action = SendReply | SendBroadcast | CheckTable | ReleaseTable | SweepBits | SweepFiles | Log
