"""Follows the numbered batches of one engine: what to apply, to ask for again, to forget.  Pure.

An engine numbers its batches from 0.  Whatever may have been missed is asked for at its replay
socket, from the last batch that is known: the same engine answers with that batch first, byte for
byte, and any other answer means that it is another engine, which has begun anew.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import NamedTuple

REPLAY_SECONDS = 5.0
"""How long the next part of a replay may take.  vLLM looks for requests ten times a second."""
GONE_SECONDS = 1.0
"""How long an engine whose connection has ended may take to come back."""
QUIET_SECONDS = 2.0
"""After how long a silence an engine is asked for what it may have said meanwhile: a batch that
ZeroMQ has dropped is noticed by the number of the next one, and there may be no next one."""


class Trouble(Enum):
    """What went wrong with an engine's batches, as operators read it."""

    LATE = "its first batches are not known: blocks that it has stored in them are left out"
    GAP = "batches are missing, and it cannot replay them"
    NO_REPLAY = "its replay socket does not answer"
    ANOTHER = "it has begun anew"
    GONE = "its connection has ended"
    BAD = "a message that it sent is not understood"
    UNREACHABLE = "it cannot be reached"
    UNNAMED = "its API server does not name it any more"
    OTHER_MODEL = "it is left out, for it serves another model"


class Ask(NamedTuple):
    """Ask for a replay from this number on, and drop any other that is under way."""

    start: int


class Apply(NamedTuple):
    payload: bytes


class Forget(NamedTuple):
    """Forget everything that the engine has said."""

    why: Trouble


class Complain(NamedTuple):
    what: Trouble


Action = Ask | Apply | Forget | Complain


class _Replay:
    def __init__(self, now: float, checks: bool) -> None:
        self.deadline = now + REPLAY_SECONDS
        self.checks = checks
        """Whether nothing is known to be missing."""
        self.heard = self.has_hole = self.brought = False


class Follower:
    """Each method gets what has happened and the time, and returns what to do, in this order."""

    def __init__(self, can_replay: bool) -> None:
        self.connected = False
        self._can_replay = can_replay
        self._last: int | None = None
        self._last_digest = b""
        """Number and digest of the last batch that was applied."""
        self._seen = -1
        """Number of the last batch that came live, over this connection."""
        self._waiting: tuple[int, bytes] | None = None
        """A live batch that came after a gap."""
        self._replay: _Replay | None = None
        self._heard_at = 0.0
        self._gone_since: float | None = None

    @property
    def takes_live(self) -> bool:
        """Whether live batches may be given to it now; else they have to wait."""
        return self._replay is None

    # -- the connection

    def has_connected(self, now: float) -> list[Action]:
        self.connected, self._gone_since, self._seen, self._heard_at = True, None, -1, now
        if self._can_replay:
            return self._ask(now, checks=False)
        return self._forget(Trouble.GAP)  # nobody knows whether it is the same engine

    def has_disconnected(self, now: float) -> None:
        if self.connected:
            self._gone_since = now
        self.connected, self._replay, self._waiting = False, None, None

    def tick(self, now: float) -> list[Action]:
        """To be called several times a second."""
        if self._gone_since is not None and now - self._gone_since >= GONE_SECONDS:
            self._gone_since = self._last = None
            return [Forget(Trouble.GONE)]  # even if it has said nothing: its address may be another
        if self._replay is not None and now >= self._replay.deadline:
            return self._replay_failed(self._replay, now)
        quiet = now - self._heard_at >= QUIET_SECONDS
        if self.connected and self._can_replay and self._replay is None and quiet:
            return self._ask(now, checks=True)
        return []

    # -- live batches

    def live(self, number: int, payload: bytes, now: float) -> list[Action]:
        """Only while ``takes_live``."""
        self._heard_at = now
        began_anew, self._seen = number <= self._seen, number
        if began_anew:
            return self._gap(number, payload, now, self._forget(Trouble.ANOTHER))
        if self._last is not None and number <= self._last:
            return []  # a replay brought it
        if number == self._next:
            return [self._apply(number, payload)]
        return self._gap(number, payload, now, [])

    def _gap(self, number: int, payload: bytes, now: float, first: list[Action]) -> list[Action]:
        self._waiting = number, payload
        return first + (self._ask(now, checks=False) if self._can_replay else self._settle())

    # -- replays

    def replayed(self, number: int, payload: bytes, now: float) -> list[Action]:
        """A batch of the replay that was asked for last."""
        replay = self._replay
        if replay is None:
            return []
        replay.deadline = now + REPLAY_SECONDS
        is_first, replay.heard = not replay.heard, True
        if is_first and self._last is not None:
            if number == self._last and _digest(payload) == self._last_digest:
                return []
            return self._forget(Trouble.ANOTHER) + self._ask(now, checks=False)
        if self._last is not None and number != self._next:
            replay.has_hole |= number > self._next  # ZeroMQ drops what it has no room for
            return []
        if replay.has_hole:
            return []
        replay.brought = True
        late: list[Action] = [Complain(Trouble.LATE)] if number != self._next else []
        return [*late, self._apply(number, payload)]

    def replay_ended(self, now: float) -> list[Action]:
        replay, self._replay, self._heard_at = self._replay, None, now
        if replay is None:
            return []
        if not replay.heard and self._last is not None:  # not even the last that is known
            return self._forget(Trouble.ANOTHER) + self._ask(now, checks=False)
        if replay.has_hole and replay.brought:
            return self._ask(now, replay.checks)
        return (self._forget(Trouble.GAP) if replay.has_hole else []) + self._settle()

    def _replay_failed(self, replay: _Replay, now: float) -> list[Action]:
        if replay.brought:  # ZeroMQ may have dropped its end
            return self._ask(now, replay.checks)
        self._replay, self._heard_at = None, now
        failed: list[Action] = [Complain(Trouble.NO_REPLAY)]
        if not (replay.heard or replay.checks):
            failed += self._forget(Trouble.GAP)
        return failed + self._settle()

    def _ask(self, now: float, checks: bool) -> list[Action]:
        self._replay = _Replay(now, checks)
        return [Ask(self._last or 0)]

    # -- what is known

    @property
    def _next(self) -> int:
        return 0 if self._last is None else self._last + 1

    def _settle(self) -> list[Action]:
        """Go on with the live batch that waits: what is missing before it does not come."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or (self._last is not None and waiting[0] <= self._last):
            return []
        lost: list[Action] = []
        if waiting[0] != self._next:
            known = self._last is not None
            lost = self._forget(Trouble.GAP) if known else [Complain(Trouble.LATE)]
        return [*lost, self._apply(*waiting)]

    def _apply(self, number: int, payload: bytes) -> Apply:
        self._last, self._last_digest = number, _digest(payload)
        return Apply(payload)

    def _forget(self, why: Trouble) -> list[Action]:
        known, self._last = self._last is not None, None
        return [Forget(why)] if known else []


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
