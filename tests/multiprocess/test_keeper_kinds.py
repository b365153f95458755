"""A keeper of engines of several kinds: its memory moves between them, never under an importer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvshm import LoadState

from .joined import Toy, Toys, ended, served
from .keepers import WIDE, Keeper, prompt
from .processes import PATIENCE_SECONDS, Node, wait_until

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def place() -> Iterator[Node]:
    """A node of its own: a keeper keeps blocks of all engines there."""
    with served() as node:
        yield node


def test_engines_of_several_kinds_share_its_memory(place: Node, toys: Toys) -> None:
    """The one whose engines have gone gives way first, with all it has."""
    keeper = Keeper(place, 12, "--give-way-after", "0")
    a, other = toys.join("a"), toys.join("other", kind="another")
    ours, theirs = prompt(a, b"1"), prompt(other, b"2")
    a.compute(ours, range(6))
    other.compute(theirs, range(6))
    keeper.wait_for(ours)
    keeper.wait_for(theirs)
    other.node.close()
    more = prompt(a, b"3", 4)
    a.compute(more, range(6, 10))
    keeper.process.wait_out(lambda line: line.startswith("gave way: m,"))
    again = prompt(a, b"4", 2)
    a.compute(again, range(10, 12))
    keeper.wait_for(again)
    assert keeper.has(ours) == [True] * 6
    assert not any(keeper.has(theirs))


def test_memory_moves_to_engines_of_another_kind_block_by_block(place: Node, toys: Toys) -> None:
    a = toys.join("a")
    keeper, ours = kept_by(place, a, 6)
    b, c = toys.join("b", kind="another"), toys.join("c", kind="another")
    theirs = prompt(b, b"2", 2)
    d = toys.join("d")
    a.node.retract(range(6))
    wait_until(lambda: d.node.lookup(ours).length == 6, "another engine finds them")
    for toy in (b, c):
        toy.compute(theirs, range(2))
    keeper.wait_for(theirs)
    assert keeper.has(ours) == [True] * 4 + [False] * 2
    wait_until(lambda: d.node.lookup(ours).length == 4, "it hears what has gone")


def test_a_ninth_kind_waits_until_another_one_gives_way(place: Node, toys: Toys) -> None:
    keeper = Keeper(place, 1000, "--give-way-after", "1000")
    for number in range(8):
        toy = toys.join(f"{number}", kind=f"{number}")
        keys = prompt(toy, b"%d" % number)
        toy.compute(keys, range(6))
        keeper.wait_for(keys)
        toy.node.close()
    toys.join("8", kind="8")
    keeper.process.wait_out(lambda line: line.startswith("keeping nothing of engine 8"))
    assert keeper.metric("published_blocks") == 8 * 6


def owners_of(toy: Toy, keys: list[bytes]) -> list[str]:
    return [owner.name.partition("-")[0] for owner in toy.node.lookup(keys).owners]


def kept_by(place: Node, toy: Toy, blocks: int) -> tuple[Keeper, list[bytes]]:
    """A keeper with room for so many blocks, which has a prompt of 6 of this engine's."""
    keeper, keys = Keeper(place, blocks), prompt(toy, b"1")
    toy.compute(keys, range(6))
    keeper.wait_for(keys)
    return keeper, keys


def use_twice(toys: Toys, blocks: int) -> tuple[Toy, list[bytes]]:
    """Two engines of another kind have a prompt."""
    pair = toys.join("b", kind="another"), toys.join("c", kind="another")
    keys = prompt(pair[0], b"2", blocks)
    for toy in pair:
        toy.compute(keys, range(blocks))
    return pair[0], keys


def test_memory_that_is_empty_is_for_engines_of_any_kind(place: Node, toys: Toys) -> None:
    """An engine that goes on has withdrawn all that had filled it."""
    a = toys.join("a")
    keeper, ours = kept_by(place, a, 6)
    a.node.reset()
    wait_until(lambda: not any(keeper.has(ours)), "it has dropped them")
    _, theirs = use_twice(toys, 6)
    keeper.wait_for(theirs)


def test_memory_does_not_move_while_an_importer_reads_it(place: Node, toys: Toys) -> None:
    """A block of two pages takes the place of another one, not of two of which one is read."""
    a, b = toys.pair()
    keeper, ours = kept_by(place, a, 8)
    a.node.close()
    wide = [toys.join(name, regions=WIDE, kind="wide") for name in ("wide", "wider")]
    first, second = (prompt(wide[0], salt, 1) for salt in (b"2", b"3"))
    for toy in wide:
        toy.node.publish(first, [0])
    keeper.wait_for(first)
    with b.copies_held_up():
        load = b.node.load(b.node.wait_for(ours[:5], PATIENCE_SECONDS), range(20, 25))
        b.wait_until_copying()
        for toy in wide:
            toy.node.retract([0])
            toy.node.publish(second, [0])
        keeper.wait_for(second)
    assert ended(load).state is LoadState.DONE
    assert b.holds(range(20, 25), ours[:5]) == [True] * 5


def test_what_is_read_while_its_place_moves_is_discarded(place: Node, toys: Toys) -> None:
    """Withdrawn in the middle of a copy; then engines of another kind need the place."""
    a, b = toys.pair()
    keeper, ours = kept_by(place, a, 6)
    with b.copies_held_up():
        a.node.retract(range(6))
        wait_until(lambda: owners_of(b, ours) == ["keeper"], "the keeper alone has it")
        load = b.node.load(b.node.lookup(ours), range(20, 26))
        b.wait_until_copying()
        a.node.reset()
        wait_until(lambda: not any(keeper.has(ours)), "it has dropped them")
        _, theirs = use_twice(toys, 6)
        keeper.wait_for(theirs)
    ended(load)
    right = b.holds(range(20, 26), ours)
    assert all(right[: load.good])
    assert load.good == 0
