"""A keeper's connection to a store beyond the node: calls that may hang, and what they fail of."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from .calls import Calls
from .store import Store

T = TypeVar("T")
TRY_SECONDS = 5.0
"""Between two tries to connect."""
STUCK_SECONDS = 2.0
"""A call that has been made for longer counts as failed: nothing is asked of the store meanwhile.
"""


class StoreLink:
    """Used by the keeper's thread."""

    def __init__(
        self, store: Store, clock: Callable[[], float], say: Callable[[str], None]
    ) -> None:
        """Raises TransportError without threads or descriptors."""
        self.store, self._clock, self._say = store, clock, say
        self.woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable once a call has ended, until ``go_round``."""
        self.looks, self.reads, self.writes = (
            Calls(f"kvshm-{name}", clock, self._wake) for name in ("looks", "reads", "writes")
        )
        self._connected = self._connecting = False
        self._try_at = clock()
        self._answers = True
        self._failures = 0

    @property
    def connected(self) -> bool:
        """Whether calls may be made."""
        return self._connected

    @property
    def usable(self) -> bool:
        """Whether the store has answered when it was last looked into, and no call hangs."""
        return self._connected and self._answers

    def go_round(self) -> None:
        """Handle what has ended, and see whether calls hang."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.woken)
        calls = (self.looks, self.reads, self.writes)
        self._failures += sum(each.take_failures() for each in calls)
        for each in calls:
            each.finish()
        hang = any(each.takes() > STUCK_SECONDS for each in calls)
        if self._connected:
            self._show(not hang and self.looks.error is None)
        elif hang:
            self._show(False)
        else:
            self._begin()

    def take_failures(self) -> int:
        """Return how many calls have failed, or hung, since this was asked last."""
        failures, self._failures = self._failures, 0
        return failures

    def _begin(self) -> None:
        now = self._clock()
        if not self._connecting and now >= self._try_at:
            self._connecting = True
            self.looks.make(self._connect, self._on_connected)

    def _connect(self) -> bool:
        self.store.connect()
        return True

    def _on_connected(self, done: bool | None) -> None:
        self._connecting, self._connected = False, bool(done)
        self._try_at = self._clock() + TRY_SECONDS
        self._show(bool(done))
        if done:
            self._say("connected to the store")

    def _show(self, answers: bool) -> None:
        if answers != self._answers:
            why = f": {self.looks.error}" if self.looks.error is not None else ""
            self._say("the store answers again" if answers else f"the store does not answer{why}")
            self._failures += not answers
        self._answers = answers

    def _wake(self) -> None:
        os.eventfd_write(self.woken, 1)

    def close(self) -> None:
        """Let go of the store, unless a call hangs: then the end of the process does."""
        if not any(each.takes() for each in (self.looks, self.reads, self.writes)):
            self.store.close()
        os.close(self.woken)
