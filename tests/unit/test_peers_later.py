"""Engines that could not be attached when they joined."""

from __future__ import annotations

import pytest

from kvshm.peers import Peers

from .exporters import Clock, Make, offered
from .few_descriptors import descriptors


@pytest.mark.parametrize("left", [0, 1])  # one: the table can be opened, not mapped
def test_who_could_not_be_attached_is_tried_again_until_it_can(
    left: int, peers: Peers, exporter: Make, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = exporter("a"), exporter("b")
    a.publish(1)
    with descriptors(left):
        peers.joined(a.info)
        peers.joined(b.info)
        for _ in range(5):
            clock.now += 1
            peers.attach_again()
    told = [r.getMessage() for r in caplog.records if r.name.endswith(".peers")]
    # Who asks in vain waits for half a second, and asks nobody else in the same turn.
    assert len(told) == len(set(told)) == 2 - left, "each is complained of once"
    peers.gone(b.info.epoch)
    peers.suspected(a.info.epoch)
    clock.now += 60
    peers.attach_again()
    assert peers.stats().attached == 0, "who is suspected has nothing to offer"
    peers.recovered(a.info.epoch)
    peers.attach_again()
    peers.attach_again()
    assert offered(peers, 1) == [(1, 1, 0)]
    assert peers.stats().attached == 1
