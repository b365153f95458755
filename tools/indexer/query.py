"""What a router asks, and what it is answered.  Pure.

The shape is that of Mooncake's indexer RFC (https://github.com/kvcache-ai/Mooncake/issues/1403, and
docs/source/design/conductor/indexer-api-design.md in that repository), which Dynamo's indexer has
taken over: ``POST /query_by_hash`` with the rolling hashes of a prefix is answered by
``{tenant: {instance: {longest_matched, GPU, DP, CPU, DISK}}}``, in tokens.

Three things differ.  Hashes may be vLLM's whole ones, in hexadecimal.  What belongs into the
hashes, a salt or an adapter, is not accepted beside them: the answer would be that of another
prompt.  And the only tenant is the RFC's default, since kvshm keeps users apart by salts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from kvshm._base.log import engine_name

MAX_HASHES = 1 << 16
"""A million tokens, in blocks of 16."""
MAX_BODY = 8 << 20
"""Bytes; that many hashes in hexadecimal have half of it."""
WHOLE, PUBLISHED = 32, 8
"""Bytes of a block's hash, and of its end, which vLLM publishes in its KV events by default."""
TENANT = "default"

Answer = dict[str, dict[str, dict[str, Any]]]
Hash = bytes
"""WHOLE or PUBLISHED bytes."""


class BadQuery(Exception):
    """What is asked makes no sense; says why."""


class Asked(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A request, as it is sent."""

    model: str
    block_size: Annotated[int, Meta(ge=1)]
    seq_hashes: Annotated[list[int | str], Meta(max_length=MAX_HASHES)] | None = None
    block_hash: Annotated[list[int | str], Meta(max_length=MAX_HASHES)] | None = None
    """The name of ``seq_hashes`` in earlier drafts."""
    instance_id: str | None = None
    tenant_id: str = TENANT
    lora_name: str | None = None
    cache_salt: str | None = None


class Query(NamedTuple):
    model: str
    block_size: int
    hashes: Sequence[Hash]
    """Of the prefix's blocks, from the first on."""
    instance: str | None
    """None: all."""


class Cache(NamedTuple):
    """One engine's, or one keeper's."""

    name: str
    epoch: int
    model: str
    fingerprint: bytes
    block_size: int
    keeps: bool
    held: frozenset[Hash]
    """Which of the asked hashes are there."""


_decoder = msgspec.json.Decoder(Asked)


def parse(body: bytes) -> Query:
    """Raises BadQuery."""
    try:
        asked = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise BadQuery(str(exc)) from None
    if asked.tenant_id != TENANT:
        raise BadQuery(f"tenant_id: there is only {TENANT!r}; tenants have cache salts")
    if asked.cache_salt or asked.lora_name:
        field = "cache_salt" if asked.cache_salt else "lora_name"
        raise BadQuery(f"{field} belongs into the hashes; leave it out here")
    if (asked.seq_hashes is None) == (asked.block_hash is None):
        raise BadQuery("give either seq_hashes or block_hash")
    given = asked.seq_hashes if asked.block_hash is None else asked.block_hash
    hashes = [_hash(each) for each in given or ()]
    return Query(asked.model, asked.block_size, hashes, asked.instance_id)


def _hash(given: int | str) -> Hash:
    try:
        if isinstance(given, int):
            return given.to_bytes(PUBLISHED, "big")
        digits = given.removeprefix("0x")
        found = bytes.fromhex(digits) if digits.isalnum() else b""  # it would skip spaces
    except (ValueError, OverflowError):
        found = b""
    if len(found) not in (WHOLE, PUBLISHED):
        raise BadQuery(
            f"{str(given)[:80]!r} is no hash: give a number of 64 bits, as in KV events, or 16 "
            "or 64 hexadecimal digits"
        )
    return found


def found_in(keys: Iterable[bytes], wanted: frozenset[Hash]) -> frozenset[Hash]:
    """Return which of the wanted hashes these keys of blocks are."""
    return frozenset(name for key in keys for name in (key, key[-PUBLISHED:]) if name in wanted)


def answer(query: Query, caches: Iterable[Cache]) -> Answer:
    """Say for each engine how much of the prefix it holds: GPU is its own cache (so vLLM calls it
    on a CPU, too), CPU is what keepers hold for it, and the longest match is of both together."""
    fitting = [c for c in caches if (c.model, c.block_size) == (query.model, query.block_size)]
    engines = [cache for cache in fitting if not cache.keeps]
    times = Counter(engine.name for engine in engines)
    found: dict[str, dict[str, Any]] = {}
    for engine in engines:
        name = engine.name if times[engine.name] == 1 else engine_name(engine.epoch, engine.name)
        if query.instance in (None, name):
            kept = frozenset[Hash]().union(
                *(c.held for c in fitting if c.keeps and c.fingerprint == engine.fingerprint)
            )
            found[name] = _matches(query, engine.held, kept)
    return {TENANT: found}


def _matches(query: Query, own: frozenset[Hash], kept: frozenset[Hash]) -> dict[str, Any]:
    def tokens(held: frozenset[Hash]) -> int:
        return query.block_size * sum(1 for _ in takewhile(held.__contains__, query.hashes))

    longest = tokens(own | kept)
    return {
        "longest_matched": longest,
        "GPU": tokens(own),
        "DP": {"0": longest},  # each data-parallel rank is an engine of its own
        "CPU": tokens(kept),
        "DISK": 0,  # what lies there is published once a keeper has read it
    }
