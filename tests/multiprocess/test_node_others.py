"""What other engines have to do with a node's own blocks: they hold them, read them, know them."""

from __future__ import annotations

import re
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

import kvshm
from kvshm import Config, Identity, LoadState, MisuseError, Region, allocate, join
from kvshm._api import lookups
from kvshm._engine import publisher

from .joined import BLOCKS, Toys, ended
from .processes import PATIENCE_SECONDS, Node, wait_until

pytestmark = pytest.mark.multiprocess


def test_as_much_as_an_identity_may_have_can_be_sent(node: Node) -> None:
    """A coordinator takes it; one character more is refused by ``join``."""
    config = Config(run_dir=str(node.run_dir), namespace=node.namespace)
    node.coordinator()
    memory = allocate(8, config)

    def joined(length: int) -> kvshm.Node:
        who = Identity(engine="e", model="m", weights="w", settings={"s": "x" * length})
        return join(who, memory=memory, regions=[Region(0, 8, 8, 1)], block_size=1, config=config)

    with pytest.raises(MisuseError, match="give digests") as refusal:
        joined(1 << 17)
    has, most = re.findall(r"\d{4,}", str(refusal.value))
    longest = (1 << 17) - int(has) + int(most)
    with pytest.raises(MisuseError, match="give digests"):
        joined(longest + 1)
    with joined(longest) as one:
        assert one.wait_joined(PATIENCE_SECONDS), one.refusal
    memory.close()


def test_blocks_that_others_hold_are_reported_to_their_owner(toys: Toys) -> None:
    a, b, keys, _ = toys.prefix()
    assert a.node.kept(range(BLOCKS)) == []
    assert b.node.hold(keys[:4], 60.0) == 4
    assert a.node.kept(range(BLOCKS)) == [0, 1, 2, 3]
    minute: Any = Decimal(60)
    assert a.node.hold(keys[5:], minute) == 1, "its own block"
    assert a.node.kept([5, 4, 3]) == [5, 3]
    a.node.retract([3, 5])
    assert b.node.hold(keys, 0.0) == b.node.hold([bytes(32)], 60.0) == 0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(MisuseError, match="give 0 or more"):
            b.node.hold(keys, wrong)


def test_blocks_that_are_being_read_are_reported_to_their_owner(toys: Toys) -> None:
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


def test_what_an_interrupted_retract_left_is_waited_for(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    a, b, _keys, found = toys.prefix(settings={"drain_budget_ms": 1000.0})
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        b.wait_until_copying()
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "time", SimpleNamespace(sleep=interrupt))
            with pytest.raises(KeyboardInterrupt):
                a.node.retract(range(6))
        with pytest.raises(MisuseError, match="call drain"):
            a.node.publish(a.prompt(salt=b"later"), range(6))
        assert a.leases() == 6
        a.node.drain()
        assert a.leases() == 0
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
