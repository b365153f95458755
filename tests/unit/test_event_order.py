"""The pure half of the client: whatever is lost, an engine ends up knowing what is true."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from msgspec import Raw

from kvshm._node.event_order import MAX_KEPT_BYTES, EventOrder, Verdict
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    AnyBroadcast,
    EngineEvents,
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    Joined,
    Tick,
)
from kvshm._node.updates import EventBatches, EventsLost

from ..update_names import all_named

OWN = 1000


def engine(epoch: int) -> EngineInfo:
    return EngineInfo(
        epoch=epoch,
        name=f"e{epoch}",
        pid=epoch,
        fingerprint=b"f" * 32,
        fields={},
        num_blocks=1,
        ranks=[],
    )


def joined(sequence: int, coordinator: int = 1, own: int = OWN, **engines: int) -> Joined:
    """A reply; ``engines`` gives the sequence of each engine e<epoch>."""
    epochs = {int(name[1:]): heard for name, heard in engines.items()}
    return Joined(
        protocol=PROTOCOL_VERSION,
        coordinator_epoch=coordinator,
        engine_epoch=own,
        lease_bit=0,
        sequence=sequence,
        roster=[engine(epoch) for epoch in epochs],
        sequences=epochs,
        suspected=[],
        incompatible=[],
    )


def order_at(sequence: int, **engines: int) -> EventOrder:
    order = EventOrder()
    order.begin(joined(sequence, **engines))
    order.take_updates()
    return order


def news_of(order: EventOrder) -> list[tuple[Any, ...]]:
    return all_named(order.take_updates())


def events(sequence: int, engine_sequence: int, epoch: int = 7) -> EngineEvents:
    return EngineEvents(
        coordinator_epoch=1,
        sequence=sequence,
        epoch=epoch,
        engine_sequence=engine_sequence,
        records=b"%d" % engine_sequence,
    )


def test_first_roster_announces_everybody_but_oneself() -> None:
    order = EventOrder()
    order.begin(joined(5, e7=1, e8=2, e1000=3))
    assert news_of(order) == [("engine_joined", engine(7)), ("engine_joined", engine(8))]


def test_next_roster_tells_differences_only() -> None:
    order = order_at(5, e7=1, e8=2, e9=0)
    order.begin(joined(9, e7=1, e8=3, e10=0))
    assert news_of(order) == [
        ("engine_gone", 9, "no longer in the roster"),
        ("rescan", 8),
        ("engine_joined", engine(10)),
    ]


def test_own_new_epoch_begins_with_an_empty_picture() -> None:
    order = order_at(5, e7=1)
    order.begin(joined(6, own=OWN + 1, e7=1))
    assert news_of(order) == [("engine_joined", engine(7))]


def test_broadcasts_follow_each_other_or_tell_a_gap() -> None:
    order = order_at(5, e7=1)
    assert order.receive(events(5, 1)) is Verdict.MEMBER  # in the roster already
    assert order.receive(events(6, 2)) is Verdict.MEMBER
    assert order.receive(events(8, 4)) is Verdict.GAP
    assert news_of(order) == [("engine_events", [(7, b"2")])]


def test_gaps_of_one_engine_are_reported_and_its_events_together() -> None:
    order = order_at(5, e7=1)
    assert order.receive(events(6, 3)) is Verdict.MEMBER
    assert order.receive(events(7, 3)) is Verdict.MEMBER
    assert order.receive(events(8, 5)) is Verdict.MEMBER
    assert news_of(order) == [
        ("rescan", 7),
        ("rescan", 7),
        ("engine_events", [(7, b"3"), (7, b"5")]),
    ]


def test_events_are_passed_on_together_and_before_what_comes_after_them() -> None:
    order = order_at(0, e7=0, e8=0)
    gone = EngineGone(coordinator_epoch=1, sequence=4, epoch=7, reason="left")
    for broadcast in (events(1, 1), events(2, 1, 8), events(3, 2), gone, events(5, 2, 8)):
        assert order.receive(broadcast) is Verdict.MEMBER
    together = ("engine_events", [(7, b"1"), (8, b"1"), (7, b"2")])
    last = ("engine_events", [(8, b"2")])
    assert news_of(order) == [together, ("engine_gone", 7, "left"), last]
    assert news_of(order) == []


def test_of_a_frame_what_is_not_the_next_is_left_to_take() -> None:
    order = order_at(0, e7=0, e8=0)
    whole = [events(1, 1), events(2, 1, 8), events(3, 2), events(4, 9, OWN)]
    tick = Tick(coordinator_epoch=1, sequence=2, sequences={})
    other = msgspec.structs.replace(events(1, 1), coordinator_epoch=2)
    for odd in (tick, events(4, 2), events(1, 1), events(3, 3), events(3, 1, 9), other, Raw()):
        assert order_at(0, e7=0, e8=0).receive_events([*whole[:2], odd, *whole[2:]]) == 2
    assert order.receive_events(whole) == 4
    assert order.receive(events(5, 3)) is Verdict.MEMBER
    assert news_of(order) == [("engine_events", [(7, b"1"), (8, b"1"), (7, b"2"), (7, b"3")])]
    assert order.last_events == {7: 3, 8: 1}


def test_many_events_are_to_be_taken_before_more_arrive() -> None:
    order = order_at(0, e7=0)
    assert not order.full
    big = msgspec.structs.replace(events(1, 1), records=bytes(MAX_KEPT_BYTES + 1))
    assert order.receive_events([big, events(2, 2)]) == 1
    assert order.full
    assert news_of(order) == [("engine_events", [(7, big.records)])]
    assert not order.full
    assert order.receive_events([events(2, 2)]) == 1


def test_events_of_an_unknown_epoch_are_dropped() -> None:
    order = order_at(5)
    assert order.receive(events(6, 1)) is Verdict.MEMBER
    assert news_of(order) == []
    assert order.last_events == {}


def test_tick_shows_a_lost_tail() -> None:
    order = order_at(5, e7=1)
    tick = {"coordinator_epoch": 1, "sequences": {7: 2, OWN: 99}}
    assert order.receive(Tick(sequence=4, **tick)) is Verdict.MEMBER
    assert news_of(order) == []
    assert order.receive(Tick(sequence=5, **tick)) is Verdict.MEMBER
    assert order.receive(Tick(sequence=5, **tick)) is Verdict.MEMBER
    assert news_of(order) == [("rescan", 7)]
    assert order.receive(Tick(sequence=6, **tick)) is Verdict.GAP


def test_another_coordinator_or_own_end_expels() -> None:
    order = order_at(5)
    assert order.receive(Tick(coordinator_epoch=2, sequence=5, sequences={})) is Verdict.EXPELLED
    own = EngineGone(coordinator_epoch=1, sequence=6, epoch=OWN, reason="r")
    assert order.receive(own) is Verdict.EXPELLED


def test_engines_may_be_missing_for_a_while_after_a_restart() -> None:
    order = order_at(5, e7=3, e8=1, e9=0)
    order.begin(joined(0, coordinator=2, e8=1))
    assert news_of(order) == []
    assert order.missing == {7, 9}
    back = EngineJoined(coordinator_epoch=2, sequence=1, engine=engine(7), engine_sequence=3)
    order.receive(back)
    assert news_of(order) == [("engine_joined", engine(7))]
    order.give_up_missing()
    assert news_of(order) == [("engine_gone", 9, "did not join the new coordinator")]
    assert order.last_events == {8: 1, 7: 3}


def test_suspicion_ends_with_recovery_return_or_roster() -> None:
    order = order_at(0, e7=0, e8=0)
    numbered = {"coordinator_epoch": 1}
    order.receive(EngineSuspected(**numbered, sequence=1, epoch=7))
    order.receive(EngineSuspected(**numbered, sequence=2, epoch=8))
    order.receive(EngineRecovered(**numbered, sequence=3, epoch=7))
    order.receive(EngineRecovered(**numbered, sequence=4, epoch=7))
    assert news_of(order) == [
        ("engine_suspected", 7),
        ("engine_suspected", 8),
        ("engine_recovered", 7),
    ]
    order.begin(joined(9, e7=0, e8=0))
    assert news_of(order) == [("engine_recovered", 8)]


class Anything(RuleBasedStateMachine):
    """Engines come, go and publish; broadcasts are lost, engines' batches too, and the
    coordinator restarts.  After the next tick that arrives, nothing is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = 1
        self.sequence = 0
        self.truth: dict[int, set[int]] = {}
        self.sent: dict[int, int] = {}
        self.next_epoch = 1
        self.replica: dict[int, set[int]] = {}
        self.lost: set[int] = set()
        self.order = EventOrder()
        self.join()

    # -- the engine: a replica that scans the truth

    @rule()
    def news_are_applied(self) -> None:
        for news in self.order.take_updates():
            match news:
                case EngineJoined(engine=info):
                    self.replica[info.epoch] = set(self.truth.get(info.epoch, ()))
                case EngineGone(epoch=epoch):
                    del self.replica[epoch]
                    self.lost.discard(epoch)
                case EventBatches(batches):
                    for epoch, records in batches:
                        self.replica[epoch].add(int(records))
                case EventsLost(epoch):
                    self.lost.add(epoch)
        assert self.replica.keys() == self.order.last_events.keys(), "knows whom it keeps"

    # -- the world

    def join(self) -> None:
        engines = {f"e{epoch}": self.sent[epoch] for epoch in self.truth}
        self.order.begin(joined(self.sequence, self.coordinator, **engines))

    def broadcast(self, arrives: bool, make: Any, **fields: Any) -> None:
        self.sequence += 1
        numbered = {"coordinator_epoch": self.coordinator, "sequence": self.sequence}
        if arrives:
            self.deliver(make(**numbered, **fields))

    def deliver(self, broadcast: AnyBroadcast) -> None:
        if self.order.receive_events([broadcast]):
            return
        if self.order.receive(broadcast) is not Verdict.MEMBER:
            self.join()

    @rule(arrives=st.booleans())
    def engine_comes(self, arrives: bool) -> None:
        epoch = self.next_epoch
        self.next_epoch += 1
        self.truth[epoch], self.sent[epoch] = set(), 0
        self.broadcast(arrives, EngineJoined, engine=engine(epoch), engine_sequence=0)

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), arrives=st.booleans(), relayed=st.booleans())
    def engine_publishes(self, data: st.DataObject, arrives: bool, relayed: bool) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.truth)))
        self.sent[epoch] += 1
        block = self.sent[epoch]
        self.truth[epoch].add(block)
        if relayed:
            fields = {"epoch": epoch, "engine_sequence": block, "records": b"%d" % block}
            self.broadcast(arrives, EngineEvents, **fields)

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), arrives=st.booleans())
    def engine_goes(self, data: st.DataObject, arrives: bool) -> None:
        epoch = data.draw(st.sampled_from(sorted(self.truth)))
        del self.truth[epoch]
        self.broadcast(arrives, EngineGone, epoch=epoch, reason="r")

    @rule()
    def coordinator_restarts(self) -> None:
        self.coordinator += 1
        self.sequence = 0
        self.order.begin(joined(0, self.coordinator))
        for epoch in self.truth:
            fields = {"engine": engine(epoch), "engine_sequence": self.sent[epoch]}
            self.broadcast(True, EngineJoined, **fields)
        self.order.give_up_missing()

    @rule()
    def tick_arrives(self) -> None:
        tick = Tick(
            coordinator_epoch=self.coordinator,
            sequence=self.sequence,
            sequences={epoch: self.sent[epoch] for epoch in self.truth},
        )
        self.deliver(tick)
        self.all_is_worked_off()
        assert self.replica == self.truth

    @rule()
    def all_is_worked_off(self) -> None:
        self.news_are_applied()
        for epoch in self.lost:
            self.replica[epoch] = set(self.truth.get(epoch, ()))
        self.lost.clear()


Anything.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
