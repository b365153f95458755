"""Batches of KV events as they come in: what is no batch is refused, whatever it is."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec
import pytest

from kvshm.tools.events.copies import NodeCopies
from kvshm.tools.events.history import History
from kvshm.tools.events.wire import BadBatch, Batch, decode_batch, encode, encode_batch

from .kv_events import CLEARED, payload, removed, stored


def test_unknown_fields_of_batches_and_events_pass_through() -> None:
    text = payload(stored(1, new=[{"a": b"\0"}]), removed(2, new=None), rest=("later", 1))
    batch = decode_batch(text)
    assert batch.rest == ("later", 1)
    assert msgspec.msgpack.decode(encode_batch(batch)) == msgspec.msgpack.decode(text)


@pytest.mark.parametrize(
    ("said", "rank"), [([1.5, [CLEARED]], 0), ([1.5, [CLEARED], None], 0), ([1, [], 3], 3)]
)
def test_a_batch_without_a_rank_is_of_rank_0(said: list[object], rank: int) -> None:
    assert decode_batch(encode(said)).rank == rank


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"", "no batch"),
        (encode({"a": 1}), "no batch|wrong type"),
        (encode([1.5]), "no batch"),
        (encode(["now", []]), "wrong type"),
        (encode([1.5, {}]), "wrong type"),
        (encode([1.5, [], "0"]), "wrong type"),
        (encode([1.5, [["BlockRemoved", [1], "GPU"]]]), "no map, as in vLLM before 0.24"),
        (payload({"type": "BlockMoved"}), "of type 'BlockMoved'"),
        (payload(removed() | {"block_hashes": ["a"]}), "block_hashes of a BlockRemoved"),
        (payload(removed(1, medium=["GPU"])), "place of a BlockRemoved"),
        (payload(stored(1, token_ids=None)), "token_ids or block_size"),
        (payload(stored(1, block_size=0)), "token_ids or block_size"),
    ],
)
def test_what_is_no_batch_says_why(bad: bytes, why: str) -> None:
    with pytest.raises(BadBatch, match=why):
        decode_batch(bad)


ODD = (None, True, -1, 7, 0.5, "a", b"\0", [], {}, [1, b"\0"], ["a"], {"a": None})
FIELDS = ("block_hashes", "token_ids", "block_size", "medium", "group_idx", "extra_keys", "type")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_a_batch_can_be_merged_and_replayed(seed: int) -> None:
    rnd, copies, history, taken = random.Random(seed), NodeCopies(), History(max_batches=1), 0
    for _ in range(500):
        event = rnd.choice((stored, removed))(*rnd.sample(range(9), 3))
        for field in rnd.sample(FIELDS, rnd.choice((0, 1, 2))):
            event[field] = rnd.choice(ODD)
        with suppress(BadBatch):
            batch = decode_batch(payload(event))
            taken += 1
            said = copies.apply(rnd.choice((0, 1)), batch)
            history.add(encode_batch(Batch(batch.at, said.events, said.rank, batch.rest)))
            assert all(decode_batch(replayed) for _, replayed in history.since(0, 1.0))
    assert taken > 200


def test_a_changed_byte_is_refused_or_does_no_harm() -> None:
    rnd = random.Random(1)
    for _ in range(500):
        text = bytearray(payload(stored(1, 2)))
        text[rnd.randrange(len(text))] = rnd.randrange(256)
        with suppress(BadBatch):
            encode_batch(decode_batch(bytes(text)))
