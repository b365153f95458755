"""What an engine makes of the roster and the broadcasts it receives: order, gaps, who is new.

Two counters tell what was lost (docs/protocol.md).  The topic's sequence counts broadcasts:
a gap means that a join or a departure may be among the lost, so the engine joins again.
Each engine's own sequence counts its messages of events: a gap there means that only this
engine's slot table has to be scanned again.  No sockets, no clock.

Nothing is called back: ``take_news`` returns what has come about since it was called last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from .news import EventBatches, EventsLost, News
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
"""Records that may wait for ``take_news``."""


class Verdict(Enum):
    """What a broadcast says about this engine's own place in the roster."""

    MEMBER = "member"
    GAP = "gap"
    """Broadcasts were lost: join again to learn the roster."""
    EXPELLED = "expelled"
    """The coordinator is another one, or holds this engine's epoch for ended."""


class EventOrder:
    """One topic's broadcasts as one engine receives them.  Used by one thread."""

    def __init__(self) -> None:
        self._own_epoch = 0
        self._coordinator_epoch = 0
        self._sequence = 0
        self.heard: dict[int, int] = {}
        """Known engines: epoch -> sequence of the last events heard of.  Only this object changes
        it; whether it is empty any thread may ask."""
        self.missing: set[int] = set()
        """Engines known from before a restart of the coordinator, not yet back.  Only this object
        changes it."""
        self._suspected: set[int] = set()
        self._news: list[News] = []
        self._batches: list[tuple[int, bytes]] = []
        """Events since the last news of another kind."""
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether so many events wait that they should be taken before more arrive."""
        return self._bytes > MAX_KEPT_BYTES

    def take_news(self) -> list[News]:
        """Return, in order, what is new since this was called last: events that follow each other
        together, EventsLost perhaps sooner than events that came before."""
        self._end_batches()
        news, self._news, self._bytes = self._news, [], 0
        return news

    def begin(self, joined: Joined) -> None:
        """Take over the roster of ``joined``: there is news of engines that are new, gone, or whose
        events were lost.  A new epoch of the own cache begins with an empty picture."""
        self._tell(joined)
        if joined.engine_epoch != self._own_epoch:
            for known in (self.heard, self._suspected, self.missing):
                known.clear()
        restarted = joined.coordinator_epoch != self._coordinator_epoch
        self._own_epoch = joined.engine_epoch
        self._coordinator_epoch = joined.coordinator_epoch
        self._sequence = joined.sequence
        roster = {e.epoch: e for e in joined.roster if e.epoch != joined.engine_epoch}
        absent = self.heard.keys() - roster.keys()
        if restarted:
            self.missing = absent
        else:
            for epoch in sorted(absent - self.missing):
                self._drop(epoch, "no longer in the roster")
        for epoch, info in roster.items():
            self._meet(info, joined.sequences.get(epoch, 0))
        suspected = roster.keys() & joined.suspected
        for epoch in sorted(self._suspected - suspected - self.missing):
            self._recover(epoch)
        for epoch in sorted(suspected - self._suspected):
            self._suspect(epoch)

    def receive_events(self, broadcasts: Sequence[object]) -> int:
        """Take in those at the beginning that are what comes most: events of which nothing was
        lost.  Returns how many these were; ``receive`` is for the rest."""
        for received, events in enumerate(broadcasts):
            if (
                type(events) is not EngineEvents
                or events.sequence != self._sequence + 1
                or events.coordinator_epoch != self._coordinator_epoch
                or not self._keep_next(events)
            ):
                return received
            self._sequence += 1
        return len(broadcasts)

    def _keep_next(self, events: EngineEvents) -> bool:
        """Whether these are the next events of a known engine, which are kept, or the own."""
        epoch = events.epoch
        if self.heard.get(epoch) != events.engine_sequence - 1 or self._bytes > MAX_KEPT_BYTES:
            return epoch == self._own_epoch
        self.heard[epoch] += 1
        self._batches.append((epoch, events.records))
        self._bytes += len(events.records)
        return True

    def receive(self, broadcast: AnyBroadcast) -> Verdict:
        """Take in what is new in ``broadcast``, and say how this engine stands."""
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
        self._follow(broadcast)
        return Verdict.MEMBER

    def give_up_missing(self) -> None:
        """Engines that have not come back since the coordinator restarted are gone."""
        for epoch in sorted(self.missing):
            self._drop(epoch, "did not join the new coordinator")

    def _receive_tick(self, tick: Tick) -> Verdict:
        if tick.sequence > self._sequence:
            return Verdict.GAP
        self._tell(tick)
        if tick.sequence == self._sequence:
            for epoch, sequence in tick.sequences.items():
                if sequence > self.heard.get(epoch, sequence):
                    self.heard[epoch] = sequence
                    self._tell(EventsLost(epoch))
        return Verdict.MEMBER

    def _follow(self, broadcast: AnyBroadcast) -> None:
        match broadcast:
            case EngineJoined(engine=info) if info.epoch != self._own_epoch:
                self.heard[info.epoch] = broadcast.engine_sequence
                self.missing.discard(info.epoch)
                self._tell(broadcast)
                self._recover(info.epoch)
            case EngineEvents(epoch=epoch) if epoch in self.heard:
                self._keep(broadcast)
            case EngineSuspected(epoch=epoch) if epoch in self.heard:
                self._suspect(epoch)
            case EngineRecovered(epoch=epoch):
                self._recover(epoch)
            case EngineGone(epoch=epoch) if epoch in self.heard:
                self._drop(epoch, broadcast.reason)
            case StrangerJoined():
                self._tell(broadcast)
            case _:
                return  # of this engine itself, or of an epoch that is not in the roster

    def _keep(self, events: EngineEvents) -> None:
        epoch, last = events.epoch, self.heard[events.epoch]
        if events.engine_sequence <= last:
            return
        self.heard[epoch] = events.engine_sequence
        if events.engine_sequence > last + 1:
            self._news.append(EventsLost(epoch))  # before the batches, so that they stay together
        self._batches.append((epoch, events.records))
        self._bytes += len(events.records)

    def _meet(self, info: EngineInfo, sequence: int) -> None:
        known, self.heard[info.epoch] = self.heard.get(info.epoch), sequence
        self.missing.discard(info.epoch)
        if known is None:
            self._tell_of(EngineJoined, engine=info, engine_sequence=sequence)
        elif known != sequence:
            self._tell(EventsLost(info.epoch))

    def _suspect(self, epoch: int) -> None:
        self._suspected.add(epoch)
        self._tell_of(EngineSuspected, epoch=epoch)

    def _recover(self, epoch: int) -> None:
        if epoch in self._suspected:
            self._suspected.discard(epoch)
            self._tell_of(EngineRecovered, epoch=epoch)

    def _drop(self, epoch: int, reason: str) -> None:
        del self.heard[epoch]
        self._suspected.discard(epoch)
        self.missing.discard(epoch)
        self._tell_of(EngineGone, epoch=epoch, reason=reason)

    def _tell_of(self, kind: Callable[..., News], **fields: object) -> None:
        """As if it had just been broadcast."""
        numbers = {"coordinator_epoch": self._coordinator_epoch, "sequence": self._sequence}
        self._tell(kind(**numbers, **fields))

    def _tell(self, news: News) -> None:
        self._end_batches()
        self._news.append(news)

    def _end_batches(self) -> None:
        if self._batches:
            self._news.append(EventBatches(self._batches))
            self._batches = []
