"""Epochs and nodes that begin late, end early, or belong to another process: what was published is
readable then and only then, and loads end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from kvshm import Found, Identity, Load, LoadState, MisuseError
from kvshm._base.ids import Epoch
from kvshm._base.rundir import list_sockets
from kvshm._engine.roster_handler import RosterHandler
from kvshm._rank.rank_half import RankHalf

from .joined import Toy, Toys, ended
from .processes import PATIENCE_SECONDS, Node, fresh_node, wait_until
from .surface_contents import keys_of
from .surface_model import Modelled
from .surface_world import Peer

pytestmark = pytest.mark.multiprocess


def test_what_is_published_before_there_is_a_coordinator_is_readable_later() -> None:
    with fresh_node() as place:
        toys = Toys(place, "early")
        try:
            a, b = toys.begin("a"), toys.begin("b")
            keys = a.prompt()
            assert a.compute(keys, range(6)) in (0, 6)  # the epoch may have begun
            a.node.retract([5])
            assert not a.node.wait_joined(0)
            assert a.node.contains(keys) == ["own"] * 5 + [""]
            place.coordinator()
            found = b.node.wait_for(keys[:5], PATIENCE_SECONDS)
            assert ended(b.node.load(found, range(5))).state is LoadState.DONE
            assert b.holds(range(5), keys[:5]) == [True] * 5
            assert b.node.lookup(keys).length == 5
        finally:
            toys.close()


def test_what_is_published_before_the_epoch_is_open_is_readable_later(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, go_on, original = threading.Event(), threading.Event(), RankHalf.open_epoch

    def slowly(rank: RankHalf, epoch: Epoch) -> None:
        opening.set()
        assert go_on.wait(PATIENCE_SECONDS)
        original(rank, epoch)

    b = toys.join("b")
    monkeypatch.setattr(RankHalf, "open_epoch", slowly)
    a = toys.begin("a")
    keys = a.prompt()
    assert opening.wait(PATIENCE_SECONDS)
    assert a.compute(keys, range(6)) == 0
    a.node.retract([5])
    assert not a.node.joined
    assert (a.node.contains(keys), a.node.stats()["published"]) == (["own"] * 5 + [""], 0)
    assert not a.node.lookup(keys)
    go_on.set()
    assert b.node.wait_for(keys[:5], PATIENCE_SECONDS).length == 5
    assert b.node.lookup(keys).length == 5


@pytest.mark.timeout(20)
def test_no_one_waits_for_what_the_coordinator_refuses(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has eight engines in a roster at most."""
    others = [toys.join(f"{number}") for number in range(8)]
    refused = toys.begin("one more")
    reason = "has 8 engines here already; leave with epochs that have ended; give more engines"
    for _ in range(2):
        assert not refused.node.wait_joined()
        assert reason in refused.node.refusal
        assert not refused.node.wait_for(refused.prompt())
    assert not asyncio.run(refused.node.wait_joined_async())
    assert not asyncio.run(refused.node.wait_for_async(refused.prompt()))
    others[0].close()
    handle, go_on = RosterHandler._handle_reply, threading.Event()

    def handle_late(self: RosterHandler, *about: Any) -> None:
        go_on.wait(PATIENCE_SECONDS)
        handle(self, *about)

    monkeypatch.setattr(RosterHandler, "_handle_reply", handle_late)
    refused.node.reset()
    assert refused.node.wait_joined(), "it is another epoch, which nobody has refused"
    assert refused.node.refusal == ""
    go_on.set()


def test_a_paused_node_finds_and_publishes_nothing(toys: Toys) -> None:
    a, b = toys.pair()
    keys = a.prompt()
    assert a.compute(keys, range(2)) == 2
    assert b.node.wait_for(keys[:2], PATIENCE_SECONDS).length == 2
    a.node.pause()
    b.node.pause()
    assert a.compute(keys, range(2, 6), start=2) == 0
    assert not b.node.lookup(keys)
    assert not b.node.wait_for(keys, 0.001)
    assert b.node.contains(keys) == [""] * 6
    assert [slot.state.name for slot in list(a.table.slots())[:6]] == ["READY"] * 2 + ["EMPTY"] * 4
    b.node.resume()
    assert b.node.lookup(keys).length == 2
    a.node.retract([5])
    a.node.resume()
    a.node.resume()
    assert b.node.wait_for(keys[:5], PATIENCE_SECONDS).length == 5
    assert b.node.lookup(keys).length == 5


def test_loads_go_on_while_paused(toys: Toys) -> None:
    _a, b, _keys, found = toys.prefix()
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        b.node.pause()
    assert ended(load).state is LoadState.DONE


def test_a_reset_retracts_everything_and_begins_again(toys: Toys) -> None:
    a, b, keys, found = toys.prefix()
    before = a.table
    a.node.reset()
    assert (before.retired, before.alive) == (True, False)
    assert a.node.contains(keys) == [""] * 6
    load = ended(b.node.load(found, range(6)))
    assert (load.state, load.good) == (LoadState.FAILED, 0)
    assert a.node.wait_joined(PATIENCE_SECONDS)
    assert a.table.epoch != before.epoch
    assert not b.node.lookup(keys)
    assert a.compute(keys, range(1, 7)) == 6
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    assert {owner.epoch for owner in found.owners} == {a.table.epoch}


def test_a_reset_to_other_weights_shares_with_those_that_have_them(toys: Toys) -> None:
    a, b, keys, _ = toys.prefix()
    trained = Identity(engine="toy 1", model="m", weights=f"{toys.place.namespace} trained")
    b.node.reset(trained)
    assert b.node.wait_joined(PATIENCE_SECONDS)
    wait_until(lambda: b.node.stats()["peers"] == 0, "it has no peers")
    assert not b.node.lookup(keys)
    a.node.reset(trained)
    assert a.compute(keys, range(6)) in (0, 6)
    assert b.node.wait_for(keys, PATIENCE_SECONDS).length == 6


def test_loads_under_way_fail_at_a_reset(toys: Toys) -> None:
    _a, b, keys, found = toys.prefix()
    stale = b.node.lookup(keys)
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        b.wait_until_copying()
        b.node.reset()
        assert load.wait(0) is LoadState.PENDING  # the copy may still write
        with pytest.raises(MisuseError, match="wait for that"):
            b.node.publish(keys, range(6))
    assert (ended(load).state, load.good, load.failed) == (LoadState.FAILED, 0, tuple(range(6)))
    assert ended(b.node.load(stale, range(6))).state is LoadState.FAILED
    assert b.node.wait_joined(PATIENCE_SECONDS)
    found = b.node.wait_for(keys, PATIENCE_SECONDS)
    assert ended(b.node.load(found, range(6))).state is LoadState.DONE


def test_a_reset_that_cannot_begin_again_ends_all_loads(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    _a, b, keys, found = toys.prefix()
    stale = b.node.lookup(keys)
    load = b.node.load(found, range(6))
    transport = b.node._halves.ranks.halves[0].transport
    transport.close()  # so that nothing can be exported
    b.node.reset()
    assert load.wait(PATIENCE_SECONDS) is LoadState.FAILED
    assert "the transport is closed" in b.node.refusal
    assert "not sharing the prefix cache" in caplog.text
    assert ended(b.node.load(stale, range(6))).failed == tuple(range(6))
    assert b.node.publish(keys, range(6)) == 0
    b.node.reset()


def test_loads_under_way_fail_when_their_node_closes(toys: Toys) -> None:
    a, b, _keys, found = toys.prefix()
    with b.copies_held_up():
        load = b.node.load(found, range(6))
    b.node.close()
    assert load.poll() is not LoadState.PENDING
    assert len(load.failed) == 6 - load.good
    load.cancel()
    assert not b.node.joined
    for call in (b.node.stats, b.node.pause, b.node.resume, b.node.reset, b.node.drain):
        with pytest.raises(MisuseError, match=r"node b is closed; join\(\) again"):
            call()
    wait_until(lambda: a.leases() == 0, "its leases are given back")


def test_a_closed_node_leaves_nothing(toys: Toys, place: Node) -> None:
    before = set(place.run_dir.iterdir())
    a, b, keys, found = toys.prefix()
    with a.node:
        pass
    load = ended(b.node.load(found, range(6)))
    assert (load.state, load.good) == (LoadState.FAILED, 0)
    wait_until(lambda: not b.node.lookup(keys), "its blocks are gone")
    b.node.close()
    assert set(place.run_dir.iterdir()) == before


def test_a_forked_child_has_no_part_in_the_node(toys: Toys, place: Node) -> None:
    a, b, keys, found = toys.prefix()
    stale = b.node.lookup(keys)
    with b.copies_held_up():
        load = b.node.load(found, range(6))
        b.wait_until_copying()
        child = os.fork()
        if child == 0:
            os._exit(child_of(b, keys, stale, load))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert load.wait(0) is LoadState.PENDING
    assert ended(load).state is LoadState.DONE
    assert b.node.joined
    assert b.node.publish(keys, range(6)) == 6
    assert a.table.died is False
    assert b.table.died is False
    assert list_sockets(place.run_dir, place.namespace) != []


def child_of(b: Toy, keys: list[bytes], found: Found, load: Load) -> int:
    """What a forked child may do: everything, and nothing comes of it.  Returns its status."""
    signal.alarm(int(PATIENCE_SECONDS))
    try:
        assert "forked" in b.node.refusal
        assert not b.node.joined
        assert not b.node.wait_joined()
        assert not b.node.lookup(keys)
        assert not b.node.wait_for(keys)
        assert b.node.load(found, range(10, 16)).failed == tuple(range(10, 16))
        assert load.wait() is LoadState.FAILED
        assert b.node.publish(keys, range(10, 16)) == 0
        b.node.retract(range(10, 16))
        b.node.pause()
        b.node.resume()
        b.node.reset()
        b.node.close()
        return 0
    except BaseException as exc:
        Path(f"/tmp/kvshm-child-{os.getpid()}").write_text(repr(exc))
        return 1


@pytest.mark.parametrize("copying", [False, True], ids=["before the load", "in the copy"])
def test_what_was_found_at_an_engine_that_is_killed_is_not_loaded(
    place: Node, copying: bool
) -> None:
    """Its memory may still be mapped here; the load ends, and its blocks come back."""
    own, peer, keys = Modelled(place, "killed"), Peer(place, "peer"), keys_of(0)
    try:
        peer.join("killed")
        peer.do("publish", prompt=0, start=0, number=6)
        found = own.node.wait_for(keys, PATIENCE_SECONDS)
        assert found.length == 6
        if copying:
            own.hold_copies()
            load = own.node.load(found, range(6))
            own.wait_until_copying()
            peer.kill()
            own.let_go()
        else:
            peer.kill()
            load = own.node.load(found, range(6))
        assert (ended(load).state, load.good) == (LoadState.FAILED, 0)
        assert load.failed == tuple(range(6))
        wait_until(lambda: not own.node.lookup(keys), "it is known to be dead")
        assert own.node.publish(keys, range(6)) == 6
    finally:
        peer.kill()
        own.close()
