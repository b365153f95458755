"""What is no message, or lies, is dropped, counted and logged once for each sender."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvshm._base.ids import Epoch, Fingerprint
from kvshm._base.rundir import command_endpoint, engine_socket, event_endpoint
from kvshm._node.protocol import (
    PROTOCOL_VERSION,
    EngineInfo,
    Events,
    Heartbeat,
    Join,
    Joined,
    JoinFirst,
    Leave,
    Message,
    RankInfo,
    Refused,
    Reply,
    decode_reply,
    encode,
)
from kvshm._node.segment_server import serve_epoch
from kvshm._replica.index import Replica
from kvshm._shm.own_slot_table import OwnSlotTable, TableSpec
from kvshm.interfaces import MemoryDescriptor

from .engines import FakeEngine
from .processes import PATIENCE_SECONDS, Managed, Node

pytestmark = pytest.mark.multiprocess

SENDER = str(Path(__file__).with_name("bad_sender.py"))
HUGE = (1 << 64) - 1
EPOCH = Epoch(0x77)


class Sender:
    def __init__(self, node: Node) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_SECONDS * 1000))
        self._socket.connect(command_endpoint(node.run_dir, node.namespace))
        spec = TableSpec(node.namespace, "liar", 8, 16, 1, Fingerprint(b"f" * 32))
        self.table = OwnSlotTable.create(spec, EPOCH)
        self._replica = Replica.create(node.namespace, "liar", EPOCH, 64)
        path = engine_socket(node.run_dir, node.namespace, EPOCH)
        self._server = serve_epoch(path, self.table, self._replica)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._server.close()
        self._replica.close()
        self.table.close()

    def tell(self, message: Message) -> None:
        self._socket.send(encode(message))

    def ask(self, message: Message) -> Reply:
        self.tell(message)
        return decode_reply(self._socket.recv())

    def is_answered(self) -> bool:
        reply = self.ask(Heartbeat(epoch=1, sequence=0))
        return isinstance(reply, JoinFirst) and reply.engine_epoch == 1

    def info(self, **lies: Any) -> EngineInfo:
        """The truth about this process, apart from the lies."""
        memory = MemoryDescriptor("none", EPOCH, 0, [])
        truth = EngineInfo(
            epoch=EPOCH,
            name="liar",
            pid=os.getpid(),
            fingerprint=self.table.fingerprint,
            fields={},
            num_blocks=8,
            ranks=[RankInfo(os.getpid(), memory)],
        )
        return msgspec.structs.replace(truth, **lies)

    def join(self, protocol: int = PROTOCOL_VERSION, sequence: int = 0, **lies: Any) -> Reply:
        return self.ask(Join(protocol=protocol, engine=self.info(**lies), sequence=sequence))


@pytest.fixture
def sender(node: Node) -> Iterator[Sender]:
    sender = Sender(node)
    yield sender
    sender.close()


def lines(coordinator: Managed, event: str) -> list[str]:
    return coordinator.err.matching(lambda line: re.search(f"event={event}", line) is not None)


def test_each_sender_is_logged_once_and_every_message_counted(node: Node) -> None:
    coordinator = node.coordinator()
    endpoint = command_endpoint(node.run_dir, node.namespace)
    senders = [node.processes.start(f"sender-{i}", SENDER, endpoint) for i in range(2)]
    sent = [int(sender.wait_out(str.isdecimal)) for sender in senders]
    assert all(sender.wait() == 0 for sender in senders)
    FakeEngine(node, "a").joined()
    assert coordinator.terminate() == 0
    garbled = lines(coordinator, "garbled")
    assert len(garbled) == 2
    for sender in senders:
        assert any(f"pid={sender.pid} " in line for line in garbled)
    assert re.search(rf"event=ended .*complaints={sum(sent)}\b", str(coordinator.err))


def test_the_version_is_named_on_both_sides_and_logged_once(node: Node, sender: Sender) -> None:
    coordinator = node.coordinator()
    for _ in range(3):
        reply = sender.join(protocol=99)
        assert isinstance(reply, Refused)
        assert "99" in reply.reason
        assert str(PROTOCOL_VERSION) in reply.reason
    assert isinstance(sender.join(), Joined)
    assert coordinator.terminate() == 0
    (line,) = lines(coordinator, "refused")
    assert "99" in line


NOWHERE = MemoryDescriptor("none", 0, 0, [])


def test_strange_numbers_of_a_member_harm_no_one(node: Node, sender: Sender) -> None:
    """All of it fits the types, and the engine is in the roster."""
    coordinator = node.coordinator()
    other = FakeEngine(node, "other", "--fingerprint", "f" * 32)
    other.joined()
    name = "a b\nevent=forged \x1b[31m" + "n" * 30
    strange: dict[str, Any] = {"pid": -HUGE // 2, "ranks": [RankInfo(HUGE, NOWHERE)]}
    strange |= {"lease_bit": 1 << 40, "name": name, "fields": {"": "\n" * 9}}
    reply = sender.join(sequence=HUGE, **strange)
    assert isinstance(reply, Joined)
    assert 0 <= reply.lease_bit < 28
    other.heard("engine_joined", epoch=EPOCH)
    for records in (bytes(47), b"\xff" * 480, bytes(48)):
        sender.tell(Events(epoch=EPOCH, sequence=HUGE, records=records))
    sender.tell(Heartbeat(epoch=EPOCH, sequence=HUGE))
    sender.tell(Leave(epoch=-5))
    assert sender.is_answered()
    sender.tell(Leave(epoch=EPOCH))
    other.heard("engine_gone", epoch=EPOCH)
    assert coordinator.terminate() == 0
    assert lines(coordinator, "join engine=.a b")
    assert coordinator.err.matching(lambda line: line.startswith("event=") or "\x1b" in line) == []


NO_ZMQ = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "half a greeting": b"\xff" + bytes(8),
    "nothing": b"",
    "random": os.urandom(4096),
    "a lot": b"\xff" * 100_000,
}


def test_what_is_not_even_zmq_is_ignored(node: Node, sender: Sender) -> None:
    coordinator = node.coordinator()
    for what, garbage in NO_ZMQ.items():
        for endpoint in (command_endpoint, event_endpoint):
            path = endpoint(node.run_dir, node.namespace).removeprefix("ipc://")
            for _ in range(3):
                with socket.socket(socket.AF_UNIX) as raw:
                    raw.connect(path)
                    raw.settimeout(5)
                    with suppress(OSError):  # it has hung up already
                        raw.sendall(garbage)
        assert sender.is_answered(), what
    assert coordinator.terminate() == 0
