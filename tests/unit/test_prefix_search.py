"""What a prefix needs of each KV cache group, and which of the engine's own blocks count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest

from kvshm._base.ids import BlockId, Generation, block_hash
from kvshm._engine.groups import Group, Groups, Part
from kvshm._engine.prefix_search import PrefixSearch
from kvshm._node.peer import PlannedRun
from kvshm._shm.layout import BlockRecord, pack_records, unpack_records

from .exporters import HASHES
from .served import AnyTable, ServedNode

FULL, WINDOW, CHUNK = Group(0, 4), Group(1, 4, window=10), Group(1, 4, chunk=12)
LARGE = Group(0, 8, scale=2)
PEER: Any = "peer"
FIRST = Generation(0)


def test_what_a_prefix_needs_behind_a_local_hit(subtests: pytest.Subtests) -> None:
    """``kept``: with what is needed of the local hit."""
    for groups, start, length, parts, kept in [
        ([FULL, WINDOW], 0, 8, [Part(0, 0, 8), Part(1, 5, 3)], 11),
        ([FULL, WINDOW], 6, 8, [Part(0, 6, 2), Part(1, 6, 2)], 11),
        ([FULL, WINDOW], 0, 2, [Part(0, 0, 2), Part(1, 0, 2)], 4),
        ([FULL, CHUNK], 0, 8, [Part(0, 0, 8), Part(1, 6, 2)], 10),
        ([FULL, CHUNK], 0, 9, [Part(0, 0, 9)], 9),  # a new chunk begins there
        ([LARGE, WINDOW], 2, 8, [Part(0, 1, 3), Part(1, 5, 3)], 7),
    ]:
        with subtests.test(groups=groups, start=start, length=length, parts=parts, kept=kept):
            assert Groups(groups).parts(start, length) == parts
            assert Groups(groups).blocks_at(length) == kept


def test_a_local_hit_inside_a_larger_block_is_not_made_longer() -> None:
    """vLLM may have such hits if it matches in smaller steps; no one is asked."""

    def find(*_: object) -> list[PlannedRun]:
        raise AssertionError

    found = Groups([LARGE, WINDOW]).longest(3, 8, 8, find)
    assert (found.length, found.runs) == (3, ())


def test_what_full_attention_shares_is_reported_though_nothing_can_be_restored() -> None:
    """vLLM is to keep the windows there; not where a prefix ends that is restored."""

    def find(held: int) -> Any:
        return lambda group, first, stop: ([], min(stop, 5 if group.is_full else held))

    groups = Groups([FULL, WINDOW])
    assert groups.longest(1, 8, 8, find(0))[:2] == (1, 5)
    assert groups.longest(1, 8, 8, find(5))[:2] == (5, 0)


class Own:
    def __init__(self, table: AnyTable, groups: Sequence[Group]) -> None:
        self.table = table
        self.cached: dict[tuple[bytes, int], BlockId] = {}
        self.remote: set[tuple[int, int]] = set()
        self.search = PrefixSearch()
        self.search.groups = Groups(groups)
        self.search.own_blocks = self.own_blocks
        self.own_peer: Any = "own"
        self.peers = SimpleNamespace(lookup=self.lookup)

    def own_blocks(self, hashes: Iterable[bytes], group: int) -> list[BlockId]:
        keys = takewhile(self.cached.__contains__, ((digest, group) for digest in hashes))
        return [self.cached[key] for key in keys]

    def lookup(
        self, hashes: Sequence[bytes], start: int, stop: int, *, group: int, scale: int
    ) -> list[PlannedRun]:
        records = []
        for index in range(start, stop):
            if (group, index) not in self.remote:
                break
            digest = block_hash(hashes[(index + 1) * scale - 1])
            records.append(BlockRecord(digest, BlockId(40 + index), FIRST, index, group=group))
        return [PlannedRun(PEER, pack_records(records))] if records else []

    def cache(self, group: Group, index: int, block: int) -> BlockRecord:
        """vLLM has given a block this key; returns its record."""
        digest = HASHES[(index + 1) * group.scale - 1]
        self.cached[digest, group.number] = BlockId(block)
        return BlockRecord(block_hash(digest), BlockId(block), FIRST, index, group=group.number)

    def publish(self, record: BlockRecord) -> None:
        self.table.publish(pack_records([record]), bytes(8))

    def found(self, length: int = 4) -> list[tuple[Any, list[int]]]:
        epoch: Any = self
        found = self.search.longest(epoch, HASHES[:length], 0, length, 99)
        return [(run.peer, [r.block_id for r in unpack_records(run.records)]) for run in found.runs]


@pytest.fixture
def own(served: ServedNode) -> Own:
    own = Own(served.serve("own", 7, 64).table, [FULL, WINDOW])
    own.remote = {(1, index) for index in range(4)}
    return own


def test_published_blocks_of_the_own_cache_count(own: Own) -> None:
    """Where no peer has them; the run of one holder ends where another's begins."""
    for index in range(4):
        own.publish(own.cache(FULL, index, 10 + index))
    assert own.found() == [("own", [10, 11, 12, 13]), ("peer", [41, 42, 43])]
    own.remote.add((0, 1))
    runs = own.found()
    assert runs == [("own", [10, 11, 12, 13]), ("peer", [41, 42, 43])]
    own.remote.add((0, 0))
    assert own.found() == [("peer", [40, 41]), ("own", [12, 13]), ("peer", [41, 42, 43])]


def test_a_block_that_is_not_published_does_not_count(own: Own) -> None:
    """vLLM gives a block its key when it is scheduled."""
    own.publish(own.cache(FULL, 0, 10))
    own.cache(FULL, 1, 11)
    assert own.found() == [("own", [10]), ("peer", [40])]
    own.publish(gone := own.cache(FULL, 1, 11))
    assert own.found() == [("own", [10, 11]), ("peer", [40, 41])]
    own.table.retract([gone.block_id])
    assert own.found() == [("own", [10]), ("peer", [40])]


def test_a_larger_block_s_own_key_is_its_last_hash(served: ServedNode) -> None:
    own = Own(served.serve("own", 7, 64).table, [LARGE, WINDOW])
    own.remote = {(1, index) for index in range(8)}
    for index in range(4):
        own.publish(own.cache(LARGE, index, 10 + index))
    assert own.found(9) == [("own", [10, 11, 12, 13]), ("peer", [45, 46, 47])]
