"""Why an engine imports nothing: said by counters, by a line, and by both sides of a pair."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshm._base.fingerprint import FIELDS, differences
from kvshm._base.ids import Epoch, Fingerprint
from kvshm._base.log import LINE_LIMIT
from kvshm._engine.epoch_state import EpochState
from kvshm._engine.roster_handler import MAX_RECORDED, MAX_REMEMBERED, RosterHandler
from kvshm._node import incompatible
from kvshm._node.peer_list import PeerList
from kvshm._node.peers import Peers
from kvshm._node.protocol import (
    OTHER_VERSION,
    IncompatibleEngine,
    IncompatibleJoined,
    Joined,
    Refused,
    Tick,
)
from kvshm._shm import statistics as c
from kvshm._shm.error_log import TEXT_BYTES, ErrorCode, LoggedError
from kvshm._shm.own_slot_table import TableSpec

from .exporters import OWN_EPOCH
from .served import AnyTable

WEIGHTS = "0123456789abcdef" * 2
OTHER = IncompatibleEngine(
    "vllm-7", 7, {"dtype": ("bf16", "f16"), "weights": (WEIGHTS, WEIGHTS[::-1])}
)


def new(other: IncompatibleEngine) -> IncompatibleJoined:
    return IncompatibleJoined(coordinator_epoch=1, sequence=1, engine=other)


@pytest.fixture
def table(namespace: str) -> Iterator[AnyTable]:
    spec = TableSpec(namespace, "me", 8, 16, 1, Fingerprint(bytes(32)))
    table = AnyTable.create(spec, Epoch(OWN_EPOCH))
    yield table
    table.close()


@pytest.fixture
def state(table: AnyTable, peers: Peers) -> EpochState:
    return EpochState(table, peers, None, None)  # type: ignore[arg-type]  # the others are not touched


@pytest.fixture
def handler(state: EpochState) -> RosterHandler:
    return RosterHandler(lambda: state, lambda: state)


def recorded(other: IncompatibleEngine) -> str:
    return ErrorCode.CANNOT_SHARE.text(*incompatible.record(other))


def logged(other: IncompatibleEngine) -> LoggedError:
    code, about = ErrorCode.CANNOT_SHARE, incompatible.record(other)
    return LoggedError(1, 1, 1, code.text(*about), code, about)


def test_an_incompatible_engine_is_named_with_what_differs() -> None:
    assert str(incompatible.log_line(OTHER)) == (
        "engine vllm-7 (pid 7) cannot share with this one: "
        "dtype is bf16 here, f16 there; also weights (give both the same --dtype)"
    )
    assert recorded(OTHER) == (
        "cannot share with vllm-7: dtype is bf16 here, f16 there; also weights"
    )


NAMES = ("a", "a: model is b", 'a"', "a\\", '"a": model is', "a:", "model is", "\n", "模 型")


def test_a_name_is_no_part_of_what_is_read_from_an_entry(subtests: pytest.Subtests) -> None:
    """Engines choose their names."""
    for name in NAMES:
        with subtests.test(name=name):
            entry = logged(IncompatibleEngine(name, 7, {"dtype": ("1", "2")}))
            assert incompatible.differing_field(entry, name) == "dtype"
            for other in set(NAMES) - {name}:
                assert incompatible.differing_field(entry, other) is None
            assert incompatible.differing_field(entry._replace(code=ErrorCode.OTHER), name) is None
            torn = entry._replace(about=entry.about[:1])
            assert incompatible.differing_field(torn, name) == ""
            assert entry.text.isprintable()


def test_of_many_fields_all_are_named_and_the_line_stays_short() -> None:
    many = dict.fromkeys(FIELDS, ("1" * 999, "1" * 500 + "2"))
    line = str(incompatible.log_line(IncompatibleEngine("x", 1, many)))
    assert all(name in line for name in FIELDS)
    assert len(line) < 700
    endless = IncompatibleEngine("x", 1, {f"field{i}": ("1", "2") for i in range(10_000)})
    assert len(str(incompatible.log_line(endless))) < 700
    assert str(incompatible.log_line(endless)).endswith("...")


def test_a_note_fits_the_error_log_and_shows_where_values_differ(subtests: pytest.Subtests) -> None:
    for name in ["vllm-4194304", "n" * 64]:
        for others in [0, 40]:
            for same in [0, 5, 90]:
                with subtests.test(name=name, others=others, same=same):
                    ours, theirs = "s" * same + "1" * 60, "s" * same + "2" * 60
                    differing = {"batch_invariant": (ours, theirs)}
                    differing |= {f"field{i}": ("1", "2") for i in range(others)}
                    text = recorded(IncompatibleEngine(name, 4194304, differing))
                    assert len(text) <= TEXT_BYTES
                    if len(name) < 20:
                        assert "1 here, " in text
                        assert "2 there" in text


def test_versions_are_shown_whole_or_from_their_beginning() -> None:
    differing = {"engine": ("vllm 0.33.0+cpu", "vllm 0.32.0"), "execution": ("1", "2")}
    differing["layers"] = ("1", "2")
    said = recorded(IncompatibleEngine("vllm-20710", 20710, differing))
    assert ": engine is vllm 0.33.0+cpu here, vllm 0.32.0 there; also execution layers" in said
    differing["engine"] = ("vllm 0.33.0+cpu.local", "vllm 0.32.0+cpu")
    said = recorded(IncompatibleEngine("vllm-20710", 20710, differing))
    assert ": engine is vllm 0.33.0+" in said, said


def test_adapters_are_named_before_the_weights_that_differ_by_them() -> None:
    fields = [dict.fromkeys(FIELDS, "same") for _ in range(2)]
    for number, of_one in enumerate(fields):
        of_one |= {"weights": f"{number}" * 64, "lora": "off,rank=16"[4 * number :]}
    other = IncompatibleEngine("vllm-25181", 7, differences(*fields))
    said = recorded(other)
    assert said.endswith("; also weights"), said
    assert said.startswith("cannot share with vllm-25181: lora is ")


def test_the_names_of_other_fields_have_room_beside_long_values() -> None:
    differing = {"weights": ("1" * 64, "2" * 64), "execution": ("1", "2"), "layout": ("1", "2")}
    said = recorded(IncompatibleEngine("vllm-25181", 7, differing))
    assert said.endswith(f"{'2' * 12} there; also execution layout"), said


def test_another_model_is_distinguished_from_one_that_is_set_up_otherwise(
    subtests: pytest.Subtests,
) -> None:
    for fields, another in [
        ("model model_config weights dtype", True),
        ("weights", True),
        ("engine weights", True),
        ("model_config weights parallel", True),
        ("dtype weights", False),
        ("parallel weights", False),
        ("quantization weights", False),
        ("weights kv_dtype", False),
        ("lora weights", False),
        ("dtype parallel", False),
        ("model_config", False),
        ("none_hash block_size", False),
        ("engine", False),
    ]:
        with subtests.test(fields=fields, another=another):
            differing = dict.fromkeys(fields.split(), ("1", "2"))
            assert incompatible.has_another_model(IncompatibleEngine("x", 1, differing)) == another


def test_the_first_join_of_an_epoch_is_no_rejoin(table: AnyTable, handler: RosterHandler) -> None:
    reply = Joined(
        protocol=1, coordinator_epoch=1, engine_epoch=OWN_EPOCH, lease_bit=0, sequence=0,
        roster=[], sequences={}, suspected=[], incompatible=[],
    )  # fmt: skip
    for joins in range(3):
        handler.apply(reply)
        assert table.counters.read(c.REJOINS) == joins


def test_joining_again_with_the_same_coordinator_is_no_event(
    handler: RosterHandler, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine whose events were lost while it joined does so, to have others scan."""
    with caplog.at_level(logging.INFO, "vllm.kvshm"):
        for coordinator in (1, 1, 2):
            handler.apply(
                Joined(
                    protocol=1, coordinator_epoch=coordinator, engine_epoch=OWN_EPOCH, lease_bit=0,
                    sequence=0, roster=[], sequences={}, suspected=[], incompatible=[],
                )
            )  # fmt: skip
    assert [message[:17] for message in caplog.messages] == ["kvshm: joined as "] * 2


def test_both_sides_say_it_once_and_note_it(
    table: AnyTable, peers: Peers, handler: RosterHandler, caplog: pytest.LogCaptureFixture
) -> None:
    reply = Joined(
        protocol=1, coordinator_epoch=1, engine_epoch=OWN_EPOCH, lease_bit=0, sequence=0,
        roster=[], sequences={}, suspected=[], incompatible=[OTHER],
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "vllm.kvshm"):
        handler.apply(reply)
        handler.apply(reply)
        late = IncompatibleEngine("vllm-8", 8, {"block_size": ("16", "32")})
        handler.apply(new(late))
    assert caplog.messages == [f"kvshm: {incompatible.log_line(one)}" for one in (OTHER, late)]
    noted = {recorded(OTHER): 2, recorded(late): 1}
    assert {e.text: e.times for e in table.errors()} == noted
    assert peers.num_incompatible == 1
    handler.apply(Tick(coordinator_epoch=1, sequence=1, sequences={}, num_incompatible=2))
    assert peers.num_incompatible == 2


def test_engines_of_another_model_are_no_warning_and_logged_once_for_all(
    handler: RosterHandler, caplog: pytest.LogCaptureFixture
) -> None:
    """Two models on one node are nothing to mend."""
    models = [{"weights": (WEIGHTS, weights)} for weights in ("other", "third")]
    others = [IncompatibleEngine(f"e{i}", i, models[i % 2]) for i in range(20)]
    with caplog.at_level(logging.INFO, "vllm.kvshm"):
        for other in others:
            handler.apply(new(other))
    assert caplog.messages == [f"kvshm: {incompatible.log_line(one)}" for one in others[:2]]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_of_very_many_incompatible_engines_the_latest_are_remembered_as_named(
    handler: RosterHandler, caplog: pytest.LogCaptureFixture
) -> None:
    others = [
        IncompatibleEngine(f"e{i}", i, {"dtype": ("a", "b")}) for i in range(MAX_REMEMBERED + 10)
    ]
    with caplog.at_level(logging.WARNING, "vllm.kvshm"):
        for other in (*others, *others[-MAX_REMEMBERED:]):
            LINE_LIMIT.reset()  # they come over hours
            handler.apply(new(other))
    assert caplog.messages == [f"kvshm: {incompatible.log_line(one)}" for one in others]


@pytest.mark.parametrize("count", [0, 1, 3, 9, 40, -5])
def test_incompatible_engines_leave_room_in_the_error_log(
    table: AnyTable, peers: Peers, handler: RosterHandler, count: int
) -> None:
    """However many there are and in however many fields they differ."""
    differing = dict.fromkeys("abcdefghij", ("1", "2"))
    peers.num_incompatible = count  # whatever a coordinator says
    handler.apply(new(IncompatibleEngine("late", 1, differing)))
    table.log_error("something else")
    others = [IncompatibleEngine(f"e{i}", i, differing) for i in range(count)]
    reply = Joined(
        protocol=1, coordinator_epoch=1, engine_epoch=OWN_EPOCH, lease_bit=0, sequence=0,
        roster=[], sequences={}, suspected=[], incompatible=others,
    )  # fmt: skip
    handler.apply(reply)
    texts = [error.text for error in table.errors()]
    assert "something else" in texts
    named = {other.name for other in others[:MAX_RECORDED]}
    assert {n for n in named if any(f"with {n}: a is 1 here" in text for text in texts)} == named


def test_what_the_replica_had_no_room_for_is_counted(
    table: AnyTable, peers: Peers, handler: RosterHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refused in (2, 2, 5):
        monkeypatch.setattr(peers.replica, "refused", refused)
        handler.beat()
        assert table.counters.snapshot()["index_full"] == refused


def test_a_list_of_peers_that_could_not_be_written_is_written_with_a_beat(
    peers: Peers, handler: RosterHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "not yet" / "peers"
    listed = PeerList(path)
    listed.write([])
    monkeypatch.setattr(peers, "_peer_list", listed)
    handler.beat()
    path.parent.mkdir()
    assert not path.exists()
    handler.beat()
    assert path.exists()


def test_a_refusal_is_reported_the_present_epoch_only(
    state: EpochState, handler: RosterHandler, caplog: pytest.LogCaptureFixture
) -> None:
    """The table of one that has ended has gone: there is nothing to mend."""
    for epoch in (OWN_EPOCH + 1, OWN_EPOCH):
        assert caplog.text == ""
        handler.apply(Refused(engine_epoch=epoch, reason="r", remedy="do", retry=False))
    assert "refuses this engine: r; do" in caplog.text
    assert [error.text for error in state.table.errors()] == ["refused: do; r"], "for tools"


@pytest.mark.parametrize(
    ("sent", "recorded"),
    [
        (OTHER_VERSION, ErrorCode.OTHER_VERSION),
        ("", ErrorCode.REFUSED),
        ("of-a-later-version", ErrorCode.REFUSED),
    ],
)
def test_a_refusal_for_another_version_has_a_code_of_its_own(
    state: EpochState, handler: RosterHandler, sent: str, recorded: ErrorCode
) -> None:
    handler.apply(Refused(engine_epoch=OWN_EPOCH, reason="r", remedy="do", retry=False, code=sent))
    (error,) = state.table.errors()
    assert (error.code, error.text) == (recorded, "refused: do; r")


def test_one_that_joins_without_a_lease_bit_leaves_word_for_tools(
    state: EpochState, handler: RosterHandler
) -> None:
    for bit in (-1, 5):
        handler.apply(
            Joined(
                protocol=1, coordinator_epoch=1, engine_epoch=OWN_EPOCH, lease_bit=bit, sequence=0,
                roster=[], sequences={}, suspected=[], incompatible=[],
            )
        )  # fmt: skip
        assert state.table.lease_bit == bit
    assert [(error.code, error.times) for error in state.table.errors()] == [
        (ErrorCode.NO_LEASE_BIT, 1)
    ]


def test_a_refusal_is_logged_once_until_it_is_another_or_the_engine_has_joined(
    handler: RosterHandler, caplog: pytest.LogCaptureFixture
) -> None:
    joined = Joined(
        protocol=1, coordinator_epoch=1, engine_epoch=OWN_EPOCH, lease_bit=0, sequence=0,
        roster=[], sequences={}, suspected=[], incompatible=[],
    )  # fmt: skip
    r, s = (
        Refused(engine_epoch=OWN_EPOCH, reason=reason, remedy="do", retry=True) for reason in "rs"
    )
    with caplog.at_level(logging.WARNING, "vllm.kvshm"):
        for reply in (r, r, s, s, r, joined, r):
            handler.apply(reply)
    assert [m.partition("engine: ")[2][0] for m in caplog.messages] == ["r", "s", "r", "r"]


def test_the_client_counts_into_the_present_table(table: AnyTable, state: EpochState) -> None:
    present = [state]
    handler = RosterHandler(lambda: None, lambda: present[0] if present else None)
    handler.count(c.EVENTS_SENT)
    handler.count(c.EVENTS_DROPPED, 3)
    present.clear()
    handler.count(c.EVENTS_SENT)
    reported = table.counters.snapshot()
    assert (reported["events_sent"], reported["events_dropped"]) == (1, 3)
