"""What other engines have to do with a node's own blocks: they hold them, read them, know them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from kvshm import LoadState, MisuseError
from kvshm._api import lookups

from .joined import BLOCKS, Toys, ended
from .processes import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.multiprocess


def test_blocks_that_others_hold_are_told_to_their_owner(toys: Toys) -> None:
    a, b, keys, _ = toys.prefix()
    assert a.node.kept(range(BLOCKS)) == []
    assert b.node.hold(keys[:4], 60.0) == 4
    assert a.node.kept(range(BLOCKS)) == [0, 1, 2, 3]
    assert a.node.hold(keys[5:], 60.0) == 1, "its own block"
    assert a.node.kept([5, 4, 3]) == [5, 3]
    a.node.retract([3, 5])
    assert b.node.hold(keys, 0.0) == b.node.hold([bytes(32)], 60.0) == 0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(MisuseError, match=r"give (0 or more|seconds)"):
            b.node.hold(keys, wrong)


def test_blocks_that_are_being_read_are_told_to_their_owner(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    a.compute(keys, range(6))
    found = b.node.wait_for(keys[:2], PATIENCE_SECONDS)
    with b.copies_held_up():
        load = b.node.load(found, [8, 9])
        assert a.node.kept(range(BLOCKS)) == [0, 1]
    assert ended(load).state is LoadState.DONE
    wait_until(lambda: not a.node.kept(range(BLOCKS)), "the leases are given back")


def test_a_second_retract_waits_for_what_the_first_did_not(toys: Toys) -> None:
    """Else its caller writes while another engine reads, which accepts what it has read."""
    a, b, _keys, found = toys.prefix()
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        b.wait_until_copying()
        a.node.retract(range(6), wait=False)
        assert a.leases() == 6
        a.node.retract([5])
        assert a.leases() == 0
    assert (ended(load).state, load.good) == (LoadState.FAILED, 0)


def test_other_calls_go_on_while_a_retract_waits(toys: Toys) -> None:
    """But none of them gives the blocks other contents while they are read."""
    a = toys.join("a", patient=True)
    b = toys.join("b")
    keys, others, more = (a.prompt(salt=salt) for salt in (b"", b"others", b"more"))
    a.compute(keys, range(6))
    b.compute(others, range(10, 16))
    found, theirs = b.node.wait_for(keys, PATIENCE_SECONDS), a.node.wait_for(others)
    with ThreadPoolExecutor() as threads, b.copies_held_up():
        load = b.node.load(found, range(6))
        b.wait_until_copying()
        first = threads.submit(a.node.retract, range(6))
        wait_until(lambda: a.node._draining, "it waits for the reader")
        waiting = [
            first,
            threads.submit(a.node.retract, [5]),
            threads.submit(a.node.drain),
            (loading := threads.submit(a.node.load, theirs, range(6))),
            (refused := threads.submit(a.node.load, a.node.lookup(others), range(20, 26))),
        ]
        assert a.compute(more, range(20, 26)) == 6
        with pytest.raises(MisuseError, match="block 0 may still be read"):
            a.node.publish(keys, range(6))
        a.node.retract([25], wait=False)
        assert wait(waiting[:-1], timeout=0.3).done == set()
        assert a.leases() == 6
    assert (ended(load).state, b.holds(range(6), keys)) == (LoadState.DONE, [True] * 6)
    assert ended(loading.result()).state is LoadState.DONE
    assert a.holds(range(6), others) == [True] * 6
    assert first.result() is None
    with pytest.raises(MisuseError, match="block 20 is published"):
        refused.result()


@pytest.mark.parametrize("end", ["reset", "close"])
def test_a_retract_that_waits_ends_with_its_epoch(toys: Toys, end: str) -> None:
    a = toys.join("a", patient=True)
    b = toys.join("b")
    keys = a.prompt()
    a.compute(keys, range(6))
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    with ThreadPoolExecutor() as threads, b.copies_held_up():
        load = b.node.load(found, range(6))
        b.wait_until_copying()
        retracting = threads.submit(a.node.retract, range(6))
        wait_until(lambda: a.node._draining, "it waits for the reader")
        getattr(a.node, end)()
        retracting.result(PATIENCE_SECONDS)
    assert (ended(load).state, load.good) == (LoadState.FAILED, 0)


def test_what_is_shown_already_gets_no_other_checksum(toys: Toys) -> None:
    """The old one tells that the block was changed."""
    a, b, keys, _ = toys.prefix(settings={"verify": True})
    a.node.pause()
    a.compute(a.prompt(salt=b"later"), range(6, 12))
    a.write(2, keys[0])
    a.node.resume()
    assert a.node.stats()["published"] == 12
    load = ended(b.node.load(b.node.lookup(keys), range(6)))
    assert (load.state, load.good) == (LoadState.FAILED, 2)
    assert b.node.stats()["mismatched"] == 1


def test_blocks_that_others_have_here_and_there(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "_AT_ONCE", 4)
    a, b = toys.pair()
    keys = a.prompt(BLOCKS)
    there = [block for block in range(BLOCKS) if block % 3 == 0 or 10 < block < 20]
    for block in there:
        a.write(block, keys[block])
        a.node.publish(keys[: block + 1], [block], block)
    held = ["peer" if block in there else "" for block in range(BLOCKS)]
    wait_until(lambda: b.node.contains(keys) == held, "all are known")
