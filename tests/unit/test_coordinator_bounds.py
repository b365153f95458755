"""What the coordinator remembers is bounded, however many engines come and go."""

from __future__ import annotations

from kvshm.coordinator.actions import Clock, Send
from kvshm.coordinator.roster import MAX_ENDED
from kvshm.coordinator.state import LEFTOVERS_SECONDS, decide
from kvshm.protocol import PROTOCOL_VERSION, Join, Leave, Refused

from .coordinators import engine, join, new_state, only, say


def test_only_the_last_ended_epochs_are_remembered_and_refused() -> None:
    state = new_state()
    for epoch in range(1, MAX_ENDED + 11):
        join(state, engine(epoch))
        say(state, engine(epoch), Leave(epoch=epoch))
    assert len(state.ended) == MAX_ENDED
    last = engine(MAX_ENDED + 10)
    message = Join(protocol=PROTOCOL_VERSION, engine=last, sequence=0)
    [send] = only(say(state, last, message), Send)
    assert isinstance(send.message, Refused)


def test_topics_without_engines_are_forgotten_after_a_while() -> None:
    state = new_state()
    staying, going = engine(1, fingerprint=b"s" * 32), engine(2, fingerprint=b"g" * 32)
    join(state, staying)
    join(state, going)
    numbers = dict(state.topics)
    say(state, going, Leave(epoch=2))
    decide(state, Clock(), LEFTOVERS_SECONDS)
    assert state.topics.keys() == numbers.keys(), "looked at once: it may have an engine again"
    decide(state, Clock(), 2 * LEFTOVERS_SECONDS)
    assert state.topics.keys() == {staying.fingerprint}
    decide(state, Clock(), 3 * LEFTOVERS_SECONDS)
    assert state.idle_topics == set()
    assert join(state, engine(3, fingerprint=going.fingerprint))[0].sequence == 1


def test_a_topic_that_has_an_engine_again_keeps_its_numbers() -> None:
    state = new_state()
    join(state, engine(1))
    say(state, engine(1), Leave(epoch=1))
    decide(state, Clock(), LEFTOVERS_SECONDS)
    again, _ = join(state, engine(2))
    decide(state, Clock(), 2 * LEFTOVERS_SECONDS)
    decide(state, Clock(), 3 * LEFTOVERS_SECONDS)
    assert state.topics == {engine(2).fingerprint: again.sequence}
