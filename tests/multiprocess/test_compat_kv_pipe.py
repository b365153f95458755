"""kvshm.compat.kv_pipe between two processes: in order, each once, None, and who waits for whom."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvshm.compat import kv_pipe
from kvshm.compat.kv_pipe import KVPipe, PipeTimeout
from kvshm.errors import MisuseError

from .compat_nodes import Calls, Other, calls_on
from .processes import PATIENCE_SECONDS, Node, wait_until

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
    other = calls.other()
    other.do("open_pipe", "p", 1, SLOTS, BYTES)
    return other


@pytest.fixture
def end(calls: Calls, pipe: KVPipe) -> Iterator[KVPipe]:
    end = KVPipe("p", 1, slots=SLOTS, message_bytes=BYTES, config=calls.config())
    yield end
    end.close(0.0)


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


def test_format_and_shape_arrive_as_they_were_sent(pipe: KVPipe, end: KVPipe) -> None:
    numbers = memoryview(array("f", range(6))).cast("B").cast("f", (2, 3))
    empty, single = memoryview(np.zeros((0, 3), "f4")), memoryview(np.array(2.5))
    for tensor in (numbers, memoryview(array("q", [-5])), memoryview(b""), empty, single):
        pipe.send_tensor(tensor)
        got = end.recv_tensor()
        assert got is not None
        assert got.tolist() == tensor.tolist()
        assert (got.format, got.shape) == (tensor.format, tensor.shape)


def test_half_floats_arrive_as_numbers_of_16_bits(pipe: KVPipe, end: KVPipe) -> None:
    states = np.arange(6, dtype="f2").reshape(2, 3)
    pipe.send_tensor(states)
    got = np.asarray(end.recv_tensor()).view("e")
    assert (got.dtype, got.tolist()) == (states.dtype, states.tolist())


def test_what_could_not_be_made_of_a_message_is_not_taken(
    pipe: KVPipe, end: KVPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe.send_tensor(b"message")
    with monkeypatch.context() as patch:
        patch.delattr(kv_pipe, "_unpacked")
        with pytest.raises(NameError):
            end.recv_tensor()
    assert end.recv_tensor(5.0) == b"message"


def test_a_call_that_waits_ends_when_its_end_is_closed(pipe: KVPipe, other: Other) -> None:
    for _ in range(SLOTS):
        pipe.send_tensor(b"")
    with ThreadPoolExecutor(2) as pool:
        waiting: list[Future[object]] = [pool.submit(pipe.recv_tensor, 15.0)]
        waiting.append(pool.submit(pipe.send_tensor, b"", 15.0))
        with suppress(TimeoutError):
            waiting[0].result(0.3)  # until both wait
        assert not pipe.close(0.0)
        for call in waiting:
            with pytest.raises(MisuseError, match="is closed"):
                call.result()


def test_what_was_taken_is_known_whoever_closes_first(pipe: KVPipe, end: KVPipe) -> None:
    """Although the answers of an end go with it."""
    pipe.send_tensor(b"question")
    assert end.recv_tensor() == b"question"
    end.send_tensor(b"answer")
    assert pipe.recv_tensor() == b"answer"
    assert end.close()
    assert pipe.close()


def test_both_ends_may_close_at_once(pipe: KVPipe, end: KVPipe) -> None:
    pipe.send_tensor(b"only")
    assert end.recv_tensor() == b"only"
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(end.close)
        assert pipe.close()
        assert closed.result()


def test_what_an_end_left_behind_is_known_not_to_be_taken(pipe: KVPipe, end: KVPipe) -> None:
    for _ in range(2):
        pipe.send_tensor(b"")
    end.recv_tensor()
    end.close(PATIENCE_SECONDS)
    assert not pipe.close(0.5)


def test_a_message_that_was_only_leased_is_not_taken(calls: Calls, pipe: KVPipe) -> None:
    """As by a receiver that died while it copied, which no one has cleaned up after."""
    end = KVPipe("p", 1, slots=SLOTS, message_bytes=BYTES, config=calls.config())
    pipe.send_tensor(b"never received")
    node: Any = end._rows.node
    found = node.wait_for([pipe._key(0, "sent", 0)], PATIENCE_SECONDS)
    node._halves.cache.planner.load(found._plan, "died", [0])
    assert pipe._rows.node.kept([0]) == [0]
    end._rows.close()
    wait_until(lambda: not pipe._rows.node.stats()["peers"], "the other end is gone")
    assert not pipe.close(0.5)


def test_a_sender_waits_for_the_receiver(pipe: KVPipe, other: Other) -> None:
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
    """What it had sent and no one received is lost with it; what it had not taken as well."""
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
