"""A coordinator that does what a test says, and a client under test that remembers."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from kvshm._base.rundir import command_endpoint, event_endpoint
from kvshm._base.timing import TIMING, Timing
from kvshm._node.coordinator_client import CoordinatorClient
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    AnyBroadcast,
    Command,
    EngineEvents,
    EngineInfo,
    Heartbeat,
    Joined,
    Message,
    Tick,
    broadcast_frame,
    decode_command,
    encode,
)
from kvshm._node.updates import EventBatches, Update

from ..update_names import named
from .processes import PATIENCE_SECONDS

HASTY = TIMING.scaled(0.5)
UNHURRIED = replace(
    TIMING,
    heartbeat_seconds=0.25,
    reply_seconds=PATIENCE_SECONDS,
    silence_seconds=PATIENCE_SECONDS,
)
"""Has the client neither ask again nor take the coordinator for lost because a script answers only
when its test has come to that."""


def engine_info(epoch: int, name: str = "x") -> EngineInfo:
    return EngineInfo(
        epoch=epoch,
        name=name,
        pid=1,
        fingerprint=b"f" * 32,
        fields={},
        num_blocks=1,
        ranks=[],
    )


class Recorder:
    """An engine that remembers what it has heard."""

    def __init__(self) -> None:
        self.epoch: int | None = 100
        self._calls: list[tuple[Any, ...]] = []
        self._changed = threading.Condition()

    def describe(self) -> EngineInfo | None:
        return None if self.epoch is None else engine_info(self.epoch, "own")

    def apply(self, update: Update) -> None:
        match update:
            case EventBatches(batches):
                for batch in batches:
                    self._note("engine_events", *batch)
            case Tick():
                pass  # it comes each second
            case _:
                self._note(*named(update))

    def scan_again(self, enough: Callable[[], bool]) -> None: ...

    def beat(self) -> None: ...

    def count(self, counter: int, amount: int = 1) -> None:
        self._note("count", counter, *([amount] if amount != 1 else []))

    def _note(self, *call: Any) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        """What it has heard so far, the reply of ``joined`` aside."""
        with self._changed:
            calls = list(self._calls)
        return [call[:1] if call[0] == "joined" else call for call in calls]

    def wait(self, *call: Any) -> None:
        """Wait until it has been called like this."""
        with self._changed:
            reached = self._changed.wait_for(lambda: call in self._calls, PATIENCE_SECONDS)
        assert reached, f"{call} never came, only {self.calls}"


@contextmanager
def scripted(timing: Timing) -> Iterator[Script]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        script = Script(Path(directory), timing)
        yield script
        script.close()


class Script:
    def __init__(self, run_dir: Path, timing: Timing) -> None:
        self.engine = Recorder()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._publisher = self._context.socket(zmq.XPUB)
        self._router.bind(command_endpoint(run_dir, "n"))
        self._publisher.bind(event_endpoint(run_dir, "n"))
        for socket in (self._router, self._publisher):
            socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
        self._route = b""
        self.client = CoordinatorClient(
            run_dir, "n", self.engine, jitter=lambda: 1.0, timing=timing
        )
        assert self._publisher.recv() == b"\1" + b"f" * 32  # subscribed

    def close(self) -> None:
        self.client.close()
        self._context.destroy(linger=0)

    def receive(self) -> Command:
        self._route, frame = self._router.recv_multipart()
        return decode_command(frame)

    def expect(self, kind: type[Message]) -> Any:
        """Return the next command of a kind; heartbeats in between do not matter."""
        command = self.receive()
        while isinstance(command, Heartbeat) and kind is not Heartbeat:
            command = self.receive()
        assert isinstance(command, kind), command
        return command

    def is_reported(self, seconds: float) -> bool:
        """Whether a command comes within this many seconds."""
        return bool(self._router.poll(int(seconds * 1000)))

    def answer(self, message: Message) -> None:
        self._router.send_multipart([self._route, encode(message)])

    def send_raw(self, reply: list[bytes], *broadcasts: list[bytes]) -> None:
        self._router.send_multipart([self._route, *reply])
        for frames in broadcasts:
            self._publisher.send_multipart([b"f" * 32 + frames[0], *frames[1:]])

    def publish_raw(self, frame: bytes) -> None:
        self._publisher.send(b"f" * 32 + frame)

    def publish(self, *messages: AnyBroadcast) -> None:
        self._publisher.send(broadcast_frame(b"f" * 32, map(encode, messages)))

    def joined(self, sequence: int = 0, coordinator: int = 1, **engines: int) -> Joined:
        """A reply; ``engines`` gives the sequence of each engine e<epoch>."""
        assert self.engine.epoch is not None
        epochs = {int(name[1:]): heard for name, heard in engines.items()}
        return Joined(
            protocol=PROTOCOL_VERSION,
            coordinator_epoch=coordinator,
            engine_epoch=self.engine.epoch,
            lease_bit=5,
            sequence=sequence,
            roster=[engine_info(epoch) for epoch in epochs],
            sequences=epochs,
            suspected=[],
            incompatible=[],
        )

    def events(self, sequence: int, engine_sequence: int, records: bytes) -> EngineEvents:
        return EngineEvents(
            coordinator_epoch=1,
            sequence=sequence,
            epoch=7,
            engine_sequence=engine_sequence,
            records=records,
        )
