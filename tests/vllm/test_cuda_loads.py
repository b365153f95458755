"""The thread that carries out loads on a GPU: nothing is polled, nothing holds another load up, and
whatever a transport refuses, a load ends."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from typing import Any

import pytest

pytest.importorskip("vllm")


from kvshm._base.ids import BlockId
from kvshm._engine.load_plan import LoadOrder, Piece
from kvshm._rank import rank_half
from kvshm.hooks.vllm.messages import StepMetadata
from kvshm.transport.cuda.copy_stream import CopyStream, CudaCopy
from kvshm.transport.cuda.driver import CudaError
from kvshm.transport.cuda.transport import CudaIpcTransport

from ..doubles.cuda_fake import FakeDriver
from .cuda_workers import Make, Played, finished, load_of, until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_half, "TIDY_SECONDS", 60.0)


def test_a_load_waits_for_its_copy_without_polling(
    cuda_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that runs the model needs the interpreter."""
    exporter, importer = cuda_worker(1), cuda_worker(2)
    waits, go_on, polls = threading.Event(), threading.Event(), []
    real, poll = FakeDriver.synchronize_event, CudaCopy.poll

    def wait(driver: FakeDriver, event: Any) -> None:
        waits.set()
        assert go_on.wait(30)
        real(driver, event)

    monkeypatch.setattr(FakeDriver, "synchronize_event", wait)
    monkeypatch.setattr(CudaCopy, "poll", lambda copy: polls.append(copy) or poll(copy))
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    transport: Any = importer.side._cache.transport
    with importer.driver.hold(transport.copy_stream.stream):
        importer.side.begin_loads(metadata)
        assert waits.wait(30)
        polled = len(polls)
        for _ in range(20):
            assert finished(importer.side) == set()
            time.sleep(0.001)
        assert len(polls) == polled
    go_on.set()
    until(lambda: "request" in finished(importer.side))
    assert importer.side.loads.take_bad() == set()
    importer.side.close()
    assert importer.driver.entered == {
        "kvshm-loads", "kvshm-attach", "kvshm-copies", "kvshm-unmap"
    }  # fmt: skip


def test_a_load_ends_though_nothing_can_wait_for_its_copy(
    cuda_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)

    def refuse(*_: object) -> None:
        raise CudaError("cuEventSynchronize", "CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(FakeDriver, "synchronize_event", refuse)
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    transport: Any = importer.side._cache.transport
    with importer.driver.hold(transport.copy_stream.stream):
        importer.side.begin_loads(metadata)
        until(lambda: transport.copy_stream.stream.owner.work)
        until(lambda: importer.rank._begun["request"].polled)  # and is from now on
    until(lambda: "request" in finished(importer.side))
    assert importer.side.loads.take_bad() == set()


def another(exporter: Played, importer: Played, load: LoadOrder, target: int) -> LoadOrder:
    """A load of what another load gets, into another block."""
    (piece,) = load.pieces
    again = dataclasses.replace(piece, targets=(BlockId(target),))
    ticket = importer.table.take_ticket(1)
    assert ticket is not None
    name = f"into {target}"
    return dataclasses.replace(load, load_id=name, ticket=ticket, pieces=(again,))


def test_a_cancelled_copy_that_has_not_begun_writes_nothing(cuda_worker: Make) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)
    exporter.fill(3), importer.fill(5)
    copies = importer.transport.copy_stream
    metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
    with importer.driver.hold(copies.stream):
        importer.side.begin_loads(metadata)
        until(lambda: copies._pending)
        importer.rank.cancel("request")
        until(lambda: copies._pending[0].buffers.stopped)
    until(lambda: "request" in finished(importer.side))
    assert importer.side.loads.take_bad() == {6}
    assert importer.holds(6, 5)


def test_a_load_begins_while_a_copy_of_another_is_under_way(cuda_worker: Make) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)
    copies, first = importer.transport.copy_stream, load_of(exporter, importer, 1, 6)
    with importer.driver.hold(copies.stream):
        importer.side.begin_loads(StepMetadata(step=2, loads=[first]))
        until(lambda: len(copies._pending) == 1)
        second = another(exporter, importer, first, 5)
        importer.side.begin_loads(StepMetadata(step=3, loads=[second]))
        until(lambda: len(copies._pending) == 2)
        assert finished(importer.side) == set()
    ended: set[str] = set()
    until(lambda: ended.update(finished(importer.side)) or ended == {"request", "into 5"})
    assert importer.side.loads.take_bad() == set()


def test_a_load_ends_with_its_copy_though_a_later_one_is_under_way(
    cuda_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the later one's load had arrived first."""
    exporter, importer = cuda_worker(1), cuda_worker(2)
    copies, first = importer.transport.copy_stream, load_of(exporter, importer, 1, 6)
    find, attached = importer.rank._attachments.find, threading.Event()

    def find_late(asked: Piece) -> Any:
        slow = asked.targets == (BlockId(7),) and not attached.is_set()
        return None if slow else find(asked)

    monkeypatch.setattr(importer.rank._attachments, "find", find_late)
    slow, fast = another(exporter, importer, first, 7), another(exporter, importer, first, 5)
    with importer.driver.hold(copies.stream):
        importer.side.begin_loads(StepMetadata(step=2, loads=[slow, fast]))
        until(lambda: len(copies._pending) == 1)
    until(lambda: "into 5" in finished(importer.side))  # nothing else is under way
    with importer.driver.hold(copies.stream):
        again = another(exporter, importer, first, 6)
        importer.side.begin_loads(StepMetadata(step=3, loads=[again]))
        until(lambda: len(copies._pending) == 1)
        attached.set()
        until(lambda: len(copies._pending) == 2)
        let_one_end(copies)
        until(lambda: "into 6" in finished(importer.side))
        assert importer.side.loads.under_way.keys() == {"into 7"}
    until(lambda: "into 7" in finished(importer.side))
    assert importer.side.loads.take_bad() == set()


def let_one_end(copies: CopyStream) -> None:
    event, queue = copies._pending[0].buffers.event, copies.stream.owner.work
    while event.reached < event.turn:
        queue.popleft()()


def test_no_event_is_given_back_while_a_thread_waits_for_it(
    cuda_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if a rank closes while a copy of its is under way."""
    exporter, importer = cuda_worker(1), cuda_worker(2)
    monkeypatch.setattr(rank_half, "CLOSE_SECONDS", 0.01)
    freed: list[int] = []
    waits, bad, free, wait = threading.Event(), [], FakeDriver.free_event, importer.driver

    def note(driver: FakeDriver, event: Any) -> None:
        freed.append(id(event))
        free(driver, event)

    real = FakeDriver.synchronize_event

    def late(driver: FakeDriver, event: Any) -> None:
        waits.set()
        time.sleep(0.1)  # preempted just before it enters the driver
        bad.append(id(event) in freed)
        real(driver, event)

    monkeypatch.setattr(FakeDriver, "free_event", note)
    monkeypatch.setattr(FakeDriver, "synchronize_event", late)
    stream = importer.transport.copy_stream.stream
    with wait.hold(stream):
        metadata = StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)])
        importer.side.begin_loads(metadata)
        assert waits.wait(30)
        importer.side.close()
    assert bad == [False]
    assert freed


@pytest.mark.parametrize("name", ["note_launched", "enter_thread"])
def test_a_load_ends_though_the_transport_refuses_what_it_need_not_have(
    cuda_worker: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(*_: object) -> None:
        raise CudaError("cuEventRecord", "CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(CudaIpcTransport, name, refuse)
    exporter, importer = cuda_worker(1), cuda_worker(2)
    exporter.fill(3)
    importer.side.begin_loads(StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)]))
    until(lambda: "request" in finished(importer.side))
    assert importer.side.loads.take_bad() == set()
    assert importer.holds(6, 3)


def test_loads_leave_no_event_behind(cuda_worker: Make) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)
    importer.transport.late_writers = True

    def unpooled() -> int:
        """A copy's own event is kept for the next copy, and there is one more of these if that
        begins before the thread that waited for the last one has given it back."""
        return importer.driver.events - len(importer.transport.copy_stream._free)

    before = unpooled()
    first = load = load_of(exporter, importer, 1, 6)
    importer.side.begin_loads(StepMetadata(step=2, loads=[first]))
    until(lambda: "request" in finished(importer.side))
    for _ in range(3):
        load = another(exporter, importer, first, 5)
        importer.side.begin_loads(StepMetadata(step=3, loads=[load]))
        until(lambda: "into 5" in finished(importer.side))
    del first, load
    until(lambda: unpooled() == before)


def test_a_load_that_was_reported_is_kept_by_no_one(cuda_worker: Make) -> None:
    exporter, importer = cuda_worker(1), cuda_worker(2)
    importer.side.begin_loads(StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)]))
    load = weakref.ref(importer.rank._begun["request"])
    until(lambda: "request" in finished(importer.side))
    until(lambda: load() is None)


def test_a_load_ends_though_its_copy_does_not_say_what_it_can_do(
    cuda_worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: CudaCopy) -> None:
        raise RuntimeError("no attribute for you")

    monkeypatch.setattr(CudaCopy, "when_ended", property(refuse))
    exporter, importer = cuda_worker(1), cuda_worker(2)
    importer.side.begin_loads(StepMetadata(step=2, loads=[load_of(exporter, importer, 1, 6)]))
    until(lambda: "request" in finished(importer.side))
    assert importer.side.loads.take_bad() == set()
