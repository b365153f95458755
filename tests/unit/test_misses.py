"""Why an engine imports nothing: said by counters, by a line, and by both sides of a pair."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm import counters as c
from kvshm.epoch_state import EpochState
from kvshm.error_log import TEXT_BYTES
from kvshm.member import NAMED, NOTES, Membership
from kvshm.miss_report import PERIOD_SECONDS, REASONS, MissReport
from kvshm.own_slots import TableSpec
from kvshm.peer_list import PeerList
from kvshm.peers import Peers
from kvshm.protocol import Joined, Refused, Stranger
from kvshm.strangers import FIELDS_NAMED, divide, notes, sentence
from kvshm.terms import Epoch, Fingerprint

from .exporters import OWN_EPOCH, Clock
from .served import AnyTable

WEIGHTS = "0123456789abcdef" * 2
OTHER = Stranger("vllm-7", 7, {"dtype": ("bf16", "f16"), "weights": (WEIGHTS, WEIGHTS[::-1])})


@pytest.fixture
def table(namespace: str) -> Iterator[AnyTable]:
    spec = TableSpec(namespace, "me", 8, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(OWN_EPOCH))
    yield table
    table.close()


@pytest.fixture
def state(table: AnyTable, peers: Peers) -> EpochState:
    """Of which a Membership uses the table and the peers only."""
    return EpochState(table, peers, None, None)  # type: ignore[arg-type]  # the others are not touched


@pytest.fixture
def member(state: EpochState) -> Membership:
    return Membership(lambda: state, lambda: state)


def test_engines_with_lookups_and_no_hits_are_told_why(table: AnyTable, clock: Clock) -> None:
    report = MissReport(clock)
    count = table.counters.add
    clock.now += PERIOD_SECONDS + 1
    assert report.line(table) is None, "nothing was looked up"
    for number, reason in enumerate(REASONS, start=1):
        count(c.LOOKUPS, number)
        count(reason, number)
    clock.now += PERIOD_SECONDS - 1
    assert report.line(table) is None, "not yet"
    clock.now += 1
    assert report.line(table) == (
        "no hit in 36 lookups of the last 60 s: "
        "no peer 1, fingerprint 2, too short 3, no owner 4, lease lost 5, quarantined 6, "
        "computing is faster 7, no room 8"
    )
    clock.now += PERIOD_SECONDS
    assert report.line(table) is None, "nothing was looked up since"
    count(c.LOOKUPS, 2)
    count(c.MISS_NO_OWNER)
    count(c.IMPORTED_BLOCKS)
    clock.now += PERIOD_SECONDS
    assert report.line(table) is None, "there was a hit"
    count(c.LOOKUPS)
    clock.now += PERIOD_SECONDS
    line = report.line(table)
    assert line == "no hit in 1 lookups of the last 60 s: loads under way or failed"


def test_another_epochs_counters_begin_at_zero(
    table: AnyTable, namespace: str, clock: Clock
) -> None:
    report = MissReport(clock)
    table.counters.add(c.LOOKUPS, 5)
    table.counters.add(c.MISS_NO_PEER, 5)
    clock.now += PERIOD_SECONDS
    assert "no peer 5" in str(report.line(table))
    spec = TableSpec(namespace, "me", 8, 16, 1, Fingerprint(bytes(32)))
    another = AnyTable.create(spec, Epoch(OWN_EPOCH + 1))
    another.counters.add(c.LOOKUPS)
    another.counters.add(c.MISS_NO_PEER)
    clock.now += PERIOD_SECONDS
    assert "in 1 lookups of the last 60 s: no peer 1" in str(report.line(another))


def test_a_stranger_is_named_with_both_values() -> None:
    assert sentence(OTHER) == (
        "engine vllm-7 (pid 7) cannot share with this one: dtype differs (bf16 here, f16 there), "
        f"weights differs ({WEIGHTS} here, {WEIGHTS[::-1]} there)"
    )


def test_of_many_fields_all_are_named_and_the_line_stays_short() -> None:
    many = Stranger("x", 1, {f"field{i}": ("1" * 999, "1" * 500 + "2") for i in range(23)})
    line = sentence(many)
    for i in range(23):
        assert (f"field{i} differs (11" in line) == (i < FIELDS_NAMED)
        assert f"field{i}" in line
    assert len(line) < 2500
    endless = Stranger("x", 1, {f"field{i}": ("1", "2") for i in range(10_000)})
    assert len(sentence(endless)) < 2500
    assert sentence(endless).endswith("...")


@pytest.mark.parametrize("same", [0, 5, 90])
def test_a_note_fits_the_error_log_and_shows_where_values_differ(same: int) -> None:
    assert notes(OTHER, 1) == ["cannot share with vllm-7: dtype is bf16 here, f16 there"]
    ours, theirs = "s" * same + "1" * 60, "s" * same + "2" * 60
    (text,) = notes(Stranger("vllm-4194304", 4194304, {"batch_invariant": (ours, theirs)}), 1)
    assert len(text) <= TEXT_BYTES
    assert "1 here, " in text
    assert text.endswith("2 there")


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (1, ["a is 1 here, 2 there"]),
        (2, ["a is 1 here, 2 there", "also b c d"]),
        (3, ["a is 1 here, 2 there", "b is 1 here, 2 there", "also c d"]),
        (4, [f"{name} is 1 here, 2 there" for name in "abcd"]),
        (8, [f"{name} is 1 here, 2 there" for name in "abcd"]),
    ],
)
def test_the_more_room_the_more_fields_are_noted_with_their_values(
    room: int, said: list[str]
) -> None:
    differing = Stranger("vllm-7", 7, dict.fromkeys("abcd", ("1", "2")))
    assert notes(differing, room) == [f"cannot share with vllm-7: {text}" for text in said]
    endless = Stranger("vllm-7", 7, {f"field{i}": ("1", "2") for i in range(10_000)})
    assert len(notes(endless, room)) == room
    assert max(map(len, notes(endless, room))) <= TEXT_BYTES


@pytest.mark.parametrize(
    ("kinds", "entries"),
    [("", []), ("a", [8]), ("aa", [7, 1]), ("aab", [3, 1, 3]), ("ab", [4, 4]),
     ("abcdefgh", [1] * 8), ("a" * 9, [1] * 8), ("abcab", [2, 2, 2, 1, 1])],
)  # fmt: skip
def test_engines_of_one_fingerprint_need_their_fields_noted_once(
    kinds: str, entries: list[int]
) -> None:
    strangers = [Stranger(f"e{i}", i, {"dtype": (k, "")}) for i, k in enumerate(kinds)]
    assert divide(strangers, 8) == list(zip(strangers, entries, strict=False))


def test_both_sides_say_it_once_and_note_it(
    table: AnyTable, peers: Peers, member: Membership, caplog: pytest.LogCaptureFixture
) -> None:
    reply = Joined(
        protocol=1, coordinator_epoch=1, engine_epoch=OWN_EPOCH, lease_bit=0, sequence=0,
        roster=[], sequences={}, suspected=[], strangers=[OTHER],
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "vllm.kvshm"):
        member.joined(reply)
        member.joined(reply)
        late = Stranger("vllm-8", 8, {"block_size": ("16", "32")})
        member.stranger_joined(late)
    assert caplog.messages == [sentence(OTHER), sentence(late)]
    both = dict.fromkeys(notes(OTHER, 2), 2)
    assert len(both) == 2
    assert {e.text: e.times for e in table.errors()} == both | dict.fromkeys(notes(late, 1), 1)
    assert peers.strangers == 1
    member.strangers_counted(2)
    assert peers.strangers == 2


def test_of_very_many_strangers_the_latest_are_remembered_as_named(
    member: Membership, caplog: pytest.LogCaptureFixture
) -> None:
    strangers = [Stranger(f"e{i}", i, {"dtype": ("a", "b")}) for i in range(NAMED + 10)]
    with caplog.at_level(logging.WARNING, "vllm.kvshm"):
        for stranger in (*strangers, *strangers[-NAMED:]):
            member.stranger_joined(stranger)
    assert caplog.messages == [sentence(stranger) for stranger in strangers]
    assert len(member._named) == NAMED


@pytest.mark.parametrize("count", [0, 1, 3, 9, 40, -5])
def test_strangers_leave_room_in_the_error_log(
    table: AnyTable, peers: Peers, member: Membership, count: int
) -> None:
    """However many there are and in however many fields they differ."""
    differing = dict.fromkeys("abcdefghij", ("1", "2"))
    peers.strangers = count  # whatever a coordinator says
    member.stranger_joined(Stranger("late", 1, differing))
    table.log_error("something else")
    strangers = [Stranger(f"e{i}", i, differing) for i in range(count)]
    reply = Joined(
        protocol=1, coordinator_epoch=1, engine_epoch=OWN_EPOCH, lease_bit=0, sequence=0,
        roster=[], sequences={}, suspected=[], strangers=strangers,
    )  # fmt: skip
    member.joined(reply)
    texts = [error.text for error in table.errors()]
    assert "something else" in texts
    named = {stranger.name for stranger in strangers[:NOTES]}
    assert {n for n in named if any(f"with {n}: a is 1 here" in text for text in texts)} == named


def test_what_the_replica_had_no_room_for_is_counted(
    table: AnyTable, peers: Peers, member: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refused in (2, 2, 5):
        monkeypatch.setattr(peers.replica, "_refused", refused)
        member.beat()
        assert table.counters.snapshot()["index_full"] == refused


def test_a_list_of_peers_that_could_not_be_written_is_written_with_a_beat(
    peers: Peers, member: Membership, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "not yet" / "peers"
    listed = PeerList(path)
    listed.write([])
    monkeypatch.setattr(peers, "_listed", listed)
    member.beat()
    path.parent.mkdir()
    assert not path.exists()
    member.beat()
    assert path.exists()


def test_a_refusal_is_told_of_the_present_epoch_only(
    state: EpochState, member: Membership, caplog: pytest.LogCaptureFixture
) -> None:
    """The table of one that has ended has gone: there is nothing to mend."""
    for epoch in (OWN_EPOCH + 1, OWN_EPOCH):
        assert caplog.text == ""
        member.refused(Refused(engine_epoch=epoch, reason="r", remedy="do", retry=False))
    assert "refuses this engine: r; do" in caplog.text


def test_the_client_counts_into_the_present_table(table: AnyTable, state: EpochState) -> None:
    present = [state]
    member = Membership(lambda: None, lambda: present[0] if present else None)
    member.count(c.EVENTS_SENT)
    member.count(c.EVENTS_DROPPED, 3)
    present.clear()
    member.count(c.EVENTS_SENT)
    told = table.counters.snapshot()
    assert (told["events_sent"], told["events_dropped"]) == (1, 3)
