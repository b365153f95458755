"""Lease bits, watches and sequences hold, whatever happens in whatever order."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshm.coordinator.actions import (
    Action,
    Clock,
    Died,
    Process,
    Publish,
    SweepBits,
    Unwatch,
    Watch,
)
from kvshm.coordinator.state import decide
from kvshm.protocol import (
    EngineInfo,
    Leave,
    Tick,
)
from kvshm.records import NUM_LEASE_BITS

from .coordinators import (
    engine,
    join,
    new_state,
    say,
)


class Anything(RuleBasedStateMachine):
    """Engines come, go, die and join again in any order, in few processes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = new_state()
        self.alive = set(range(1, 8))
        self.next_epoch = 100
        self.infos: dict[int, EngineInfo] = {}
        self.dirty = [0] * NUM_LEASE_BITS
        """Bit -> process whose leases may be set in some slot; 0: none."""
        self.watched: set[Process] = set()
        self.sequences: dict[bytes, int] = {}

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Watch(process):
                    assert process not in self.watched
                    self.watched.add(process)
                case Unwatch(process):
                    self.watched.remove(process)
                case SweepBits(bits):
                    for bit in range(NUM_LEASE_BITS):
                        if bits >> bit & 1 and self.dirty[bit] not in self.alive:
                            self.dirty[bit] = 0
                case Publish(topic, message) if not isinstance(message, Tick):
                    assert message.sequence == self.sequences.get(topic, 0) + 1
                    self.sequences[topic] = message.sequence

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), two_topics=st.booleans(), fresh=st.booleans())
    def engine_joins(self, data: st.DataObject, two_topics: bool, fresh: bool) -> None:
        pid = data.draw(st.sampled_from(sorted(self.alive)))
        known = [i for i in self.infos.values() if i.pid == pid and i.epoch in self.state.engines]
        if fresh or not known:
            self.next_epoch += 1
            topic = (b"t" if two_topics else b"f") * 32
            bit = data.draw(st.integers(-1, NUM_LEASE_BITS))
            info = engine(self.next_epoch, pid=pid, fingerprint=topic, lease_bit=bit)
        else:
            info = known[0]
        reply, actions = join(self.state, info)
        bit = reply.lease_bit
        if bit >= 0:
            assert self.dirty[bit] in (0, pid), "a bit was handed on before it was swept"
            self.dirty[bit] = pid
        self.infos[info.epoch] = msgspec.structs.replace(info, lease_bit=bit)
        self.obey(actions)

    @precondition(lambda self: self.state.engines)
    @rule(data=st.data())
    def engine_leaves(self, data: st.DataObject) -> None:
        info = self.infos[data.draw(st.sampled_from(sorted(self.state.engines)))]
        self.obey(say(self.state, info, Leave(epoch=info.epoch)))

    @precondition(lambda self: self.watched)
    @rule(data=st.data())
    def process_dies(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from(sorted(self.watched)))
        self.alive.discard(process.pid)
        self.watched.discard(process)
        self.obey(decide(self.state, Died(process), 0.0))
        assert process.pid not in self.dirty, "leases of the dead are left"

    @rule()
    def time_passes(self) -> None:
        self.obey(decide(self.state, Clock(), 0.0))

    @invariant()
    def bits_are_apart(self) -> None:
        granted = [engine.info.lease_bit for engine in self.state.engines.values()]
        bits = [bit for bit in granted if bit >= 0]
        assert len(bits) == len(set(bits))

    @invariant()
    def everybody_in_the_roster_is_watched(self) -> None:
        needed = {p for engine in self.state.engines.values() for p in engine.processes}
        assert needed <= self.watched == self.state.watched
        assert all(process.pid in self.alive for process in needed)


Anything.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
