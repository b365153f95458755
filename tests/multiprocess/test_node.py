"""A node's loads, and what it refuses: whatever a caller does, blocks are his again and no lease is
left (the fixture looks)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvshm import LoadState, MisuseError
from kvshm._engine import load_planner
from kvshm.config import Fault

from .joined import BLOCKS, Toy, Toys, ended
from .processes import PATIENCE_SECONDS, Node, wait_until

pytestmark = pytest.mark.multiprocess


def test_blocks_are_found_and_loaded(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    assert a.compute(keys, range(6)) == 6
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    assert (found.start, found.length, found.num_blocks) == (0, 6, 6)
    assert found.lengths == (1, 2, 3, 4, 5, 6)
    (owner,) = found.owners
    epoch = a.table.epoch
    assert owner == ("a", epoch, 0, 0, 6, "posix_shm", found.nbytes)
    load = ended(b.node.load(found, range(20, 26)))
    assert (load.state, load.good, load.failed) == (LoadState.DONE, 6, ())
    assert b.holds(range(20, 26), keys) == [True] * 6
    assert b.node.contains(keys) == ["peer"] * 6
    assert a.node.contains(keys) == ["own"] * 6
    assert b.node.publish(keys, range(20, 26)) == 6
    assert b.node.contains(keys) == ["own"] * 6


def test_only_what_is_behind_the_start_is_found(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    a.compute(keys, range(5))
    found = b.node.wait_for(keys[:5], PATIENCE_SECONDS, start=2)
    assert (found.start, found.length, found.lengths) == (2, 5, (3, 4, 5))
    longer = b.node.lookup(keys, start=2)
    assert (longer.length, longer.owners[0][2:5]) == (5, (0, 2, 3))
    assert not b.node.lookup(keys, start=5)
    assert not b.node.lookup(keys, start=6)
    load = ended(b.node.load(longer, [9, 8, 7]))
    assert b.holds([9, 8, 7], keys[2:5]) == [True] * 3
    assert load.state is LoadState.DONE


class Scene:
    """One engine with blocks 0 to 5 published, another with a load under way into blocks 8 to 13
    and blocks 0 and 1 published; blocks from 20 on are free."""

    def __init__(self, a: Toy, b: Toy) -> None:
        self.a, self.b = a, b
        self.keys, self.own = a.prompt(), a.prompt(2, b"own")
        a.compute(self.keys, range(6))
        b.compute(self.own, range(2))
        self.found = b.node.wait_for(self.keys, PATIENCE_SECONDS)
        self.load = b.node.load(b.node.lookup(self.keys), range(8, 14))

    def state(self) -> Any:
        node = self.b.node
        slots = [slot[:3] for slot in self.b.table.slots()]
        return (
            [(s.generation, s.state) for s in self.a.table.slots()],
            slots,
            dict(node._own.contents),
            set(node._own._loading),
            node._loads._number,
            self.found.loaded,
            self.load.state,
        )


MISUSES: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "too few blocks": (lambda s: s.b.node.load(s.found, range(20, 25)), "5 blocks are given"),
    "too many blocks": (lambda s: s.b.node.load(s.found, range(20, 27)), "7 blocks are given"),
    "a block twice": (lambda s: s.b.node.load(s.found, [20, 21, 22, 23, 24, 20]), "give each once"),
    "a block too far": (
        lambda s: s.b.node.load(s.found, range(BLOCKS - 5, BLOCKS + 1)),
        "blocks 0 to 31",
    ),
    "block -1": (lambda s: s.b.node.load(s.found, range(-1, 5)), "does not exist"),
    "no block": (lambda s: s.b.node.load(s.found, ["20"] * 6), "give a whole number"),
    "onto published": (lambda s: s.b.node.load(s.found, range(1, 7)), "retract it first"),
    "onto loading": (lambda s: s.b.node.load(s.found, range(13, 19)), "wait for that"),
    "another's": (lambda s: s.a.node.load(s.found, range(20, 26)), "look the keys up on this one"),
    "nothing found": (lambda s: s.b.node.load(s.b.node.lookup([]), ()), "ask `if found`"),
    "publish loading": (lambda s: s.b.node.publish(s.keys[:1], [8]), "wait for that"),
    "publish as another": (lambda s: s.b.node.publish(s.keys[:2], [20, 0]), "retract it before"),
    "publish one as two": (lambda s: s.b.node.publish(s.keys[:2], [20, 20]), "give each once"),
    "publish too many": (
        lambda s: s.b.node.publish(s.keys, range(20, 27)),
        "index of the first block",
    ),
    "publish behind": (lambda s: s.b.node.publish(s.keys, [20], 6), "index of the first block"),
    "publish before": (lambda s: s.b.node.publish(s.keys, [20], -1), "not tokens"),
    "publish in no group": (lambda s: s.b.node.publish(s.keys[:1], [20], 0, 1), "no group 1"),
    "publish short keys": (lambda s: s.b.node.publish([b"k"], [20]), "keys.. and prefix_keys"),
    "publish text": (lambda s: s.b.node.publish(["k" * 32], [20]), "keys.. and prefix_keys"),
    "publish nowhere": (lambda s: s.b.node.publish(s.keys[:1], [BLOCKS]), "does not exist"),
    "retract loading": (lambda s: s.b.node.retract([0, 8]), "cancel the load"),
    "retract nowhere": (lambda s: s.b.node.retract([0, BLOCKS]), "does not exist"),
    "look up text": (lambda s: s.b.node.lookup("k" * 32), "give a list of them"),
    "look up short keys": (lambda s: s.b.node.lookup([*s.keys, b"k"]), "keys.. and prefix_keys"),
    "look up behind": (lambda s: s.b.node.lookup(s.keys, 7), "not tokens"),
    "look up before": (lambda s: s.b.node.lookup(s.keys, -1), "not tokens"),
    "wait for text": (lambda s: s.b.node.wait_for(["k"]), "keys.. and prefix_keys"),
    "wait before": (lambda s: s.b.node.wait_for(s.keys, None, -1), "not tokens"),
    "wait behind": (lambda s: s.b.node.wait_for(s.keys, None, 7), "not tokens"),
    "wait before, asyncio": (
        lambda s: asyncio.run(s.b.node.wait_for_async(s.keys, None, -1)),
        "not tokens",
    ),
    "contains text": (lambda s: s.b.node.contains(["k"]), "keys.. and prefix_keys"),
    "contains in no group": (lambda s: s.b.node.contains(s.keys, -1), "no group -1"),
    "failed so early": (lambda s: s.load.failed, "until it has ended"),
    "reset to nobody": (
        lambda s: s.b.node.reset(type(s.b.node._identity)(engine="", model="m", weights="w")),
        "give text",
    ),
}


@pytest.fixture(scope="module")
def scene(place: Node) -> Iterator[Scene]:
    toys = Toys(place, "scene")
    try:
        a, b = toys.pair()
        with b.copies_held_up():
            scene = Scene(a, b)
            yield scene
            assert scene.load.poll() is LoadState.PENDING
    finally:
        toys.close()


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_and_changes_nothing(scene: Scene, name: str) -> None:
    call, reported = MISUSES[name]
    before = scene.state()
    with pytest.raises(MisuseError, match=reported):
        call(scene)
    assert scene.state() == before
    assert scene.a.leases() == 6  # those of the load under way


def test_a_found_can_be_loaded_once(toys: Toys) -> None:
    _a, b, _keys, found = toys.prefix()
    with pytest.raises(MisuseError, match="5 blocks are given"):
        b.node.load(found, range(5))
    assert not found.loaded  # what was refused may be tried again
    load = ended(b.node.load(found, range(6)))
    with pytest.raises(MisuseError, match="look the keys up again"):
        b.node.load(found, range(10, 16))
    assert (load.state, found.loaded) == (LoadState.DONE, True)


def test_a_found_loads_nothing_after_five_seconds(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    a.compute(keys, range(6))
    planner = b.node._halves.cache.planner
    found, now = b.node.wait_for(keys, PATIENCE_SECONDS), planner._clock
    planner._clock = lambda: now() + load_planner.PLAN_SECONDS
    load = ended(b.node.load(found, range(6)))
    assert (load.state, load.good, load.failed) == (LoadState.FAILED, 0, tuple(range(6)))
    planner._clock = now
    assert ended(b.node.load(b.node.lookup(keys), range(6))).state is LoadState.DONE


def test_blocks_that_are_gone_fail_from_there_on(toys: Toys) -> None:
    a, b, keys, found = toys.prefix()
    a.node.retract([3])
    load = ended(b.node.load(found, range(10, 16)))
    assert (load.state, load.good, load.failed) == (LoadState.FAILED, 3, (13, 14, 15))
    assert b.holds(range(10, 13), keys[:3]) == [True] * 3


def test_blocks_that_are_reused_in_the_copy_fail(toys: Toys) -> None:
    """The exporter waits its drain budget for the copy, which is held up, and writes the block."""
    a, b, keys, found = toys.prefix()
    with b.copies_held_up():
        load = b.node.load(found, range(10, 16))
        assert load.wait(0) is LoadState.PENDING
        b.wait_until_copying()
        assert a.leases() == 6
        a.node.retract([4])
        a.write(4, b"others")
        assert a.leases() == 5
    assert (ended(load).state, load.good, load.failed) == (LoadState.FAILED, 4, (14, 15))
    assert b.holds(range(10, 14), keys[:4]) == [True] * 4
    assert b.node.stats()["recheck_failed"] == 1


@pytest.mark.parametrize("fault", Fault)
def test_wrong_copies_are_noticed(toys: Toys, fault: Fault) -> None:
    a = toys.join("a", settings={"verify": True})
    b = toys.join("b", settings={"verify": True, "fault": fault})
    keys = a.prompt()
    a.compute(keys, range(6))
    load = ended(b.node.load(b.node.wait_for(keys, PATIENCE_SECONDS), range(6)))
    assert (load.state, load.good) == (LoadState.FAILED, 0)
    assert b.node.stats()["mismatched"] > 0


def test_a_block_that_may_still_be_read_cannot_be_published_anew(toys: Toys) -> None:
    """It was retracted without waiting: whoever wrote it since has written under a reader."""
    a, b, keys, found = toys.prefix()
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        b.wait_until_copying()
        a.node.retract(range(6), wait=False)
        assert a.leases() == 6
        with pytest.raises(MisuseError, match=r"call drain\(\) before you write it"):
            a.node.publish(keys[:1], [0])
        a.node.drain()
        assert a.leases() == 0
        assert a.node.publish(keys[:1], [0]) == 1
    assert (ended(load).state, load.good) == (LoadState.FAILED, 0)


def test_blocks_are_drained_before_a_load_fills_them(toys: Toys) -> None:
    a, b = toys.pair()
    keys, others = a.prompt(), a.prompt(6, b"others")
    a.compute(keys, range(6))
    b.compute(others, range(6))
    found, theirs = (
        b.node.wait_for(keys, PATIENCE_SECONDS),
        a.node.wait_for(others, PATIENCE_SECONDS),
    )
    with a.copies_held_up():
        reading = a.node.load(theirs, range(8, 14))
        a.wait_until_copying()
        b.node.retract(range(6), wait=False)
        assert ended(b.node.load(found, range(6))).state is LoadState.DONE
    assert (ended(reading).state, reading.good) == (LoadState.FAILED, 0)


# -- ends of loads


def test_a_cancelled_load_ends_and_delivers_nothing(toys: Toys) -> None:
    a, b, keys, found = toys.prefix()
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        load.cancel()
        load.cancel()
        ended(load)
    assert (load.state, load.good, load.failed) == (LoadState.FAILED, 0, tuple(range(6)))
    # The peer was not attached yet, so another thread gives the leases back.
    wait_until(lambda: a.leases() == 0, "the leases are given back")
    assert ended(b.node.load(b.node.lookup(keys), range(6))).state is LoadState.DONE


def test_a_load_that_has_ended_cannot_be_cancelled(toys: Toys) -> None:
    _a, b, _keys, found = toys.prefix()
    load = ended(b.node.load(found, range(6)))
    load.cancel()
    assert (load.poll(), load.good) == (LoadState.DONE, 6)


NEXT: dict[str, Callable[[Toy, list[bytes]], Any]] = {
    "publish": lambda b, keys: b.node.publish(keys, range(8, 14)),
    "retract": lambda b, keys: b.node.retract(range(8, 14)),
    "load": lambda b, keys: ended(b.node.load(b.node.lookup(keys), range(8, 14))),
}


@pytest.mark.parametrize("then", NEXT)
def test_blocks_of_a_load_that_no_one_watched_come_back(toys: Toys, then: str) -> None:
    _a, b, keys, found = toys.prefix()
    again = b.node.lookup(keys)
    with b.copies_held_up():
        b.node.load(found, range(8, 14))
    wait_until(lambda: len(b.node._halves.ranks.halves[0]._reports) > 0, "the load ends")
    if then == "load":
        b.node.load(again, range(8, 14)).wait(PATIENCE_SECONDS)
    else:
        NEXT[then](b, keys)
    assert b.node._own._loading == set()


def test_a_wait_ends_with_its_time(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    assert not b.node.wait_for(keys, 0)
    assert not b.node.wait_for(keys, 0.001)
    a.compute(keys, range(6))
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        assert load.wait(0) is LoadState.PENDING
        assert load.wait(0.001) is LoadState.PENDING
    assert load.wait() is LoadState.DONE


def test_any_thread_may_wait(toys: Toys) -> None:
    a, b = toys.pair()
    keys, found = a.prompt(), []
    waiting = [
        threading.Thread(target=lambda: found.append(b.node.wait_for(keys, PATIENCE_SECONDS)))
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    a.compute(keys, range(6))
    for thread in waiting:
        thread.join()
    assert [one.length for one in found] == [6, 6, 6]
