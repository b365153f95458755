"""What ``kvshm indexer`` takes for a query, and what it makes of the blocks that it sees."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshm.tools.indexer.query import (
    MAX_HASHES,
    BadQuery,
    Cache,
    Query,
    answer,
    found_in,
    parse,
)

KEYS = [bytes([i]) * 24 + i.to_bytes(8, "big") for i in range(1, 7)]
ASKED: dict[str, Any] = {"model": "m", "block_size": 4, "seq_hashes": [1]}


def asked(**changes: Any) -> bytes:
    given = ASKED | changes
    return json.dumps({key: value for key, value in given.items() if value != ...}).encode()


def cache(
    name: str, *held: int, keeps: bool = False, weights: bytes = b"w", epoch: int = 1, **other: Any
) -> Cache:
    there = found_in((KEYS[i] for i in held), frozenset(KEYS))
    return Cache(name, epoch, "m", weights, 4, keeps, there)._replace(**other)


def query(instance: str | None = None) -> Query:
    return Query("m", 4, KEYS, instance)


def test_hashes_are_those_of_events_or_whole_ones() -> None:
    whole = KEYS[0].hex()
    given = [1, "0x0000000000000001", whole, "0x" + whole.upper().replace("X", "x"), (1 << 64) - 1]
    end = KEYS[0][-8:]
    assert parse(asked(seq_hashes=given)).hashes == [end, end, KEYS[0], KEYS[0], b"\xff" * 8]
    assert parse(asked(seq_hashes=..., block_hash=[1])).hashes == [end]
    assert found_in(KEYS, frozenset({end, KEYS[1], b"\0" * 8})) == {end, KEYS[1]}


def test_the_fields_of_the_rfc_are_taken() -> None:
    fields = {"instance_id": "a", "tenant_id": "default", "lora_name": "", "cache_salt": None}
    assert parse(asked(**fields)) == Query("m", 4, [KEYS[0][-8:]], "a")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff", "malformed"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"[" * 100_000, "."),
        (asked(model=...), "missing required field `model`"),
        (asked(block_size=...), "missing required field `block_size`"),
        (asked(block_size=0), r"`int` >= 1 - at `\$.block_size`"),
        (asked(block_size="4"), "Expected `int`"),
        (asked(token_ids=[1]), "unknown field `token_ids`"),
        (asked(seq_hashes=[1] * (MAX_HASHES + 1)), f"length <= {MAX_HASHES}"),
        (asked(seq_hashes=...), "either seq_hashes or block_hash"),
        (asked(block_hash=[1]), "either seq_hashes or block_hash"),
        (asked(seq_hashes=[True]), r"got `bool` - at `\$.seq_hashes"),
        (asked(seq_hashes=[-1]), "'-1' is no hash"),
        (asked(seq_hashes=[1 << 64]), "."),
        (asked(seq_hashes=["1"]), "'1' is no hash"),
        (asked(seq_hashes=["x" * 64]), "is no hash"),
        (asked(seq_hashes=["00 " * 8]), "'00 00 00 00 00 00 00 00 ' is no hash"),
        (asked(seq_hashes=["0" * 5000]), f"'{'0' * 80}' is no hash"),
        (asked(cache_salt="s"), "cache_salt belongs into the hashes"),
        (asked(lora_name="l"), "lora_name belongs into the hashes"),
        (asked(tenant_id="t"), "there is only 'default'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_said(body: bytes, said: str) -> None:
    with pytest.raises(BadQuery, match=said):
        parse(body)


def test_a_prefix_ends_where_its_first_block_is_missing() -> None:
    found = answer(query(), [cache("a", 0, 1, 3), cache("b", 1, 2), cache("c", *range(6))])
    matched = {name: about["longest_matched"] for name, about in found["default"].items()}
    assert matched == {"a": 8, "b": 0, "c": 24}
    assert found["default"]["a"] == {
        "longest_matched": 8,
        "GPU": 8,
        "DP": {"0": 8},
        "CPU": 0,
        "DISK": 0,
    }


def test_what_keepers_have_counts_for_the_engines_that_can_import_it() -> None:
    caches = [
        cache("a", 0, 1),
        cache("other weights", 0, weights=b"o"),
        cache("k", 0, 2, keeps=True),
        cache("l", 3, keeps=True),
    ]
    found = answer(query(), caches)["default"]
    assert found.keys() == {"a", "other weights"}
    assert found["a"] | {"DP": 0} == {
        "longest_matched": 16,
        "GPU": 8,
        "DP": 0,
        "CPU": 4,
        "DISK": 0,
    }
    assert (found["other weights"]["longest_matched"], found["other weights"]["CPU"]) == (4, 0)


def test_only_engines_of_the_model_and_block_size_are_meant_or_the_one_that_is_named() -> None:
    caches = [cache("a", 0), cache("b", 0, model="n"), cache("c", 0, block_size=8), cache("d", 0)]
    assert answer(query(), caches)["default"].keys() == {"a", "d"}
    assert answer(query("d"), caches)["default"].keys() == {"d"}
    assert answer(query("e"), caches) == {"default": {}}


def test_engines_of_one_name_are_told_apart() -> None:
    caches = [cache("vllm-7", 0, epoch=1), cache("vllm-7", 0, 1, epoch=2), cache("k", keeps=True)]
    found = answer(query(), caches)["default"]
    assert {name: about["GPU"] for name, about in found.items()} == {
        "vllm-7 (epoch 0000000000000001)": 4,
        "vllm-7 (epoch 0000000000000002)": 8,
    }
