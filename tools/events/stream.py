"""The sockets of the one stream, as those of vLLM's ZmqEventPublisher."""

from __future__ import annotations

import time
from contextlib import suppress

import zmq

from kvshm.errors import KvshmError

from .history import MAX_BATCHES, History
from .wire import END_OF_REPLAY, MAX_NUMBER

QUEUED_BATCHES = 1000
"""For each subscriber.  What is more is dropped for it, and it asks for it again.  Few, since a
batch with a prompt of 32,768 tokens has 160 KiB, and a subscriber may stand still."""
REPLAY_QUEUE = 2 * (MAX_BATCHES + 1000)
"""Room for a whole replay.  Twice, since ZeroMQ may count as many that were read already."""
MAX_REQUEST_BYTES = 1024


class Stream:
    """One thread.  Nothing blocks: ZeroMQ drops what a subscriber is too slow for."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay: str,
        topic: str,
        history: History,
    ) -> None:
        """Raises KvshmError if it cannot listen there."""
        self._topic = topic.encode()
        self._history = history
        self._events = _bound(context, zmq.PUB, endpoint, QUEUED_BATCHES)
        self.replay = _bound(context, zmq.ROUTER, replay, REPLAY_QUEUE)

    def publish(self, payload: bytes) -> None:
        number = self._history.add(payload)
        with suppress(zmq.Again):
            self._events.send_multipart((self._topic, _as_bytes(number), payload), zmq.NOBLOCK)

    def answer(self) -> None:
        """Answer one request for a replay, if there is one."""
        try:
            frames = self.replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        start = int.from_bytes(frames[-1], "big")
        if len(frames) != 3 or start > MAX_NUMBER:
            return
        for number, payload in self._history.since(start, time.time()):
            self._send(frames[0], self._topic, _as_bytes(number), payload)
        self._send(frames[0], b"", END_OF_REPLAY, b"")

    def _send(self, subscriber: bytes, *frames: bytes) -> None:
        with suppress(zmq.Again):
            self.replay.send_multipart((subscriber, b"", *frames), zmq.NOBLOCK)

    def close(self) -> None:
        self._events.close()
        self.replay.close()


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, queued: int
) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, queued)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    made.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        made.bind(endpoint)
    except zmq.ZMQError as exc:
        made.close()
        raise KvshmError(f"cannot listen on {endpoint!r}: {exc}") from exc
    return made


def _as_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big")
