"""The wire protocol between engines and the coordinator (docs/protocol.md draws the frames).

A broadcast's frame begins with the fingerprint as its topic, so that an engine receives only what
is about engines it may share with.  No message has several frames: if the sender ended between two,
libzmq could abort the receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder, Encoder

from kvshm._base.log import engine_name
from kvshm._shm.layout import ENGINE_NAME_BYTES, LAYOUT_VERSION, MAX_RANKS
from kvshm.errors import ProtocolError, VersionMismatch
from kvshm.interfaces import MemoryDescriptor

PROTOCOL_VERSION = 3
FINGERPRINT_BYTES = 32
MAX_MESSAGE_BYTES = 64 << 20
MAX_EVENTS_BYTES = 1 << 20
MAX_COMMAND_BYTES = 2 * MAX_EVENTS_BYTES
"""The longest message of an engine."""
MAX_FIELDS_CHARACTERS = 1 << 16
"""Of one engine's fingerprint fields: the fields of all engines have to fit one Joined."""
MAX_JOIN_BYTES = 1 << 19
"""A Join with all its ranks: a hundred of these fit into a Joined."""
MAX_FRAME_BYTES = MAX_COMMAND_BYTES + (1 << 16)
"""The longest broadcast: one message of an engine, or several messages of the same size in all."""
QUEUE_FRAMES = 128
"""Frames that one socket keeps for a receiver that does not read; further frames are lost."""
MAX_RECEIVED_BYTES = 2 * MAX_MESSAGE_BYTES
"""A longer message ends the sender's connection; up to this size it is counted and refused."""


def abi() -> str:
    """What two engines need in common to read each other at all: a field of the fingerprint."""
    return f"layout {LAYOUT_VERSION}, protocol {PROTOCOL_VERSION}"


class Message(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """Base of all messages; field ``type`` names the class, unknown fields are ignored."""


Version = Annotated[str, Meta(max_length=64)]
"""A version of kvshm; kvshm sends no longer text."""


class RankInfo(msgspec.Struct, frozen=True, array_like=True):
    """One worker process of an engine and how to reach its KV memory."""

    pid: int
    memory: MemoryDescriptor


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The roster's entry for one engine, in one epoch of its cache."""

    epoch: int
    name: str
    pid: int
    fingerprint: bytes
    fields: dict[str, str]
    num_blocks: int
    ranks: Annotated[list[RankInfo], Meta(max_length=MAX_RANKS)]
    lease_bit: int = -1
    imports_only: bool = False
    kvshm_version: Version = ""

    @property
    def log_name(self) -> str:
        return engine_name(self.epoch, self.name, self.pid)


# -- engine to coordinator


class Join(Message, frozen=True, tag="join"):
    """Ask for a place in the roster.  ``engine.lease_bit`` is that of an earlier join, or -1."""

    protocol: int
    engine: EngineInfo
    sequence: int = 0
    """The sequence of the engine's last Events in this epoch, sent or dropped.  If the last relayed
    Events have another sequence, events were lost and all peers scan the engine's table again."""


class ForeignEngine(msgspec.Struct, frozen=True):
    """The sender of a ``ForeignJoin``."""

    epoch: int
    name: Annotated[str, Meta(max_length=ENGINE_NAME_BYTES)] = ""
    kvshm_version: Version = ""


class ForeignJoin(msgspec.Struct, frozen=True, tag_field="type", tag="join"):
    """The fields of a Join that are the same in every version of the protocol.  Refused is the same
    in every version, too, so that an engine of another version learns why it is refused."""

    protocol: int
    engine: ForeignEngine


class Leave(Message, frozen=True, tag="leave"):
    """The epoch of the engine's cache has ended; its table is already retired."""

    epoch: int


class Events(Message, frozen=True, tag="events"):
    """The publishes and retracts of one scheduler step, or several, in order."""

    epoch: int
    sequence: int
    """Counts this engine's messages of events from 1 within its epoch, including dropped ones."""
    records: bytes
    awaited: bool = False
    """Whether another engine waits for them: they wait for others a shorter time."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """The engine is alive; ``sequence`` is the one of its last Events, sent or dropped."""

    epoch: int
    sequence: int


# -- coordinator to engine


class IncompatibleEngine(msgspec.Struct, frozen=True, array_like=True):
    """An engine of the roster that cannot share with the receiver; messages call it a stranger."""

    name: str
    pid: int
    differences: dict[str, tuple[str, str]]
    """Fingerprint field -> (the receiver's value, the other's), causes first; never empty."""


class Joined(Message, frozen=True, tag="joined", rename={"incompatible": "strangers"}):
    """The roster of the engine's topic, without the engine itself, as of ``sequence``."""

    protocol: int
    coordinator_epoch: int
    engine_epoch: int
    lease_bit: int
    sequence: int
    roster: list[EngineInfo]
    sequences: dict[int, int]
    """Engine epoch -> sequence of its last relayed Events."""
    suspected: list[int]
    incompatible: list[IncompatibleEngine]


OTHER_VERSION = "other-version"
"""The code of a refusal whose remedy is another version of kvshm."""


class Refused(Message, frozen=True, tag="refused"):
    """The engine gets no place in the roster; ``retry``: the same Join may succeed soon."""

    engine_epoch: int
    reason: str
    remedy: str
    retry: bool
    code: str = ""
    """What kind of refusal it is, for programs: OTHER_VERSION, or empty."""


class JoinFirst(Message, frozen=True, tag="join-first"):
    """The coordinator does not know this epoch: the coordinator restarted, or the epoch ended."""

    coordinator_epoch: int
    engine_epoch: int


# -- broadcasts


class Broadcast(Message, frozen=True):
    """Base of broadcasts: numbered per topic within one coordinator epoch."""

    coordinator_epoch: int
    sequence: int


class EngineJoined(Broadcast, frozen=True, tag="engine-joined"):
    """An engine is new, or events of a known one were lost: scan its slot table."""

    engine: EngineInfo
    engine_sequence: int
    """The engine's next Events have this sequence + 1."""


class EngineSuspected(Broadcast, frozen=True, tag="engine-suspected"):
    """The engine is silent: do not use its blocks, but keep what is known of it."""

    epoch: int


class EngineRecovered(Broadcast, frozen=True, tag="engine-recovered"):
    """A suspected engine has sent a message again."""

    epoch: int


class EngineGone(Broadcast, frozen=True, tag="engine-gone"):
    """The epoch has ended: the engine left or has died.  Drop all that is known of it."""

    epoch: int
    reason: str


class EngineEvents(Broadcast, frozen=True, tag="engine-events"):
    """Events of one engine, relayed."""

    epoch: int
    engine_sequence: int
    records: bytes


class IncompatibleJoined(
    Broadcast, frozen=True, tag="stranger-joined", rename={"engine": "stranger"}
):
    """An incompatible engine is new."""

    engine: IncompatibleEngine


class Tick(Broadcast, frozen=True, tag="tick", rename={"num_incompatible": "strangers"}):
    """Sent about once a second without advancing ``sequence``: shows whether the last messages
    were lost."""

    sequences: dict[int, int]
    num_incompatible: int = 0


Command = Join | Leave | Events | Heartbeat
Reply = Joined | Refused | JoinFirst
AnyBroadcast = (
    EngineJoined
    | EngineSuspected
    | EngineRecovered
    | EngineGone
    | EngineEvents
    | IncompatibleJoined
    | Tick
)

_encoder = Encoder()
_command_decoder: Decoder[Command] = Decoder(Command)
_events_decoder = Decoder(Events)
_foreign_decoder = Decoder(ForeignJoin)
_reply_decoder: Decoder[Reply] = Decoder(Reply)
_broadcasts_decoder: Decoder[list[AnyBroadcast]] = Decoder(list[AnyBroadcast])
_frame_decoder = Decoder(list[Raw])
_broadcast_decoder: Decoder[AnyBroadcast] = Decoder(AnyBroadcast)
_info_decoder = Decoder(EngineInfo)

T = TypeVar("T")


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def _decode(
    decoder: Decoder[T], frame: bytes | memoryview | Raw, limit: int = MAX_MESSAGE_BYTES
) -> T:
    size = len(memoryview(frame))
    if size > limit:
        raise ProtocolError(f"message of {size} bytes, at most {limit} allowed")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:  # ValueError: no UTF-8
        raise ProtocolError(f"undecodable message of {size} bytes: {exc}") from exc


def decode_command(frame: bytes) -> Command:
    if len(frame) <= MAX_JOIN_BYTES:
        return _decode(_command_decoder, frame)
    try:
        return _decode(_events_decoder, frame, MAX_COMMAND_BYTES)
    except ProtocolError as exc:  # no long message but events is decoded
        limit = f"at most {MAX_JOIN_BYTES} allowed but for events"
        raise ProtocolError(f"message of {len(frame)} bytes, {limit}") from exc


def foreign_join(frame: bytes) -> ForeignJoin | None:
    """Return the readable part of a frame that ``decode_command`` refused, if it is a Join."""
    with suppress(ProtocolError):
        return _decode(_foreign_decoder, frame, MAX_COMMAND_BYTES)
    return None


def encode_info(info: EngineInfo) -> bytes:
    """Return an engine's entry as the engine hands it out."""
    return _encoder.encode(info)


def decode_info(packed: bytes) -> EngineInfo:
    return _decode(_info_decoder, packed, MAX_JOIN_BYTES)


def decode_reply(frame: bytes) -> Reply:
    return _decode(_reply_decoder, frame)


def broadcast_frame(topic: bytes, messages: Iterable[bytes]) -> bytes:
    return topic + _encoder.encode([Raw(message) for message in messages])


def open_broadcast(frame: bytes) -> tuple[bytes, Sequence[AnyBroadcast | Raw]]:
    """Return topic and messages of a frame.  If a message cannot be decoded, all messages are
    returned encoded, for ``decode_broadcast`` one by one.  Raises ProtocolError."""
    topic, packed = frame[:FINGERPRINT_BYTES], memoryview(frame)[FINGERPRINT_BYTES:]
    with suppress(ProtocolError):
        return topic, _decode(_broadcasts_decoder, packed, MAX_FRAME_BYTES)
    return topic, _decode(_frame_decoder, packed, MAX_FRAME_BYTES)


def decode_broadcast(message: bytes | Raw) -> AnyBroadcast:
    return _decode(_broadcast_decoder, message)


def check_version(theirs: int) -> None:
    """Raise VersionMismatch, naming both versions, unless ``theirs`` is this version."""
    if theirs != PROTOCOL_VERSION:
        message = f"peer speaks protocol {theirs}, this kvshm {PROTOCOL_VERSION}"
        raise VersionMismatch(message, theirs, PROTOCOL_VERSION)
