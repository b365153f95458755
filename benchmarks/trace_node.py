"""The node of a replayed trace: kvshm's own coordinator, messages and replicas, without sockets and
threads, by the replay's clock.

Each message is encoded by its sender and decoded by its receiver, in the order and after the times
of ``Timing``: an engine's events wait in it until it sends them, and in the coordinator until it
relays them.  What is left out: sockets, ticks, heartbeats, and the check of a table that joins.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Raw
from trace_replay import Clock

from kvshm._base.ids import Epoch
from kvshm._base.timing import Timing
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.roster_handler import RosterHandler
from kvshm._node.coordinator_client import MAX_JOINED_BYTES
from kvshm._node.event_order import EventOrder, Verdict
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    Events,
    Join,
    Joined,
    Reply,
    decode_broadcast,
    decode_command,
    decode_reply,
    encode,
    open_broadcast,
)
from kvshm._node.updates import EventBatches
from kvshm._shm.layout import RECORD_BYTES
from kvshm._shm.own_slot_table import OwnSlotTable
from kvshm._shm.slot_table import PeerSlotTable
from kvshm.coordinator.actions import (
    Action,
    CheckResult,
    CheckTable,
    EngineMessage,
    Input,
    SendBroadcast,
    Sender,
    SendReply,
)
from kvshm.coordinator.broadcasts import BroadcastQueue
from kvshm.coordinator.roster import State
from kvshm.coordinator.state import decide
from kvshm.errors import ProtocolError


@dataclass
class Cost:
    """Calls of one kind: time of their thread on a core, in nanoseconds."""

    calls: int = 0
    total_ns: int = 0
    longest_ns: int = 0


class Costs:
    """What the parts of kvshm took, by name."""

    def __init__(self) -> None:
        self.of: dict[str, Cost] = {}

    def add(self, name: str, begun_ns: int) -> None:
        """``begun_ns``: of ``time.thread_time_ns`` when the call began."""
        spent, cost = time.thread_time_ns() - begun_ns, self.of.setdefault(name, Cost())
        cost.calls += 1
        cost.total_ns += spent
        cost.longest_ns = max(cost.longest_ns, spent)


@dataclass
class Traffic:
    """Messages of events, and what is in them."""

    sent: int = 0
    sent_bytes: int = 0
    records: int = 0
    frames: int = 0
    """Broadcasts."""
    received_bytes: int = 0
    """By all engines."""
    applied: int = 0
    """Records, in all replicas."""


class Tables:
    """Hands out the engines' tables, as the coordinator does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of: dict[int, OwnSlotTable] = {}

    def add(self, table: OwnSlotTable) -> None:
        self._of[table.epoch] = table

    def roster_table(self, epoch: int, num_blocks: int, num_ranks: int) -> PeerSlotTable:
        table = self._of[epoch]
        mapped = PeerSlotTable.from_fd(table.name, table.descriptor(True))
        mapped._clock = self._clock.whole_ns  # the table's times are the replay's
        return mapped


class Member:
    """One engine's connection to the node: what its client's thread does."""

    def __init__(self, state: EpochState, traffic: Traffic) -> None:
        self.state, self._traffic = state, traffic
        self.handler = RosterHandler(lambda: state, lambda: state, "")
        self.order = EventOrder()
        self._early: list[bytes] | None = []
        """Broadcasts that came before the answer to the join; None after it."""
        self.sequence = 0
        self.waiting: list[bytes] = []
        """Batches that are not sent yet."""
        self.send_at: int | None = None
        self.woke_ns = -(1 << 62)
        """When its thread last woke up."""

    def received(self, frame: bytes) -> None:
        """Take a broadcast, and apply what is new.  Raises ProtocolError if one was lost."""
        if self._early is not None:
            self._early.append(frame)
            return
        _, messages = open_broadcast(frame)
        for message in messages[self.order.receive_events(messages) :]:
            known = decode_broadcast(message) if isinstance(message, Raw) else message
            if self.order.receive(known) is not Verdict.MEMBER:
                raise ProtocolError("a broadcast was lost, and nothing here loses any")
        self._apply()

    def joined(self, reply: Reply) -> None:
        if not isinstance(reply, Joined):
            raise ProtocolError(f"the coordinator refuses an engine: {reply}")
        self.order.begin(reply)
        self._apply()
        early, self._early = self._early or [], None
        for frame in early:
            self.received(frame)

    def _apply(self) -> None:
        for update in self.order.take_updates():
            self.handler.apply(update)
            if isinstance(update, EventBatches):
                size = sum(len(records) for _, records in update.batches)
                self._traffic.applied += size // RECORD_BYTES


class Node:
    """Coordinator and members.  ``timing``: how long events wait."""

    def __init__(self, clock: Clock, timing: Timing) -> None:
        self._clock, self._delay_ns = clock, round(timing.send_delay_seconds * 1e9)
        self._state = State(epoch=1, namespace="trace", uid=os.getuid(), timing=timing)
        self._broadcasts = BroadcastQueue(self._broadcast, timing)
        self._members: dict[int, Member] = {}
        self._at_once = timing.relay_delay_seconds == 0
        self.tables = Tables(clock)
        self.costs, self.traffic = Costs(), Traffic()

    def join(self, state: EpochState) -> Callable[[bytes], None]:
        """Take an engine into the roster; returns what sends its events."""
        member = self._members[state.info.epoch] = Member(state, self.traffic)
        self.tables.add(state.table)
        self._receive(member, encode(Join(protocol=PROTOCOL_VERSION, engine=state.info)))
        return lambda records: self._send(member, records)

    def forget_joins(self) -> None:
        """Begin to count what is sent and what it takes."""
        self.costs.of.clear()
        vars(self.traffic).update(vars(Traffic()))

    def next_due(self) -> int | None:
        sends = [member.send_at for member in self._members.values() if member.send_at is not None]
        relay = self._broadcasts.next_due()
        if relay != math.inf:  # not before it, however it is rounded; -inf: at once
            sends.append(self._clock.ns if relay == -math.inf else int(relay * 1e9) + 1000)
        return min(sends, default=None)

    def deliver(self) -> None:
        for member in self._members.values():
            if member.send_at is not None and member.send_at <= self._clock.ns:
                self._flush(member)
        self._relay()

    def _send(self, member: Member, records: bytes) -> None:
        member.waiting.append(records)
        rested = self._clock.ns - member.woke_ns >= self._delay_ns
        if member.send_at is None and rested:
            self._flush(member)
        elif member.send_at is None:
            member.send_at = self._clock.ns + self._delay_ns

    def _flush(self, member: Member) -> None:
        records, member.waiting, member.send_at = b"".join(member.waiting), [], None
        member.woke_ns = self._clock.ns
        for start in range(0, len(records), MAX_JOINED_BYTES):
            begun, part = time.thread_time_ns(), records[start : start + MAX_JOINED_BYTES]
            member.sequence += 1
            epoch = member.state.info.epoch
            frame = encode(Events(epoch=epoch, sequence=member.sequence, records=part))
            self.costs.add("send", begun)
            self.traffic.sent += 1
            self.traffic.sent_bytes += len(frame)
            self.traffic.records += len(part) // RECORD_BYTES
            self._receive(member, frame)
        if self._at_once:
            self._relay()

    # -- the coordinator

    def _receive(self, member: Member, frame: bytes) -> None:
        begun, info = time.thread_time_ns(), member.state.info
        sender = Sender(info.epoch.to_bytes(8, "little"), os.getuid(), info.pid)
        inputs: deque[Input] = deque([EngineMessage(sender, decode_command(frame))])
        replies: list[bytes] = []
        while inputs:
            for action in decide(self._state, inputs.popleft(), self._clock.seconds()):
                self._perform(action, inputs, replies)
        self.costs.add("coordinator", begun)
        for reply in replies:
            member.joined(decode_reply(reply))

    def _perform(self, action: Action, inputs: deque[Input], replies: list[bytes]) -> None:
        match action:
            case SendBroadcast(topic, message):
                self._broadcasts.add(topic, message, self._clock.seconds())
            case SendReply(_, message):
                replies.append(encode(message))
            case CheckTable(sender, join):
                inputs.append(CheckResult(sender, join, None))
            case _:
                pass  # nobody ends here, and nothing is logged

    def _relay(self) -> None:
        self._broadcasts.send_due(self._clock.seconds())

    def _broadcast(self, frame: bytes) -> None:
        self.traffic.frames += 1
        for member in self._members.values():
            begun = time.thread_time_ns()
            member.received(frame)
            self.costs.add("apply", begun)
            self.traffic.received_bytes += len(frame)
            member.woke_ns = self._clock.ns
            if member.send_at is not None:  # its thread is awake: what waits leaves with that
                member.send_at = self._clock.ns


def engine_epoch(number: int) -> Epoch:
    """The epoch of an engine of the replay."""
    return Epoch(1000 + number)
