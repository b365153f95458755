"""node.peers: a roster and events that cannot be true leave an engine out, and raise nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvshm._node.peers import Peers

from .exporters import Make, offered

HUGE = (1 << 64) - 1
LIES: dict[str, dict[str, Any]] = {
    "negative epoch": {"epoch": -1},
    "huge epoch": {"epoch": HUGE},
    "huge lease bit": {"lease_bit": HUGE},
    "negative lease bit": {"lease_bit": -2},
    "bit 28": {"lease_bit": 28},
    "negative blocks": {"num_blocks": -1},
    "huge blocks": {"num_blocks": HUGE},
    "no ranks": {"ranks": []},
    "no fingerprint": {"fingerprint": b""},
}


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES.keys())
def test_an_engine_that_cannot_be_is_left_out(
    peers: Peers, exporter: Make, lies: dict[str, Any]
) -> None:
    liar, honest = exporter("liar"), exporter("honest")
    liar.publish(1)
    honest.publish(2)
    for info in (msgspec.structs.replace(liar.info, **lies), honest.info):
        peers.joined(info)
    assert peers.stats().attached == 1
    assert offered(peers, 1) == []
    assert len(offered(peers, 2)) == 1


@pytest.mark.parametrize("records", [bytes(47), b"\xff" * 480, bytes(48), b""])
def test_events_that_make_no_sense_cost_a_scan(
    peers: Peers, exporter: Make, records: bytes
) -> None:
    a = exporter()
    a.publish(1)
    peers.joined(a.info)
    peers.apply_events([(a.info.epoch, records)])
    assert len(offered(peers, 1)) == 1
    peers.apply_events([(HUGE, records)])
    peers.apply_events([(-1, records)])
