"""Copies of the CUDA transport: what they wait for, what a first one needs, how they fail."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvshm._base.ids import BlockId
from kvshm.errors import TransportError
from kvshm.interfaces import CopyState
from kvshm.transport.cuda import checksum
from kvshm.transport.cuda.driver import CudaError, Route
from kvshm.transport.cuda.export import HOST

from ..doubles.cuda_fake import FakeDriver
from .cuda_ranks import BLOCK, EPOCH, NBYTES, Node, copied, wire


def test_a_copy_waits_for_what_the_model_has_put_on_its_stream(node: Node) -> None:
    """A late writer of the destination must not write after the copy."""
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    late = two.driver.allocate(BLOCK)
    compute = two.driver.compute_stream()
    with two.driver.hold(compute):
        two.driver.copy(two.address, late, BLOCK, compute)
        copy = attachment.begin_copy([BlockId(0)], [BlockId(0)])
        assert copy.poll() is CopyState.PENDING
    assert copy.poll() is CopyState.DONE
    assert two.cache[0] == 1


def test_a_copy_waits_for_what_was_launched_before_its_load_and_nothing_later(node: Node) -> None:
    """Not for the forward pass of its own step, and whatever other loads wait for."""
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    late, forward = two.driver.allocate(BLOCK), two.driver.allocate(BLOCK)
    compute, block = two.driver.compute_stream(), [BlockId(0)]
    earlier = two.transport.note_launched()
    compute.owner.run()
    with two.driver.hold(compute):
        two.driver.copy(two.address, late, BLOCK, compute)
        later = two.transport.note_launched()
        two.driver.copy(forward, late, BLOCK, compute)
        assert attachment.begin_copy(block, block, after=earlier).poll() is CopyState.DONE
        copy = attachment.begin_copy(block, block, after=later)
        assert copy.poll() is CopyState.PENDING
    with two.driver.hold(compute):
        two.driver.copy(forward, late, BLOCK, compute)
        compute.owner.held = False
        for _ in range(2):  # the late write, and the note of it
            compute.owner.work.popleft()()
        compute.owner.held = True
        assert copy.poll() is CopyState.DONE
    assert two.cache[0] == 1


def test_engines_that_rule_late_writes_out_note_nothing(node: Node) -> None:
    one = node.rank()
    one.transport.late_writers = False
    assert one.transport.note_launched() is None


@pytest.mark.parametrize("broken", ["copy", "record"])
def test_a_copy_that_could_not_be_begun_writes_nothing_afterwards(
    node: Node, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Its caller gives the blocks away.  Here the second of three fragments is refused, or the
    event behind them."""
    node.machine.unreachable.add(frozenset(("gpu-0", "gpu-1")))
    one, two = node.rank("gpu-1"), node.rank("gpu-0", visible=("gpu-1",), staging=True)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert attachment.route is Route.STAGED
    stream = two.transport.copy_stream.stream
    real, calls = getattr(two.driver, broken), []

    def refuse(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == (2 if broken == "copy" else 1):
            raise CudaError(broken, "CUDA_ERROR_INVALID_VALUE")
        real(*arguments)

    monkeypatch.setattr(two.driver, broken, refuse)
    blocks = [BlockId(i) for i in range(3)]
    with pytest.raises(CudaError, match=broken):
        attachment.begin_copy(blocks, blocks)
    assert not stream.owner.work
    assert copied(attachment, 3) is CopyState.DONE
    assert two.cache[: 3 * BLOCK] == bytes([1]) * 3 * BLOCK


def test_a_rank_closes_though_its_gpu_has_failed(
    node: Node, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank(), node.rank()
    two.transport.attach(wire(one.transport.export(EPOCH)))
    two.transport.export(EPOCH)
    tried: list[object] = []
    for name in ("free_stream", "free_event", "host_free", "free"):
        real = getattr(two.driver, name)
        note = lambda thing, name=name, real=real: tried.append(name) or real(thing)  # noqa: E731
        monkeypatch.setattr(two.driver, name, note)
    two.driver.failing = True
    two.transport.close()
    two.driver.failing = False
    assert "is not freed" in caplog.text
    buffers = 3 + 1  # of the copy stream and of the prober
    assert tried.count("free_event") == buffers + 1  # and the fence
    assert tried.count("free") == buffers
    assert two.driver.streams == 0


def test_a_checksum_covers_what_the_model_has_put_on_its_stream(node: Node) -> None:
    one = node.rank()
    before = one.transport.checksum([BlockId(0)])
    compute, ones = one.driver.compute_stream(), one.driver.allocate(BLOCK)
    one.driver.copy(one.address, ones, BLOCK, compute)
    assert one.transport.checksum([BlockId(0)]) != before


def test_checksums_of_more_blocks_than_the_buffer_holds_are_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = node.rank()
    one.cache[:] = bytes(i // BLOCK for i in range(NBYTES))
    blocks = [BlockId(i) for i in (5, 0, 9, 2, 7)]
    at_once = one.transport.checksum(blocks)
    monkeypatch.setattr(checksum, "_BUFFER_BYTES", 2 * BLOCK)
    assert one.transport.checksum(blocks) == at_once
    assert len(set(at_once)) == len(blocks)


def test_more_blocks_than_prepared_buffers_hold_travel_in_one_copy(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copy = attachment.begin_copy([BlockId(0)] * 5000, [BlockId(1)] * 5000)
    assert copy.poll() is CopyState.DONE
    assert two.cache[BLOCK] == 1


def test_an_error_of_the_gpu_fails_the_copy_and_does_not_escape(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copy = attachment.begin_copy([BlockId(0)], [BlockId(0)])
    two.driver.failing = True
    assert copy.poll() is CopyState.FAILED
    two.driver.failing = False
    assert copy.poll() is CopyState.FAILED


def test_after_an_error_that_stays_nothing_of_a_copy_has_to_be_waited_for(node: Node) -> None:
    """Whatever is asked of the context from then on raises: nothing runs there any more."""
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copies = two.transport.copy_stream
    with two.driver.hold(copies.stream):
        copy = attachment.begin_copy([BlockId(0)], [BlockId(0)])
        assert copy.poll() is CopyState.PENDING
        two.driver.failing = True
        assert copy.fence()
        assert copy.poll() is CopyState.FAILED
        two.driver.failing = False


@pytest.mark.parametrize("has_batch", [True, False])
def test_a_keeper_copies_by_the_copy_engines_if_there_is_such_a_call(
    node: Node, monkeypatch: pytest.MonkeyPatch, has_batch: bool
) -> None:
    """The multiprocessors are the model's of another process."""
    engine, keeper = node.rank(), node.rank(kind=HOST)
    if not has_batch:

        def missing(*_: object) -> None:
            raise CudaError("cuMemcpyBatchAsync", "not in this driver")

        monkeypatch.setattr(keeper.driver, "copy_batch", missing)
    attachment = keeper.transport.attach(wire(engine.transport.export(EPOCH)))
    assert attachment.route is (Route.BATCH if has_batch else Route.KERNEL)
    assert copied(attachment) is CopyState.DONE
    assert bytes(keeper.cache[:BLOCK]) == bytes([1]) * BLOCK


def test_a_driver_without_batched_copies_leaves_the_kernel(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank("gpu-1"), node.rank("gpu-0")

    def missing(*_: object) -> None:
        raise CudaError("cuMemcpyBatchAsync", "not in this driver")

    monkeypatch.setattr(two.driver, "copy_batch", missing)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert attachment.route is Route.KERNEL
    assert copied(attachment) is CopyState.DONE


def test_the_kernel_has_two_programs_for_each_multiprocessor_of_the_gpu(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = node.machine.process("gpu-0", ())
    driver.multiprocessors = 7
    two = node.rank(driver=driver)
    launch, programs = driver.copy_kernel, []
    monkeypatch.setattr(
        driver, "copy_kernel", lambda *given: programs.append(given[-1]) or launch(*given)
    )
    attachment = two.transport.attach(wire(node.rank().transport.export(EPOCH)))
    assert copied(attachment) is CopyState.DONE
    assert set(programs) == {14}


def test_what_a_first_copy_needs_is_there_when_a_peer_is_attached(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling and allocating would stop the model for as long."""
    one, two = node.rank(), node.rank()
    prepared: list[Any] = []
    monkeypatch.setattr(two.driver, "prepare_kernel", prepared.append)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert attachment._table in prepared
    monkeypatch.setattr(two.driver, "allocate", None)
    monkeypatch.setattr(two.driver, "host_allocate", None)
    assert copied(attachment) is CopyState.DONE


def test_three_copies_at_a_time_allocate_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    monkeypatch.setattr(two.driver, "allocate", None)
    monkeypatch.setattr(two.driver, "host_allocate", None)
    many = [BlockId(1)] * 8192
    with two.driver.hold(two.transport.copy_stream.stream):
        copies = [attachment.begin_copy(many, many) for _ in range(3)]
    assert [copy.poll() for copy in copies] == [CopyState.DONE] * 3


def test_a_copy_that_is_begun_while_its_rank_closes_frees_nothing_twice(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copies, blocks = two.transport.copy_stream, [BlockId(1)]
    taken = copies._take_buffers(1)
    copies.close()
    left = two.driver.events
    with pytest.raises(TransportError, match="closed"):
        attachment.begin_copy(blocks, blocks)
    assert two.driver.events == left
    copies._take_buffers = lambda pairs: taken  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="closed"):
        attachment.begin_copy(blocks, blocks)
    assert two.driver.events == left - 1


def test_buffers_are_not_used_again_if_their_copy_could_not_be_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel may still run: not every error ends the context."""
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    copies, reported = two.transport.copy_stream, threading.Event()

    def fail_and_refuse(_: object) -> None:
        two.driver.failing = True
        copies.finish_ended()
        two.driver.failing = False
        raise CudaError("cuEventSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    monkeypatch.setattr(two.driver, "synchronize_event", fail_and_refuse)
    with two.driver.hold(copies.stream):
        copy = attachment.begin_copy([BlockId(1)], [BlockId(1)])
        copy.when_ended(reported.set)
        assert reported.wait(30)
        assert copy.state is CopyState.FAILED
        assert copy.buffers not in copies._free


@pytest.mark.parametrize("way", ["new_event", "host_allocate", "allocate"])
def test_a_copy_that_finds_no_memory_leaves_nothing_behind(
    node: Node, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))

    def refuse(*_: object) -> None:
        raise CudaError(way, "CUDA_ERROR_OUT_OF_MEMORY")

    many = [BlockId(1)] * 9000
    before = (two.driver.events, set(two.driver.mapped))
    with monkeypatch.context() as patched:
        patched.setattr(two.driver, way, refuse)
        for _ in range(3):
            with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
                attachment.begin_copy(many, many)
    assert (two.driver.events, set(two.driver.mapped)) == before


def test_the_kernel_is_there_before_the_engine_serves(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load it may wait for all that the GPU does."""
    prepared: list[int] = []
    note = lambda _, table: prepared.append(table.word)  # noqa: E731
    monkeypatch.setattr(FakeDriver, "prepare_kernel", note)
    one, two = node.rank(), node.rank()
    at_start = list(prepared)
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    assert {attachment._table.word, 16} <= set(at_start)  # 16: of the probe's kernel


@pytest.mark.parametrize("way", ["prepare_kernel", "new_stream", "new_event", "host_allocate"])
@pytest.mark.parametrize("calls", range(3))
def test_a_transport_that_cannot_be_made_leaves_nothing_behind(
    node: Node, monkeypatch: pytest.MonkeyPatch, way: str, calls: int
) -> None:
    """Whichever of its calls is refused."""
    driver = node.machine.process()
    left, real = calls, getattr(driver, way)

    def refuse(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise CudaError(way, "CUDA_ERROR_OUT_OF_MEMORY")
        return real(*arguments)

    if way == "prepare_kernel" and calls == 2:
        pytest.skip("there are two kernels")
    monkeypatch.setattr(driver, way, refuse)
    with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
        node.rank(driver=driver)
    assert (driver.events, driver.streams) == (0, 0)
    assert len(driver.mapped) == 1  # the cache
