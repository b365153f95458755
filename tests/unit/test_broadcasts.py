"""Broadcasts of one topic leave together, in order, and events a little later than all else."""

from __future__ import annotations

from kvshm._base.timing import TIMING
from kvshm._node.protocol import (
    MAX_EVENTS_BYTES,
    AnyBroadcast,
    EngineEvents,
    EngineGone,
    open_broadcast,
)
from kvshm.coordinator.broadcasts import BroadcastQueue

TOPIC, OTHER = b"f" * 32, b"g" * 32


class Sent:
    """What leaves, as (topic, sequences)."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, list[int]]] = []
        self.broadcasts = BroadcastQueue(self._send)

    def _send(self, frame: bytes) -> None:
        topic, messages = open_broadcast(frame)
        self.frames.append((topic, [message.sequence for message in messages]))  # type: ignore[union-attr]

    def since(self) -> list[tuple[bytes, list[int]]]:
        frames, self.frames = self.frames, []
        return frames


def events(sequence: int, size: int = 0) -> AnyBroadcast:
    return EngineEvents(
        coordinator_epoch=1, sequence=sequence, epoch=7, engine_sequence=1, records=bytes(size)
    )


def gone(sequence: int) -> AnyBroadcast:
    return EngineGone(coordinator_epoch=1, sequence=sequence, epoch=7, reason="left")


def test_after_a_pause_events_leave_at_once_and_then_what_comes_within_a_moment_together() -> None:
    sent = Sent()
    sent.broadcasts.add(TOPIC, events(1), now=100.0)
    sent.broadcasts.send_due(100.0)
    assert sent.since() == [(TOPIC, [1])]
    for number in range(2, 6):
        sent.broadcasts.add(TOPIC, events(number), 100.0 + number / 1000)
        sent.broadcasts.send_due(100.0 + number / 1000)
    assert sent.since() == []
    assert sent.broadcasts.next_due() == 100.0 + TIMING.relay_delay_seconds
    sent.broadcasts.send_due(100.0 + TIMING.relay_delay_seconds)
    assert sent.since() == [(TOPIC, [2, 3, 4, 5])]


def test_no_events_wait_because_of_a_tick() -> None:
    sent = Sent()
    sent.broadcasts.add(TOPIC, events(1), 100.0)
    sent.broadcasts.send_due(100.0)
    later = 100.0 + 2 * TIMING.relay_delay_seconds
    sent.broadcasts.add(TOPIC, gone(2), later)
    sent.broadcasts.add(TOPIC, events(3), later)
    sent.broadcasts.send_due(later)
    assert sent.since() == [(TOPIC, [1]), (TOPIC, [2]), (TOPIC, [3])]
    sent.broadcasts.add(TOPIC, events(4), later)
    sent.broadcasts.add(TOPIC, gone(5), later)
    sent.broadcasts.add(TOPIC, events(6), later)
    sent.broadcasts.send_due(later)
    assert sent.since() == [(TOPIC, [4, 5])], "but because of what left with it"


def test_events_for_which_an_engine_waits_leave_sooner_with_what_waits() -> None:
    sent = Sent()
    later, sooner = TIMING.relay_delay_seconds, TIMING.awaited_delay_seconds
    assert sooner < later
    for number in (1, 2):
        sent.broadcasts.add(TOPIC, events(number), 100.0)
        sent.broadcasts.send_due(100.0)
    sent.broadcasts.add(OTHER, events(1), 100.0 - later)
    assert sent.since() == [(TOPIC, [1])]
    sent.broadcasts.add(TOPIC, events(3), 100.0, awaited=True)
    sent.broadcasts.add(TOPIC, events(4), 100.0)
    assert sent.broadcasts.next_due() < 100.0, "of the topic of which nothing was sent"
    sent.broadcasts.send_due(100.0)
    assert sent.since() == [(OTHER, [1])]
    assert sent.broadcasts.next_due() == 100.0 + sooner
    sent.broadcasts.send_due(100.0 + sooner)
    assert sent.since() == [(TOPIC, [2, 3, 4])]
    sent.broadcasts.add(TOPIC, events(5), 100.0 + sooner)
    assert sent.broadcasts.next_due() == 100.0 + sooner + later, "for these none waits"


def test_what_is_no_events_waits_for_nothing_and_overtakes_nothing() -> None:
    sent = Sent()
    sent.broadcasts.add(TOPIC, gone(1), 100.0)
    sent.broadcasts.add(TOPIC, events(2), 100.0)
    sent.broadcasts.add(OTHER, gone(1), 100.0)
    sent.broadcasts.add(TOPIC, gone(3), 100.0)
    assert sent.since() == [(TOPIC, [1]), (OTHER, [1]), (TOPIC, [2, 3])]


def test_a_frame_is_no_longer_than_one_engine_may_send() -> None:
    sent = Sent()
    sent.broadcasts.add(TOPIC, gone(1), 100.0)
    for number in (2, 3, 4):
        sent.broadcasts.add(TOPIC, events(number, MAX_EVENTS_BYTES // 2), 100.0)
    sent.broadcasts.add(TOPIC, events(5, MAX_EVENTS_BYTES), 100.0)
    sent.broadcasts.send_due(101.0)
    assert sent.since() == [(TOPIC, numbers) for numbers in ([1], [2], [3], [4], [5])]


def test_a_topic_of_which_nothing_waits_is_forgotten() -> None:
    sent = Sent()
    for number in range(1000):
        sent.broadcasts.add(b"%032d" % number, gone(1), 100.0)
    sent.broadcasts.send_due(100.0 + TIMING.relay_delay_seconds)
    assert sent.broadcasts._topics == {}
    assert sent.broadcasts.next_due() == float("inf")
