"""Turns the roster and broadcasts that an engine receives into updates, in order.

Two counters show what was lost (docs/protocol.md).  The topic's sequence counts broadcasts:
after a gap the engine joins again, because a join or a departure may be lost.  Each engine's own
sequence counts its messages of events: after a gap only this engine's slot table has to be
scanned again.  No sockets, no clock, no callbacks: ``take_updates`` returns the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from .protocol import (
    AnyBroadcast,
    EngineEvents,
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    IncompatibleJoined,
    Joined,
    Tick,
)
from .updates import EventBatches, EventsLost, Update

MAX_KEPT_BYTES = 4 << 20
"""Bytes of records that may wait for ``take_updates``."""


class Verdict(Enum):
    """What a broadcast says about this engine's own place in the roster."""

    MEMBER = "member"
    GAP = "gap"
    """Broadcasts were lost: join again to learn the roster."""
    EXPELLED = "expelled"
    """Another coordinator serves now, or this coordinator has ended this engine's epoch."""


class EventOrder:
    """The broadcasts of one topic, as one engine receives them.  Used by one thread."""

    def __init__(self) -> None:
        self._own_epoch = 0
        self._coordinator_epoch = 0
        self._sequence = 0
        self.last_events: dict[int, int] = {}
        """Known engines: epoch -> sequence of the engine's last events, received or lost.  Changed
        by this object only; any thread may ask whether it is empty."""
        self.missing: set[int] = set()
        """Engines that were known before the coordinator restarted and have not joined again.
        Changed by this object only."""
        self._suspected: set[int] = set()
        self._updates: list[Update] = []
        self._batches: list[tuple[int, bytes]] = []
        """Events since the last update of another kind."""
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether ``take_updates`` should be called now, because many events wait."""
        return self._bytes > MAX_KEPT_BYTES

    def take_updates(self) -> list[Update]:
        """Return, in order, the updates since the last call.  Consecutive events come as one
        update; EventsLost may come before events that arrived earlier."""
        self._end_batches()
        updates, self._updates, self._bytes = self._updates, [], 0
        return updates

    def begin(self, joined: Joined) -> None:
        """Take over the roster of ``joined``: adds updates for engines that are new or gone, or
        whose events were lost.  With a new epoch of the own cache all engines are new."""
        self._add(joined)
        if joined.engine_epoch != self._own_epoch:
            for known in (self.last_events, self._suspected, self.missing):
                known.clear()
        restarted = joined.coordinator_epoch != self._coordinator_epoch
        self._own_epoch = joined.engine_epoch
        self._coordinator_epoch = joined.coordinator_epoch
        self._sequence = joined.sequence
        roster = {e.epoch: e for e in joined.roster if e.epoch != joined.engine_epoch}
        absent = self.last_events.keys() - roster.keys()
        if restarted:
            self.missing = absent
        else:
            for epoch in sorted(absent - self.missing):
                self._remove(epoch, "no longer in the roster")
        for epoch, info in roster.items():
            self._add_engine(info, joined.sequences.get(epoch, 0))
        for epoch in roster:
            self._set_suspected(epoch, epoch in joined.suspected)

    def receive_events(self, broadcasts: Sequence[object]) -> int:
        """The fast path: take the events at the beginning of ``broadcasts`` up to the first gap or
        other message.  Returns how many were taken; pass the rest to ``receive``."""
        for received, events in enumerate(broadcasts):
            if (
                type(events) is not EngineEvents
                or events.sequence != self._sequence + 1
                or events.coordinator_epoch != self._coordinator_epoch
                or not self._take_next_events(events)
            ):
                return received
            self._sequence += 1
        return len(broadcasts)

    def _take_next_events(self, events: EngineEvents) -> bool:
        """Keep ``events`` if they are the next ones of a known engine.  Returns whether they are,
        or are this engine's own."""
        epoch = events.epoch
        if self.last_events.get(epoch) != events.engine_sequence - 1 or self.full:
            return epoch == self._own_epoch
        self.last_events[epoch] += 1
        self._batches.append((epoch, events.records))
        self._bytes += len(events.records)
        return True

    def receive(self, broadcast: AnyBroadcast) -> Verdict:
        """Take a broadcast; return what it says of this engine's place in the roster."""
        if broadcast.coordinator_epoch != self._coordinator_epoch:
            return Verdict.EXPELLED
        if isinstance(broadcast, Tick):
            return self._receive_tick(broadcast)
        if broadcast.sequence <= self._sequence:
            return Verdict.MEMBER
        if broadcast.sequence > self._sequence + 1:
            return Verdict.GAP
        self._sequence = broadcast.sequence
        if isinstance(broadcast, EngineGone) and broadcast.epoch == self._own_epoch:
            return Verdict.EXPELLED
        self._apply(broadcast)
        return Verdict.MEMBER

    def give_up_missing(self) -> None:
        """Treat engines that have not joined again since the coordinator restarted as gone."""
        for epoch in sorted(self.missing):
            self._remove(epoch, "did not join the new coordinator")

    def _receive_tick(self, tick: Tick) -> Verdict:
        if tick.sequence > self._sequence:
            return Verdict.GAP
        self._add(tick)
        if tick.sequence == self._sequence:
            for epoch, sequence in tick.sequences.items():
                if sequence > self.last_events.get(epoch, sequence):
                    self.last_events[epoch] = sequence
                    self._add(EventsLost(epoch))
        return Verdict.MEMBER

    def _apply(self, broadcast: AnyBroadcast) -> None:
        """Apply the next broadcast, unless it is about this engine itself or about an epoch that is
        not in the roster."""
        match broadcast:
            case EngineJoined(engine=info) if info.epoch != self._own_epoch:
                self.last_events[info.epoch] = broadcast.engine_sequence
                self.missing.discard(info.epoch)
                self._add(broadcast)
                self._set_suspected(info.epoch, False)
            case EngineEvents(epoch=epoch) if epoch in self.last_events:
                self._take_events(broadcast)
            case EngineSuspected(epoch=epoch) if epoch in self.last_events:
                self._set_suspected(epoch, True)
            case EngineRecovered(epoch=epoch):
                self._set_suspected(epoch, False)
            case EngineGone(epoch=epoch) if epoch in self.last_events:
                self._remove(epoch, broadcast.reason)
            case IncompatibleJoined():
                self._add(broadcast)

    def _take_events(self, events: EngineEvents) -> None:
        epoch, last = events.epoch, self.last_events[events.epoch]
        if events.engine_sequence <= last:
            return
        self.last_events[epoch] = events.engine_sequence
        if events.engine_sequence > last + 1:
            # Before the batches, so that these stay together.
            self._updates.append(EventsLost(epoch))
        self._batches.append((epoch, events.records))
        self._bytes += len(events.records)

    def _add_engine(self, info: EngineInfo, sequence: int) -> None:
        known, self.last_events[info.epoch] = self.last_events.get(info.epoch), sequence
        self.missing.discard(info.epoch)
        if known is None:
            self._add_broadcast(EngineJoined, engine=info, engine_sequence=sequence)
        elif known != sequence:
            self._add(EventsLost(info.epoch))

    def _set_suspected(self, epoch: int, suspected: bool) -> None:
        if suspected != (epoch in self._suspected):
            self._suspected ^= {epoch}
            self._add_broadcast(EngineSuspected if suspected else EngineRecovered, epoch=epoch)

    def _remove(self, epoch: int, reason: str) -> None:
        del self.last_events[epoch]
        self._suspected.discard(epoch)
        self.missing.discard(epoch)
        self._add_broadcast(EngineGone, epoch=epoch, reason=reason)

    def _add_broadcast(self, kind: Callable[..., Update], **fields: object) -> None:
        """Add an update of a kind that the coordinator broadcasts."""
        numbers = {"coordinator_epoch": self._coordinator_epoch, "sequence": self._sequence}
        self._add(kind(**numbers, **fields))

    def _add(self, update: Update) -> None:
        self._end_batches()
        self._updates.append(update)

    def _end_batches(self) -> None:
        if self._batches:
            self._updates.append(EventBatches(self._batches))
            self._batches = []
