"""Peers' GPU memory mapped into this process: each allocation once, and let go in time."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import msgspec
import pytest

from kvshm._base.ids import BlockId, Epoch
from kvshm._shm.fd_server import FdServer
from kvshm.errors import StaleAttachment, TransportError
from kvshm.interfaces import CopyState
from kvshm.transport.cuda import vmm
from kvshm.transport.cuda.driver import CudaError
from kvshm.transport.cuda.export import HOST
from kvshm.transport.memory import KVMemory

from ..descriptors import left_open, open_files
from ..multiprocess.processes import wait_until
from .cuda_ranks import (
    BLOCK,
    EPOCH,
    NBYTES,
    Node,
    Rank,
    assert_only_own_memory,
    copied,
    details_of,
    wait_for_closer,
    wire,
    with_details,
)


def test_an_allocation_is_opened_once_and_closed_with_its_last_user(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    attachments = [two.transport.attach(descriptor) for _ in range(3)]
    assert node.machine.opens == 2
    for attachment in attachments[:2]:
        attachment.close()
        attachment.close()
    assert copied(attachments[2]) is CopyState.DONE
    attachments[2].close()
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0
    assert_only_own_memory(two)


def registered(rank: Rank) -> list[int]:
    """Where others' host memory is registered in its process."""
    return [address for address, m in rank.driver.mapped.items() if m.read_only]


def test_a_keepers_memory_is_mapped_for_reading_until_its_last_user_ends(node: Node) -> None:
    keeper, engine = node.rank(kind=HOST), node.rank()
    descriptor = wire(keeper.transport.export(EPOCH))
    attachment = engine.transport.attach(descriptor)
    assert copied(attachment) is CopyState.DONE
    assert bytes(engine.cache[:BLOCK]) == bytes([1]) * BLOCK
    assert len(registered(engine)) == 2  # the memory and the probe
    still_mapped = keeper.transport.withdraw()
    assert still_mapped() == 2
    attachment.close()
    wait_for_closer(engine.transport)
    assert not registered(engine)
    wait_until(lambda: still_mapped() == 0, "the keeper hears of it")


def test_a_driver_that_registers_nothing_for_reading_is_refused_by_name(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, engine = node.rank(kind=HOST), node.rank()
    descriptor = wire(keeper.transport.export(EPOCH))

    def refuse(*_: object, **__: object) -> int:
        raise CudaError("cuMemHostRegister", "CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(engine.driver, "host_register", refuse)
    before = open_files()
    with pytest.raises(TransportError, match="cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED"):
        engine.transport.attach(descriptor)
    wait_until(lambda: not left_open(before), "its connection is closed")


@pytest.mark.parametrize("lie", ["unsealed", "short"])
def test_a_keepers_memory_that_may_be_cut_short_or_is_too_short_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    keeper, engine = node.rank(kind=HOST), node.rank()

    def descriptor_of(_: object) -> int:
        if lie == "short":
            return descriptor_of_short(KVMemory.create(100))
        fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, NBYTES)
        return fd

    descriptor_of_short = KVMemory.read_only_fd
    monkeypatch.setattr(KVMemory, "read_only_fd", descriptor_of)
    descriptor = wire(keeper.transport.export(EPOCH))
    said = {"unsealed": "not sealed", "short": "the peer's memory has 100 bytes"}[lie]
    with pytest.raises(TransportError, match=said):
        engine.transport.attach(descriptor)
    assert not registered(engine)


def test_a_mapping_outlives_copies_begun_before_the_close(node: Node) -> None:
    one, two = node.rank(), node.rank()
    attachment = two.transport.attach(wire(one.transport.export(EPOCH)))
    stream = two.transport.copy_stream.stream
    first = attachment.begin_copy([BlockId(0)], [BlockId(0)])
    stream.owner.run()
    with two.driver.hold(stream):
        second = attachment.begin_copy([BlockId(1)], [BlockId(1)])
        attachment.close()
        assert first.poll() is CopyState.DONE
        wait_for_closer(two.transport)
        assert len(two.transport.mappings) == 2
        assert second.poll() is CopyState.PENDING
    assert second.poll() is CopyState.DONE
    assert two.cache[BLOCK] == 1
    wait_for_closer(two.transport)
    assert len(two.transport.mappings) == 0


def test_many_attachments_leave_nothing_behind(node: Node) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    for _ in range(1000):
        two.transport.attach(descriptor).close()
    two.transport._closer.close()
    assert_only_own_memory(two)
    assert len(two.driver.mapped) < 20


def test_equal_handles_of_two_exports_are_never_confused(node: Node) -> None:
    one, two = node.rank(), node.rank()
    first = wire(one.transport.export(EPOCH))
    attachment = two.transport.attach(first)
    reborn = with_details(first, export_id=details_of(first)["export_id"] + 1)
    with pytest.raises(TransportError, match="earlier export"):
        two.transport.attach(reborn)
    attachment.close()
    two.transport._closer.close()
    assert len(two.transport.mappings) == 0


def test_another_epoch_of_unchanged_memory_uses_the_mapping_that_is_there(node: Node) -> None:
    one, two = node.rank(), node.rank()
    first = wire(one.transport.export(EPOCH))
    two.transport.attach(first)
    one.transport.export(Epoch(0))
    second = wire(one.transport.export(Epoch(2)))
    assert second.details == first.details
    assert two.transport.attach(second).epoch == 2
    assert node.machine.opens == 2


def test_vmm_memory_described_anew_has_another_export_id(node: Node) -> None:
    one, two = node.rank(kind="fd"), node.rank(kind="fd")
    before = wire(one.transport.export(EPOCH))
    one.transport.export(Epoch(0))
    after = wire(one.transport.export(EPOCH))
    assert details_of(after)["export_id"] != details_of(before)["export_id"]
    with pytest.raises(StaleAttachment):
        two.transport.attach(before)
    assert copied(two.transport.attach(after)) is CopyState.DONE


def test_a_peer_that_hangs_while_it_hands_over_memory_stops_no_other_attach(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vmm, "MEMORY_SECONDS", 90.0)  # longer than anybody waits here
    hung, healthy, two = (node.rank(kind="fd") for _ in range(3))
    descriptor = wire(hung.transport.export(EPOCH))
    silent = with_details(descriptor, socket="hung")
    attached: list[Any] = []
    failures: list[TransportError] = []
    ended = threading.Event()

    def attach_to_the_silent_one() -> None:
        try:
            two.transport.attach(silent)
        except TransportError as exc:
            failures.append(exc)

    def attach_to_the_other() -> None:
        attached.append(two.transport.attach(wire(healthy.transport.export(EPOCH))))
        ended.set()

    threads = [threading.Thread(target=f) for f in (attach_to_the_silent_one, attach_to_the_other)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"{node.run_dir}/hung")
        listening.listen()
        threads[0].start()
        asked, _ = listening.accept()
        with asked:
            asked.recv(4096)  # the request is here, and no one answers it
            threads[1].start()
            assert ended.wait(30)
    for thread in threads:
        thread.join(30)
    assert len(failures) == 1
    assert copied(attached[0]) is CopyState.DONE


def open_on(path: str) -> int:
    found = os.listdir("/proc/self/fd")
    return sum(os.path.realpath(f"/proc/self/fd/{number}") == path for number in found)


@pytest.mark.parametrize(
    ("answer", "descriptors", "complaint"),
    [
        (b"garbage", 1, "undecodable"),
        (msgspec.msgpack.encode({"found": True}), 0, "0 descriptors"),
        (msgspec.msgpack.encode({"found": True}), 2, "2 descriptors"),
    ],
)
def test_a_peer_that_hands_over_something_else_than_one_memory_is_refused(
    node: Node, answer: bytes, descriptors: int, complaint: str
) -> None:
    one, two = node.rank(kind="fd"), node.rank(kind="fd")
    descriptor = wire(one.transport.export(EPOCH))
    with open("/dev/null", "rb") as file:
        server = FdServer(f"{node.run_dir}/liar", lambda _: (answer, [file.fileno()] * descriptors))
        before = open_on("/dev/null")
        with pytest.raises(TransportError, match=complaint):
            two.transport.attach(with_details(descriptor, socket="liar"))
        assert open_on("/dev/null") == before
        server.close()
    assert len(two.transport.mappings) == 0


def test_two_threads_that_want_one_allocation_open_it_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    opening, go_on = threading.Event(), threading.Event()
    real = two.driver.ipc_open

    def slow(handle: bytes, device: str) -> int:
        opening.set()
        assert go_on.wait(30)
        return real(handle, device)

    monkeypatch.setattr(two.driver, "ipc_open", slow)
    attached: list[object] = []
    threads = [
        threading.Thread(target=lambda: attached.append(two.transport.attach(descriptor)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert opening.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(attached) == 2
    assert node.machine.opens == 2  # the cache, and the probe


def test_memory_that_is_being_unmapped_is_opened_anew_only_afterwards(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, two = node.rank(), node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))
    closing, go_on = threading.Event(), threading.Event()
    real = two.driver.ipc_close

    def slow(address: int, device: str) -> None:
        closing.set()
        assert go_on.wait(30)
        real(address, device)

    monkeypatch.setattr(two.driver, "ipc_close", slow)
    two.transport.attach(descriptor).close()
    assert closing.wait(30)
    assert copied(two.transport.attach(wire(other.transport.export(EPOCH)))) is CopyState.DONE
    again: list[object] = []
    waiting = threading.Thread(target=lambda: again.append(two.transport.attach(descriptor)))
    waiting.start()
    assert again == []
    go_on.set()
    waiting.join(30)
    assert copied(again[0]) is CopyState.DONE


def test_a_peer_is_attached_though_the_driver_tells_no_length_of_its_memory(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the query answers for a pointer that another process's handle gave is undocumented."""
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))

    def refuse(address: int) -> tuple[int, int]:
        raise CudaError("cuMemGetAddressRange", "CUDA_ERROR_NOT_FOUND")

    monkeypatch.setattr(two.driver, "address_range", refuse)
    attachment = two.transport.attach(descriptor)
    assert copied(attachment, 3) is CopyState.DONE
    assert two.cache[: 3 * BLOCK] == bytes([1]) * 3 * BLOCK


def test_memory_that_is_too_short_and_cannot_be_unmapped_is_refused_as_too_short(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = node.rank(), node.rank()
    descriptor = wire(one.transport.export(EPOCH))

    def refuse(*_: object) -> None:
        raise CudaError("cuIpcCloseMemHandle", "CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(two.driver, "address_range", lambda address: (address, 1))
    monkeypatch.setattr(two.driver, "ipc_close", refuse)
    with pytest.raises(TransportError, match="has 1 bytes here"):
        two.transport.attach(descriptor)
