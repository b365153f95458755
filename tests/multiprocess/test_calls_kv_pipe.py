"""kvshm.calls.kv_pipe between two processes: in order, each once, None, and who waits for whom."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvshm.calls.kv_pipe import KVPipe, PipeTimeout
from kvshm.errors import MisuseError

from .calls_nodes import Calls, Other, calls_on
from .processes import PATIENCE_SECONDS, Node

SLOTS, BYTES = 4, 256


@pytest.fixture
def calls(node: Node) -> Iterator[Calls]:
    with calls_on(node) as calls:
        yield calls


@pytest.fixture
def pipe(calls: Calls) -> Iterator[KVPipe]:
    pipe = KVPipe("p", 0, slots=SLOTS, message_bytes=BYTES, config=calls.config())
    yield pipe
    pipe.close(0.0)


@pytest.fixture
def other(calls: Calls) -> Other:
    """The process at the other end."""
    other = calls.other()
    other.do("open_pipe", "p", 1, SLOTS, BYTES)
    return other


def test_messages_come_in_order_and_none_is_a_message(pipe: KVPipe, other: Other) -> None:
    """More of them than there are slots, so that each slot is used again."""
    sent = [None if number % 3 == 2 else bytes([number]) * number for number in range(11)]
    other.begin("receive", 11)
    for message in sent:
        pipe.send_tensor(message)
    assert other.end() == [None if message is None else message.hex() for message in sent]
    other.begin("send", [None if message is None else message.hex() for message in sent])
    got = [pipe.recv_tensor() for _ in sent]
    assert [None if message is None else bytes(message) for message in got] == sent
    assert other.end() is None


def test_format_and_shape_arrive_as_they_were_sent(calls: Calls, pipe: KVPipe) -> None:
    """Both ends in one process do as well."""
    end = KVPipe("p", 1, slots=SLOTS, message_bytes=BYTES, config=calls.config())
    try:
        numbers = memoryview(array("f", range(6))).cast("B").cast("f", (2, 3))
        for tensor in (numbers, memoryview(array("q", [-5])), memoryview(b"")):
            pipe.send_tensor(tensor)
            got = end.recv_tensor()
            assert got is not None
            assert got.tolist() == tensor.tolist()
            assert (got.format, got.shape) == (tensor.format, tensor.shape)
    finally:
        end.close(0.0)


def test_a_sender_waits_for_who_receives(pipe: KVPipe, other: Other) -> None:
    for number in range(SLOTS):
        pipe.send_tensor(bytes([number]))
    for _ in range(2):
        with pytest.raises(PipeTimeout, match="4 messages are not taken"):
            pipe.send_tensor(b"one too many", 0.2)
    assert other.do("receive", 1) == ["00"]
    pipe.send_tensor(b"\x04")
    assert other.do("receive", 4) == ["01", "02", "03", "04"]
    assert pipe.close(PATIENCE_SECONDS)


def test_a_receiver_may_wait_in_vain_and_again(pipe: KVPipe, other: Other) -> None:
    with pytest.raises(PipeTimeout, match="message 0 did not come"):
        pipe.recv_tensor(0.1)
    other.begin("send", ["aa", None])
    assert pipe.recv_tensor() == b"\xaa"
    assert pipe.recv_tensor() is None


def test_what_does_not_fit_is_refused_and_the_pipe_goes_on(pipe: KVPipe, other: Other) -> None:
    with pytest.raises(MisuseError, match="in pieces"):
        pipe.send_tensor(bytes(BYTES))
    pipe.send_tensor(b"small")
    assert other.do("receive", 1) == [b"small".hex()]


def test_an_end_that_was_killed_is_a_timeout(pipe: KVPipe, other: Other) -> None:
    """What it had sent and nobody received is lost with it; what it had not taken as well."""
    other.do("send", ["aa", "bb"])
    assert pipe.recv_tensor() == b"\xaa"
    other.process.kill()
    for number in range(SLOTS):
        pipe.send_tensor(bytes([number]))
    with pytest.raises(PipeTimeout):
        pipe.send_tensor(b"", 0.1)
    with suppress(PipeTimeout):  # unless its death is not known yet
        assert pipe.recv_tensor(0.5) == b"\xbb"
    with pytest.raises(PipeTimeout):
        pipe.recv_tensor(0.5)
    assert not pipe.close(0.1)
