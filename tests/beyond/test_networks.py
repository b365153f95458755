"""The machines that the other tests run on are apart, and what crosses their wires is counted."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from local_node import wait_until

from .networks import Network
from .services import PATIENCE_S, running
from .store import Store, accepts

pytestmark = pytest.mark.beyond

SENT = 50_000
"""Bytes: the sockets' buffers hold them, so one thread can send and receive."""


def test_bytes_are_counted_where_they_cross() -> None:
    switch, one, two = (Network(f"10.211.0.{i}") for i in (254, 1, 2))
    switch.become_switch()
    one.plug_into(switch, "one")
    two.plug_into(switch, "two")
    with switch.entered():
        server = socket.create_server((switch.address, 7000))
    before = one.traffic(), two.traffic()
    with server, one.entered():
        assert not accepts("127.0.0.1", 7000)  # the switch's loopback is another one
        with socket.create_connection((switch.address, 7000)) as client:
            peer = server.accept()[0]
            with peer:
                client.sendall(bytes(SENT))
                client.shutdown(socket.SHUT_WR)
                while peer.recv(SENT):
                    pass
    sent, idle = one.traffic() - before[0], two.traffic() - before[1]
    assert SENT <= sent.sent < 1.1 * SENT
    assert sent.received < SENT / 10
    assert max(idle) < SENT / 10
    for network in (switch, one, two):
        network.close()


def test_a_master_that_starts_again_finds_the_memory(tmp_path: Path) -> None:
    network = Network("10.211.0.254")
    network.become_switch()
    store = Store(network, tmp_path)
    with running(store.master, store.memory):
        store.master.kill()
        store.master.start()
        for _ in wait_until("the memory is known again", PATIENCE_S):
            if store.metric("master_total_capacity_bytes") == store.size:
                break
        assert store.keys() == store.stored() == 0
    network.close()
