"""Engines that could not be attached when they joined."""

from __future__ import annotations

import errno
import time

import pytest

from kvshm._node.peers import Peers, PeersStats
from kvshm._replica import index
from kvshm._shm.fd_server import FdServer

from .exporters import Clock, Make, break_version, mend_version, offered
from .few_descriptors import descriptors


@pytest.mark.parametrize("left", [0, 1])  # one: the peer is asked, and has none to answer with
def test_who_could_not_be_attached_is_tried_again_until_it_can(
    left: int,
    peers: Peers,
    exporter: Make,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    with descriptors(left), monkeypatch.context() as patch:
        # A thread of this process serves both tables: it must not take the descriptor at times.
        patch.setattr(FdServer, "_accept", lambda _: time.sleep(0.05))  # as without descriptors
        peers.joined(a.info)
        peers.joined(b.info)
        for _ in range(5):
            clock.now += 1
            peers.try_again()
    reported = [r.getMessage() for r in caplog.records if r.name.endswith(".peers")]
    # Who asks in vain waits for half a second, and asks no one else in the same turn.
    assert len(reported) == len(set(reported)) == 2 - left, "each is complained of once"
    peers.gone(b.info.epoch)
    peers.suspected(a.info.epoch)
    clock.now += 60
    peers.try_again()
    assert peers.stats().attached == 0, "who is suspected has nothing to offer"
    peers.recovered(a.info.epoch)
    peers.try_again()
    peers.try_again()
    assert offered(peers, 1) == [(1, 1, 0)]
    assert peers.stats().attached == 1


@pytest.mark.parametrize("enough", [0, 1], ids=["to attach", "to scan"])
def test_an_engine_for_which_there_is_no_memory_is_left_out_until_there_is(
    peers: Peers,
    exporter: Make,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    enough: int,
) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    b.publish(2)
    peers.joined(a.info)
    looks = iter([True] * enough)

    def full(nbytes: int) -> None:
        if not next(looks, False):
            raise OSError(errno.ENOMEM, "7 are available")

    with monkeypatch.context() as patch:
        patch.setattr(index, "check_available", full)
        peers.joined(b.info)
        peers.rescan(b.info.epoch)
    assert (offered(peers, 1), offered(peers, 2)) == ([(1, 1, 0)], [])
    assert peers.stats() == PeersStats(1, 1)
    assert "engine b (epoch " in caplog.text
    assert ": 7 are available; free memory" in caplog.text
    clock.now += 60
    peers.try_again()
    assert offered(peers, 2) == [(2, 2, 0)]


def test_a_suspected_engine_whose_table_breaks_is_not_tried_before_it_recovers(
    peers: Peers, exporter: Make, clock: Clock
) -> None:
    a = exporter("a")
    a.publish(1)
    peers.joined(a.info)
    peers.suspected(a.info.epoch)
    break_version(a)
    peers.rescan(a.info.epoch)
    mend_version(a)
    clock.now += 60
    peers.try_again()
    assert offered(peers, 1) == []
    peers.recovered(a.info.epoch)
    peers.try_again()
    assert offered(peers, 1) == [(1, 1, 0)]
