"""vLLM's batches of KV events: msgpack arrays of a time, events and a data-parallel rank.  Pure.

An event is a map with its ``type``.  Events stay plain data, so that fields of later versions of
vLLM pass through as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

Event = dict[str, Any]
BlockHash = int | bytes
"""As vLLM publishes it: by default the last 64 bits."""
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_NUMBER = (1 << 63) - 1

_decode = msgspec.msgpack.Decoder().decode
encode = msgspec.msgpack.Encoder().encode


class BadBatch(Exception):
    """A message that is no batch of KV events; says what is wrong."""


class Place(NamedTuple):
    """What a stored and a removed block must have in common, besides the hash."""

    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Batch(NamedTuple):
    at: float
    """Unix time."""
    events: list[Event]
    rank: int
    rest: tuple[Any, ...] = ()
    """Fields of later versions of vLLM."""


def decode_batch(payload: bytes) -> Batch:
    """Raises BadBatch."""
    try:
        at, events, *rest = _decode(payload)
        rank = (rest[0] if rest else None) or 0
        good = isinstance(at, int | float) and isinstance(rank, int) and isinstance(events, list)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as exc:
        raise BadBatch(f"it is no batch: {exc}") from exc
    if not good:
        raise BadBatch("time, events or rank are of a wrong type")
    for event in events:
        _check(event)
    return Batch(at, events, rank, tuple(rest[1:]))


def encode_batch(batch: Batch) -> bytes:
    return encode([batch.at, batch.events, batch.rank, *batch.rest])


def _check(event: Any) -> None:
    if not isinstance(event, dict):
        raise BadBatch("an event is no map, as in vLLM before 0.24")
    kind = event.get("type")
    if kind not in (STORED, REMOVED, CLEARED):
        raise BadBatch(f"it has an event of type {kind!r:.80}")
    if kind == CLEARED:
        return
    hashes = event.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(h, int | bytes) for h in hashes):
        raise BadBatch(f"the block_hashes of a {kind} are no list of numbers or bytes")
    if not all(isinstance(part, str | int | None) for part in place_of(event)):
        raise BadBatch(f"the place of a {kind} is of a wrong type")
    if kind == STORED:
        tokens, size = event.get("token_ids"), event.get("block_size")
        if not isinstance(tokens, list) or not isinstance(size, int) or size < 1:
            raise BadBatch(f"token_ids or block_size of a {kind} are of a wrong type")


def place_of(event: Event) -> Place:
    return Place(*map(event.get, Place._fields))


def removed(place: Place, hashes: Sequence[BlockHash]) -> Event:
    known = {key: value for key, value in place._asdict().items() if value is not None}
    return {"type": REMOVED, "medium": None, "block_hashes": list(hashes)} | known


def stored_parts(event: Event, wanted: Sequence[bool]) -> list[Event]:
    """Return the event for its ``wanted`` blocks alone: as one event for each run of them."""
    if all(wanted):
        return [event] if wanted else []
    indexes = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    if not is_dense(event):  # vLLM left out blocks that no request can hit
        return [_picked(event, indexes)] if indexes else []
    runs = groupby(enumerate(indexes), lambda pair: pair[1] - pair[0])
    return [_run(event, [index for _, index in run]) for _, run in runs]


def single_blocks(event: Event) -> list[Event]:
    """Return the event as one for each block; whole if its blocks have no tokens of their own."""
    count = len(event["block_hashes"])
    if count == 1 or not is_dense(event):
        return [event]
    return [_run(event, [index]) for index in range(count)]


def is_dense(event: Event) -> bool:
    """Whether its blocks follow each other, each with its tokens."""
    return len(event["block_hashes"]) * int(event["block_size"]) == len(event["token_ids"])


def _picked(event: Event, indexes: Sequence[int]) -> Event:
    """With the items of these blocks in each list that has one for each block."""
    count = len(event["block_hashes"])

    def pick(key: str, value: Any) -> Any:
        each = isinstance(value, list) and len(value) == count and key != "token_ids"
        return [value[i] for i in indexes] if each else value

    return {key: pick(key, value) for key, value in event.items()}


def _run(event: Event, indexes: Sequence[int]) -> Event:
    first, size = indexes[0], event["block_size"]
    part = _picked(event, indexes)
    part["token_ids"] = event["token_ids"][first * size : (indexes[-1] + 1) * size]
    if first:
        part["parent_block_hash"] = event["block_hashes"][first - 1]
    return part
