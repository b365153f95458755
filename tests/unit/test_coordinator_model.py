"""Lease bits, kept tables and sequences hold, whatever happens in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvshm._base.timing import TIMING
from kvshm._node.protocol import PROTOCOL_VERSION, EngineInfo, Join, Joined, Leave, Refused, Tick
from kvshm._shm.layout import NUM_LEASE_BITS
from kvshm.coordinator.actions import (
    Action,
    CheckResult,
    ClockTick,
    EngineMessage,
    ProcessDeath,
    ReleaseTable,
    SendBroadcast,
    Sender,
    SendReply,
    SweepBits,
    TableUnused,
)
from kvshm.coordinator.joining import MAX_OF_PROCESS
from kvshm.coordinator.state import decide

from .coordinators import UID, engine, new_state

INVISIBLE = 0
"""What the socket tells of processes in a pid namespace that cannot be seen."""
DEAD_BEFORE = -1
"""A process that took leases under the coordinator before, and died with it."""


@dataclass
class Process:
    """An engine's process, as it is: ``seen_as`` is what the socket makes of its pid."""

    seen_as: int
    bit: int = -1
    tables: set[int] = field(default_factory=set)


class Anything(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = new_state()
        self.processes = {p: Process(seen_as=p if p <= 4 else INVISIBLE) for p in range(1, 8)}
        self.next_epoch, self.now = 100, 0.0
        self.infos: dict[int, tuple[int, EngineInfo]] = {}
        self.dirty: list[set[int]] = [set() for _ in range(NUM_LEASE_BITS)]
        """Bit -> processes that may have leases with it in some slot."""
        self.known: set[int] = set()
        """Processes that have joined this coordinator."""
        self.kept: set[int] = set()
        self.sequences: dict[bytes, int] = {}

    @initialize(restarted=st.booleans(), data=st.data())
    def there_was_another_before(self, restarted: bool, data: st.DataObject) -> None:
        """Each of its bits was either that of somebody who lives, or who died with it."""
        self.state = new_state(grace_over=not restarted)
        if not restarted:
            return
        owners = data.draw(st.lists(st.sampled_from([DEAD_BEFORE, 1, 2, 5, 6]), max_size=28))
        for bit, owner in enumerate(owners):
            if owner == DEAD_BEFORE or self.processes[owner].bit < 0:
                self.dirty[bit] = {owner}
                if owner != DEAD_BEFORE:
                    self.processes[owner].bit = bit
        self.obey(decide(self.state, ClockTick(), self.now))

    def is_unknown(self, process: int) -> bool:
        """Whether it lives, and may come back with leases it took under the coordinator before:
        it loses them if it does not in time, and finds that out when it checks its copies."""
        return process in self.processes and process not in self.known

    def obey(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ReleaseTable(epoch):
                    self.kept.remove(epoch)
                case SweepBits(bits):
                    for bit in range(NUM_LEASE_BITS):
                        if bits >> bit & 1:
                            self.dirty[bit] = self.dirty[bit] & self.processes.keys() & self.known
                case SendBroadcast(topic, message) if not isinstance(message, Tick):
                    assert message.sequence == self.sequences.get(topic, 0) + 1
                    self.sequences[topic] = message.sequence

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), two_topics=st.booleans(), fresh=st.booleans())
    def engine_joins(self, data: st.DataObject, two_topics: bool, fresh: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes[number]
        known = [i for n, i in self.infos.values() if n == number and i.epoch in self.state.engines]
        if fresh or not known:
            self.next_epoch += 1
            topic = (b"t" if two_topics else b"f") * 32
            info = engine(self.next_epoch, pid=number, fingerprint=topic, lease_bit=process.bit)
            process.tables.add(info.epoch)
        else:
            info = known[0]
        sender = Sender(b"route%d" % number, UID, process.seen_as)
        join = Join(protocol=PROTOCOL_VERSION, engine=info)
        actions = decide(self.state, CheckResult(sender, join, None), self.now)
        [reply] = [a.message for a in actions if isinstance(a, SendReply)]
        if isinstance(reply, Refused):
            assert len(process.tables) > MAX_OF_PROCESS, "refused for another reason"
            process.tables.remove(info.epoch)
            return
        self.kept.add(info.epoch)
        self.known.add(number)
        assert isinstance(reply, Joined)
        self.obey(actions)
        bit = reply.lease_bit
        if bit >= 0:
            others = {p for p in self.dirty[bit] if p != number and not self.is_unknown(p)}
            assert not others, "a bit was handed on before it was swept"
            self.dirty[bit].add(number)
            process.bit = bit
        self.infos[info.epoch] = number, msgspec.structs.replace(info, lease_bit=bit)

    @precondition(lambda self: self.state.engines)
    @rule(data=st.data())
    def engine_leaves(self, data: st.DataObject) -> None:
        number, info = self.infos[data.draw(st.sampled_from(sorted(self.state.engines)))]
        sender = Sender(b"", UID, self.processes[number].seen_as)
        self.obey(decide(self.state, EngineMessage(sender, Leave(epoch=info.epoch)), self.now))

    @precondition(lambda self: any(p.tables for p in self.processes.values()))
    @rule(data=st.data())
    def table_is_given_up(self, data: st.DataObject) -> None:
        """Whoever gives a table up has given back the leases that were taken with it."""
        number = data.draw(st.sampled_from([n for n, p in self.processes.items() if p.tables]))
        process = self.processes[number]
        epoch = data.draw(st.sampled_from(sorted(process.tables)))
        process.tables.remove(epoch)
        bit = self.infos[epoch][1].lease_bit
        if not any(self.infos[other][1].lease_bit == bit for other in process.tables):
            self.dirty[bit].discard(number)  # without a bit it is in none of them
        self.ends(epoch)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), worker_first=st.booleans())
    def process_dies(self, data: st.DataObject, worker_first: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.processes)))
        process = self.processes.pop(number)
        for epoch in data.draw(st.permutations(sorted(process.tables))):
            if worker_first:
                self.obey(decide(self.state, ProcessDeath(epoch, owner=False), self.now))
            self.ends(epoch)
        if number in self.known and self.state.schedule.grace_over:
            assert not any(number in holders for holders in self.dirty), "leases of the dead"

    def ends(self, epoch: int) -> None:
        """As the shell tells it of a table that it keeps."""
        for event in (ProcessDeath(epoch, owner=True), TableUnused(epoch)):
            if epoch in self.kept:
                self.obey(decide(self.state, event, self.now))

    @rule(seconds=st.sampled_from([0.0, 1.0, TIMING.grace_seconds]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.obey(decide(self.state, ClockTick(), self.now))
        if self.state.schedule.grace_over:
            assert not any(DEAD_BEFORE in holders for holders in self.dirty)

    @invariant()
    def bits_are_apart(self) -> None:
        granted = [engine.info.lease_bit for engine in self.state.engines.values()]
        bits = [bit for bit in granted if bit >= 0]
        assert len(bits) == len(set(bits))

    @invariant()
    def every_table_that_matters_is_kept_and_no_other(self) -> None:
        living = {epoch for process in self.processes.values() for epoch in process.tables}
        assert self.state.engines.keys() <= self.kept == self.state.kept
        assert self.kept <= living, "of an epoch that nobody has a table of"


Anything.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
