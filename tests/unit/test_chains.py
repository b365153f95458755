"""Chains put together again from single slots."""

from __future__ import annotations

from kvshm._base.ids import BlockHash, Generation
from kvshm._shm.layout import SlotState
from kvshm._shm.slot_table import Slot
from kvshm.tools.chains import find_chains, tag_of


def hash_of(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(32, b"\0"))


def slots_of(*blocks: tuple[int, str, str, int]) -> dict[int, Slot]:
    return {
        block: Slot(
            Generation(0), SlotState.READY, 0, hash_of(name), tag_of(hash_of(parent)), depth, 0
        )
        for block, name, parent, depth in blocks
    }


def test_chains_share_their_prefix_and_end_at_their_tips():
    slots = slots_of((9, "c", "b", 2), (1, "a", "", 0), (2, "b", "a", 1), (3, "x", "a", 1))
    found = [(chain.tip, chain.length, chain.complete) for chain in find_chains(slots)]
    assert found == [(9, 3, True), (3, 2, True)]


def test_a_chain_whose_beginning_is_gone_is_incomplete():
    found = find_chains(slots_of((5, "e", "d", 4), (6, "f", "e", 5)))
    assert [(chain.tip, chain.length, chain.complete) for chain in found] == [(6, 2, False)]


def test_two_blocks_of_one_hash_are_two_tips_or_none():
    twins = [(1, "a", "", 0), (2, "b", "a", 1), (3, "b", "a", 1)]
    assert [chain.tip for chain in find_chains(slots_of(*twins))] == [2, 3]
    followed = find_chains(slots_of(*twins, (4, "c", "b", 2)))
    assert [(chain.tip, chain.length) for chain in followed] == [(4, 3)]


def test_a_chain_has_blocks_of_one_group():
    slots = slots_of((1, "a", "", 0), (2, "b", "a", 1), (3, "a", "", 0), (4, "c", "b", 2))
    slots |= {block: slots[block]._replace(group=1) for block in (3, 4)}
    found = [(chain.tip, chain.length, chain.group) for chain in find_chains(slots)]
    assert found == [(2, 2, 0), (3, 1, 1), (4, 1, 1)]


def test_chains_with_a_wanted_block_in_them_are_found_by_it():
    slots = slots_of((1, "a", "", 0), (2, "b", "a", 1), (3, "x", "", 0))
    assert [c.tip for c in find_chains(slots, lambda block, slot: block == 1)] == [2]
