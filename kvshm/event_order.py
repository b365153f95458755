"""What an engine makes of the roster and the broadcasts it receives: order, gaps, who is new.

Two counters tell what was lost (docs/protocol.md).  The topic's sequence counts broadcasts:
a gap means that a join or a departure may be among the lost, so the engine joins again.
Each engine's own sequence counts its messages of events: a gap there means that only this
engine's slot table has to be scanned again, which is done once for many gaps (``catch_up``).
No sockets, no clock.

Events are passed on together: at ``flush``, and before anything else is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from .callbacks import Listener
from .protocol import (
    AnyBroadcast,
    EngineEvents,
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    Joined,
    StrangerJoined,
    Tick,
)

MAX_KEPT_BYTES = 4 << 20
"""Records kept for one ``flush``; more are passed on at once."""


class Verdict(Enum):
    """What a broadcast says about this engine's own place in the roster."""

    MEMBER = "member"
    GAP = "gap"
    """Broadcasts were lost: join again to learn the roster."""
    EXPELLED = "expelled"
    """The coordinator is another one, or holds this engine's epoch for ended."""


class Stream:
    """One topic's broadcasts as one engine receives them.  Used by one thread."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._own_epoch = 0
        self._coordinator_epoch = 0
        self._sequence = 0
        self.heard: dict[int, int] = {}
        """Known engines: epoch -> sequence of the last events heard of.  Only this object changes
        it; whether it is empty any thread may ask."""
        self._suspected: set[int] = set()
        self._missing: set[int] = set()
        self._strangers = 0
        self._events: list[tuple[int, bytes]] = []
        self._bytes = 0

    @property
    def missing(self) -> frozenset[int]:
        """Engines known from before a restart of the coordinator, not yet back."""
        return frozenset(self._missing)

    def begin(self, joined: Joined) -> None:
        """Take over the roster of ``joined``: tell of engines that are new, gone, or whose
        events were lost.  A new epoch of the own cache begins with an empty picture."""
        self.flush()
        if joined.engine_epoch != self._own_epoch:
            self.heard.clear()
            self._suspected.clear()
            self._missing.clear()
        restarted = joined.coordinator_epoch != self._coordinator_epoch
        self._own_epoch = joined.engine_epoch
        self._coordinator_epoch = joined.coordinator_epoch
        self._sequence = joined.sequence
        self._strangers = len(joined.strangers)
        roster = {e.epoch: e for e in joined.roster if e.epoch != joined.engine_epoch}
        absent = set(self.heard) - set(roster)
        if restarted:
            self._missing = absent
        else:
            for epoch in sorted(absent - self._missing):
                self._drop(epoch, "no longer in the roster")
        for epoch, info in roster.items():
            self._meet(info, joined.sequences.get(epoch, 0))
        self._suspect_exactly(set(joined.suspected) & set(roster))

    def flush(self) -> None:
        """Pass on the events that were taken."""
        if self._events:
            events, self._events, self._bytes = self._events, [], 0
            self._listener.engine_events(events)

    def catch_up(self, enough: Callable[[], bool]) -> None:
        """Pass on the events that were taken, then have tables scanned of which some were lost,
        until it is ``enough`` for now."""
        self.flush()
        self._listener.scan_again(enough)

    def take_events(self, broadcasts: Sequence[object]) -> int:
        """Take those at the beginning that are what comes most: events of which nothing was lost.
        Returns how many these were; ``take`` is for the rest."""
        for taken, events in enumerate(broadcasts):
            if (
                type(events) is not EngineEvents
                or events.sequence != self._sequence + 1
                or events.coordinator_epoch != self._coordinator_epoch
                or not self._takes(events)
            ):
                return taken
            self._sequence += 1
        return len(broadcasts)

    def _takes(self, events: EngineEvents) -> bool:
        """Whether these are the next events of a known engine, which are kept, or the own."""
        epoch = events.epoch
        if self.heard.get(epoch) != events.engine_sequence - 1 or self._bytes > MAX_KEPT_BYTES:
            return epoch == self._own_epoch
        self.heard[epoch] += 1
        self._events.append((epoch, events.records))
        self._bytes += len(events.records)
        return True

    def take(self, broadcast: AnyBroadcast) -> Verdict:
        """Pass on what is new in ``broadcast``, events with the next ``flush``, and say how this
        engine stands."""
        if not isinstance(broadcast, EngineEvents):
            self.flush()
        if broadcast.coordinator_epoch != self._coordinator_epoch:
            return Verdict.EXPELLED
        if isinstance(broadcast, Tick):
            return self._tick(broadcast)
        if broadcast.sequence <= self._sequence:
            return Verdict.MEMBER
        if broadcast.sequence > self._sequence + 1:
            return Verdict.GAP
        self._sequence = broadcast.sequence
        if isinstance(broadcast, EngineGone) and broadcast.epoch == self._own_epoch:
            return Verdict.EXPELLED
        self._pass_on(broadcast)
        return Verdict.MEMBER

    def give_up_missing(self) -> None:
        """Engines that have not come back since the coordinator restarted are gone."""
        self.flush()
        for epoch in sorted(self._missing):
            self._drop(epoch, "did not join the new coordinator")

    def _tick(self, tick: Tick) -> Verdict:
        if tick.sequence > self._sequence:
            return Verdict.GAP
        if tick.strangers != self._strangers:
            self._strangers = tick.strangers
            self._listener.strangers_counted(tick.strangers)
        if tick.sequence == self._sequence:
            for epoch, sequence in tick.sequences.items():
                if sequence > self.heard.get(epoch, sequence):
                    self.heard[epoch] = sequence
                    self._listener.rescan(epoch)
        return Verdict.MEMBER

    def _pass_on(self, broadcast: AnyBroadcast) -> None:
        match broadcast:
            case EngineJoined(engine=info) if info.epoch != self._own_epoch:
                self.heard[info.epoch] = broadcast.engine_sequence
                self._missing.discard(info.epoch)
                self._listener.engine_joined(info)
                self._recover(info.epoch)
            case EngineEvents(epoch=epoch) if epoch in self.heard:
                self._keep(broadcast)
            case EngineSuspected(epoch=epoch) if epoch in self.heard:
                self._suspected.add(epoch)
                self._listener.engine_suspected(epoch)
            case EngineRecovered(epoch=epoch):
                self._recover(epoch)
            case EngineGone(epoch=epoch) if epoch in self.heard:
                self._drop(epoch, broadcast.reason)
            case StrangerJoined(stranger=stranger):
                self._listener.stranger_joined(stranger)
            case _:
                return  # of this engine itself, or of an epoch that is not in the roster

    def _keep(self, events: EngineEvents) -> None:
        epoch, last = events.epoch, self.heard[events.epoch]
        if events.engine_sequence <= last:
            return
        self.heard[epoch] = events.engine_sequence
        if events.engine_sequence > last + 1:
            self._listener.rescan(epoch)
        self._events.append((epoch, events.records))
        self._bytes += len(events.records)
        if self._bytes > MAX_KEPT_BYTES:
            self.flush()

    def _meet(self, info: EngineInfo, sequence: int) -> None:
        known = self.heard.get(info.epoch)
        self.heard[info.epoch] = sequence
        self._missing.discard(info.epoch)
        if known is None:
            self._listener.engine_joined(info)
        elif known != sequence:
            self._listener.rescan(info.epoch)

    def _suspect_exactly(self, suspected: set[int]) -> None:
        for epoch in sorted(self._suspected - suspected - self._missing):
            self._recover(epoch)
        for epoch in sorted(suspected - self._suspected):
            self._suspected.add(epoch)
            self._listener.engine_suspected(epoch)

    def _recover(self, epoch: int) -> None:
        if epoch in self._suspected:
            self._suspected.discard(epoch)
            self._listener.engine_recovered(epoch)

    def _drop(self, epoch: int, reason: str) -> None:
        del self.heard[epoch]
        self._suspected.discard(epoch)
        self._missing.discard(epoch)
        self._listener.engine_gone(epoch, reason)
