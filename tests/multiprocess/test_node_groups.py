"""A node with several KV cache groups: each length needs its own blocks of each of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvshm import Group, LoadState, MisuseError

from .joined import TOKENS, Toy, Toys, content, ended
from .processes import PATIENCE_SECONDS

pytestmark = pytest.mark.multiprocess

WINDOW = (Group(0, TOKENS), Group(1, TOKENS, window=2 * TOKENS))
LARGE = (Group(0, TOKENS), Group(1, 2 * TOKENS, scale=2))


def compute(
    toy: Toy, keys: Sequence[bytes], group: int, first: int, blocks: Sequence[int], scale: int = 1
) -> None:
    """Write blocks of a group, from block ``first`` of its table on, and publish them."""
    for index, block in enumerate(blocks, first):
        toy.write(block, keys[(index + 1) * scale - 1], b"group %d" % group)
    upto = keys[: (first + len(blocks)) * scale]
    assert toy.node.publish(upto, blocks, first, group) == len(blocks)


def holds(toy: Toy, keys: Sequence[bytes], group: int, first: int, blocks: Sequence[int]) -> bool:
    pairs = enumerate(blocks, first)
    return all(toy.read(b) == content(keys[i], b"group %d" % group) for i, b in pairs)


@pytest.fixture
def window(toys: Toys) -> tuple[Toy, Toy, list[bytes]]:
    a, b = toys.pair(groups=WINDOW)
    keys = a.prompt()
    compute(a, keys, 1, 1, [11, 12])
    compute(a, keys, 1, 4, [14, 15])
    compute(a, keys, 0, 0, range(6))
    assert b.node.wait_for(keys, PATIENCE_SECONDS).length == 6
    return a, b, keys


def test_a_prefix_ends_where_each_group_has_its_window(
    window: tuple[Toy, Toy, list[bytes]],
) -> None:
    a, b, keys = window
    found = b.node.lookup(keys)
    assert (found.length, found.lengths) == (6, (3, 6))
    assert (found.parts, found.num_blocks) == (((0, 0, 6), (1, 4, 2)), 8)
    assert [owner[1:5] for owner in found.owners] == [
        (a.table.epoch, 0, 0, 6),
        (a.table.epoch, 1, 4, 2),
    ]
    shorter = b.node.lookup(keys[:5])
    assert (shorter.length, shorter.lengths, shorter.num_blocks) == (3, (3,), 5)
    assert shorter.parts == ((0, 0, 3), (1, 1, 2))
    behind = b.node.lookup(keys, start=3)
    assert (behind.length, behind.lengths) == (6, (6,))
    assert behind.parts == ((0, 3, 3), (1, 4, 2))
    assert not b.node.lookup(keys[:2])


def test_blocks_are_loaded_in_the_order_of_the_parts(
    window: tuple[Toy, Toy, list[bytes]],
) -> None:
    _, b, keys = window
    load = ended(b.node.load(b.node.lookup(keys), range(20, 28)))
    assert (load.state, load.good, load.failed) == (LoadState.DONE, 8, ())
    assert holds(b, keys, 0, 0, range(20, 26))
    assert holds(b, keys, 1, 4, range(26, 28))
    with pytest.raises(MisuseError, match="6 blocks are given to load 8 into"):
        b.node.load(b.node.lookup(keys), range(6))


@pytest.mark.parametrize("gone", [2, 15], ids=["of full attention", "of the window"])
def test_of_several_groups_all_blocks_are_good_or_none(
    window: tuple[Toy, Toy, list[bytes]], gone: int
) -> None:
    a, b, keys = window
    found = b.node.lookup(keys)
    a.node.retract([gone])
    load = ended(b.node.load(found, range(20, 28)))
    assert (load.state, load.good, load.failed) == (LoadState.FAILED, 0, tuple(range(20, 28)))
    assert a.leases() == 0


@pytest.mark.parametrize("gone", [2, 15], ids=["of full attention", "of the window"])
def test_a_block_that_is_reused_in_the_copy_fails_all(
    window: tuple[Toy, Toy, list[bytes]], gone: int
) -> None:
    a, b, keys = window
    with b.copies_held_up():
        load = b.node.load(b.node.lookup(keys), range(20, 28))
        b.wait_until_copying()
        a.node.retract([gone])
        a.write(gone, b"others")
    assert (ended(load).state, load.good) == (LoadState.FAILED, 0)


def test_keys_and_groups_name_blocks_together(window: tuple[Toy, Toy, list[bytes]]) -> None:
    a, b, keys = window
    assert a.node.contains(keys, group=1) == ["", "own", "own", "", "own", "own"]
    assert b.node.contains(keys, group=1) == ["", "peer", "peer", "", "peer", "peer"]
    assert b.node.contains(keys) == ["peer"] * 6
    with pytest.raises(MisuseError, match="another key"):
        a.node.publish(keys[:1], [0], 0, group=1)
    with pytest.raises(MisuseError, match="there is no group 2"):
        a.node.publish(keys[:1], [20], 0, group=2)


def test_a_block_may_cover_several_keys(toys: Toys) -> None:
    a, b = toys.pair(groups=LARGE)
    keys = a.prompt()
    compute(a, keys, 0, 0, range(6))
    compute(a, keys, 1, 0, [10, 11], scale=2)
    found = b.node.wait_for(keys[:4], PATIENCE_SECONDS)
    assert (found.length, found.lengths) == (4, (2, 4))
    assert found.parts == ((0, 0, 4), (1, 0, 2))
    assert b.node.lookup(keys).length == 4
    assert b.node.contains(keys, group=1) == ["", "peer", "", "peer", "", ""]
    with pytest.raises(MisuseError, match="give the keys up to the last block"):
        a.node.publish(keys, [12, 13], 2, group=1)
    load = ended(b.node.load(b.node.lookup(keys), range(20, 26)))
    assert load.state is LoadState.DONE
    assert holds(b, keys, 0, 0, range(20, 24))
    assert holds(b, [keys[1], keys[3]], 1, 0, [24, 25])


def test_a_key_that_no_prefix_can_reach_is_not_waited_for(toys: Toys) -> None:
    """The last one: draft layers need the block behind a prefix, too."""
    drafting = [Group(0, TOKENS, ahead=1), Group(1, TOKENS, ahead=1)]
    a, b = toys.pair(groups=drafting)
    keys = a.prompt()
    compute(a, keys, 0, 0, range(6))
    compute(a, keys, 1, 0, range(10, 16))
    assert b.node.wait_for(keys).length == 5


@pytest.mark.parametrize(
    ("groups", "start"),
    [((Group(0, 2 * TOKENS, scale=2), Group(1, TOKENS)), 3), ((Group(0, TOKENS, chunk=8),), 0)],
    ids=["start within a block", "chunk's end"],
)
def test_where_nothing_can_be_restored_no_one_waits(
    toys: Toys, groups: Sequence[Group], start: int
) -> None:
    node = toys.join("a", groups=groups).node
    assert not node.wait_for(node.keys(range(4 * TOKENS)), start=start)


def test_engines_with_other_groups_do_not_share(toys: Toys) -> None:
    a, b = toys.join("a", groups=WINDOW), toys.join("b", groups=LARGE)
    c = toys.join("c", groups=WINDOW)
    keys = a.prompt()
    compute(a, keys, 0, 0, range(6))
    compute(a, keys, 1, 0, range(10, 16))
    assert c.node.wait_for(keys, PATIENCE_SECONDS).length == 6
    assert (b.node.stats()["peers"], b.node.lookup(keys).length) == (0, 0)
