"""Messages of any number of parts, taken off a real socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kvshm.coordinator.incoming import KEPT, MessageReader

PARTS = 5000


class Ends:
    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.router, self.dealer = self.connected()

    def connected(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        router, dealer = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        router.bind(endpoint := f"inproc://{id(router)}")
        dealer.connect(endpoint)
        self._sockets += router, dealer
        return router, dealer

    def close(self) -> None:
        for made in self._sockets:
            made.close(linger=0)
        self._context.term()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def next_of(incoming: MessageReader, router: zmq.Socket[bytes]) -> tuple[list[bytes], int, int]:
    asked = 1
    while (message := incoming.receive(router)) is None:
        asked += 1
    kept, number = message
    return [frame.bytes for frame in kept[1:]], number, asked


def test_no_more_is_kept_than_a_message_has_and_each_part_is_a_turn(ends: Ends) -> None:
    incoming = MessageReader()
    ends.dealer.send_multipart([b"begin", *[b""] * PARTS])
    ends.dealer.send(b"next")
    assert next_of(incoming, ends.router) == ([b"begin"], PARTS + 2, PARTS + 2)
    assert next_of(incoming, ends.router) == ([b"next"], KEPT, KEPT)
    with pytest.raises(zmq.Again):
        incoming.receive(ends.router)


def test_what_another_socket_began_is_no_part_of_a_message(ends: Ends) -> None:
    incoming = MessageReader()
    ends.dealer.send_multipart([b"begin", b"", b""])
    assert incoming.receive(ends.router) is None
    anew, dealer = ends.connected()
    dealer.send(b"next")
    assert next_of(incoming, anew) == ([b"next"], KEPT, KEPT)
