"""What a caller has said of its own blocks, against a model: each is one thing at a time."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvshm import MisuseError, prefix_keys
from kvshm._api.own_blocks import OwnBlocks, pack_contents
from kvshm._shm.layout import RecordKind, unpack_records

BLOCKS = 4
KEYS = prefix_keys(range(4), 1)
blocks = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=3)
starts, groups = st.sampled_from([0, 0, 1, 1, 2, 3, 4, -1]), st.sampled_from([0, 0, 1, 1, 2, -1])
"""Most of them are right."""
outside = st.sampled_from([-1, BLOCKS, "0", 0.0, None])


class OwnBlocksModel(RuleBasedStateMachine):
    """Two groups; a block of the second covers two keys."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnBlocks(BLOCKS, [1, 2])
        self.published: dict[int, tuple[bytes, int]] = {}
        self.loading: set[int] = set()

    @rule(chosen=blocks, start=starts, group=groups)
    def publish(self, chosen: list[int], start: int, group: int) -> None:
        before, scale = dict(self.published), group + 1
        fits = 0 <= group <= 1 and start >= 0 and (start + len(chosen)) * scale <= len(KEYS)
        fits = fits and len({*chosen}) == len(chosen)
        upto = KEYS[: max(0, start + len(chosen)) * scale]
        wanted: dict[int, tuple[bytes, int]] = {}
        for index, block in enumerate(chosen, start):
            if fits:
                content = KEYS[(index + 1) * scale - 1], group
                known = self.published.get(block)
                fits = block not in self.loading and known in (None, content)
                wanted[block] = content
        if not fits:
            with pytest.raises(MisuseError):
                self.own.check_contents(upto, chosen, start, group)
            return
        new = self.own.check_contents(upto, chosen, start, group)
        assert new.keys() == wanted.keys() - before.keys()
        for record in unpack_records(pack_contents(new)[0]):
            assert (record.block_hash, record.group) == wanted[record.block_id]
            assert (record.kind, record.generation) == (RecordKind.PUBLISH, 0)
            assert KEYS[(record.depth + 1) * scale - 1] == record.block_hash
        self.own.add(new)
        self.published.update(wanted)

    @rule(chosen=blocks)
    def retract(self, chosen: list[int]) -> None:
        if self.loading & {*chosen}:
            with pytest.raises(MisuseError, match="cancel the load"):
                self.own.check_retractable(chosen)
            return
        gone = self.own.remove(self.own.check_retractable(chosen))
        assert sorted(gone) == sorted(self.published.keys() & {*chosen})
        for block in gone:
            del self.published[block]

    @rule(chosen=blocks, wanted=st.integers(0, 3))
    def load(self, chosen: list[int], wanted: int) -> None:
        busy = {*chosen} & {*self.published, *self.loading}
        if busy or len({*chosen}) != len(chosen) or len(chosen) != wanted:
            with pytest.raises(MisuseError):
                self.own.check_targets(chosen, wanted)
            return
        self.own.begin_load(self.own.check_targets(chosen, wanted))
        self.loading |= {*chosen}

    @rule(chosen=blocks)
    def end_load(self, chosen: list[int]) -> None:
        self.own.end_load(chosen)
        self.loading -= {*chosen}

    @rule()
    def clear(self) -> None:
        self.own.clear()
        self.published.clear()

    @rule(chosen=blocks, strange=outside)
    def no_block(self, chosen: list[int], strange: object) -> None:
        with pytest.raises(MisuseError, match=r"does not exist|give a whole number"):
            self.own.check_exist([*chosen, strange])

    @invariant()
    def it_is_as_modelled(self) -> None:
        own = {block: (c.key, c.group) for block, c in self.own.contents.items()}
        assert own == self.published
        for place in [(key, group) for key in KEYS for group in range(2)]:
            holders = {block for block, held in self.published.items() if held == place}
            found = self.own.find(*place)
            assert found in holders if holders else found is None


TestOwnBlocks = OwnBlocksModel.TestCase
TestOwnBlocks.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_the_parent_is_the_key_before() -> None:
    own = OwnBlocks(BLOCKS, [1, 2])
    for group, scale in ((0, 1), (1, 2)):
        new = own.check_contents(KEYS[: 2 * scale], [0], 1, group)
        assert pack_contents(new)[1] == KEYS[scale - 1][:8]
    assert pack_contents(own.check_contents(KEYS[:1], [0], 0, 0))[1] == bytes(8)
    with pytest.raises(MisuseError, match="give the keys up to the last block"):
        own.check_contents(KEYS, [0], 0, 0)
