"""``kvshm events`` as a process, and a router that listens to it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

import zmq
from zmq.constants import Event as SocketEvent
from zmq.utils.monitor import recv_monitor_message

from ..unit.kv_events import Subscriber
from .processes import PATIENCE_SECONDS, Managed, Node

END = (-1).to_bytes(8, "big", signed=True)
_numbers = itertools.count()


class EventsProcess:
    def __init__(self, node: Node, *arguments: str) -> None:
        number = next(_numbers)
        self.bind = f"ipc://{node.run_dir}/events{number}"
        self.replay = f"ipc://{node.run_dir}/replay{number}"
        self.arguments = ("--bind", self.bind, "--replay", self.replay, *arguments)
        self._node = node
        self.start()

    def start(self) -> None:
        command = ("-P", "-m", "kvshm.tools.cli", "events", *self.arguments)
        self.process: Managed = self._node.processes.python("events", *command)
        self.process.wait_err("publishing at")


class Router(Subscriber):
    """Listens to a stream as vLLM's documentation has it: what it has missed is replayed."""

    def __init__(self, events: str, replay: str, topic: str = "") -> None:
        super().__init__()
        self._stack = ExitStack()
        context = zmq.Context[zmq.Socket[bytes]]()
        self._stack.callback(context.destroy, 0)
        self._live = context.socket(zmq.SUB)
        self._replay = context.socket(zmq.DEALER)
        self._live.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._live.setsockopt(zmq.RCVHWM, 0)
        self._replay.setsockopt(zmq.RCVHWM, 0)
        monitor = self._live.get_monitor_socket(SocketEvent.HANDSHAKE_SUCCEEDED)
        self._live.connect(events)
        self._replay.connect(replay)
        self.topics: set[str] = set()
        self.last = -1
        assert monitor.poll(1000 * PATIENCE_SECONDS)
        recv_monitor_message(monitor)
        self._live.disable_monitor()
        monitor.close()
        self._catch_up()

    @classmethod
    def of(cls, events: EventsProcess) -> Self:
        return cls(events.bind, events.replay)

    def _catch_up(self) -> None:
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            assert self._replay.poll(1000 * PATIENCE_SECONDS)
            _, _, number, payload = self._replay.recv_multipart()
            if number == END:
                return
            self.last = int.from_bytes(number, "big")
            self.take(payload)

    def hear_one(self) -> bool:
        """Take in the next live batch, and what was missed before it; False if none comes soon."""
        if not self._live.poll(100):
            return False
        topic, frame, payload = self._live.recv_multipart()
        self.topics.add(topic.decode())
        number = int.from_bytes(frame, "big")
        if number > self.last + 1:
            self._catch_up()
        if number > self.last:
            self.last = number
            self.take(payload)
        return True

    def wait_for(self, *hashes: int | bytes) -> None:
        """Until it believes in exactly these blocks."""
        self.wait_until(lambda: self.hashes == set(hashes))

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Listen until something holds of what it believes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < deadline, sorted(map(str, self.hashes))
            if not self.hear_one():
                self._catch_up()  # its subscription may have come late

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
