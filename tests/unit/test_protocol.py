"""What travels between engines and coordinator, read by a decoder that is not ours."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # the independent decoder
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshm._node import protocol
from kvshm._node.protocol import (
    MAX_COMMAND_BYTES,
    MAX_EVENTS_BYTES,
    MAX_JOIN_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    EngineEvents,
    EngineGone,
    EngineInfo,
    EngineJoined,
    EngineRecovered,
    EngineSuspected,
    Events,
    ForeignEngine,
    ForeignJoin,
    Heartbeat,
    IncompatibleEngine,
    IncompatibleJoined,
    Join,
    Joined,
    JoinFirst,
    Leave,
    Message,
    RankInfo,
    Refused,
    Tick,
    check_version,
    decode_broadcast,
    decode_command,
    decode_reply,
    encode,
    foreign_join,
)
from kvshm.errors import ProtocolError, VersionMismatch
from kvshm.interfaces import MAX_DETAILS_BYTES, MAX_REGIONS, MemoryDescriptor, Region

BIG = 2**64 - 1
MEMORY = MemoryDescriptor("posix_shm", BIG, 1, [Region(0, 64, 32, 9)], b"\x81")
ENGINE = EngineInfo(
    epoch=BIG,
    name="a",
    pid=4242,
    fingerprint=b"\xff" * 32,
    fields={"model": "m", "weights": "ähnlich"},
    num_blocks=9,
    ranks=[RankInfo(4243, MEMORY)],
)
COMMANDS: list[Any] = [
    Join(protocol=PROTOCOL_VERSION, engine=ENGINE, sequence=3),
    Leave(epoch=BIG),
    Events(epoch=BIG, sequence=4, records=b"\x00" * 48),
    Heartbeat(epoch=BIG, sequence=4),
]
REPLIES: list[Any] = [
    Joined(
        protocol=PROTOCOL_VERSION,
        coordinator_epoch=1,
        engine_epoch=BIG,
        lease_bit=-1,
        sequence=8,
        roster=[ENGINE],
        sequences={BIG: 4},
        suspected=[BIG],
        incompatible=[IncompatibleEngine("b", 7, {"weights": ("1", "2")})],
    ),
    Refused(engine_epoch=BIG, reason="r", remedy="m", retry=False),
    JoinFirst(coordinator_epoch=1, engine_epoch=BIG),
]
NUMBERED: dict[str, Any] = {"coordinator_epoch": 1, "sequence": 9}
BROADCASTS: list[Any] = [
    EngineJoined(**NUMBERED, engine=ENGINE, engine_sequence=4),
    EngineSuspected(**NUMBERED, epoch=BIG),
    EngineRecovered(**NUMBERED, epoch=BIG),
    EngineGone(**NUMBERED, epoch=BIG, reason="left"),
    EngineEvents(**NUMBERED, epoch=BIG, engine_sequence=5, records=b"\x01" * 48),
    IncompatibleJoined(**NUMBERED, engine=IncompatibleEngine("b", 7, {"weights": ("1", "2")})),
    Tick(**NUMBERED, sequences={BIG: 5}, num_incompatible=1),
]
ALL = [
    *((decode_command, message) for message in COMMANDS),
    *((decode_reply, message) for message in REPLIES),
    *((decode_broadcast, message) for message in BROADCASTS),
]


def test_round_trip(subtests: pytest.Subtests) -> None:
    for decode, message in ALL:
        with subtests.test(decode=decode, message=message):
            assert decode(encode(message)) == message


def test_an_independent_decoder_reads_the_same(subtests: pytest.Subtests) -> None:
    """The msgpack package sees a map of the message's fields and its type."""
    for decode, message in ALL:
        with subtests.test(decode=decode, message=message):
            found = msgpack.unpackb(encode(message), strict_map_key=False)
            expected = msgspec.to_builtins(message, builtin_types=(bytes,))
            assert found == untupled(expected)
            assert found["type"] == message.__struct_config__.tag


@pytest.mark.parametrize(
    ("decode", "frame"),
    [
        (
            decode_reply,
            b"\x8a\xa4type\xa6joined\xa8protocol\x02\xb1coordinator_epoch\x01\xacengine_epoch\x03"
            b"\xa9lease_bit\xff\xa8sequence\x08\xa6roster\x90\xa9sequences\x81\x03\x04\xa9suspected\x91"
            b"\x03\xa9strangers\x91\x93\xa1b\x07\x81\xa7weights\x92\xa11\xa12",
        ),
        (
            decode_broadcast,
            b"\x84\xa4type\xafstranger-joined\xb1coordinator_epoch\x01\xa8sequence\t\xa8stranger"
            b"\x93\xa1b\x07\x81\xa7weights\x92\xa11\xa12",
        ),
        (
            decode_broadcast,
            b"\x85\xa4type\xa4tick\xb1coordinator_epoch\x01\xa8sequence\t\xa9sequences\x81\x03\x05"
            b"\xa9strangers\x01",
        ),
    ],
    ids=["joined", "stranger-joined", "tick"],
)
def test_on_the_wire_an_incompatible_engine_is_a_stranger(decode: Any, frame: bytes) -> None:
    """Engines and coordinators that are older and newer than this one say so."""
    assert encode(decode(frame)) == frame


def untupled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untupled(item) for key, item in value.items()}
    return [untupled(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_every_message_is_tried_here() -> None:
    leaves = {
        kind
        for kind in vars(protocol).values()
        if isinstance(kind, type) and issubclass(kind, Message) and not kind.__subclasses__()
    }
    assert leaves == {type(message) for _, message in ALL}


def test_a_newer_minor_version_may_add_fields() -> None:
    frame = msgpack.packb({"type": "heartbeat", "epoch": 1, "sequence": 2, "mood": "good"})
    assert decode_command(frame) == Heartbeat(epoch=1, sequence=2)


def test_undecodable_frames(subtests: pytest.Subtests) -> None:
    for frame in [
        b"",
        b"\xc1",
        b"\x80",
        b"\x91" * 100_000,
        msgpack.packb({"type": "leave"}),
        msgpack.packb({"type": "leave", "epoch": "1"}),
        msgpack.packb({"type": "joined", "epoch": 1}),
        msgpack.packb({"type": "events", "epoch": 1, "sequence": 1, "records": "text"}),
        encode(COMMANDS[0])[:-1],
        encode(COMMANDS[0]) + b"\x00",
    ]:
        with (
            subtests.test(frame=frame),
            pytest.raises(ProtocolError, match=f"message of {len(frame)} bytes"),
        ):
            decode_command(frame)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    for decode in (decode_command, decode_reply, decode_broadcast):
        with suppress(ProtocolError):
            assert isinstance(decode(frame), Message)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_flipped_bytes_are_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    frame = bytearray(encode(COMMANDS[0]))
    for _ in range(3):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        assert isinstance(decode_command(bytes(frame)), Message)


def test_oversized_frame_is_not_even_looked_at() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        decode_command(bytes(MAX_MESSAGE_BYTES + 1))


def test_version_is_compared_and_both_are_named() -> None:
    check_version(PROTOCOL_VERSION)
    with pytest.raises(VersionMismatch, match=f"protocol 99, this kvshm {PROTOCOL_VERSION}"):
        check_version(99)


def test_of_another_versions_join_that_cannot_be_decoded_enough_is_read() -> None:
    engine = {"epoch": 7, "name": "e", "kvshm_version": "9.8", "num_blocks": "many", "new": 1}
    frame = msgspec.msgpack.encode({"type": "join", "protocol": 99, "engine": engine})
    with pytest.raises(ProtocolError):
        decode_command(frame)
    assert foreign_join(frame) == ForeignJoin(99, ForeignEngine(7, "e", "9.8"))


def of_rank(**what: Any) -> EngineInfo:
    memory = msgspec.structs.replace(MEMORY, **what)
    return msgspec.structs.replace(ENGINE, ranks=[RankInfo(1, memory)])


def test_what_everybody_is_reported_an_engine_is_bounded(subtests: pytest.Subtests) -> None:
    """By who decodes it, engine or coordinator; it is known who sent it, so he is told."""
    for engine, reason in [
        (msgspec.structs.replace(ENGINE, kvshm_version="9" * 65), "length <= 64"),
        (msgspec.structs.replace(ENGINE, ranks=[RankInfo(1, MEMORY)] * 65), "length <= 64"),
        (of_rank(regions=[Region(0, 1, 1, 1)] * (MAX_REGIONS + 1)), f"<= {MAX_REGIONS}"),
        (of_rank(details=bytes(MAX_DETAILS_BYTES + 1)), f"<= {MAX_DETAILS_BYTES}"),
        (of_rank(details={"a": [[]] * 100}), "got `object`"),
    ]:
        with subtests.test(engine=engine, reason=reason):
            frame = encode(Join(protocol=PROTOCOL_VERSION, engine=engine))
            with pytest.raises(ProtocolError, match=reason):
                decode_command(frame)
            reported = encode(EngineJoined(**NUMBERED, engine=engine, engine_sequence=4))
            with pytest.raises(ProtocolError, match=reason):
                decode_broadcast(reported)


def test_a_long_join_is_not_built_and_its_sender_is_reported() -> None:
    ranks = [RankInfo(1, msgspec.structs.replace(MEMORY, details=bytes(MAX_DETAILS_BYTES)))] * 8
    engine = msgspec.structs.replace(ENGINE, ranks=ranks)
    frame = encode(Join(protocol=PROTOCOL_VERSION, engine=engine))
    with pytest.raises(ProtocolError, match=f"at most {MAX_JOIN_BYTES} allowed but for events"):
        decode_command(frame)
    assert foreign_join(frame) == ForeignJoin(PROTOCOL_VERSION, ForeignEngine(BIG, "a"))
    events = Events(epoch=BIG, sequence=4, records=bytes(MAX_EVENTS_BYTES))
    assert decode_command(encode(events)) == events


def test_a_hundred_engines_of_the_longest_joins_fit_into_what_a_newcomer_is_reported() -> None:
    memory = msgspec.structs.replace(MEMORY, details=bytes(MAX_DETAILS_BYTES))
    engine = msgspec.structs.replace(ENGINE, ranks=[RankInfo(1, memory)] * 7)
    assert len(encode(Join(protocol=PROTOCOL_VERSION, engine=engine))) > MAX_JOIN_BYTES * 7 // 8
    assert isinstance(
        decode_reply(encode(msgspec.structs.replace(REPLIES[0], roster=[engine] * 100))), Joined
    )


def test_what_is_no_join_of_another_version_is_garbage() -> None:
    endless = msgspec.msgpack.encode(
        {"type": "join", "protocol": 99, "engine": {"epoch": 7}, "new": bytes(MAX_COMMAND_BYTES)}
    )
    leave = msgspec.msgpack.encode({"type": "leave", "protocol": 99, "engine": {"epoch": 7}})
    long = {"type": "join", "protocol": 99, "engine": {"epoch": 7, "kvshm_version": "9" * 65}}
    for frame in (
        msgspec.msgpack.encode(long),
        leave,
        endless,
        b"",
        b"\xc1",
        b"\x91" * 10_000,
    ):
        assert foreign_join(frame) is None


def test_the_document_draws_every_message(subtests: pytest.Subtests) -> None:
    """docs/protocol.md lists each message's fields, all of them and no others."""
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")
    for message in [m for _, m in ALL]:
        tag = message.__struct_config__.tag
        with subtests.test(message=message):
            row = re.search(rf"^\| `{tag}` \|[^|]*\| (.*) \|$", text, re.MULTILINE)
            assert row, f"docs/protocol.md does not draw {tag}"
            assert re.findall(r"`(\w+)`", row[1]) == list(message.__struct_encode_fields__)
