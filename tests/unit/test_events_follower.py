"""An engine's KV events are followed without a gap, or what it has is not believed any more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshm.tools.events.follower import (
    GONE_SECONDS,
    QUIET_SECONDS,
    REPLAY_SECONDS,
    Action,
    Apply,
    Ask,
    Follower,
    Forget,
    Trouble,
)


def text(number: int, engine: str = "a") -> bytes:
    return f"{engine}{number}".encode()


class Followed:
    """A follower, its clock, and what it has applied since it last forgot."""

    def __init__(self, can_replay: bool = True) -> None:
        self.follower = Follower(can_replay)
        self.now = 100.0
        self.known: list[bytes] = []
        self.asked: int | None = None
        self.said: list[Trouble] = []

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Apply):
                self.known.append(action.payload)
            elif isinstance(action, Ask):
                self.asked = action.start
            elif isinstance(action, Forget):
                self.said.append(action.why)
                self.known = []
            else:
                self.said.append(action.what)

    def connect(self) -> None:
        self.do(self.follower.has_connected(self.now))

    def disconnect(self) -> None:
        self.follower.has_disconnected(self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.follower.tick(self.now))

    def live(self, *numbers: int, engine: str = "a") -> None:
        for number in numbers:
            assert self.follower.takes_live
            self.do(self.follower.live(number, text(number, engine), self.now))

    def replay(self, have: Sequence[int], engine: str = "a", most: int = 1000) -> None:
        """The engine answers what it is asked, and again if need be, with what it still has."""
        while (start := self.asked) is not None:
            self.asked = None
            for number in [n for n in have if n >= start][:most]:
                self.do(self.follower.replayed(number, text(number, engine), self.now))
                if self.asked is not None:
                    break
            else:
                self.do(self.follower.replay_ended(self.now))

    def begun(self, count: int = 3) -> Followed:
        """Connected to an engine that has said this much."""
        self.connect()
        self.replay(range(count))
        assert self.known == [text(i) for i in range(count)]
        return self


def texts(*numbers: int, engine: str = "a") -> list[bytes]:
    return [text(number, engine) for number in numbers]


def test_what_was_said_before_the_connection_is_asked_for() -> None:
    followed = Followed().begun(3)
    followed.live(2, 3)  # a replay has brought the first of them
    assert followed.known == texts(0, 1, 2, 3)
    assert followed.said == []


def test_a_gap_is_closed_by_a_replay() -> None:
    followed = Followed().begun(2)
    followed.live(5)
    assert followed.known == texts(0, 1)
    assert not followed.follower.takes_live
    followed.replay(range(6))
    followed.live(6)
    assert followed.known == texts(*range(7))
    assert followed.said == []


def test_a_gap_that_cannot_be_closed_makes_all_forgotten(subtests: pytest.Subtests) -> None:
    for name, has in (("too old", [4, 5]), ("silent", None)):
        with subtests.test(name):
            followed = Followed().begun(2)
            followed.live(5)
            if has is None:
                followed.wait(REPLAY_SECONDS)
            else:
                followed.replay(has)
            assert followed.known == texts(*(has or [5]))
            assert set(followed.said) & {Trouble.GAP, Trouble.ANOTHER}
            followed.live(6)
            assert followed.known[-1] == text(6)


def test_without_a_replay_socket_a_gap_makes_all_forgotten() -> None:
    followed = Followed(can_replay=False)
    followed.connect()
    followed.live(4, 5)
    assert followed.said == [Trouble.LATE]
    followed.live(7)
    assert followed.known == texts(7)
    assert followed.said == [Trouble.LATE, Trouble.GAP]


def test_an_engine_that_ends_is_forgotten_after_a_while() -> None:
    followed = Followed().begun(2)
    followed.disconnect()
    followed.wait(GONE_SECONDS / 2)
    assert followed.known == texts(0, 1)
    followed.wait(GONE_SECONDS / 2)
    assert followed.known == []
    assert followed.said == [Trouble.GONE]
    followed.wait(GONE_SECONDS)
    assert followed.said == [Trouble.GONE]


def test_an_engine_that_ends_before_it_has_said_anything_has_gone_too() -> None:
    for can_replay in (False, True):
        followed = Followed(can_replay)
        followed.connect()
        followed.disconnect()
        followed.wait(GONE_SECONDS)
        assert followed.said == [Trouble.GONE]


def test_an_engine_that_comes_back_is_the_same_only_if_it_says_the_same(
    subtests: pytest.Subtests,
) -> None:
    for name, has, engine, same in (
        ("nothing new", range(3), "a", True),
        ("some new", range(5), "a", True),
        ("another that has said nothing", (), "b", False),
        ("another that has said less", range(2), "b", False),
        ("another that has said as much", range(3), "b", False),
        ("another that has said more", range(9), "b", False),
    ):
        with subtests.test(name):
            followed = Followed().begun(3)
            followed.disconnect()
            followed.wait(GONE_SECONDS / 2)
            followed.connect()
            followed.replay(has, engine)
            assert followed.known == texts(*has, engine=engine)
            assert followed.said == ([] if same else [Trouble.ANOTHER])


def test_an_engine_that_comes_back_and_does_not_say_whether_it_is_the_same_is_forgotten() -> None:
    followed = Followed().begun(2)
    followed.disconnect()
    followed.connect()
    followed.wait(REPLAY_SECONDS)
    assert followed.known == []
    assert followed.said == [Trouble.NO_REPLAY, Trouble.GAP]


def test_without_a_replay_socket_an_engine_that_comes_back_is_another() -> None:
    followed = Followed(can_replay=False)
    followed.connect()
    followed.live(0, 1)
    followed.disconnect()
    followed.connect()
    assert followed.known == []
    followed.live(0)
    assert followed.known == texts(0)


def test_numbers_that_go_back_on_one_connection_are_of_another_engine() -> None:
    followed = Followed().begun(2)
    followed.live(2, 3)
    followed.live(0, engine="b")
    followed.replay([0], engine="b")
    assert followed.known == texts(0, engine="b")
    followed.live(1, engine="b")
    assert followed.known == texts(0, 1, engine="b")


def test_what_zeromq_dropped_last_is_asked_for_after_a_silence() -> None:
    followed = Followed().begun(2)
    followed.wait(QUIET_SECONDS)
    assert followed.asked == 1
    followed.replay(range(4))
    assert followed.known == texts(0, 1, 2, 3)


def test_a_silence_that_no_replay_breaks_changes_nothing_that_is_known() -> None:
    followed = Followed().begun(2)
    followed.wait(QUIET_SECONDS)
    followed.wait(REPLAY_SECONDS)
    assert followed.known == texts(0, 1)
    assert followed.said == [Trouble.NO_REPLAY]
    followed.live(2)
    assert followed.known == texts(0, 1, 2)


def test_a_replay_of_which_zeromq_drops_the_end_is_asked_for_in_parts() -> None:
    followed = Followed()
    followed.connect()
    for part in (range(4), range(3, 8)):
        start, followed.asked = followed.asked, None
        assert start == part[0]
        for number in (*part, 20):
            followed.do(followed.follower.replayed(number, text(number), followed.now))
        followed.do(followed.follower.replay_ended(followed.now))
    followed.replay(range(21))
    assert followed.known == texts(*range(21))
    assert followed.said == []


def test_a_replay_of_which_not_even_the_end_comes_is_asked_for_in_parts() -> None:
    followed = Followed().begun(1)
    followed.live(9)
    for number in range(4):
        followed.do(followed.follower.replayed(number, text(number), followed.now))
    followed.asked = None
    followed.wait(REPLAY_SECONDS)
    assert followed.asked == 3
    followed.replay(range(10))
    assert followed.known == texts(*range(10))
    assert followed.said == []


def test_an_engine_that_has_forgotten_its_first_batches_is_known_in_part() -> None:
    followed = Followed()
    followed.connect()
    followed.replay(range(5, 8))
    assert followed.known == texts(5, 6, 7)
    assert followed.said == [Trouble.LATE]


EVENTS = st.lists(
    st.sampled_from(("say", "lose", "restart", "reconnect", "die", "quiet", "answer")), max_size=60
)


@given(EVENTS, st.integers(1, 5), st.booleans())
def test_what_is_known_is_always_a_part_of_what_one_engine_has_said_without_holes(
    events: list[str], buffered: int, can_replay: bool
) -> None:
    """So nothing is believed that the engine has taken back."""
    followed, life, said = Followed(can_replay), 0, 0
    followed.connect()
    for event in events:
        if event == "say" and followed.follower.connected and followed.follower.takes_live:
            followed.live(said, engine=f"{life}.")
        said += event in ("say", "lose")
        if event in ("restart", "reconnect", "die"):
            followed.disconnect()
            followed.asked = None
            life, said = (life, said) if event == "reconnect" else (life + 1, 0)
            if event != "die":
                followed.connect()
        elif event == "answer":
            followed.replay(range(max(0, said - buffered), said), engine=f"{life}.")
        elif event == "quiet":
            followed.wait(QUIET_SECONDS)
        numbers = [int(known.split(b".")[1]) for known in followed.known]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True
        assert len({known.split(b".")[0] for known in followed.known}) <= 1
        settled = followed.follower.connected and followed.follower.takes_live
        if followed.known and settled:
            assert followed.known[0].startswith(f"{life}.".encode())
